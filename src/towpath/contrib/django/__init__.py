"""The backend for the Tasks framework of Django: `django.tasks` (Django 6.0), or the package django-tasks.

    TASKS = {
        "default": {
            "BACKEND": "towpath.contrib.django.TowpathBackend",
            "OPTIONS": {"url": "sqlite:///jobs.db"},
        }
    }

With `"OPTIONS": {"database": "default"}` the ledger is in a PostgreSQL database of Django, and an enqueue
inside `transaction.atomic` is a part of that transaction. `manage.py towpath_worker` runs the tasks; it needs
`towpath.contrib.django` in INSTALLED_APPS. See docs/frameworks/django.md."""

from __future__ import annotations

from towpath.contrib.django.backend import TowpathBackend, towpath_app
from towpath.contrib.django.bridge import close_apps
from towpath.contrib.django.configuration import DjangoOption, task_options

__all__ = ["DjangoOption", "TowpathBackend", "close_apps", "task_options", "towpath_app"]
