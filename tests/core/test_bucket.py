"""No time lets more in than a bucket and its rate; waiting as long as it says is enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.bucket import TokenBucket

capacities = st.floats(1.0, 1000.0)
rates = st.floats(0.01, 1000.0)
steps = st.lists(st.tuples(st.floats(0.0, 90.0), st.floats(0.1, 5.0)), min_size=1, max_size=60)


@given(capacities, rates, steps)
def test_no_window_lets_more_in_than_a_burst_and_its_rate(
    capacity: float, per_s: float, steps: list[tuple[float, float]]
) -> None:
    now_s = 0.0
    bucket = TokenBucket(capacity, per_s, now_s)
    taken: list[tuple[float, float]] = []
    for wait_s, amount in steps:
        now_s += wait_s
        taken += [(now_s, amount) for _ in range(3) if bucket.take(now_s, amount)]
    for i, (first_s, _) in enumerate(taken):
        total = 0.0
        for at_s, amount in taken[i:]:
            total += amount
            assert total <= (capacity + (at_s - first_s) * per_s) * (1 + 1e-9) + 1e-6


@given(capacities, rates, steps)
def test_taking_is_waiting_for_nothing_and_charging(
    capacity: float, per_s: float, steps: list[tuple[float, float]]
) -> None:
    one, two = TokenBucket(capacity, per_s, 0.0), TokenBucket(capacity, per_s, 0.0)
    now_s = 0.0
    for wait_s, amount in steps:
        now_s += wait_s
        free = two.wait_s(now_s, amount) == 0.0
        assert one.take(now_s, amount) == free
        if free:
            two.charge(now_s, amount)
        assert one.level(now_s) == two.level(now_s) <= capacity


@given(capacities, rates, st.floats(0.0, 1e6), st.floats(0.0, 1e4), st.floats(0.0, 1.0))
def test_waiting_as_long_as_it_says_is_enough_and_no_less(
    capacity: float, per_s: float, used: float, later_s: float, part: float
) -> None:
    amount = part * capacity
    bucket = TokenBucket(capacity, per_s, 0.0)
    bucket.charge(0.0, used)
    wait_s = bucket.wait_s(later_s, amount)
    if wait_s > 0.01:
        early = TokenBucket(capacity, per_s, 0.0)
        early.charge(0.0, used)
        assert early.wait_s(later_s + wait_s * 0.99, amount) > 0.0
    assert bucket.level(later_s + wait_s * (1 + 1e-9)) >= amount - 1e-6 * max(1.0, per_s)


@given(capacities, rates, st.lists(st.floats(-1e3, 1e3), max_size=20))
def test_a_clock_that_goes_back_gives_nothing(
    capacity: float, per_s: float, jumps: list[float]
) -> None:
    bucket = TokenBucket(capacity, per_s, 0.0)
    bucket.charge(0.0, 1e9)
    now_s = latest_s = 0.0
    for jump in jumps:
        now_s += jump
        latest_s = max(latest_s, now_s)
        expected = capacity - 1e9 + latest_s * per_s
        assert bucket.level(now_s) == pytest.approx(min(capacity, expected), rel=1e-9)


def test_debt_is_paid_off_at_the_rate() -> None:
    bucket = TokenBucket(60, 1.0, 0.0)
    bucket.charge(0.0, 180)
    assert bucket.level(0.0) == -120
    assert bucket.wait_s(0.0) == 121.0
    assert bucket.wait_s(121.0) == 0.0
    assert bucket.full_s(121.0) == 59.0
