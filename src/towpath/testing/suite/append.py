"""Append: the record of a new job, dependencies, capacity."""

from __future__ import annotations

import pytest

from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import Append, Appended, Placed
from towpath.core.job import Reason, State
from towpath.core.views import Counts
from towpath.errors import DependencyCycle, InvalidInput, QueueFull, UnknownDependency, UnknownGroup
from towpath.testing.clock import START
from towpath.testing.suite.harness import Harness, Suite, anyway, ids, need, spec, unique, whole_group


class AppendSuite(Suite):
    """A spec becomes a job, once."""

    def test_a_plain_job_is_ready(self, harness: Harness) -> None:
        job = harness.add("a")
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

    def test_every_field_of_the_spec_is_kept(self, harness: Harness) -> None:
        headers = {"a": "1", "ä": "\n", "empty": ""}
        job = harness.add(
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

    def test_a_large_payload_comes_back_whole(self, harness: Harness) -> None:
        payload = bytes(range(256)) * (16 * 1024 * 4)
        harness.add("a", payload=payload)
        assert harness.take().job.payload == payload
        assert harness.job("a").payload == payload

    def test_a_hundred_thousand_at_once(self, harness: Harness) -> None:
        placed = harness.append(*[spec(f"j{n}") for n in range(100_000)])
        assert placed[0] == Placed("j0", 1)
        assert placed[-1] == Placed("j99999", 100_000)
        assert harness.counts() == Counts(ready=100_000)

    @pytest.mark.parametrize(
        ("priority", "rank"), [("high", 0), ("normal", 5), ("low", 10), (-32_768, -32_768), (32_767, 32_767)]
    )
    def test_priority_by_name_or_number(self, harness: Harness, priority: int | str, rank: int) -> None:
        assert harness.add("a", priority=priority).priority == rank

    def test_a_delay_schedules(self, harness: Harness) -> None:
        job = harness.add("a", delay=5 * SECOND)
        assert (job.state, job.reason, job.ready_at) == (State.SCHEDULED, Reason.DELAY, START + 5 * SECOND)

    def test_a_time_schedules_unless_it_is_past(self, harness: Harness) -> None:
        assert harness.add("a", ready_at=START + 1).state is State.SCHEDULED
        assert harness.add("b", ready_at=START).state is State.READY
        job = harness.add("c", ready_at=START - SECOND)
        assert (job.state, job.ready_at) == (State.READY, START - SECOND)

    def test_counts_are_exact(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", delay=1), spec("c", after=["a"]), spec("d", "other"))
        assert harness.counts() == Counts(ready=1, scheduled=1, blocked=1)
        assert harness.counts("other") == Counts(ready=1)

    def test_a_known_id_is_a_repeat_whatever_the_spec_says(self, harness: Harness) -> None:
        harness.add("a", payload=b"1")
        with harness.unchanged():
            assert harness.append(spec("a", "other", payload=b"2", after=["nowhere"])) == (Placed("a", 1),)

    def test_an_id_given_twice_in_one_append_is_an_error(self, harness: Harness) -> None:
        for twice in (
            (spec("a", payload=b"1"), spec("b"), spec("a", payload=b"2")),
            (spec("a"), spec("a", key=unique("k"))),
        ):
            with harness.unchanged(), pytest.raises(InvalidInput, match=r"a.*used once"):
                harness.append(*twice)
        claim = harness.started("p")
        with harness.unchanged(), pytest.raises(InvalidInput, match=r"c.*used once"):
            harness.done(claim, [spec("c"), spec("c")])

    def test_an_id_in_two_appends_of_one_batch_is_one_job(self, harness: Harness) -> None:
        first, second = harness.ask(
            Append((spec("a", payload=b"1"),)), Append((spec("a", payload=b"2"), spec("b")))
        )
        assert (first, second) == (Appended((Placed("a", 1),)), Appended((Placed("a", 1), Placed("b", 2))))
        assert harness.job("a").payload == b"1"

    def test_known_and_new_ids_may_be_mixed(self, harness: Harness) -> None:
        harness.add("a")
        assert harness.append(spec("b", after=["a"]), spec("a")) == (Placed("b", 2), Placed("a", 1))

    def test_a_finished_job_is_still_a_repeat(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        assert harness.append(spec("a")) == (Placed("a", 1),)
        assert harness.at("a") == "done"

    def test_a_tombstone_is_a_repeat_for_an_hour(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        harness.purge("a")
        harness.jump(HOUR - 1)
        harness.upkeep()
        assert harness.append(spec("a")) == (Placed("a", 1),)
        assert harness.ledger.get("a") is None
        harness.jump(1)
        harness.upkeep()
        assert harness.append(spec("a")) == (Placed("a", 2),)

    def test_text_is_compared_by_bytes(self, harness: Harness) -> None:
        assert harness.append(spec("é"), spec("e\u0301"), spec("A"), spec("a")) == tuple(
            Placed(id, n) for n, id in enumerate(["é", "e\u0301", "A", "a"], 1)
        )


class DependencySuite(Suite):
    """Dependencies of new jobs."""

    def test_a_dependent_waits_and_runs_in_its_turn(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", after=["a"]), spec("c", after=["a", "b"]))
        assert harness.at("a", "b", "c") == "ready blocked blocked"
        assert [harness.job(id).waits for id in "abc"] == [0, 1, 2]
        harness.done(harness.take())
        assert harness.at("b", "c") == "ready blocked"
        assert harness.job("c").waits == 1
        harness.done(harness.take())
        assert harness.at("c") == "ready"

    def test_forward_references(self, harness: Harness) -> None:
        harness.append(spec("c", after=["b"]), spec("b", after=["a"]), spec("a"))
        assert [harness.job(id).seq for id in "cba"] == [1, 2, 3]
        for id in "abc":
            claim = harness.take()
            assert claim.id == id
            harness.done(claim)

    def test_on_existing_jobs_in_every_unfinished_state(self, harness: Harness) -> None:
        harness.append(spec("running"), spec("scheduled", "p", delay=1), spec("blocked", after=["running"]))
        harness.take()
        harness.add("x", after=["running", "scheduled", "blocked"])
        assert harness.job("x").waits == 3

    def test_on_finished_jobs(self, harness: Harness) -> None:
        harness.done(harness.started("done"))
        harness.fail(harness.started("failed"))
        harness.add("canceled")
        harness.cancel("canceled")
        assert harness.add("a", after=["done"]).state is State.READY
        harness.append(
            spec("b", after=["failed"]),
            spec("c", after=["canceled"]),
            spec("d", after=["canceled", "failed"]),
        )
        assert harness.at("b", "c", "d") == "failed/dependency canceled/dependency failed/dependency"
        harness.append(spec("e", after=[anyway("failed"), anyway("canceled"), anyway("done")]))
        assert harness.at("e") == "ready"

    def test_born_finished_has_its_times(self, harness: Harness) -> None:
        harness.fail(harness.started("failed"))
        harness.add("canceled")
        harness.cancel("canceled")
        harness.jump(SECOND)
        harness.append(spec("b", after=["failed"]), spec("c", after=["canceled"], retention=5))
        b, c = harness.job("b"), harness.job("c")
        assert (b.finished_at, b.purge_at, b.waits) == (harness.now, None, 0)
        assert (c.finished_at, c.purge_at, c.waits) == (harness.now, harness.now + 5, 0)
        assert harness.counts() == Counts(failed=2, canceled=2)

    def test_a_finished_dependency_is_passed_on_inside_the_append(self, harness: Harness) -> None:
        harness.fail(harness.started("failed"))
        harness.append(spec("c", after=["b"]), spec("b", after=["failed"]), spec("d", after=[anyway("c")]))
        assert harness.at("b", "c", "d") == "failed/dependency failed/dependency ready"

    def test_on_tombstones(self, harness: Harness) -> None:
        harness.done(harness.started("done"))
        harness.fail(harness.started("failed"))
        harness.purge("done", "failed")
        harness.append(
            spec("a", after=["done"]), spec("b", after=["failed"]), spec("c", after=[anyway("failed")])
        )
        assert harness.at("a", "b", "c") == "ready failed/dependency ready"

    def test_on_what_is_long_gone_is_an_error(self, harness: Harness) -> None:
        harness.done(harness.started("done"))
        harness.purge("done")
        harness.jump(HOUR)
        harness.upkeep()
        assert harness.refusal(UnknownDependency, Append((spec("a", after=["done"]),))).details == {
            "ids": ("done",)
        }

    def test_on_groups(self, harness: Harness) -> None:
        harness.open("g")
        harness.add("m", group="g")
        harness.append(
            spec("a", after=[whole_group("g")]), spec("b", after=[whole_group("g", run_anyway=True)])
        )
        assert harness.at("a", "b") == "blocked blocked"
        harness.seal("g")
        harness.done(harness.take())
        assert harness.at("a", "b") == "ready ready"

    def test_on_closed_groups(self, harness: Harness) -> None:
        for group, outcome in (("good", "done"), ("bad", "failed"), ("ugly", "canceled")):
            harness.open(group)
            harness.add(group + "1", group=group)
            harness.seal(group)
            if outcome == "canceled":
                harness.cancel(group + "1")
            else:
                claim = harness.take()
                _ = harness.done(claim) if outcome == "done" else harness.fail(claim)
        harness.append(spec("a", after=[whole_group("good")]), spec("b", after=[whole_group("bad")]))
        harness.append(
            spec("c", after=[whole_group("ugly")]), spec("d", after=[whole_group("bad", run_anyway=True)])
        )
        assert harness.at("a", "b", "c", "d") == "ready failed/dependency canceled/dependency ready"

    def test_the_same_dependency_twice_counts_once_and_success_outweighs(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.append(spec("b", after=[anyway("a"), need("a"), anyway("a")]))
        assert harness.job("b").waits == 1
        harness.fail(claim)
        assert harness.at("b") == "failed/dependency"

    def test_a_delay_holds_after_the_dependency_too(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.add("b", after=["a"], delay=SECOND)
        harness.done(claim)
        assert harness.at("b") == "scheduled/delay"

    def test_a_delay_that_is_over_does_not_hold(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.add("b", after=["a"], delay=SECOND)
        harness.jump(SECOND)
        harness.done(claim)
        assert harness.at("b") == "ready"

    def test_unknown_ids_are_named_and_nothing_is_inserted(self, harness: Harness) -> None:
        error = harness.refusal(
            UnknownDependency,
            Append((spec("a"), spec("b", after=["z", "a"]), spec("c", after=["y", whole_group("g")]))),
        )
        assert error.details == {"ids": ("group g", "y", "z")}
        assert harness.found() == []

    def test_cycles_are_named_and_nothing_is_inserted(self, harness: Harness) -> None:
        error = harness.refusal(
            DependencyCycle,
            Append((spec("x"), spec("a", after=["b"]), spec("b", after=["c"]), spec("c", after=["a", "x"]))),
        )
        assert sorted(error.details["ids"]) == ["a", "b", "c"]

    def test_a_job_cannot_wait_for_itself(self, harness: Harness) -> None:
        assert harness.refusal(DependencyCycle, Append((spec("a", after=["a"]),))).details == {"ids": ("a",)}

    def test_a_member_cannot_wait_for_its_own_group(self, harness: Harness) -> None:
        harness.open("g")
        error = harness.refusal(DependencyCycle, Append((spec("a", group="g", after=[whole_group("g")]),)))
        assert sorted(error.details["ids"]) == ["a", "group g"]

    def test_what_waits_for_a_waiter_of_a_group_cannot_join_it(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("w", after=[whole_group("g")]), spec("v", after=["w"]))
        error = harness.refusal(DependencyCycle, Append((spec("a", group="g", after=[anyway("v")]),)))
        assert "a" in error.details["ids"]
        assert harness.append(spec("b", after=["v"])) == (Placed("b", 3),)

    def test_a_cycle_through_two_groups(self, harness: Harness) -> None:
        harness.open("g")
        harness.open("h")
        harness.add("x", group="g", after=[whole_group("h")])
        error = harness.refusal(DependencyCycle, Append((spec("y", group="h", after=[whole_group("g")]),)))
        assert "y" in error.details["ids"]

    def test_a_cycle_through_a_group_inside_one_append(self, harness: Harness) -> None:
        harness.open("g")
        harness.refusal(
            DependencyCycle, Append((spec("a", group="g", after=["b"]), spec("b", after=[whole_group("g")])))
        )

    def test_an_unknown_group_is_an_error(self, harness: Harness) -> None:
        assert harness.refusal(UnknownGroup, Append((spec("a"), spec("b", group="g")))).details == {
            "group": "g"
        }

    def test_many_dependents_of_one_and_many_dependencies(self, harness: Harness) -> None:
        harness.append(spec("a"), *[spec(f"m{n}", after=["a"]) for n in range(300)])
        harness.add("z", after=[f"m{n}" for n in range(300)])
        harness.done(harness.take())
        for claim in harness.claim(n=300):
            harness.done(claim)
        assert ids(harness.claim()) == ["z"]


class CapacitySuite(Suite):
    """A queue that is full refuses appends from outside."""

    def test_a_full_queue_refuses_all_or_nothing(self, harness: Harness) -> None:
        harness.set_queue(capacity=2)
        harness.add("a")
        error = harness.refusal(QueueFull, Append((spec("b"), spec("c"), spec("d", "other"))))
        assert error.details == {"queue": "q", "depth": 1, "capacity": 2, "asked": 2, "retry_after": 1.0}
        assert error.retryable
        harness.append(spec("b"), spec("d", "other"))

    def test_capacity_counts_all_that_wait_and_nothing_else(self, harness: Harness) -> None:
        harness.done(harness.started("done"))
        harness.fail(harness.started("failed"))
        harness.started("running")
        harness.set_queue(capacity=3)
        harness.append(spec("ready"), spec("scheduled", delay=1), spec("blocked", after=["running"]))
        error = harness.refusal(QueueFull, Append((spec("x"),)))
        assert error.details["depth"] == 3

    def test_repeats_and_duplicates_need_no_room(self, harness: Harness) -> None:
        harness.set_queue(capacity=1)
        harness.add("a", key=unique("k"))
        assert harness.append(spec("a"), spec("b", key=unique("k"))) == (Placed("a", 1), Placed("a", 1))

    def test_a_capacity_of_zero_is_closed(self, harness: Harness) -> None:
        harness.set_queue(capacity=0)
        harness.refusal(QueueFull, Append((spec("a"),)))
        harness.set_queue(capacity=None)
        harness.add("a")

    def test_children_and_callbacks_are_never_refused(self, harness: Harness) -> None:
        harness.open("g", then={"done": (spec("then"),)})
        claim = harness.started("a", "other")
        harness.add("m", "other", group="g")
        harness.set_queue(capacity=0)
        harness.done(claim, spawn=[spec("child")])
        harness.seal("g")
        harness.done(harness.take("other"))
        assert harness.counts().ready == 2

    def test_a_schedule_that_fires_is_never_refused(self, harness: Harness) -> None:
        """`inside` is admitted alone, in a batch with refused neighbours, with a key, and again."""
        harness.set_queue(capacity=0)
        inside = Append((spec("a"), spec("b", key=unique("k"))), inside=True)
        refused, first, again = harness.ask(Append((spec("x"),)), inside, inside)
        assert isinstance(refused, QueueFull)
        assert first == again == Appended((Placed("a", 1), Placed("b", 2)))
        harness.do(Appended, Append((spec("c"),), inside=True))
        assert harness.counts().ready == 3
        assert harness.job("a").parent is None

    def test_what_comes_back_is_never_refused(self, harness: Harness) -> None:
        claim = harness.started("a")
        harness.cancel("a")
        harness.set_queue(capacity=0)
        harness.done(claim)
        harness.set_queue(capacity=None)
        harness.fail(harness.started("b"))
        harness.set_queue(capacity=0)
        assert harness.revive("b").revived == 1
