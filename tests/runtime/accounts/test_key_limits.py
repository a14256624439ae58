from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.accounts.key_limits import (
    NOTHING,
    TOTAL,
    Counted,
    KeyUsage,
    day_of,
    periods,
    periods_of,
    whole_seconds,
)


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
    used: dict[str, Counted] = {}
    database: dict[str, Counted] = {}
    on_the_way: dict[str, Counted] = {}
    waiting: dict[str, Counted] = {}
    for what, day, number in steps:
        one = Counted(number, 3 * number, 7 * number)
        if what == "add":
            usage.add(day, one)
            waiting[day] = waiting.get(day, NOTHING) + one
            for period in periods_of(day):
                used[period] = used.get(period, NOTHING) + one
        elif what == "send":
            usage.send()
            for sent, count in waiting.items():
                on_the_way[sent] = on_the_way.get(sent, NOTHING) + count
            waiting.clear()
        else:
            for sent, count in on_the_way.items():
                for period in periods_of(sent):
                    database[period] = database.get(period, NOTHING) + count
            on_the_way.clear()
            usage.arrived(dict(database))
        for period in ("2026-11-30", "2026-12-01", "2026-11", "2026-12", TOTAL):
            assert usage.count(period) == used.get(period, NOTHING)


def test_running_requests_count() -> None:
    usage = KeyUsage(counted={TOTAL: Counted(5, 20)}, running=Counted(3, 0, 9))
    assert usage.count(TOTAL) == Counted(8, 20, 9)


@pytest.mark.parametrize(("seconds", "whole"), [(0.0, 1), (0.2, 1), (1.0, 1), (1.01, 2)])
def test_retry_after_is_whole(seconds: float, whole: int) -> None:
    assert whole_seconds(seconds) == whole
