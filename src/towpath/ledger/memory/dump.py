"""The whole state in canonical order."""

from __future__ import annotations

from typing import Any

from towpath.ledger.memory.book import Book


def dump(book: Book) -> dict[str, Any]:
    return {
        "jobs": [book.jobs[seq] for seq in sorted(book.jobs)],
        "edges": sorted((src, dst, anyway) for src, dsts in book.edges_out.items() for dst, anyway in dsts.items()),
        "gates": sorted(
            (group, dst, gate.run_anyway, gate.outcome.value if gate.outcome else "")
            for group, dsts in book.gates_out.items()
            for dst, gate in dsts.items()
        ),
        "proxies": sorted((row.id, row.seq, row.group, row.job, row.counted) for row in book.proxies.values()),
        "names": sorted((dst, id, src) for dst, names in book.names.items() for id, src in names.items()),
        "groups": [
            (group.view(), {ending: list(specs) for ending, specs in group.then.items()})
            for _, group in sorted(book.groups.items())
        ],
        "keys": [(*name, row.id, row.seq, row.until, row.runner) for name, row in sorted(book.keys.items())],
        "notes": [note for _, note in sorted(book.notes.items())],
        "queues": [(queue.view(), queue.served, queue.clock) for _, queue in sorted(book.queues.items())],
        "parts": [
            (part.view(), part.configured) for _, parts in sorted(book.parts.items()) for _, part in sorted(parts.items())
        ],
        "tombstones": sorted(
            (row.id, row.seq, row.state.value, row.settled_fence, row.alias or "", row.until)
            for row in book.tombstones.values()
        ),
        "replies": sorted((token, until) for token, (_, until) in book.replies.items()),
        "next_seq": book.next_seq,
        "next_version": book.next_version,
        "last": book.last,
    }
