"""The Django application: it has the management command `towpath_worker`."""

from __future__ import annotations

from django.apps import AppConfig


class TowpathConfig(AppConfig):
    name = "towpath.contrib.django"
    label = "towpath"
