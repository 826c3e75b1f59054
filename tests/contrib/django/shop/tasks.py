"""The tasks of the test project."""

from __future__ import annotations

from typing import Any

from django.db import connections

from tests.contrib.django.shop.models import Order
from towpath import Cancel, Fail, Retry, current
from towpath.contrib.django import task_options

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

ran: list[Any] = []
"""What the tasks of this process have left for the tests."""


class OutOfStock(Exception):
    pass


@task
def price(item: str, count: int = 1) -> dict[str, Any]:
    return {"item": item, "price": 3 * count}


@task
async def aprice(item: str) -> str:
    return item.upper()


@task
def refuse(item: str) -> None:
    raise OutOfStock(item)


@task
@task_options(max_attempts=3, backoff=0)
def flaky(item: str) -> int:
    attempt = current().attempt
    if attempt < 3:
        raise OutOfStock(f"{item}, attempt {attempt}")
    return attempt


@task
@task_options(max_attempts=2, backoff=0)
async def aflaky() -> None:
    raise Retry("not yet", after=0)


@task
def leave(item: str) -> None:
    ran.append(item)


@task(takes_context=True)
def describe(context: Any, item: str) -> list[Any]:
    result = context.task_result
    return [item, context.attempt, result.status, result.args, result.backend, len(result.worker_ids)]


@task(queue_name="mail", priority=7)
def mail(to: str) -> str:
    return f"to {to}"


@task
def reject(how: str) -> None:
    raise {"fail": Fail, "cancel": Cancel}[how]("no such order")


@task
def unserializable() -> object:
    return object()


@task
def count_orders(database: str) -> int:
    ran.append(connections[database])
    return int(Order.objects.using(database).count())


@task
async def acount_orders(database: str) -> int:
    ran.append(connections[database])
    return int(await Order.objects.using(database).acount())
