"""`worker --metrics`: somebody who answers Prometheus, and a clear word if nobody can."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import msgspec

from towpath.cli.base import all_of
from towpath.cli.failures import Failure, bad_input, say

if TYPE_CHECKING:
    from towpath.app import App

LAST_PORT = 65_535

metrics_options = all_of(
    click.option(
        "--metrics",
        metavar="PORT",
        type=click.IntRange(0, LAST_PORT),
        help="Answer Prometheus on this port; 0 takes a free one. With --processes each has its own: PORT, PORT+1, ...",
    ),
    click.option("--metrics-host", metavar="HOST", help="The address to answer on: 127.0.0.1. Needs --metrics."),
)


class Exporter(msgspec.Struct, frozen=True):
    """Where the metrics of a worker are to be had."""

    port: int
    host: str

    @classmethod
    def of(cls, port: int | None, host: str | None) -> Exporter | None:
        """As given on the command line."""
        if port is None:
            if host is not None:
                raise click.UsageError("--metrics-host needs --metrics PORT.", click.get_current_context())
            return None
        return cls(port, host or "127.0.0.1")

    def of_process(self, number: int) -> Exporter:
        """The metrics of a process are its own, and so is its port. `number` is from 1."""
        return Exporter(self.port and self.port + number - 1, self.host)

    def arguments(self) -> list[str]:
        return ["--metrics", str(self.port), "--metrics-host", self.host]

    def check(self, processes: int) -> None:
        """Can they all answer? A process that cannot would be started again and again."""
        _library()
        if self.of_process(processes).port > LAST_PORT:
            last = f"{processes} processes need the ports {self.port} to {self.port + processes - 1}"
            raise bad_input(f"{last}; the last there is, is {LAST_PORT}.", "Begin with a smaller --metrics PORT.")
        for number in range(1, processes + 1):
            place = self.of_process(number)
            try:
                found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
                socket.create_server(found[0][4][:2], family=found[0][0]).close()
            except (OSError, UnicodeError) as error:
                raise place.refused(error) from error

    def refused(self, error: Exception) -> Failure:
        if isinstance(error, socket.gaierror | UnicodeError):
            return bad_input(
                f"There is no host {self.host!r} to answer on.", "--metrics-host takes an address of this machine."
            )
        # Not the error's own text, to which Python may add the address again.
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        step = "Name another port: --metrics PORT. 0 takes any that is free."
        return Failure(f"Metrics cannot be served at {self.host}, port {self.port}: {why}.", step=step)


@contextmanager
def serving(app: App, exporter: Exporter | None) -> Iterator[None]:
    """Answer while the block lasts, with what the program itself has put into the default registry too."""
    if exporter is None:
        yield
        return
    _library()
    from towpath.observe.metrics import install, serve

    try:
        remove = install(app.bus, app.ledger, clock=app.clock)
    except ValueError as error:
        message = "The program has installed towpath.observe.metrics itself already."
        raise bad_input(message, "Leave `install` out there, or --metrics here.") from error
    try:
        try:
            stop = serve(exporter.port, exporter.host)
        except (OSError, UnicodeError) as error:
            raise exporter.refused(error) from error
        say([f"Metrics: {stop.url}"])
        try:
            yield
        finally:
            stop()
    finally:
        remove()


def _library() -> None:
    try:
        import towpath.metrics  # noqa: F401
    except ImportError as error:
        raise Failure("--metrics needs prometheus-client.", step="pip install 'towpath[metrics]'") from error
