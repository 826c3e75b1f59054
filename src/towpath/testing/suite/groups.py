"""Finishing a set: cascades; and groups: seal, abort, close, then."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from towpath.core.checks import SECOND
from towpath.core.commands import Abort, Append, GroupSet, GroupState, OnFailure, Open, Seal
from towpath.core.ids import derived
from towpath.core.job import Reason, RetryOutcome, State
from towpath.core.views import Counts, GroupQuery, GroupView
from towpath.errors import GroupClosed, InvalidInput, UnknownGroup
from towpath.testing.clock import START
from towpath.testing.suite.harness import Harness, Suite, anyway, ids, replace, spec, whole_group


class CascadeSuite(Suite):
    """The consequences of an end for the dependents."""

    def test_a_failure_takes_all_that_need_it(self, harness: Harness) -> None:
        harness.append(
            spec("a"), spec("b", after=["a"]), spec("c", after=["b"]), spec("d", after=["c"]), spec("x")
        )
        harness.fail(harness.take())
        assert harness.at("b", "c", "d", "x") == "failed/dependency failed/dependency failed/dependency ready"
        job = harness.job("d")
        assert (job.finished_at, job.waits, job.purge_at, job.cancel_requested) == (START, 0, None, None)

    def test_a_cancel_takes_all_that_need_it(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", after=["a"]), spec("c", after=["b"]))
        harness.cancel("a")
        assert harness.at("a", "b", "c") == "canceled/requested canceled/dependency canceled/dependency"
        assert harness.job("c").purge_at is not None

    def test_run_anyway_is_met_by_every_ending(self, harness: Harness) -> None:
        for n, end in enumerate(("done", "fail", "cancel")):
            harness.append(spec(f"a{n}"), spec(f"b{n}", f"other{n}", after=[anyway(f"a{n}")]))
            if end == "cancel":
                harness.cancel(f"a{n}")
            else:
                getattr(harness, end)(harness.take())
        assert harness.at("b0", "b1", "b2") == "ready ready ready"

    def test_run_anyway_behind_a_cascade(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", after=["a"]), spec("c", after=[anyway("b")]))
        harness.fail(harness.take())
        assert harness.at("b", "c") == "failed/dependency ready"

    def test_one_need_in_a_diamond_is_enough(self, harness: Harness) -> None:
        harness.append(
            spec("a"), spec("b", after=["a"]), spec("c", after=[anyway("a")]), spec("d", after=["b", "c"])
        )
        harness.fail(harness.take())
        assert harness.at("b", "c", "d") == "failed/dependency ready failed/dependency"

    def test_what_is_lowered_by_several_wakes_once(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", after=["a"]), spec("c", after=["a"]))
        harness.add("z", after=[anyway("a"), anyway("b"), anyway("c")])
        harness.fail(harness.take())
        assert harness.at("z") == "ready"
        assert harness.job("z").waits == 0

    def test_a_retry_frees_nobody(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.add("b", after=[anyway("a")])
        harness.settle(claim, RetryOutcome(SECOND))
        assert harness.at("b") == "blocked"

    def test_the_first_bad_end_decides(self, harness: Harness) -> None:
        a, b = harness.started("a"), harness.started("b")
        harness.add("c", after=["a", "b"])
        harness.cancel("a")
        harness.settle(a, RetryOutcome())
        assert harness.at("c") == "canceled/dependency"
        harness.fail(b)
        assert harness.at("c") == "canceled/dependency"

    def test_a_deep_chain_falls_at_once(self, harness: Harness) -> None:
        harness.append(spec("j0"), *[spec(f"j{n}", after=[f"j{n - 1}"]) for n in range(1, 3000)])
        harness.fail(harness.take())
        assert harness.counts() == Counts(failed=3000)

    def test_a_wide_fan_falls_at_once(self, harness: Harness) -> None:
        harness.append(spec("a"), *[spec(f"j{n}", after=["a"]) for n in range(3000)])
        harness.cancel("a")
        assert harness.counts() == Counts(canceled=3001)


def group_of(harness: Harness, members: int = 2, **fields: object) -> None:
    """An open group g with members m0, m1, ..."""
    harness.open("g", **fields)
    harness.append(*[spec(f"m{n}", group="g") for n in range(members)])


class GroupSuite(Suite):
    """No job of an unsealed group runs; a group ends once."""

    def test_a_new_group_is_open(self, harness: Harness) -> None:
        harness.open("g", on_failure=OnFailure.ABORT)
        expected = GroupView("g", GroupState.OPEN, None, OnFailure.ABORT, 0, 0, 0, 0, 0, 0, START, None)
        assert harness.group("g") == expected
        assert harness.ledger.group("nothing") is None

    def test_open_of_a_known_group_changes_nothing(self, harness: Harness) -> None:
        harness.open("g")
        harness.jump(SECOND)
        with harness.unchanged():
            assert harness.ask(Open("g", OnFailure.ABORT, {"done": (spec("x"),)})) == [GroupSet("g")]

    def test_members_wait_for_the_seal(self, harness: Harness) -> None:
        group_of(harness)
        assert harness.at("m0", "m1") == "blocked blocked"
        assert harness.job("m0").waits == 1
        assert harness.claim(n=9) == []
        harness.seal("g")
        assert harness.at("m0", "m1") == "ready ready"
        assert harness.group("g").state is GroupState.SEALED

    def test_a_sealed_member_still_waits_for_its_dependencies(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(
            spec("a", group="g"), spec("b", group="g", after=["a"]), spec("c", group="g", delay=SECOND)
        )
        assert [harness.job(id).waits for id in "abc"] == [1, 2, 1]
        harness.seal("g")
        assert harness.at("a", "b", "c") == "ready blocked scheduled/delay"

    def test_a_group_closes_when_all_are_done(self, harness: Harness) -> None:
        group_of(harness)
        harness.seal("g")
        a, b = harness.claim(n=2)
        harness.done(a)
        assert harness.group("g").state is GroupState.SEALED
        harness.jump(SECOND)
        harness.done(b)
        group = harness.group("g")
        assert (group.state, group.outcome, group.closed_at) == (GroupState.CLOSED, State.DONE, harness.now)
        assert (group.total, group.unfinished, group.done) == (2, 0, 2)

    def test_an_empty_group_closes_at_its_seal(self, harness: Harness) -> None:
        harness.open("g")
        harness.seal("g")
        assert harness.group("g").outcome is State.DONE

    def test_an_open_group_does_not_close(self, harness: Harness) -> None:
        group_of(harness, 1)
        harness.cancel("m0")
        assert (harness.group("g").state, harness.group("g").unfinished) == (GroupState.OPEN, 0)
        harness.seal("g")
        assert harness.group("g").outcome is State.CANCELED

    def test_failed_outweighs_canceled_outweighs_done(self, harness: Harness) -> None:
        group_of(harness, 3)
        harness.seal("g")
        a, b, c = harness.claim(n=3)
        harness.done(a)
        harness.cancel("m1")
        harness.settle(b, RetryOutcome())
        harness.fail(c)
        group = harness.group("g")
        assert (group.done, group.canceled, group.failed, group.outcome) == (1, 1, 1, State.FAILED)

    def test_a_cancel_makes_a_canceled_group(self, harness: Harness) -> None:
        group_of(harness)
        harness.seal("g")
        harness.cancel("m0")
        harness.done(harness.take())
        assert harness.group("g").outcome is State.CANCELED

    def test_failure_continues_by_default(self, harness: Harness) -> None:
        group_of(harness)
        harness.seal("g")
        harness.fail(harness.take())
        assert harness.at("m1") == "ready"
        assert harness.group("g").state is GroupState.SEALED

    def test_failure_aborts_where_it_should(self, harness: Harness) -> None:
        group_of(harness, 4, on_failure=OnFailure.ABORT)
        harness.add("d", after=["m3"])
        harness.seal("g")
        a, b = harness.claim(n=2)
        harness.fail(a)
        assert harness.at("m1", "m2", "m3") == "running canceled/aborted canceled/aborted"
        assert harness.at("d") == "canceled/dependency"
        assert harness.job("m1").cancel_requested is Reason.ABORTED
        assert harness.group("g").state is GroupState.ABORTING
        harness.done(b)
        group = harness.group("g")
        assert (group.state, group.outcome, group.done, group.canceled) == (
            GroupState.CLOSED,
            State.FAILED,
            1,
            2,
        )

    def test_failure_aborts_an_open_group_too(self, harness: Harness) -> None:
        harness.fail(harness.started("x"))
        group_of(harness, 2, on_failure=OnFailure.ABORT)
        harness.add("bad", group="g", after=["x"])
        assert harness.at("bad", "m0", "m1") == "failed/dependency canceled/aborted canceled/aborted"
        assert harness.group("g").outcome is State.FAILED

    def test_abort(self, harness: Harness) -> None:
        group_of(harness, 3)
        harness.seal("g")
        claim = harness.take()
        harness.abort("g")
        assert harness.at("m0", "m1", "m2") == "running canceled/aborted canceled/aborted"
        assert (harness.job("m0").cancel_requested, harness.group("g").state) == (
            Reason.ABORTED,
            GroupState.ABORTING,
        )
        harness.settle(claim, RetryOutcome())
        assert harness.at("m0") == "canceled/aborted"
        assert harness.group("g").outcome is State.CANCELED

    def test_abort_accepts_a_late_done_but_not_as_success(self, harness: Harness) -> None:
        group_of(harness, 1)
        harness.seal("g")
        claim = harness.take()
        harness.abort("g")
        harness.done(claim)
        assert (harness.group("g").outcome, harness.group("g").done) == (State.CANCELED, 1)

    def test_abort_of_an_open_group(self, harness: Harness) -> None:
        group_of(harness)
        harness.abort("g")
        assert harness.at("m0", "m1") == "canceled/aborted canceled/aborted"
        assert harness.group("g").outcome is State.CANCELED

    def test_abort_of_an_empty_group_closes_it(self, harness: Harness) -> None:
        harness.open("g")
        harness.abort("g")
        assert (harness.group("g").state, harness.group("g").outcome) == (GroupState.CLOSED, State.CANCELED)

    def test_an_earlier_request_keeps_its_reason(self, harness: Harness) -> None:
        group_of(harness, 1)
        harness.seal("g")
        harness.take()
        harness.cancel("m0")
        harness.abort("g")
        assert harness.job("m0").cancel_requested is Reason.REQUESTED

    @pytest.mark.parametrize("command", [Seal("g"), Abort("g")])
    def test_seal_and_abort_answer_whatever_the_state(self, harness: Harness, command: Seal | Abort) -> None:
        group_of(harness, 1)
        harness.seal("g")
        claim = harness.take()
        harness.abort("g")
        with harness.unchanged():
            assert harness.ask(command) == [GroupSet("g")]
        harness.done(claim)
        with harness.unchanged():
            assert harness.ask(command) == [GroupSet("g")]

    def test_a_second_seal_changes_nothing(self, harness: Harness) -> None:
        group_of(harness)
        harness.seal("g")
        with harness.unchanged():
            harness.seal("g")

    @pytest.mark.parametrize("command", [Seal("nothing"), Abort("nothing")])
    def test_an_unknown_group_is_refused(self, harness: Harness, command: Seal | Abort) -> None:
        assert harness.refusal(UnknownGroup, command).details == {"group": "nothing"}

    def test_nobody_joins_after_the_seal(self, harness: Harness) -> None:
        group_of(harness, 1)
        harness.seal("g")
        error = harness.refusal(GroupClosed, Append((spec("x", group="g"),)))
        assert error.details == {"group": "g", "state": GroupState.SEALED}
        harness.done(harness.take())
        error = harness.refusal(GroupClosed, Append((spec("x", group="g"),)))
        assert error.details == {"group": "g", "state": GroupState.CLOSED}

    def test_children_of_an_aborting_group_are_born_canceled(self, harness: Harness) -> None:
        group_of(harness, 2)
        harness.seal("g")
        a, b = harness.claim(n=2)
        harness.abort("g")
        harness.done(a, spawn=[spec("x", group="g"), spec("y", group="g", after=["x"])])
        assert harness.at("x", "y") == "canceled/aborted canceled/dependency"
        harness.done(b)
        group = harness.group("g")
        assert (group.state, group.total, group.done, group.canceled) == (GroupState.CLOSED, 4, 2, 2)

    def test_a_child_keeps_its_group_from_closing(self, harness: Harness) -> None:
        group_of(harness, 1)
        harness.seal("g")
        harness.done(harness.take(), spawn=[spec("x", group="g")])
        assert harness.group("g").state is GroupState.SEALED
        harness.done(harness.take())
        assert harness.group("g").outcome is State.DONE

    def test_waiters_of_a_failed_group(self, harness: Harness) -> None:
        group_of(harness, 1)
        harness.append(
            spec("a", "o", after=[whole_group("g")]),
            spec("b", "o", after=[whole_group("g", run_anyway=True)]),
        )
        harness.append(spec("c", "o", after=["a"]))
        harness.seal("g")
        harness.fail(harness.take())
        assert harness.at("a", "b", "c") == "failed/dependency ready failed/dependency"

    def test_waiters_of_a_canceled_group(self, harness: Harness) -> None:
        group_of(harness, 1)
        harness.append(
            spec("a", "o", after=[whole_group("g")]),
            spec("b", "o", after=[whole_group("g", run_anyway=True)]),
        )
        harness.abort("g")
        assert harness.at("a", "b") == "canceled/dependency ready"

    def test_a_waiter_may_be_a_member_of_another_group(self, harness: Harness) -> None:
        group_of(harness, 1)
        harness.open("h")
        harness.append(spec("x", group="h", after=[whole_group("g")]))
        harness.append(spec("y", after=[whole_group("h")]))
        harness.seal("h")
        harness.seal("g")
        harness.fail(harness.take())
        assert harness.at("x", "y") == "failed/dependency failed/dependency"
        assert harness.group("h").outcome is State.FAILED


class ThenSuite(Suite):
    """The jobs that follow the end of a group."""

    @pytest.mark.parametrize("ending", ["done", "failed", "canceled"])
    def test_then_is_appended_when_the_group_ends_so(self, harness: Harness, ending: str) -> None:
        then = {
            each: (spec("ignored", each), spec("ignored", each, priority="high"))
            for each in ("done", "failed", "canceled")
        }
        group_of(harness, 1, then=then)
        harness.seal("g")
        if ending == "canceled":
            harness.cancel("m0")
        else:
            claim = harness.take()
            _ = harness.done(claim) if ending == "done" else harness.fail(claim)
        first, second = (derived("g", f"then:{ending}", n) for n in (0, 1))
        assert ids(harness.claim(ending, n=9)) == [second, first]
        assert harness.found(queue=ending) == [first, second]
        others = {"done", "failed", "canceled"} - {ending}
        assert all(harness.found(queue=other) == [] for other in others)

    def test_then_has_no_parent(self, harness: Harness) -> None:
        harness.open("g", then={"done": (spec("x", "t", payload=b"p", correlation_id="c"),)})
        harness.seal("g")
        job = harness.take("t").job
        assert (job.parent, job.group, job.payload, job.correlation_id) == (None, None, b"p", "c")

    def test_then_happens_once(self, harness: Harness) -> None:
        group_of(harness, 1, then={"failed": (spec("x", "t"),)})
        harness.seal("g")
        harness.fail(harness.take())
        harness.revive("m0")
        harness.fail(harness.take())
        assert harness.counts("t") == Counts(ready=1)

    def test_then_can_be_claimed_in_the_closing_batch(self, harness: Harness) -> None:
        harness.open("g", then={"done": (spec("x", "t"),)})
        harness.seal("g")
        assert len(harness.claim("t", n=9)) == 1

    def test_then_replaces_a_waiter_that_was_lost_before_it(self, harness: Harness) -> None:
        """First in, first out: the waiters of the group were put on the list before `then` was appended."""
        harness.open("g", then={"canceled": (spec("x", "t", key=replace("k")),)})
        harness.add("w", key=replace("k"), after=[whole_group("g")])
        harness.add("d", after=["w"])
        harness.abort("g")
        assert harness.at("w") == "canceled/dependency"
        assert harness.counts("t") == Counts(ready=1)
        assert harness.at("d") == "blocked"

    def test_then_replaces_a_waiter_that_it_woke(self, harness: Harness) -> None:
        harness.open("g", then={"done": (spec("x", "t", key=replace("k")),)})
        harness.add("w", key=replace("k"), after=[whole_group("g")])
        harness.seal("g")
        assert harness.at("w") == "canceled/superseded"
        assert harness.counts("t") == Counts(ready=1)

    def test_a_group_may_close_a_group(self, harness: Harness) -> None:
        harness.open("outer", then={"done": (spec("x", "t"),)})
        group_of(harness, 1)
        harness.add("w", group="outer", after=[whole_group("g")])
        harness.seal("outer")
        harness.seal("g")
        harness.done(harness.take())
        harness.done(harness.take())
        assert harness.counts("t") == Counts(ready=1)


class GroupListSuite(Suite):
    """Groups by state, outcome and prefix, in pages."""

    @pytest.mark.parametrize(
        ("query", "expected"),
        [
            ({}, ["a%", "a_", "ab", "b", "c", "é", "\U0010ffff"]),
            ({"prefix": "a"}, ["a%", "a_", "ab"]),
            ({"prefix": "a%"}, ["a%"]),
            ({"prefix": "A"}, []),
            ({"prefix": "é"}, ["é"]),
            ({"prefix": "\U0010ffff"}, ["\U0010ffff"]),
            ({"prefix": "\ud7ff"}, []),
            ({"states": ("open",)}, ["a%", "a_"]),
            ({"states": (GroupState.SEALED, GroupState.CLOSED)}, ["ab", "b", "c", "é", "\U0010ffff"]),
            ({"states": ("closed",), "prefix": "a"}, []),
            ({"outcomes": ("done",)}, ["b", "é", "\U0010ffff"]),
            ({"outcomes": (State.DONE, State.CANCELED)}, ["b", "c", "é", "\U0010ffff"]),
            ({"outcomes": ("failed",)}, []),
            ({"states": ("open",), "outcomes": ("done",)}, []),
        ],
    )
    def test_groups_by_every_condition(
        self, harness: Harness, query: dict[str, Any], expected: list[str]
    ) -> None:
        for id in ("c", "ab", "b", "a_", "a%", "é", "\U0010ffff"):
            harness.open(id)
        harness.add("member", group="ab")
        harness.seal("ab")
        for id in ("b", "é", "\U0010ffff"):
            harness.seal(id)
        harness.abort("c")
        for descending in (False, True):
            page = harness.ledger.groups(GroupQuery(**query, descending=descending))
            assert [group.id for group in page.groups] == (expected[::-1] if descending else expected)
            assert page.groups == tuple(harness.group(group.id) for group in page.groups)
            assert page.next is None

    @pytest.mark.parametrize("descending", [False, True])
    def test_pages_of_groups_have_no_doubles_or_gaps_while_others_open_groups(
        self, harness: Harness, descending: bool
    ) -> None:
        before = [f"g{n:02}" for n in range(10)]
        for id in [*before, "f", "h"]:
            harness.open(id)
        harness.seal("g04")
        query = GroupQuery(prefix="g", states=(GroupState.OPEN,), limit=3, descending=descending)
        seen: list[str] = []
        page = harness.ledger.groups(query)
        while True:
            seen += [group.id for group in page.groups]
            harness.open(f"{seen[-1]}-new")
            if page.next is None:
                break
            page = harness.ledger.groups(msgspec.structs.replace(query, page=page.next))
        old = [id for id in seen if not id.endswith("-new")]
        assert (len(seen), old) == (len(set(seen)), [id for id in old if id in before])
        assert sorted(old, reverse=descending) == old
        assert set(old) == set(before) - {"g04"}

    @pytest.mark.parametrize(
        "fields",
        [
            {"states": ("shut",)},
            {"outcomes": ("ready",)},
            {"prefix": "\0"},
            {"limit": 0},
            {"limit": 1001},
            {"page": "czE"},
            {"page": "x"},
        ],
    )
    def test_a_wrong_query_of_groups_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput):
            GroupQuery(**fields)
