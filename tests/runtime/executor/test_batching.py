from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.executor.workers import BatchQueue


def test_like_runs_with_like_in_order_of_arrival() -> None:
    queue: BatchQueue[str] = BatchQueue(max_batch=3, max_waiting=10)
    for item in ("a1", "b1", "a2", "a3", "b2", "a4"):
        queue.add(item, item[0])
    assert queue.drop("a2")
    assert not queue.drop("a2")
    assert queue.take() == ["a1", "a3", "a4"]
    assert queue.take() == ["b1", "b2"]
    assert queue.take() == []


def test_no_more_wait_than_may() -> None:
    queue: BatchQueue[int] = BatchQueue(max_batch=2, max_waiting=2)
    queue.add(1, None)
    assert not queue.is_full
    queue.add(2, None)
    assert len(queue) == 2
    with pytest.raises(OverflowError):
        queue.add(3, None)
    assert queue.take() == [1, 2]
    with pytest.raises(ValueError, match="at least one"):
        BatchQueue(max_batch=0, max_waiting=1)


@given(
    st.lists(st.integers(0, 3) | st.just("take") | st.just("drop"), max_size=60),
    st.integers(1, 5),
)
def test_the_oldest_always_runs_and_nobody_is_lost(steps: list[int | str], most: int) -> None:
    queue: BatchQueue[int] = BatchQueue(most, max_waiting=100)
    waiting: dict[int, int] = {}
    for number, step in enumerate(steps):
        if isinstance(step, int):
            queue.add(number, step)
            waiting[number] = step
        elif step == "drop" and waiting:
            oldest = next(iter(waiting))
            assert queue.drop(oldest)
            del waiting[oldest]
        elif step == "take":
            batch = queue.take()
            assert bool(batch) == bool(waiting)
            if not batch:
                continue
            assert batch[0] == next(iter(waiting))
            assert len({waiting[item] for item in batch}) == 1
            assert all(before < after for before, after in pairwise(batch))
            same = [item for item, key in waiting.items() if key == waiting[batch[0]]]
            assert batch == same[:most]
            for item in batch:
                del waiting[item]
        assert len(queue) == len(waiting)
