"""Random values for commands: few ids, keys, queues and groups, so that commands often conflict."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import (
    Selector,
)
from towpath.core.job import (
    After,
    Done,
    FailOutcome,
    Key,
    KeyPolicy,
    Outcome,
    Refuse,
    Release,
    RetryOutcome,
    SnoozeOutcome,
    Spec,
    State,
    Stop,
)

QUEUES = ("a/x", "a/y", "b/x", "plain")
BRIEF = ("brief/0", "brief/1", "brief/2")
"""Queues that are mostly without jobs."""
PATTERNS = (*QUEUES, "*", "a/*", "*x", "nowhere")
WANTED = (*PATTERNS, "plain,a/y,plain", "b/*,plain")
PARTS = ("p", "r", "s")
KEYS = ("k", "l", "m")
PARENTS = ("u", "v")
GENERATIONS = (0, 1, 2)
NOTES = ("n", "o")
TOKENS = ("0", "1", "2")
OWNERS = ("w1", "w2")
SPANS = (1, SECOND // 2, SECOND, 5 * SECOND, 40 * SECOND)
SUSPECTS = (None, None, 0, 1, 1)
LEASES = (SECOND, 10 * SECOND, 60 * SECOND)
TERMS: tuple[tuple[str | None, int | None, tuple[str, ...]], ...] = (
    (None, None, ()),
    (None, None, ("mail",)),
    ("w3", None, ()),
    ("w2", 60 * SECOND, ("mail", "")),
)
"""Owner, lease and excluded kinds of a want."""
STEPS = (0, 0, 1, SECOND // 10, SECOND // 2, SECOND, SECOND, 4 * SECOND, 20 * SECOND, -SECOND)
LEAPS = (70 * SECOND, HOUR // 2, HOUR, 3 * DAY, 8 * DAY, -HOUR)


class Draws:
    """Values drawn from `chance`. `held` and `known` are the claims and ids that `observe` has seen; `made`,
    `opened` and `uploaded` count the created ids, groups and blobs, so that old ones become rare."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.held: list[tuple[str, int]] = []
        self.known: list[str] = []
        self.versions = [0]
        self.made = 0
        self.opened = 0
        self.uploaded = 0

    def _maybe(self, odds: float) -> bool:
        return self.chance.random() < odds

    def _some(self, values: Sequence[Any], most: int) -> tuple[Any, ...]:
        return tuple(self.chance.choices(values, k=self.chance.randint(1, most)))

    def _id(self) -> str:
        """The id of a job: mostly of an existing one, sometimes of one that does not exist."""
        if self.known and self._maybe(0.93):
            return self.chance.choice(self.known)
        return f"j{self.chance.randint(0, self.made + 2)}"

    def _group(self) -> str:
        """The id of a group; now and then of one that callbacks open."""
        number = max(0, self.opened - self.chance.choice((-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3)))
        return f"h{number}" if self._maybe(0.05) else f"g{number}"

    def _token(self, kind: str) -> str:
        return f"{kind}-{self.chance.choice(TOKENS)}" if self._maybe(0.2) else ""

    def _pair(self) -> tuple[str, int]:
        """A claim of any owner; now and then a stale or invented one."""
        if self.held and self._maybe(0.9):
            return (
                self.held.pop(self.chance.randrange(len(self.held)))
                if self._maybe(0.8)
                else self.chance.choice(self.held)
            )
        return self._id(), self.chance.randint(0, 4)

    def specs(self, most: int) -> tuple[Spec, ...]:
        """Some specs that may depend on each other, in both directions."""
        ids = [
            self._id() if self._maybe(0.2) else self._new_id() for _ in range(self.chance.randint(1, most))
        ]
        return tuple(self.spec(id, ids) for id in dict.fromkeys(ids))

    def _new_id(self) -> str:
        self.made += 1
        return f"j{self.made}"

    def spec(self, id: str, peers: Sequence[str] = ()) -> Spec:
        chance = self.chance
        fields: dict[str, Any] = {"id": id, "queue": chance.choice(QUEUES)}
        if self._maybe(0.3):
            fields["priority"] = chance.choice((-1, 0, 5, "high", "low"))
        if self._maybe(0.3):
            fields["part"] = chance.choice(PARTS)
        if self._maybe(0.15):
            fields["delay"] = chance.choice(SPANS)
        if self._maybe(0.1):
            fields["ttl"] = chance.choice(SPANS)
        if self._maybe(0.2):
            fields["max_attempts"] = chance.choice((1, 2))
        if self._maybe(0.2):
            fields["max_losses"] = chance.choice((1, 2))
        if self._maybe(0.1):
            fields["retention"] = chance.choice((0, SECOND, HOUR))
        if self._maybe(0.35):
            fields["after"] = tuple(self._after(peers) for _ in range(chance.randint(1, 3)))
        if self._maybe(0.25):
            fields["group"] = self._group()
        if self._maybe(0.3):
            fields["key"] = self._key(serial="part" not in fields)
        if self._maybe(0.2):
            fields["payload"] = chance.choice((b"1", b"\0" * 9))
            fields["headers"] = {"h": chance.choice("12")}
            fields["kind"] = chance.choice(("mail", "copy"))
            fields["correlation_id"] = chance.choice(("c", "d"))
        if self._maybe(0.2):
            fields["parent"] = chance.choice(PARENTS)
            fields["generation"] = chance.choice(GENERATIONS)
        return Spec(**fields)

    def _after(self, peers: Sequence[str]) -> After:
        anyway = self._maybe(0.4)
        if self._maybe(0.2):
            return After(self._group(), anyway, group=True)
        return After(self.chance.choice(peers) if peers and self._maybe(0.25) else self._id(), anyway)

    def _key(self, serial: bool) -> Key:
        policy = self.chance.choice(
            (KeyPolicy.UNIQUE, KeyPolicy.REPLACE, KeyPolicy.REPLACE, *([KeyPolicy.SERIAL] * serial))
        )
        window = self.chance.choice((0, 0, SECOND, HOUR)) if policy is KeyPolicy.UNIQUE else 0
        return Key(self.chance.choice(KEYS), policy, window)

    def outcome(self) -> Outcome:
        delay, error = self.chance.choice((0, 0, *SPANS)), self.chance.choice((None, "boom"))
        outcomes: tuple[Outcome, ...] = (
            Done(self.chance.choice((None, b"result"))),
            Done(),
            Done(),
            RetryOutcome(delay, error),
            RetryOutcome(delay, error),
            SnoozeOutcome(delay),
            Release(delay),
            Refuse(delay, error),
            FailOutcome(error),
            FailOutcome(error),
            Stop(error),
        )
        return self.chance.choice(outcomes)

    def selector(self) -> Selector:
        fields: dict[str, Any] = {}
        if self._maybe(0.5):
            fields["ids"] = tuple({self._id() for _ in range(self.chance.randint(1, 4))})
        choices = {"queue": PATTERNS, "part": PARTS, "key": KEYS, "kind": ("mail", "copy", "")}
        for field, values in choices.items():
            if self._maybe(0.15):
                fields[field] = self.chance.choice(values)
        if self._maybe(0.15):
            fields["group"] = self._group()
        if self._maybe(0.15):
            fields["states"] = self._some(tuple(State), 3)
        if self._maybe(0.1):
            fields["parent"] = self.chance.choice(PARENTS)
        if self._maybe(0.05):
            fields["generation"] = self.chance.choice(GENERATIONS)
        return Selector(**fields) if fields else Selector(queue=self.chance.choice(QUEUES))
