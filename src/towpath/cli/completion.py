"""`completion`: the script for a shell, and the values that it proposes: queues, kinds, groups, plans, ids of
jobs.

The script calls `towpath` with `_TOWPATH_COMPLETE` in the environment at every press of the tab key, so this
reads little, opens no missing ledger, and proposes nothing if anything fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import click
from click.shell_completion import CompletionItem, get_completion_class

from towpath import Ledger
from towpath.cli.base import COMPLETE_VARIABLE, OK, REFUSED, Session, command, pass_session, root
from towpath.cli.output import print_json
from towpath.commands import GroupQuery, Job, Query
from towpath.escapes import escape

MAX_PROPOSED = 50
RECENT_JOBS = 200
"""Jobs that are read for their kinds and ids, the newest first."""
SHELLS = {
    "bash": 'eval "$(towpath completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(towpath completion zsh)" in ~/.zshrc, after compinit',
    "fish": "towpath completion fish > ~/.config/fish/completions/towpath.fish",
}


@command("completion")
@click.argument("shell", type=click.Choice(list(SHELLS)))
@pass_session
def completion(session: Session, /, shell: str) -> int:
    """Print the completion script of a shell.

    \b
    bash: eval "$(towpath completion bash)" in ~/.bashrc (bash 4.4 or newer)
    zsh:  eval "$(towpath completion zsh)" in ~/.zshrc, after compinit
    fish: towpath completion fish > ~/.config/fish/completions/towpath.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    made = found(root, {}, "towpath", COMPLETE_VARIABLE)
    # `source()` of click would start bash to read its version.
    script = made.source_template % made.source_vars()
    if session.json:
        print_json({"shell": shell, "script": script, "install": SHELLS[shell]})
    else:
        click.echo(script)
    return OK


def complete(instruction: str) -> int:
    """Answer the script of the shell. Called by `main`."""
    shell, _, what = instruction.partition("_")
    found = get_completion_class(shell)
    if found is None or what != "complete":
        return REFUSED
    click.echo(found(root, {}, "towpath", COMPLETE_VARIABLE).complete())
    return OK


def proposed(ctx: click.Context, name: str, incomplete: str) -> list[CompletionItem[str]]:
    """Values for the parameter of this name."""
    if name == "id" and ctx.parent is not None and ctx.parent.info_name == "groups":
        name = "group"
    try:
        with ctx.ensure_object(Session).ledger() as ledger:
            found = PROPOSALS[name](ledger, incomplete)
            values = {value: about for value, about in found if value.startswith(incomplete)}
    except Exception:
        # No ledger, a damaged one, wrong settings: the shell has no place for an error.
        return []
    items = sorted(values.items()) if name == "queue" else list(values.items())
    return [
        CompletionItem(value, help=about or None)
        for value, about in items[:MAX_PROPOSED]
        if value == escape(value)
    ]


def _queues(ledger: Ledger, incomplete: str) -> Iterable[tuple[str, str]]:
    return ((name, "") for name in ledger.queues())


def _kinds(ledger: Ledger, incomplete: str) -> Iterable[tuple[str, str]]:
    return ((job.kind, "") for job in _recent(ledger) if job.kind)


def _jobs(ledger: Ledger, incomplete: str) -> Iterable[tuple[str, str]]:
    for job in _recent(ledger):
        about = escape(f"{job.kind or job.queue} {job.state}")
        yield job.short_id, about
        if incomplete:
            yield job.id, about


def _groups(ledger: Ledger, incomplete: str) -> Iterable[tuple[str, str]]:
    query = GroupQuery(prefix=incomplete, descending=True, limit=MAX_PROPOSED)
    return ((group.id, str(group.state)) for group in ledger.groups(query).groups)


def _plans(ledger: Ledger, incomplete: str) -> Iterable[tuple[str, str]]:
    query = GroupQuery(prefix=f"plan/{incomplete}", descending=True, limit=MAX_PROPOSED)
    found = [(group.id.removeprefix("plan/"), str(group.state)) for group in ledger.groups(query).groups]
    return ((id, state) for id, state in found if "/" not in id)


def _recent(ledger: Ledger) -> Iterable[Job]:
    return ledger.find(Query(limit=RECENT_JOBS, bodies=False)).jobs


PROPOSALS: Mapping[str, Callable[[Ledger, str], Iterable[tuple[str, str]]]] = {
    "queue": _queues,
    "kind": _kinds,
    "group": _groups,
    "plan": _plans,
    "id": _jobs,
    "ids": _jobs,
    "after": _jobs,
}
