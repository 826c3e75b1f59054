"""Test a month of schedules, delays and retries in milliseconds. `pytest cron_in_tests.py` runs it too."""

from datetime import timedelta

import towpath
from towpath import App

app = App("memory://")
sent: list[str] = []


@app.task
def remind(user: str) -> None:
    sent.append(user)


@app.cron("0 3 * * *", tz="Europe/Vienna", args={"day": "yesterday"})
def nightly(day: str) -> None:
    if towpath.current().attempt == 1:
        raise OSError("disk not ready")


@app.every(timedelta(hours=6))
def sweep() -> None:
    pass


def test_a_month() -> None:
    with app.testing() as bench:
        remind.options(delay=timedelta(days=14)).enqueue("ada")
        bench.advance(timedelta(days=13))
        assert sent == []
        bench.advance(timedelta(days=17))
        assert sent == ["ada"]
        # Jobs of the last seven days are kept; older ones were deleted by their retention.
        nights = bench.jobs(nightly)
        assert {job.attempts for job in nights} == {2}
        assert len(nights) == 7
        bench.assert_enqueued(nightly, day="yesterday")
        bench.assert_not_enqueued(remind, user="bob")


if __name__ == "__main__":
    test_a_month()
    print(f"a month of {nightly.kind}, {sweep.kind} has passed")
