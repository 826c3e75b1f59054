"""Every error Towpath raises or returns.

    TowpathError
    ├── InvalidInput            a value that can never be right: raised at the boundary, nothing is written
    │   └── InvalidPlan         a plan that could not run or could not be undone, with all reasons
    ├── Refused                 a business error: `apply` returns it as the command's result
    │   ├── LostClaim           the fence is old: another owner holds or finished the job
    │   │   └── AlreadySettled  the same delivery of a message was acknowledged or returned before
    │   ├── UnknownJob
    │   ├── UnknownDependency
    │   ├── DependencyCycle
    │   ├── UnknownGroup
    │   ├── GroupClosed
    │   ├── QueueFull           (retryable)
    │   │   ├── PartFull        (retryable)
    │   │   └── TooManyAppends  (retryable)
    │   ├── NoteConflict
    │   ├── UnusableBlob        a chunk is missing or differs, or another job has the blob
    │   ├── NotRevivable
    │   ├── NotResolvable       a running or done job cannot be marked or skipped
    │   ├── Unsupported
    │   ├── UserFunctionFailed
    │   └── CommandFailed       the ledger itself failed on one command; its neighbours are unharmed
    ├── JobFailed               the awaited job ended as a dead letter
    ├── JobCanceled             the awaited job was canceled
    ├── UnknownPlan
    ├── PlanRefused             the state of a plan or of a step does not allow the operation
    ├── NotInJob                `towpath.current()` where no job runs
    ├── HookFailed              a lifespan of the program failed when the worker started
    ├── TimedOut                a handler ran longer than its timeout: the stored error of the attempt
    ├── ProcessDied             the process of a handler ended: the stored error of the attempt
    ├── WaitInHandler           a handler would wait for another job
    ├── StepsChanged            the steps of a handler are not those that an earlier attempt recorded
    ├── WorkerStuck             every slot of the worker is held by a handler that does not stop
    ├── CallFailed              the HTTP server refused a call of the client
    │   ├── NotAllowed          no valid token or certificate, or no right to the queue
    │   ├── LostLease           the lease of the message or lock is over, or belongs to another client
    │   ├── LockBusy            (retryable) another client holds the lock
    │   └── ServerBusy          (retryable) the server has too much to do, drains, or has lost its ledger
    ├── ServerAway              (retryable) the HTTP server cannot be reached, or the connection broke
    ├── BadResponse             the response is not that of a Towpath or lockd server
    ├── NodeError               an action of a plan on a node
    │   ├── NodeAway            (retryable) the node cannot be reached, or the connection broke
    │   ├── ActionFailed        (retryable) the action failed; another attempt may succeed
    │   ├── ActionRefused       (fatal) the action is wrong or not allowed; no attempt can succeed
    │   └── SecretUnavailable   (retryable) the password or token of the node cannot be read
    └── LedgerError             the ledger as a whole
        ├── LedgerBusy          (retryable) locked by another connection for too long
        │   └── StaleTransaction    (retryable) a transaction of the user that has read cannot write any more
        ├── ReadersBusy         (retryable) all read connections were in use for too long
        ├── LedgerAway          (retryable) its server cannot be reached, or cannot do it now
        ├── DiskFull            (retryable)
        ├── LedgerClosed        (fatal)
        ├── LedgerGone          (fatal) its file was removed or replaced under us
        ├── OrphanedLog         (fatal) a write-ahead log without its database
        ├── NotALedger          (fatal)
        ├── NewerSchema         (fatal)
        ├── NotInstalled        (fatal) the package for this kind of ledger
        ├── ReadOnly            (fatal)
        ├── NetworkFileSystem   (fatal)
        ├── WrongConnection
        ├── Forked              (fatal)
        ├── NestedCall          a ledger call from inside a ledger call
        ├── Damaged             (fatal)
        └── StoreFailed         anything else the store below reported

`retryable`: the same call may succeed later. `fatal`: this ledger object will never work again.
An error is made from named details; the message is its class's sentence filled with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from towpath.escapes import escape

MAX_SHOWN: Final = 20
"""Reasons of an invalid plan that its message shows."""


class TowpathError(Exception):
    sentence: ClassVar[str] = "Towpath failed"
    retryable: ClassVar[bool] = False
    fatal: ClassVar[bool] = False

    def __init__(self, **details: Any) -> None:
        self.details = details
        super().__init__(escape(self._text(), lines=True))

    def _text(self) -> str:
        return self.sentence.format_map({name: _harmless(name, each) for name, each in self.details.items()})

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.details == getattr(other, "details", None)

    def __hash__(self) -> int:
        return hash((type(self), str(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.details)


def _harmless(name: str, value: Any) -> Any:
    """A detail in the sentence. Only the text of an error may have several lines."""
    return escape(value, lines=name == "error") if isinstance(value, str) else value


def _rebuild(cls: type[TowpathError], details: dict[str, Any]) -> TowpathError:
    return cls(**details)


class InvalidInput(TowpathError, ValueError):
    """`field`, `value` (as it is printed, shortened) and `expected` are for programs. A `message` of its own
    replaces the sentence where these three do not make one."""

    sentence = "{field} is {value}; it must be {expected}"

    def __init__(self, *, field: str, value: object, expected: str, message: str | None = None) -> None:
        self.field = field
        self.value = value if isinstance(value, Described) else Described(shortened(value))
        self.expected = expected
        details = {"field": field, "value": self.value, "expected": expected}
        super().__init__(**details if message is None else {**details, "message": message})

    def _text(self) -> str:
        message = self.details.get("message")
        return super()._text() if message is None else escape(message)

    def renamed(self, field: str) -> InvalidInput:
        """The same error with another name of the field, such as its place in a file."""
        details = {**self.details, "field": field}
        if "message" in details:
            details["message"] = f"{field}: {details['message']}"
        return InvalidInput(**details)


class InvalidPlan(InvalidInput):
    """`plan` is the name of the plan, `reasons` are all reasons why it is refused."""

    def __init__(self, *, plan: str, reasons: Sequence[str]) -> None:
        self.plan, self.reasons = plan, tuple(reasons)
        super().__init__(field="plan", value=plan, expected="a valid plan", message="")
        self.details = {"plan": plan, "reasons": list(reasons)}

    def _text(self) -> str:
        lines = [escape(reason) for reason in self.reasons[:MAX_SHOWN]]
        if more := len(self.reasons) - len(lines):
            lines.append(f"and {more} more")
        head = f"plan {escape(self.plan)} is not valid:"
        return f"{head} {lines[0]}" if len(lines) == 1 else "\n- ".join([head, *lines])

    def renamed(self, field: str) -> InvalidInput:
        return InvalidInput(
            field=field,
            value=self.value,
            expected=self.expected,
            message=f"{field}: {'; '.join(self.reasons)}",
        )


class Described(str):
    """A value in words, such as `20 bytes`: printed as it is, not as a text with quotes."""

    __slots__ = ()


def shortened(value: object, limit: int = 80) -> str:
    """The printed form of a value, in ASCII and not too long, for the message of an error."""
    try:
        text = ascii(value)
    except Exception:
        # Nested too deep to be shown, or a `__repr__` that fails: that must not hide what is wrong with it.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class Refused(TowpathError):
    sentence = "refused"


class LostClaim(Refused):
    sentence = "job {id}: the claim with fence {fence} is lost"


class AlreadySettled(LostClaim):
    sentence = "message {id}: the delivery with fence {fence} was {outcome} already"


class UnknownJob(Refused):
    sentence = "there is no job {id}"


class UnknownDependency(Refused):
    sentence = "no job or group exists with these ids to wait for: {ids}"


class DependencyCycle(Refused):
    sentence = "these depend on each other: {ids}"


class UnknownGroup(Refused):
    sentence = "there is no group {group}"


class GroupClosed(Refused):
    sentence = "group {group} is {state}; only a running member may add to it after the seal"


class QueueFull(Refused):
    """`retry_after` is a hint in seconds: how long the queue takes to make room, as far as that was measured,
    else 1."""

    sentence = (
        "queue {queue} is full: {depth} of {capacity} waiting, {asked} more asked; "
        "try again in {retry_after} s"
    )
    retryable = True

    def __init__(self, **details: Any) -> None:
        super().__init__(**{"retry_after": 1.0, **details})

    @property
    def retry_after(self) -> float:
        return float(self.details["retry_after"])


class PartFull(QueueFull):
    """The capacity of a part. It has a `retry_after` as `QueueFull` has."""

    sentence = (
        "part {part} of queue {queue} is full: {depth} of {capacity} waiting, {asked} more asked; "
        "try again in {retry_after} s"
    )


class TooManyAppends(QueueFull):
    """The append rate of a part. `retry_after`: the seconds until the rate allows what was asked."""

    sentence = (
        "part {part} of queue {queue} takes appends at {rate}: {asked} asked; try again in {retry_after} s"
    )


class NoteConflict(Refused):
    sentence = "note {key} is at version {version}, not {expect}"


class UnusableBlob(Refused):
    sentence = "blob {blob} cannot be used: {why}"


class NotRevivable(Refused):
    sentence = "job {id} cannot be revived: {why}"


class NotResolvable(Refused):
    sentence = "job {id} cannot be marked done or skipped: {why}"


class Unsupported(Refused):
    sentence = "this ledger cannot do that: {what}"


class UserFunctionFailed(Refused):
    sentence = "job {id}: the function in its settle failed, nothing was written: {error}"


class CommandFailed(Refused):
    sentence = "{command} failed inside the ledger, nothing of it was written: {error}"


class JobFailed(TowpathError):
    """`culprit` is the id of the job that failed first, if this one failed because it depended on it; `error`
    is then the error of that job."""

    sentence = "job {id} failed ({reason}): {error}"

    def __init__(self, *, id: str, reason: str, error: str | None, culprit: str | None = None) -> None:
        self.id, self.reason, self.error, self.culprit = id, reason, error, culprit
        super().__init__(id=id, reason=reason, error=error, culprit=culprit)


class JobCanceled(TowpathError):
    sentence = "job {id} was canceled ({reason})"

    def __init__(self, *, id: str, reason: str) -> None:
        self.id, self.reason = id, reason
        super().__init__(id=id, reason=reason)


class UnknownPlan(TowpathError):
    sentence = "there is no plan {id}"


class PlanRefused(TowpathError):
    sentence = "plan {id} is {state}: {why}"


class NotInJob(TowpathError, RuntimeError):
    sentence = (
        "towpath.current() is for the handler of a running job, and no job runs here; "
        "a thread that a handler starts needs a copy of its context: contextvars.copy_context().run"
    )


class TimedOut(TowpathError, TimeoutError):
    sentence = "it ran longer than {seconds} s"

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(seconds=seconds)


class ProcessDied(TowpathError):
    """`begun` is False if the process ended before it received the job: the handler was not called."""

    sentence = "the process ended with exit code {exit_code}"

    def __init__(self, *, exit_code: int | None, begun: bool = True) -> None:
        self.exit_code, self.begun = exit_code, begun
        super().__init__(exit_code=exit_code, begun=begun)


class WaitInHandler(TowpathError, RuntimeError):
    sentence = (
        "a handler must not wait for another job: job {id} ({kind}) would hold its slot until {what} has "
        "ended, and if all slots wait, no job runs. Put what follows into a job of its own: app.chain(...), "
        "app.group(calls, then=...) or current().spawn(...). If slots of other workers run {what}, pass "
        "wait_inside=True"
    )


class StepsChanged(TowpathError):
    sentence = "job {id}: step {number} is {came}, but an earlier attempt recorded {recorded} at this place"


class LedgerError(TowpathError):
    sentence = "the ledger failed"


class HookFailed(TowpathError):
    sentence = "{hook} failed at the start of the process: {error}"


class WorkerStuck(TowpathError):
    sentence = (
        "all {slots} slots are held by handlers that do not stop {grace} s after their timeout; "
        "the worker ends, so that its supervisor starts it again, and their jobs run again"
    )


class CallFailed(TowpathError):
    """`status` is the HTTP status, `code` and `detail` are those of the error envelope. `retry_after` is a
    hint in seconds, 0 without one. `version` and `etag` are those of the record, where a condition failed."""

    sentence = "{call} was refused with {status} {code}: {detail}"

    def __init__(self, *, call: str, status: int, code: str, detail: str = "", **more: Any) -> None:
        self.call, self.status, self.code, self.detail = call, status, code, detail
        self.retry_after = float(more.get("retry_after", 0))
        self.version, self.etag = more.get("version", 0), more.get("etag", "")
        super().__init__(call=call, status=status, code=code, detail=detail, **more)


class NotAllowed(CallFailed):
    sentence = "{call} is not allowed ({status} {code}): {detail}"


class LostLease(CallFailed):
    sentence = "{call}: the lease is lost ({code}): {detail}"


class LockBusy(CallFailed):
    sentence = "{call}: another client holds the lock; try again in {retry_after} s"
    retryable = True


class ServerBusy(CallFailed):
    sentence = "{call}: the server cannot do it now ({status} {code}): {detail}"
    retryable = True


class ServerAway(TowpathError):
    """`sent` is False if no connection was made: the server has not got the request."""

    sentence = "{call}: no answer from {server}: {why}"
    retryable = True

    def __init__(self, *, call: str, server: str, why: str, sent: bool = True) -> None:
        self.sent = sent
        super().__init__(call=call, server=server, why=why, sent=sent)


class BadResponse(TowpathError):
    sentence = "{call}: the response of {server} is not valid: {why}"


class NodeError(TowpathError):
    """`details` has the node and more of the cause. The text never contains the credentials of the node."""

    sentence = "node {node}: {why}"

    def __init__(self, *, node: str, why: str, **more: Any) -> None:
        self.node, self.why = node, why
        super().__init__(node=node, why=why, **more)


class NodeAway(NodeError):
    """`sent` is False if the node has not received the action."""

    retryable = True

    def __init__(self, *, node: str, why: str, sent: bool = True) -> None:
        self.sent = sent
        super().__init__(node=node, why=why, sent=sent)


class ActionFailed(NodeError):
    retryable = True


class ActionRefused(NodeError):
    fatal = True


class SecretUnavailable(NodeError):
    retryable = True


class LedgerBusy(LedgerError):
    sentence = (
        "{path} was locked by another connection for more than {seconds} s; "
        "find the long transaction and end it"
    )
    retryable = True


class ReadersBusy(LedgerError):
    sentence = (
        "all {count} read connections to {path} were in use for {seconds} s; "
        "read smaller pages, or fewer at the same time"
    )
    retryable = True


class StaleTransaction(LedgerBusy):
    sentence = (
        "{path}: your transaction has read, and another connection has written since, "
        "so it cannot write and waiting is of no use; roll it back and begin your transaction with "
        "BEGIN IMMEDIATE, or enqueue before you read"
    )


class LedgerAway(LedgerError):
    sentence = "the ledger's server at {path} cannot do it now: {why}"
    retryable = True


class DiskFull(LedgerError):
    sentence = "{path}: the disk or the allowed size is full; free space and try again, nothing was written"
    retryable = True


class LedgerClosed(LedgerError):
    sentence = "{path} is closed, so it takes no more calls; close it after the last one"
    fatal = True


class LedgerGone(LedgerError):
    sentence = "{path} was removed or replaced while it was open; nothing more is written: it would be lost"
    fatal = True


class OrphanedLog(LedgerError):
    sentence = (
        "{path} is missing or empty, but {path}-wal holds commits, and a new database would destroy them: "
        "put the database file back beside it, or move the -wal file away"
    )
    fatal = True


class NotALedger(LedgerError):
    sentence = "{path} is not a Towpath ledger: {why}"
    fatal = True


class NewerSchema(LedgerError):
    sentence = (
        "{path} has schema {schema}, which needs at least version {min_schema}; "
        "this Towpath supports {known}: upgrade it"
    )
    fatal = True


class NotInstalled(LedgerError):
    sentence = "the package {package} cannot be loaded ({why}): pip install 'towpath[{extra}]'"
    fatal = True


class ReadOnly(LedgerError):
    sentence = "{path} cannot be written: check the permissions of the file and of its directory"
    fatal = True


class NetworkFileSystem(LedgerError):
    sentence = (
        "{path} is on {kind}, a network file system, where SQLite's locks lose data; "
        "use a local disk or PostgreSQL"
    )
    fatal = True


class WrongConnection(LedgerError):
    sentence = "{why}"


class Forked(LedgerError):
    sentence = "{path} was opened by process {opener}; a forked child must open its own"
    fatal = True


class NestedCall(LedgerError):
    sentence = (
        "{path}: a ledger call inside a commit function would wait for its own transaction; "
        "use current().spawn(...) for jobs that follow"
    )


class Damaged(LedgerError):
    sentence = "{path}: {why}; restore a backup"
    fatal = True


class StoreFailed(LedgerError):
    sentence = "{path}: the store failed: {error}"
