"""Large payloads over HTTP, made and compared on the fly: neither side of a test holds one in memory."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.wire import MULTIPART, Wire, form

BLOCK = 256 * 1024
MIB = 1024 * 1024


class Sent(NamedTuple):
    answer: dict[str, Any]
    digest: str


class Received(NamedTuple):
    message: dict[str, Any]
    size: int
    digest: str


def blocks(size: int, seed: int = 1) -> Iterator[bytes]:
    """A payload of this size in blocks, each of which differs from the others."""
    noise = random.Random(seed).randbytes(BLOCK)
    for number in range(0, size, BLOCK):
        block = number.to_bytes(8, "big") + noise[8:]
        yield block[: size - number]


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def begin_upload(wire: Wire, queue: str, **meta: Any) -> None:
    """Send an enqueue without its payload. The body is chunked, as the client of lockd sends it."""
    fields = {"Host": "test", "Content-Type": MULTIPART, "Transfer-Encoding": "chunked"}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    parts = form(("meta", json.dumps({"queue": queue, **meta}).encode()), ("payload", b""), end=b"")
    wire.send(f"POST /v1/queue/enqueue HTTP/1.1\r\n{head}\r\n".encode() + http_chunk(parts))


def upload(address: str, queue: str, size: int, seed: int = 1) -> Sent:
    digest = blake2b()
    with Wire(address) as wire:
        begin_upload(wire, queue)
        for block in blocks(size, seed):
            digest.update(block)
            wire.send(http_chunk(block))
        wire.send(http_chunk(b"\r\n--B--\r\n") + b"0\r\n\r\n")
        answer = wire.answer()
    assert answer.status == 200, answer
    return Sent(answer.json, digest.hexdigest())


def begin_download(wire: Wire, queue: str, **fields: Any) -> tuple[dict[str, str], bytes]:
    """Send a dequeue. The headers of the response and the delimiter of the document."""
    asked = {"queue": queue, "owner": "me", "wait_seconds": -1, **fields}
    wire.request("/v1/queue/dequeue", json.dumps(asked).encode())
    status, headers = wire.head()
    assert status == 200, wire.read(int(headers["content-length"]))
    return headers, b"--" + headers["content-type"].partition("boundary=")[2].encode()


def read_message(wire: Wire) -> Received:
    """The next message of a document, up to the end of its payload."""
    wire.read_until(b"\r\n\r\n")
    message: dict[str, Any] = json.loads(wire.read_until(b"\n\r\n"))["message"]
    head = wire.read_until(b"\r\n\r\n")
    size = int(head.partition(b"Content-Length: ")[2].split()[0])
    digest, left = blake2b(), size
    while left:
        data = wire.read(min(left, 65_536))
        digest.update(data)
        left -= len(data)
    return Received(message, size, digest.hexdigest())


def download(address: str, queue: str, count: int = 1) -> list[Received]:
    """Dequeue so many messages, and check that the document has the length of its header."""
    with Wire(address) as wire:
        headers, line = begin_download(wire, queue, page_size=count, visibility_timeout_seconds=1800)
        found = []
        for _ in range(count):
            found.append(read_message(wire))
            assert wire.read(2 + len(line)) == b"\r\n" + line
        assert wire.read(4) == b"--\r\n"
        # The connection is usable: the length of the response is exact.
        assert int(headers["content-length"]) > sum(each.size for each in found)
        wire.request("/healthz")
        assert wire.answer().status == 200
    return found


def memory(pid: int, name: str) -> int:
    """Bytes of a process: `VmRSS` now, `VmHWM` the most so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)
