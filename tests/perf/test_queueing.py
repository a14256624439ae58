"""Waiting: the formulas against queues that are simulated request by request."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.perf.queueing import BUSIEST, load_within, longest_wait, places_taken

ONE, MANY = np.array([1.0]), np.array([2.0])


@given(st.floats(0.0, 100.0), st.floats(0.0, 10.0), st.sampled_from([ONE, MANY]))
def test_a_longer_wait_allows_more_load_and_never_all(
    wait: float, more: float, stages: np.ndarray
) -> None:
    load = load_within(np.array([wait]), stages)
    assert 0.0 <= load <= load_within(np.array([wait + more]), stages) <= BUSIEST


@given(st.floats(0.02, 12.0), st.sampled_from([ONE, MANY]))
def test_load_and_wait_are_each_others_inverse(wait: float, stages: np.ndarray) -> None:
    load = load_within(np.array([wait]), stages)
    assert longest_wait(load, stages) == pytest.approx(wait, rel=2e-3, abs=2e-3)


def test_half_find_a_quiet_server_idle_and_none_is_loaded_beyond_its_limit() -> None:
    assert longest_wait(np.array([0.5]), ONE) == 0.0
    assert longest_wait(np.array([0.5]), MANY) == 1.0
    assert np.isinf(longest_wait(np.array([BUSIEST + 1e-6]), ONE))


def draw(count: int, load: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrival times and service times (exponential, mean 1) of a queue with one server."""
    random = np.random.default_rng(seed)
    return np.cumsum(random.exponential(1.0 / load, count)), random.exponential(1.0, count)


@pytest.mark.parametrize(
    "load",
    [pytest.param(0.6, marks=pytest.mark.slow), 0.8, pytest.param(0.9, marks=pytest.mark.slow)],
)
def test_half_of_what_arrives_waits_as_long_as_said(load: float) -> None:
    arrive, serve = draw(400_000, load, 1)
    waits, free = np.empty_like(arrive), 0.0
    for i, (now, took) in enumerate(zip(arrive, serve, strict=True)):
        waits[i] = max(0.0, free - now)
        free = now + waits[i] + took
    # Exponential service: K = E[s^2] / 2 E[s]^2 = 1.
    assert np.median(waits) == pytest.approx(longest_wait(np.array([load]), ONE)[0], rel=0.08)


@pytest.mark.parametrize(
    "places",
    [5, pytest.param(20, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)],
)
def test_half_find_a_free_place(places: int) -> None:
    taken = float(places_taken(np.array([float(places)]), 1.0)[0])
    arrive, serve = draw(60_000, taken, 2)
    free = np.zeros(places)
    waited = 0
    for now, took in zip(arrive, serve, strict=True):
        first = int(np.argmin(free))
        waited += free[first] > now
        free[first] = max(free[first], now) + took
    assert waited / len(arrive) == pytest.approx(0.5, abs=0.07)


@given(st.floats(0.0, 1e4), st.floats(0.0, 1e3), st.floats(1.0, 5.0), st.floats(0.0, 3.0))
def test_more_places_take_more_and_uneven_requests_fewer(
    places: float, more: float, spread: float, wider: float
) -> None:
    here = places_taken(np.array([places]), spread)
    assert 0.0 <= here <= places + 1e-9
    assert here <= places_taken(np.array([places + more]), spread) + 1e-9
    assert here + 1e-9 >= places_taken(np.array([places]), spread + wider)
