"""Random histories: the same commands are applied to two ledgers, and the results are compared.

    python -m towpath.testing.histories --seeds 1-200 --steps 300 --left model --right sqlite

Every step applies one batch of random commands to both ledgers and compares the answers; every few steps the
whole states are compared. A failure has its seed and the shortened history."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from towpath.core.commands import Command
from towpath.ledger import Ledger
from towpath.testing.clock import START
from towpath.testing.moves import Moves
from towpath.testing.pair import Factory, Mismatch, Pair

EVERY = 5
"""Steps between two comparisons of the whole state."""


class Turn(msgspec.Struct, frozen=True):
    now: int
    batch: tuple[Command, ...]


def play(seed: int, steps: int, left: Factory, right: Factory, every: int = EVERY) -> list[Turn]:
    """Play the history of `seed`; raises `Mismatch` with the shortest history that still shows the
    difference."""
    turns: list[Turn] = []
    try:
        _play(seed, steps, left, right, every, turns)
    except Mismatch as found:
        short = shorten(turns, left, right)
        history_text = "\n".join(
            f"{turn.now - START:>16,} µs  {_terse(command)}" for turn in short for command in turn.batch
        )
        message = replay(short, left, right) or found
        raise Mismatch(
            f"seed {seed}, step {len(turns)}: {message}\n\nThe history, shortened:\n{history_text}"
        ) from found
    return turns


def _play(seed: int, steps: int, left: Factory, right: Factory, every: int, turns: list[Turn]) -> None:
    moves = Moves(random.Random(seed))
    now = START
    with _pair(left, right) as pair:
        for step in range(1, steps + 1):
            now += moves.step()
            repeat = turns and moves.chance.random() < 0.06
            batch = turns[-1].batch if repeat else tuple(moves.batch())
            turns.append(Turn(now, batch))
            moves.observe(pair.apply(batch, now))
            if step % every == 0 or step == steps:
                pair.compare(now)


def replay(turns: Sequence[Turn], left: Factory, right: Factory) -> Mismatch | None:
    """Play a recorded history; return the difference at its end, if any."""
    try:
        with _pair(left, right) as pair:
            for turn in turns:
                pair.apply(turn.batch, turn.now)
                pair.compare(turn.now)
    except Mismatch as found:
        return found
    return None


def shorten(turns: Sequence[Turn], left: Factory, right: Factory) -> list[Turn]:
    """Remove turns and commands that the difference does not need: first runs of turns, then single
    commands."""
    kept = list(turns)
    size = max(1, len(kept) // 2)
    while size:
        at = 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            if fewer and replay(fewer, left, right) is not None:
                kept = fewer
            else:
                at += size
        size //= 2
    for at, turn in enumerate(kept):
        for command in turn.batch:
            batch = tuple(each for each in kept[at].batch if each is not command)
            fewer = [*kept[:at], Turn(turn.now, batch), *kept[at + 1 :]]
            if batch and replay(fewer, left, right) is not None:
                kept = fewer
    return kept


@contextmanager
def _pair(left: Factory, right: Factory) -> Iterator[Pair]:
    pair = Pair(left(), right())
    try:
        yield pair
    finally:
        pair.close()


def _terse(command: object) -> str:
    """A command without the fields that have their defaults."""
    if isinstance(command, msgspec.Struct):
        fields = [(field, getattr(command, field)) for field in command.__struct_fields__]
        defaults = dict(
            zip(reversed(command.__struct_fields__), reversed(command.__struct_defaults__), strict=False),
        )
        shown = [
            f"{field}={_terse(value)}"
            for field, value in fields
            if field not in defaults or value != defaults[field]
        ]
        return f"{type(command).__name__}({', '.join(shown)})"
    if isinstance(command, tuple):
        return f"({', '.join(_terse(each) for each in command)}{',' * (len(command) == 1)})"
    if isinstance(command, dict):
        return "{" + ", ".join(f"{key!r}: {_terse(value)}" for key, value in command.items()) + "}"
    return repr(command)


def factory(kind: str, folder: Path) -> Factory:
    """A function that returns an empty ledger: model, memory, sqlite, or postgresql://... (one ledger,
    emptied each time)."""
    count = iter(range(sys.maxsize))

    def memory() -> Ledger:
        from towpath.ledger.memory.ledger import MemoryLedger

        return MemoryLedger()

    def model() -> Ledger:
        from towpath.ledger.model_ledger import ModelLedger

        return ModelLedger()

    def sqlite() -> Ledger:
        from towpath.ledger.sqlite.ledger import SqliteLedger

        return SqliteLedger(folder / f"{kind}-{next(count)}.db")

    def postgres() -> Ledger:
        from towpath.ledger.postgres.ledger import PostgresLedger
        from towpath.testing.postgres import empty

        PostgresLedger(kind).close()
        empty(kind)
        return PostgresLedger(kind)

    if kind.startswith("postgresql://"):
        return postgres
    return {"model": model, "memory": memory, "sqlite": sqlite}[kind]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m towpath.testing.histories", description="Compare two ledgers."
    )
    parser.add_argument("--seeds", default="1-100", help="one seed, or first-last")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--every", type=int, default=EVERY, help="steps between two comparisons of the whole state"
    )
    parser.add_argument(
        "--left",
        default="model",
        help="model, memory, sqlite, or postgresql://... of a database that may be emptied",
    )
    parser.add_argument("--right", default="sqlite")
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first difference")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition("-")
    failed = 0
    for seed in range(int(first), int(last or first) + 1):
        with tempfile.TemporaryDirectory(prefix="towpath-") as folder:
            left, right = (factory(kind, Path(folder)) for kind in (options.left, options.right))
            try:
                play(seed, options.steps, left, right, options.every)
            except Mismatch as found:
                print(found, end="\n\n")
                failed += 1
                if not options.go_on:
                    break
    print(
        f"{failed} of the seeds {options.seeds} failed" if failed else f"seeds {options.seeds}: no difference"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
