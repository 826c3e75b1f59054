"""Several servers on one ledger, as different processes would be: each has an App of its own."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack

import pytest

from tests.support.waiting import WAIT, until
from tests.support.wire import Remote, receipt, serving
from towpath import App
from towpath.core.checks import SECOND

SERVERS, MESSAGES, CONSUMERS = 3, 60, 2


@pytest.mark.ledgers("sqlite", "postgres")
def test_servers_share_the_work(url: str) -> None:
    """Each message is delivered once, by any of the servers, and any of them takes the ack."""
    got: Counter[bytes] = Counter()
    lock = threading.Lock()
    with ExitStack() as stack:
        apps = [stack.enter_context(App(url)) for _ in range(SERVERS)]
        remotes = [stack.enter_context(serving(app)) for app in apps]

        def consume(here: Remote, there: Remote) -> None:
            while True:
                [(message, payload)] = here.dequeue("a", wait_seconds=int(WAIT)).messages()
                assert there.call("queue/ack", **receipt(message)).status == 200
                with lock:
                    got[payload] += 1
                if payload == b"end":
                    return

        threads = [
            threading.Thread(target=consume, args=(remotes[n % SERVERS], remotes[(n + 1) % SERVERS]))
            for n in range(SERVERS * CONSUMERS)
        ]
        for thread in threads:
            thread.start()
        for number in range(MESSAGES):
            remotes[number % SERVERS].enqueue("a", b"%d" % number)
        for _ in threads:
            remotes[0].enqueue("a", b"end")
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        assert apps[0].ledger.check() == []
    assert got == {b"end": len(threads)} | {b"%d" % number: 1 for number in range(MESSAGES)}


@pytest.mark.ledgers("sqlite")
def test_a_message_wakes_a_request_at_another_server(url: str) -> None:
    with App(url) as one, App(url) as two, serving(one) as here, serving(two) as there:
        with here.connect() as wire:
            wire.request("/v1/queue/dequeue", b'{"queue":"a","owner":"me"}')
            there.enqueue("a", b"x")
            assert wire.answer().messages()[0][1] == b"x"


@pytest.mark.ledgers("sqlite")
def test_a_drain_waits_for_an_extended_lease(url: str) -> None:
    with App(url) as app, serving(app, drain_grace=WAIT) as remote:
        remote.enqueue("a", b"x")
        message = remote.take("a", visibility_timeout_seconds=1)
        assert remote.call("queue/extend", **receipt(message), extend_by_seconds=int(WAIT)).status == 200
        remote.server.stop()
        until(lambda: remote.post("/readyz").status == 503)
        until(lambda: app.engine.clock.now() > message["lease_expires_at_unix"] * SECOND + SECOND)
        assert remote.call("queue/ack", **receipt(message)).status == 200


@pytest.mark.ledgers("sqlite", "postgres")
def test_a_drain_notices_an_ack_at_another_server(url: str) -> None:
    """The server ends long before the grace: `serving` waits for its end."""
    with App(url) as one, App(url) as two, serving(two) as there:
        with serving(one, drain_grace=10 * WAIT) as here:
            here.enqueue("a", b"x")
            message = here.take("a", visibility_timeout_seconds=int(10 * WAIT))
            assert there.call("queue/ack", **receipt(message)).status == 200
