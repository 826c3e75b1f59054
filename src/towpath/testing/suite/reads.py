"""Reads: get, find, counts, groups; and explain for each gate."""

from __future__ import annotations

from typing import Any

import pytest

from towpath.core.checks import SECOND, optional_utc
from towpath.core.edges import EdgeQuery
from towpath.core.explain import OF_WORKERS, Explanation, GateName, when
from towpath.core.job import Refuse, RetryOutcome, State
from towpath.core.limits import Rate
from towpath.core.views import Counts, NoteQuery, Query
from towpath.errors import UnknownJob
from towpath.ledger import Ledger
from towpath.testing.clock import START
from towpath.testing.suite.harness import LEASE, Harness, Suite, anyway, spec, unique, whole_group


class ReadSuite(Suite):
    """Reads change nothing."""

    def test_what_is_not_there(self, ledger: Ledger) -> None:
        assert ledger.get("nowhere") is None
        assert ledger.find(Query()).jobs == ()
        assert ledger.find(Query()).next is None
        assert ledger.queues() == {}
        assert ledger.queue("nowhere") is None
        assert ledger.edges(EdgeQuery(into="nowhere")).edges == ()
        assert ledger.edges(EdgeQuery(into_group="nothing")).edges == ()
        assert ledger.notes(NoteQuery()).notes == ()
        assert ledger.parts("nowhere") == {}
        assert ledger.group("nothing") is None
        assert ledger.note("nothing") is None

    def test_many_at_once(self, harness: Harness, ledger: Ledger) -> None:
        harness.add("a", payload=b"1")
        harness.add("b", payload=b"2", headers={"h": "x"})
        assert ledger.get_many([]) == {}
        assert ledger.get_many(["b", "nowhere", "a", "b"]) == {"a": ledger.get("a"), "b": ledger.get("b")}
        bare = ledger.get_many(["b"], bodies=False)["b"]
        assert (bare.id, bare.size, bare.payload, dict(bare.headers)) == ("b", bare.size, b"", {})

    def test_lookup(self, harness: Harness, ledger: Ledger) -> None:
        """An id denotes only its job, even if other ids begin with it."""
        uuids = [f"0199aa00-0000-7000-8000-00000000{n:x}abc" for n in (0x2, 0x1)]
        harness.append(*[spec(id, payload=b"p") for id in (*uuids, "order-1", "order-17", "order-é", "7")])
        second, first = [ledger.get_many(uuids)[id] for id in uuids]
        assert (first.short_id, second.short_id) == (f"{first.seq}-1abc", f"{second.seq}-2abc")

        def found(text: str, limit: int = 10) -> list[str]:
            return [job.id for job in ledger.lookup(text, limit)]

        assert found(second.id) == found(second.short_id) == found(second.id[:33]) == [second.id]
        assert found("0199aa") == [first.id, second.id]
        assert found("0199aa", limit=1) == [first.id]
        assert found("order-") == ["order-1", "order-17", "order-é"]
        assert found("order-1") == ["order-1"]
        assert found("order-é") == ["order-é"]
        assert found("7") == ["7"]
        wrong = ["", "0199a", "order", "order-2", f"{first.seq}-2abc", f"{first.seq}", "99-1abc", "a\0b", "%"]
        assert [found(text) for text in wrong] == [[]] * len(wrong)
        assert ledger.lookup("7")[0].payload == b""

    def test_reads_change_nothing(self, harness: Harness, ledger: Ledger) -> None:
        harness.started("a", ttl=SECOND)
        harness.add("b", delay=SECOND)
        harness.write("k", ttl=SECOND)
        version = ledger.version()
        later = START + 2 * SECOND
        with harness.unchanged():
            assert ledger.get("a") is not None
            assert len(ledger.find(Query()).jobs) == 2
            assert ledger.explain("b", later).gate is GateName.NEXT
            assert ledger.note("k", later) is None
            assert len(ledger.queues()) == 1
        assert ledger.version() == version

    @pytest.mark.parametrize(
        ("query", "expected"),
        [
            ({}, ["a", "b", "c", "d", "e"]),
            ({"queue": "x/1"}, ["a", "e"]),
            ({"queue": "x/*"}, ["a", "b", "e"]),
            ({"queue": "*"}, ["a", "b", "c", "d", "e"]),
            ({"queue": "x"}, []),
            ({"part": "p"}, ["b"]),
            ({"states": (State.SCHEDULED,)}, ["e"]),
            ({"states": (State.SCHEDULED, State.BLOCKED)}, ["c", "e"]),
            ({"states": (State.RUNNING,)}, ["a"]),
            ({"kind": "mail"}, ["b", "d"]),
            ({"kind": ""}, ["a", "c", "e"]),
            ({"group": "g"}, ["c"]),
            ({"key": "k"}, ["d"]),
            ({"parent": "m"}, ["b", "d", "e"]),
            ({"parent": "m", "generation": 0}, ["d"]),
            ({"parent": "m", "generation": 1}, ["b", "e"]),
            ({"parent": "m", "generation": 1, "states": (State.SCHEDULED,)}, ["e"]),
            ({"parent": "m", "states": (State.FAILED,)}, []),
            ({"parent": "nothing"}, []),
            ({"generation": 0}, ["a", "c", "d"]),
            ({"owner": "w1"}, ["a"]),
            ({"owner": "w2"}, []),
            ({"correlation_id": "cc"}, ["d", "e"]),
            ({"created_from": START + SECOND}, ["e"]),
            ({"created_before": START + SECOND}, ["a", "b", "c", "d"]),
            ({"created_from": START, "created_before": START + SECOND + 1}, ["a", "b", "c", "d", "e"]),
            ({"header": ("tenant", "7")}, ["a", "d"]),
            ({"header": ("tenant", "77")}, []),
            ({"header": ("Tenant", "7")}, []),
            ({"header": ("7", "tenant")}, []),
            ({"kind": "mail", "header": ("tenant", "7")}, ["d"]),
            ({"kind": "mail", "queue": "x/*", "states": (State.READY,)}, ["b"]),
        ],
    )
    def test_find_by_every_condition(
        self, harness: Harness, query: dict[str, Any], expected: list[str]
    ) -> None:
        harness.open("g")
        harness.append(
            spec("a", "x/1", headers={"tenant": "7", "x": "y"}),
            spec("b", "x/2", part="p", kind="mail", parent="m", generation=1),
        )
        harness.append(spec("c", "y", group="g", headers={"tenant": "8"}))
        fields = {"kind": "mail", "parent": "m", "headers": {"tenant": "7"}, "correlation_id": "cc"}
        harness.append(spec("d", "y", key=unique("k"), **fields))
        harness.take("x/1", owner="w1")
        harness.jump(SECOND)
        harness.append(spec("e", "x/1", delay=SECOND, correlation_id="cc", parent="m", generation=1))
        assert harness.found(**query) == expected
        assert harness.found(**query, oldest_first=False) == expected[::-1]

    def test_find_returns_whole_jobs(self, harness: Harness, ledger: Ledger) -> None:
        claim = harness.started("a", payload=b"p", headers={"h": "1"})
        harness.settle(claim, RetryOutcome(error="boom"))
        (job,) = ledger.find(Query()).jobs
        assert job == ledger.get("a")

    def test_find_without_bodies(self, harness: Harness, ledger: Ledger) -> None:
        claim = harness.started("a", payload=b"p", headers={"h": "1"})
        harness.settle(claim, RetryOutcome(error="boom"))
        (job,) = ledger.find(Query(bodies=False)).jobs
        assert (job.payload, dict(job.headers), job.result, job.error, job.cursor) == (
            b"",
            {},
            None,
            None,
            None,
        )
        assert (job.id, job.size, job.failures) == ("a", 1, 1)

    @pytest.mark.parametrize("oldest_first", [True, False])
    def test_pages(self, harness: Harness, ledger: Ledger, oldest_first: bool) -> None:
        expected = [f"j{n}" for n in range(10)]
        harness.append(*[spec(id) for id in expected])
        seen: list[str] = []
        page = ledger.find(Query(limit=3, oldest_first=oldest_first))
        sizes = [len(page.jobs)]
        seen += [job.id for job in page.jobs]
        while page.next is not None:
            page = ledger.find(Query(limit=3, oldest_first=oldest_first, page=page.next))
            sizes.append(len(page.jobs))
            seen += [job.id for job in page.jobs]
        assert seen == (expected if oldest_first else expected[::-1])
        assert sizes == [3, 3, 3, 1]

    def test_a_full_last_page_has_no_next(self, harness: Harness, ledger: Ledger) -> None:
        harness.append(spec("a"), spec("b"))
        assert ledger.find(Query(limit=2)).next is None
        assert ledger.find(Query(limit=1)).next is not None

    @pytest.mark.parametrize("oldest_first", [True, False])
    def test_pages_have_no_doubles_or_gaps_while_others_insert_and_delete(
        self, harness: Harness, oldest_first: bool
    ) -> None:
        before = [f"j{n}" for n in range(20)]
        harness.append(*[spec(id) for id in before])
        seen: list[str] = []
        page: str | None = None
        for turn in range(100):
            answer = harness.ledger.find(Query(limit=4, oldest_first=oldest_first, page=page))
            seen += [job.id for job in answer.jobs]
            if turn < 5:
                harness.add(f"new{turn}", priority="high")
                harness.cancel(seen[-1])
                harness.purge(seen[-1])
            page = answer.next
            if page is None:
                break
        assert len(seen) == len(set(seen))
        assert [id for id in seen if not id.startswith("new")] == (before if oldest_first else before[::-1])

    def test_pages_keep_their_filter(self, harness: Harness, ledger: Ledger) -> None:
        harness.append(*[spec(f"{queue}{n}", queue) for n in range(5) for queue in "xy"])
        first = ledger.find(Query(queue="x", limit=3, oldest_first=True))
        second = ledger.find(Query(queue="x", limit=3, oldest_first=True, page=first.next))
        assert [job.id for job in first.jobs + second.jobs] == [f"x{n}" for n in range(5)]
        assert second.next is None

    def test_counts_follow_every_state(self, harness: Harness) -> None:
        harness.done(harness.started("done"))
        harness.fail(harness.started("failed"))
        harness.add("canceled")
        harness.cancel("canceled")
        harness.started("running")
        harness.append(spec("ready"), spec("scheduled", delay=1), spec("blocked", after=["ready"]))
        assert harness.counts() == Counts(1, 1, 1, 1, 1, 1, 1)
        assert (harness.counts().waiting, harness.counts().finished) == (3, 3)

    def test_oldest_ready(self, harness: Harness) -> None:
        harness.add("s", delay=3 * SECOND)
        assert harness.queue().oldest_ready is None
        harness.add("a", priority="high")
        harness.jump(SECOND)
        harness.add("b")
        assert harness.queue().oldest_ready == START
        harness.take()
        assert harness.queue().oldest_ready == START + SECOND
        harness.take()
        assert harness.queue().oldest_ready is None
        harness.jump(5 * SECOND)
        harness.upkeep()
        assert harness.queue().oldest_ready == START + 3 * SECOND

    def test_a_queue_has_its_settings(self, harness: Harness) -> None:
        harness.set_queue(
            "x", paused=True, why="w", capacity=1, cap=2, rate=Rate(3), retention=4, keep=5, not_before=6
        )
        view = harness.queue("x")
        assert (view.name, view.paused, view.why, view.capacity, view.cap) == ("x", True, "w", 1, 2)
        assert (view.rate, view.retention, view.keep, view.next_at) == (Rate(3), 4, 5, 6)


class ExplainSuite(Suite):
    """The reason why a job does not run, for each gate."""

    def explain(self, harness: Harness, id: str, gate: GateName, sentence: str, **fields: Any) -> None:
        until = optional_utc(fields.pop("until", None))
        expected = Explanation(id, gate, f"job {id}: {sentence}", **fields, until=until)
        assert harness.ledger.explain(id, harness.now) == expected

    def test_explain_unknown(self, ledger: Ledger) -> None:
        with pytest.raises(UnknownJob) as caught:
            ledger.explain("nowhere", START)
        assert caught.value.details == {"id": "nowhere"}

    def test_explain_finished(self, harness: Harness) -> None:
        harness.done(harness.started("a"))
        harness.fail(harness.started("b"))
        self.explain(harness, "a", GateName.FINISHED, f"finished: done at {when(START)}", until=START)
        self.explain(
            harness, "b", GateName.FINISHED, f"finished: failed (fatal) at {when(START)}", until=START
        )

    def test_explain_names_the_culprit(self, harness: Harness) -> None:
        harness.append(
            spec("a"), spec("x", "other"), spec("b", after=["a", anyway("x")]), spec("c", after=["b", "x"])
        )
        harness.add("d", after=["c"])
        harness.jump(SECOND)
        harness.fail(harness.take())
        harness.jump(SECOND)
        harness.fail(harness.take("other"))
        text = (
            f"finished: failed (dependency) at {when(START + SECOND)}, because job a failed (fatal): broken"
        )
        for id in ("b", "c", "d"):
            self.explain(harness, id, GateName.FINISHED, text, by=("a",), count=1, until=START + SECOND)
        harness.append(spec("e", after=["d", "x"]), spec("f", "other"), spec("g", after=["f"]))
        assert harness.ledger.explain("e", harness.now).by == ("a",)
        harness.cancel("f")
        self.explain(
            harness,
            "g",
            GateName.FINISHED,
            f"finished: canceled (dependency) at {when(harness.now)}, because job f was canceled (requested)",
            by=("f",),
            count=1,
            until=harness.now,
        )
        harness.purge("f")
        self.explain(
            harness,
            "g",
            GateName.FINISHED,
            f"finished: canceled (dependency) at {when(harness.now)}",
            until=harness.now,
        )

    def test_explain_names_the_culprit_in_a_group(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(
            spec("a", group="g"),
            spec("b", group="g"),
            spec("c", after=[whole_group("g")]),
            spec("d", after=["c"]),
        )
        harness.seal("g")
        first, second = harness.claim(n=2)
        harness.fail(first)
        harness.jump(SECOND)
        harness.done(second)
        assert harness.at("c", "d") == "failed/dependency failed/dependency"
        assert [harness.ledger.explain(id, harness.now).by for id in ("c", "d")] == [("a",), ("a",)]

    def test_explain_running(self, harness: Harness) -> None:
        harness.started("a")
        until = START + LEASE
        self.explain(harness, "a", GateName.RUNNING, f"leased by worker until {when(until)}", until=until)
        harness.cancel("a")
        self.explain(
            harness,
            "a",
            GateName.RUNNING,
            f"leased by worker until {when(until)}, asked to stop (requested)",
            until=until,
        )

    def test_explain_waits(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b", after=["a"]))
        self.explain(harness, "b", GateName.WAITS, "waits for 1 job: a", by=("a",), count=1)

    def test_explain_waits_for_many(self, harness: Harness) -> None:
        harness.append(*[spec(f"j{n}") for n in range(8)], spec("z", after=[f"j{n}" for n in range(8)]))
        harness.done(harness.take())
        names = ("j1", "j2", "j3", "j4", "j5")
        self.explain(
            harness, "z", GateName.WAITS, "waits for 7 jobs: j1, j2, j3, j4, j5 and 2 more", by=names, count=7
        )

    def test_explain_waits_for_groups(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(
            spec("a"), spec("b", after=[whole_group("g")]), spec("c", after=["a", whole_group("g")])
        )
        self.explain(harness, "b", GateName.WAITS, "waits for 1 group: g", by=("g",), count=1)
        self.explain(harness, "c", GateName.WAITS, "waits for 2 job or groups: a, g", by=("a", "g"), count=2)

    def test_explain_unsealed(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("a", group="g"), spec("b", group="g", after=["a"]))
        self.explain(harness, "a", GateName.UNSEALED, "group g is not sealed", by=("g",), count=1)
        self.explain(
            harness, "b", GateName.WAITS, "waits for 1 job: a, and group g is not sealed", by=("a",), count=1
        )

    def test_explain_group_paused(self, harness: Harness) -> None:
        harness.open("g")
        harness.append(spec("a", group="g"), spec("b", group="g", after=["a"]))
        harness.seal("g")
        harness.unseal("g", "a new disk")
        text = "group g is paused: a new disk; resume it with `towpath groups resume g`"
        self.explain(harness, "a", GateName.GROUP_PAUSED, text, by=("g",), count=1)
        self.explain(
            harness,
            "b",
            GateName.WAITS,
            "waits for 1 job: a, and group g is paused: a new disk",
            by=("a",),
            count=1,
        )

    def test_explain_scheduled(self, harness: Harness) -> None:
        harness.add("a", delay=SECOND)
        until = START + SECOND
        self.explain(harness, "a", GateName.SCHEDULED, f"scheduled (delay) until {when(until)}", until=until)

    def test_explain_expired(self, harness: Harness) -> None:
        harness.add("a", ttl=SECOND)
        harness.jump(SECOND)
        self.explain(
            harness,
            "a",
            GateName.EXPIRED,
            f"expired at {when(harness.now)} and will not run",
            until=harness.now,
        )

    def test_explain_queue_paused(self, harness: Harness) -> None:
        harness.add("a", part="p")
        harness.set_queue(paused=True)
        self.explain(harness, "a", GateName.QUEUE_PAUSED, "queue q is paused by hand")
        harness.set_queue(why="maintenance")
        self.explain(harness, "a", GateName.QUEUE_PAUSED, "queue q is paused by hand: maintenance")

    def test_explain_queue_held(self, harness: Harness) -> None:
        harness.add("a")
        until = START + SECOND
        harness.set_queue(not_before=until, why="breaker")
        self.explain(
            harness, "a", GateName.QUEUE_HELD, f"queue q is held until {when(until)}: breaker", until=until
        )

    def test_explain_queue_rate(self, harness: Harness) -> None:
        harness.set_queue(rate=Rate(1, 2))
        harness.append(spec("a"), spec("b"))
        harness.take()
        until = START + 2 * SECOND
        self.explain(
            harness, "b", GateName.QUEUE_RATE, "rate limit of queue q (1/2s): next permit in 2 s", until=until
        )

    def test_explain_queue_cap(self, harness: Harness) -> None:
        harness.set_queue(cap=2)
        harness.append(spec("a"), spec("b"), spec("c"))
        harness.claim(n=2)
        self.explain(
            harness, "c", GateName.QUEUE_CAP, "cap 2 of queue q reached by a, b", by=("a", "b"), count=2
        )

    def test_explain_queue_cap_comes_before_the_part(self, harness: Harness) -> None:
        harness.set_queue(cap=1)
        harness.set_part("p", cap=0)
        harness.append(spec("a", part="r"), spec("b", part="p"))
        harness.take()
        self.explain(harness, "b", GateName.QUEUE_CAP, "cap 1 of queue q reached by a", by=("a",), count=1)

    def test_explain_part_paused(self, harness: Harness) -> None:
        harness.add("a", part="p")
        harness.set_part("p", paused=True, why="unpaid")
        self.explain(harness, "a", GateName.PART_PAUSED, "part p of queue q is paused by hand: unpaid")

    def test_explain_breaker(self, harness: Harness) -> None:
        harness.append(spec("a", part="p"), spec("b", part="p"), spec("c", part="p"))
        until = START + SECOND
        harness.set_part("p", not_before=until, cap=1, why="breaker x: 5 failures in 60 s")
        text = f"breaker x is open until {when(until)} (5 failures in 60 s)"
        self.explain(harness, "a", GateName.BREAKER, text, until=until)
        harness.jump(SECOND)
        harness.settle(harness.take(), Refuse(error="breaker y is open"))
        then = when(harness.now + SECOND)
        self.explain(
            harness,
            "a",
            GateName.SCHEDULED,
            f"scheduled (refused) until {then}: breaker y is open",
            until=harness.now + SECOND,
        )
        harness.take()
        text = "breaker x is half open (5 failures in 60 s): 1 probes allowed, 1 running: b"
        self.explain(harness, "c", GateName.BREAKER, text, by=("b",), count=1)

    def test_explain_part_held(self, harness: Harness) -> None:
        harness.add("a", part="p")
        until = START + SECOND
        harness.set_part("p", not_before=until)
        self.explain(
            harness, "a", GateName.PART_HELD, f"part p of queue q is held until {when(until)}", until=until
        )

    def test_explain_part_rate(self, harness: Harness) -> None:
        harness.set_part("p", rate=Rate(5))
        harness.append(spec("a", part="p"), spec("b", part="p"))
        harness.take()
        until = START + SECOND // 5
        text = "rate limit of part p of queue q (5/s): next permit in 0.2 s"
        self.explain(harness, "b", GateName.PART_RATE, text, until=until)

    def test_explain_part_cap(self, harness: Harness) -> None:
        harness.set_part("p", cap=1)
        harness.append(spec("x"), spec("a", part="p"), spec("b", part="p"))
        harness.claim(n=9)
        self.explain(
            harness, "b", GateName.PART_CAP, "cap 1 of part p of queue q reached by a", by=("a",), count=1
        )

    def test_explain_next(self, harness: Harness) -> None:
        harness.append(spec("a"), spec("b"), spec("c", priority="high"))
        self.explain(harness, "c", GateName.NEXT, "ready, first in queue q: the next claim takes it")
        self.explain(harness, "b", GateName.NEXT, "ready, 2 ahead of it in queue q", count=2)

    def test_explain_suspect(self, harness: Harness) -> None:
        harness.started("a")
        harness.lose()
        harness.take()
        harness.lose()
        late = harness.ledger.explain("a", harness.now)
        assert late.gate == "scheduled"
        assert (
            "its lease was lost 2 times, which makes it a suspect, so it is claimed again after a random"
            " delay" in str(late)
        )
        harness.jump(SECOND)
        harness.upkeep()
        harness.append(spec("b", priority=0))
        ready = harness.ledger.explain("a", harness.now)
        assert (ready.gate, ready.count) == ("suspect", 1)
        assert "which makes it a suspect, and a worker runs one suspect at a time" in str(ready)
        assert harness.ledger.explain("b", harness.now).count == 0

    def test_every_gate_has_its_test(self) -> None:
        names = " ".join(name for name in dir(ExplainSuite) if name.startswith("test_explain_"))
        assert [gate for gate in set(GateName) - OF_WORKERS if gate.replace("-", "_") not in names] == []
