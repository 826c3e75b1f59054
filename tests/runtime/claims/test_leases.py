"""Which objects are refreshed after a commit, and how often."""

from __future__ import annotations

import pytest

from towpath.runtime.claims.leases import MAX_REFRESH_PAUSE, MIN_REFRESH_PAUSE, REFRESH_SHARE, Refresher


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Item:
    def __init__(self, time: Time, cost: float = 0.0) -> None:
        self.stale = False
        self.refreshes = 0
        self.error: Exception | None = None
        self._time, self._cost = time, cost

    def refresh(self) -> None:
        self.refreshes += 1
        self._time.now += self._cost
        if self.error is not None:
            raise self.error


def test_no_read_without_a_commit() -> None:
    time = Time()
    refresher, item = Refresher(time), Item(time)
    refresher.add(item)
    for _ in range(100):
        assert refresher.run(False) is None
        time.now += 1
    assert item.refreshes == 0
    item.stale = True
    assert (refresher.run(False), item.refreshes) == (None, 1)


@pytest.mark.parametrize(
    ("cost", "pause"),
    [(0.0, MIN_REFRESH_PAUSE), (0.002, REFRESH_SHARE * 0.002), (10.0, MAX_REFRESH_PAUSE)],
    ids=["cheap", "dear", "very dear"],
)
def test_the_pause_is_a_multiple_of_the_cost_and_the_last_commit_is_seen(cost: float, pause: float) -> None:
    time = Time()
    refresher, item = Refresher(time), Item(time, cost)
    refresher.add(item)
    assert (refresher.run(True), item.refreshes) == (None, 1)
    assert refresher.run(True) == pytest.approx(pause)
    assert item.refreshes == 1
    time.now += pause + 1e-6
    assert (refresher.run(False), item.refreshes) == (None, 2)


def test_a_failed_refresh_is_repeated_and_a_removed_object_is_not_called() -> None:
    time = Time()
    refresher, item = Refresher(time), Item(time)
    refresher.add(item)
    item.error = ValueError("dark")
    with pytest.raises(ValueError, match="dark"):
        refresher.run(True)
    assert item.stale
    item.error = None
    time.now += 1
    refresher.run(False)
    assert (item.refreshes, item.stale) == (2, False)
    refresher.remove(item)
    time.now += 1
    refresher.run(True)
    assert item.refreshes == 2
