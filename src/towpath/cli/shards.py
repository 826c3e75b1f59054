"""`shards`: tables that are split over several PostgreSQL servers. See docs/shards.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

from towpath.cli.base import (
    NOT_FOUND,
    OK,
    REFUSED,
    CliGroup,
    Failure,
    Session,
    bad_input,
    combine,
    confirm,
    pass_session,
    print_stderr,
)
from towpath.cli.output import print_result, table
from towpath.cli.shard_runs import execute
from towpath.cli.targets import existing_url, usable_url
from towpath.errors import NotInstalled

if TYPE_CHECKING:
    from towpath.app import App
    from towpath.apps.shards.service import Shards, Submission

run_options = combine(
    click.option("--submit", is_flag=True, help="Leave the steps to agents: `towpath shards agent`."),
    click.option("--dry-run", is_flag=True, help="Print the plans and change nothing."),
)
tables_option = click.option("--table", "tables", multiple=True, help="Only this table. Repeatable.")


@click.group("shards", cls=CliGroup)
def shards() -> None:
    """Split tables over several PostgreSQL servers. The servers are the nodes of the settings: [nodes.NAME]
    with address = "host=... dbname=..."."""


@contextmanager
def _open(session: Session, *, make: bool = False) -> Iterator[Shards]:
    """Open the app of the ledger, with the nodes of the settings."""
    from towpath.app import App

    try:
        from towpath.apps.shards.catalogue import UnknownTable
        from towpath.apps.shards.preflight import NotReady
        from towpath.apps.shards.service import Shards
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise NotInstalled(package="psycopg", why=str(error), extra="postgres") from None

    url = usable_url(session.url) if make else existing_url(session.url)
    with App(url) as app:
        try:
            yield Shards(app, _nodes(app))
        except UnknownTable as error:
            raise Failure(str(error), NOT_FOUND, "`towpath shards status` lists the tables.") from error
        except NotReady as error:
            message = "\n".join(["The servers are not ready; nothing was changed.", *error.reasons])
            step = "`towpath shards nodes` shows all servers."
            raise Failure(message, REFUSED, step, {"reasons": list(error.reasons)}) from error


def _nodes(app: App) -> Any:
    """The nodes of the settings. A password is read when a connection is opened."""
    from towpath.apps.shards.nodes import Nodes, is_database
    from towpath.operations.actions.common import Credentials

    found = app.settings.nodes
    addresses = {
        name: node.address for name, node in found.items() if node.address and is_database(node.address)
    }
    if not addresses:
        raise bad_input(
            "The settings have no nodes with an address of PostgreSQL.",
            'Add them to towpath.toml: [nodes.n1] address = "host=db1 dbname=shop user=shop". See'
            " docs/shards.md.",
        )
    return Nodes(addresses, lambda node: Credentials.of(found[node]).password)


# Read


@shards.command("status")
@click.argument("name", required=False, metavar="[TABLE]")
@pass_session
def show_status(session: Session, /, name: str | None) -> int:
    """Show the shards of TABLE, or of all tables. Each copy has a node, a role, estimated rows, a size and
    its health. The exit code is 1 if a shard is broken."""
    with _open(session) as opened:
        found = opened.status(name)
    columns = ("table", "shard", "node", "role", "state", "rows", "size", "rf_status", "pending")
    rows = [[_shown(getattr(each, column), column) for column in columns] for each in found]
    text = "There are no sharded tables. `towpath shards create` makes one."
    print_result(
        session.json,
        {"copies": [msgspec.structs.asdict(each) for each in found]},
        lambda: table(columns, rows, ("shard", "rows", "size")) if rows else text,
    )
    return REFUSED if any(each.rf_status == "broken" for each in found) else OK


@shards.command("nodes")
@pass_session
def show_nodes(session: Session, /) -> int:
    """Show the servers of the settings. Versions, limits, and all reasons why one cannot hold shards; the
    exit code is 1 if there is a reason."""
    with _open(session, make=True) as opened:
        found = opened.node_status()
    columns = ("node", "reachable", "version", "wal_level", "free_slots", "fdw", "reasons")
    rows = [
        [
            each.node,
            "yes" if each.reachable else "no",
            each.version,
            each.wal_level,
            "-" if each.free_slots is None else each.free_slots,
            each.fdw,
            "; ".join(each.reasons),
        ]
        for each in found
    ]
    print_result(
        session.json,
        {"nodes": [msgspec.structs.asdict(each) for each in found]},
        lambda: table(columns, rows, ("free_slots",)),
    )
    return REFUSED if any(each.reasons for each in found) else OK


@shards.command("check")
@pass_session
def check(session: Session, /) -> int:
    """Compare the servers with the catalogue. Finds missing and wrong tables, routes, publications, slots and
    subscriptions, and orphans. The exit code is 1 if there is a difference."""
    with _open(session) as opened:
        found = opened.check()
    print_result(session.json, {"differences": found}, found or "The servers match the catalogue.")
    return REFUSED if found else OK


def _shown(value: object, column: str) -> object:
    if value is None:
        return "-"
    if column == "size" and isinstance(value, int):
        return f"{value / 1e6:.1f} MB"
    return value


# Change


@shards.command("create")
@click.argument("name", metavar="TABLE")
@click.option("--columns", required=True, metavar="SQL", help='Such as "id bigint, name text NOT NULL".')
@click.option("--key", required=True, metavar="COLUMNS", help="The columns that decide the shard: a,b.")
@click.option("--shards", "count", default=8, show_default=True, help="Number of shards.")
@click.option("--rf", default=1, show_default=True, help="Copies of each shard, on different nodes.")
@click.option("--node", "nodes", multiple=True, help="Only this node. Repeatable. Default: all.")
@click.option("--schema", default="public", show_default=True, help="Schema of the logical table.")
@run_options
@pass_session
def create(session: Session, /, name: str, submit: bool, dry_run: bool, **options: Any) -> int:
    """Create TABLE on all nodes."""
    from towpath.apps.shards.service import NewTable

    new = NewTable(
        name,
        options["columns"],
        tuple(each.strip() for each in options["key"].split(",")),
        options["count"],
        options["rf"],
        options["nodes"],
        options["schema"],
    )
    return _change(session, submit, dry_run, lambda opened: opened.create(new))


@shards.command("drop")
@click.argument("name", metavar="TABLE")
@click.option("--yes", is_flag=True, help="Do not ask.")
@run_options
@pass_session
def drop(session: Session, /, name: str, yes: bool, submit: bool, dry_run: bool) -> int:
    """Drop TABLE and all of its rows on every node."""
    if not dry_run:
        confirm(f"Drop table {name} and all of its rows?", yes)
    return _change(session, submit, dry_run, lambda opened: opened.drop(name))


@shards.command("move")
@click.argument("name", metavar="TABLE")
@click.argument("shard", type=int)
@click.argument("target", metavar="NODE")
@click.option("--from", "source", metavar="NODE", help="The node of the copy. Default: the primary.")
@run_options
@pass_session
def move(
    session: Session, /, name: str, shard: int, target: str, source: str | None, submit: bool, dry_run: bool
) -> int:
    """Move SHARD of TABLE to NODE while the table is in use."""
    return _change(session, submit, dry_run, lambda opened: opened.move(name, shard, target, source))


@shards.command("add-node")
@click.argument("node")
@tables_option
@run_options
@pass_session
def add_node(session: Session, /, node: str, tables: tuple[str, ...], submit: bool, dry_run: bool) -> int:
    """Give NODE its part of the shards."""
    return _change(session, submit, dry_run, lambda opened: opened.add_node(node, tables))


@shards.command("remove-node")
@click.argument("node")
@tables_option
@run_options
@pass_session
def remove_node(session: Session, /, node: str, tables: tuple[str, ...], submit: bool, dry_run: bool) -> int:
    """Move all shards away from a running NODE. Then drops the tables there."""
    return _change(session, submit, dry_run, lambda opened: opened.remove_node(node, tables))


@shards.command("rebalance")
@tables_option
@run_options
@pass_session
def rebalance(session: Session, /, tables: tuple[str, ...], submit: bool, dry_run: bool) -> int:
    """Even out the number of copies on the nodes. Adds missing copies, too."""
    return _change(session, submit, dry_run, lambda opened: opened.rebalance(tables))


@shards.command("promote")
@click.argument("lost", metavar="LOST_NODE")
@tables_option
@run_options
@pass_session
def promote(session: Session, /, lost: str, tables: tuple[str, ...], submit: bool, dry_run: bool) -> int:
    """Make replicas of LOST_NODE primaries. The node must not answer any more. Writes that had not reached a
    replica are lost."""
    return _change(session, submit, dry_run, lambda opened: opened.promote(lost, tables))


@shards.command("fence")
@click.argument("node")
@tables_option
@pass_session
def fence(session: Session, /, node: str, tables: tuple[str, ...]) -> int:
    """Close the old tables of a replaced NODE that is back. The logical tables are renamed, so that clients
    do not use them by mistake; their rows can still be read."""
    with _open(session) as opened:
        found = opened.fence(node, tables)
    lines = [f"{name}: shards {', '.join(map(str, held)) or 'none'}" for name, held in found.items()]
    print_result(session.json, {"tables": found}, lines or "Nothing to do.")
    return OK


@shards.command("discard")
@click.argument("node")
@tables_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def discard(session: Session, /, node: str, tables: tuple[str, ...], yes: bool) -> int:
    """Drop the old tables of a replaced NODE that is back. Then `add-node` can add the node again."""
    confirm(f"Drop the old tables on node {node}?", yes)
    with _open(session) as opened:
        found = opened.discard(node, tables)
    print_result(session.json, {"tables": found}, [f"{name}: dropped" for name in found] or "Nothing to do.")
    return OK


@shards.command("agent")
@click.option("--node", "nodes", multiple=True, help="Run the steps of this node only. Repeatable.")
@pass_session
def agent(session: Session, /, nodes: tuple[str, ...]) -> int:
    """Run the steps of submitted plans. Runs until interrupted, and also continues the plans of commands that
    were killed."""
    with _open(session, make=True) as opened:
        unknown = [node for node in nodes if node not in opened.nodes]
        if unknown:
            raise bad_input(
                f"There is no node {unknown[0]} in the settings.", f"Nodes: {', '.join(opened.nodes)}"
            )
        queues = tuple(f"node/{node}" for node in nodes or opened.nodes)
        print_stderr([f"Running the steps of {', '.join(nodes or opened.nodes)}. Ctrl-C ends the agent."])
        opened.app.run(queues=queues, announce=lambda startup: None)
    return OK


def _change(session: Session, submit: bool, dry_run: bool, plan: Callable[[Shards], list[Submission]]) -> int:
    """Make the plans, then print, submit or run them."""
    with _open(session, make=True) as opened:
        work = plan(opened)
        if not work:
            print_result(session.json, {"plans": []}, "Nothing to do.")
            return OK
        if dry_run:
            data = {"plans": [{"id": each.id, "plan": msgspec.Raw(each.plan.to_json())} for each in work]}
            print_result(session.json, data, [line for each in work for line in str(each.plan).split("\n")])
            return OK
        if submit and len(work) == 1:
            opened.app.plans.submit(work[0].plan, id=work[0].id)
            print_result(
                session.json, {"plans": [{"id": work[0].id, "state": "running"}]}, _submitted(work[0].id)
            )
            return OK
        return execute(session, opened, work, agents=submit)


def _submitted(id: str) -> str:
    return f"Submitted plan {id}. Agents run it: `towpath shards agent`."
