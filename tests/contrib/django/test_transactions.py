"""Enqueue beside a database of Django: in its transaction on PostgreSQL, after its commit elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from asgiref.local import Local
from asgiref.sync import async_to_sync, sync_to_async
from django.db import IntegrityError, connections, transaction
from django.db.transaction import TransactionManagementError

from tests.contrib.django.conftest import Project
from tests.contrib.django.shop import tasks
from tests.contrib.django.shop.models import Order
from towpath import Query
from towpath.contrib.django import towpath_app
from towpath.contrib.django.compat import TaskResultDoesNotExist
from towpath.contrib.django.results import stored_call
from towpath.errors import WrongConnection

orders = Order.objects.using("shop")


@pytest.fixture
def entry(url: str, tmp_path: Path) -> dict[str, Any]:
    """The entry of the database `shop` in DATABASES: that of the ledger, if it is on PostgreSQL."""
    if not url.startswith("postgresql"):
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.db")}
    place = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": place.path[1:],
        "USER": place.username or "",
        "HOST": place.hostname or "",
        "PORT": place.port or "",
    }


@pytest.fixture
def shop(project: Project, entry: dict[str, Any]) -> Iterator[Any]:
    before = connections.settings
    connections.settings = connections.configure_settings({**before, "shop": entry})
    connection = connections["shop"]
    with connection.schema_editor() as editor:
        editor.create_model(Order)
    yield connection
    project.close()
    connection.close()
    # The thread of coroutines has objects for this alias too.
    asyncio.run(sync_to_async(connections.close_all)())
    connections._connections = Local(connections.thread_critical)
    connections.settings = before


def items() -> list[str]:
    """The first arguments of all jobs in the ledger, in the order of their enqueue."""
    found = towpath_app().ledger.find(Query(oldest_first=True)).jobs
    return [stored_call(job).args[0] for job in found]  # type: ignore[union-attr]


@pytest.mark.ledgers("postgres")
def test_a_job_is_part_of_the_transaction(project: Project, shop: Any) -> None:
    project.tasks({"database": "shop"})
    tasks.leave.enqueue("outside")
    with transaction.atomic(using="shop"):
        orders.create(item="apple")
        result = tasks.leave.enqueue("committed")
        assert items() == ["outside"]
        with pytest.raises(TaskResultDoesNotExist):
            tasks.leave.get_result(result.id)
    assert items() == ["outside", "committed"]
    with transaction.atomic(using="shop"):
        orders.create(item="pear")
        tasks.leave.enqueue("rolled back")
        transaction.set_rollback(True, using="shop")
    with transaction.atomic(using="shop"):
        tasks.leave.enqueue("outer")
        with transaction.atomic(using="shop"):
            orders.create(item="plum")
            tasks.leave.enqueue("inner")
            transaction.set_rollback(True, using="shop")
    assert items() == ["outside", "committed", "outer"]
    assert [order.item for order in orders.all()] == ["apple"]
    towpath_app().run(burst=True, concurrency=1)
    assert tasks.ran == ["outside", "committed", "outer"]
    result.refresh()
    assert result.status == "SUCCESSFUL"


@pytest.mark.ledgers("postgres")
def test_other_ways_to_open_a_transaction(project: Project, shop: Any) -> None:
    project.tasks({"database": "shop"})
    transaction.set_autocommit(False, using="shop")
    tasks.leave.enqueue("rolled back")
    transaction.rollback(using="shop")
    tasks.leave.enqueue("committed")
    transaction.commit(using="shop")
    transaction.set_autocommit(True, using="shop")

    def enqueue_in_a_coroutine() -> None:
        with transaction.atomic(using="shop"):
            async_to_sync(tasks.leave.aenqueue)("in a coroutine")
            transaction.set_rollback(True, using="shop")

    enqueue_in_a_coroutine()
    assert items() == ["committed"]
    asyncio.run(tasks.leave.aenqueue("outside"))
    assert items() == ["committed", "outside"]


@pytest.mark.ledgers("postgres")
def test_errors_in_a_transaction_are_those_of_django(project: Project, shop: Any) -> None:
    project.tasks({"database": "shop"})
    with transaction.atomic(using="shop"):
        with pytest.raises(IntegrityError), transaction.atomic(using="shop", savepoint=False):
            orders.create(id=None, item=None)
        with pytest.raises(TransactionManagementError, match="until the end of the 'atomic' block"):
            tasks.leave.enqueue("never")
    assert items() == []


@pytest.mark.ledgers("postgres")
def test_a_ledger_in_another_database_is_refused_in_a_transaction(
    project: Project, shop: Any, empty_database: str
) -> None:
    project.tasks({"url": empty_database, "database": "shop"})
    tasks.leave.enqueue("outside")
    with transaction.atomic(using="shop"):
        with pytest.raises(WrongConnection):
            tasks.leave.enqueue("inside")
        orders.create(item="apple")
    assert orders.count() == 1


@pytest.mark.ledgers("sqlite")
def test_an_enqueue_can_wait_for_the_commit(project: Project, shop: Any, url: str) -> None:
    project.tasks({"url": url, "enqueue_on_commit": "shop"})
    tasks.leave.enqueue("outside")
    with transaction.atomic(using="shop"):
        result = tasks.leave.enqueue("committed")
        assert (items(), result.enqueued_at) == (["outside"], None)
    assert result.enqueued_at is not None
    with transaction.atomic(using="shop"):
        asyncio.run(tasks.leave.aenqueue("committed in a thread"))
        tasks.leave.enqueue("rolled back")
        transaction.set_rollback(True, using="shop")
    project.tasks({"url": url})
    with transaction.atomic(using="shop"):
        tasks.leave.enqueue("at once")
        transaction.set_rollback(True, using="shop")
    assert items() == ["outside", "committed", "committed in a thread", "at once"]


@pytest.mark.ledgers("sqlite", "postgres")
def test_connections_do_not_outlive_an_attempt(project: Project, shop: Any, url: str) -> None:
    """As after a request: a connection is closed unless CONN_MAX_AGE allows to keep it."""
    project.tasks({"url": url})
    orders.create(item="apple")
    calls = [tasks.count_orders.enqueue("shop"), tasks.acount_orders.enqueue("shop")]
    towpath_app().run(burst=True)
    for call in calls:
        call.refresh()
        assert call.return_value == 1
    assert [used.connection for used in tasks.ran] == [None, None]


@pytest.mark.ledgers("postgres")
def test_a_task_in_the_transaction_of_a_test(project: Project, shop: Any) -> None:
    """As in `django.test.TestCase`."""
    project.tasks({"database": "shop"})
    with transaction.atomic(using="shop"), towpath_app().testing() as bench:
        orders.create(item="apple")
        result = tasks.count_orders.enqueue("shop")
        bench.drain()
        result.refresh()
        assert result.return_value == 1
        assert orders.count() == 1
        transaction.set_rollback(True, using="shop")
    assert orders.count() == 0
