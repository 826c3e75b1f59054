"""Keys: unique, replace, serial."""

from __future__ import annotations

from towpath.core.checks import HOUR, SECOND
from towpath.core.commands import Append, Placed, Renew, Renewed
from towpath.core.job import Fail, Key, KeyPolicy, Reason, Retry, State, Stop
from towpath.errors import DependencyCycle, QueueFull
from towpath.testing.suite.desk import (
    LEASE,
    Desk,
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
    """The second append answers the first job."""

    def test_the_holder_answers_for_the_second(self, desk: Desk) -> None:
        desk.add("a", key=unique("k"))
        assert desk.append(spec("b", key=unique("k"))) == (Placed("a", 1),)
        assert desk.ledger.get("b") is None

    def test_held_while_unfinished(self, desk: Desk) -> None:
        claim = desk.started("a", key=unique("k"))
        assert desk.append(spec("b", key=unique("k"))) == (Placed("a", 1),)
        desk.settle(claim, Retry(SECOND))
        assert desk.append(spec("c", key=unique("k"))) == (Placed("a", 1),)
        desk.jump(SECOND)
        desk.done(desk.take())
        assert desk.add("d", key=unique("k")).state is State.READY

    def test_freed_by_every_ending(self, desk: Desk) -> None:
        for n, end in enumerate(("done", "failed", "canceled")):
            claim = desk.started(f"a{n}", key=unique("k"))
            if end == "canceled":
                desk.cancel(claim.id)
            _ = (
                desk.done(claim)
                if end == "done"
                else desk.settle(claim, Fail() if end == "failed" else Retry())
            )
            assert desk.job(claim.id).state == end
        assert desk.add("z", key=unique("k")).state is State.READY

    def test_the_window_holds_after_the_end(self, desk: Desk) -> None:
        desk.done(desk.started("a", key=unique("k", window=10 * SECOND)))
        desk.jump(10 * SECOND - 1)
        assert desk.append(spec("b", key=unique("k"))) == (Placed("a", 1),)
        desk.jump(1)
        assert desk.add("c", key=unique("k")).state is State.READY

    def test_the_window_counts_from_the_append(self, desk: Desk) -> None:
        claim = desk.started("a", key=unique("k", window=10 * SECOND))
        desk.advance(11 * SECOND)
        assert desk.append(spec("b", key=unique("k"))) == (Placed("a", 1),)
        desk.done(claim)
        assert desk.add("c", key=unique("k")).state is State.READY

    def test_the_window_outlives_the_job(self, desk: Desk) -> None:
        desk.done(desk.started("a", key=unique("k", window=2 * HOUR)))
        desk.purge("a")
        assert desk.append(spec("b", key=unique("k"))) == (Placed("a", 1),)
        desk.jump(2 * HOUR)
        assert desk.upkeep().swept == 3
        assert desk.add("c", key=unique("k")).state is State.READY

    def test_the_refused_id_stands_for_the_winner(self, desk: Desk) -> None:
        claim = desk.started("a", key=unique("k"))
        desk.append(spec("b", key=unique("k")))
        with desk.unchanged():
            assert desk.append(spec("b")) == (Placed("a", 1),)
        desk.add("c", after=["b"])
        assert desk.at("c") == "blocked"
        desk.done(claim)
        assert desk.at("c") == "ready"

    def test_the_refused_id_is_forgotten_after_an_hour(self, desk: Desk) -> None:
        desk.add("a", key=unique("k"))
        desk.append(spec("b", key=unique("k")))
        desk.jump(HOUR)
        assert desk.upkeep().swept == 1
        assert desk.add("b").seq == 2

    def test_edges_to_a_refused_id_of_the_same_append(self, desk: Desk) -> None:
        desk.add("a", key=unique("k"))
        placed = desk.append(spec("c", after=["b"]), spec("b", key=unique("k")))
        assert placed == (Placed("c", 2), Placed("a", 1))
        desk.done(desk.take())
        assert desk.at("c") == "ready"

    def test_two_of_one_append(self, desk: Desk) -> None:
        assert desk.append(spec("a", key=unique("k")), spec("b", key=unique("k"))) == (
            Placed("a", 1),
            Placed("a", 1),
        )
        assert desk.found() == ["a"]

    def test_a_refused_id_waiting_for_the_winner_is_no_cycle(self, desk: Desk) -> None:
        desk.add("a", key=unique("k"))
        assert desk.append(spec("b", key=unique("k"), after=["a"])) == (Placed("a", 1),)

    def test_keys_are_global_in_their_namespace(self, desk: Desk) -> None:
        desk.append(
            spec("a", "x/1", key=unique("k")),
            spec("b", "y/1", key=unique("k")),
            spec("c", "p", key=unique("k")),
        )
        assert desk.append(spec("d", "x/2", key=unique("k"))) == (Placed("a", 1),)
        assert desk.append(spec("e", "r", key=unique("k"))) == (Placed("c", 3),)

    def test_a_refused_append_takes_no_key(self, desk: Desk) -> None:
        desk.set_queue(capacity=0)
        desk.refusal(QueueFull, Append((spec("a", key=unique("k")),)))
        desk.set_queue(capacity=None)
        assert desk.add("b", key=unique("k")).seq == 1

    def test_a_job_born_finished_holds_no_key(self, desk: Desk) -> None:
        desk.fail(desk.started("a"))
        desk.add("b", key=unique("k"), after=["a"])
        assert desk.at("b") == "failed/dependency"
        assert desk.add("c", key=unique("k")).state is State.READY

    def test_a_job_born_finished_keeps_its_window(self, desk: Desk) -> None:
        desk.fail(desk.started("a"))
        desk.add("b", key=unique("k", window=SECOND), after=["a"])
        assert desk.append(spec("c", key=unique("k"))) == (Placed("b", 2),)


class ReplaceSuite(Suite):
    """The newest wins."""

    def test_a_waiting_job_is_superseded(self, desk: Desk) -> None:
        desk.add("a", key=replace("k"))
        desk.add("b", key=replace("k"))
        assert desk.at("a", "b") == "canceled/superseded ready"
        job = desk.job("a")
        assert (job.finished_at, job.cancel_requested, job.waits) == (desk.now, None, 0)
        assert ids(desk.claim(n=5)) == ["b"]

    def test_every_waiting_state_is_superseded(self, desk: Desk) -> None:
        desk.add("dep", "other")
        desk.add("a", key=replace("k"), delay=SECOND)
        desk.add("b", key=replace("k"), after=["dep"])
        desk.add("c", key=replace("k"))
        assert desk.at("a", "b", "c") == "canceled/superseded canceled/superseded ready"

    def test_dependents_move_to_the_newer(self, desk: Desk) -> None:
        desk.add("a", key=replace("k"))
        desk.append(spec("d", after=["a"]), spec("e", after=[anyway("a")]))
        desk.add("b", key=replace("k"))
        assert desk.at("d", "e") == "blocked blocked"
        desk.done(desk.take())
        assert desk.at("d", "e") == "ready ready"

    def test_dependents_move_on_and_on(self, desk: Desk) -> None:
        desk.add("a", key=replace("k"))
        desk.add("d", after=["a"])
        desk.add("b", key=replace("k"))
        desk.add("e", after=["b"])
        desk.add("c", key=replace("k"))
        assert desk.at("a", "b", "d", "e") == "canceled/superseded canceled/superseded blocked blocked"
        claim = desk.take()
        assert claim.id == "c"
        desk.done(claim)
        assert desk.at("d", "e") == "ready ready"

    def test_a_dependent_of_both_counts_each_once(self, desk: Desk) -> None:
        desk.add("a", key=replace("k"))
        desk.append(spec("b", key=replace("k")), spec("d", after=["a", "b"]))
        assert desk.job("d").waits == 1
        desk.done(desk.take())
        assert desk.at("d") == "ready"

    def test_a_running_job_is_asked_to_stop_and_the_newer_waits(self, desk: Desk) -> None:
        claim = desk.started("a", key=replace("k"))
        desk.add("d", after=["a"])
        desk.add("b", key=replace("k"))
        assert desk.at("a", "b", "d") == "running blocked blocked"
        assert desk.job("a").cancel_requested is Reason.SUPERSEDED
        answer = desk.do(Renewed, Renew((("a", claim.fence),), LEASE))
        assert answer.cancel == (("a", Reason.SUPERSEDED),)
        desk.settle(claim, Retry(SECOND))
        assert desk.at("a", "b", "d") == "canceled/superseded ready blocked"
        desk.done(desk.take())
        assert desk.at("b", "d") == "done ready"

    def test_after_a_late_done_of_the_older_its_dependents_wait_for_the_newer(self, desk: Desk) -> None:
        claim = desk.started("a", key=replace("k"))
        desk.add("d", after=["a"])
        desk.add("b", key=replace("k"))
        desk.done(claim)
        assert desk.at("a", "b", "d") == "done ready blocked"
        desk.done(desk.take())
        assert desk.at("d") == "ready"

    def test_the_newest_inherits_the_dependents_of_a_running_one(self, desk: Desk) -> None:
        claim = desk.started("a", key=replace("k"))
        desk.append(spec("d", after=["a"]), spec("e", after=[anyway("a")]))
        desk.append(spec("b", key=replace("k")), spec("f", after=["a"]), spec("c", key=replace("k")))
        desk.settle(claim, Stop())
        assert desk.at("a", "b", "c") == "canceled/superseded canceled/superseded ready"
        assert desk.at("d", "e", "f") == "blocked blocked blocked"
        desk.fail(desk.take())
        assert desk.at("d", "e", "f") == "failed/dependency ready failed/dependency"

    def test_what_waits_for_the_running_one_cannot_be_needed_by_the_newer(self, desk: Desk) -> None:
        desk.started("a", key=replace("k"))
        desk.add("d", after=["a"])
        desk.refusal(DependencyCycle, Append((spec("b", key=replace("k"), after=["d"]),)))

    def test_a_child_that_replaces_its_parent_inherits_its_dependents(self, desk: Desk) -> None:
        claim = desk.started("a", key=replace("k"))
        desk.add("d", after=["a"])
        desk.done(claim, [spec("b", key=replace("k"))])
        assert desk.at("a", "b", "d") == "done ready blocked"
        desk.done(desk.take())
        assert desk.at("d") == "ready"

    def test_a_newer_one_that_ended_at_birth_inherits_nothing(self, desk: Desk) -> None:
        claim = desk.started("a", key=replace("k"))
        desk.fail(desk.started("x", "o"))
        desk.add("d", after=["a"])
        desk.add("b", key=replace("k"), after=["x"])
        desk.settle(claim, Stop())
        assert desk.at("a", "b", "d") == "canceled/superseded failed/dependency canceled/dependency"

    def test_running_and_waiting_only_the_newest_waits(self, desk: Desk) -> None:
        claim = desk.started("a", key=replace("k"))
        desk.add("b", key=replace("k"))
        desk.add("d", after=["b"])
        desk.add("c", key=replace("k"))
        assert desk.at("a", "b", "c", "d") == "running canceled/superseded blocked blocked"
        assert desk.job("c").waits == 1
        desk.done(claim)
        assert desk.at("c", "d") == "ready blocked"
        desk.done(desk.take())
        assert desk.at("d") == "ready"

    def test_an_earlier_request_to_stop_keeps_its_reason(self, desk: Desk) -> None:
        desk.started("a", key=replace("k"))
        desk.cancel("a")
        desk.add("b", key=replace("k"))
        assert desk.job("a").cancel_requested is Reason.REQUESTED

    def test_several_of_one_append(self, desk: Desk) -> None:
        desk.add("old", key=replace("k"))
        desk.add("d", after=["old"])
        placed = desk.append(*[spec(id, key=replace("k")) for id in "abc"], spec("e", after=["a"]))
        assert [place.id for place in placed] == ["a", "b", "c", "e"]
        assert desk.at("old", "a", "b", "c") == " ".join(["canceled/superseded"] * 3 + ["ready"])
        assert desk.at("d", "e") == "blocked blocked"
        desk.done(desk.take())
        assert desk.at("d", "e") == "ready ready"

    def test_several_of_one_append_behind_a_running_one(self, desk: Desk) -> None:
        claim = desk.started("old", key=replace("k"))
        desk.append(*[spec(id, key=replace("k")) for id in "abc"])
        assert desk.at("a", "b", "c") == "canceled/superseded canceled/superseded blocked"
        desk.done(claim)
        assert desk.at("c") == "ready"

    def test_what_waited_for_the_newer_is_a_cycle(self, desk: Desk) -> None:
        desk.add("old", key=replace("k"))
        desk.add("x", after=["old"])
        error = desk.refusal(DependencyCycle, Append((spec("new", key=replace("k"), after=["x"]),)))
        assert sorted(error.details["ids"]) == ["new", "x"]

    def test_the_newer_cannot_wait_for_the_one_it_replaces(self, desk: Desk) -> None:
        desk.add("old", key=replace("k"))
        error = desk.refusal(DependencyCycle, Append((spec("new", key=replace("k"), after=["old"]),)))
        assert error.details["ids"] == ("new",)

    def test_a_cycle_through_a_chain_and_a_group(self, desk: Desk) -> None:
        desk.open("g")
        desk.add("old", key=replace("k"))
        desk.add("x", after=["old"], group="g")
        desk.add("y", after=[whole_group("g")])
        desk.refusal(DependencyCycle, Append((spec("new", key=replace("k"), after=["y"]),)))

    def test_a_closed_group_waits_for_nobody(self, desk: Desk) -> None:
        desk.open("g")
        desk.add("old", key=replace("k"), group="g")
        desk.seal("g")
        desk.cancel("old")
        desk.revive("old")
        desk.add("new", key=replace("k"), after=[whole_group("g", run_anyway=True)])
        assert desk.at("old", "new") == "canceled/superseded ready"

    def test_the_newer_may_wait_for_a_running_one_it_replaces(self, desk: Desk) -> None:
        claim = desk.started("old", key=replace("k"))
        desk.add("new", key=replace("k"), after=["old"])
        desk.done(claim)
        assert desk.at("new") == "ready"

    def test_a_finished_holder_is_not_touched(self, desk: Desk) -> None:
        desk.done(desk.started("a", key=replace("k")))
        desk.add("b", key=replace("k"))
        assert desk.at("a", "b") == "done ready"

    def test_replace_ignores_the_window_of_a_finished_unique_job(self, desk: Desk) -> None:
        desk.done(desk.started("a", key=unique("k", window=HOUR)))
        assert desk.add("b", key=replace("k")).state is State.READY

    def test_replace_supersedes_a_waiting_unique_job_and_unique_answers_it(self, desk: Desk) -> None:
        desk.add("a", key=unique("k"))
        desk.add("b", key=replace("k"))
        assert desk.at("a", "b") == "canceled/superseded ready"
        assert desk.append(spec("c", key=unique("k"))) == (Placed("b", 2),)

    def test_a_superseded_member_has_a_counter_of_its_own(self, desk: Desk) -> None:
        desk.open("g")
        desk.add("a", key=replace("k"), group="g")
        desk.add("b", key=replace("k"), group="g")
        group = desk.group("g")
        assert (group.total, group.unfinished, group.canceled, group.superseded) == (2, 1, 0, 1)
        desk.seal("g")
        desk.done(desk.take())
        assert desk.group("g").outcome is State.DONE

    def test_the_running_one_may_be_lost_too(self, desk: Desk) -> None:
        desk.started("a", key=replace("k"))
        desk.add("b", key=replace("k"))
        desk.lose()
        assert desk.at("a", "b") == "canceled/superseded ready"

    def test_the_newer_may_be_canceled_while_it_waits_for_the_older(self, desk: Desk) -> None:
        claim = desk.started("a", key=replace("k"))
        desk.add("b", key=replace("k"))
        desk.cancel("b")
        desk.done(claim)
        assert desk.at("a", "b") == "done canceled/requested"
        assert desk.add("c", key=replace("k")).state is State.READY


class SerialSuite(Suite):
    """One at a time, from claim to settle."""

    def test_one_at_a_time(self, desk: Desk) -> None:
        desk.append(
            spec("a", key=serial("k")), spec("b", key=serial("k")), spec("c", key=serial("other")), spec("d")
        )
        claims = desk.claim(n=9)
        assert sorted(ids(claims)) == ["a", "c", "d"]
        assert desk.claim(n=9) == []
        desk.done(next(claim for claim in claims if claim.id == "a"))
        assert ids(desk.claim(n=9)) == ["b"]

    def test_a_serial_key_is_a_part_with_a_cap_of_one(self, desk: Desk) -> None:
        job = desk.add("a", key=serial("k"))
        assert (job.part, job.key, job.key_policy) == ("serial:k", "k", KeyPolicy.SERIAL)
        assert (desk.part("serial:k").cap, desk.part("serial:k").ready) == (1, 1)

    def test_no_order_is_promised_across_a_retry_but_priority_and_seq_rule(self, desk: Desk) -> None:
        desk.append(spec("a", key=serial("k")), spec("b", key=serial("k"), priority="high"))
        claim = desk.take()
        assert claim.id == "b"
        desk.settle(claim, Retry(SECOND))
        assert ids(desk.claim(n=2)) == ["a"]

    def test_a_serial_key_is_no_unique_key(self, desk: Desk) -> None:
        desk.add("a", key=Key("k"))
        assert [place.id for place in desk.append(spec("b", key=serial("k")))] == ["b"]

    def test_serial_keys_belong_to_their_queue(self, desk: Desk) -> None:
        desk.append(spec("a", "q", key=serial("k")), spec("b", "r", key=serial("k")))
        assert ids(desk.claim("q", "r")) == ["a", "b"]
