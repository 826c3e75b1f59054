"""Finishing a set: cascades; and groups: seal, abort, close, then."""

from __future__ import annotations

import pytest

from towpath.core.checks import SECOND
from towpath.core.commands import Abort, Append, GroupSet, GroupState, OnFailure, Open, Seal
from towpath.core.ids import derived
from towpath.core.job import Reason, Retry, State
from towpath.core.views import Counts, GroupView
from towpath.errors import GroupClosed, UnknownGroup
from towpath.testing.clock import START
from towpath.testing.suite.desk import Desk, Suite, anyway, ids, replace, spec, whole_group


class CascadeSuite(Suite):
    """What the end of one job does to those that wait for it."""

    def test_a_failure_takes_all_that_need_it(self, desk: Desk) -> None:
        desk.append(
            spec("a"), spec("b", after=["a"]), spec("c", after=["b"]), spec("d", after=["c"]), spec("x")
        )
        desk.fail(desk.take())
        assert desk.at("b", "c", "d", "x") == "failed/dependency failed/dependency failed/dependency ready"
        job = desk.job("d")
        assert (job.finished_at, job.waits, job.purge_at, job.cancel_requested) == (START, 0, None, None)

    def test_a_cancel_takes_all_that_need_it(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", after=["a"]), spec("c", after=["b"]))
        desk.cancel("a")
        assert desk.at("a", "b", "c") == "canceled/requested canceled/dependency canceled/dependency"
        assert desk.job("c").purge_at is not None

    def test_run_anyway_is_met_by_every_ending(self, desk: Desk) -> None:
        for n, end in enumerate(("done", "fail", "cancel")):
            desk.append(spec(f"a{n}"), spec(f"b{n}", f"other{n}", after=[anyway(f"a{n}")]))
            if end == "cancel":
                desk.cancel(f"a{n}")
            else:
                getattr(desk, end)(desk.take())
        assert desk.at("b0", "b1", "b2") == "ready ready ready"

    def test_run_anyway_behind_a_cascade(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", after=["a"]), spec("c", after=[anyway("b")]))
        desk.fail(desk.take())
        assert desk.at("b", "c") == "failed/dependency ready"

    def test_one_need_in_a_diamond_is_enough(self, desk: Desk) -> None:
        desk.append(
            spec("a"), spec("b", after=["a"]), spec("c", after=[anyway("a")]), spec("d", after=["b", "c"])
        )
        desk.fail(desk.take())
        assert desk.at("b", "c", "d") == "failed/dependency ready failed/dependency"

    def test_what_is_lowered_by_several_wakes_once(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", after=["a"]), spec("c", after=["a"]))
        desk.add("z", after=[anyway("a"), anyway("b"), anyway("c")])
        desk.fail(desk.take())
        assert desk.at("z") == "ready"
        assert desk.job("z").waits == 0

    def test_a_retry_frees_nobody(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.add("b", after=[anyway("a")])
        desk.settle(claim, Retry(SECOND))
        assert desk.at("b") == "blocked"

    def test_the_first_bad_end_decides(self, desk: Desk) -> None:
        a, b = desk.started("a"), desk.started("b")
        desk.add("c", after=["a", "b"])
        desk.cancel("a")
        desk.settle(a, Retry())
        assert desk.at("c") == "canceled/dependency"
        desk.fail(b)
        assert desk.at("c") == "canceled/dependency"

    def test_a_deep_chain_falls_at_once(self, desk: Desk) -> None:
        desk.append(spec("j0"), *[spec(f"j{n}", after=[f"j{n - 1}"]) for n in range(1, 3000)])
        desk.fail(desk.take())
        assert desk.counts() == Counts(failed=3000)

    def test_a_wide_fan_falls_at_once(self, desk: Desk) -> None:
        desk.append(spec("a"), *[spec(f"j{n}", after=["a"]) for n in range(3000)])
        desk.cancel("a")
        assert desk.counts() == Counts(canceled=3001)


def group_of(desk: Desk, members: int = 2, **fields: object) -> None:
    """An open group g with members m0, m1, ..."""
    desk.open("g", **fields)
    desk.append(*[spec(f"m{n}", group="g") for n in range(members)])


class GroupSuite(Suite):
    """Nothing of an unsealed group runs; a group ends once."""

    def test_a_new_group_is_open(self, desk: Desk) -> None:
        desk.open("g", on_failure=OnFailure.ABORT)
        expected = GroupView("g", GroupState.OPEN, None, OnFailure.ABORT, 0, 0, 0, 0, 0, 0, START, None)
        assert desk.group("g") == expected
        assert desk.ledger.group("nothing") is None

    def test_open_of_a_known_group_changes_nothing(self, desk: Desk) -> None:
        desk.open("g")
        desk.jump(SECOND)
        with desk.unchanged():
            assert desk.ask(Open("g", OnFailure.ABORT, {"done": (spec("x"),)})) == [GroupSet("g")]

    def test_members_wait_for_the_seal(self, desk: Desk) -> None:
        group_of(desk)
        assert desk.at("m0", "m1") == "blocked blocked"
        assert desk.job("m0").waits == 1
        assert desk.claim(n=9) == []
        desk.seal("g")
        assert desk.at("m0", "m1") == "ready ready"
        assert desk.group("g").state is GroupState.SEALED

    def test_a_sealed_member_still_waits_for_its_dependencies(self, desk: Desk) -> None:
        desk.open("g")
        desk.append(
            spec("a", group="g"), spec("b", group="g", after=["a"]), spec("c", group="g", delay=SECOND)
        )
        assert [desk.job(id).waits for id in "abc"] == [1, 2, 1]
        desk.seal("g")
        assert desk.at("a", "b", "c") == "ready blocked scheduled/delay"

    def test_a_group_closes_when_all_are_done(self, desk: Desk) -> None:
        group_of(desk)
        desk.seal("g")
        a, b = desk.claim(n=2)
        desk.done(a)
        assert desk.group("g").state is GroupState.SEALED
        desk.jump(SECOND)
        desk.done(b)
        group = desk.group("g")
        assert (group.state, group.outcome, group.closed_at) == (GroupState.CLOSED, State.DONE, desk.now)
        assert (group.total, group.unfinished, group.done) == (2, 0, 2)

    def test_an_empty_group_closes_at_its_seal(self, desk: Desk) -> None:
        desk.open("g")
        desk.seal("g")
        assert desk.group("g").outcome is State.DONE

    def test_an_open_group_does_not_close(self, desk: Desk) -> None:
        group_of(desk, 1)
        desk.cancel("m0")
        assert (desk.group("g").state, desk.group("g").unfinished) == (GroupState.OPEN, 0)
        desk.seal("g")
        assert desk.group("g").outcome is State.CANCELED

    def test_failed_outweighs_canceled_outweighs_done(self, desk: Desk) -> None:
        group_of(desk, 3)
        desk.seal("g")
        a, b, c = desk.claim(n=3)
        desk.done(a)
        desk.cancel("m1")
        desk.settle(b, Retry())
        desk.fail(c)
        group = desk.group("g")
        assert (group.done, group.canceled, group.failed, group.outcome) == (1, 1, 1, State.FAILED)

    def test_a_cancel_makes_a_canceled_group(self, desk: Desk) -> None:
        group_of(desk)
        desk.seal("g")
        desk.cancel("m0")
        desk.done(desk.take())
        assert desk.group("g").outcome is State.CANCELED

    def test_failure_continues_by_default(self, desk: Desk) -> None:
        group_of(desk)
        desk.seal("g")
        desk.fail(desk.take())
        assert desk.at("m1") == "ready"
        assert desk.group("g").state is GroupState.SEALED

    def test_failure_aborts_where_it_should(self, desk: Desk) -> None:
        group_of(desk, 4, on_failure=OnFailure.ABORT)
        desk.add("d", after=["m3"])
        desk.seal("g")
        a, b = desk.claim(n=2)
        desk.fail(a)
        assert desk.at("m1", "m2", "m3") == "running canceled/aborted canceled/aborted"
        assert desk.at("d") == "canceled/dependency"
        assert desk.job("m1").cancel_requested is Reason.ABORTED
        assert desk.group("g").state is GroupState.ABORTING
        desk.done(b)
        group = desk.group("g")
        assert (group.state, group.outcome, group.done, group.canceled) == (
            GroupState.CLOSED,
            State.FAILED,
            1,
            2,
        )

    def test_failure_aborts_an_open_group_too(self, desk: Desk) -> None:
        desk.fail(desk.started("x"))
        group_of(desk, 2, on_failure=OnFailure.ABORT)
        desk.add("bad", group="g", after=["x"])
        assert desk.at("bad", "m0", "m1") == "failed/dependency canceled/aborted canceled/aborted"
        assert desk.group("g").outcome is State.FAILED

    def test_abort(self, desk: Desk) -> None:
        group_of(desk, 3)
        desk.seal("g")
        claim = desk.take()
        desk.abort("g")
        assert desk.at("m0", "m1", "m2") == "running canceled/aborted canceled/aborted"
        assert (desk.job("m0").cancel_requested, desk.group("g").state) == (
            Reason.ABORTED,
            GroupState.ABORTING,
        )
        desk.settle(claim, Retry())
        assert desk.at("m0") == "canceled/aborted"
        assert desk.group("g").outcome is State.CANCELED

    def test_abort_accepts_a_late_done_but_not_as_success(self, desk: Desk) -> None:
        group_of(desk, 1)
        desk.seal("g")
        claim = desk.take()
        desk.abort("g")
        desk.done(claim)
        assert (desk.group("g").outcome, desk.group("g").done) == (State.CANCELED, 1)

    def test_abort_of_an_open_group(self, desk: Desk) -> None:
        group_of(desk)
        desk.abort("g")
        assert desk.at("m0", "m1") == "canceled/aborted canceled/aborted"
        assert desk.group("g").outcome is State.CANCELED

    def test_abort_of_an_empty_group_closes_it(self, desk: Desk) -> None:
        desk.open("g")
        desk.abort("g")
        assert (desk.group("g").state, desk.group("g").outcome) == (GroupState.CLOSED, State.CANCELED)

    def test_an_earlier_request_keeps_its_reason(self, desk: Desk) -> None:
        group_of(desk, 1)
        desk.seal("g")
        desk.take()
        desk.cancel("m0")
        desk.abort("g")
        assert desk.job("m0").cancel_requested is Reason.REQUESTED

    @pytest.mark.parametrize("command", [Seal("g"), Abort("g")])
    def test_seal_and_abort_answer_whatever_the_state(self, desk: Desk, command: Seal | Abort) -> None:
        group_of(desk, 1)
        desk.seal("g")
        claim = desk.take()
        desk.abort("g")
        with desk.unchanged():
            assert desk.ask(command) == [GroupSet("g")]
        desk.done(claim)
        with desk.unchanged():
            assert desk.ask(command) == [GroupSet("g")]

    def test_a_second_seal_changes_nothing(self, desk: Desk) -> None:
        group_of(desk)
        desk.seal("g")
        with desk.unchanged():
            desk.seal("g")

    @pytest.mark.parametrize("command", [Seal("nothing"), Abort("nothing")])
    def test_an_unknown_group_is_refused(self, desk: Desk, command: Seal | Abort) -> None:
        assert desk.refusal(UnknownGroup, command).details == {"group": "nothing"}

    def test_nobody_joins_after_the_seal(self, desk: Desk) -> None:
        group_of(desk, 1)
        desk.seal("g")
        error = desk.refusal(GroupClosed, Append((spec("x", group="g"),)))
        assert error.details == {"group": "g", "state": GroupState.SEALED}
        desk.done(desk.take())
        error = desk.refusal(GroupClosed, Append((spec("x", group="g"),)))
        assert error.details == {"group": "g", "state": GroupState.CLOSED}

    def test_children_of_an_aborting_group_are_born_canceled(self, desk: Desk) -> None:
        group_of(desk, 2)
        desk.seal("g")
        a, b = desk.claim(n=2)
        desk.abort("g")
        desk.done(a, spawn=[spec("x", group="g"), spec("y", group="g", after=["x"])])
        assert desk.at("x", "y") == "canceled/aborted canceled/dependency"
        desk.done(b)
        group = desk.group("g")
        assert (group.state, group.total, group.done, group.canceled) == (GroupState.CLOSED, 4, 2, 2)

    def test_a_child_keeps_its_group_from_closing(self, desk: Desk) -> None:
        group_of(desk, 1)
        desk.seal("g")
        desk.done(desk.take(), spawn=[spec("x", group="g")])
        assert desk.group("g").state is GroupState.SEALED
        desk.done(desk.take())
        assert desk.group("g").outcome is State.DONE

    def test_waiters_of_a_failed_group(self, desk: Desk) -> None:
        group_of(desk, 1)
        desk.append(
            spec("a", "o", after=[whole_group("g")]),
            spec("b", "o", after=[whole_group("g", run_anyway=True)]),
        )
        desk.append(spec("c", "o", after=["a"]))
        desk.seal("g")
        desk.fail(desk.take())
        assert desk.at("a", "b", "c") == "failed/dependency ready failed/dependency"

    def test_waiters_of_a_canceled_group(self, desk: Desk) -> None:
        group_of(desk, 1)
        desk.append(
            spec("a", "o", after=[whole_group("g")]),
            spec("b", "o", after=[whole_group("g", run_anyway=True)]),
        )
        desk.abort("g")
        assert desk.at("a", "b") == "canceled/dependency ready"

    def test_a_waiter_may_be_a_member_of_another_group(self, desk: Desk) -> None:
        group_of(desk, 1)
        desk.open("h")
        desk.append(spec("x", group="h", after=[whole_group("g")]))
        desk.append(spec("y", after=[whole_group("h")]))
        desk.seal("h")
        desk.seal("g")
        desk.fail(desk.take())
        assert desk.at("x", "y") == "failed/dependency failed/dependency"
        assert desk.group("h").outcome is State.FAILED


class ThenSuite(Suite):
    """What follows the end of a group."""

    @pytest.mark.parametrize("ending", ["done", "failed", "canceled"])
    def test_then_is_appended_when_the_group_ends_so(self, desk: Desk, ending: str) -> None:
        then = {
            each: (spec("ignored", each), spec("ignored", each, priority="high"))
            for each in ("done", "failed", "canceled")
        }
        group_of(desk, 1, then=then)
        desk.seal("g")
        if ending == "canceled":
            desk.cancel("m0")
        else:
            claim = desk.take()
            _ = desk.done(claim) if ending == "done" else desk.fail(claim)
        first, second = (derived("g", f"then:{ending}", n) for n in (0, 1))
        assert ids(desk.claim(ending, n=9)) == [second, first]
        assert desk.found(queue=ending) == [first, second]
        others = {"done", "failed", "canceled"} - {ending}
        assert all(desk.found(queue=other) == [] for other in others)

    def test_then_has_no_parent(self, desk: Desk) -> None:
        desk.open("g", then={"done": (spec("x", "t", payload=b"p", correlation_id="c"),)})
        desk.seal("g")
        job = desk.take("t").job
        assert (job.parent, job.group, job.payload, job.correlation_id) == (None, None, b"p", "c")

    def test_then_happens_once(self, desk: Desk) -> None:
        group_of(desk, 1, then={"failed": (spec("x", "t"),)})
        desk.seal("g")
        desk.fail(desk.take())
        desk.revive("m0")
        desk.fail(desk.take())
        assert desk.counts("t") == Counts(ready=1)

    def test_then_can_be_claimed_in_the_closing_batch(self, desk: Desk) -> None:
        desk.open("g", then={"done": (spec("x", "t"),)})
        desk.seal("g")
        assert len(desk.claim("t", n=9)) == 1

    def test_then_replaces_a_waiter_that_was_lost_before_it(self, desk: Desk) -> None:
        """First in, first out: the waiters of the group were put on the list before `then` was appended."""
        desk.open("g", then={"canceled": (spec("x", "t", key=replace("k")),)})
        desk.add("w", key=replace("k"), after=[whole_group("g")])
        desk.add("d", after=["w"])
        desk.abort("g")
        assert desk.at("w") == "canceled/dependency"
        assert desk.counts("t") == Counts(ready=1)
        assert desk.at("d") == "blocked"

    def test_then_replaces_a_waiter_that_it_woke(self, desk: Desk) -> None:
        desk.open("g", then={"done": (spec("x", "t", key=replace("k")),)})
        desk.add("w", key=replace("k"), after=[whole_group("g")])
        desk.seal("g")
        assert desk.at("w") == "canceled/superseded"
        assert desk.counts("t") == Counts(ready=1)

    def test_a_group_may_close_a_group(self, desk: Desk) -> None:
        desk.open("outer", then={"done": (spec("x", "t"),)})
        group_of(desk, 1)
        desk.add("w", group="outer", after=[whole_group("g")])
        desk.seal("outer")
        desk.seal("g")
        desk.done(desk.take())
        desk.done(desk.take())
        assert desk.counts("t") == Counts(ready=1)
