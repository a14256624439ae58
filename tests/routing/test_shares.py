"""Shares are kept from the first request on, and a conversation stays where it is."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.routing.shares import ShareDealer
from tests.seeds import examples

weights = st.lists(st.floats(0.001, 100.0), min_size=1, max_size=6)
bounded = examples(50)


def names(count: int) -> list[str]:
    return [f"m{number}" for number in range(count)]


@bounded
@given(weights)
def test_everyone_is_within_one_request_of_its_share_at_any_time(
    given_weights: list[float],
) -> None:
    dealer = ShareDealer(dict(zip(names(len(given_weights)), given_weights, strict=True)))
    slack = 1.0 - 1.0 / max(1, 2 * len(given_weights) - 2) if len(given_weights) > 1 else 0.0
    for count in range(1, 400):
        dealer.deal()
        for name, share in dealer.shares.items():
            assert abs(dealer.dealt[name] - share * count) <= slack + 1e-9


@bounded
@given(st.floats(0.01, 0.99), st.integers(0, 300), st.integers(1, 300))
def test_of_two_any_window_is_within_one_request(share: float, begin: int, length: int) -> None:
    dealer = ShareDealer({"a": share, "b": 1.0 - share})
    dealt = [dealer.deal() for _ in range(begin + length)]
    found = Counter(dealt[begin:])
    assert abs(found["a"] - share * length) <= 1.0 + 1e-9


def test_shares_are_exact_where_they_can_be_and_always_dealt_alike() -> None:
    shares = {"large": 0.3, "small": 0.5, "middle": 0.2}
    first, second = ShareDealer(shares), ShareDealer(dict(reversed(shares.items())))
    rows = [first.deal() for _ in range(1000)]
    assert rows == [second.deal() for _ in range(1000)]
    for at in range(0, 1000, 10):
        assert Counter(rows[at : at + 10]) == {"large": 3, "small": 5, "middle": 2}


def test_a_turn_that_nobody_took_comes_again() -> None:
    dealer = ShareDealer({"a": 1.0, "b": 1.0})
    assert [dealer.peek() for _ in range(3)] == [dealer.peek()] * 3
    assert sum(dealer.dealt.values()) == 0


def test_conversations_keep_shares_and_stay() -> None:
    shares = {"a": 0.1, "b": 0.25, "c": 0.65}
    dealer, other = ShareDealer(shares), ShareDealer(shares)
    count = 10_000
    placed = {n: dealer.place(f"conversation {n}".encode()) for n in range(count)}
    for name, share in shares.items():
        found = sum(where == name for where in placed.values()) / count
        assert abs(found - share) < 4.0 * math.sqrt(share * (1.0 - share) / count)
    for _ in range(50):
        other.deal()  # what else is dealt changes nothing
    assert {n: other.place(f"conversation {n}".encode()) for n in range(count)} == placed


@pytest.mark.parametrize("shares", [{"a": 0.0}, {"a": -1.0, "b": 3.0}, {"a": math.inf}])
def test_shares_that_are_none(shares: dict[str, float]) -> None:
    with pytest.raises(InputError):
        ShareDealer(shares)


def test_who_has_no_share_is_never_dealt() -> None:
    dealer = ShareDealer({"a": 1.0, "b": 0.0})
    assert {dealer.deal() for _ in range(20)} == {"a"}
    assert {dealer.place(bytes([n])) for n in range(50)} == {"a"}
