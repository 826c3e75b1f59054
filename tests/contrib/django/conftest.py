"""A Django project in this process: its backend is replaced for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

from tests.contrib.django.settings import BACKEND, QUEUES
from towpath.contrib.django import close_apps


class Project:
    """The setting TASKS of the project."""

    def __init__(self) -> None:
        self._override: Any = None

    def tasks(self, options: dict[str, Any], **params: Any) -> None:
        """Let the alias `default` be the backend of Towpath with these OPTIONS."""
        self.close()
        backend = {"BACKEND": BACKEND, "QUEUES": QUEUES, "OPTIONS": options, **params}
        self._override = override_settings(TASKS={"default": backend})
        self._override.enable()

    def close(self) -> None:
        if self._override is not None:
            self._override.disable()
            self._override = None


@pytest.fixture
def project() -> Iterator[Project]:
    from tests.contrib.django.shop.tasks import ran

    project = Project()
    ran.clear()
    yield project
    project.close()
    close_apps()
