"""Keys: unique, replace, serial."""

from __future__ import annotations

from towpath.core.checks import HOUR, SECOND
from towpath.core.commands import Append, Placed, Renew, Renewed
from towpath.core.job import FailOutcome, Key, KeyPolicy, Reason, RetryOutcome, State, Stop
from towpath.errors import DependencyCycle, QueueFull
from towpath.testing.suite.harness import (
    LEASE,
    Harness,
    Suite,
    anyway,
    ids,
    replace,
    serial,
    spec,
    unique,
    whole_group,
)


class UniqueSuite(Suite):
    """The second append returns the first job."""

    def test_the_holder_answers_for_the_second(self, harness: Harness) -> None:
        harness.add("a", key=unique("k"))
        assert harness.append(spec("b", key=unique("k"))) == (Placed("a", 1),)
        assert harness.ledger.get("b") is None

    def test_held_while_unfinished(self, harness: Harness) -> None:
        claim = harness.started("a", key=unique("k"))
        assert harness.append(spec("b", key=unique("k"))) == (Placed("a", 1),)
        harness.settle(claim, RetryOutcome(SECOND))
        assert harness.append(spec("c", key=unique("k"))) == (Placed("a", 1),)
        harness.jump(SECOND)
        harness.done(harness.take())
        assert harness.add("d", key=unique("k")).state is State.READY

    def test_freed_by_every_ending(self, harness: Harness) -> None:
        for n, end in enumerate(("done", "failed", "canceled")):
            claim = harness.started(f"a{n}", key=unique("k"))
            if end == "canceled":
                harness.cancel(claim.id)
            _ = (
                harness.done(claim)
                if end == "done"
                else harness.settle(claim, FailOutcome() if end == "failed" else RetryOutcome())
            )
            assert harness.job(claim.id).state == end
        assert harness.add("z", key=unique("k")).state is State.READY

    def test_the_window_holds_after_the_end(self, harness: Harness) -> None:
        harness.done(harness.started("a", key=unique("k", window=10 * SECOND)))
        harness.jump(10 * SECOND - 1)
        assert harness.append(spec("b", key=unique("k"))) == (Placed("a", 1),)
        harness.jump(1)
        assert harness.add("c", key=unique("k")).state is State.READY

    def test_the_window_counts_from_the_append(self, harness: Harness) -> None:
        claim = harness.started("a", key=unique("k", window=10 * SECOND))
        harness.advance(11 * SECOND)
        assert harness.append(spec("b", key=unique("k"))) == (Placed("a", 1),)
        harness.done(claim)
        assert harness.add("c", key=unique("k")).state is State.READY

    def test_the_window_outlives_the_job(self, harness: Harness) -> None:
        harness.done(harness.started("a", key=unique("k", window=2 * HOUR)))
        harness.purge("a")
        assert harness.append(spec("b", key=unique("k"))) == (Placed("a", 1),)
        harness.jump(2 * HOUR)
        assert harness.upkeep().swept == 3
        assert harness.add("c", key=unique("k")).state is State.READY

    def test_the_refused_id_stands_for_the_winner(self, harness: Harness) -> None:
        claim = harness.started("a", key=unique("k"))
        harness.append(spec("b", key=unique("k")))
        with harness.unchanged():
            assert harness.append(spec("b")) == (Placed("a", 1),)
        harness.add("c", after=["b"])
        assert harness.at("c") == "blocked"
        harness.done(claim)
        assert harness.at("c") == "ready"

    def test_the_refused_id_is_forgotten_after_an_hour(self, harness: Harness) -> None:
        harness.add("a", key=unique("k"))
        harness.append(spec("b", key=unique("k")))
        harness.jump(HOUR)
        assert harness.upkeep().swept == 1
        assert harness.add("b").seq == 2

    def test_edges_to_a_refused_id_of_the_same_append(self, harness: Harness) -> None:
        harness.add("a", key=unique("k"))
        placed = harness.append(spec("c", after=["b"]), spec("b", key=unique("k")))
        assert placed == (Placed("c", 2), Placed("a", 1))
        harness.done(harness.take())
        assert harness.at("c") == "ready"

    def test_two_of_one_append(self, harness: Harness) -> None:
        assert harness.append(spec("a", key=unique("k")), spec("b", key=unique("k"))) == (
            Placed("a", 1),
            Placed("a", 1),
        )
        assert harness.found() == ["a"]

    def test_a_refused_id_waiting_for_the_winner_is_no_cycle(self, harness: Harness) -> None:
        harness.add("a", key=unique("k"))
        assert harness.append(spec("b", key=unique("k"), after=["a"])) == (Placed("a", 1),)

    def test_keys_are_global_in_their_namespace(self, harness: Harness) -> None:
        harness.append(
            spec("a", "x/1", key=unique("k")),
            spec("b", "y/1", key=unique("k")),
            spec("c", "p", key=unique("k")),
        )
        assert harness.append(spec("d", "x/2", key=unique("k"))) == (Placed("a", 1),)
        assert harness.append(spec("e", "r", key=unique("k"))) == (Placed("c", 3),)

    def test_a_refused_append_takes_no_key(self, harness: Harness) -> None:
        harness.set_queue(capacity=0)
        harness.refusal(QueueFull, Append((spec("a", key=unique("k")),)))
        harness.set_queue(capacity=None)
        assert harness.add("b", key=unique("k")).seq == 1

    def test_a_job_born_finished_holds_no_key(self, harness: Harness) -> None:
        harness.fail(harness.started("a"))
        harness.add("b", key=unique("k"), after=["a"])
        assert harness.at("b") == "failed/dependency"
        assert harness.add("c", key=unique("k")).state is State.READY

    def test_a_job_born_finished_keeps_its_window(self, harness: Harness) -> None:
        harness.fail(harness.started("a"))
        harness.add("b", key=unique("k", window=SECOND), after=["a"])
        assert harness.append(spec("c", key=unique("k"))) == (Placed("b", 2),)


class ReplaceSuite(Suite):
    """The newest job replaces the older ones."""

    def test_a_waiting_job_is_superseded(self, harness: Harness) -> None:
        harness.add("a", key=replace("k"))
        harness.add("b", key=replace("k"))
        assert harness.at("a", "b") == "canceled/superseded ready"
        job = harness.job("a")
        assert (job.finished_at, job.cancel_requested, job.waits) == (harness.now, None, 0)
        assert ids(harness.claim(n=5)) == ["b"]

    def test_every_waiting_state_is_superseded(self, harness: Harness) -> None:
        harness.add("dep", "other")
        harness.add("a", key=replace("k"), delay=SECOND)
        harness.add("b", key=replace("k"), after=["dep"])
        harness.add("c", key=replace("k"))
        assert harness.at("a", "b", "c") == "canceled/superseded canceled/superseded ready"

    def test_dependents_move_to_the_newer(self, harness: Harness) -> None:
        harness.add("a", key=replace("k"))
        harness.append(spec("d", after=["a"]), spec("e", after=[anyway("a")]))
        harness.add("b", key=replace("k"))
        assert harness.at("d", "e") == "blocked blocked"
        harness.done(harness.take())
        assert harness.at("d", "e") == "ready ready"

    def test_dependents_move_on_and_on(self, harness: Harness) -> None:
        harness.add("a", key=replace("k"))
        harness.add("d", after=["a"])
        harness.add("b", key=replace("k"))
        harness.add("e", after=["b"])
        harness.add("c", key=replace("k"))
        assert harness.at("a", "b", "d", "e") == "canceled/superseded canceled/superseded blocked blocked"
        claim = harness.take()
        assert claim.id == "c"
        harness.done(claim)
        assert harness.at("d", "e") == "ready ready"

    def test_a_dependent_of_both_counts_each_once(self, harness: Harness) -> None:
        harness.add("a", key=replace("k"))
        harness.append(spec("b", key=replace("k")), spec("d", after=["a", "b"]))
        assert harness.job("d").waits == 1
        harness.done(harness.take())
        assert harness.at("d") == "ready"

    def test_a_running_job_is_asked_to_stop_and_the_newer_waits(self, harness: Harness) -> None:
        claim = harness.started("a", key=replace("k"))
        harness.add("d", after=["a"])
        harness.add("b", key=replace("k"))
        assert harness.at("a", "b", "d") == "running blocked blocked"
        assert harness.job("a").cancel_requested is Reason.SUPERSEDED
        answer = harness.do(Renewed, Renew((("a", claim.fence),), LEASE))
        assert answer.cancel == (("a", Reason.SUPERSEDED),)
        harness.settle(claim, RetryOutcome(SECOND))
        assert harness.at("a", "b", "d") == "canceled/superseded ready blocked"
        harness.done(harness.take())
        assert harness.at("b", "d") == "done ready"

    def test_after_a_late_done_of_the_older_its_dependents_wait_for_the_newer(self, harness: Harness) -> None:
        claim = harness.started("a", key=replace("k"))
        harness.add("d", after=["a"])
        harness.add("b", key=replace("k"))
        harness.done(claim)
        assert harness.at("a", "b", "d") == "done ready blocked"
        harness.done(harness.take())
        assert harness.at("d") == "ready"

    def test_the_newest_inherits_the_dependents_of_a_running_one(self, harness: Harness) -> None:
        claim = harness.started("a", key=replace("k"))
        harness.append(spec("d", after=["a"]), spec("e", after=[anyway("a")]))
        harness.append(spec("b", key=replace("k")), spec("f", after=["a"]), spec("c", key=replace("k")))
        harness.settle(claim, Stop())
        assert harness.at("a", "b", "c") == "canceled/superseded canceled/superseded ready"
        assert harness.at("d", "e", "f") == "blocked blocked blocked"
        harness.fail(harness.take())
        assert harness.at("d", "e", "f") == "failed/dependency ready failed/dependency"

    def test_what_waits_for_the_running_one_cannot_be_needed_by_the_newer(self, harness: Harness) -> None:
        harness.started("a", key=replace("k"))
        harness.add("d", after=["a"])
        harness.refusal(DependencyCycle, Append((spec("b", key=replace("k"), after=["d"]),)))

    def test_a_child_that_replaces_its_parent_inherits_its_dependents(self, harness: Harness) -> None:
        claim = harness.started("a", key=replace("k"))
        harness.add("d", after=["a"])
        harness.done(claim, [spec("b", key=replace("k"))])
        assert harness.at("a", "b", "d") == "done ready blocked"
        harness.done(harness.take())
        assert harness.at("d") == "ready"

    def test_a_newer_one_that_ended_at_birth_inherits_nothing(self, harness: Harness) -> None:
        claim = harness.started("a", key=replace("k"))
        harness.fail(harness.started("x", "o"))
        harness.add("d", after=["a"])
        harness.add("b", key=replace("k"), after=["x"])
        harness.settle(claim, Stop())
        assert harness.at("a", "b", "d") == "canceled/superseded failed/dependency canceled/dependency"

    def test_running_and_waiting_only_the_newest_waits(self, harness: Harness) -> None:
        claim = harness.started("a", key=replace("k"))
        harness.add("b", key=replace("k"))
        harness.add("d", after=["b"])
        harness.add("c", key=replace("k"))
        assert harness.at("a", "b", "c", "d") == "running canceled/superseded blocked blocked"
        assert harness.job("c").waits == 1
        harness.done(claim)
        assert harness.at("c", "d") == "ready blocked"
        harness.done(harness.take())
        assert harness.at("d") == "ready"

    def test_an_earlier_request_to_stop_keeps_its_reason(self, harness: Harness) -> None:
        harness.started("a", key=replace("k"))
        harness.cancel("a")
        harness.add("b", key=replace("k"))
        assert harness.job("a").cancel_requested is Reason.REQUESTED

    def test_several_of_one_append(self, harness: Harness) -> None:
        harness.add("old", key=replace("k"))
        harness.add("d", after=["old"])
        placed = harness.append(*[spec(id, key=replace("k")) for id in "abc"], spec("e", after=["a"]))
        assert [place.id for place in placed] == ["a", "b", "c", "e"]
        assert harness.at("old", "a", "b", "c") == " ".join(["canceled/superseded"] * 3 + ["ready"])
        assert harness.at("d", "e") == "blocked blocked"
        harness.done(harness.take())
        assert harness.at("d", "e") == "ready ready"

    def test_several_of_one_append_behind_a_running_one(self, harness: Harness) -> None:
        claim = harness.started("old", key=replace("k"))
        harness.append(*[spec(id, key=replace("k")) for id in "abc"])
        assert harness.at("a", "b", "c") == "canceled/superseded canceled/superseded blocked"
        harness.done(claim)
        assert harness.at("c") == "ready"

    def test_what_waited_for_the_newer_is_a_cycle(self, harness: Harness) -> None:
        harness.add("old", key=replace("k"))
        harness.add("x", after=["old"])
        error = harness.refusal(DependencyCycle, Append((spec("new", key=replace("k"), after=["x"]),)))
        assert sorted(error.details["ids"]) == ["new", "x"]

    def test_the_newer_cannot_wait_for_the_one_it_replaces(self, harness: Harness) -> None:
        harness.add("old", key=replace("k"))
        error = harness.refusal(DependencyCycle, Append((spec("new", key=replace("k"), after=["old"]),)))
        assert error.details["ids"] == ("new",)

    def test_a_cycle_through_a_chain_and_a_group(self, harness: Harness) -> None:
        harness.open("g")
        harness.add("old", key=replace("k"))
        harness.add("x", after=["old"], group="g")
        harness.add("y", after=[whole_group("g")])
        harness.refusal(DependencyCycle, Append((spec("new", key=replace("k"), after=["y"]),)))

    def test_a_closed_group_waits_for_nobody(self, harness: Harness) -> None:
        harness.open("g")
        harness.add("old", key=replace("k"), group="g")
        harness.seal("g")
        harness.cancel("old")
        harness.revive("old")
        harness.add("new", key=replace("k"), after=[whole_group("g", run_anyway=True)])
        assert harness.at("old", "new") == "canceled/superseded ready"

    def test_the_newer_may_wait_for_a_running_one_it_replaces(self, harness: Harness) -> None:
        claim = harness.started("old", key=replace("k"))
        harness.add("new", key=replace("k"), after=["old"])
        harness.done(claim)
        assert harness.at("new") == "ready"

    def test_a_finished_holder_is_not_touched(self, harness: Harness) -> None:
        harness.done(harness.started("a", key=replace("k")))
        harness.add("b", key=replace("k"))
        assert harness.at("a", "b") == "done ready"

    def test_replace_ignores_the_window_of_a_finished_unique_job(self, harness: Harness) -> None:
        harness.done(harness.started("a", key=unique("k", window=HOUR)))
        assert harness.add("b", key=replace("k")).state is State.READY

    def test_replace_supersedes_a_waiting_unique_job_and_unique_answers_it(self, harness: Harness) -> None:
        harness.add("a", key=unique("k"))
        harness.add("b", key=replace("k"))
        assert harness.at("a", "b") == "canceled/superseded ready"
        assert harness.append(spec("c", key=unique("k"))) == (Placed("b", 2),)

    def test_a_superseded_member_has_a_counter_of_its_own(self, harness: Harness) -> None:
        harness.open("g")
        harness.add("a", key=replace("k"), group="g")
        harness.add("b", key=replace("k"), group="g")
        group = harness.group("g")
        assert (group.total, group.unfinished, group.canceled, group.superseded) == (2, 1, 0, 1)
        harness.seal("g")
        harness.done(harness.take())
        assert harness.group("g").outcome is State.DONE

    def test_the_running_one_may_be_lost_too(self, harness: Harness) -> None:
        harness.started("a", key=replace("k"))
        harness.add("b", key=replace("k"))
        harness.lose()
        assert harness.at("a", "b") == "canceled/superseded ready"

    def test_the_newer_may_be_canceled_while_it_waits_for_the_older(self, harness: Harness) -> None:
        claim = harness.started("a", key=replace("k"))
        harness.add("b", key=replace("k"))
        harness.cancel("b")
        harness.done(claim)
        assert harness.at("a", "b") == "done canceled/requested"
        assert harness.add("c", key=replace("k")).state is State.READY


class SerialSuite(Suite):
    """One at a time, from claim to settle."""

    def test_one_at_a_time(self, harness: Harness) -> None:
        harness.append(
            spec("a", key=serial("k")), spec("b", key=serial("k")), spec("c", key=serial("other")), spec("d")
        )
        claims = harness.claim(n=9)
        assert sorted(ids(claims)) == ["a", "c", "d"]
        assert harness.claim(n=9) == []
        harness.done(next(claim for claim in claims if claim.id == "a"))
        assert ids(harness.claim(n=9)) == ["b"]

    def test_a_serial_key_is_a_part_with_a_cap_of_one(self, harness: Harness) -> None:
        job = harness.add("a", key=serial("k"))
        assert (job.part, job.key, job.key_policy) == ("serial:k", "k", KeyPolicy.SERIAL)
        assert (harness.part("serial:k").cap, harness.part("serial:k").ready) == (1, 1)

    def test_no_order_is_promised_across_a_retry_but_priority_and_seq_rule(self, harness: Harness) -> None:
        harness.append(spec("a", key=serial("k")), spec("b", key=serial("k"), priority="high"))
        claim = harness.take()
        assert claim.id == "b"
        harness.settle(claim, RetryOutcome(SECOND))
        assert ids(harness.claim(n=2)) == ["a"]

    def test_a_serial_key_is_no_unique_key(self, harness: Harness) -> None:
        harness.add("a", key=Key("k"))
        assert [place.id for place in harness.append(spec("b", key=serial("k")))] == ["b"]

    def test_serial_keys_belong_to_their_queue(self, harness: Harness) -> None:
        harness.append(spec("a", "q", key=serial("k")), spec("b", "r", key=serial("k")))
        assert ids(harness.claim("q", "r")) == ["a", "b"]
