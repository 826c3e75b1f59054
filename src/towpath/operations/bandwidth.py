"""Bandwidth: one object that all transfers of a process share.

    limits = towpath.Bandwidth(down="50MB/s", up="10MB/s", schedule=[("08:00-18:00", "2MB/s")])
    with open("copy", "wb") as file:
        shutil.copyfileobj(limits.download(response), file)

It wraps streams; a read or write through the wrapper waits for its turn. `core/bandwidth.py` decides,
this only waits."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from towpath.clock import Clock, SystemClock
from towpath.core.bandwidth import PIECE, BandwidthLimits, Direction, LimitPlan, Meter, Stream, plan

CHECK_INTERVAL = 0.25
"""Seconds after which a waiting stream checks the limits again without a wake-up: the time of day may have
changed them."""
Speed = str | int | None
Schedule = Sequence[tuple[str, Speed | Mapping[str, Speed]]]


class BandwidthOptions(TypedDict, total=False):
    """Speeds are bytes a second: `"10MB/s"`, `"1.5MiB/s"`, a number, or None for no limit. `total` is both
    directions together. `schedule` is a list of pairs: a time of day, and the limits in force then. One speed
    is the total, `{"up": ..., "down": ...}` names them. Its times are in the zone `tz` (UTC)."""

    up: Speed
    down: Speed
    total: Speed
    schedule: Schedule
    tz: str


class Bandwidth:
    """Limits on the bytes that this process transfers. Any number of threads and event loops may share
    one."""

    def __init__(self, *, clock: Clock | None = None, **options: Unpack[BandwidthOptions]) -> None:
        self._clock = clock or SystemClock()
        self._options: dict[str, Any] = {"up": None, "down": None, "total": None, "schedule": (), "tz": "UTC"}
        self._plan = self._planned(options)
        self._options |= options
        self._meter = Meter(self._plan.at(self._clock.now()))
        self._lock = threading.Lock()
        self._wakes: dict[Stream, Callable[[], object]] = {}
        self._next_to_wake: Stream | None = None
        """The waiting stream that wakes at the next turn; the others sleep until it wakes them."""
        self._check_at = 0.0

    def __repr__(self) -> str:
        limits = self.limits
        return f"<Bandwidth up={limits.up} down={limits.down} total={limits.total}>"

    def set(self, **options: Unpack[BandwidthOptions]) -> None:
        """Change limits while streams run; an omitted limit stays. If any value is wrong, nothing changes."""
        changed = self._planned(options)
        with self._lock:
            self._plan = changed
            self._options |= options
            self._check_at = 0.0
            for wake in self._wakes.values():
                wake()

    def _planned(self, options: Mapping[str, Any]) -> LimitPlan:
        if unknown := options.keys() - BandwidthOptions.__annotations__.keys():
            raise TypeError(f"Bandwidth got an unexpected keyword argument {min(unknown)!r}")
        return plan(**{**self._options, **options})

    @property
    def limits(self) -> BandwidthLimits:
        """The limits in force now, in bytes a second."""
        return self._plan.at(self._clock.now())

    @property
    def moved(self) -> dict[Direction, int]:
        """Bytes so far, by direction."""
        with self._lock:
            return dict(self._meter.moved)

    def download(self, stream: Any) -> Metered:
        """Wrap a file-like object to read from, or an iterable of bytes, so that it is no faster than `down`
        and `total`."""
        return Metered(self, stream, "down")

    def upload(self, stream: Any) -> Metered:
        """The same for `up`: a stream that is read here and sent elsewhere, or a file-like object to write
        to."""
        return Metered(self, stream, "up")

    def adownload(self, stream: Any) -> AsyncMetered:
        """Wrap a StreamReader, an object that reads like one, or an async iterable of bytes, so that it is no
        faster than `down` and `total`."""
        return AsyncMetered(self, stream, "down")

    def aupload(self, stream: Any) -> AsyncMetered:
        """The same for `up`; also a StreamWriter, or an object with an awaitable `write`."""
        return AsyncMetered(self, stream, "up")

    # For the wrappers

    def piece(self, stream: Stream) -> int:
        """The number of bytes to transfer at once."""
        with self._lock:
            return min(PIECE, self._meter.turn(stream.direction, PIECE))

    def pay(self, stream: Stream, count: int) -> None:
        """Wait until `count` bytes may be moved, turn by turn."""
        woken = threading.Event()
        while count > 0:
            count -= self._ask(stream, count, woken.set)
            try:
                while (delay := self._step(stream)) is not None:
                    woken.wait(delay)
                    woken.clear()
            except BaseException:
                self._leave(stream)
                raise

    async def apay(self, stream: Stream, count: int) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(woken.set)

        while count > 0:
            count -= self._ask(stream, count, wake)
            try:
                while (delay := self._step(stream)) is not None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(delay):
                            await woken.wait()
                    woken.clear()
            except BaseException:
                self._leave(stream)
                raise

    def _ask(self, stream: Stream, count: int, wake: Callable[[], object]) -> int:
        with self._lock:
            self._follow(time.monotonic())
            self._wakes[stream] = wake
            return self._meter.ask(stream, count)

    def _step(self, stream: Stream) -> float | None:
        """Grant the turns that are due. Return how long this stream should sleep, or None if it got its
        own."""
        with self._lock:
            now = time.monotonic()
            self._follow(now)
            for served in self._meter.grant(now):
                wake = self._wakes.pop(served)
                if served is not stream:
                    wake()
            due = self._grant(now, stream)
            if stream.wants == 0:
                return None
            return (
                CHECK_INTERVAL if due is None or due[0] is not stream else min(CHECK_INTERVAL, due[1] - now)
            )

    def _grant(self, now: float, me: Stream) -> tuple[Stream, float] | None:
        due = self._meter.due(now)
        following = None if due is None else due[0]
        if following is not None and following is not me and following is not self._next_to_wake:
            self._wakes[following]()
        self._next_to_wake = following
        return due

    def _leave(self, stream: Stream) -> None:
        """Remove a stream that was interrupted while it waited."""
        with self._lock:
            self._meter.withdraw(stream)
            self._wakes.pop(stream, None)
            self._grant(time.monotonic(), stream)

    def _follow(self, now: float) -> None:
        """Apply the limits of this time of day."""
        if now >= self._check_at:
            self._check_at = now + CHECK_INTERVAL
            limits = self._plan.at(self._clock.now())
            if limits != self._meter.limits:
                self._meter.change(limits, now)


class _Wrapper:
    """Attributes that transfer no bytes (`seek`, `name`, ...) are the stream's own."""

    def __init__(self, bandwidth: Bandwidth, inner: Any, direction: Direction) -> None:
        self._bandwidth = bandwidth
        self._inner = inner
        self._stream = Stream(direction)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Metered(_Wrapper):
    """A stream that waits for its turns."""

    def read(self, size: int | None = -1) -> bytes:
        """Like the `read` of a file: the requested number of bytes, fewer only at the end."""
        left = float("inf") if size is None or size < 0 else size
        pieces = []
        while left > 0:
            piece = self._inner.read(int(min(left, self._bandwidth.piece(self._stream))))
            if not piece:
                break
            self._bandwidth.pay(self._stream, len(piece))
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def read1(self, size: int = -1) -> bytes:
        """The bytes of one read of the stream."""
        most = self._bandwidth.piece(self._stream)
        data: bytes = getattr(self._inner, "read1", self._inner.read)(min(size, most) if size >= 0 else most)
        self._bandwidth.pay(self._stream, len(data))
        return data

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as view:
            data = self.read(len(view))
            view[: len(data)] = data
        return len(data)

    def readline(self, size: int = -1) -> bytes:
        line: bytes = self._inner.readline(size)
        self._bandwidth.pay(self._stream, len(line))
        return line

    def write(self, data: Any) -> int:
        with memoryview(data).cast("B") as view:
            start = 0
            while start < len(view):
                piece = bytes(view[start : start + self._bandwidth.piece(self._stream)])
                start += len(piece)
                self._bandwidth.pay(self._stream, len(piece))
                done = 0
                while done < len(piece):
                    # A raw stream may accept fewer bytes than it is given.
                    written = self._inner.write(piece[done:] if done else piece)
                    done = len(piece) if written is None else done + written
            return len(view)

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._inner:
            self._bandwidth.pay(self._stream, len(piece))
            yield piece

    def __enter__(self) -> Self:
        if hasattr(self._inner, "__enter__"):
            self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self._inner, "__exit__"):
            self._inner.__exit__(kind, error, trace)


class AsyncMetered(_Wrapper):
    """`Metered` for an event loop: reads and writes are awaited."""

    async def read(self, size: int = -1) -> bytes:
        """The bytes of one read, as with a StreamReader; all bytes if `size` is -1."""
        if size >= 0:
            return await self._paid(self._inner.read(min(size, self._bandwidth.piece(self._stream))))
        pieces = []
        while piece := await self._paid(self._inner.read(self._bandwidth.piece(self._stream))):
            pieces.append(piece)
        return b"".join(pieces)

    async def readexactly(self, size: int) -> bytes:
        return await self._paid(self._inner.readexactly(size))

    async def readline(self) -> bytes:
        return await self._paid(self._inner.readline())

    async def _paid(self, reading: Any) -> bytes:
        data: bytes = await reading
        await self._bandwidth.apay(self._stream, len(data))
        return data

    async def write(self, data: Any) -> None:
        """Write, and wait for `drain` if the stream has it."""
        with memoryview(data).cast("B") as view:
            start = 0
            while start < len(view):
                piece = bytes(view[start : start + self._bandwidth.piece(self._stream)])
                start += len(piece)
                await self._bandwidth.apay(self._stream, len(piece))
                for step in (self._inner.write(piece), getattr(self._inner, "drain", lambda: None)()):
                    if inspect.isawaitable(step):
                        await step

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            await self._bandwidth.apay(self._stream, len(piece))
            yield piece
