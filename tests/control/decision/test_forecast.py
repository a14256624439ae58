"""Forecasts: what is predicted, how wide, and whether that beats simpler ways."""

from __future__ import annotations

import csv
import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.decision.control_view import (
    DAY_S,
    ControlPolicy,
    ForecastState,
    TrafficSeen,
    TrafficWindow,
)
from atoll.control.decision.forecast import (
    WEEK_S,
    Floats,
    build_profile,
    find_spread,
    forecast,
    measure_level,
    predict_peak,
)
from research.operating.forecast_backtest import (
    backtest,
    predict_holt_winters,
    predict_naive,
    predict_profile,
)

STEP_S = 600.0
TRACES = Path(__file__).resolve().parents[4] / "shared" / "data" / "reference" / "traces"
POLICY = ControlPolicy(epoch_s=900.0, startup_s=300.0)


def rhythm(weeks: int, noise: float, seed: int = 1) -> Floats:
    """Days with a peak, quiet weekends, and chance."""
    chance = np.random.default_rng(seed)
    at = (np.arange(round(weeks * WEEK_S / STEP_S)) + 0.5) * STEP_S
    weekday = np.where((at // DAY_S) % 7 < 5, 1.0, 0.5)
    swing = 1.0 + 0.6 * np.sin(2.0 * math.pi * at / DAY_S)
    rates: Floats = 10.0 * swing * weekday * np.exp(noise * chance.standard_normal(len(at)))
    return rates


def seen(minute: float, five: float, hour: float, profile: tuple[float, ...] = ()) -> TrafficSeen:
    return TrafficSeen(
        "chat", TrafficWindow(minute), TrafficWindow(five), TrafficWindow(hour), profile
    )


def test_the_rhythm_of_day_and_week_is_used() -> None:
    rates = rhythm(3, 0.1)
    for horizon_s in (1200.0, 3600.0):
        naive, holt, mine = (
            backtest(rates, STEP_S, horizon_s, method)
            for method in (predict_naive, predict_holt_winters, predict_profile)
        )
        assert mine.loss < 0.8 * naive.loss
        assert mine.loss < holt.loss
        assert 0.86 <= mine.covered <= 0.94
        assert mine.excess < naive.excess


def test_without_a_rhythm_nothing_is_lost_to_naive() -> None:
    chance = np.random.default_rng(2)
    rates = 10.0 * np.exp(0.1 * chance.standard_normal(14 * 144))
    naive = backtest(rates, STEP_S, 1200.0, predict_naive)
    mine = backtest(rates, STEP_S, 1200.0, predict_profile)
    assert mine.loss <= 1.02 * naive.loss


@pytest.mark.slow
def test_on_public_traces_it_wins_on_the_whole() -> None:
    if not TRACES.is_dir():
        pytest.skip("needs ../shared/data/reference/traces beside the repository")
    series = read_traces()
    losses = {
        method.__name__: [
            backtest(rates, STEP_S, horizon_s, method).loss
            for rates in series.values()
            for horizon_s in (1200.0, 3600.0)
        ]
        for method in (predict_naive, predict_holt_winters, predict_profile)
    }
    means = {name: float(np.exp(np.mean(np.log(found)))) for name, found in losses.items()}
    assert means["predict_profile"] < means["predict_naive"]
    assert means["predict_profile"] < means["predict_holt_winters"]


def read_traces() -> dict[str, Floats]:
    """Rates every ten minutes of those public traces that last a week."""
    found: dict[str, list[tuple[float, float]]] = {}
    with gzip.open(TRACES / "servegen" / "pool_rate_10min.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["pool"], []).append((float(row["t_s"]), float(row["rate_req_s"])))
    with (TRACES / "azure2024_week_rate_digitised.csv").open() as file:
        for row in csv.DictReader(file):
            at = (float(row["t_s"]), float(row["req_per_min"]) / 60.0)
            found.setdefault(f"azure {row['trace']}", []).append(at)
    series: dict[str, Floats] = {}
    for name, points in found.items():
        times, rates = (np.array(column) for column in zip(*points, strict=True))
        if times[-1] > 5 * DAY_S:
            series[name] = np.interp(np.arange(0.0, times[-1], STEP_S), times, rates)
    return series


def test_a_peak_inside_the_horizon_is_found() -> None:
    profile = (1.0, 2.0, 4.0, 2.0)  # middles at 3, 9, 15 and 21 o'clock
    at = 9 * 3600.0
    assert predict_peak(10.0, profile, DAY_S, at, 0.0) == pytest.approx(10.0)
    assert predict_peak(10.0, profile, DAY_S, at, 3 * 3600.0) == pytest.approx(15.0)
    assert predict_peak(10.0, profile, DAY_S, at, 8 * 3600.0) == pytest.approx(20.0)
    assert predict_peak(10.0, profile, DAY_S, 15 * 3600.0, 3 * 3600.0) == pytest.approx(10.0)
    assert predict_peak(10.0, (), DAY_S, at, 8 * 3600.0) == 10.0


def test_a_week_is_learned_from_the_second_on() -> None:
    rates = rhythm(2, 0.0)
    assert build_profile(rates[:100], STEP_S) == ((), DAY_S)
    assert build_profile(rates[:288], STEP_S)[1] == DAY_S
    profile, period_s = build_profile(rates, STEP_S)
    assert period_s == WEEK_S
    weekday, weekend = np.mean(profile[:144]), np.mean(profile[-144:])
    assert weekend / weekday == pytest.approx(0.5, abs=0.05)


def test_a_burst_of_a_minute_counts_if_it_is_no_chance() -> None:
    assert measure_level(seen(10.5, 10.0, 10.0), 0.0) == 10.0
    assert measure_level(seen(30.0, 10.0, 10.0), 0.0) == 30.0
    flat = (1.0, 1.0, 1.0, 1.0)
    assert measure_level(seen(11.0, 11.0, 10.0, flat), 0.0) == pytest.approx(10.5)
    assert measure_level(seen(20.0, 20.0, 10.0, flat), 0.0) == 20.0


def test_errors_widen_and_narrow_the_forecast() -> None:
    assert find_spread([0.0] * 40, 0.9, 10.0) == 0.0
    assert find_spread([0.0] * 34 + [0.5] * 6, 0.9, 10.0) == 0.5
    assert find_spread([], 0.9, 10.0) > 0.15
    assert 0.15 < find_spread([1.0], 0.9, 10.0) < 0.3  # one surprise is not a habit
    assert find_spread([], 0.9, 0.01) > find_spread([], 0.9, 10.0)


def test_demand_rises_at_once_and_falls_late() -> None:
    state = ForecastState("chat")
    low, state = forecast(seen(10.0, 10.0, 10.0), state, 0.0, POLICY)
    high, state = forecast(seen(20.0, 20.0, 10.0), state, 60.0, POLICY)
    assert high > 1.7 * low
    rate, state = forecast(seen(10.0, 10.0, 10.0), state, 120.0, POLICY)
    assert rate == high
    rate, state = forecast(seen(10.0, 10.0, 10.0), state, 61.0 + POLICY.down_after_s, POLICY)
    assert rate < high


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=60), st.floats(10.0, 900.0))
def test_the_state_stays_small_and_the_rate_possible(rates: list[float], step_s: float) -> None:
    state = ForecastState("chat")
    for k, rate in enumerate(rates):
        planned, state = forecast(seen(rate, rate, rate), state, k * step_s, POLICY)
        assert math.isfinite(planned)
        assert planned >= 0.0
        assert len(state.errors) <= 96
        assert len(state.pending) <= 10
        assert all(a[1] > b[1] for a, b in zip(state.recent, state.recent[1:], strict=False))


def test_errors_of_forecasts_are_learned_when_their_time_is_over() -> None:
    state = ForecastState("chat")
    for k in range(60):
        _, state = forecast(seen(10.0, 10.0, 10.0), state, k * 60.0, POLICY)
    assert state.errors
    assert state.errors == pytest.approx([0.0] * len(state.errors))
