# type: ignore
from __future__ import annotations

from celery import chain, chord, group, shared_task
from celery.utils.log import get_task_logger

logger = get_task_logger(__name__)


class GatewayDown(Exception):
    pass


@shared_task
def price(item, count=1):
    return {"apple": 3, "pear": 4}[item] * count


@shared_task
def total(prices, currency="EUR"):
    return f"{sum(prices)} {currency}"


@shared_task(ignore_result=True)
def send_mail(text, to):
    logger.info("mail to %s: %s", to, text)
    return "never stored"


@shared_task(bind=True, max_retries=2, default_retry_delay=0)
def charge(self, amount):
    if self.request.retries < 2:
        raise self.retry(exc=GatewayDown(f"try {self.request.retries}"), countdown=0)
    return f"charged {amount} after {self.request.retries} retries"


@shared_task(bind=True, max_retries=1)
def never(self):
    try:
        raise GatewayDown("still down")
    except GatewayDown as error:
        raise self.retry(exc=error, countdown=0)


@shared_task(autoretry_for=(KeyError,), retry_kwargs={"max_retries": 1, "countdown": 0})
def broken(key):
    return {}[key]


@shared_task(acks_late=True)
def report(what):
    return f"report of {what}"


def order(items):
    prices = [price.s(item, count=n) for item, n in items.items()]
    return (group(prices) | total.s(currency="USD") | send_mail.s("customer")).apply_async()


def checkout():
    return chain(price.s("apple"), charge.s())()


def summary():
    return chord([price.s("apple"), price.s("pear", 2)])(total.s())
