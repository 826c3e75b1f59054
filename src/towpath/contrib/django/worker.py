"""The Apps of TASKS by alias, for the command line: `towpath worker towpath.contrib.django.worker:default`,
with DJANGO_SETTINGS_MODULE. Importing it sets up Django and imports the module `tasks` of each installed
application."""

from __future__ import annotations

import django
from django.apps import apps

from towpath.contrib.django.backend import towpath_app
from towpath.contrib.django.bridge import DjangoApp, discover

if not apps.ready:
    django.setup()
discover()


def __getattr__(alias: str) -> DjangoApp:
    if alias.startswith("__"):
        raise AttributeError(alias)
    return towpath_app(alias)
