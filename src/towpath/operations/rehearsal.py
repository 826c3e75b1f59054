"""Run the handler of a stored job without storing anything: `towpath jobs debug`.

The handler uses the app as always. Until the end of the run the app's engine has a ledger that reads the real
one and records commands instead of applying them. A function of `current().commit` is called in a transaction
that is rolled back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from msgspec.structs import replace

from towpath.core.commands import Abort, Append, Command, Note, Open, Placed, Progress, Seal, Settle, Unseal
from towpath.core.job import ClaimedJob, Done, FailOutcome, Job, Outcome, RetryOutcome, Spec, State
from towpath.core.results import Appended, GroupSet, Noted, Progressed, Result
from towpath.core.views import NoteView, plan_notes
from towpath.errors import Refused, Unsupported, UserFunctionFailed
from towpath.events import Bus
from towpath.ledger import Answer, Ledger
from towpath.runtime.commit.committer import Committer
from towpath.runtime.engine import Components, Engine
from towpath.tasks.active_hooks import ThreadedHooks, is_used
from towpath.tasks.attempt import QUIET, Attempt
from towpath.tasks.task import Task

OWNER = "rehearsal"


class RecordingLedger:
    """Reads return the data of the ledger. Commands are recorded in `commands` and answered as if they were
    applied; notes are read as the commands have left them. If the result of a command depends on other jobs,
    the command is refused."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._notes: dict[str, NoteView | None] = {}
        self.commands: list[Command] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def close(self) -> None:
        """The real ledger stays open."""

    def apply(self, commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        return [self._answer(command) for command in commands]

    def append_on(self, connection: Any, specs: Sequence[Spec], now: int | None = None) -> tuple[Placed, ...]:
        """Append in the transaction of the user, which is the user's to roll back."""
        return self._place(Append(tuple(specs)))

    def note(self, key: str, now: int | None = None) -> NoteView | None:
        return self._notes[key] if key in self._notes else self._ledger.note(key, now)

    def _answer(self, command: Command) -> Answer:
        try:
            return self._result(command)
        except Refused as refused:
            return refused

    def _result(self, command: Command) -> Result:
        if isinstance(command, Append):
            return Appended(self._place(command))
        if isinstance(command, Note):
            return self._write(command)
        if isinstance(command, Progress):
            self.commands.append(command)
            return Progressed()
        if isinstance(command, Open | Seal | Unseal | Abort):
            self.commands.append(command)
            return GroupSet(command.group)
        name = type(command).__name__
        raise Unsupported(what=f"{name} is not applied while a job is debugged, because nothing is stored")

    def _place(self, command: Append) -> tuple[Placed, ...]:
        self.commands.append(command)
        return tuple(Placed(spec.id, 0) for spec in command.specs)

    def _write(self, command: Note) -> Noted:
        stored = self.note(command.key)
        version = 1 if stored is None else stored.version + 1
        [(new, answer)] = plan_notes({} if stored is None else {command.key: stored}, (command,), version, 0)
        self._notes[command.key] = new
        self.commands.append(command)
        return answer


class Rehearsal:
    """The end of a run. `commands` would have been applied by the handler itself, `settle` by the worker
    after it, with children and notes. `error` is the exception of the handler or of
    a commit function, unless the handler raised it on purpose, as a snooze."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.commands: list[Command] = []
        self.settle = Settle(job.id, job.fence, Done())
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.committed = False
        """True if commit functions were called, and rolled back."""

    @property
    def outcome(self) -> Outcome:
        return self.settle.outcome


def rehearse(
    engine: Engine,
    task: Task[..., Any],
    job: Job,
    run: Callable[[Callable[[], Settle]], Settle] | None = None,
) -> Rehearsal:
    """Run the handler in this thread as the next attempt at `job`. `run` calls the attempt, for a debugger.
    Breakers, limits and timeouts are not applied; hooks are."""
    attempt_job = replace(
        job,
        state=State.RUNNING,
        attempts=job.attempts + 1,
        fence=job.fence + 1,
        owner=OWNER,
        cancel_requested=None,
    )
    ended, ledger = Rehearsal(attempt_job), engine.ledger
    with _recording(engine) as recorder, contextlib.ExitStack() as stack:
        found: Task[..., Any] | None = task
        if is_used(task.registry):
            found = stack.enter_context(contextlib.closing(ThreadedHooks(task.registry))).active.get(
                task.kind
            )
        assert found is not None
        attempt = Attempt(task.registry, ClaimedJob(attempt_job), found)
        begun = time.monotonic()
        ended.settle = run(attempt.run) if run is not None else attempt.run()
        ended.seconds = time.monotonic() - begun
        within = ended.settle.within
        if within is not None:
            ended.committed = True
            try:
                cast(Any, ledger).rehearse(within)
            except UserFunctionFailed as failure:
                ended.settle = attempt.refused(failure)
        is_failure = isinstance(ended.outcome, RetryOutcome | FailOutcome)
        ended.error = attempt.error if is_failure or not isinstance(attempt.error, QUIET) else None
    # Progress is posted without waiting; leaving the block has applied it.
    ended.commands = recorder.commands
    return ended


@contextlib.contextmanager
def _recording(engine: Engine) -> Iterator[RecordingLedger]:
    recorder = RecordingLedger(engine.ledger)
    ledger = cast(Ledger, recorder)
    committer = Committer(ledger, bus=Bus())
    committer.start()
    components = Components(ledger, committer, OWNER, owned=False)
    try:
        with engine.substituted(components, engine.clock):
            yield recorder
    finally:
        components.close()
