"""The fault matrix of a shard move: every statement x every fault. `make shards-matrix` runs all cases and
writes docs/shards-fault-matrix.md; `python -m tests.shards.matrix --help` has the options.

Each case is a move of one shard with one fault, while writers insert through all nodes. It passes if the plan
ends `done` or `rolled_back` (a parked plan is retried), the audit finds nothing, every confirmed row is there
once, and at no time a shard was without a copy."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.support.pg_proxy import Fault
from tests.support.shard_rig import Case, Outcome, Rig, rigged
from tests.support.shards import SETTINGS, Fleet
from towpath.ledger import open_ledger
from towpath.testing.postgres import Server, place

FAULTS = (Fault.WORKER, Fault.SERVER, Fault.HANG, Fault.CANCEL, Fault.LOST, Fault.ABORT)
NODES = ("n1", "n2", "n3")
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "shards-fault-matrix.md"
_HEAD = """# Fault matrix of a shard move

Each row is a statement that a move of a shard (one copy, three nodes) sends to a node; `n` is its
occurrence. Each column is a fault at this statement. The cell is the state in which the plan
ended:

- `done`: the shard has moved. `back`: the plan was rolled back, the shard is where it was.
- `parked, done`: the plan waited for a person, and `retry` completed it.
- `-`: the statement was not sent in this case. It belongs to a wait that was over already.
- **FAIL**: anything else. An empty cell: the case was not run.

Of statements that are repeated while the move waits, and of settings of a session (`set_config`),
only the first on each node is a row.

In every case that is not FAIL, the audit found no orphan table, publication, slot or
subscription, every row that was confirmed to one of three writers was there exactly once, and a
monitor that read all nodes every 0.1 s always found a whole copy of the shard.

| fault | meaning |
|---|---|
| worker killed | the statement is executed, then the worker process is killed by SIGKILL and started again |
| server killed | the server gets SIGKILL before the statement, and is started again |
| connection hangs | the statement is not passed on and never answered; the connection stays open |
| statement cancelled | the statement fails with `query_canceled` |
| reply lost | the statement is executed, and the connection ends before its reply |
| plan aborted | an operator aborts the plan at this statement |
"""


@contextlib.contextmanager
def fresh(servers: dict[str, Server], folder: Path) -> Iterator[Rig]:
    """A rig with databases and a ledger of its own, and a writer on each node."""
    urls = {node: server.create_database() for node, server in servers.items()}
    url = f"sqlite:///{tempfile.mkdtemp(dir=folder)}/ledger.db"
    with contextlib.closing(open_ledger(url)) as ledger:
        fleet = Fleet(urls, ledger, url)
        with rigged(fleet, servers, url) as rig:
            for node in urls:
                rig.start_writer(node, pause=0.1)
            yield rig
        fleet.clear()
    for node, server in servers.items():
        server.drop_database(urls[node])


def cases_of(rig: Rig) -> list[Case]:
    """All statements of a move: of the second one, since the first finds no former objects."""
    rig.recorded()
    return rig.recorded()


def run(servers: dict[str, Server], folder: Path, part: tuple[int, int], output: Path) -> None:
    """Run the cases of one part; append each outcome to the file as a line of JSON."""
    with fresh(servers, folder) as rig:
        cases = sorted(cases_of(rig), key=is_read)
    todo = [
        (case, fault) for number, case in enumerate(cases) if number % part[1] == part[0] for fault in FAULTS
    ]
    known = _read([output])
    todo = [each for each in todo if each not in known]
    while todo:
        with fresh(servers, folder) as rig:
            rig.recorded()
            while todo:
                case, fault = todo.pop(0)
                outcome = rig.move(case, fault)
                with output.open("a", encoding="utf-8") as lines:
                    lines.write(
                        json.dumps({"case": asdict(case), "fault": fault, "outcome": asdict(outcome)})
                    )
                    lines.write("\n")
                print(
                    f"{len(todo)} left: {cell(outcome)} {fault} at {case.role} {case.text[:80]}", flush=True
                )
                if outcome.wrong:
                    print("   ", outcome.wrong, flush=True)
                    break


def is_read(case: Case) -> bool:
    """Statements that change something come first."""
    return case.text.startswith("SELECT") and not any(
        part in case.text for part in ("pg_create_", "pg_drop_", "pg_logical_emit", "pg_terminate")
    )


def cell(outcome: Outcome) -> str:
    if outcome.wrong:
        return "**FAIL**"
    if not outcome.applied:
        return "-"
    return ", ".join(
        {"rolled_back": "back", "rollback_failed": "rollback failed"}.get(s, s) for s in outcome.states
    )


def _read(files: Sequence[Path]) -> dict[tuple[Case, Fault], Outcome]:
    found = {}
    for file in files:
        for line in file.read_text("utf-8").splitlines() if file.exists() else ():
            read = json.loads(line)
            read["case"]["text"] = re.sub(r"df -Pk [^']*", "df -Pk ...", read["case"]["text"])
            found[Case(**read["case"]), Fault(read["fault"])] = Outcome(**read["outcome"])
    return found


def document(files: Sequence[Path], note: str = "") -> str:
    """The matrix as Markdown, from the lines of all parts. `note` is printed above the tables."""
    found = _read(files)
    cases = sorted({case for case, _ in found}, key=lambda case: (case.role, case.text, case.nth))
    failed = sum(bool(outcome.wrong) for outcome in found.values())
    lines = [_HEAD, f"{len(found)} cases, {failed} failed.", ""]
    lines += [textwrap.fill(note, 98), ""] if note else []
    for role in ("source", "target", "other"):
        lines += [f"## Statements on the {role}", ""]
        lines += ["| statement | n | " + " | ".join(FAULTS) + " |", "|---" * (len(FAULTS) + 2) + "|"]
        for case in cases:
            if case.role == role:
                cells = [cell(found[case, fault]) if (case, fault) in found else "" for fault in FAULTS]
                lines.append(f"| `{_shown(case.text)}` | {case.nth + 1} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _shown(text: str, width: int = 70) -> str:
    text = text.replace("|", "\\|").replace("pg_catalog.", "").replace('"', "")
    return text if len(text) <= width else text[: width - 3] + "..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="0/1", help="run every nth statement: 0/2 and 1/2 are two halves")
    parser.add_argument("--results", type=Path, nargs="+", default=[Path("shards-matrix.jsonl")])
    parser.add_argument("--write", action="store_true", help="only write the document from the results")
    parser.add_argument("--note", default="", help="a sentence about the runs, printed above the tables")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers
    if not given.write:
        number, _, of = given.part.partition("/")
        begun = time.monotonic()
        with place() as folder, contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as threads:
            folders = [folder / node for node in NODES]
            started = list(threads.map(lambda each: Server.start(each, settings=SETTINGS), folders))
            for server in started:
                stack.enter_context(server)
            run(dict(zip(NODES, started, strict=True)), folder, (int(number), int(of)), given.results[0])
        print(f"{time.monotonic() - begun:.0f} s")
    if given.write or given.part == "0/1":
        DOCUMENT.write_text(document(given.results, given.note), "utf-8")
        print(f"written: {DOCUMENT}")


if __name__ == "__main__":
    main()
