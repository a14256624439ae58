from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UnknownNameError
from atoll.workload.arrival_rates import DAY_S, Layer, RateClock, RateCurve, Silence, arrivals
from atoll.workload.arrivals import FAMILIES, Renewal
from atoll.workload.requests import Floats


def times(
    renewal: Renewal, clock: RateClock, end_s: float, seed: int = 0, chunk: int = 65_536
) -> Floats:
    made = arrivals(renewal, clock, seed=seed, name="test", end_s=end_s, chunk=chunk)
    return np.concatenate([np.zeros(0), *made])


CASES = [("poisson", 1.0), ("gamma", 0.4), ("gamma", 2.5), ("weibull", 0.5), ("weibull", 2.0)]


@pytest.mark.parametrize(("family", "cv"), CASES)
def test_gaps_have_the_mean_and_cv_asked_for(family: str, cv: float) -> None:
    renewal = Renewal(family, cv)  # type: ignore[arg-type]
    gaps = renewal.gaps(np.random.default_rng(1), 400_000)
    assert gaps.mean() == pytest.approx(1.0, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


@given(st.floats(0.05, 20.0))
def test_weibull_shapes_solve_their_equation(cv: float) -> None:
    inverse = 1.0 / Renewal("weibull", cv).shape
    log_ratio = math.lgamma(1 + 2 * inverse) - 2 * math.lgamma(1 + inverse)
    assert math.expm1(log_ratio) == pytest.approx(cv * cv, rel=1e-6)


@pytest.mark.parametrize(("family", "cv"), CASES)
def test_the_first_arrival_is_that_of_a_stationary_process(family: str, cv: float) -> None:
    # An ordinary renewal process has (cv^2 - 1) / 2 arrivals too many in any window from its start.
    renewal = Renewal(family, cv)  # type: ignore[arg-type]
    counts = [len(times(renewal, RateClock(1.0), 20.0, seed, 64)) for seed in range(800)]
    assert np.mean(counts) == pytest.approx(20.0, abs=4 * float(np.std(counts)) / math.sqrt(800))
    first = [renewal.first(np.random.default_rng(seed)) for seed in range(1000)]
    expected = (1 + cv * cv) / 2
    assert np.mean(first) == pytest.approx(expected, abs=4 * float(np.std(first)) / math.sqrt(1000))


@pytest.mark.parametrize(
    "clock", [RateClock(50.0), RateClock(50.0, RateCurve((1.0, 3.0), 60.0), (Layer(5.0, 0.5),))]
)
def test_the_same_seed_gives_the_same_bits(clock: RateClock) -> None:
    renewal = Renewal("gamma", 1.5)
    one, again, other = (times(renewal, clock, 100.0, seed) for seed in (4, 4, 5))
    assert np.array_equal(one, again)
    assert not np.array_equal(one[:10], other[:10])
    longer = times(renewal, clock, 200.0, 4)
    assert np.array_equal(longer[: len(one)], one)
    assert np.all(np.diff(longer) >= 0)
    assert longer[len(one)] >= 100.0 > one[-1]


def test_endless_without_an_end() -> None:
    made = arrivals(Renewal(), RateClock(1e4), seed=0, name="x", chunk=100)
    chunks = list(itertools.islice(made, 50))
    assert all(len(chunk) == 100 for chunk in chunks)
    assert np.all(np.diff(np.concatenate(chunks)) >= 0)


# Curves.


def test_a_curve_is_followed_and_its_gaps_keep_their_cv() -> None:
    curve = RateCurve((1.0, 1.0, 4.0, 2.0), 400.0)
    drawn = times(Renewal("gamma", 2.0), RateClock(50.0, curve), 20_000.0, 2)
    assert len(drawn) == pytest.approx(50 * 20_000, rel=0.01)
    phase = np.histogram(drawn % 400.0, 4 * 12, (0.0, 400.0))[0]
    assert np.allclose(phase / phase.mean(), curve.cells, rtol=0.06)
    # In operational time the gaps are what they were: thinning would have brought the CV towards 1.
    mass = np.concatenate(([0.0], np.cumsum(curve.cells))) * curve.cell_s
    within = np.interp(drawn % 400.0, np.arange(len(mass)) * curve.cell_s, mass)
    gaps = np.diff(within + drawn // 400.0 * 400.0) * 50.0
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.02)


def test_a_curve_starts_where_it_is_told_to() -> None:
    night_first = RateCurve((0.0, 0.0, 1.0, 1.0), 400.0)
    # Levels stand in the middle of their quarters: nothing comes from 50 s to 150 s.
    assert len(times(Renewal(), RateClock(10.0, night_first, start_s=50.0), 99.0)) == 0
    assert len(times(Renewal(), RateClock(10.0, night_first), 49.0)) > 100
    shifted = times(Renewal(), RateClock(10.0, night_first, start_s=260.0), 40.0)
    assert len(shifted) == pytest.approx(10 * 2 * 40, rel=0.2)


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=30).filter(lambda x: sum(x) > 1e-3))
def test_curves_have_mean_one(levels: list[float]) -> None:
    curve = RateCurve(tuple(levels), DAY_S)
    assert curve.cells.mean() == pytest.approx(1.0)
    assert curve.cell_s * len(curve.cells) == pytest.approx(DAY_S)
    assert np.allclose(curve.at(np.array([7.0])), curve.at(np.array([7.0 + 3 * DAY_S])))


# Chance.


def fano(renewal: Renewal, clock: RateClock, window_s: float) -> float:
    """Return the expected variance over mean of counts in windows of so many seconds.

    Chance only: the curve of the clock is left out, as if the rate were its mean. Windows are taken
    to hold many gaps.
    """
    u = np.linspace(0.0, window_s, 4001)
    spread = np.ones_like(u)
    for layer in clock.layers:
        spread *= 1.0 + layer.covariance(u)
    weight = (window_s - u) * (spread - 1.0)
    share = 2.0 / window_s**2 * float(np.sum((weight[1:] + weight[:-1]) / 2 * np.diff(u)))
    return renewal.cv * renewal.cv + clock.rate_per_s * window_s * share


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param((Layer(3.0, 0.3), Layer(60.0, 0.2)), marks=pytest.mark.slow),
        pytest.param((Layer(20.0, 1.0),), marks=pytest.mark.slow),
        pytest.param((Silence(30.0, 15.0),), marks=pytest.mark.slow),
        (Silence(60.0, 20.0), Layer(5.0, 0.5)),
    ],
)
def test_counts_spread_as_the_formula_says(layers: tuple[Layer | Silence, ...]) -> None:
    clock = RateClock(20.0, layers=layers)
    drawn = times(Renewal(), clock, 200_000.0, 9)
    assert len(drawn) == pytest.approx(20 * 200_000, rel=0.05)
    for window in (1.0, 10.0, 60.0):
        counts = np.bincount((drawn // window).astype(int))[: int(200_000 // window)]
        measured = counts.var() / counts.mean()
        assert measured == pytest.approx(fano(Renewal(), clock, window), rel=0.08)


def test_silences_are_silent() -> None:
    drawn = times(Renewal(), RateClock(100.0, layers=(Silence(10.0, 10.0),)), 10_000.0)
    gaps = np.diff(drawn)
    assert gaps[gaps > 1.0].sum() == pytest.approx(5000.0, rel=0.1)
    assert gaps[gaps > 1.0].mean() == pytest.approx(11.0, rel=0.15)  # off periods above 1 s
    assert len(drawn) == pytest.approx(1e6, rel=0.06)


def test_slow_rates_with_fast_chance_need_little_memory() -> None:
    made = arrivals(Renewal(), RateClock(0.01, layers=(Layer(1.0, 1.0),)), seed=0, name="x")
    assert len(next(made)) <= 256


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Renewal("poisson", 2.0), "gamma or weibull"),
        (lambda: Renewal("gamma", 0.0), "CV"),
        (lambda: Renewal("gamma", math.nan), "CV"),
        (lambda: Renewal("gamma", 51.0), "CV"),
        (lambda: RateClock(0.0), "rate"),
        (lambda: RateClock(math.inf), "rate"),
        (lambda: RateClock(math.nan), "rate"),
        (lambda: RateCurve(()), "levels"),
        (lambda: RateCurve((0.0, 0.0)), "levels"),
        (lambda: RateCurve((1.0, -1.0)), "levels"),
        (lambda: RateCurve((1.0, math.nan)), "levels"),
        (lambda: RateCurve((1.0,), 0.0), "period"),
        (lambda: Layer(0.0, 1.0), "hold_s"),
        (lambda: Layer(1.0, 0.0), "CV"),
        (lambda: Silence(1.0, 0.0), "off_s"),
    ],
)
def test_what_cannot_be(build: object, words: str) -> None:
    assert callable(build)
    with pytest.raises(InputError, match=words):
        build()


def test_an_unknown_family() -> None:
    with pytest.raises(UnknownNameError, match="weibull"):
        Renewal("weibul")  # type: ignore[arg-type]
    assert FAMILIES == ("poisson", "gamma", "weibull")
