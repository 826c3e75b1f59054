"""A small HTTP API for affiliates: `POST /reports`, `GET /reports/<id>`, `GET /affiliates/<name>`, `GET
/queues`."""

from __future__ import annotations

import json
import math
from typing import Any

from towpath.errors import QueueFull, UnknownJob

from . import store, work
from .serving import QuietHandler, Served

FIELDS: dict[str, type] = {
    "report": str,
    "affiliate": str,
    "platform": str,
    "post": str,
    "views": int,
    "clicks": int,
    "conversions": int,
}
Answer = tuple[int, dict[str, Any]]
"""The status and the body."""


def post_report(body: Any) -> Answer:
    """202 with the job, 400 with the error, 429 if the queue is full."""
    if not isinstance(body, dict):
        return 400, {"error": "a JSON object is expected"}
    for name, kind in FIELDS.items():
        value = body.get(name)
        if type(value) is not kind or value == "" or (isinstance(value, int) and not 0 <= value < 2**53):
            return 400, {"error": f"{name} must be {'a number' if kind is int else 'a text'}", "field": name}
    if body["platform"] not in work.PLATFORMS:
        return 400, {"error": f"platform must be one of {', '.join(work.PLATFORMS)}", "field": "platform"}
    db = store.connect(work.DATABASE)
    try:
        evidence = bool(body.get("evidence"))
        return 202, work.submit(db, {name: body[name] for name in FIELDS}, evidence)
    except QueueFull as error:
        return 429, {"error": str(error), "retry_after": math.ceil(error.retry_after)}
    finally:
        db.close()


def get_report(id: str) -> Answer:
    job = work.app.job(f"report/{id}")
    try:
        status = job.status()
    except UnknownJob:
        return 404, {"error": "no such report"}
    why = None if status.finished_at is not None else str(job.explain())
    return 200, {
        "report": id,
        "state": status.state,
        "attempts": status.attempts,
        "error": status.error,
        "why": why,
    }


def get_affiliate(name: str) -> Answer:
    db = store.connect(work.DATABASE)
    try:
        return 200, {"affiliate": name, "trust": store.trust(db, name)}
    finally:
        db.close()


def get_queues() -> Answer:
    """The number of waiting and running jobs per platform."""
    found = {platform: work.app.queue(work.queue_of(platform)).stats().counts for platform in work.PLATFORMS}
    return 200, {
        platform: {
            "depth": counts.waiting,
            "ready": counts.ready,
            "scheduled": counts.scheduled,
            "running": counts.running,
        }
        for platform, counts in found.items()
    }


class Api(Served):
    def __init__(self) -> None:
        class Handler(QuietHandler):
            def do_POST(self) -> None:  # noqa: N802
                try:
                    body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                except ValueError:
                    self._respond(400, {"error": "that is not JSON"})
                    return
                self._respond(
                    *(post_report(body) if self.path == "/reports" else (404, {"error": "no such place"}))
                )

            def do_GET(self) -> None:  # noqa: N802
                match self.path.split("/")[1:]:
                    case ["reports", id]:
                        self._respond(*get_report(id))
                    case ["affiliates", name]:
                        self._respond(*get_affiliate(name))
                    case ["queues"]:
                        self._respond(*get_queues())
                    case _:
                        self._respond(404, {"error": "no such place"})

            def _respond(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                if status == 429:
                    self.send_header("Retry-After", str(body["retry_after"]))
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        super().__init__(Handler)
