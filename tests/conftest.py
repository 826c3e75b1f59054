"""Fixtures for all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from towpath.testing import ManualClock

settings.register_profile("towpath", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("towpath")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
