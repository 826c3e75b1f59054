"""Blobs: payloads in chunks, put before the append that names them, and swept when no job has them."""

from __future__ import annotations

import pytest

from towpath.core.blobs import BLOB_TTL, CHUNK, HEADER, MAX_CHUNKS, SWEPT_CHUNKS, PutChunk, blob_of
from towpath.core.checks import HOUR, SECOND
from towpath.core.commands import Append, Open, Upkept
from towpath.core.job import Spec
from towpath.core.results import ChunkPut
from towpath.errors import InvalidInput, UnusableBlob
from towpath.testing.suite.harness import Harness, Suite, ids, spec, unique


def put(harness: Harness, blob: str, *chunks: bytes, first: int = 0) -> None:
    for number, data in enumerate(chunks, first):
        assert harness.do(ChunkPut, PutChunk(blob, number, data)) == ChunkPut(blob, number)


def stored(harness: Harness, blob: str) -> list[bytes]:
    """The data of the chunks from 0 on."""
    found: list[bytes] = []
    while (data := harness.ledger.chunk(blob, len(found))) is not None:
        found.append(data)
    return found


class BlobSuite(Suite):
    """An append takes a complete blob, and the blob lives as long as its job."""

    def test_a_job_with_a_blob(self, harness: Harness) -> None:
        put(harness, "b", b"x" * CHUNK, b"y")
        harness.append(spec("a", blob="b", blob_size=CHUNK + 1, headers={"h": "1"}))
        (claim,) = harness.claim()
        assert (claim.job.payload, claim.job.size) == (b"", CHUNK + 1)
        assert blob_of(claim.job.headers) == ("b", CHUNK + 1)
        assert dict(claim.job.headers) == {"h": "1", HEADER: f"b {CHUNK + 1}"}
        assert stored(harness, "b") == [b"x" * CHUNK, b"y"]
        assert harness.ledger.chunk("b", 2) is None
        assert harness.ledger.chunk("nothing", 0) is None
        assert harness.ledger.chunk("no\0thing", 0) is None

    def test_chunks_may_arrive_in_any_order(self, harness: Harness) -> None:
        put(harness, "b", b"3", first=2)
        put(harness, "b", b"1", b"2")
        harness.append(spec("a", blob="b", blob_size=3))
        assert stored(harness, "b") == [b"1", b"2", b"3"]

    def test_a_small_blob_is_claimed_beside_inline_payloads(self, harness: Harness) -> None:
        put(harness, "b", b"xyz")
        harness.append(spec("a", payload=b"1"), spec("c", blob="b", blob_size=3), spec("d", payload=b"22"))
        assert [(claim.id, claim.job.payload) for claim in harness.claim(n=3)] == [
            ("a", b"1"),
            ("c", b""),
            ("d", b"22"),
        ]

    @pytest.mark.parametrize(
        ("chunks", "size", "why"),
        [
            ({}, 3, "chunk 0 is missing"),
            ({1: b"bc"}, 2, "chunk 0 is missing"),
            ({0: b"a", 2: b"c"}, 2, "chunk 1 is missing"),
            ({0: b"a", 1: b"b"}, 3, "chunk 2 is missing"),
            ({0: b"a", 1: b"b"}, 1, "its chunks have 2 bytes, and the append names 1"),
        ],
    )
    def test_an_incomplete_blob_is_refused(
        self, harness: Harness, chunks: dict[int, bytes], size: int, why: str
    ) -> None:
        for number, data in chunks.items():
            put(harness, "b", data, first=number)
        with harness.unchanged():
            refusal = harness.refusal(UnusableBlob, Append((spec("a", blob="b", blob_size=size), spec("c"))))
        assert why in str(refusal)
        assert refusal.details["blob"] == "b"

    def test_put_and_append_in_one_batch(self, harness: Harness) -> None:
        harness.ledger.apply(
            [PutChunk("b", 0, b"12"), Append((spec("a", blob="b", blob_size=2),)), Append((spec("c"),))],
            harness.now,
        )
        assert ids(harness.claim(n=9)) == ["a", "c"]

    def test_a_refused_blob_does_not_spoil_its_batch(self, harness: Harness) -> None:
        good, bad = Append((spec("a"),)), Append((spec("c", blob="b", blob_size=2),))
        answers = harness.ledger.apply([good, bad, Append((spec("d"),))], harness.now)
        assert isinstance(answers[1], UnusableBlob)
        assert ids(harness.claim(n=9)) == ["a", "d"]

    def test_both_commands_may_be_repeated(self, harness: Harness) -> None:
        put(harness, "b", b"12")
        put(harness, "b", b"12")
        append = Append((spec("a", blob="b", blob_size=2),))
        first = harness.ledger.apply([append], harness.now)
        with harness.unchanged():
            assert harness.ledger.apply([append], harness.now) == first
            put(harness, "b", b"12")
        assert len(harness.claim(n=9)) == 1

    def test_a_chunk_is_not_replaced(self, harness: Harness) -> None:
        put(harness, "b", b"12")
        with harness.unchanged():
            refusal = harness.refusal(UnusableBlob, PutChunk("b", 0, b"13"))
        assert "chunk 0 has other data" in str(refusal)

    def test_a_blob_has_one_job(self, harness: Harness) -> None:
        put(harness, "b", b"12")
        harness.append(spec("a", blob="b", blob_size=2))
        with harness.unchanged():
            harness.refusal(UnusableBlob, Append((spec("c", blob="b", blob_size=2),)))
            harness.refusal(UnusableBlob, PutChunk("b", 1, b"3"))
        put(harness, "twice", b"12")
        twins = [spec(id, blob="twice", blob_size=2) for id in ("d", "e")]
        with harness.unchanged():
            harness.refusal(UnusableBlob, Append(tuple(twins)))

    def test_a_child_may_have_a_blob(self, harness: Harness) -> None:
        claim = harness.started("a")
        put(harness, "b", b"12")
        harness.done(claim, spawn=(spec("child", blob="b", blob_size=2),))
        assert blob_of(harness.claim()[0].job.headers) == ("b", 2)

    def test_the_loser_of_a_key_leaves_its_blob(self, harness: Harness) -> None:
        harness.append(spec("a", key=unique("k")))
        put(harness, "b", b"12")
        harness.append(spec("c", key=unique("k"), blob="b", blob_size=2))
        harness.jump(BLOB_TTL)
        assert harness.upkeep().swept >= 1
        assert stored(harness, "b") == []

    def test_a_job_keeps_its_blob_through_its_life(self, harness: Harness) -> None:
        put(harness, "b", b"12")
        harness.append(spec("a", blob="b", blob_size=2))
        harness.fail(harness.claim()[0])
        harness.jump(9 * 24 * HOUR)
        harness.upkeep()
        assert stored(harness, "b") == [b"12"]
        harness.revive("a")
        assert blob_of(harness.claim()[0].job.headers) == ("b", 2)
        assert stored(harness, "b") == [b"12"]

    def test_bad_input(self, harness: Harness) -> None:
        for make in (
            lambda: PutChunk("", 0, b"1"),
            lambda: PutChunk("b", -1, b"1"),
            lambda: PutChunk("b", MAX_CHUNKS, b"1"),
            lambda: PutChunk("b", 0, b""),
            lambda: PutChunk("b", 0, b"1" * (CHUNK + 1)),
            lambda: spec("a", blob="b"),
            lambda: spec("a", blob_size=2),
            lambda: spec("a", blob="b", blob_size=2, payload=b"1"),
            lambda: spec("a", blob="white space", blob_size=2),
            lambda: spec("a", headers={HEADER: "b 2"}),
            lambda: Open("g", then={"done": (Spec(id="t", queue="q", blob="b", blob_size=2),)}),
        ):
            with pytest.raises(InvalidInput):
                make()


class BlobSweepSuite(Suite):
    """Blobs without a job are deleted, a bounded number of chunks at a time."""

    def test_a_blob_without_a_job_is_swept(self, harness: Harness) -> None:
        put(harness, "b", b"1")
        harness.jump(BLOB_TTL - SECOND)
        put(harness, "b", b"2", first=1)
        harness.jump(BLOB_TTL - 1)
        with harness.unchanged():
            assert harness.upkeep() == Upkept(next_due=harness.now + 1)
        harness.jump(1)
        assert harness.upkeep().swept == 2
        assert stored(harness, "b") == []
        with harness.unchanged():
            assert harness.upkeep() == Upkept()
        harness.refusal(UnusableBlob, Append((spec("a", blob="b", blob_size=2),)))

    def test_an_upload_that_lost_chunks_is_refused(self, harness: Harness) -> None:
        put(harness, "b", b"1", b"2")
        harness.jump(BLOB_TTL)
        assert harness.upkeep(limit=1).swept == 1
        put(harness, "b", b"3", first=2)
        refusal = harness.refusal(UnusableBlob, Append((spec("a", blob="b", blob_size=3),)))
        assert "chunk 0 is missing" in str(refusal)

    def test_the_blob_goes_with_its_job(self, harness: Harness) -> None:
        for blob in ("purged", "kept", "expired"):
            put(harness, blob, b"12")
        harness.append(
            spec("a", blob="purged", blob_size=2),
            spec("b", blob="kept", blob_size=2),
            spec("c", blob="expired", blob_size=2, retention=0),
        )
        for claim in harness.claim(n=3):
            harness.done(claim)
        harness.purge("a")
        harness.jump(1)
        harness.upkeep()
        assert [stored(harness, blob) for blob in ("purged", "kept", "expired")] == [[], [b"12"], []]

    def test_a_step_deletes_a_bounded_number_of_chunks(self, harness: Harness) -> None:
        put(harness, "a", *[b"1"] * (SWEPT_CHUNKS - 1))
        put(harness, "b", b"1", b"2", b"3")
        harness.jump(BLOB_TTL)
        found = harness.upkeep()
        assert found.swept == SWEPT_CHUNKS
        assert found.next_due is not None
        assert found.next_due <= harness.now
        assert harness.ledger.chunk("a", 0) is harness.ledger.chunk("b", 0) is None
        assert harness.ledger.chunk("b", 1) == b"2"
        assert harness.upkeep(limit=1).swept == 1
        assert harness.upkeep() == Upkept(swept=1)
        assert harness.ledger.chunk("b", 2) is None
