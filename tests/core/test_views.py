"""Pages and counts."""

from __future__ import annotations

import base64
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.core.job import COLUMNS, State
from towpath.core.views import Counts, Query, page_seq, page_token
from towpath.errors import InvalidInput


@given(st.integers(0, 2**63 - 1))
def test_a_page_token_comes_back(seq: int) -> None:
    token = page_token(seq)
    assert page_seq(token) == seq
    assert Query(page=token).page == token
    assert token.isascii()
    assert "=" not in token


@given(st.text(max_size=70))
def test_only_what_was_given_out_is_taken(token: str) -> None:
    with suppress(InvalidInput):
        assert page_token(page_seq(token)) == token


@pytest.mark.parametrize(
    "token",
    [
        "",
        "=",
        "!!!",
        "ä",
        "\0",
        page_token(5) + "=",
        page_token(5) + "A",
        base64.urlsafe_b64encode(b"s-5").decode().rstrip("="),
        base64.urlsafe_b64encode(b"s05").decode().rstrip("="),
        base64.urlsafe_b64encode(b"s").decode().rstrip("="),
        base64.urlsafe_b64encode(b"x5").decode().rstrip("="),
        base64.urlsafe_b64encode("s٣".encode()).decode().rstrip("="),
        page_token(2**63),
        page_token(10**60),
        None,
        5,
        b"czU",
    ],
)
def test_bad_pages(token: object) -> None:
    with pytest.raises(InvalidInput, match="page is "):
        page_seq(token)


def test_counts() -> None:
    counts = Counts(*range(1, 8))
    assert (counts.waiting, counts.finished) == (1 + 2 + 3, 5 + 6 + 7)
    assert Counts.__struct_fields__ == tuple(State)


def test_states_may_be_words() -> None:
    assert Query(states=("ready", State.DONE)).states == (State.READY, State.DONE)  # type: ignore[arg-type]


def test_bodies_are_not_columns() -> None:
    assert not {"payload", "headers", "result", "error", "cursor"} & set(COLUMNS)
