"""Hasten: jobs that have waited long become urgent, so that none waits for ever."""

from __future__ import annotations

from towpath.core.checks import SECOND
from towpath.core.commands import Hasten, Hastened
from towpath.core.job import Release
from towpath.testing.suite.harness import Harness, Suite, ids, spec


class HastenSuite(Suite):
    """Ready jobs that have waited long enough are raised, and no others."""

    def hasten(
        self, harness: Harness, queue: str = "q", waited: int = 10 * SECOND, limit: int = 1000
    ) -> Hastened:
        return harness.do(Hastened, Hasten(queue, waited, limit=limit))

    def test_what_has_waited_comes_before_what_was_appended_later(self, harness: Harness) -> None:
        harness.append(spec("low", priority="low"), spec("normal"))
        harness.jump(5 * SECOND)
        harness.append(spec("later", priority="low"), spec("first", priority="high"))
        harness.jump(5 * SECOND)
        harness.append(spec("second", priority="high"))
        assert self.hasten(harness) == Hastened(2)
        assert harness.job("low").priority == harness.job("normal").priority == 0
        assert harness.job("later").priority == 10
        assert ids(harness.claim(n=9)) == ["low", "normal", "first", "second", "later"]

    def test_what_is_more_urgent_stays_so(self, harness: Harness) -> None:
        harness.append(spec("a", priority=-5), spec("b", priority=0), spec("c", priority=1))
        harness.jump(10 * SECOND)
        assert self.hasten(harness) == Hastened(1)
        assert harness.job("a").priority == -5
        with harness.unchanged():
            assert self.hasten(harness) == Hastened(0)

    def test_time_counts_from_when_a_job_could_run(self, harness: Harness) -> None:
        harness.append(spec("a", delay=20 * SECOND, priority="low"), spec("b", after=["a"], priority="low"))
        harness.jump(20 * SECOND)
        harness.upkeep()
        assert self.hasten(harness) == Hastened(0)
        harness.jump(9 * SECOND)
        assert self.hasten(harness) == Hastened(0)
        harness.jump(SECOND)
        assert self.hasten(harness) == Hastened(1)
        assert harness.job("b").priority == 10

    def test_only_the_queues_named(self, harness: Harness) -> None:
        harness.append(spec("a", "x/1"), spec("b", "x/2"), spec("c", "y"), spec("d", "z"))
        harness.jump(10 * SECOND)
        assert self.hasten(harness, "x/*,z") == Hastened(3)
        assert [harness.job(id).priority for id in "abcd"] == [0, 0, 5, 0]

    def test_inside_a_part(self, harness: Harness) -> None:
        harness.append(
            *[spec(f"{part}{n}", part=part, priority=n) for part in "st" for n in (7, 9)],
            spec("loose", priority=8),
        )
        harness.jump(10 * SECOND)
        harness.append(*[spec(f"{part}new", part=part, priority="high") for part in "st"])
        assert self.hasten(harness) == Hastened(5)
        taken = ids(harness.claim(n=9))
        assert [id for id in taken if id.startswith("s")] == ["s7", "s9", "snew"]
        assert [id for id in taken if id.startswith("t")] == ["t7", "t9", "tnew"]

    def test_at_most_so_many_at_a_time(self, harness: Harness) -> None:
        harness.append(*[spec(f"{n}", priority=5 + n % 3, part="p" if n % 2 else None) for n in range(10)])
        harness.jump(10 * SECOND)
        assert [self.hasten(harness, limit=4) for _ in range(3)] == [
            Hastened(4, True),
            Hastened(4, True),
            Hastened(2),
        ]

    def test_a_hastened_job_is_claimed_once_and_keeps_its_place(self, harness: Harness) -> None:
        harness.append(spec("a", priority="low"), spec("b", priority="low"))
        harness.jump(10 * SECOND)
        self.hasten(harness)
        claim = harness.take()
        harness.settle(claim, Release())
        assert ids(harness.claim(n=9)) == ["a", "b"]
        assert harness.claim(n=9) == []

    def test_low_is_never_starved(self, harness: Harness) -> None:
        """One job a second is run and two of high priority are appended: without ageing the job of low
        priority would never run. With an ageing of 10 s only jobs of high priority that were appended before
        it run first."""
        harness.append(*[spec(f"before{n}", priority="high") for n in range(15)], spec("low", priority="low"))
        started = None
        for second in range(60):
            harness.append(*[spec(f"{second}.{n}", priority="high") for n in range(2)])
            self.hasten(harness)
            claim = harness.take()
            if claim.id == "low":
                started = second
                break
            harness.done(claim)
            harness.jump(SECOND)
        assert started == 15
