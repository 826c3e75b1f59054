# type: ignore
from __future__ import annotations

import os

from celery import Celery
from celery.schedules import crontab

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend="redis://localhost/0", include=["shop.tasks"])
app.conf.update(
    task_serializer="json",
    task_routes={"shop.tasks.send_*": {"queue": "mail"}},
    timezone="Europe/Berlin",
)
app.conf.beat_schedule = {
    "nightly": {"task": "shop.tasks.report", "schedule": crontab(hour=3, minute=0), "args": ("all",)},
    "often": {"task": "shop.tasks.report", "schedule": 30.0, "kwargs": {"what": "new"}},
}
app.autodiscover_tasks(["shop"])
