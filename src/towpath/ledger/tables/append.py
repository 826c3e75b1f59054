"""Append: gather the facts that `admit` needs, then write its decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from towpath.core.admission import admit, failed_jobs
from towpath.core.commands import TOMBSTONE, Append, Appended, GroupState
from towpath.core.facts import (
    Admission,
    AppendFacts,
    GroupFact,
    KeyHolder,
    KeyName,
    Known,
    Origin,
    Place,
    Quota,
    Room,
    blobs_of,
    is_unrelated,
    key_of,
    node,
    places_of,
    walks,
)
from towpath.core.job import FINISHED, Job, Reason, Spec, State
from towpath.core.limits import spend
from towpath.errors import Refused
from towpath.ledger.tables import finish
from towpath.ledger.tables.blobs import blob_facts
from towpath.ledger.tables.database import ERROR, array
from towpath.ledger.tables.transaction import GroupRow, Transaction, load_parts, recount


def append(tx: Transaction, commands: Sequence[Append]) -> list[Appended | Refused]:
    """Apply a run of appends: together if all specs are new and plain, otherwise one command at a time."""
    if len(commands) > 1:
        specs = [spec for command in commands for spec in command.specs]
        facts = gather(tx, specs)
        if _independent(specs, facts):
            placed = write(tx, _decided(tx, specs, facts, None)).answers
            ends = accumulate([len(command.specs) for command in commands])
            return [
                Appended(placed[end - len(command.specs) : end])
                for command, end in zip(commands, ends, strict=True)
            ]
    return [_append_one(tx, command) for command in commands]


def _append_one(tx: Transaction, command: Append) -> Appended | Refused:
    try:
        return Appended(place(tx, command.specs, Origin() if command.inside else None).answers)
    except Refused as refusal:
        return refusal


def place(tx: Transaction, specs: Sequence[Spec], origin: Origin | None = None) -> Admission:
    """Decide and write. Raises `Refused` before anything is written."""
    return write(tx, decide(tx, specs, origin))


def place_or_fail(tx: Transaction, specs: Sequence[Spec]) -> None:
    """Append for a caller that can no longer receive a refusal; capacities do not apply. If the append is
    refused, all of its new specs become failed jobs with the refusal as their error."""
    try:
        place(tx, specs, Origin())
        return
    except Refused as refusal:
        why = str(refusal)
    known = _known(tx, {spec.id for spec in specs})
    new = {spec.id: spec for spec in specs if spec.id not in known}
    if not new:
        return
    jobs = failed_jobs(new.values(), tx.take_seqs(len(new)), tx.now, why)
    tx.wrote = True
    tx.db.add_jobs(jobs)
    _put_errors(tx, jobs)
    tx.move(Counter((job.queue, job.part, None, job.state) for job in jobs))


def _put_errors(tx: Transaction, jobs: Sequence[Job]) -> None:
    tx.db.put_bodies([(job.seq, ERROR, job.error.encode()) for job in jobs if job.error is not None])


class Decision(NamedTuple):
    """The admission of an append if its jobs are numbered from `base` on."""

    specs: Sequence[Spec]
    facts: AppendFacts
    origin: Origin | None
    base: int
    admission: Admission


def decide(tx: Transaction, specs: Sequence[Spec], origin: Origin | None) -> Decision:
    return _decided(tx, specs, gather(tx, specs), origin)


def _decided(tx: Transaction, specs: Sequence[Spec], facts: AppendFacts, origin: Origin | None) -> Decision:
    admission = admit(specs, facts, tx.now, tx.next_seq, origin)
    return Decision(specs, facts, origin, tx.next_seq, admission)


def _numbered(tx: Transaction, decision: Decision) -> Admission:
    """The admission with numbers taken by this transaction. Where several processes take numbers, they may
    differ from the expected ones; the admission is then computed again."""
    admission = decision.admission
    if admission.numbers and (base := tx.take_seqs(admission.numbers)) != decision.base:
        return admit(decision.specs, decision.facts, tx.now, base, decision.origin)
    return admission


def _independent(specs: Sequence[Spec], facts: AppendFacts) -> bool:
    """Whether the specs of several commands can be admitted together because none can be refused."""
    if facts.known or facts.quotas or any(room.capacity is not None for room in facts.rooms.values()):
        return False
    if len({spec.id for spec in specs}) < len(specs):
        return False
    return all(map(is_unrelated, specs))


def gather(tx: Transaction, specs: Sequence[Spec]) -> AppendFacts:
    queues = {spec.queue for spec in specs}
    tx.load_queues(queues)
    tx.hold_queues([name for name in queues if tx.queues[name].capacity is not None])
    rooms = {
        row.name: Room(row.capacity, row.blocked + row.scheduled + row.ready, row.retention)
        for row in (tx.queues[name] for name in queues)
    }
    related = [spec for spec in specs if spec.after or spec.group is not None or spec.key is not None]
    ids = {spec.id for spec in specs}
    quotas = _quotas(tx, places_of(specs)) if tx.quotas else {}
    blobs = blob_facts(tx.db, blobs_of(specs))
    if not related:
        return AppendFacts(known=_known(tx, ids), rooms=rooms, quotas=quotas, blobs=blobs)
    tx.hold_relations()
    ids.update(after.id for spec in related for after in spec.after if not after.group)
    groups = {spec.group for spec in related if spec.group is not None}
    groups.update(after.id for spec in related for after in spec.after if after.group)
    holders = _holders(tx, {key for spec in related if (key := key_of(spec)) is not None})
    # A dependency on an id with a taken key becomes one on the holder of the key. The holder may be purged.
    forgotten = [holder for holder in holders.values() if holder.state is None and holder.until > tx.now]
    known = {
        holder.id: Known(holder.id, holder.seq, State.DONE, gone=True)
        for holder in forgotten
        if holder.id not in ids
    }
    ids.update(holder.id for holder in holders.values())
    return AppendFacts(
        known=known | _known(tx, ids, proxied=bool(holders)),
        holders=holders,
        groups=_group_facts(tx, groups),
        rooms=rooms,
        quotas=quotas,
        downstream=downstream(tx, walks(related, holders)),
        blobs=blobs,
    )


def _quotas(tx: Transaction, places: set[Place]) -> dict[Place, Quota]:
    """The append limits of these parts; a part without limits is left out."""
    limited = _limited(tx, places)
    if not limited:
        return {}
    tx.hold_queues({queue for queue, _ in limited})
    tx.flush()
    limited = _limited(tx, limited)
    found: dict[Place, Quota] = {}
    for queue, name, waiting in tx.db.rows("waiting_parts", (array(limited),), tuple[str, str, int]):
        row = tx.parts[queue, name]
        found[queue, name] = Quota(row.capacity, waiting + row.ready, row.append_rate, row.append_at)
    return found


def _limited(tx: Transaction, places: set[Place]) -> set[Place]:
    load_parts(tx, places)
    rows = [tx.parts[place] for place in places]
    return {(row.queue, row.name) for row in rows if row.capacity is not None or row.append_count is not None}


def _known(tx: Transaction, ids: Iterable[str], proxied: bool = False) -> dict[str, Known]:
    """Jobs and tombstones by id, with the jobs that aliases point to. If such a job is purged, its alias
    still has its number; the job ended long ago. `proxied`: one of the ids may be a group member that another
    job represents."""
    if not tx.wrote and not proxied and tx.absent.issuperset(ids):
        return {}
    found = _fetch_known(tx, ids)
    aliases = [known for known in found.values() if known.alias is not None and known.alias not in found]
    if aliases:
        found |= {
            str(known.alias): Known(str(known.alias), known.seq, State.DONE, gone=True) for known in aliases
        }
        found |= _fetch_known(tx, [known.alias for known in aliases])
    return found


def _fetch_known(tx: Transaction, ids: Iterable[str | None]) -> dict[str, Known]:
    found = tx.db.rows("known_ids", (array(ids),), _KnownRow)
    return {row.id: Known(row.id, row.seq, row.state, bool(row.gone), row.alias) for row in found}


class _KnownRow(NamedTuple):
    id: str
    seq: int
    state: State
    gone: int
    alias: str | None


class _HolderRow(NamedTuple):
    namespace: str
    key: str
    id: str
    seq: int
    state: State | None
    until: int
    runner: int | None


def _holders(tx: Transaction, keys: set[KeyName]) -> dict[KeyName, KeyHolder]:
    if not keys:
        return {}
    found = tx.db.rows("key_holders", (array(keys),), _HolderRow)
    return {
        (row.namespace, row.key): KeyHolder(row.id, row.seq, row.state, row.until, row.runner)
        for row in found
    }


def _group_facts(tx: Transaction, ids: set[str]) -> dict[str, GroupFact]:
    if not ids:
        return {}
    tx.load_groups(ids)
    return {id: GroupFact(group.state, group.outcome) for id in ids if (group := tx.groups[id]) is not None}


def downstream(tx: Transaction, nodes: set[str]) -> dict[str, frozenset[str]]:
    if nodes:
        tx.flush()
    result: dict[str, frozenset[str]] = {}
    for name in nodes:
        start = (1, name[1:], None) if name.startswith("\0") else (0, None, name)
        reached = tx.db.rows("downstream", start, tuple[str | None, str | None])
        result[name] = frozenset(job if job is not None else node(str(group)) for job, group in reached) - {
            name
        }
    return {name: reached for name, reached in result.items() if reached}


def write(tx: Transaction, decision: Decision) -> Admission:
    """Write an admission and its consequences, in the order of the rules."""
    admission = insert_admitted(tx, decision)
    finish.finish(tx, admission.superseded, State.CANCELED, Reason.SUPERSEDED)
    ended: dict[str, bool] = {}
    for job in admission.jobs:
        if job.group is not None and job.state in FINISHED:
            ended[job.group] = ended.get(job.group, False) or job.state is State.FAILED
    for proxy in admission.proxies:
        ended[proxy.group] = ended.get(proxy.group, False) or proxy.counted == "failed"
    finish.update_groups(tx, ended)
    return admission


def insert_admitted(tx: Transaction, decision: Decision) -> Admission:
    """Write an admission without its consequences: superseded jobs are not ended, groups not updated."""
    admission = _numbered(tx, decision)
    jobs = admission.jobs
    if not jobs and not admission.aliases:
        return admission
    tx.wrote = True
    for id in admission.opened:
        tx.new_group(GroupRow(id, GroupState.SEALED, created_at=tx.now))
    tx.db.add_jobs(jobs)
    if decision.origin is not None and decision.origin.closes:
        _put_errors(tx, jobs)
    tx.move(Counter([(job.queue, job.part, None, job.state) for job in jobs]))
    for queue, name, count in admission.spent:
        row = tx.change_part(queue, name)
        row.append_at = spend(row.append_at, row.append_rate, tx.now, count)
    if jobs and not _simple(admission):
        _write_relations(tx, admission)
    if admission.aliases:
        _write_aliases(tx, admission)
    for job in jobs:
        if job.group is not None:
            tx.count_member(job.group, job.state, job.reason, None)
    if admission.blobs:
        tx.db.put("blob", [(id, seq, 0) for id, seq in admission.blobs])
    tx.db.put("proxy", [msgspec.structs.astuple(proxy) for proxy in admission.proxies])
    for proxy in admission.proxies:
        recount(tx, proxy.group, None, proxy.counted)
    return admission


def _simple(admission: Admission) -> bool:
    related = admission.edges or admission.gates or admission.names or admission.keys
    return not (related or admission.asked or admission.superseded or admission.freed)


def _write_relations(tx: Transaction, admission: Admission) -> None:
    db = tx.db
    if admission.handed:
        pairs = array(admission.handed)
        for statement in ("move_names", "name_moved", "move_edges", "move_proxies"):
            db.run(statement, (pairs,))
    db.put("name", admission.names)
    db.put("edge", admission.edges)
    db.put("gate", [(*gate, None) for gate in admission.gates])
    if admission.asked:
        db.run("ask_to_stop", (Reason.SUPERSEDED, array(admission.asked)))
    taken = [(*key.name, key.id, key.seq, key.until, key.runner) for key in admission.keys]
    db.put("key", taken)
    if admission.freed:
        db.run("delete_keys", (array(admission.freed),))


def _write_aliases(tx: Transaction, admission: Admission) -> None:
    winners = {placed.id: placed.seq for placed in admission.answers}
    tombstones = [(id, winners[to], State.DONE, 0, to, tx.now + TOMBSTONE) for id, to in admission.aliases]
    tx.db.put("tombstone", tombstones)


def decode_then(text: str) -> dict[str, list[Spec]]:
    """Decode the stored `then` of a group."""
    return msgspec.json.decode(text, type=dict[str, list[Spec]])


def encode_then(thens: dict[str, list[Spec]]) -> str:
    return msgspec.json.encode(thens).decode()
