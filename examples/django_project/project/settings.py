"""With PGDATABASE in the environment everything is in PostgreSQL, else in two SQLite files."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent
SECRET_KEY = "only for this example"
DEBUG = True
USE_TZ = True
ROOT_URLCONF = "project.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = ["towpath.contrib.django", "orders"]
if find_spec("django.tasks") is None:  # before Django 6.0
    INSTALLED_APPS.append("django_tasks")

LEDGER: dict[str, Any]
if "PGDATABASE" in os.environ:
    DATABASE = {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"]}
    # The ledger is in the same database: a task is a part of the transaction that enqueues it.
    LEDGER = {"database": "default"}
else:
    DATABASE = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(FOLDER / "db.sqlite3")}
    # The ledger is a file of its own: a task is enqueued when the transaction has committed.
    LEDGER = {"url": f"sqlite:///{FOLDER / 'jobs.db'}", "enqueue_on_commit": True}

DATABASES = {"default": DATABASE}
TASKS = {
    "default": {
        "BACKEND": "towpath.contrib.django.TowpathBackend",
        "QUEUES": ["default", "mail"],
        "OPTIONS": LEDGER,
    }
}
