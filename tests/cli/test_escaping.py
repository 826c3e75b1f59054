"""Untrusted text: escaped on terminals and in logs, unchanged for a reader of JSON."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import unicodedata
from collections.abc import Sequence

import pytest
from rich.console import Console

from tests.support.shell import Ran, Shell
from tests.support.terminal import terminal
from towpath import App, commands
from towpath.commands import Spec
from towpath.core.job import After, Key, KeyPolicy
from towpath.errors import JobFailed, UnknownJob
from towpath.escapes import escape, escape_json, get_logger
from towpath.events import Bus, JobSettled, log_events
from towpath.operations.display import drawn
from towpath.operations.progress import RunningJob, Snapshot

BAD = (
    "\x1b]0;title\x07\x1b[2J[red]:skull:\u202e\u200b\u2066\u2028\u2029\x85\x9b31m\x7f\r\nforged "
    "line\U000e0041\ufeff\t."
)
SHOWN = (
    "\\x1b]0;title\\x07\\x1b[2J[red]:skull:\\u202e\\u200b\\u2066\\u2028\\u2029\\x85\\x9b31m\\x7f"
    "\\r\\nforged line"
)
SECRET = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of invisible and control characters."""


def assert_harmless(text: str) -> None:
    raw = {letter for letter in text if unicodedata.category(letter) in SECRET and letter not in "\n\t"}
    assert raw == set(), text
    assert not [line for line in text.split("\n") if line.startswith("forged")], text


def fill(shell: Shell) -> tuple[str, str]:
    """A ledger with hostile text wherever text may be; the ids of a job that failed and of one that runs."""
    ledger = shell.ledger()
    names = ("dead", "waits", "runs", "blocked", "message")
    dead, waits, runs, blocked, message = (f"{name}-{BAD}" for name in names)

    def apply(*batch: commands.Command) -> Sequence[object]:
        answers = list(ledger.apply(batch))
        assert not [answer for answer in answers if isinstance(answer, Exception)], answers
        return answers

    def spec(id: str, queue: str, **more: object) -> Spec:
        fields = {
            "kind": BAD,
            "headers": {BAD: BAD, "receipt": "forged"},
            "correlation_id": BAD,
            "part": BAD,
            **more,
        }
        plain = {"payload": BAD.encode(), "content_type": "text/plain"}
        return Spec(id=id, queue=queue, **plain, **fields)  # type: ignore[arg-type]

    apply(commands.Open(BAD))
    apply(commands.Append((spec(dead, "q", max_attempts=1), spec(runs, "r"), spec(message, "m"))))
    apply(
        commands.Append(
            (
                spec(blocked, "b", after=(After(runs),)),
                spec(waits, "w", group=BAD, key=Key(BAD, KeyPolicy.UNIQUE)),
            )
        )
    )
    for queue in ("q", "r"):
        [answer] = apply(commands.Claim(owner=BAD, wants=(commands.Want(queue),), lease=10**9))
        assert isinstance(answer, commands.Claimed)
        [claim] = answer.claims
        if queue == "q":
            apply(commands.Settle(claim.id, claim.fence, commands.RetryOutcome(0, BAD)))
        else:
            apply(commands.Progress(claim.id, claim.fence, 1, 2))
    apply(
        commands.SetQueue(queue="w", paused=True, why=BAD),
        commands.SetPart(queue="b", part=BAD, paused=True, why=BAD),
    )
    ledger.close()
    return dead, runs


def test_every_listing(shell: Shell) -> None:
    dead, runs = fill(shell)
    ran: list[Ran] = []
    for arguments, code in (
        (["stats"], 0),
        (["stats", "--watch", "--count", "1"], 0),
        (["jobs", "list"], 0),
        (["jobs", "show", dead], 0),
        (["jobs", "show", runs], 0),
        (["jobs", "show", BAD], 3),
        (["jobs", "explain", f"blocked-{BAD}"], 0),
        (["jobs", "explain", f"waits-{BAD}"], 0),
        (["jobs", "cancel", dead], 1),
        (["jobs", "purge", runs, "--yes"], 1),
        (["jobs", "list", "--queue", BAD], 3),
        (["jobs", "retry", BAD], 3),
        (["dead", "list"], 0),
        (["queues", "list"], 0),
        (["parts", "list", "b"], 0),
        (["groups", "show", BAD], 0),
        (["groups", "show", f"{BAD}?"], 3),
        (["workers", "pause", BAD, "--why", BAD], 0),
        (["workers", "list"], 0),
        (["lanes", "pause", BAD, "--why", BAD], 3),
        (["lanes", "list"], 0),
        (["get", "m", "--name", BAD], 0),
        (["ack", f"{BAD}:1"], 3),
        (["doctor"], 0),
        (["check"], 0),
        (["dead", "retry", dead], 0),
        ([BAD], 2),
        (["--url", f"sqlite:///{BAD}", "stats"], 4),
    ):
        for more in ([], ["--json"]):
            if more and arguments[:2] in (["get", "m"], ["dead", "retry"]):
                continue  # these commands succeed only once
            each = shell(*arguments, *more, code=code)
            assert_harmless(each.out + each.err)
            ran.append(each)
    report = "".join(each.out + each.err for each in ran)
    assert SHOWN in report
    # A header has not replaced the receipt.
    [got] = [each.out for each in ran if "header receipt" in each.out]
    assert re.search(r"(?m)^receipt +message-", got)


def test_json_gives_back_what_was_put(shell: Shell) -> None:
    dead, _ = fill(shell)
    job = shell("jobs", "show", dead, "--json").json
    assert (job["id"], job["kind"], job["part"], job["error"], job["headers"][BAD]) == (
        dead,
        BAD,
        BAD,
        BAD,
        BAD,
    )
    assert job["payload"] == BAD
    assert shell("jobs", "show", BAD, "--json", code=3).error["details"]["id"] == BAD


@pytest.mark.parametrize(
    "arguments", [["jobs", "list"], ["stats", "--watch", "--count", "1"], ["parts", "list", "b"]]
)
def test_a_table_on_a_terminal(shell: Shell, arguments: list[str]) -> None:
    fill(shell)
    # Wide enough that no cell is wrapped: a line that begins with hostile text has a line break of that text.
    with terminal(shell, *arguments, columns=400) as screen:
        assert screen.rest() == 0
        for bad in ("\x1b]0;", "\x1b[2J", "\u202e", "\u200b", "\x9b", "\x07", "\nforged"):
            assert bad not in screen.raw
        assert "forged" in screen.text.replace("\n", "") or arguments[0] == "stats"


WORKER = f"""
import logging
from towpath import App, current

app = App()
BAD = {BAD!a}

@app.task(name="bad", max_attempts=1, queue="work")
def bad() -> None:
    logging.getLogger("shop").warning("argument %s", BAD)
    logging.getLogger("shop").warning(f"message {{BAD}}")
    raise ValueError(BAD)

@app.task(name="worse", max_attempts=1, queue="work")
def worse() -> None:
    try:
        raise ValueError(BAD)
    except ValueError:
        logging.getLogger("shop").exception("caught")
    current().commit(lambda connection: bad())
"""


def test_the_log_of_a_worker(shell: Shell) -> None:
    (shell.folder / "program.py").write_text(WORKER)
    ledger = shell.ledger()
    specs = [
        Spec(id=f"{kind}-{BAD}", kind=kind, queue="work", payload=b"{}", max_attempts=1)
        for kind in ("bad", "worse", BAD)
    ]
    assert isinstance(ledger.apply([commands.Append(tuple(specs))])[0], commands.Appended)
    ledger.close()
    with shell.start(
        "worker", "program:app", "--burst", "--name", BAD, env={"TOWPATH_URL": shell.url}
    ) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert_harmless(out + err)
    for piece in (
        "argument " + SHOWN.replace("\\nforged", "\n  forged"),  # no line that looks like another record
        "message \\x1b]0;title",
        f"bad-{SHOWN}",
        "failed for good",
        f"ValueError: {SHOWN[:20]}",
    ):
        assert piece in err
    assert shell("jobs", "list", "--state", "failed", "--json").json["jobs"] != []


def test_errors_and_explanations(shell: Shell) -> None:
    dead, _ = fill(shell)
    with App(shell.url) as app:
        with pytest.raises(JobFailed) as caught:
            app.job(dead).result(1)
        assert caught.value.error == BAD
        for text in (
            str(UnknownJob(id=BAD)),
            str(app.job(f"blocked-{BAD}").explain()),
            str(app.job(f"waits-{BAD}").explain()),
        ):
            assert_harmless(text)
            assert SHOWN in text
        # Only the error of a job may have several lines.
        assert_harmless(str(caught.value).replace("\nforged", "").replace("\t", ""))


def test_loggers_escape_whatever_handler_there_is() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    log = get_logger("towpath.tested")
    log.addHandler(handler)
    log.propagate = False
    try:
        log.error("job %s (%r) %d", BAD, BAD, 3)
        log.error("by name %(a)s", {"a": BAD})
        log.error("object %s", ValueError(BAD))
        log.error(ValueError(BAD))
        try:
            try:
                raise KeyError(BAD)
            except KeyError:
                raise ValueError(BAD) from None
        except ValueError:
            log.exception("failed")
        bus = Bus()
        log_events(bus, log, logging.DEBUG)
        bus.publish(JobSettled(BAD, "q", "failed", "retry", 1.0, 1, BAD, error=BAD))
        assert bus.flush()
        bus.close()
    finally:
        log.removeHandler(handler)
    assert_harmless(out.getvalue())
    assert out.getvalue().count("\\x1b]0;title") >= 6


def test_the_display_of_progress() -> None:
    out = io.StringIO()
    running = RunningJob(BAD, BAD, "q", None, 1, 1.0, 1, 2, 1.0, 1.0, short_id=BAD)
    snapshot = Snapshot((running,), {}, {}, {"lane": {BAD: 1}}, {}, 0.0, 1, 2, 1.0, 1.0, None)
    Console(file=out, width=200).print(drawn(snapshot, {}))
    assert_harmless(out.getvalue())


@pytest.mark.parametrize(
    "letter", [*map(chr, range(32)), "\x7f", *map(chr, range(0x80, 0xA0)), *"\u061c\u200e\u2067\u180e\ud800"]
)
def test_escape(letter: str) -> None:
    text = escape(f"a{letter}b")
    assert text.isascii()
    assert text.isprintable()
    assert ast.literal_eval(f"'{text}'") == f"a{letter}b"
    assert escape(text) == text


def test_escape_leaves_the_rest_alone() -> None:
    text = "zażółć 漢字 👍 [red] \\x1b é ¿?"
    assert escape(text) == text
    assert escape("a\tb\nc\rd", lines=True) == "a\tb\nc\\rd"
    document = json.dumps({BAD: [BAD]}, ensure_ascii=False)
    assert json.loads(escape_json(document)) == {BAD: [BAD]}
    assert escape_json('{"a": "é 👍"}') == '{"a": "é 👍"}'
