"""Sets Django up for the tests; imported before everything else of Django."""

from __future__ import annotations

from importlib.util import find_spec

import django
from django.conf import settings

BACKEND = "towpath.contrib.django.TowpathBackend"
QUEUES = ["default", "mail"]

if not settings.configured:
    backport = [] if find_spec("django.tasks") else ["django_tasks"]
    settings.configure(
        USE_TZ=True,
        INSTALLED_APPS=["towpath.contrib.django", "tests.contrib.django.shop", *backport],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        TASKS={"default": {"BACKEND": BACKEND, "QUEUES": QUEUES}},
    )
    django.setup()
