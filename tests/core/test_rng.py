from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.core.errors import UsageError
from atoll.core.rng import stream

PINNED = [2037792774, 584249097, 2080940043, 2651106723]


def draw(seed: int, *names: str) -> list[int]:
    return [int(number) for number in stream(seed, *names).integers(0, 2**32, size=4)]


def test_numbers_are_the_same_on_every_machine() -> None:
    assert draw(7, "arrivals", "qwen3-32b") == PINNED


def test_streams_do_not_disturb_each_other() -> None:
    alone = draw(1, "b")
    stream(1, "a").random(1000)
    assert draw(1, "b") == alone


seeds = st.integers(min_value=0, max_value=2**70)
paths = st.lists(st.text(max_size=5), max_size=3).map(tuple)


@given(seeds, paths, seeds, paths)
def test_different_seed_or_names_give_different_streams(
    seed: int, names: tuple[str, ...], other_seed: int, other_names: tuple[str, ...]
) -> None:
    assume((seed, names) != (other_seed, other_names))
    assert draw(seed, *names) != draw(other_seed, *other_names)


def test_joined_names_are_not_split_names() -> None:
    assert draw(0, "ab", "c") != draw(0, "a", "bc") != draw(0, "abc")


def test_negative_seeds_are_refused() -> None:
    with pytest.raises(UsageError):
        stream(-1, "a")
