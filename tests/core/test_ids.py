"""Identifiers grow, and derived ids are stable."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from towpath.core.ids import IdSource, denotes, derived, prefix_range, short_id, short_seq

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


@given(st.integers(1, 2**53), st.uuids())
def test_short_ids(seq: int, made: uuid.UUID) -> None:
    id = str(made)
    short = short_id(seq, id)
    assert short == f"{seq}-{id[-4:]}"
    assert short_seq(short) == seq
    assert denotes(short, seq, id)
    assert not denotes(short, seq + 1, id)
    assert not denotes(str(seq), seq, id)


def test_an_id_of_the_user_is_its_own_short_id() -> None:
    for id in ("order-17", "7", "0199AA00-0000-7000-8000-000000000000", "x" * 36):
        assert short_id(3, id) == id
        assert denotes(id, 3, id)


@given(st.text("abc\u00e9\U0010fffe", max_size=8), st.text("abc\u00e9\U0010fffe", max_size=8))
def test_the_range_has_what_the_text_denotes(text: str, id: str) -> None:
    first, end = (bound.encode() for bound in prefix_range(text))
    assert denotes(text, 1, id) is (first <= id.encode() < end)
