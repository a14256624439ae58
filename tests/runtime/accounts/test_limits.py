from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.accounts.limits import (
    TOTAL,
    Bucket,
    KeyUsage,
    day_of,
    periods,
    periods_of,
    resize,
    whole_seconds,
)

gaps = st.lists(st.floats(0.0, 90.0), min_size=1, max_size=80)


@given(st.integers(1, 600), gaps)
def test_no_window_lets_more_in_than_a_burst_and_its_rate(per_min: int, waits: list[float]) -> None:
    now_s = 0.0
    bucket = Bucket(per_min, now_s)
    admitted: list[float] = []
    for wait in waits:
        now_s += wait
        for _ in range(5):
            if bucket.wait_s(now_s) == 0.0:
                bucket.charge(now_s, 1)
                admitted.append(now_s)
    for i, first in enumerate(admitted):
        for j in range(i, len(admitted)):
            assert j - i + 1 <= per_min + (admitted[j] - first) * per_min / 60 + 1e-6


@given(st.integers(1, 10**6), st.floats(0.0, 1e6), st.floats(0.0, 1e4))
def test_waiting_as_long_as_it_says_is_enough_and_no_less(
    per_min: int, used: float, later_s: float
) -> None:
    bucket = Bucket(per_min, 0.0)
    bucket.charge(0.0, used)
    wait_s = bucket.wait_s(later_s)
    if wait_s > 0.01:
        early = Bucket(per_min, 0.0)
        early.charge(0.0, used)
        assert early.wait_s(later_s + wait_s * 0.99) > 0.0
    assert bucket.wait_s(later_s + wait_s + 1e-3) == 0.0


def test_debt_is_paid_off_at_the_rate() -> None:
    bucket = Bucket(60, 0.0)
    bucket.charge(0.0, 180)
    assert bucket.level(0.0) == -120
    assert bucket.wait_s(0.0) == 121.0
    assert bucket.wait_s(121.0) == 0.0
    assert bucket.full_s(121.0) == 59.0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.charge(100.0, 60)
    assert bucket.level(50.0) == 0.0
    assert bucket.level(101.0) == 1.0


def test_a_changed_limit_keeps_what_was_used() -> None:
    bucket = Bucket(100, 0.0)
    bucket.charge(0.0, 80)
    smaller = resize(bucket, 50, 0.0)
    assert smaller is not None
    assert smaller.level(0.0) == -30
    assert resize(bucket, 100, 0.0) is bucket
    assert resize(bucket, None, 0.0) is None
    fresh = resize(None, 7, 0.0)
    assert fresh is not None
    assert fresh.level(0.0) == 7


def test_periods_are_utc() -> None:
    now = periods(1_798_761_599.5)  # 2026-12-31 23:59:59.5
    assert (now.day, now.month) == ("2026-12-31", "2026-12")
    assert now.day_ends_s == now.month_ends_s == 1_798_761_600.0
    after = periods(now.day_ends_s)
    assert (after.day, after.month) == ("2027-01-01", "2027-01")
    assert day_of(now.day_ends_s) == "2027-01-01"
    assert list(periods_of("2026-12-31")) == ["2026-12-31", "2026-12", TOTAL]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "send", "arrive"]),
            st.sampled_from(["2026-11-30", "2026-12-01", "2026-12-02"]),
            st.integers(0, 50),
        ),
        max_size=40,
    )
)
def test_usage_is_what_was_used_wherever_it_is_by_now(steps: list[tuple[str, str, int]]) -> None:
    usage = KeyUsage()
    used: dict[str, int] = {}
    database: dict[str, int] = {}
    on_the_way: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for what, day, tokens in steps:
        if what == "add":
            usage.add(day, tokens)
            waiting[day] = waiting.get(day, 0) + tokens
            for period in periods_of(day):
                used[period] = used.get(period, 0) + tokens
        elif what == "send":
            usage.send()
            for sent, count in waiting.items():
                on_the_way[sent] = on_the_way.get(sent, 0) + count
            waiting.clear()
        else:
            for sent, count in on_the_way.items():
                for period in periods_of(sent):
                    database[period] = database.get(period, 0) + count
            on_the_way.clear()
            usage.arrived(dict(database))
        for period in ("2026-11-30", "2026-12-01", "2026-11", "2026-12", TOTAL):
            assert usage.used(period) == used.get(period, 0)


def test_running_requests_count() -> None:
    usage = KeyUsage(counted={TOTAL: 5}, running=3)
    assert usage.used(TOTAL) == 8


@pytest.mark.parametrize(("seconds", "whole"), [(0.0, 1), (0.2, 1), (1.0, 1), (1.01, 2)])
def test_retry_after_is_whole(seconds: float, whole: int) -> None:
    assert whole_seconds(seconds) == whole
