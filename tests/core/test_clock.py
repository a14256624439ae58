from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.clock import Clock, VirtualClock, WallClock
from atoll.core.errors import UsageError


def test_both_clocks_are_clocks() -> None:
    clocks: list[Clock] = [WallClock(), VirtualClock()]
    assert all(isinstance(clock.now(), float) for clock in clocks)


def test_wall_clock_sleeps_at_least_as_long_as_asked() -> None:
    async def scene() -> float:
        clock = WallClock()
        start_s = clock.now()
        await clock.sleep(0.001)
        await clock.sleep(-1)
        return clock.now() - start_s

    assert asyncio.run(scene()) >= 0.001


def test_time_stands_still_until_advanced() -> None:
    async def scene() -> list[str]:
        clock, log = VirtualClock(), []

        async def sleeper() -> None:
            await clock.sleep(5)
            log.append(f"woke at {clock.now():g}")

        task = asyncio.create_task(sleeper())
        await clock.advance(4.9)
        log.append(f"still {clock.now():g}")
        await clock.advance(1)
        log.append(f"now {clock.now():g}")
        await task
        return log

    assert asyncio.run(scene()) == ["still 4.9", "woke at 5", "now 5.9"]


@given(st.lists(st.integers(min_value=1, max_value=20), min_size=1, max_size=12))
def test_sleepers_wake_by_deadline_then_by_arrival(delays_s: list[int]) -> None:
    async def scene() -> list[tuple[float, int]]:
        clock = VirtualClock(start_s=100.0)
        woken: list[tuple[float, int]] = []

        async def sleeper(index: int, delay_s: int) -> None:
            await clock.sleep(delay_s)
            woken.append((clock.now(), index))

        tasks = [asyncio.create_task(sleeper(i, d)) for i, d in enumerate(delays_s)]
        await clock.advance(20)
        await asyncio.gather(*tasks)
        return woken

    expected = sorted((100.0 + delay_s, i) for i, delay_s in enumerate(delays_s))
    assert asyncio.run(scene()) == expected


def test_a_task_that_sleeps_again_is_woken_again_within_one_advance() -> None:
    async def scene() -> list[float]:
        clock, ticks = VirtualClock(), []

        async def ticker() -> None:
            while True:
                await clock.sleep(1)
                ticks.append(clock.now())

        task = asyncio.create_task(ticker())
        await clock.advance(3.5)
        task.cancel()
        return ticks

    assert asyncio.run(scene()) == [1.0, 2.0, 3.0]


def test_cancelled_sleepers_are_forgotten() -> None:
    async def scene() -> tuple[float | None, float | None]:
        clock = VirtualClock()
        task = asyncio.create_task(clock.sleep(5))
        await clock.advance(0)
        before = clock.next_deadline()
        task.cancel()
        await clock.advance(10)
        return before, clock.next_deadline()

    assert asyncio.run(scene()) == (5.0, None)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_time_does_not_run_backwards(seconds: float) -> None:
    with pytest.raises(UsageError):
        asyncio.run(VirtualClock().advance(seconds))
