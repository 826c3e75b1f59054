"""Who looks after a commit, and how often."""

from __future__ import annotations

import pytest

from towpath.runtime.claims.leases import MAX_REFRESH_PAUSE, MIN_REFRESH_PAUSE, REFRESH_SHARE, Refresher


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Eye:
    def __init__(self, time: Time, cost: float = 0.0) -> None:
        self.stale = False
        self.looks = 0
        self.error: Exception | None = None
        self._time, self._cost = time, cost

    def look(self) -> None:
        self.looks += 1
        self._time.now += self._cost
        if self.error is not None:
            raise self.error


def test_nobody_looks_while_nothing_is_committed() -> None:
    time = Time()
    lookout, eye = Refresher(time), Eye(time)
    lookout.add(eye)
    for _ in range(100):
        assert lookout.go(False) is None
        time.now += 1
    assert eye.looks == 0
    eye.stale = True
    assert (lookout.go(False), eye.looks) == (None, 1)


@pytest.mark.parametrize(
    ("cost", "pause"),
    [(0.0, MIN_REFRESH_PAUSE), (0.002, REFRESH_SHARE * 0.002), (10.0, MAX_REFRESH_PAUSE)],
    ids=["cheap", "dear", "very dear"],
)
def test_the_pause_is_a_multiple_of_the_cost_and_the_last_commit_is_seen(cost: float, pause: float) -> None:
    time = Time()
    lookout, eye = Refresher(time), Eye(time, cost)
    lookout.add(eye)
    assert (lookout.go(True), eye.looks) == (None, 1)
    assert lookout.go(True) == pytest.approx(pause)
    assert eye.looks == 1
    time.now += pause + 1e-6
    assert (lookout.go(False), eye.looks) == (None, 2)


def test_a_look_that_failed_is_made_again_and_who_left_is_not_called() -> None:
    time = Time()
    lookout, eye = Refresher(time), Eye(time)
    lookout.add(eye)
    eye.error = ValueError("dark")
    with pytest.raises(ValueError, match="dark"):
        lookout.go(True)
    assert eye.stale
    eye.error = None
    time.now += 1
    lookout.go(False)
    assert (eye.looks, eye.stale) == (2, False)
    lookout.remove(eye)
    time.now += 1
    lookout.go(True)
    assert eye.looks == 2
