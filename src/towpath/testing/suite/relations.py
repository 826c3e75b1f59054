"""Reads of relations and settings: one queue, edges in both directions, notes by prefix."""

from __future__ import annotations

from typing import Any

import pytest

from towpath.core.checks import SECOND
from towpath.core.edges import Edge, EdgeQuery
from towpath.core.views import NoteQuery
from towpath.errors import InvalidInput
from towpath.ledger import Ledger
from towpath.testing.suite.harness import Harness, Suite, anyway, need, spec, whole_group


class RelationSuite(Suite):
    """Each read returns pages in a fixed order."""

    def test_one_queue(self, harness: Harness, ledger: Ledger) -> None:
        harness.append(spec("a", queue="mail"), spec("b", queue="mail"), spec("c", queue="other"))
        harness.claim("mail")
        assert ledger.queue("mail") == ledger.queues()["mail"]
        assert ledger.queue("mai") is ledger.queue("a\0b") is None

    def test_edges(self, harness: Harness, ledger: Ledger) -> None:
        """In both directions, of jobs and groups, in pages."""
        harness.append(spec("a"), spec("b"), spec("c", after=(need("a"), anyway("b"))))
        harness.append(spec("d", after=(need("c"), need("a"))))
        harness.open("g")
        harness.append(spec("m", group="g"), spec("n", group="g", after=(need("m"),)))
        harness.append(spec("e", after=(need("d"), whole_group("g"))))
        ac, bc = Edge("a", "c", False, False), Edge("b", "c", False, True)
        ad, cd = Edge("a", "d", False, False), Edge("c", "d", False, False)
        of_group, de = Edge("g", "e", True, False), Edge("d", "e", False, False)

        def found(**query: Any) -> list[Edge]:
            whole = ledger.edges(EdgeQuery(**query))
            paged: list[Edge] = []
            page = None
            while True:
                part = ledger.edges(EdgeQuery(**query, limit=1, page=page))
                paged += part.edges
                page = part.next
                if page is None:
                    break
            assert list(whole.edges) == paged
            return paged

        assert found(into="c") == [ac, bc]
        assert found(into="d") == [ad, cd]
        assert found(into="e") == [de, of_group]
        assert found(into="a") == []
        assert found(out_of="a") == [ac, ad]
        assert found(out_of="e") == found(out_of="nowhere") == []
        assert found(out_of_group="g") == [of_group]
        assert found(into_group="g") == [Edge("m", "n", False, False)]
        assert found(out_of_group="h") == found(into_group="h") == []

    def test_an_edge_query_names_one_subject(self) -> None:
        for fields in ({}, {"into": "a", "out_of": "b"}, {"into": ""}, {"into": "a", "page": "bad"}):
            with pytest.raises(InvalidInput):
                EdgeQuery(**fields)  # type: ignore[arg-type]

    def test_notes_by_prefix(self, harness: Harness, ledger: Ledger) -> None:
        for key in ("b", "a/2", "a/1", "a", "a0", "é"):
            harness.write(key, key.encode())
        harness.write("a/3", b"over", ttl=SECOND)
        harness.advance(2 * SECOND)
        now = harness.now

        def keys(**query: Any) -> list[str]:
            return [note.key for note in ledger.notes(NoteQuery(**query), now).notes]

        assert keys() == ["a", "a/1", "a/2", "a0", "b", "é"]
        assert keys(prefix="a/") == ["a/1", "a/2"]
        assert keys(prefix="é") == ["é"]
        first = ledger.notes(NoteQuery(prefix="a", limit=2), now)
        assert [note.value for note in first.notes] == [b"a", b"a/1"]
        assert first.notes[0] == ledger.note("a", now)
        assert keys(prefix="a", page=first.next) == ["a/2", "a0"]
        assert ledger.notes(NoteQuery(prefix="a", page=first.next), now).next is None
