"""Kills, freezes, power cuts, full disks and damage on SQLite and PostgreSQL, each audited: `make chaos`.

    python -m tests.chaos [--seconds 8] [--seed 1] [--runs 1] [--backend sqlite] [--only kill,freeze]
        [--plant]

One row for each experiment: events (what was done), jobs (acknowledged), lost, doubled, rerun (allowed),
unexplained. The exit code is 1 if anything was lost, doubled or unexplained; see `tests.chaos.audit` for what
the words mean. `--plant` adds a loss that must be found."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.chaos import experiments, power, workloads
from tests.chaos.audit import Findings
from tests.chaos.stores import NotPermitted, SqliteStore, postgres_store, sqlite_store

Experiment = Callable[[int, float], Findings]
"""Takes a seed and seconds."""
COLUMNS = ("backend", "experiment", "events", "jobs", "lost", "doubled", "rerun", "unexplained", "seconds")
WIDTHS = (9, 12, 7, 7, 6, 8, 6, 12, 8)


def _on_sqlite(run: Callable[[SqliteStore, int, float], Findings]) -> Experiment:
    def experiment(seed: int, seconds: float) -> Findings:
        with sqlite_store() as store:
            return run(store, seed, seconds)

    return experiment


def _on_postgres(run: Callable[..., Findings]) -> Experiment:
    def experiment(seed: int, seconds: float) -> Findings:
        with postgres_store() as store:
            return run(store, seed, seconds)

    return experiment


def _full_disk(seed: int, seconds: float) -> Findings:
    with tempfile.TemporaryDirectory(prefix="towpath-chaos-") as folder:
        return experiments.full_disk_sqlite(seed, seconds, Path(folder))


EXPERIMENTS: dict[tuple[str, str], Experiment] = {
    ("sqlite", "kill"): _on_sqlite(experiments.kills),
    ("sqlite", "freeze"): _on_sqlite(experiments.freezes),
    ("sqlite", "power cut"): lambda seed, seconds: power.power_cuts(seed, round(5 * seconds)),
    ("sqlite", "checkpoint"): lambda seed, seconds: power.power_cuts(seed, round(seconds), big=True),
    ("sqlite", "full disk"): _full_disk,
    ("sqlite", "damage"): lambda seed, seconds: power.damage(seed, round(8 * seconds)),
    ("sqlite", "poison"): _on_sqlite(workloads.poison),
    ("sqlite", "recovery"): _on_sqlite(workloads.recovery),
    ("sqlite", "log size"): _on_sqlite(workloads.log_size),
    ("postgres", "kill"): _on_postgres(experiments.kills),
    ("postgres", "freeze"): _on_postgres(experiments.freezes),
    ("postgres", "power cut"): _on_postgres(experiments.outages),
    ("postgres", "full disk"): experiments.full_disk_postgres,
    ("postgres", "damage"): lambda seed, seconds: experiments.damage_postgres(
        seed, max(2, round(seconds / 2))
    ),
    ("postgres", "poison"): _on_postgres(workloads.poison),
    ("postgres", "recovery"): _on_postgres(workloads.recovery),
}


def wanted(backends: Sequence[str], only: Sequence[str]) -> Iterator[tuple[str, str]]:
    for backend, name in EXPERIMENTS:
        if backend in backends and (not only or name in only):
            yield backend, name


def performed(experiment: Experiment, seed: int, seconds: float) -> Findings:
    try:
        return experiment(seed, seconds)
    except NotPermitted as error:
        return Findings(skipped=str(error))


def row(values: Sequence[object]) -> str:
    return " ".join(
        f"{value!s:<{width}}" if n < 2 else f"{value:>{width}}"
        for n, (value, width) in enumerate(zip(values, WIDTHS, strict=True))
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Break things on purpose, and count what is lost."
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="duration of the disturbance in each experiment"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the first run; random if left out")
    parser.add_argument("--runs", type=int, default=1, help="how often, each with another seed")
    parser.add_argument("--backend", action="append", choices=["sqlite", "postgres"], help="only this one")
    parser.add_argument("--only", default="", help="names of experiments, with commas")
    parser.add_argument("--plant", action="store_true", help="plant a loss, which must be found")
    given = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(2)) if given.seed is None else given.seed
    only = [name.strip() for name in given.only.split(",") if name.strip()]
    clean, notes = True, []
    print(f"seed {seed}", row(COLUMNS), sep="\n", flush=True)
    for number in range(seed, seed + given.runs):
        for backend, name in wanted(given.backend or ["sqlite", "postgres"], only):
            began = time.monotonic()
            found = performed(EXPERIMENTS[backend, name], number, given.seconds)
            if given.plant:
                found.add_lost("planted")
            numbers = (found.events, found.jobs, found.lost, found.doubled, found.rerun, found.unexplained)
            print(row((backend, name, *numbers, f"{time.monotonic() - began:.1f}")), flush=True)
            clean = clean and found.clean
            notes += [f"{backend} {name}: not run: {found.skipped}"] if found.skipped else []
            notes += [f"{backend} {name} (seed {number}): {note}" for note in found.notes[:10]]
    print(*notes, sep="\n")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
