"""The trace of the enqueueing code continues in the handler, with the real OpenTelemetry SDK; without the SDK
nothing happens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from towpath import App
from towpath.observe import tracing

EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def _provider() -> None:
    # A process can set its provider once; the whole module shares it.
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(provider)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    EXPORTER.clear()
    yield
    EXPORTER.clear()


def finished() -> dict[str, ReadableSpan]:
    return {span.name: span for span in EXPORTER.get_finished_spans()}


def test_a_job_continues_the_trace_of_its_enqueue() -> None:
    with trace.get_tracer("test").start_as_current_span("request"):
        headers = tracing.inject({"mine": "kept"})
    assert headers["mine"] == "kept"
    with tracing.span("mail", headers, tracing.job_attributes("j1", "orders", 2)):
        child = tracing.inject({})
    spans = finished()
    request, run = spans["request"], spans["mail process"]
    assert run.parent is not None
    assert run.parent.span_id == request.context.span_id
    assert run.context.trace_id == request.context.trace_id
    assert run.kind is SpanKind.CONSUMER
    assert dict(run.attributes or {}) == {
        "messaging.system": "towpath",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.message.id": "j1",
        "towpath.attempt": 2,
    }
    assert child["traceparent"].split("-")[2] == format(run.context.span_id, "016x"), (
        "a child of the handler, not of the request"
    )


def test_without_a_trace_the_headers_are_the_same_object() -> None:
    headers = {"a": "b"}
    assert tracing.inject(headers) is headers


def test_a_context_given_by_hand_is_kept() -> None:
    given = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with trace.get_tracer("test").start_as_current_span("request"):
        assert tracing.inject(given) is given


def test_a_broken_header_starts_a_new_trace() -> None:
    with tracing.span("mail", {"traceparent": "nonsense"}):
        pass
    assert finished()["mail process"].parent is None


def test_an_error_of_the_handler_is_recorded_and_goes_on() -> None:
    with pytest.raises(ValueError, match="broken"), tracing.span("mail", {}):
        raise ValueError("broken")
    span = finished()["mail process"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "ValueError: broken"
    assert [event.name for event in span.events] == ["exception"]


def test_a_word_of_the_handler_is_no_error() -> None:
    with pytest.raises(StopAsyncIteration), tracing.span("mail", {}, quiet=(StopAsyncIteration,)):
        raise StopAsyncIteration
    span = finished()["mail process"]
    assert span.status.status_code is StatusCode.UNSET
    assert span.events == ()


def test_an_error_without_a_text_ends_the_span_and_stays_the_error() -> None:
    class TextlessError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    with pytest.raises(TextlessError), tracing.span("mute", {}, {}):
        raise TextlessError
    assert finished()["mute process"].status.description == "TextlessError"


def test_handlers_side_by_side_do_not_mix() -> None:
    async def handler(kind: str, inside: asyncio.Barrier) -> str:
        with tracing.span(kind, {}):
            async with inside:
                return tracing.inject({})["traceparent"].split("-")[2]

    async def main() -> tuple[str, str]:
        inside = asyncio.Barrier(2)
        return await asyncio.gather(handler("a", inside), handler("b", inside))

    a, b = asyncio.run(main())
    spans = finished()
    assert (a, b) == tuple(format(spans[f"{kind} process"].context.span_id, "016x") for kind in "ab")
    assert not trace.get_current_span().get_span_context().is_valid


ALONE = """
import sys
if {blocked}:
    sys.modules["opentelemetry"] = None
from towpath import App
from towpath.observe import tracing
assert tracing.AVAILABLE is not {blocked}
headers = {{}}
assert tracing.inject(headers) is headers
assert tracing.span("mail", headers) is tracing.span("other", headers), "the shared one that does nothing"
with tracing.span("mail", headers):
    pass
given = {{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}}
with tracing.span("mail", given):
    onward = tracing.inject(headers)
assert (onward is headers) is {blocked}, onward
"""


@pytest.mark.parametrize("blocked", [True, False], ids=["no api", "api without sdk"])
def test_without_the_sdk_nothing_is_done_but_the_context_is_passed_on(blocked: bool) -> None:
    program = ALONE.format(blocked=blocked)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_what_a_handler_enqueues_is_a_child_of_its_span() -> None:
    app = App("memory://")

    @app.task
    def leaf() -> None: ...

    @app.task(name="parent")
    def parent() -> None:
        leaf.enqueue()
        app.queue("mail").put("by hand")

    with app.testing() as bench:
        with trace.get_tracer("test").start_as_current_span("request"):
            parent.enqueue()
        bench.drain()
        _, *children = bench.jobs()
    run = finished()["parent process"]
    assert run.context.trace_id == finished()["request"].context.trace_id
    assert [job.headers["traceparent"].split("-")[1:3] for job in children] == [
        [format(run.context.trace_id, "032x"), format(run.context.span_id, "016x")]
    ] * 2


def test_a_message_carries_the_trace_of_its_put() -> None:
    with App("memory://") as app:
        mail = app.queue("mail")
        with trace.get_tracer("test").start_as_current_span("request"):
            mail.put("one", headers={"mine": "kept"})
            mail.put_many(["two", "three"])
            asyncio.run(mail.aput("four"))
        mail.put("five")
        messages = mail.get_many(5)
    request = finished()["request"].context
    carried = [request.trace_id, request.span_id]
    *traced, untraced = [message.headers for message in messages]
    assert [[int(each, 16) for each in headers["traceparent"].split("-")[1:3]] for headers in traced] == [
        carried
    ] * 4
    assert traced[0]["mine"] == "kept"
    assert untraced == {}
