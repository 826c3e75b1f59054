"""Hasten: what has waited long becomes urgent, so that nothing waits for ever."""

from __future__ import annotations

from towpath.core.checks import SECOND
from towpath.core.commands import Hasten, Hastened
from towpath.core.job import Release
from towpath.testing.suite.desk import Desk, Suite, ids, spec


class HastenSuite(Suite):
    """Of the ready ones those that are old enough, and no others."""

    def hasten(self, desk: Desk, queue: str = "q", waited: int = 10 * SECOND, limit: int = 1000) -> Hastened:
        return desk.do(Hastened, Hasten(queue, waited, limit=limit))

    def test_what_has_waited_comes_before_what_was_appended_later(self, desk: Desk) -> None:
        desk.append(spec("low", priority="low"), spec("normal"))
        desk.jump(5 * SECOND)
        desk.append(spec("later", priority="low"), spec("first", priority="high"))
        desk.jump(5 * SECOND)
        desk.append(spec("second", priority="high"))
        assert self.hasten(desk) == Hastened(2)
        assert desk.job("low").priority == desk.job("normal").priority == 0
        assert desk.job("later").priority == 10
        assert ids(desk.claim(n=9)) == ["low", "normal", "first", "second", "later"]

    def test_what_is_more_urgent_stays_so(self, desk: Desk) -> None:
        desk.append(spec("a", priority=-5), spec("b", priority=0), spec("c", priority=1))
        desk.jump(10 * SECOND)
        assert self.hasten(desk) == Hastened(1)
        assert desk.job("a").priority == -5
        with desk.unchanged():
            assert self.hasten(desk) == Hastened(0)

    def test_time_counts_from_when_a_job_could_run(self, desk: Desk) -> None:
        desk.append(spec("a", delay=20 * SECOND, priority="low"), spec("b", after=["a"], priority="low"))
        desk.jump(20 * SECOND)
        desk.upkeep()
        assert self.hasten(desk) == Hastened(0)
        desk.jump(9 * SECOND)
        assert self.hasten(desk) == Hastened(0)
        desk.jump(SECOND)
        assert self.hasten(desk) == Hastened(1)
        assert desk.job("b").priority == 10

    def test_only_the_queues_named(self, desk: Desk) -> None:
        desk.append(spec("a", "x/1"), spec("b", "x/2"), spec("c", "y"), spec("d", "z"))
        desk.jump(10 * SECOND)
        assert self.hasten(desk, "x/*,z") == Hastened(3)
        assert [desk.job(id).priority for id in "abcd"] == [0, 0, 5, 0]

    def test_inside_a_part(self, desk: Desk) -> None:
        desk.append(
            *[spec(f"{part}{n}", part=part, priority=n) for part in "st" for n in (7, 9)],
            spec("loose", priority=8),
        )
        desk.jump(10 * SECOND)
        desk.append(*[spec(f"{part}new", part=part, priority="high") for part in "st"])
        assert self.hasten(desk) == Hastened(5)
        taken = ids(desk.claim(n=9))
        assert [id for id in taken if id.startswith("s")] == ["s7", "s9", "snew"]
        assert [id for id in taken if id.startswith("t")] == ["t7", "t9", "tnew"]

    def test_at_most_so_many_at_a_time(self, desk: Desk) -> None:
        desk.append(*[spec(f"{n}", priority=5 + n % 3, part="p" if n % 2 else None) for n in range(10)])
        desk.jump(10 * SECOND)
        assert [self.hasten(desk, limit=4) for _ in range(3)] == [
            Hastened(4, True),
            Hastened(4, True),
            Hastened(2),
        ]

    def test_a_hastened_job_is_claimed_once_and_keeps_its_place(self, desk: Desk) -> None:
        desk.append(spec("a", priority="low"), spec("b", priority="low"))
        desk.jump(10 * SECOND)
        self.hasten(desk)
        claim = desk.take()
        desk.settle(claim, Release())
        assert ids(desk.claim(n=9)) == ["a", "b"]
        assert desk.claim(n=9) == []

    def test_low_is_never_starved(self, desk: Desk) -> None:
        """One job a second is run and two of high priority come in: without ageing the low one would never
        run. With 10 s of it only those of high priority that were appended before it can still come first."""
        desk.append(*[spec(f"before{n}", priority="high") for n in range(15)], spec("low", priority="low"))
        started = None
        for second in range(60):
            desk.append(*[spec(f"{second}.{n}", priority="high") for n in range(2)])
            self.hasten(desk)
            claim = desk.take()
            if claim.id == "low":
                started = second
                break
            desk.done(claim)
            desk.jump(SECOND)
        assert started == 15
