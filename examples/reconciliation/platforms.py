"""Simulated platforms: an HTTP server with configurable latency, 429 responses, outages and unknown posts."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field

from .rules import Numbers
from .serving import QuietHandler, Served


@dataclass
class Platform:
    """The numbers of each post, and the faults of the platform."""

    posts: dict[str, Numbers] = field(default_factory=dict)
    latency: float = 0.0
    down: bool = False
    per_second: int | None = None
    """Requests per second above which the response is 429."""
    unknown_for: dict[str, int] = field(default_factory=dict)
    """Posts that are unknown for the given number of further requests."""
    status: int = 200
    """Another value, such as 403, is the response to every request."""
    asked: list[str] = field(default_factory=list)
    answered: Counter[int] = field(default_factory=Counter)
    """Number of responses by status."""
    _window: tuple[int, int] = (0, 0)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, post: str) -> tuple[int, dict[str, object]]:
        """The status and the body."""
        time.sleep(self.latency)
        with self._lock:
            self.asked.append(post)
            second, count = self._window
            now = int(time.monotonic())
            self._window = (now, count + 1 if now == second else 1)
            status, body = self._look_up(post)
            self.answered[status] += 1
            return status, body

    def _look_up(self, post: str) -> tuple[int, dict[str, object]]:
        if self.down:
            return 503, {"error": "out of order"}
        if self.per_second is not None and self._window[1] > self.per_second:
            return 429, {"error": "too many requests"}
        if self.status != 200:
            return self.status, {"error": "no"}
        if self.unknown_for.get(post, 0) > 0:
            self.unknown_for[post] -= 1
            return 404, {"error": "no numbers yet"}
        numbers = self.posts.get(post)
        return (404, {"error": "no such post"}) if numbers is None else (200, asdict(numbers))


class Simulator(Served):
    """All platforms behind one port: `GET /<platform>/posts/<post>`. `with Simulator({...}) as simulator:
    simulator.url`"""

    def __init__(self, platforms: dict[str, Platform]) -> None:
        class Handler(QuietHandler):
            def do_GET(self) -> None:  # noqa: N802
                _, name, _, post = self.path.split("/", 3)
                status, body = platforms[name].answer(post)
                data = json.dumps(body).encode()
                self.send_response(status)
                if status == 429:
                    self.send_header("Retry-After", "1")
                self.send_header("Content-Length", str(len(data)))
                with contextlib.suppress(ConnectionError):  # the client may have been killed
                    self.end_headers()
                    self.wfile.write(data)

        super().__init__(Handler)
