"""Real streams through `Bandwidth`: the same bytes, no faster than allowed."""

from __future__ import annotations

import asyncio
import io
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import towpath
from towpath.core.bandwidth import BandwidthLimits
from towpath.errors import InvalidInput
from towpath.operations.bandwidth import Bandwidth
from towpath.testing.clock import ManualClock

DATA = bytes(range(256)) * 1024


def test_what_is_read_is_what_was_there() -> None:
    limits = towpath.Bandwidth()
    assert limits.download(io.BytesIO(DATA)).read() == DATA
    stream = limits.download(io.BytesIO(DATA))
    assert stream.read(100_000) == DATA[:100_000]
    assert stream.tell() == 100_000
    assert stream.read1(10) == DATA[100_000:100_010]
    assert stream.readline() == DATA[100_010 : DATA.index(b"\n", 100_010) + 1]
    buffer = bytearray(10)
    stream.seek(0)
    assert stream.readinto(buffer) == 10
    assert buffer == DATA[:10]
    assert b"".join(limits.download([b"a", b"bc"])) == b"abc"
    assert limits.moved["up"] == 0


def test_what_is_written_arrives(tmp_path: Path) -> None:
    limits = Bandwidth(up="1GB/s")
    with limits.upload((tmp_path / "file").open("wb", buffering=0)) as file:
        shutil.copyfileobj(io.BytesIO(DATA), file)
    assert (tmp_path / "file").read_bytes() == DATA
    assert file.closed
    assert limits.moved == {"up": len(DATA), "down": 0}


def test_async_streams() -> None:
    async def main() -> None:
        limits = Bandwidth(down="1GB/s", up="1GB/s")
        reader = asyncio.StreamReader()
        reader.feed_data(b"line\n" + DATA)
        reader.feed_eof()
        stream = limits.adownload(reader)
        assert await stream.readline() == b"line\n"
        assert await stream.readexactly(5) == DATA[:5]
        assert await stream.read(3) == DATA[5:8]
        assert await stream.read() == DATA[8:]
        assert stream.at_eof()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"a"
            yield b"bc"

        assert [piece async for piece in limits.aupload(pieces())] == [b"a", b"bc"]
        assert limits.moved == {"down": len(DATA) + 5, "up": 3}

    asyncio.run(main())


def test_an_async_writer_is_drained() -> None:
    async def main() -> bytes:
        received = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.set_result(await reader.read())
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await Bandwidth(up="1GB/s").aupload(writer).write(DATA)
            writer.close()
            await writer.wait_closed()
            found: bytes = await received
        return found

    assert asyncio.run(main()) == DATA


def test_threads_and_an_event_loop_share_one_rate_evenly() -> None:
    """Over 1.5 s the credit of 0.1 s is 7 % and a busy machine may take as much: 15 %. The 5 % over 10 s are
    tested with a clock moved by hand, and by bench/flow.py without --quick in real time. The rate is so low
    that a stream's turns are 40 ms apart: a thread that gets its processor some milliseconds late loses none
    of them. A thread of a loaded machine may get it later than that, so a run that is slow or uneven is
    repeated; none may be too fast."""
    for _ in range(10):
        had, wanted = bytes_of_eight_streams(200_000, 1.5)
        assert sum(had) < 1.15 * wanted
        if sum(had) > 0.85 * wanted and min(had) > 0.7 * wanted / 8 and max(had) < 1.3 * wanted / 8:
            break
    else:
        raise AssertionError(f"slow or uneven ten times, at last {had}")


def bytes_of_eight_streams(rate: int, seconds: float) -> tuple[list[int], float]:
    """The bytes that four threads and four coroutines read meanwhile, and their sum at the exact rate."""
    limits = Bandwidth(down=rate)
    had = [0] * 8
    ends: list[float] = []
    start = threading.Barrier(5, lambda: ends.append(time.monotonic() + seconds))

    def thread(number: int) -> None:
        stream = limits.download(io.BytesIO(bytes(8_000_000)))
        start.wait()
        while time.monotonic() < ends[0]:
            had[number] += len(stream.read(1_000 if number % 2 else 300))

    async def task(number: int) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(bytes(8_000_000))
        stream = limits.adownload(reader)
        while time.monotonic() < ends[0]:
            had[number] += len(await stream.read(1_000))

    async def loop() -> None:
        await asyncio.to_thread(start.wait)
        await asyncio.gather(*(task(number) for number in range(4, 8)))

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    asyncio.run(loop())
    for each in threads:
        each.join()
    return had, rate * seconds


def test_a_change_wakes_the_waiting_streams() -> None:
    """At one byte a second the read would take a day."""
    limits = Bandwidth(down="1B/s")
    asked = threading.Event()

    class Source(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            asked.set()
            return super().read(size)

    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.append(limits.download(Source(DATA)).read()))
    thread.start()
    assert asked.wait(5)
    limits.set(down=None)
    thread.join(10)
    assert read == [DATA]
    assert limits.limits == BandwidthLimits()


def test_a_cancelled_stream_delays_no_other() -> None:
    async def main() -> None:
        limits = Bandwidth(down="1B/s")

        async def pieces(size: int) -> AsyncIterator[bytes]:
            yield bytes(size)

        async def read(size: int) -> None:
            async for _ in limits.adownload(pieces(size)):
                pass

        await read(1)
        waiting = asyncio.ensure_future(read(1_000_000))
        await asyncio.sleep(0)
        other = asyncio.ensure_future(read(1))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        limits.set(down="1MB/s")
        await asyncio.wait_for(other, 5)
        assert limits.moved["down"] == 2

    asyncio.run(main())


def test_the_schedule_follows_the_clock() -> None:
    clock = ManualClock()  # 22:13 UTC
    limits = Bandwidth(down="5MB/s", schedule=[("23:00-06:00", {"down": None})], clock=clock)
    assert limits.limits.down == 5_000_000
    clock.advance(3600)
    assert limits.limits.down is None
    assert limits.download(io.BytesIO(bytes(20_000_000))).read(20_000_000) == bytes(20_000_000)


def test_a_wrong_change_changes_nothing() -> None:
    limits = Bandwidth(up="1MB/s")
    with pytest.raises(InvalidInput, match=r"^down is 'slow'"):
        limits.set(up="2MB/s", down="slow")
    assert limits.limits == BandwidthLimits(up=1_000_000)
    with pytest.raises(TypeError, match="sideways"):
        limits.set(sideways=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match=r"^schedule\[0\]"):
        Bandwidth(schedule=[("08:00-99:00", "1MB/s")])
