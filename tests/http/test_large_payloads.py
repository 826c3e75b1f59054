"""Payloads that do not fit into the memory of a server: in and out chunk by chunk."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from hashlib import blake2b

import pytest

from tests.support.processes import command
from tests.support.shell import Shell
from tests.support.streams import (
    MIB,
    begin_download,
    begin_upload,
    blocks,
    download,
    http_chunk,
    memory,
    read_message,
    upload,
)
from tests.support.waiting import until
from tests.support.wire import MULTIPART, Remote, Wire, form, receipt, serving
from towpath import App
from towpath.commands import Query, Upkeep
from towpath.core.blobs import BLOB_TTL, CHUNK, HEADER, blob_of
from towpath.core.checks import SECOND
from towpath.ledger import open_ledger
from towpath.queues.blobs import INLINE
from towpath.testing import ManualClock

SIZE = int(os.environ.get("TOWPATH_SOAK_BYTES", 64 * MIB))
MOST_GROWTH = 100_000_000


@pytest.mark.parametrize("size", [INLINE, INLINE + 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 777])
def test_a_payload_comes_out_as_it_went_in(remote: Remote, queue: str, size: int) -> None:
    sent = upload(remote.address, queue, size)
    assert sent.answer["payload_bytes"] == size
    job = remote.app.ledger.get(sent.answer["message_id"])
    assert job is not None
    assert (blob_of(job.headers) is None, job.size) == (size <= INLINE, size)
    (received,) = download(remote.address, queue)
    assert (received.size, received.digest) == (size, sent.digest)
    assert received.message["payload_bytes"] == size
    assert "attributes" not in received.message
    assert remote.call("queue/ack", **receipt(received.message)).json["acked"] is True


def test_large_and_small_payloads_in_one_document(remote: Remote, queue: str) -> None:
    remote.enqueue(queue, b"first")
    sent = [upload(remote.address, queue, size, seed=size).digest for size in (2 * CHUNK + 5, 0, INLINE + 9)]
    remote.enqueue(queue, b"last")
    found = download(remote.address, queue, 5)
    assert [each.digest for each in found[1:4]] == sent
    assert [each.size for each in found] == [5, 2 * CHUNK + 5, 0, INLINE + 9, 4]


def test_the_document_of_a_large_payload_has_the_framing_of_a_small_one(remote: Remote, queue: str) -> None:
    payload = b"\r\n--C\r\n" * 60_000
    remote.enqueue(queue, payload, attributes={HEADER: "mine", "a": "b"})
    [(message, found)] = remote.dequeue(queue).messages()
    assert found == payload
    assert message["attributes"] == {HEADER: "mine", "a": "b"}


def test_a_subscription_streams_large_payloads(remote: Remote, queue: str) -> None:
    sent = [upload(remote.address, queue, size, seed=size).digest for size in (3 * CHUNK, 10, CHUNK + 1)]
    asked = {"queue": queue, "owner": "me", "wait_seconds": -1, "page_size": 8}
    answer = remote.call("queue/subscribe", **asked)
    assert [blake2b(payload).hexdigest() for _, payload in answer.messages()] == sent


def test_a_payload_that_is_too_large_is_refused(queue: str) -> None:
    with App("memory://") as app, serving(app, max_payload=2 * CHUNK) as remote:
        upload(remote.address, queue, 2 * CHUNK)
        with remote.connect() as wire:
            begin_upload(wire, queue)
            for block in blocks(2 * CHUNK + 1):
                wire.send(http_chunk(block))
            wire.send(http_chunk(b"\r\n--B--\r\n") + b"0\r\n\r\n")
            answer = wire.answer()
        assert (answer.status, answer.error) == (413, "payload_too_large")
        with remote.connect() as wire:
            # By its length, before it is sent.
            fields = {"Content-Length": str(10 * CHUNK), "Content-Type": MULTIPART}
            wire.request("/v1/queue/enqueue", b"", fields)
            wire.send(form(("meta", json.dumps({"queue": queue}).encode()), end=b""))
            wire.send(b" " * (5 * CHUNK))
            answer = wire.answer()
        assert (answer.status, answer.error) == (413, "payload_too_large")
        assert len(app.ledger.find(Query(queue=queue)).jobs) == 1


def test_an_unknown_queue_is_refused_before_the_payload_is_stored(local: Remote) -> None:
    with local.connect() as wire:
        begin_upload(wire, "no/name")
        for block in blocks(2 * CHUNK):
            wire.send(http_chunk(block))
        wire.send(http_chunk(b"\r\n--B--\r\n") + b"0\r\n\r\n")
        assert wire.answer().error == "invalid_queue"
    assert local.app.ledger.dump()["blobs"] == []


def test_an_upload_that_breaks_off_leaves_no_message(timed: Remote, clock: ManualClock, queue: str) -> None:
    ledger = timed.app.ledger
    with timed.connect() as wire:
        begin_upload(wire, queue)
        for block in blocks(3 * CHUNK):
            wire.send(http_chunk(block))
        until(lambda: len(ledger.dump()["chunks"]) == 3)
    assert timed.dequeue(queue).error == "waiting"
    clock.advance(BLOB_TTL / SECOND + 60)
    timed.app.engine.call(Upkeep())
    assert (ledger.dump()["blobs"], ledger.dump()["chunks"]) == ([], [])


def test_a_payload_that_is_deleted_meanwhile_ends_the_connection(remote: Remote, queue: str) -> None:
    """The lease of a slow reader is lost, another consumer acknowledges the message, and its payload is
    deleted: the reader must not take the part that it has for the whole."""
    remote.app.queue(queue).configure(retention=0)
    sent = upload(remote.address, queue, 32 * CHUNK)
    job = remote.app.ledger.get(sent.answer["message_id"])
    assert job is not None
    blob = blob_of(job.headers)
    with remote.connect() as wire:
        headers, _ = begin_download(wire, queue)
        wire.read_until(b"\r\n\r\n")
        message = json.loads(wire.read_until(b"\n\r\n"))["message"]
        assert remote.call("queue/ack", **receipt(message)).json["acked"] is True
        assert blob is not None
        for _ in range(5):
            remote.app.engine.call(Upkeep())
        assert remote.app.ledger.chunk(blob.id, 31) is None
        size = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := wire.socket.recv(MIB):
                size += len(piece)
        assert size < int(headers["content-length"]) - CHUNK


def test_a_client_that_leaves_gives_the_message_back(remote: Remote, queue: str) -> None:
    sent = upload(remote.address, queue, 32 * CHUNK)
    with remote.connect() as wire:
        begin_download(wire, queue, visibility_timeout_seconds=1800)
        wire.read(1000)
    asked = {"queue": queue, "owner": "other", "wait_seconds": 20}
    with remote.connect() as wire:
        wire.request("/v1/queue/dequeue", json.dumps(asked).encode())
        assert wire.head()[0] == 200
        assert read_message(wire).digest == sent.digest


@pytest.mark.ledgers("sqlite", "postgres")
def test_the_memory_of_a_server_stays_flat(url: str, shell: Shell) -> None:
    with command(shell, "serve", "--store", url, "--listen", "127.0.0.1:0") as server:
        address = server.until("serves").rpartition(" ")[2]
        pid = server.process.pid
        upload(address, "warm", 100)
        download(address, "warm")
        idle = memory(pid, "VmRSS")
        sent = upload(address, "orders", SIZE)
        assert memory(pid, "VmHWM") - idle < MOST_GROWTH
        (received,) = download(address, "orders")
        growth = memory(pid, "VmHWM") - idle
        print(f"{SIZE / MIB:.0f} MiB: {idle / 1e6:.0f} MB when idle, at most {growth / 1e6:.0f} MB above")
        assert (received.size, received.digest) == (SIZE, sent.digest)
        assert growth < MOST_GROWTH
        assert server.end(signal.SIGTERM) in (0, 130)


@pytest.mark.ledgers("sqlite", "postgres")
def test_an_upload_survives_no_kill_of_the_server(url: str, shell: Shell) -> None:
    with command(shell, "serve", "--store", url, "--listen", "127.0.0.1:0") as server:
        address = server.until("serves").rpartition(" ")[2]
        with contextlib.closing(open_ledger(url)) as ledger, Wire(address) as wire:
            begin_upload(wire, "orders")
            for block in blocks(4 * CHUNK):
                wire.send(http_chunk(block))
            until(lambda: len(ledger.dump()["chunks"]) >= 2)
            server.end(signal.SIGKILL)
            assert ledger.queues() == {}
            ((blob, job, due),) = ledger.dump()["blobs"]
            assert job is None
            assert ledger.check() == []
            ledger.apply([Upkeep()], due)
            assert (ledger.dump()["blobs"], ledger.chunk(blob, 0)) == ([], None)
