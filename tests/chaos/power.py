"""Power cuts and damage on SQLite.

A power cut keeps what was synced; of the writes since the last sync of a file the disk may have kept any,
some only in part. A virtual file system records every write, truncation and sync while a history is played
(`tests.support.sqlite_workload`), and the files are rebuilt as a cut at any moment may leave them."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import msgspec

from tests.chaos.audit import Findings
from tests.support.sqlite_recovery import prove
from tests.support.sqlite_workload import script
from towpath.core.commands import Append, Appended
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing import ManualClock

SECTOR = 512
"""Bytes that a disk writes whole or not at all."""


class Step(msgspec.Struct, frozen=True):
    """A write, truncation or sync of a file, or the acknowledgement of a batch (`at` is its number)."""

    what: str
    file: str = ""
    at: int = 0
    data: bytes = b""


class RecordedFile(apsw.VFSFile):
    def __init__(self, name: str | apsw.URIFilename | None, flags: list[int], steps: list[Step]) -> None:
        super().__init__("", name, flags)
        self._name = Path(name.filename() if isinstance(name, apsw.URIFilename) else str(name)).name
        self._steps = steps

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        self._steps.append(Step("write", self._name, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:  # noqa: N802
        self._steps.append(Step("truncate", self._name, size))
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:  # noqa: N802
        super().xSync(flags)
        self._steps.append(Step("sync", self._name))


class RecordingVfs(apsw.VFS):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__("recording", "")
        self._steps = steps

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return RecordedFile(name, flags, self._steps)

    def xDelete(self, name: str, sync: bool) -> None:  # noqa: N802
        super().xDelete(name, sync)
        self._steps.append(Step("delete", Path(name).name))


def recorded(big: bool) -> list[Step]:
    """The writes of a ledger while the history is played, with the acknowledgements in between."""
    steps: list[Step] = []
    with tempfile.TemporaryDirectory(prefix="towpath-chaos-") as folder:
        vfs = RecordingVfs(steps)
        ledger = SqliteLedger(Path(folder) / "a.db", SqliteOptions(vfs="recording"), ManualClock())
        for number, (commands, now) in enumerate(script(big).batches, 1):
            ledger.apply(commands, now)
            steps.append(Step("ack", at=number))
        ledger.close()
        vfs.unregister()
    return steps


def after_cut(steps: list[Step], cut: int, dice: random.Random, lies: bool = False) -> dict[str, bytearray]:
    """The files as a power cut after `cut` steps may leave them. `lies`: the disk ignores syncs."""
    files: dict[str, bytearray] = {}
    pending: dict[str, list[Step]] = {}
    for step in steps[:cut]:
        if step.what == "sync" and not lies:
            for each in pending.pop(step.file, []):
                _apply(files.setdefault(step.file, bytearray()), each)
        elif step.what == "delete":
            files.pop(step.file, None)
            pending.pop(step.file, None)
        elif step.what in ("write", "truncate"):
            pending.setdefault(step.file, []).append(step)
    chance = dice.random()
    for file, unsynced in pending.items():
        for step in unsynced:
            if dice.random() < chance:
                _apply(files.setdefault(file, bytearray()), _torn(step, dice))
    return files


def _torn(step: Step, dice: random.Random) -> Step:
    """The same step, of a write sometimes only the first or the last sectors."""
    if step.what != "write" or len(step.data) <= SECTOR or dice.random() < 0.7:
        return step
    at = SECTOR * dice.randrange(1, (len(step.data) + SECTOR - 1) // SECTOR)
    if dice.random() < 0.5:
        return Step("write", step.file, step.at, step.data[:at])
    return Step("write", step.file, step.at + at, step.data[at:])


def _apply(content: bytearray, step: Step) -> None:
    if step.what == "truncate":
        del content[step.at :]
        return
    content.extend(bytes(max(0, step.at - len(content))))
    content[step.at : step.at + len(step.data)] = step.data


def power_cuts(seed: int, cuts: int, big: bool = False, lies: bool = False) -> Findings:
    """So many cuts at random moments of a history, a big one has checkpoints. After each the ledger must be
    as after the last acknowledged batch or one more, and the rest of the history must end as it should."""
    dice, found, steps = random.Random(seed), Findings(), recorded(big)
    for _ in range(cuts):
        _cut(found, steps, dice.randrange(1, len(steps) + 1), dice, big, lies)
    return found


def _cut(found: Findings, steps: list[Step], cut: int, dice: random.Random, big: bool, lies: bool) -> None:
    found.events += 1
    acknowledged = max((step.at for step in steps[:cut] if step.what == "ack"), default=0)
    for commands, _ in script(big).batches[:acknowledged]:
        found.jobs += sum(len(command.specs) for command in commands if isinstance(command, Append))
    with tempfile.TemporaryDirectory(prefix="towpath-chaos-") as folder:
        for name, content in after_cut(steps, cut, dice, lies).items():
            (Path(folder) / name).write_bytes(content)
        try:
            prove(Path(folder) / "a.db", acknowledged, big)
        except Exception as error:
            add = found.add_lost if acknowledged else found.add_unexplained
            add(
                f"cut after step {cut}, {acknowledged} batches acknowledged: {type(error).__name__}:"
                f" {error!s:.200}"
            )


# Damage

JOBS = 300


def _damaged(folder: Path, dice: random.Random, sound: Path, case: int) -> tuple[Path, str]:
    """A copy of the ledger with one file flipped, overwritten or cut short."""
    copy = folder / f"case{case}"
    shutil.copytree(sound, copy)
    files = sorted(path for path in copy.iterdir() if path.stat().st_size)
    file = files[case % len(files)]
    content = bytearray(file.read_bytes())
    how = dice.choice(("flip", "overwrite", "truncate"))
    if how == "truncate":
        content = content[: dice.randrange(len(content))]
    else:
        at, length = dice.randrange(len(content)), 1 if how == "flip" else dice.choice((64, 4096))
        for n in range(at, min(len(content), at + length)):
            content[n] ^= dice.randrange(1, 256)
    file.write_bytes(content)
    return copy, f"{how} {file.name}"


READER = """
import json, sys
from contextlib import closing
from towpath.errors import LedgerError
from towpath.ledger.sqlite import SqliteLedger
for line in sys.stdin:
    path, count = json.loads(line)
    missing, wrong, problem = [], 0, ""
    try:
        with closing(SqliteLedger(path)) as ledger:
            for start in range(0, count, 100):
                ids = [f"job{n}" for n in range(start, start + 100)]
                found = ledger.get_many(ids)
                missing += [int(id[3:]) for id in ids if id not in found]
                wrong += sum(job.payload != job.id.encode() * 50 for job in found.values())
            problem = "; ".join(ledger.integrity())
    except LedgerError as error:
        problem = f"{type(error).__name__}: {error}"
    print(json.dumps([missing, wrong, problem[:200]]), flush=True)
"""


def _sound(folder: Path) -> Path:
    """A ledger that was left without being closed, so that a part of it is in its log."""
    from towpath.core.job import Spec

    sound = folder / "sound"
    sound.mkdir()
    home = folder / "home"
    home.mkdir()
    with closing(SqliteLedger(home / "a.db")) as ledger:
        for n in range(JOBS):
            (answer,) = ledger.apply(
                [Append((Spec(id=f"job{n}", queue="q", payload=f"job{n}".encode() * 50),))]
            )
            assert isinstance(answer, Appended)
            if n == JOBS // 2:
                subprocess.run([sys.executable, "-c", _CHECKPOINT, str(home / "a.db")], check=True)
        subprocess.run(["cp", "-a", f"{home}/.", str(sound)], check=True)
    (sound / "a.db-shm").unlink(missing_ok=True)
    return sound


_CHECKPOINT = (
    "import apsw, sys; apsw.Connection(sys.argv[1]).execute('PRAGMA wal_checkpoint(PASSIVE)').fetchall()"
)


def _read(copies: list[Path]) -> Iterator[list[Any] | int]:
    """The findings of a process in each copy: missing jobs, wrong payloads, the error. A number is the exit
    code of a process that died."""
    at = 0
    while at < len(copies):
        lines = "".join(f'["{copy}/a.db", {JOBS}]\n' for copy in copies[at:])
        child = subprocess.run(
            [sys.executable, "-c", READER],
            input=lines,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        answers = [msgspec.json.decode(line) for line in child.stdout.splitlines()]
        yield from answers
        at += len(answers)
        if child.returncode:
            yield child.returncode
            at += 1


def damage(seed: int, cases: int) -> Findings:
    """Bytes flipped, overwritten or cut off in the database, its log and the small files beside it. Every
    answer is right, or an error is raised. Damage of the log alone ends the log there, and the ledger must
    have all jobs before it."""
    dice, found = random.Random(seed), Findings()
    with tempfile.TemporaryDirectory(prefix="towpath-chaos-") as name:
        folder = Path(name)
        sound = _sound(folder)
        copies = [_damaged(folder, dice, sound, case) for case in range(cases)]
        cut_short = payloads = 0
        for (_, how), answer in zip(copies, _read([copy for copy, _ in copies]), strict=True):
            found.events += 1
            found.jobs += JOBS
            if isinstance(answer, int):
                found.add_unexplained(f"{how}: the reader ended with {answer}")
                continue
            missing, wrong, problem = answer
            payloads += bool(wrong and not problem)
            if missing and not problem:
                if how.endswith("-wal") and missing == list(range(missing[0], JOBS)):
                    cut_short += 1
                else:
                    found.add_lost(f"{how}: {len(missing)} jobs are missing without an error")
    if cut_short:
        found.notes.append(
            f"{cut_short} times the log ended at the damage, as SQLite reads it: the jobs after it are"
            " missing"
        )
    if payloads:
        found.notes.append(
            f"{payloads} times a payload was changed without an error: SQLite has no checksums for pages"
        )
    return found
