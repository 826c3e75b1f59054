"""The reads of the memory ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from towpath.core.explain import AHEAD, SHOWN, Explanation, explain
from towpath.core.explain import JobFacts as ExplainFacts
from towpath.core.job import FINISHED, Job, Reason, State, without_bodies
from towpath.core.views import Page, Query, Winner, page_seq, page_token
from towpath.errors import UnknownJob
from towpath.ledger.memory.rows import PartRecord, QueueRecord
from towpath.ledger.memory.store import MemoryStore, open_gates


def get_many(store: MemoryStore, ids: Sequence[str], bodies: bool) -> dict[str, Job]:
    found = {id: job for id in ids if (job := store.find(id)) is not None}
    return found if bodies else {id: without_bodies(job) for id, job in found.items()}


def find(store: MemoryStore, query: Query) -> Page:
    found = list(islice((job for job in _candidates(store, query) if query.matches(job)), query.limit + 1))
    jobs = found[: query.limit]
    if not query.bodies:
        jobs = [without_bodies(job) for job in jobs]
    return Page(tuple(jobs), page_token(jobs[-1].seq) if len(found) > query.limit else None)


def _candidates(store: MemoryStore, query: Query) -> Iterator[Job]:
    """The jobs after the page mark, in the order asked for."""
    if query.group is not None:
        group = store.groups.get(query.group)
        seqs = [] if group is None else list(group.members)
        first, last = (seqs[0], seqs[-1]) if seqs else (1, 0)
    else:
        first, last = next(iter(store.jobs), 1), store.next_seq - 1
    mark = None if query.page is None else page_seq(query.page)
    if query.oldest_first:
        order = range(first if mark is None else max(first, mark + 1), last + 1)
    else:
        order = range(last if mark is None else min(last, mark - 1), first - 1, -1)
    return (job for seq in order if (job := store.jobs.get(seq)) is not None)


def winners(store: MemoryStore, job: str, group: str) -> list[Winner]:
    if group:
        rows = [store.proxies[id] for id in store.groups[group].proxies] if group in store.groups else []
        return [Winner(row.id, row.seq, _id(store, row.job)) for row in sorted(rows, key=lambda row: row.seq)]
    dependent = store.find(job)
    names = {} if dependent is None else store.names.get(dependent.seq, {})
    return [Winner(id, 0, _id(store, src)) for id, src in sorted(names.items())]


def _id(store: MemoryStore, seq: int) -> str | None:
    return store.jobs[seq].id if seq in store.jobs else None


def oldest_ready(store: MemoryStore, queue: QueueRecord) -> int | None:
    lines = [queue.loose, *(part.line for part in queue.parts.values())]
    return min((store.jobs[seq].ready_at for line in lines for _, seq in line), default=None)


def why(store: MemoryStore, id: str, now: int) -> Explanation:
    job = store.find(id)
    if job is None:
        raise UnknownJob(id=id)
    queue = store.queues[job.queue]
    part = None if job.part is None else queue.parts.get(job.part)
    open_jobs = [
        src for src in sorted(store.edges_in.get(job.seq, ())) if store.jobs[src].state not in FINISHED
    ]
    facts = ExplainFacts(
        job=job,
        queue=queue.view(),
        part=None if part is None else part.view(),
        open_jobs=tuple([store.jobs[src].id for src in open_jobs[:SHOWN]]),
        open_groups=tuple(sorted(open_gates(store, job.seq))[:SHOWN]),
        group=None if job.group is None else store.groups[job.group].view(),
        holders=_holders(store, queue, part),
        ahead=_ahead(queue, part, job),
        culprit=_culprit(store, job) if job.reason is Reason.DEPENDENCY else None,
    )
    return explain(facts, now)


def _culprit(store: MemoryStore, job: Job) -> Job | None:
    """The job that ended first of those because of which this one ended, along edges and groups that need
    success."""
    found, todo = {job.seq}, [job]
    roots = []
    while todo:
        at = todo.pop()
        if at.reason is not Reason.DEPENDENCY:
            roots.append(at)
            continue
        sources = [src for src, run_anyway in store.edges_in.get(at.seq, {}).items() if not run_anyway]
        for group, gate in store.gates_in.get(at.seq, {}).items():
            sources += [] if gate.run_anyway else list(store.groups[group].members)
        todo += [store.jobs[src] for src in sources if src not in found and store.jobs[src].state is at.state]
        found.update(sources)
    return min(roots, key=lambda root: (root.finished_at, root.seq), default=None)


def _holders(store: MemoryStore, queue: QueueRecord, part: PartRecord | None) -> tuple[str, ...]:
    """The running jobs that fill the cap, the first few."""
    queue_full = queue.cap is not None and queue.counts[State.RUNNING] >= queue.cap
    part_full = part is not None and part.cap is not None and part.running >= part.cap
    if not (queue_full or part_full):
        return ()
    name = None if queue_full or part is None else part.name
    running = (store.jobs[seq] for seq in sorted(store.leases))
    holders = (job.id for job in running if job.queue == queue.name and name in (None, job.part))
    return tuple(islice(holders, SHOWN))


def _ahead(queue: QueueRecord, part: PartRecord | None, job: Job) -> int:
    if job.part is not None and part is None:
        return 0
    mine = (job.priority, job.seq)
    line = queue.loose if part is None else part.line
    return min(AHEAD, len({entry for entry in line if entry < mine}))
