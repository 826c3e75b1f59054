"""The bucket, the turns between streams and the time of day, with a manual clock."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from towpath.core.bandwidth import BandwidthLimits, Bucket, Direction, Meter, Stream, plan, speed
from towpath.errors import InvalidInput


class Reader:
    """A stream that requests its next piece as soon as it has the last one."""

    def __init__(self, direction: Direction, piece: int) -> None:
        self.stream = Stream(direction)
        self.piece = piece
        self.had = 0
        self.left = 0
        self.asked = 0

    def ask(self, meter: Meter) -> None:
        if self.left == 0:
            self.left = self.piece
        self.asked = meter.ask(self.stream, self.left)

    def got(self) -> None:
        self.had += self.asked
        self.left -= self.asked


def simulate(meter: Meter, readers: list[Reader], start: float, end: float) -> None:
    """All streams read from `start` to `end`: time advances from turn to turn."""
    by_stream = {id(reader.stream): reader for reader in readers}
    for reader in readers:
        if reader.stream.wants == 0:
            reader.ask(meter)
    now = start
    while now < end:
        for stream in meter.grant(now):
            reader = by_stream[id(stream)]
            reader.got()
            reader.ask(meter)
        due = meter.due(now)
        assert due is not None
        now = max(due[1], now)


def within(value: float, wanted: float, share: float) -> bool:
    return abs(value - wanted) <= share * wanted


def test_eight_streams_of_all_sizes_keep_to_the_rate_and_share_it_evenly() -> None:
    meter = Meter(BandwidthLimits(down=1_000_000))
    readers = [
        Reader("down", piece) for piece in (100, 1_000, 4_096, 16_384, 65_536, 65_536, 262_144, 1_000_000)
    ]
    simulate(meter, readers, 100.0, 110.0)
    assert within(sum(reader.had for reader in readers), 10_000_000, 0.05)
    for reader in readers:
        assert within(reader.had, 10_000_000 / 8, 0.05), reader.piece
    assert meter.moved == {"down": sum(reader.had for reader in readers), "up": 0}


@pytest.mark.parametrize("rate", [100, 10_000, 5_000_000, 200_000_000])
def test_every_rate_is_kept(rate: int) -> None:
    meter = Meter(BandwidthLimits(up=rate))
    readers = [Reader("up", 65_536) for _ in range(8)]
    simulate(meter, readers, 0.0, 10.0)
    assert within(sum(reader.had for reader in readers), 10 * rate, 0.05)


def test_directions_have_their_own_limits_and_the_total_holds_for_both() -> None:
    meter = Meter(BandwidthLimits(up=200_000, down=900_000, total=1_000_000))
    ups, downs = [Reader("up", 4_096) for _ in range(4)], [Reader("down", 4_096) for _ in range(4)]
    simulate(meter, ups + downs, 0.0, 10.0)
    assert within(sum(reader.had for reader in ups), 2_000_000, 0.05)
    assert within(sum(reader.had for reader in downs), 8_000_000, 0.05)


def test_a_total_alone_is_shared_by_all_streams() -> None:
    meter = Meter(BandwidthLimits(total=800_000))
    ups, downs = [Reader("up", 4_096) for _ in range(2)], [Reader("down", 4_096) for _ in range(6)]
    simulate(meter, ups + downs, 0.0, 10.0)
    assert within(meter.moved["up"] + meter.moved["down"], 8_000_000, 0.05)
    for reader in ups + downs:
        assert within(reader.had, 1_000_000, 0.1)


def test_without_limits_no_stream_waits() -> None:
    meter, stream = Meter(BandwidthLimits()), Stream("up")
    assert meter.ask(stream, 10**9) == 10**9
    assert meter.grant(0.0) == [stream]


def test_a_rate_changes_in_the_middle() -> None:
    meter = Meter(BandwidthLimits(down=1_000_000))
    readers = [Reader("down", 4_096) for _ in range(8)]
    simulate(meter, readers, 0.0, 5.0)
    meter.change(BandwidthLimits(down=100_000), 5.0)
    simulate(meter, readers, 5.0, 10.0)
    assert within(sum(reader.had for reader in readers), 5_500_000, 0.05)


def test_a_debt_is_paid_at_the_new_rate() -> None:
    bucket = Bucket(100)
    bucket.take(1_000, 0.0)
    bucket.change(1_000, 0.0)
    assert bucket.open_at == pytest.approx(0.99, abs=0.02)
    bucket.change(None, 0.5)
    assert bucket.open_at == 0.5


def test_a_late_stream_does_not_catch_up() -> None:
    meter = Meter(BandwidthLimits(down=1_000_000))
    early, late = Reader("down", 4_096), Reader("down", 4_096)
    simulate(meter, [early], 0.0, 5.0)
    before = early.had
    simulate(meter, [early, late], 5.0, 10.0)
    assert within(late.had, 2_500_000, 0.05)
    assert within(early.had - before, 2_500_000, 0.05)


def test_a_withdrawn_stream_is_not_served() -> None:
    meter, gone, stays = Meter(BandwidthLimits(down=1_000)), Stream("down"), Stream("down")
    meter.ask(gone, 10)
    meter.ask(stays, 10)
    meter.withdraw(gone)
    assert meter.grant(0.0) == [stays]
    assert meter.due(0.0) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10MB/s", 10_000_000),
        ("500 kB/s", 500_000),
        ("500KB/s", 500_000),
        ("1.5MiB/s", 1_572_864),
        ("7/s", 7),
        ("7B/s", 7),
        (1000, 1000),
        (None, None),
    ],
)
def test_speeds(text: object, value: int | None) -> None:
    assert speed("up", text) == value


@pytest.mark.parametrize(
    "text",
    ["10Mb/s", "10MB", "fast", "-1MB/s", "0MB/s", "0.0001B/s", 0, -5, True, 1.5, b"1MB/s", "9999999TB/s"],
)
def test_bad_speeds_are_refused_with_the_field(text: object) -> None:
    with pytest.raises(InvalidInput, match=r"^up is .*10MB/s"):
        speed("up", text)


def minute(text: str) -> int:
    return round(datetime.fromisoformat(f"2024-01-15T{text}:00").replace(tzinfo=UTC).timestamp()) * 1_000_000


def test_the_time_of_day_decides() -> None:
    found = plan(
        None,
        "50MB/s",
        None,
        [("08:00-18:00", "2MB/s"), ("22:00-06:00", {"down": None, "up": "1MB/s"})],
        "UTC",
    )
    day, night, rest = (
        BandwidthLimits(None, 50_000_000, 2_000_000),
        BandwidthLimits(1_000_000, None, None),
        BandwidthLimits(None, 50_000_000, None),
    )
    times = {
        "07:59": rest,
        "08:00": day,
        "17:59": day,
        "18:00": rest,
        "22:00": night,
        "00:00": night,
        "05:59": night,
        "06:00": rest,
    }
    assert {text: found.at(minute(text)) for text in times} == times


def test_the_time_zone_decides_what_time_it_is() -> None:
    found = plan(None, None, None, [("08:00-18:00", "2MB/s")], "Asia/Tokyo")
    assert found.at(minute("23:30")).total == 2_000_000
    assert found.at(minute("12:00")).total is None


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ([("08:00-18:00", "1MB/s"), ("17:59-20:00", "2MB/s")], r"^schedule\[1\] is .*overlap schedule\[0\]"),
        ([("22:00-06:00", "1MB/s"), ("05:00-07:00", "2MB/s")], r"^schedule\[1\] is .*overlap schedule\[0\]"),
        ([("25:00-26:00", "1MB/s")], r"^schedule\[0\] is .*00:00 to 24:00"),
        ([("08:60-09:00", "1MB/s")], r"^schedule\[0\] is "),
        ([("08:00-08:00", "1MB/s")], r"^schedule\[0\] is "),
        ([("24:00-08:00", "1MB/s")], r"^schedule\[0\] is "),
        ([("noon-18:00", "1MB/s")], r"^schedule\[0\] is "),
        ([(8, "1MB/s")], r"^schedule\[0\] is "),
        ([("08:00-18:00", "quick")], r"^schedule\[0\] is 'quick'"),
        ([("08:00-18:00", {"down": "quick"})], r"^schedule\[0\]\.down is 'quick'"),
        ([("08:00-18:00", {"sideways": "1MB/s"})], r"^schedule\[0\] is .*up, down and total"),
        ([("08:00-18:00", {})], r"^schedule\[0\] is "),
        ([("08:00-18:00",)], r"^schedule\[0\] is "),
        (["08:00-18:00"], r"^schedule\[0\] is "),
        ("08:00-18:00", r"^schedule is "),
        (None, r"^schedule is "),
    ],
)
def test_bad_schedules_are_refused_with_the_field(schedule: object, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        plan(None, None, None, schedule, "UTC")


def test_an_unknown_time_zone_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^tz is 'Mars/Base'"):
        plan(None, None, None, [], "Mars/Base")
