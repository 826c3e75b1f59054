"""Append: what a new job looks like, dependencies, capacity."""

from __future__ import annotations

import pytest

from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import Append, Appended, Placed
from towpath.core.job import Reason, State
from towpath.core.views import Counts
from towpath.errors import DependencyCycle, InvalidInput, QueueFull, UnknownDependency, UnknownGroup
from towpath.testing.clock import START
from towpath.testing.suite.desk import Desk, Suite, anyway, ids, need, spec, unique, whole_group


class AppendSuite(Suite):
    """A spec becomes a job, once."""

    def test_a_plain_job_is_ready(self, desk: Desk) -> None:
        job = desk.add("a")
        assert (job.state, job.reason, job.seq, job.queue, job.part) == (
            State.READY,
            Reason.NONE,
            1,
            "q",
            None,
        )
        assert (job.created_at, job.ready_at, job.expires_at) == (START, START, None)
        assert (job.started_at, job.finished_at, job.purge_at) == (None, None, None)
        assert (job.attempts, job.failures, job.losses, job.fence, job.waits) == (0, 0, 0, 0, 0)
        assert (job.owner, job.lease_until, job.lease_len, job.cancel_requested) == (None, None, None, None)
        assert (job.settled_fence, job.settled_as, job.result, job.error, job.cursor) == (
            0,
            None,
            None,
            None,
            None,
        )

    def test_every_field_of_the_spec_is_kept(self, desk: Desk) -> None:
        headers = {"a": "1", "ä": "\n", "empty": ""}
        job = desk.add(
            "a",
            "ns/q",
            kind="send",
            payload=b"\0\xff" * 500,
            content_type="application/octet-stream",
            headers=headers,
            priority=-7,
            part="p",
            ttl=HOUR,
            max_attempts=3,
            max_losses=2,
            timeout=9 * SECOND,
            retention=DAY,
            parent="mother",
            generation=4,
            key=unique("k"),
            correlation_id="c",
        )
        assert (job.kind, job.payload, job.content_type) == (
            "send",
            b"\0\xff" * 500,
            "application/octet-stream",
        )
        assert (dict(job.headers), job.priority, job.part, job.expires_at) == (headers, -7, "p", START + HOUR)
        assert (job.max_attempts, job.max_losses, job.timeout, job.retention) == (3, 2, 9 * SECOND, DAY)
        assert (job.parent, job.generation, job.key, job.correlation_id, job.size) == (
            "mother",
            4,
            "k",
            "c",
            1000,
        )
        assert job.key_policy == "unique"

    def test_a_large_payload_comes_back_whole(self, desk: Desk) -> None:
        payload = bytes(range(256)) * (16 * 1024 * 4)
        desk.add("a", payload=payload)
        assert desk.take().job.payload == payload
        assert desk.job("a").payload == payload

    def test_a_hundred_thousand_at_once(self, desk: Desk) -> None:
        placed = desk.append(*[spec(f"j{n}") for n in range(100_000)])
        assert placed[0] == Placed("j0", 1)
        assert placed[-1] == Placed("j99999", 100_000)
        assert desk.counts() == Counts(ready=100_000)

    @pytest.mark.parametrize(
        ("priority", "rank"), [("high", 0), ("normal", 5), ("low", 10), (-32_768, -32_768), (32_767, 32_767)]
    )
    def test_priority_by_name_or_number(self, desk: Desk, priority: int | str, rank: int) -> None:
        assert desk.add("a", priority=priority).priority == rank

    def test_a_delay_schedules(self, desk: Desk) -> None:
        job = desk.add("a", delay=5 * SECOND)
        assert (job.state, job.reason, job.ready_at) == (State.SCHEDULED, Reason.DELAY, START + 5 * SECOND)

    def test_a_time_schedules_unless_it_is_past(self, desk: Desk) -> None:
        assert desk.add("a", ready_at=START + 1).state is State.SCHEDULED
        assert desk.add("b", ready_at=START).state is State.READY
        job = desk.add("c", ready_at=START - SECOND)
        assert (job.state, job.ready_at) == (State.READY, START - SECOND)

    def test_counts_are_exact(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", delay=1), spec("c", after=["a"]), spec("d", "other"))
        assert desk.counts() == Counts(ready=1, scheduled=1, blocked=1)
        assert desk.counts("other") == Counts(ready=1)

    def test_a_known_id_is_a_repeat_whatever_the_spec_says(self, desk: Desk) -> None:
        desk.add("a", payload=b"1")
        with desk.unchanged():
            assert desk.append(spec("a", "other", payload=b"2", after=["nowhere"])) == (Placed("a", 1),)

    def test_an_id_given_twice_in_one_append_is_an_error(self, desk: Desk) -> None:
        for twice in (
            (spec("a", payload=b"1"), spec("b"), spec("a", payload=b"2")),
            (spec("a"), spec("a", key=unique("k"))),
        ):
            with desk.unchanged(), pytest.raises(InvalidInput, match=r"a.*each id once"):
                desk.append(*twice)
        claim = desk.started("p")
        with desk.unchanged(), pytest.raises(InvalidInput, match=r"c.*each id once"):
            desk.done(claim, [spec("c"), spec("c")])

    def test_an_id_in_two_appends_of_one_batch_is_one_job(self, desk: Desk) -> None:
        first, second = desk.ask(
            Append((spec("a", payload=b"1"),)), Append((spec("a", payload=b"2"), spec("b")))
        )
        assert (first, second) == (Appended((Placed("a", 1),)), Appended((Placed("a", 1), Placed("b", 2))))
        assert desk.job("a").payload == b"1"

    def test_known_and_new_ids_may_be_mixed(self, desk: Desk) -> None:
        desk.add("a")
        assert desk.append(spec("b", after=["a"]), spec("a")) == (Placed("b", 2), Placed("a", 1))

    def test_a_finished_job_is_still_a_repeat(self, desk: Desk) -> None:
        desk.done(desk.started("a"))
        assert desk.append(spec("a")) == (Placed("a", 1),)
        assert desk.at("a") == "done"

    def test_a_tombstone_is_a_repeat_for_an_hour(self, desk: Desk) -> None:
        desk.done(desk.started("a"))
        desk.purge("a")
        desk.jump(HOUR - 1)
        desk.upkeep()
        assert desk.append(spec("a")) == (Placed("a", 1),)
        assert desk.ledger.get("a") is None
        desk.jump(1)
        desk.upkeep()
        assert desk.append(spec("a")) == (Placed("a", 2),)

    def test_text_is_compared_by_bytes(self, desk: Desk) -> None:
        assert desk.append(spec("é"), spec("e\u0301"), spec("A"), spec("a")) == tuple(
            Placed(id, n) for n, id in enumerate(["é", "e\u0301", "A", "a"], 1)
        )


class DependencySuite(Suite):
    """What waits for what."""

    def test_a_dependent_waits_and_runs_in_its_turn(self, desk: Desk) -> None:
        desk.append(spec("a"), spec("b", after=["a"]), spec("c", after=["a", "b"]))
        assert desk.at("a", "b", "c") == "ready blocked blocked"
        assert [desk.job(id).waits for id in "abc"] == [0, 1, 2]
        desk.done(desk.take())
        assert desk.at("b", "c") == "ready blocked"
        assert desk.job("c").waits == 1
        desk.done(desk.take())
        assert desk.at("c") == "ready"

    def test_forward_references(self, desk: Desk) -> None:
        desk.append(spec("c", after=["b"]), spec("b", after=["a"]), spec("a"))
        assert [desk.job(id).seq for id in "cba"] == [1, 2, 3]
        for id in "abc":
            claim = desk.take()
            assert claim.id == id
            desk.done(claim)

    def test_on_existing_jobs_in_every_unfinished_state(self, desk: Desk) -> None:
        desk.append(spec("running"), spec("scheduled", "p", delay=1), spec("blocked", after=["running"]))
        desk.take()
        desk.add("x", after=["running", "scheduled", "blocked"])
        assert desk.job("x").waits == 3

    def test_on_finished_jobs(self, desk: Desk) -> None:
        desk.done(desk.started("done"))
        desk.fail(desk.started("failed"))
        desk.add("canceled")
        desk.cancel("canceled")
        assert desk.add("a", after=["done"]).state is State.READY
        desk.append(
            spec("b", after=["failed"]),
            spec("c", after=["canceled"]),
            spec("d", after=["canceled", "failed"]),
        )
        assert desk.at("b", "c", "d") == "failed/dependency canceled/dependency failed/dependency"
        desk.append(spec("e", after=[anyway("failed"), anyway("canceled"), anyway("done")]))
        assert desk.at("e") == "ready"

    def test_born_finished_has_its_times(self, desk: Desk) -> None:
        desk.fail(desk.started("failed"))
        desk.add("canceled")
        desk.cancel("canceled")
        desk.jump(SECOND)
        desk.append(spec("b", after=["failed"]), spec("c", after=["canceled"], retention=5))
        b, c = desk.job("b"), desk.job("c")
        assert (b.finished_at, b.purge_at, b.waits) == (desk.now, None, 0)
        assert (c.finished_at, c.purge_at, c.waits) == (desk.now, desk.now + 5, 0)
        assert desk.counts() == Counts(failed=2, canceled=2)

    def test_a_finished_dependency_is_passed_on_inside_the_append(self, desk: Desk) -> None:
        desk.fail(desk.started("failed"))
        desk.append(spec("c", after=["b"]), spec("b", after=["failed"]), spec("d", after=[anyway("c")]))
        assert desk.at("b", "c", "d") == "failed/dependency failed/dependency ready"

    def test_on_tombstones(self, desk: Desk) -> None:
        desk.done(desk.started("done"))
        desk.fail(desk.started("failed"))
        desk.purge("done", "failed")
        desk.append(
            spec("a", after=["done"]), spec("b", after=["failed"]), spec("c", after=[anyway("failed")])
        )
        assert desk.at("a", "b", "c") == "ready failed/dependency ready"

    def test_on_what_is_long_gone_is_an_error(self, desk: Desk) -> None:
        desk.done(desk.started("done"))
        desk.purge("done")
        desk.jump(HOUR)
        desk.upkeep()
        assert desk.refusal(UnknownDependency, Append((spec("a", after=["done"]),))).details == {
            "ids": ("done",)
        }

    def test_on_groups(self, desk: Desk) -> None:
        desk.open("g")
        desk.add("m", group="g")
        desk.append(spec("a", after=[whole_group("g")]), spec("b", after=[whole_group("g", run_anyway=True)]))
        assert desk.at("a", "b") == "blocked blocked"
        desk.seal("g")
        desk.done(desk.take())
        assert desk.at("a", "b") == "ready ready"

    def test_on_closed_groups(self, desk: Desk) -> None:
        for group, outcome in (("good", "done"), ("bad", "failed"), ("ugly", "canceled")):
            desk.open(group)
            desk.add(group + "1", group=group)
            desk.seal(group)
            if outcome == "canceled":
                desk.cancel(group + "1")
            else:
                claim = desk.take()
                _ = desk.done(claim) if outcome == "done" else desk.fail(claim)
        desk.append(spec("a", after=[whole_group("good")]), spec("b", after=[whole_group("bad")]))
        desk.append(
            spec("c", after=[whole_group("ugly")]), spec("d", after=[whole_group("bad", run_anyway=True)])
        )
        assert desk.at("a", "b", "c", "d") == "ready failed/dependency canceled/dependency ready"

    def test_the_same_dependency_twice_counts_once_and_success_outweighs(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.append(spec("b", after=[anyway("a"), need("a"), anyway("a")]))
        assert desk.job("b").waits == 1
        desk.fail(claim)
        assert desk.at("b") == "failed/dependency"

    def test_a_delay_holds_after_the_dependency_too(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.add("b", after=["a"], delay=SECOND)
        desk.done(claim)
        assert desk.at("b") == "scheduled/delay"

    def test_a_delay_that_is_over_does_not_hold(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.add("b", after=["a"], delay=SECOND)
        desk.jump(SECOND)
        desk.done(claim)
        assert desk.at("b") == "ready"

    def test_unknown_ids_are_named_and_nothing_is_inserted(self, desk: Desk) -> None:
        error = desk.refusal(
            UnknownDependency,
            Append((spec("a"), spec("b", after=["z", "a"]), spec("c", after=["y", whole_group("g")]))),
        )
        assert error.details == {"ids": ("group g", "y", "z")}
        assert desk.found() == []

    def test_cycles_are_named_and_nothing_is_inserted(self, desk: Desk) -> None:
        error = desk.refusal(
            DependencyCycle,
            Append((spec("x"), spec("a", after=["b"]), spec("b", after=["c"]), spec("c", after=["a", "x"]))),
        )
        assert sorted(error.details["ids"]) == ["a", "b", "c"]

    def test_a_job_cannot_wait_for_itself(self, desk: Desk) -> None:
        assert desk.refusal(DependencyCycle, Append((spec("a", after=["a"]),))).details == {"ids": ("a",)}

    def test_a_member_cannot_wait_for_its_own_group(self, desk: Desk) -> None:
        desk.open("g")
        error = desk.refusal(DependencyCycle, Append((spec("a", group="g", after=[whole_group("g")]),)))
        assert sorted(error.details["ids"]) == ["a", "group g"]

    def test_what_waits_for_a_waiter_of_a_group_cannot_join_it(self, desk: Desk) -> None:
        desk.open("g")
        desk.append(spec("w", after=[whole_group("g")]), spec("v", after=["w"]))
        error = desk.refusal(DependencyCycle, Append((spec("a", group="g", after=[anyway("v")]),)))
        assert "a" in error.details["ids"]
        assert desk.append(spec("b", after=["v"])) == (Placed("b", 3),)

    def test_a_cycle_through_two_groups(self, desk: Desk) -> None:
        desk.open("g")
        desk.open("h")
        desk.add("x", group="g", after=[whole_group("h")])
        error = desk.refusal(DependencyCycle, Append((spec("y", group="h", after=[whole_group("g")]),)))
        assert "y" in error.details["ids"]

    def test_a_cycle_through_a_group_inside_one_append(self, desk: Desk) -> None:
        desk.open("g")
        desk.refusal(
            DependencyCycle, Append((spec("a", group="g", after=["b"]), spec("b", after=[whole_group("g")])))
        )

    def test_an_unknown_group_is_an_error(self, desk: Desk) -> None:
        assert desk.refusal(UnknownGroup, Append((spec("a"), spec("b", group="g")))).details == {"group": "g"}

    def test_many_dependents_of_one_and_many_dependencies(self, desk: Desk) -> None:
        desk.append(spec("a"), *[spec(f"m{n}", after=["a"]) for n in range(300)])
        desk.add("z", after=[f"m{n}" for n in range(300)])
        desk.done(desk.take())
        for claim in desk.claim(n=300):
            desk.done(claim)
        assert ids(desk.claim()) == ["z"]


class CapacitySuite(Suite):
    """A queue that is full refuses appends from outside."""

    def test_a_full_queue_refuses_all_or_nothing(self, desk: Desk) -> None:
        desk.set_queue(capacity=2)
        desk.add("a")
        error = desk.refusal(QueueFull, Append((spec("b"), spec("c"), spec("d", "other"))))
        assert error.details == {"queue": "q", "depth": 1, "capacity": 2, "asked": 2, "retry_after": 1.0}
        assert error.retryable
        desk.append(spec("b"), spec("d", "other"))

    def test_capacity_counts_all_that_wait_and_nothing_else(self, desk: Desk) -> None:
        desk.done(desk.started("done"))
        desk.fail(desk.started("failed"))
        desk.started("running")
        desk.set_queue(capacity=3)
        desk.append(spec("ready"), spec("scheduled", delay=1), spec("blocked", after=["running"]))
        error = desk.refusal(QueueFull, Append((spec("x"),)))
        assert error.details["depth"] == 3

    def test_repeats_and_duplicates_need_no_room(self, desk: Desk) -> None:
        desk.set_queue(capacity=1)
        desk.add("a", key=unique("k"))
        assert desk.append(spec("a"), spec("b", key=unique("k"))) == (Placed("a", 1), Placed("a", 1))

    def test_a_capacity_of_zero_is_closed(self, desk: Desk) -> None:
        desk.set_queue(capacity=0)
        desk.refusal(QueueFull, Append((spec("a"),)))
        desk.set_queue(capacity=None)
        desk.add("a")

    def test_children_and_callbacks_are_never_refused(self, desk: Desk) -> None:
        desk.open("g", then={"done": (spec("then"),)})
        claim = desk.started("a", "other")
        desk.add("m", "other", group="g")
        desk.set_queue(capacity=0)
        desk.done(claim, spawn=[spec("child")])
        desk.seal("g")
        desk.done(desk.take("other"))
        assert desk.counts().ready == 2

    def test_a_schedule_that_fires_is_never_refused(self, desk: Desk) -> None:
        """`inside` is admitted alone, in a batch with refused neighbours, with a key, and again."""
        desk.set_queue(capacity=0)
        inside = Append((spec("a"), spec("b", key=unique("k"))), inside=True)
        refused, first, again = desk.ask(Append((spec("x"),)), inside, inside)
        assert isinstance(refused, QueueFull)
        assert first == again == Appended((Placed("a", 1), Placed("b", 2)))
        desk.do(Appended, Append((spec("c"),), inside=True))
        assert desk.counts().ready == 3
        assert desk.job("a").parent is None

    def test_what_comes_back_is_never_refused(self, desk: Desk) -> None:
        claim = desk.started("a")
        desk.cancel("a")
        desk.set_queue(capacity=0)
        desk.done(claim)
        desk.set_queue(capacity=None)
        desk.fail(desk.started("b"))
        desk.set_queue(capacity=0)
        assert desk.revive("b").revived == 1
