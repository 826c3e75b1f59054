"""OpenTelemetry: the trace that enqueued a job goes on in the worker that runs it.

`inject` stores the current W3C trace context in a job's headers, `span` reads it and opens a span around the
handler. Both do nothing, at little cost, unless `opentelemetry-api` is installed
(`pip install 'towpath[otel]'`). Baggage is not propagated: it may contain values that must not be stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    AVAILABLE = True
except ImportError:  # pragma: no cover
    AVAILABLE = False

HEADER = "traceparent"
"""The header with the trace context; its `tracestate`, if there is one, is beside it."""
CONTEXT = (HEADER, "tracestate")
_NOTHING: AbstractContextManager[None] = nullcontext()

if AVAILABLE:
    _propagator = TraceContextTextMapPropagator()


def inject(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers with the current trace context; the same object if there is none, or if they already carry
    one."""
    # Usually there is no context at all, which is cheaper to detect than a context without a span.
    if (
        not AVAILABLE
        or not otel_context.get_current()
        or HEADER in headers
        or not trace.get_current_span().get_span_context().is_valid
    ):
        return headers
    carried = dict(headers)
    _propagator.inject(carried)
    return carried


def wanted(headers: Mapping[str, str]) -> bool:
    """True if a span around a handler would be recorded or propagated."""
    return AVAILABLE and (_listening() or HEADER in headers)


def span(
    kind: str,
    headers: Mapping[str, str],
    attributes: Mapping[str, str | int] = {},
    quiet: tuple[type[BaseException], ...] = (),
) -> AbstractContextManager[None]:
    """A span around a handler, as a child of the context in `headers`. Exceptions in `quiet` (by which a
    handler postpones or stops its job) are not errors of the span. Enter it where the handler runs: on its
    task, or in its thread."""
    if not wanted(headers):
        return _NOTHING
    return _Span(kind, headers, attributes, quiet)


def _listening() -> bool:
    """True if the program has set up tracing. Called for every job: the public function reads the environment
    each time, so it is called only if the private attribute does not decide."""
    if getattr(trace, "_TRACER_PROVIDER", trace) is None:
        return False
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def job_attributes(id: str, queue: str, attempt: int) -> dict[str, str | int]:
    """The attributes of a job's span, by OpenTelemetry's names for messaging."""
    return {
        "messaging.system": "towpath",
        "messaging.operation.type": "process",
        "messaging.destination.name": queue,
        "messaging.message.id": id,
        "towpath.attempt": attempt,
    }


class _Span(AbstractContextManager[None]):
    """Written out, because a generator-based context manager costs three times as much."""

    __slots__ = ("_attributes", "_headers", "_kind", "_quiet", "_span", "_token")

    def __init__(
        self,
        kind: str,
        headers: Mapping[str, str],
        attributes: Mapping[str, str | int],
        quiet: tuple[type[BaseException], ...],
    ) -> None:
        self._kind, self._headers, self._attributes, self._quiet = kind, headers, attributes, quiet

    def __enter__(self) -> None:
        parent = _propagator.extract(self._headers)
        tracer = trace.get_tracer("towpath")
        span = tracer.start_span(
            f"{self._kind} process", parent, trace.SpanKind.CONSUMER, dict(self._attributes)
        )
        self._span = span
        self._token = otel_context.attach(trace.set_span_in_context(span, parent))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        otel_context.detach(self._token)
        if error is not None and not isinstance(error, self._quiet):
            # `str` of an error of the user may raise; that must not replace the error.
            try:
                text = f"{type(error).__name__}: {error}"
                self._span.record_exception(error)
            except Exception:
                text = type(error).__name__
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, text))
        self._span.end()
