"""The connection to a server: URLs, secrets, lost answers, the end of waits."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.proxy import proxied
from tests.support.running import working
from tests.support.waiting import WAIT, in_thread, until
from tests.support.wire import Remote, serving
from towpath import App
from towpath.core.commands import Append, Appended, Claim, Claimed, Settle, Settled, Want
from towpath.core.job import Done, Spec
from towpath.errors import Forked, InvalidInput, LedgerAway, LedgerClosed, NotALedger, Unsupported
from towpath.ledger import Ledger, open_ledger
from towpath.ledger.remote import ledger as remote_ledger
from towpath.ledger.remote.connection import TOKEN, options_of
from towpath.ledger.remote.ledger import RemoteLedger
from towpath.runtime.caretaker import CARETAKER_KEY

LEASE = 60_000_000


@pytest.fixture(scope="module")
def local() -> Iterator[Remote]:
    with App("memory://") as app, serving(app) as remote:
        yield remote
        assert app.ledger.check() == []


@pytest.fixture
def ledger(local: Remote) -> Iterator[Ledger]:
    with closing(open_ledger(local.address)) as ledger:
        yield ledger


def spec(id: str, queue: str, payload: bytes = b"") -> Spec:
    return Spec(id=id, queue=queue, payload=payload)


# URLs


def test_urls() -> None:
    found = options_of("https://box.example/towpath/?timeout=5&ca=%2Fca.pem&token_file=/t")
    assert (found.host, found.port, found.path, found.tls) == ("box.example", 443, "/towpath", True)
    assert (found.timeout, found.ca, found.token_file) == (5.0, "/ca.pem", "/t")
    assert found.place == "https://box.example/towpath/"
    assert options_of("http://[::1]:9341").host == "::1"
    assert options_of("unix:///run/towpath.sock").unix == "/run/towpath.sock"


@pytest.mark.parametrize(
    "place",
    [
        "http://",
        "http:///path",
        "http://host:port",
        "http://host:99999",
        "http://host?speed=1",
        "http://host?timeout=soon",
        "http://host?timeout=0",
        "http://host?timeout=nan",
        "http://host#x",
        "http://host?ca=x.pem",
        "unix://relative.sock",
        "unix:",
        "http://user:secret@host",
        "http://secret@host",
    ],
)
def test_urls_that_are_refused(place: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        open_ledger(place)
    assert caught.value.field == "url"
    assert "secret" not in str(caught.value)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with App("memory://") as app, serving(app, listen=f"unix://{path}"):
        with App(f"unix://{path}") as far:
            assert far.queue("q").put("x")
            message = far.queue("q").get()
            assert message is not None
            message.ack()
        assert app.queue("q").stats().counts.done == 1


# Who answers


def test_nothing_listens() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(LedgerAway, match=rf"http://127\.0\.0\.1:{port} cannot do it now: .*refused"):
        open_ledger(f"http://127.0.0.1:{port}")


def test_a_server_without_a_ledger(local: Remote) -> None:
    with pytest.raises(NotALedger, match="answers 404 and is not a Towpath server"):
        open_ledger(f"{local.address}/elsewhere")


@pytest.mark.parametrize("source", ["variable", "file"])
def test_the_token_is_sent_and_not_shown(
    local: Remote, source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    options = ""
    if source == "variable":
        monkeypatch.setenv(TOKEN, "s3cret")
    else:
        monkeypatch.setenv(TOKEN, "another")
        options = f"?token_file={tmp_path / 'token'}"
    with proxied(local.address) as proxy, closing(open_ledger(proxy.address + options)) as ledger:
        assert b"authorization: Bearer s3cret\r\n" in proxy.heads[0]
        assert isinstance(ledger, RemoteLedger)
        assert "s3cret" not in ledger.place + repr(ledger._options)


@pytest.mark.parametrize("content", [None, b"\xff", b"two\nlines"])
def test_token_files_that_are_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        open_ledger(f"http://127.0.0.1:1?token_file={tmp_path / 'token'}")
    assert "lines" not in str(caught.value)


class Certificates:
    """A certificate authority in a folder, with a certificate for localhost."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.cert = folder / "ca.pem", folder / "cert.pem"
        key, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        now = datetime.now(UTC)

        def make(public: ec.EllipticCurvePublicKey, subject: str, ca: bool) -> x509.Certificate:
            return (
                x509.CertificateBuilder()
                .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
                .issuer_name(name)
                .public_key(public)
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - timedelta(days=1))
                .not_valid_after(now + timedelta(days=1))
                .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
                .add_extension(
                    x509.SubjectAlternativeName(
                        [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
                    ),
                    critical=False,
                )
                .sign(key, hashes.SHA256())
            )

        pem = serialization.Encoding.PEM
        self.ca.write_bytes(make(key.public_key(), "tests", ca=True).public_bytes(pem))
        private = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self.cert.write_bytes(private + make(own.public_key(), "localhost", ca=False).public_bytes(pem))


def test_tls(local: Remote, tmp_path: Path) -> None:
    """A client checks the server's certificate, and shows its own."""
    made = Certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(made.ca))
    context.load_cert_chain(made.cert)
    context.verify_mode = ssl.CERT_REQUIRED
    with proxied(local.address, context) as proxy:
        url = f"{proxy.address}?ca={made.ca}&cert={made.cert}"
        with closing(open_ledger(url)) as ledger:
            assert ledger.queues() is not None
        with pytest.raises(NotALedger, match="its certificate: "):
            open_ledger(proxy.address)
        # Without a certificate of its own. The reason may be lost with the connection.
        with pytest.raises((NotALedger, LedgerAway)):
            open_ledger(f"{proxy.address}?ca={made.ca}")
        with pytest.raises(InvalidInput, match="PEM files that can be read"):
            open_ledger(f"{proxy.address}?ca={tmp_path / 'none.pem'}")


# Lost answers


def test_an_answer_that_is_lost(local: Remote) -> None:
    """The commands are applied twice; the claims of the first time are released, before their lease ends."""
    with proxied(local.address) as proxy, closing(open_ledger(proxy.address)) as ledger:
        specs = tuple(spec(f"lost-{number}", "lost") for number in range(4))
        proxy.lose("/v1/ledger/apply", 1)
        [appended] = ledger.apply([Append(specs)])
        assert isinstance(appended, Appended)
        assert (proxy.lost, ledger.repeats) == (1, 1)
        assert local.app.queue("lost").stats().counts.ready == 4
        proxy.lose("/v1/ledger/apply", 1)
        [claimed] = ledger.apply([Claim(owner="w", wants=(Want("lost", 2),), lease=LEASE)])
        assert isinstance(claimed, Claimed)
        assert (proxy.lost, ledger.repeats) == (2, 2)
        assert local.app.queue("lost").stats().counts.running == 4  # two of them nobody has


def test_a_worker_gives_back_claims_that_it_did_not_receive(local: Remote) -> None:
    with proxied(local.address) as proxy, App(proxy.address) as app:
        ran: list[int] = []

        @app.task(queue="unreliable")
        def job(number: int) -> None:
            ran.append(number)

        with working(app, lease=60.0, concurrency=4):
            handles = job.enqueue_many([job.of(number) for number in range(100)])
            for _ in range(5):
                proxy.lose("/v1/ledger/apply", 1)
                lost = proxy.lost
                handles += job.enqueue_many(
                    [job.of(number) for number in range(len(handles), len(handles) + 20)]
                )
                until(lambda lost=lost: proxy.lost > lost)  # type: ignore[misc]
            for handle in handles:
                handle.result(timeout=WAIT)
        assert sorted(ran) == list(range(200))


def test_an_ambiguous_error_is_raised_when_the_server_stays_away(local: Remote) -> None:
    with proxied(local.address) as proxy, closing(open_ledger(proxy.address)) as ledger:
        proxy.lose("/v1/ledger/", 100)
        with pytest.raises(LedgerAway) as caught:
            ledger.apply([Append((spec("away", "away"),))])
        assert caught.value.retryable
        assert proxy.lost == 3
        assert local.app.ledger.get("away") is not None


# Large batches


def test_batches_larger_than_a_request(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_ledger, "MAX_BODY", 5000)
    parts = [Append((spec(f"part-{number}", "parts", bytes(1000)),)) for number in range(21)]
    large = Append((spec("large", "parts", bytes(5000)),))
    answers = ledger.apply([*parts, large, Append((spec("last", "parts"),))])
    assert [type(answer) for answer in answers] == [Appended] * 21 + [Unsupported, Appended]
    assert "bytes" in str(answers[21])
    assert ledger.get("large") is None
    monkeypatch.setattr(remote_ledger, "MAX_COMMANDS", 4)
    assert len(ledger.apply([Append((spec(f"more-{number}", "parts"),)) for number in range(11)])) == 11


def test_a_function_in_a_settle(ledger: Ledger) -> None:
    ledger.apply([Append((spec("a", "within"), spec("b", "within")))])
    [claimed] = ledger.apply([Claim(owner="w", wants=(Want("within", 2),), lease=LEASE)])
    assert isinstance(claimed, Claimed)
    first, second = claimed.claims
    refused, settled = ledger.apply(
        [
            Settle(first.id, first.fence, Done(), within=print),
            Settle(second.id, second.fence, Done()),
        ]
    )
    assert isinstance(refused, Unsupported)
    assert isinstance(settled, Settled)
    assert ledger.apply([]) == []


def test_upkeep_is_left_to_the_server() -> None:
    """A worker over HTTP does not take part in the election of the caretaker."""
    with App("memory://") as app:
        app.engine.start_caretaker = lambda: None  # type: ignore[method-assign]
        with serving(app) as remote, App(remote.address) as far:

            @far.task
            def job() -> int:
                return 5

            with working(far):
                assert job.enqueue().result(timeout=WAIT) == 5
                caretaker = far.engine.components._caretaker
                assert caretaker is not None
                first = until(lambda: caretaker._election.checked_at)
                until(lambda: caretaker._election.checked_at > first)
                assert not caretaker.elected
        assert app.ledger.note(CARETAKER_KEY) is None


# Connections


def test_many_threads_share_a_ledger(local: Remote) -> None:
    """No request gets the answer to another one, and no connection is left open."""
    before = len(os.listdir("/proc/self/fd"))
    with closing(open_ledger(local.address)) as ledger:

        def work(number: int) -> bool:
            for turn in range(20):
                id = f"thread-{number}-{turn}"
                [answer] = ledger.apply([Append((spec(id, f"threads-{number}"),))])
                assert isinstance(answer, Appended)
                assert [placed.id for placed in answer.jobs] == [id]
                job = ledger.get(id)
                assert job is not None
                assert job.queue == f"threads-{number}"
            return True

        ended = [in_thread(lambda number=number: work(number)) for number in range(12)]  # type: ignore[misc]
        assert all(end() for end in ended)
        ledger.version()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


# Waits


def test_a_commit_of_another_client_ends_a_wait(local: Remote, ledger: Ledger) -> None:
    seen = ledger.version()
    result = in_thread(lambda: ledger.wait(seen, WAIT))
    local.enqueue("woken")
    assert result() != seen


def test_the_version_stays_while_nothing_is_committed(tmp_path: Path) -> None:
    with App("memory://") as app:
        app.engine.start_caretaker = lambda: None  # type: ignore[method-assign]
        with serving(app) as remote, closing(open_ledger(remote.address)) as ledger:
            ledger.apply([Append((spec("a", "q"),))])
            seen = ledger.version()
            ledger.apply([Claim(owner="w", wants=(Want("empty"),), lease=LEASE)])
            assert ledger.wait(seen, 0.2) == seen


@pytest.mark.parametrize("act", [lambda ledger: ledger.version(), lambda ledger: ledger.get("a")])
def test_a_closed_ledger(local: Remote, act: Callable[[Ledger], object]) -> None:
    ledger = open_ledger(local.address)
    began = time.monotonic()
    errors: list[LedgerClosed] = []

    def wait() -> None:
        try:
            while True:  # a commit of the server's caretaker ends a wait as well
                ledger.wait(ledger.version(), WAIT)
        except LedgerClosed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: "towpath-versions" in {each.name for each in threading.enumerate()})
    ledger.close()
    thread.join(WAIT)
    assert len(errors) == 1
    assert time.monotonic() - began < WAIT / 2
    with pytest.raises(LedgerClosed):
        act(ledger)
    ledger.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child(local: Remote) -> None:
    """It cannot use the ledger of its parent; an App opens another one."""
    with App(local.address) as app:
        app.queue("forked").put("parent")
        ledger = app.ledger
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try:
                    ledger.get("a")
                except Forked:
                    app.queue("forked").put("child")
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        app.queue("forked").put("parent again")
        assert app.queue("forked").stats().counts.ready == 3
