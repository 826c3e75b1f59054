"""Commands about many jobs: which ones (`Where`), and the loop over `more` that ends when nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from towpath import Ledger, Selector, State, commands
from towpath.cli.base import F, all_of, names
from towpath.cli.failures import OK, REFUSED, nothing
from towpath.cli.specs import tell
from towpath.cli.values import Moment
from towpath.errors import UnknownJob

STATES = click.Choice([state.value for state in State])


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The selectors a user gave. Nothing at all is a usage error: nobody means everything by saying nothing."""

    ids: tuple[str, ...] = ()
    queue: str | None = None
    part: str | None = None
    kind: str | None = None
    group: str | None = None
    key: str | None = None
    state: tuple[str, ...] = ()
    created_before: int | None = None
    finished_before: int | None = None
    everything: bool = False

    @property
    def by_id(self) -> bool:
        return bool(self.ids)

    def selector(self, states: Sequence[State] = ()) -> Selector:
        given = {name: getattr(self, name) for name in ("queue", "part", "kind", "group", "key")}
        given |= {"created_before": self.created_before, "finished_before": self.finished_before}
        chosen = tuple(State(state) for state in self.state) or tuple(states)
        if not self.ids and not self.everything and not self.state and all(value is None for value in given.values()):
            raise click.UsageError("Say which: ids, or --queue, --kind and the like, or --all.", click.get_current_context())
        if self.ids and (self.everything or any(value is not None for value in given.values())):
            raise click.UsageError("Either ids or selectors, not both.", click.get_current_context())
        return Selector(ids=self.ids, states=() if self.ids else chosen or tuple(State), **given)

    def words(self, which: str) -> str:
        """The selection in a sentence; `which` is the kind of jobs the command is about."""
        of = [f"{name} {getattr(self, name)}" for name in ("queue", "part", "kind", "group", "key") if getattr(self, name)]
        return f"every {' or '.join(self.state) or which} job" + (f" of {', '.join(of)}" if of else "")


def selectors(states: bool = True) -> Callable[[F], F]:
    """The options that fill a `Where`."""
    chosen = [
        click.option("--queue", help="Of this queue, or pattern with *."),
        click.option("--part", help="Of this part."),
        click.option("--kind", help="Of this kind (task name)."),
        click.option("--group", help="Of this group."),
        click.option("--key", help="With this key."),
        click.option("--created-before", type=Moment(past=True), help="Older than a time, or than a span such as 7d."),
        click.option("--finished-before", type=Moment(past=True), help="Finished before a time, or longer ago than a span."),
        click.option("--all", "everything", is_flag=True, help="All of them, whatever the queue."),
    ]
    if states:
        chosen.insert(5, click.option("--state", type=STATES, multiple=True, help="In this state; as often as you like."))
    return all_of(*chosen, click.option("--yes", "-y", is_flag=True, help="Do not ask."))


def must_exist(ledger: Ledger, ids: Sequence[str]) -> None:
    """Before anything is done: a mistyped id should not be half of a success."""
    unknown = [id for id in ids if ledger.get(id) is None]
    if len(unknown) == 1:
        raise UnknownJob(id=unknown[0])
    if unknown:
        raise nothing(f"There are no jobs {names(unknown)}; nothing was done.", "`towpath jobs list` shows what is there.")


def queue_must_exist(ledger: Ledger, queue: str | None) -> None:
    if queue is None or "*" in queue:
        return
    known = ledger.queues()
    if queue not in known:
        raise nothing(f"There is no queue {queue}.", f"Queues: {names(sorted(known))}")


def revive(ledger: Ledger, where: Selector) -> tuple[dict[str, Any], int]:
    """Bring back all that match. What is refused would match again and again, so it ends when nothing more comes back."""
    revived, refused = 0, dict[str, str]()
    while True:
        answer = tell(ledger, commands.Revive(where=where))
        assert isinstance(answer, commands.Revived)
        revived += answer.revived
        refused.update(answer.refused)
        if not answer.more or not answer.revived:
            break
    data = {"revived": revived, "refused": [{"id": id, "why": why} for id, why in refused.items()], "more": answer.more}
    return data, REFUSED if refused or answer.more else OK


def cancel(ledger: Ledger, where: Selector) -> dict[str, Any]:
    canceled = requested = 0
    while True:
        answer = tell(ledger, commands.Cancel(where=where))
        assert isinstance(answer, commands.Canceled)
        canceled, requested = canceled + answer.canceled, requested + answer.requested
        if not answer.more or not (answer.canceled or answer.requested):
            return {"canceled": canceled, "requested": requested}


def purge(ledger: Ledger, where: Selector) -> dict[str, Any]:
    purged = 0
    while True:
        answer = tell(ledger, commands.Purge(where=where))
        assert isinstance(answer, commands.Purged)
        purged += answer.purged
        if not answer.more or not answer.purged:
            return {"purged": purged}


def told_revived(data: dict[str, Any]) -> list[str]:
    lines = [f"{data['revived']} came back"] + [f"refused: {each['id']}: {each['why']}" for each in data["refused"][:20]]
    if len(data["refused"]) > 20:
        lines.append(f"and {len(data['refused']) - 20} more were refused; --json lists them")
    return lines
