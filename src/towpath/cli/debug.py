"""`jobs debug`: run the handler of a stored job here, with its real arguments, without storing anything."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from towpath import commands
from towpath.cli.base import INTERRUPTED, OK, REFUSED, Failure, Session, bad_input, command, pass_session
from towpath.cli.output import decode_body, format_pairs, format_span, print_result
from towpath.cli.targets import existing_url, find_job, find_task, include_option, load_app
from towpath.escapes import escape

if TYPE_CHECKING:
    from towpath.operations.rehearsal import Rehearsal


@command("debug")
@click.argument("id")
@click.option("--app", "target", metavar="MODULE:APP", required=True, help="App with the task of the job.")
@include_option
@click.option("--pdb", "debugger", is_flag=True, help="Stop at the start of the handler, and where it fails.")
@pass_session
def debug_job(session: Session, /, id: str, target: str, include: tuple[str, ...], debugger: bool) -> int:
    """Run the handler of a job here, without storing anything.

    With the stored arguments, in any state of the job. What the handler does through current() and through
    the app is printed, not stored; commit functions get a transaction that is rolled back. Other effects of
    the handler are real. Exit code 1 if it fails."""
    from towpath.operations.rehearsal import rehearse

    if debugger and session.json:
        raise click.UsageError("Use either --pdb or --json.", click.get_current_context())
    app = load_app(target, session.url, include)
    existing_url(app.engine.url)
    with app:
        job = app.ledger.get(find_job(app.ledger, id).id)
        assert job is not None
        if not job.kind:
            raise bad_input(f"{job.id} is a message; it has no handler.", "See `towpath jobs show`.")
        task = find_task(app, target, job.kind)
        run = _Debugger(task.function).run if debugger else None
        # stdout is for the result.
        quiet = contextlib.redirect_stdout(sys.stderr) if session.json else contextlib.nullcontext()
        with quiet:
            ended = rehearse(app.engine, task, job, run)
    if type(ended.error).__name__ == "BdbQuit":
        raise Failure("The debugger was left; nothing was stored.", INTERRUPTED)
    data = _data(ended)
    print_result(session.json, data, lambda: _lines(ended, data))
    if debugger and ended.error is not None:
        import pdb

        pdb.post_mortem(ended.error.__traceback__)
    return OK if ended.error is None else REFUSED


class _Debugger:
    """Runs an attempt under pdb, with a breakpoint at the first line of the handler."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = inspect.unwrap(function)

    def run(self, attempt: Callable[[], commands.Settle]) -> commands.Settle:
        from pdb import Pdb

        debugger = Pdb()
        code = getattr(self._function, "__code__", None)
        if code is None or not linecache.getline(code.co_filename, code.co_firstlineno):
            return attempt()
        debugger.reset()
        # Frames below this one are not the user's: the debugger must not step into them at the end.
        debugger.botframe = sys._getframe()
        debugger.set_break(code.co_filename, code.co_firstlineno, temporary=True, funcname=code.co_name)
        debugger.set_continue()
        sys.settrace(debugger.trace_dispatch)
        try:
            return attempt()
        finally:
            sys.settrace(None)


def _data(ended: Rehearsal) -> dict[str, Any]:
    outcome, job = ended.outcome, ended.job
    progress = [each for each in ended.commands if isinstance(each, commands.Progress)]
    counts = [each for each in progress if each.done is not None]
    cursors = [each.cursor for each in progress if each.cursor is not None]
    notes = [each for each in ended.commands if isinstance(each, commands.Note)]
    error = ended.error
    return {
        "id": job.id,
        "short_id": job.short_id,
        "kind": job.kind,
        "attempt": job.attempts,
        "seconds": round(ended.seconds, 6),
        "outcome": str(outcome.__struct_config__.tag),
        "delay": getattr(outcome, "delay", 0) / 1_000_000 or None,
        "result": decode_body(getattr(outcome, "result", None))[0],
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "traceback": None if error is None else "".join(traceback.format_exception(error)),
        "spawned": [_spec(spec) for spec in ended.settle.spawn],
        "enqueued": [
            _spec(spec) for each in ended.commands if isinstance(each, commands.Append) for spec in each.specs
        ],
        "notes": [{"key": each.key, "value": decode_body(each.value)[0]} for each in notes],
        "progress": {"done": counts[-1].done, "total": counts[-1].total} if counts else None,
        "cursor": decode_body(cursors[-1])[0] if cursors else None,
        "commit": "rolled back" if ended.committed else None,
    }


def _spec(spec: Any) -> dict[str, Any]:
    value, encoding = decode_body(spec.payload, spec.content_type)
    return {
        "id": spec.id,
        "kind": spec.kind,
        "queue": spec.queue,
        "payload": value,
        "payload_encoding": encoding,
    }


def _lines(ended: Rehearsal, data: dict[str, Any]) -> list[str]:
    delay = "" if data["delay"] is None else f" in {format_span(int(data['delay'] * 1_000_000))}"
    values: dict[str, object] = {
        "job": f"{data['id']} ({data['kind']}), as attempt {data['attempt']}",
        "outcome": f"{data['outcome']}{delay}, after {data['seconds']:.3f} s",
    }
    if data["error"] is None:
        values["result"] = _shown(data["result"])
    for name, label in (("spawned", "would spawn"), ("enqueued", "would enqueue")):
        if data[name]:
            values[label] = "\n".join(
                f"{each['kind'] or 'message'} in {each['queue']}: {_shown(each['payload'])}"
                for each in data[name]
            )
    if data["notes"]:
        values["would write"] = "\n".join(
            f"note {each['key']}: {_shown(each['value'])}" for each in data["notes"]
        )
    if data["progress"] is not None:
        values["progress"] = f"{data['progress']['done']} of {data['progress']['total'] or '?'}"
    if data["cursor"] is not None:
        values["checkpoint"] = _shown(data["cursor"])
    if data["commit"] is not None:
        values["commit"] = "the functions were called, and rolled back"
    lines = format_pairs(values)
    if data["traceback"] is not None:
        lines += ["", *data["traceback"].rstrip().split("\n")]
    return [*lines, "", "Nothing was stored; the job is unchanged."]


def _shown(value: object) -> str:
    return escape(msgspec.json.encode(value).decode())
