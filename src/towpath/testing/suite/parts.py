"""Parts: caps, rates, weights and the fair share inside a queue."""

from __future__ import annotations

from collections import Counter

from towpath.core.checks import SECOND
from towpath.core.commands import Append, Want
from towpath.core.job import Release, RetryOutcome
from towpath.core.limits import TURN, Rate, interval_of
from towpath.errors import PartFull, QueueFull, TooManyAppends
from towpath.testing.clock import START
from towpath.testing.suite.harness import Harness, Suite, ids, need, serial, spec


def _fill(harness: Harness, **sizes: int) -> None:
    """`a=3` appends a0 to a2 of the part a, one part after the other; `_` is no part."""
    for part, size in sizes.items():
        harness.append(*[spec(f"{part}{n}", part=None if part == "_" else part) for n in range(size)])


class PartSuite(Suite):
    """Limits of a part, and turns between parts."""

    def test_counts_of_a_part(self, harness: Harness) -> None:
        _fill(harness, a=3)
        harness.append(spec("s", part="a", delay=1), spec("b", part="a", after=["a0"]))
        harness.claim()
        part = harness.part("a")
        assert (part.queue, part.name, part.ready, part.running) == ("q", "a", 2, 1)
        assert (part.paused, part.why, part.cap, part.rate, part.weight) == (False, None, None, None, 1)

    def test_a_pause_keeps_the_reason_of_a_limit(self, harness: Harness) -> None:
        harness.set_part("a", cap=2, why="two lines")
        harness.set_part("a", paused=True, why="unpaid")
        assert (harness.part("a").paused, harness.part("a").why) == (True, "unpaid; limits: two lines")
        harness.set_part("a", paused=False, why=None)
        assert (harness.part("a").paused, harness.part("a").why) == (False, "two lines")
        harness.set_queue(cap=2, why="two lines")
        harness.set_queue(paused=True, why=None)
        harness.set_queue(paused=False, why=None)
        assert harness.ledger.queues()["q"].why == "two lines"

    def test_a_reason_may_contain_the_separator_of_reasons(self, harness: Harness) -> None:
        for given in ("a; limits: b", "; limits: ", "a; limits: b; limits: c"):
            stored = given.replace("; limits: ", ", limits: ")
            harness.set_part("a", paused=True, why=given)
            assert harness.part("a").why == stored
            harness.set_part("a", paused=False, why=None)
            assert harness.part("a").why is None, "the pause is over, and so is its reason"
        harness.set_queue(cap=2, why="x; limits: y")
        harness.set_queue(paused=True, why="p; limits: q")
        assert harness.ledger.queues()["q"].why == "p, limits: q; limits: x, limits: y"
        harness.set_queue(paused=False, why=None)
        assert harness.ledger.queues()["q"].why == "x, limits: y"

    def test_no_row_before_the_first_ready_job(self, harness: Harness) -> None:
        harness.add("a", part="a", delay=SECOND)
        assert harness.ledger.parts("q") == {}
        assert harness.ledger.parts("nowhere") == {}
        harness.jump(SECOND)
        harness.upkeep()
        assert list(harness.ledger.parts("q")) == ["a"]

    def test_parts_take_turns(self, harness: Harness) -> None:
        _fill(harness, a=4, b=2, c=1)
        assert ids(harness.claim(n=7)) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]

    def test_turns_go_on_from_claim_to_claim(self, harness: Harness) -> None:
        _fill(harness, a=3, b=3)
        assert [harness.take().id for _ in range(6)] == ["a0", "b0", "a1", "b1", "a2", "b2"]

    def test_no_part_takes_turns_like_one_part(self, harness: Harness) -> None:
        _fill(harness, a=3, _=3)
        taken = [harness.take().id for _ in range(6)]
        assert sorted(taken[:2]) == ["_0", "a0"]
        assert sorted(taken[2:4]) == ["_1", "a1"]
        assert sorted(taken[4:]) == ["_2", "a2"]

    def test_inside_a_part_priority_and_seq_rule(self, harness: Harness) -> None:
        harness.append(
            spec("a", part="p"), spec("b", part="p", priority="high"), spec("c", part="p", priority="low")
        )
        assert ids(harness.claim(n=3)) == ["b", "a", "c"]

    def test_priority_does_not_jump_the_turn_of_another_part(self, harness: Harness) -> None:
        _fill(harness, a=2)
        harness.append(spec("b0", part="b", priority="high"), spec("b1", part="b", priority="high"))
        assert ids(harness.claim(n=4)) == ["a0", "b0", "a1", "b1"]

    def test_a_part_that_was_away_cannot_claim_the_turns_it_missed(self, harness: Harness) -> None:
        _fill(harness, a=20)
        harness.claim(n=10)
        _fill(harness, b=10)
        assert Counter(id[0] for id in ids(harness.claim(n=8))) == {"a": 4, "b": 4}

    def test_weights(self, harness: Harness) -> None:
        _fill(harness, a=40, b=40)
        harness.set_part("a", weight=3)
        assert Counter(id[0] for id in ids(harness.claim(n=40))) == {"a": 30, "b": 10}

    def test_weights_hold_over_single_claims(self, harness: Harness) -> None:
        _fill(harness, a=40, b=40)
        harness.set_part("b", weight=4)
        assert Counter(harness.take().id[0] for _ in range(20)) == {"a": 4, "b": 16}

    def test_served_and_clock_move_with_each_turn(self, harness: Harness) -> None:
        _fill(harness, a=2, b=1)
        harness.set_part("a", weight=4)
        harness.claim(n=2)
        assert (harness.part("a").served, harness.part("b").served) == (TURN // 4, TURN)

    def test_a_paused_part_gives_nothing(self, harness: Harness) -> None:
        _fill(harness, a=2, b=2)
        harness.set_part("a", paused=True, why="blocked tenant")
        assert (harness.part("a").paused, harness.part("a").why) == (True, "blocked tenant")
        assert ids(harness.claim(n=9)) == ["b0", "b1"]
        harness.set_part("a", paused=False)
        assert ids(harness.claim(n=9)) == ["a0", "a1"]

    def test_a_held_part_gives_nothing_before_its_time(self, harness: Harness) -> None:
        _fill(harness, a=1)
        harness.set_part("a", not_before=START + SECOND)
        harness.jump(SECOND - 1)
        assert harness.claim() == []
        harness.jump(1)
        assert ids(harness.claim()) == ["a0"]

    def test_a_cap_bounds_a_part(self, harness: Harness) -> None:
        _fill(harness, a=3, b=3)
        harness.set_part("a", cap=1)
        first = harness.claim(n=9)
        assert ids(first) == ["a0", "b0", "b1", "b2"]
        harness.settle(first[0], RetryOutcome())
        assert ids(harness.claim(n=9)) == ["a0"]

    def test_a_cap_of_the_queue_binds_all_parts(self, harness: Harness) -> None:
        _fill(harness, a=3, b=3)
        harness.set_queue(cap=3)
        assert ids(harness.claim(n=9)) == ["a0", "b0", "a1"]

    def test_a_rate_bounds_a_part(self, harness: Harness) -> None:
        _fill(harness, a=3, b=3)
        harness.set_part("a", rate=Rate(1))
        assert ids(harness.claim(n=9)) == ["a0", "b0", "b1", "b2"]
        assert harness.part("a").next_at == START + SECOND
        assert harness.claim(n=9) == []
        harness.jump(SECOND)
        assert ids(harness.claim(n=9)) == ["a1"]

    def test_a_queue_that_is_paused_pauses_its_parts(self, harness: Harness) -> None:
        _fill(harness, a=1)
        harness.set_queue(paused=True)
        assert harness.claim() == []

    def test_all_parts_closed_leaves_what_has_no_part(self, harness: Harness) -> None:
        _fill(harness, a=2, _=3)
        harness.set_part("a", paused=True)
        assert ids(harness.claim(n=2)) == ["_0", "_1"]
        harness.set_part("a", paused=False)
        assert sorted(ids(harness.claim(n=2))) == ["_2", "a0"]

    def test_without_parts_there_is_no_rotation(self, harness: Harness) -> None:
        _fill(harness, _=3)
        harness.claim(n=2)
        _fill(harness, a=1)
        assert ids(harness.claim(n=1)) == ["_2"]

    def test_expired_jobs_of_a_part_do_not_hide_the_next(self, harness: Harness) -> None:
        harness.append(spec("a", part="p", ttl=SECOND), spec("b", part="p"))
        harness.jump(SECOND)
        assert ids(harness.claim(n=9)) == ["b"]

    def test_a_part_with_only_expired_jobs_gives_nothing(self, harness: Harness) -> None:
        harness.append(spec("a", part="p", ttl=SECOND), spec("b", part="r"))
        harness.jump(SECOND)
        assert ids(harness.claim(n=9)) == ["b"]
        assert harness.part("p").served == 0

    def test_parts_of_the_same_name_in_two_queues_are_two(self, harness: Harness) -> None:
        harness.append(spec("a", "x", part="p"), spec("b", "y", part="p"))
        harness.set_part("p", "x", paused=True)
        assert ids(harness.claim("x", "y")) == ["b"]

    def test_a_pattern_keeps_the_turns_of_each_queue(self, harness: Harness) -> None:
        harness.append(*[spec(f"x{part}{n}", "t/x", part=part) for part in "ab" for n in range(2)])
        harness.append(*[spec(f"y{n}", "t/y", priority="high") for n in range(2)])
        assert ids(harness.claim(Want("t/*", 9))) == ["y0", "y1", "xa0", "xb0", "xa1", "xb1"]

    def test_only_what_was_taken_moves_served(self, harness: Harness) -> None:
        harness.append(spec("x", "t/x", part="p", priority="low"), spec("y", "t/y", part="p"))
        assert ids(harness.claim("t/*", n=1)) == ["y"]
        assert (harness.part("p", "t/x").served, harness.part("p", "t/y").served) == (0, TURN)

    def test_part_settings_left_out_stay(self, harness: Harness) -> None:
        harness.set_part("p", paused=True, why="x", cap=4, rate=Rate(3), weight=7, not_before=START)
        before = harness.part("p")
        assert (before.paused, before.why, before.cap, before.rate) == (True, "x", 4, Rate(3))
        assert (before.weight, before.next_at) == (7, START)
        harness.set_part("p")
        assert harness.part("p") == before
        harness.set_part("p", why=None, cap=None, rate=None)
        assert (harness.part("p").why, harness.part("p").cap, harness.part("p").rate) == (None, None, None)

    def test_setting_a_part_twice_is_the_same(self, harness: Harness) -> None:
        harness.set_part("p", cap=3)
        with harness.unchanged():
            harness.set_part("p", cap=3)

    def test_setting_a_part_makes_no_queue(self, harness: Harness) -> None:
        harness.set_part("p", "new", cap=3)
        assert "new" not in harness.ledger.queues()
        assert list(harness.ledger.parts("new")) == ["p"]

    def test_a_part_can_be_set_before_its_first_job(self, harness: Harness) -> None:
        harness.set_part("a", cap=1)
        _fill(harness, a=3)
        assert ids(harness.claim(n=9)) == ["a0"]

    def test_a_serial_part_may_be_paused_like_any_other(self, harness: Harness) -> None:
        harness.add("a", key=serial("k"))
        harness.set_part("serial:k", paused=True)
        assert harness.claim() == []
        assert harness.part("serial:k").cap == 1

    def test_a_serial_part_set_before_its_first_job_has_its_cap(self, harness: Harness) -> None:
        harness.set_part("serial:k", weight=2)
        assert harness.part("serial:k").cap == 1

    def test_released_jobs_keep_their_place(self, harness: Harness) -> None:
        _fill(harness, a=2)
        harness.settle(harness.take(), Release())
        assert ids(harness.claim(n=2)) == ["a0", "a1"]

    def test_a_flood_of_one_part_does_not_hold_up_the_others(self, harness: Harness) -> None:
        _fill(harness, flood=1000)
        harness.append(*[spec(f"{tenant}{n}", part=tenant) for tenant in "abcdefghi" for n in range(20)])
        harness.set_queue(cap=8)
        left, claims = 180, 0
        while left:
            taken = harness.claim(n=8)
            left -= sum(claim.job.part != "flood" for claim in taken)
            claims += 1
            for claim in taken:
                harness.done(claim)
        # Alone they would need 180 / 8 claims; the flood has a tenth of the turns.
        assert claims == -(-200 // 8)

    def test_a_part_that_comes_late_does_not_wait_behind_a_flood(self, harness: Harness) -> None:
        _fill(harness, flood=100)
        harness.claim(n=50)
        harness.add("late", part="tenant")
        assert "late" in ids(harness.claim(n=2))

    def test_a_rate_is_exact_over_time(self, harness: Harness) -> None:
        _fill(harness, a=200)
        harness.set_part("a", rate=Rate(7, 1, 3))
        started = []
        for _ in range(1001):
            started += [harness.now for _ in harness.claim(n=9)]
            harness.jump(SECOND // 100)
        interval = -(-SECOND // 7)
        assert len(started) == 3 + 10 * SECOND // interval
        assert all(started[n + 3] - started[n] >= interval for n in range(len(started) - 3))

    def test_many_parts_each_get_one(self, harness: Harness) -> None:
        harness.append(*[spec(f"{part:03}-{n}", part=f"p{part:03}") for part in range(200) for n in range(2)])
        taken = harness.claim(n=200)
        assert len({claim.job.part for claim in taken}) == 200


class QuotaSuite(Suite):
    """The capacity and the append rate of a part: appends of one tenant beyond its limits are refused, and no
    others."""

    def test_a_part_takes_as_many_as_its_capacity(self, harness: Harness) -> None:
        harness.set_part("p", capacity=3)
        harness.append(
            spec("a", part="p"), spec("b", part="p", delay=SECOND), spec("c", part="p", after=[need("a")])
        )
        refusal = harness.refusal(PartFull, Append((spec("d", part="p"),)))
        assert refusal.details == {
            "queue": "q",
            "part": "p",
            "depth": 3,
            "capacity": 3,
            "asked": 1,
            "retry_after": 1.0,
        }
        assert "part p of queue q is full: 3 of 3 waiting, 1 more asked" in str(refusal)
        harness.append(spec("e", part="r"), spec("f"))
        assert sorted(ids(harness.claim(n=9))) == ["a", "e", "f"]
        harness.append(spec("d", part="p"))
        harness.refusal(PartFull, Append((spec("g", part="p"),)))

    def test_an_append_is_refused_as_a_whole(self, harness: Harness) -> None:
        harness.set_part("p", capacity=2)
        with harness.unchanged():
            harness.refusal(PartFull, Append(tuple(spec(f"a{n}", part="p" if n else "r") for n in range(4))))
        harness.append(*[spec(f"a{n}", part="p" if n else "r") for n in range(3)])

    def test_a_repeated_append_is_not_refused(self, harness: Harness) -> None:
        harness.set_part("p", capacity=1)
        harness.append(spec("a", part="p"))
        harness.append(spec("a", part="p"))

    def test_children_are_not_refused(self, harness: Harness) -> None:
        harness.set_part("p", capacity=1, append_rate=Rate(1))
        claim = harness.started("a", part="p")
        harness.append(spec("b", part="r"))
        harness.done(claim, spawn=[spec("c", part="p"), spec("d", part="p")])
        assert harness.part("p").ready == 2

    def test_a_serial_key_is_a_part_with_a_capacity(self, harness: Harness) -> None:
        harness.set_part("serial:k", capacity=1)
        harness.append(spec("a", key=serial("k")))
        harness.refusal(PartFull, Append((spec("b", key=serial("k")),)))

    def test_several_appends_in_a_batch_are_counted_one_by_one(self, harness: Harness) -> None:
        harness.set_part("p", capacity=2)
        answers = harness.ask(*[Append((spec(f"a{n}", part="p"),)) for n in range(4)])
        assert [isinstance(answer, PartFull) for answer in answers] == [False, False, True, True]

    def test_a_rate_of_appends(self, harness: Harness) -> None:
        harness.set_part("p", append_rate=Rate(2, 1, 2))
        harness.append(spec("a", part="p"), spec("b", part="p"))
        refusal = harness.refusal(TooManyAppends, Append((spec("c", part="p"),)))
        assert refusal.details == {"queue": "q", "part": "p", "rate": "2/s:2", "asked": 1, "retry_after": 0.5}
        assert isinstance(refusal, QueueFull)
        harness.append(spec("d", part="r"), spec("e"))
        harness.jump(SECOND // 2)
        harness.append(spec("c", part="p"))
        harness.refusal(TooManyAppends, Append((spec("f", part="p"),)))

    def test_more_than_a_burst_needs_the_whole_burst_and_pays_for_the_rest(self, harness: Harness) -> None:
        harness.set_part("p", append_rate=Rate(1, 1, 2))
        harness.append(*[spec(f"a{n}", part="p") for n in range(5)])
        harness.jump(3 * SECOND)
        assert harness.refusal(TooManyAppends, Append((spec("b", part="p"),))).retry_after == 1.0
        harness.jump(SECOND)
        harness.append(spec("b", part="p"))

    def test_limits_are_seen_and_lifted(self, harness: Harness) -> None:
        harness.set_part("p", capacity=1, append_rate=Rate(3))
        view = harness.part("p")
        assert (view.capacity, view.append_rate, view.append_at) == (1, Rate(3), 0)
        harness.append(spec("a", part="p"))
        assert harness.part("p").append_at == harness.now + interval_of(Rate(3))
        harness.set_part("p", capacity=None, append_rate=None)
        harness.append(spec("b", part="p"), spec("c", part="p"))

    def test_a_paused_part_keeps_its_limits(self, harness: Harness) -> None:
        harness.set_part("p", capacity=1)
        harness.set_part("p", paused=True)
        assert harness.part("p").capacity == 1
