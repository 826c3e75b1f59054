"""The times at which a schedule fires: cron expressions, fixed intervals, daylight saving time, and the
handling of missed fires."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError
from msgspec.structs import force_setattr, replace

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.job import Spec, Word
from towpath.core.records import NoteRecords
from towpath.core.views import Readable
from towpath.errors import InvalidInput, shortened

GRACE: Final = 60 * SECOND
"""A fire that is later than this counts as missed."""
SHORTEST: Final = SECOND // 10
"""The shortest interval."""
CATCH_UP: Final = 100
"""Missed fires of one schedule that are made at a time."""
ALIASES: Final[Mapping[str, str]] = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


class Missed(Word):
    """The handling of missed fires: make none, the latest, or all of them."""

    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


def missed_of(word: object) -> Missed:
    if not isinstance(word, str) or word not in Missed._value2member_map_:
        raise InvalidInput(field="missed", value=word, expected="skip, once or all")
    return Missed(word)


def either_cron_or_every(what: str, given: object) -> InvalidInput:
    """The error of a schedule with both of them, or with neither."""
    message = f"{what} needs either cron or every; it has {shortened(given)}"
    return InvalidInput(field="schedule", value=given, expected="either cron or every", message=message)


def every_of(span: float | timedelta) -> int:
    """An interval in microseconds, from seconds or a timedelta."""
    every = checks.micros(span, "every")
    if every < SHORTEST:
        raise InvalidInput(field="every", value=span, expected=f"at least {SHORTEST / SECOND:g} seconds")
    return every


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When to fire (`cron` in the time zone `tz`, or `every` so many microseconds counted from `anchor`) and
    what to append (`spec`; its id is not used). The last four fields are set in the ledger. `declared` is the
    digest of the definition in the code: a change made at run time is kept when the same code starts
    again."""

    name: str
    spec: Spec
    cron: str | None = None
    every: int | None = None
    anchor: int = 0
    tz: str = "UTC"
    missed: Missed = Missed.SKIP
    paused: bool = False
    next_at: int = 0
    last_at: int | None = None
    declared: str = ""

    def __post_init__(self) -> None:
        checks.name("name", self.name)
        force_setattr(self, "missed", missed_of(self.missed))
        force_setattr(self, "spec", replace(self.spec, id=self.name))
        checks.whole("anchor", self.anchor)
        if (self.cron is None) == (self.every is None):
            given = {"cron": self.cron, "every": self.every}
            raise either_cron_or_every("a schedule", given)
        zone_of(self.tz)
        if self.every is not None:
            checks.whole("every", self.every, SHORTEST)
        else:
            _check_cron(self.cron, self.tz)
        if self.spec.after or self.spec.group or self.spec.ready_at is not None:
            raise InvalidInput(
                field="spec", value=self.spec.id, expected="a spec without after, group and ready_at"
            )

    @property
    def times(self) -> tuple[object, ...]:
        """The fields that decide when it fires."""
        return self.cron, self.every, self.anchor, self.tz

    def definition(self) -> str:
        """A digest of the definition, without the fields that change in the ledger."""
        plain = replace(self, paused=False, next_at=0, last_at=None, declared="")
        return hashlib.blake2b(msgspec.json.encode(plain, order="sorted"), digest_size=16).hexdigest()


SCHEDULES: Final = NoteRecords("schedule/", Schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStatus(Readable):
    """A schedule for users. `every` is in seconds; `args` are the arguments of its jobs."""

    name: str
    cron: str | None
    every: float | None
    tz: str
    missed: Missed
    paused: bool
    next_at: datetime | None
    """None while it is paused."""
    last_at: datetime | None
    queue: str
    kind: str
    args: Any


def schedule_status(schedule: Schedule) -> ScheduleStatus:
    spec = schedule.spec
    return ScheduleStatus(
        name=schedule.name,
        cron=schedule.cron,
        every=checks.optional_seconds(schedule.every),
        tz=schedule.tz,
        missed=schedule.missed,
        paused=schedule.paused,
        next_at=None if schedule.paused else checks.utc(schedule.next_at),
        last_at=checks.optional_utc(schedule.last_at),
        queue=spec.queue,
        kind=spec.kind,
        args=msgspec.json.decode(spec.payload) if spec.payload else None,
    )


def next_fire(schedule: Schedule, after: int) -> int:
    """The first fire later than `after`; `FOREVER` if there is none. A fixed time of day that occurs twice in
    autumn is fired the first time only; one that is skipped in spring is fired when the gap ends."""
    if schedule.every is not None:
        return schedule.anchor + ((after - schedule.anchor) // schedule.every + 1) * schedule.every
    assert schedule.cron is not None
    expression, offset = _expression(schedule.cron)
    after -= offset
    for moment in CronSim(expression, datetime.fromtimestamp(after // SECOND, zone_of(schedule.tz))):
        # In the repeated hour of autumn cronsim starts with the first pass, which is in the past.
        if (fire := int(moment.timestamp()) * SECOND) > after:
            return fire + offset
    return checks.FOREVER


def plan(schedule: Schedule, now: int, most: int = CATCH_UP) -> tuple[list[int], int]:
    """The fires of a due schedule to make at `now`, and the next fire after them."""
    if schedule.missed is not Missed.ALL:
        latest = _latest(schedule, now)
        late = schedule.missed is Missed.SKIP and now - latest > GRACE
        return ([] if late else [latest]), next_fire(schedule, now)
    times, following = [schedule.next_at], next_fire(schedule, schedule.next_at)
    while following <= now and len(times) < most:
        times.append(following)
        following = next_fire(schedule, following)
    return times, following


def _latest(schedule: Schedule, now: int) -> int:
    """The last fire up to `now`, by binary search: there may be millions since `next_at`."""
    fire, end = schedule.next_at, now
    while fire < end:
        middle = (fire + end) // 2
        if (found := next_fire(schedule, middle)) <= now:
            fire = found
        else:
            end = middle
    return fire


def _expression(cron: str) -> tuple[str, int]:
    """The expression for cronsim, and the offset to add to its times. A leading field with a single second is
    such an offset, because cronsim handles daylight saving time only in expressions of five fields."""
    cron = ALIASES.get(cron.strip().lower(), cron)
    first, _, rest = cron.strip().partition(" ")
    if len(cron.split()) == 6 and first.isdecimal() and int(first) < 60:
        return rest, int(first) * SECOND
    return cron, 0


def zone_of(tz: object) -> tzinfo:
    zone = _found_zone(tz) if isinstance(tz, str) else None
    if zone is None:
        raise InvalidInput(field="tz", value=tz, expected="the name of a time zone, such as Europe/Berlin")
    return zone


@lru_cache(maxsize=256)
def _found_zone(tz: str) -> tzinfo | None:
    if tz == "UTC":
        return UTC
    try:
        return ZoneInfo(tz)
    except (OSError, ValueError, LookupError):
        return None


def _check_cron(cron: object, tz: str) -> None:
    if not isinstance(cron, str) or len(cron) > checks.MAX_NAME:
        raise InvalidInput(field="cron", value=cron, expected="text such as '*/5 * * * *' or '@daily'")
    _check_expression(cron, tz)


@lru_cache(maxsize=1024)
def _check_expression(cron: str, tz: str) -> None:
    try:
        expression, _ = _expression(cron)
        next(CronSim(expression, datetime.fromtimestamp(0, zone_of(tz))))
    except StopIteration:
        raise InvalidInput(
            field="cron", value=cron, expected="an expression that matches a time within 50 years"
        ) from None
    except (CronSimError, AssertionError, ValueError, TypeError, LookupError) as error:
        names = ", ".join(ALIASES)
        expected = (
            "five fields, minute hour day month weekday (optionally with seconds in front), "
            f"or one of {names} ({error})"
        )
        raise InvalidInput(field="cron", value=cron, expected=expected) from None
