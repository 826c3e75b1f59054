"""`towpath client`: the commands of lockd's command line, in a shell and against real servers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.shell import EXECUTABLE, Ran, Shell, parsed
from tests.support.surfaces import answer, scripted
from tests.support.wire import Remote

Call = Callable[..., Ran]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in [name for name in os.environ if name.startswith(("TOWPATH_", "LOCKD_"))]:
        if name != "TOWPATH_TEST_POSTGRES":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Shell(tmp_path)


@pytest.fixture
def call(shell: Shell, local: Remote) -> Call:
    def run(*arguments: str, code: int = 0) -> Ran:
        return shell("client", *arguments, "-s", local.address, code=code)

    return run


def bash(shell: Shell, script: str, server: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script in which `towpath` is the real command."""
    folder = str(Path(EXECUTABLE[0]).parent)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**shell.environment, "PATH": path, "TOWPATH_SERVER": server, **more}
    return subprocess.run(
        ["bash", "-euc", script],
        check=False,
        cwd=shell.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_session_in_a_shell(shell: Shell, local: Remote, queue: str) -> None:
    script = f"""
        echo -n 'hello world' | towpath client queue enqueue -q {queue} -f - --attr kind=greeting
        eval "$(towpath client queue dequeue -q {queue} --block nowait --stateful)"
        cat "$LOCKD_QUEUE_PAYLOAD_PATH"; echo
        towpath client state update --of-message -d '{{"step": 1}}'
        towpath client state get --of-message
        eval "$(towpath client queue extend --extend 60s --export)"
        towpath client queue nack --reason 'not now'
        eval "$(towpath client q dequeue -q {queue} --block=-1)"
        [ -z "${{LOCKD_QUEUE_STATE_LEASE:-}}" ]
        echo "$TOWPATH_QUEUE_MESSAGE_ID = $LOCKD_QUEUE_MESSAGE_ID"
        towpath client queue ack
        eval "$(towpath client queue dequeue -q {queue} --block nowait)"
        echo "left: [${{TOWPATH_QUEUE_MESSAGE_ID:-}}]"
    """
    ran = bash(shell, script, local.address)
    assert ran.returncode == 0, ran
    first, payload, version, document, requeued, same, acked, left = ran.stdout.splitlines()
    id = first.partition("message_id=")[2].partition(" ")[0]
    assert first == f"message_id={id} attempts=0 max_attempts=5"
    assert (payload, requeued, acked, left) == ("hello world", "requeued", "acknowledged", "left: []")
    assert version.startswith("version=")
    assert json.loads(document) == {"step": 1}
    assert same == f"{id} = {id}"
    assert "no messages available (try again later)" in ran.stderr
    assert ran.stderr.count("payload written to ") == 2


def test_lockds_names_of_variables_are_read(shell: Shell, local: Remote, queue: str) -> None:
    script = f"""
        towpath client queue enqueue -q {queue} -d x > /dev/null
        eval "$(towpath client queue dequeue -q {queue} | grep LOCKD_)"
        towpath client queue ack
        eval "$(towpath client lock acquire -k {queue} --ttl 30s | grep LOCKD_)"
        towpath client lock keepalive
        towpath client state update -d 7 > /dev/null
        towpath client lock release
        towpath client state get --public
    """
    ran = bash(shell, script, "", LOCKD_CLIENT_SERVER=local.address)
    assert ran.returncode == 0, ran
    acked, until, released, document = ran.stdout.splitlines()
    assert (acked, released, document) == ("acknowledged", "released", "7")
    assert until.startswith("expires_at_unix=")


HOSTILE = "$(touch pwned)`touch pwned`';touch pwned;'\"; touch pwned #"


def test_values_of_a_hostile_server_are_quoted(shell: Shell) -> None:
    view = {
        "queue": HOSTILE,
        "namespace": HOSTILE,
        "message_id": HOSTILE,
        "lease_id": HOSTILE,
        "meta_etag": HOSTILE,
        "state_etag": HOSTILE,
        "state_lease_id": HOSTILE,
        **dict.fromkeys(("attempts", "max_attempts", "not_visible_until_unix", "fencing_token"), 1),
        **dict.fromkeys(("visibility_timeout_seconds", "payload_bytes", "lease_expires_at_unix"), 1),
    }

    def document(meta: dict[str, Any]) -> bytes:
        text = json.dumps({"message": meta}).encode()
        body = (
            b'--B\r\nContent-Disposition: form-data; name="meta"\r\n\r\n%b\r\n--B\r\n'
            b'Content-Disposition: form-data; name="payload"\r\nContent-Length: 0\r\n\r\n\r\n--B--\r\n' % text
        )
        return answer("200 OK", body, "Content-Type: multipart/related; boundary=B")

    with scripted(document(view)) as server:
        script = """
            eval "$(towpath client queue dequeue -q a)"
            printf %s "$TOWPATH_QUEUE_MESSAGE_ID"
        """
        ran = bash(shell, script, server.address)
        assert (ran.returncode, ran.stdout) == (0, HOSTILE), ran
        assert not (shell.folder / "pwned").exists()
    for bad in ("a\nb", "a\x00b", "\x1b[2J", "a\u202eb"):
        with scripted(document({**view, "message_id": bad})) as server:
            ran2 = shell("client", "queue", "dequeue", "-q", "a", "-s", server.address, code=1)
            assert ran2.out == ""
            assert "control characters as QUEUE_MESSAGE_ID" in ran2.err


def test_dequeue_as_json(call: Call, queue: str, tmp_path: Path) -> None:
    sent = [call("queue", "enqueue", "-q", queue, "-d", str(n), "--json").json for n in range(3)]
    found = call(
        "queue", "dequeue", "-q", queue, "--json", "--owner", "me", "--visibility", "9s", "-o", "out"
    )
    assert found.json["message_id"] == sent[0]["message_id"]
    assert found.json["visibility_timeout_secs"] == 9
    assert {"lease_id", "fencing_token", "meta_etag", "payload_bytes", "cursor"} <= set(found.json)
    assert "state_lease_id" not in found.json
    assert Path(found.json["payload_path"]).read_bytes() == b"0"
    rest = call("queue", "dequeue", "-q", queue, "--output", "json", "--page-size", "9").lines
    assert [Path(each["payload_path"]).read_text() for each in rest] == ["1", "2"]
    # Only the asked number of messages was leased: lockd's command leases 32.
    assert call("queue", "dequeue", "-q", queue, "--json", "--block", "nowait").out == ""


@pytest.mark.parametrize(
    ("text", "seconds"), [("forever", -1), ("0", -1), ("0s", -1), ("nowait", 0), ("-1", 0), ("1.5s", 1.5)]
)
def test_how_long_to_block(text: str, seconds: float) -> None:
    context = parsed(["client", "queue", "dequeue", "-q", "a", "--block", text])
    assert context.params["block"] == seconds


def test_a_receipt_as_options(call: Call, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call("queue", "enqueue", "-q", queue, "-d", "x")
    found = call("queue", "dequeue", "-q", queue, "--json").json
    # Variables of another message are not mixed with the options.
    monkeypatch.setenv("LOCKD_QUEUE_FENCING_TOKEN", "77")
    monkeypatch.setenv("LOCKD_QUEUE_STATE_LEASE", "other")
    receipt = ["-q", queue, "--message", found["message_id"], "--lease", found["lease_id"]]
    receipt += ["--meta-etag", found["meta_etag"]]
    extended = call("queue", "extend", *receipt, "--extend", "1m").out
    assert extended.startswith("lease_expires_at_unix=")
    assert extended.endswith("visibility_timeout_seconds=60\n")
    assert call("queue", "extend", *receipt, "--json").json["visibility_timeout_seconds"] == 60
    assert call("queue", "nack", *receipt, "-i", "defer", "--delay", "5m", "--json").json == {
        "requeued": True
    }
    lost = call("queue", "ack", *receipt, "--json", code=1)
    assert lost.error["type"] == "LostLease"
    assert lost.error["details"]["code"] == "cas_mismatch"


def test_a_payload_on_stdout(shell: Shell, local: Remote, queue: str) -> None:
    data = bytes(range(256)) * 1000
    (shell.folder / "in").write_bytes(data)
    shell("client", "queue", "enqueue", "-q", queue, "-f", "in", "-s", local.address)
    command = [*EXECUTABLE, "client", "queue", "dequeue", "-q", queue, "-o", "-", "-s", local.address]
    ran = subprocess.run(command, capture_output=True, env=shell.environment, timeout=60, check=True)
    assert ran.stdout == data
    assert b"export LOCKD_QUEUE_LEASE=" in ran.stderr


def test_a_file_that_cannot_be_written(call: Call, queue: str) -> None:
    call("queue", "enqueue", "-q", queue, "-d", "x")
    ran = call("queue", "dequeue", "-q", queue, "-o", "nowhere/out", code=2)
    assert "nowhere/out cannot be written" in ran.err
    # The message is available again at once, and that counts as no failure.
    found = call("queue", "dequeue", "-q", queue, "--json", "--block", "nowait").json
    assert (found["attempts"], found["failure_attempts"]) == (2, 0)


def test_stats_watch_and_subscribe(call: Call, queue: str, tmp_path: Path) -> None:
    assert "available" in call("queue", "stats", "-q", queue).out
    call("queue", "enqueue", "-q", queue, "-d", "1", "--max-attempts", "2", "--ttl", "1h", "--delay", "0")
    call("queue", "enqueue", "-q", queue, "-d", "2", "--content-type", "a/b")
    head = call("queue", "stats", "-q", queue, "--json").json["head_message_id"]
    event = call("queue", "watch", "-q", queue, "--count", "1").out
    assert event.startswith(f"available=true head_message_id={head} changed_at_unix=")
    folder = tmp_path / "payloads"
    folder.mkdir()
    found = call(
        *("queue", "subscribe", "-q", queue, "--count", "2", "--auto-ack", "--payload-dir", str(folder))
    ).lines
    assert [Path(each["payload_path"]).read_text() for each in found] == ["1", "2"]
    assert {Path(each["payload_path"]).parent for each in found} == {folder}
    assert call("queue", "stats", "-q", queue, "--json").json["available"] is False


def test_locks_and_documents(call: Call, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = call("lock", "acquire", "-k", queue, "--owner", "me", "--json").json
    lease = ["-k", queue, "--lease", held["lease_id"], "--fencing-token", str(held["fencing_token"])]
    lease += ["--txn-id", held["txn_id"]]
    busy = call("lock", "acquire", "-k", queue, "--block", "nowait", "--json", code=1)
    assert busy.error["type"] == "LockBusy"
    assert call("lock", "keepalive", *lease, "--ttl", "1m", "--json").json["expires_at_unix"]
    assert "There is no document" in call("state", "get", *lease, code=3).err
    written = call("state", "update", *lease, "-d", '{"a": 1}', "--json").json
    assert call("state", "get", *lease, "--json").json["document"] == {"a": 1}
    call("state", "update", *lease, "-d", "2", "--if-version", str(written["version"]))
    conflict = call("state", "update", *lease, "-d", "3", "--if-version", "99", code=1)
    assert "version_conflict" in conflict.err
    assert call("state", "remove", *lease).out == "removed\n"
    assert call("state", "remove", *lease).out == "there was none\n"
    assert call("lock", "release", *lease, "--rollback").out == "released\n"
    assert "not JSON" in call("state", "update", *lease, "-d", "{", code=2).err


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["queue", "enqueue"], 2, "--queue"),
        (["queue", "dequeue"], 2, "TOWPATH_QUEUE_NAME"),
        (["queue", "ack", "-q", "a"], 2, "TOWPATH_QUEUE_MESSAGE_ID"),
        (["queue", "dequeue", "-q", "a", "--page-size", "2"], 2, "needs --json"),
        (["queue", "dequeue", "-q", "a", "--block", "soon"], 2, "--block"),
        (["queue", "enqueue", "-q", "a", "-d", "x", "-f", "y"], 2, "exclude each other"),
        (["queue", "enqueue", "-q", "a", "-f", "missing"], 2, "missing cannot be read"),
        (["queue", "enqueue", "-q", "a b", "-d", "x"], 1, "invalid_queue"),
        (["queue", "nack", "-i", "defer", "--reason", "x"], 2, "intent failure"),
        (["queue", "stats", "-q", "a", "--token-file", "missing"], 2, "token file missing"),
        (["queue", "stats", "-q", "a", "--bundle", "missing", "-s", "https://127.0.0.1:1"], 2, "bundle"),
        (["lock", "keepalive", "-k", "a"], 2, "TOWPATH_CLIENT_LEASE"),
        (["queue", "frobnicate"], 2, "No such command"),
    ],
)
def test_mistakes(shell: Shell, local: Remote, arguments: list[str], code: int, why: str) -> None:
    ran = shell("client", "-s", local.address, *arguments, code=code)
    assert why in ran.err
    assert ran.out == ""


def test_a_bad_variable(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAME", "MESSAGE_ID", "LEASE", "META_ETAG"):
        monkeypatch.setenv(f"TOWPATH_QUEUE_{name}", "a")
    monkeypatch.setenv("TOWPATH_QUEUE_FENCING_TOKEN", "x; rm")
    assert "must be a whole number" in call("queue", "ack", code=2).err


def test_no_server(shell: Shell) -> None:
    ran = shell("client", "queue", "stats", "-q", "a", "-s", "http://127.0.0.1:1", code=4)
    assert "no answer from http://127.0.0.1:1" in ran.err
    assert "towpath serve" in ran.err


def test_a_token_file(shell: Shell) -> None:
    (shell.folder / "token").write_text("s3cret\n")
    refused = answer("401 Unauthorized", b'{"error":"unauthorized","detail":"bad token"}')
    with scripted(refused) as server:
        options = ["--token-file", "token", "-s", server.address, "--timeout", "5s"]
        ran = shell("client", "queue", "stats", "-q", "a", *options, code=1)
        assert b"Bearer s3cret" in server.requests[0]
    assert "s3cret" not in ran.err
    assert "bad token" in ran.err


def test_mtls_can_be_disabled(shell: Shell, local: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKD_CLIENT_BUNDLE", "missing.pem")
    server = local.address.removeprefix("http://")
    # With a bundle an address without a scheme is https.
    assert "missing.pem" in shell("client", "queue", "stats", "-q", "a", "-s", server, code=2).err
    shell("client", "queue", "stats", "-q", "a", "-s", server, "--disable-mtls")
    monkeypatch.setenv("LOCKD_CLIENT_DISABLE_MTLS", "1")
    shell("client", "queue", "stats", "-q", "a", "-s", server)
