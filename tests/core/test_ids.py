"""Identifiers grow, and what is derived stays."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from towpath.core.ids import IdSource, derived

times = st.lists(st.integers(0, 2**47 * 1000), min_size=1, max_size=50)


def ones(size: int) -> bytes:
    return b"\xff" * size


@given(times, st.randoms(use_true_random=False))
def test_ids_only_grow(times: list[int], chance: object) -> None:
    source = IdSource(chance.randbytes)  # type: ignore[attr-defined]
    made = [source.new(now) for now in times for _ in range(3)]
    assert made == sorted(set(made))


@given(st.integers(0, 2**47 * 1000), st.binary(min_size=10, max_size=10))
def test_version_and_variant(now: int, entropy: bytes) -> None:
    made = uuid.UUID(IdSource(lambda size: entropy[:size]).new(now))
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == now // 1000


def test_ids_grow_when_a_millisecond_is_full() -> None:
    source = IdSource(ones)
    source._growing = (1 << 48) - 1
    source._last_ms = 5
    made = [source.new(5000) for _ in range(3)]
    assert made == sorted(made)
    assert uuid.UUID(made[0]).int >> 80 == 6


@given(st.text(max_size=20), st.text(max_size=20), st.integers(0, 10**6))
def test_derived_is_stable_and_well_formed(parent: str, role: str, n: int) -> None:
    made = uuid.UUID(derived(parent, role, n))
    assert derived(parent, role, n) == str(made)
    assert (made.version, made.variant) == (8, uuid.RFC_4122)


def test_derived_does_not_change_between_releases() -> None:
    assert derived("parent", "role", 3) == "039a9d0c-c19b-82a5-a89c-49ad50e0a1ca"


def test_derived_ids_differ() -> None:
    made = {
        derived(parent, role, n) for parent in "ab" for role in ("then:done", "then:failed") for n in range(5)
    }
    assert len(made) == 20
