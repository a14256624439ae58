from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UsageError
from atoll.workload.requests import PrefixBlocks, Requests, Workload, collect, join_requests
from atoll.workload.spec import workload_of


def some(count: int, *, model: str = "", start: float = 0.0, blocks: int | None = None) -> Requests:
    """Requests 1 s apart whose prompt lengths name them: 1, 2, 3, ..."""
    prompts = np.arange(1, count + 1, dtype=np.int32)
    made = Requests.of(
        start + np.arange(count, dtype=np.float64), prompts, prompts * 2, model=model
    )
    if blocks is None:
        return made
    counts = np.arange(count) % 3
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    prefix = PrefixBlocks(offsets, np.arange(offsets[-1]), blocks)
    return Requests(
        made.arrival_s, made.model, made.klass, made.input, made.output, made.models, prefix=prefix
    )


@given(st.lists(st.integers(0, 8), max_size=12))
def test_taking_requests_takes_their_blocks_along(order: list[int]) -> None:
    whole = some(9, blocks=512)
    taken = whole.take(np.array(order, np.int64))
    assert whole.prefix is not None
    assert taken.prefix is not None
    assert taken.input.tolist() == [row + 1 for row in order]
    for place, row in enumerate(order):
        assert taken.prefix.of(place).tolist() == whole.prefix.of(row).tolist()


def test_joining_unites_names() -> None:
    both = join_requests(
        (some(2, model="a"), some(0, model="z"), some(3, model="b"), some(1, model="a"))
    )
    assert both.models == ("a", "b")
    assert both.model.tolist() == [0, 0, 1, 1, 1, 0]
    assert both.input.tolist() == [1, 2, 1, 2, 3, 1]


def test_joining_fills_in_what_some_lack() -> None:
    plain, blocked = some(2), some(4, blocks=16)
    both = join_requests((plain, blocked, plain))
    assert both.prefix is not None
    assert blocked.prefix is not None
    found = [both.prefix.of(row).tolist() for row in range(8)]
    assert found == [[], [], *(blocked.prefix.of(row).tolist() for row in range(4)), [], []]
    with pytest.raises(InputError, match="16 and 512"):
        join_requests((some(3, blocks=16), some(3, blocks=512)))


def test_columns_must_fit() -> None:
    ones = np.ones(3, np.int32)
    with pytest.raises(UsageError, match="length"):
        Requests.of(np.zeros(2), ones, ones)
    with pytest.raises(UsageError, match="offsets"):
        PrefixBlocks(np.array([0, 2, 1]), np.array([7]))


def test_collecting_stops_at_the_limit() -> None:
    workload = workload_of("poisson:100/s n=1000")
    assert isinstance(workload, Workload)
    whole, part = collect(workload, 3), collect(workload, 3, limit=10)
    assert (len(whole), len(part)) == (1000, 10)
    assert part.arrival_s.tolist() == whole.arrival_s[:10].tolist()
    assert len(join_requests(())) == 0
