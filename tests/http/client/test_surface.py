"""The two surfaces of the client have the same methods, and the client needs no package of the server."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.support.shell import python
from towpath.http.client import aclient, client, consumer, messages

PAIRS = [
    (getattr(module, name), getattr(twins, f"Async{name}"))
    for module, twins, names in (
        (client, aclient, "QueueClient LockClient ReceivedMessages WatchedQueue"),
        (messages, messages, "ReceivedMessage HeldLock StateDocumentClient"),
        (consumer, consumer, "MessageConsumer"),
    )
    for name in names.split()
]
# The runner of coroutines, which only the classes that block need.
OWN = {"ReceivedMessage", "HeldLock", "StateDocumentClient"}
NAMES = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__", "__anext__": "__next__"}


def surface(kind: type) -> dict[str, str]:
    """Public methods and properties with their signatures, without what makes a coroutine."""
    found = {}
    for name, value in inspect.getmembers(kind):
        if name.startswith("_") and name not in (*NAMES, *NAMES.values(), "__init__"):
            continue
        if name == "__init__" and kind.__name__.removeprefix("Async") in OWN:
            continue
        signature = str(inspect.signature(value)) if callable(value) else "property"
        for word in ("Async", "Awaitable[object]", "object"):
            signature = signature.replace(word, "")
        found[NAMES.get(name, name)] = signature
    return found


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=[one.__name__ for one, _ in PAIRS])
def test_the_surfaces_are_the_same(one: type, other: type) -> None:
    assert surface(one) == surface(other)


def test_a_difference_would_be_noticed() -> None:
    class Other:
        async def ack(self, more: int) -> None: ...

    class One:
        def ack(self) -> None: ...

    assert surface(One) != surface(Other)


def test_every_class_is_compared() -> None:
    modules: list[Any] = [client, aclient, messages, consumer]
    twins = {
        name
        for module in modules
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if name.startswith("Async") and kind.__module__ == module.__name__
    }
    assert twins == {other.__name__ for _, other in PAIRS}


BLOCKED = """
import sys

SERVER = ("litestar", "uvicorn", "uvloop", "httptools", "cryptography", "multipart")

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SERVER:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Blocked())
import towpath.http.client
from towpath.http.client import QueueClient
QueueClient("http://127.0.0.1:1").close()
import towpath.cli.client
print("imported")
"""


def test_the_client_needs_no_package_of_the_server(tmp_path: Path) -> None:
    ran = python(tmp_path, BLOCKED)
    assert (ran.out, ran.code) == ("imported\n", 0), ran.err
