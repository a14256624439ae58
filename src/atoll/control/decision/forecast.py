"""How much will be asked: the highest rate over the time that matters, as a quantile.

Let x be the level of the last minutes, p the profile of the day or week, h the horizon. The highest rate
until t + h is predicted as

    y = x * max over u in [0, h] of p(t + u) / p(t)

and planned for as y * exp(e), where e is the wanted quantile of the errors log(highest rate that came / y) of
past forecasts. Without a profile p is constant, which is the naive forecast. `backtest` scores this against
others on a series of rates; `predict_naive` and `predict_holt_winters` are the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from atoll.control.decision.view import (
    DAY_S,
    ControlPolicy,
    ForecastState,
    PendingForecast,
    TrafficSeen,
)

Floats = NDArray[np.float64]
Method = Callable[[Floats, float, float], Floats]
"""From rates every `step_s` seconds, that step and a horizon in seconds to the predicted highest rate of the
horizon after each of them, made with what was known then."""

WEEK_S = 7.0 * DAY_S
_ERRORS = 96
"""Errors that are remembered; older ones are of another time."""
_PENDING = 2
"""Forecasts of a service that are watched at a time: more would count the same surprise more often."""
_FEW = 32
"""Fewer errors than this are filled up with guessed ones."""
_FIRST_SPREAD = 0.15
"""Relative standard deviation of a forecast that nothing is known of."""
_STEEPEST = 8.0
"""The largest ratio that a profile is believed to rise by, and that an error is remembered with."""
_SMOOTHING_S = 3600.0
"""Usual rates are means over this time: less is chance, more would flatten real slopes."""
_LATEST = 0.5
"""Weight of the last minutes against the last hour, both relative to what is usual then."""
_JUMP = 0.3
"""How much more than usual the last minutes are by chance, at most."""
_LEAST = 1e-9


def predict_peak(
    level: float,
    profile: Sequence[float] | Floats,
    period_s: float,
    time_s: float,
    horizon_s: float,
) -> float:
    """Return the highest rate until `horizon_s` from now, by the profile of a period."""
    slots = len(profile)
    if slots < 2 or level <= 0.0:
        return level
    usual = _at(profile, period_s, time_s)
    if usual <= 0.0:
        return level
    slot_s = period_s / slots
    first = math.floor(time_s / slot_s - 0.5) + 1
    last = math.floor((time_s + horizon_s) / slot_s - 0.5)
    corners = [profile[k % slots] for k in range(first, min(last, first + slots) + 1)]
    highest = max((*corners, usual, _at(profile, period_s, time_s + horizon_s)))
    return level * min(_STEEPEST, float(highest) / usual)


def _at(profile: Sequence[float] | Floats, period_s: float, time_s: float) -> float:
    """Return the profile at a time: slots hold at their middles, straight lines between them."""
    slots = len(profile)
    position = (time_s % period_s) / period_s * slots - 0.5
    low = math.floor(position)
    share = position - low
    return float(profile[low % slots]) * (1.0 - share) + float(profile[(low + 1) % slots]) * share


def build_profile(
    rates: Floats, step_s: float, start_s: float = 0.0
) -> tuple[tuple[float, ...], float]:
    """Return usual rates and their period from a history that begins at `start_s`.

    None for less than a day; then a day's, the mean of each time of day; from a second week on a week's,
    each slot of it the mean of its weeks and, as one more week, of its time of day.
    """
    day = max(2, round(DAY_S / step_s))
    if len(rates) < day:
        return (), DAY_S
    at = np.floor(start_s / step_s + 0.5).astype(np.int64) + np.arange(len(rates))
    daily = _smooth(_mean_by(at % day, rates, day), step_s)
    if len(rates) < 8 * day:
        return tuple(daily.tolist()), DAY_S
    slot = at % (7 * day)
    seen = np.bincount(slot, minlength=7 * day)
    total = np.bincount(slot, weights=rates, minlength=7 * day)
    # A week's level differs from day to day: the day's shape counts at the level of that weekday.
    weekday = _mean_by(slot // day, rates, 7)
    shape = np.tile(daily, 7) / max(float(daily.mean()), _LEAST) * np.repeat(weekday, day)
    weekly = _smooth((total + shape) / (seen + 1.0), step_s)
    return tuple(weekly.tolist()), WEEK_S


def _smooth(profile: Floats, step_s: float) -> Floats:
    """Return running means over `_SMOOTHING_S`, around the end of the period."""
    side = round(0.5 * _SMOOTHING_S / step_s)
    shifted = [np.roll(profile, k) for k in range(-side, side + 1)]
    means: Floats = np.mean(shifted, axis=0)
    return means


def _mean_by(slot: NDArray[np.int64], rates: Floats, slots: int) -> Floats:
    seen = np.bincount(slot, minlength=slots)
    total = np.bincount(slot, weights=rates, minlength=slots)
    means: Floats = np.where(seen > 0, total / np.maximum(seen, 1), float(rates.mean()))
    return means


def blend_level(
    latest: float, hour: float, profile: Sequence[float] | Floats, period_s: float, time_s: float
) -> float:
    """Return the level now from the rate of the last minutes and of the last hour.

    Relative to what is usual the two differ by chance only, as long as the rhythm is the usual one. A jump up
    by more than `_JUMP` is no chance: then the last minutes count alone.
    """
    if len(profile) < 2 or hour <= 0.0 or latest <= 0.0:
        return latest
    usual = _at(profile, period_s, time_s)
    earlier = sum(_at(profile, period_s, time_s - 600.0 * k) for k in range(6)) / 6.0
    if usual <= 0.0 or earlier <= 0.0:
        return latest
    lasting = hour * min(_STEEPEST, usual / earlier)
    if latest > (1.0 + _JUMP) * lasting:
        return latest
    return _LATEST * latest + (1.0 - _LATEST) * lasting


def measure_level(traffic: TrafficSeen, time_s: float) -> float:
    """Return the rate now: blended, or that of the last minute where it is more by more than chance."""
    calm, latest = traffic.five_minutes.rate_per_s, traffic.minute.rate_per_s
    if latest > calm + 3.0 * math.sqrt(max(calm, _LEAST) / 60.0):
        return latest
    return blend_level(calm, traffic.hour.rate_per_s, traffic.profile, traffic.period_s, time_s)


def find_spread(errors: Sequence[float], quantile: float, level: float) -> float:
    """Return the quantile of past errors; where they are few, among as many guessed ones as are missing.

    Guesses are spread normally, with the chance in counting five minutes' requests on top. So a single
    surprise is one of many from the start.
    """
    missing = max(0, _FEW - len(errors))
    if missing == 0:
        return _quantile(errors, quantile)
    deviation = math.hypot(_FIRST_SPREAD, 1.0 / math.sqrt(max(1.0, 300.0 * level)))
    normal = NormalDist(0.0, deviation)
    guessed = [normal.inv_cdf((k + 0.5) / missing) for k in range(missing)]
    return _quantile([*errors, *guessed], quantile)


def _quantile(errors: Sequence[float], quantile: float) -> float:
    """Return the order statistic that a new error stays below with this chance."""
    ordered = sorted(errors)
    rank = math.ceil(quantile * (len(ordered) + 1)) - 1
    return ordered[min(max(rank, 0), len(ordered) - 1)]


def forecast(
    traffic: TrafficSeen, state: ForecastState, time_s: float, policy: ControlPolicy
) -> tuple[float, ForecastState]:
    """Return the rate to plan for in requests/s, and the state with what came of earlier forecasts.

    The rate is the highest demand of the last `down_after_s`: capacity goes up at once and down late.
    """
    level = measure_level(traffic, time_s)
    peak = predict_peak(level, traffic.profile, traffic.period_s, time_s, policy.horizon_s)
    errors, pending = _settle(state, traffic.five_minutes.rate_per_s, time_s)
    if not pending or time_s - pending[-1].made_s >= policy.horizon_s / _PENDING:
        pending = (*pending, PendingForecast(time_s, time_s + policy.horizon_s, peak, level))
    demand = peak * math.exp(find_spread(errors, policy.quantile, level))
    # What is asked now is there, whatever is usual.
    demand = max(demand, traffic.five_minutes.rate_per_s)
    if not state.recent:  # just started: what came earlier this hour counts too
        demand = max(demand, traffic.hour.rate_per_s)
    after_s = time_s - policy.down_after_s
    # Falling rates only: one that a later one exceeds will never be the highest again.
    recent = tuple((at, rate) for at, rate in state.recent if after_s <= at and rate > demand)
    recent = (*recent, (time_s, demand))
    learned = replace(state, errors=errors, pending=pending, recent=recent)
    return recent[0][1], learned


def _settle(
    state: ForecastState, rate_per_s: float, time_s: float
) -> tuple[tuple[float, ...], tuple[PendingForecast, ...]]:
    """Return the errors with those of forecasts whose time is over, and the others."""
    errors, pending = list(state.errors), []
    for one in state.pending:
        if time_s <= one.due_s:
            highest = max(one.highest_per_s, rate_per_s)
            pending.append(replace(one, highest_per_s=highest))
        elif one.predicted_per_s > 0.0:
            ratio = max(one.highest_per_s, _LEAST) / one.predicted_per_s
            errors.append(math.log(min(max(ratio, 1.0 / _STEEPEST), _STEEPEST)))
    return tuple(errors[-_ERRORS:]), tuple(pending)


def predict_naive(rates: Floats, step_s: float, horizon_s: float) -> Floats:
    """Predict that nothing changes."""
    del step_s, horizon_s
    return rates.copy()


def predict_profile(rates: Floats, step_s: float, horizon_s: float) -> Floats:
    """Predict as `forecast` does, with a profile built anew every day of all earlier days."""
    day = max(2, round(DAY_S / step_s))
    peaks = np.empty(len(rates))
    profile: tuple[float, ...] = ()
    period_s = DAY_S
    hour = max(1, round(3600.0 / step_s))
    for t, latest in enumerate(rates.tolist()):
        if t % day == 0:
            profile, period_s = build_profile(rates[:t], step_s)
        now_s = (t + 0.5) * step_s  # a rate stands for the middle of its step
        mean = float(rates[max(0, t + 1 - hour) : t + 1].mean())
        level = blend_level(latest, mean, profile, period_s, now_s)
        peaks[t] = predict_peak(level, profile, period_s, now_s, horizon_s)
    return peaks


def predict_holt_winters(
    rates: Floats,
    step_s: float,
    horizon_s: float,
    alpha: float = 0.3,
    beta: float = 0.01,
    gamma: float = 0.2,
) -> Floats:
    """Predict with Holt's and Winters' level, trend and additive season of a day.

    The first day is the first season; until it is over the prediction is naive.
    """
    day = max(2, round(DAY_S / step_s))
    ahead = max(1, round(horizon_s / step_s))
    peaks = rates.copy()
    if len(rates) <= day:
        return peaks
    level, trend = float(rates[:day].mean()), 0.0
    season = (rates[:day] - level).tolist()
    for t in range(day, len(rates)):
        x, s = float(rates[t]), season[t % day]
        before = level
        level = alpha * (x - s) + (1.0 - alpha) * (level + trend)
        trend = beta * (level - before) + (1.0 - beta) * trend
        season[t % day] = gamma * (x - level) + (1.0 - gamma) * s
        peaks[t] = max(level + k * trend + season[(t + k) % day] for k in range(ahead + 1))
    return np.maximum(peaks, 0.0)


@dataclass(frozen=True, slots=True)
class Backtest:
    """How a method did: `loss` is the pinball loss of its quantile over the mean rate, less is better;
    `covered` the share of times that what came was no more; `excess` the mean quantile over the mean highest.
    """

    loss: float
    covered: float
    excess: float


def backtest(
    rates: Floats,
    step_s: float,
    horizon_s: float,
    method: Method,
    *,
    quantile: float = 0.9,
    skip_s: float = DAY_S,
) -> Backtest:
    """Score a method on a series: its quantile of the highest rate within the horizon, at every step.

    Every method is widened by its own past errors, those whose horizon was over by then. The first `skip_s`
    are not scored.
    """
    ahead = max(1, round(horizon_s / step_s))
    peaks = np.maximum(method(rates, step_s, horizon_s), _LEAST)
    count = len(rates) - ahead
    windows = np.lib.stride_tricks.sliding_window_view(rates, ahead + 1)[:count]
    came = np.maximum(windows.max(axis=1), _LEAST)
    errors = np.log(np.clip(came / peaks[:count], 1.0 / _STEEPEST, _STEEPEST))
    planned = np.empty(count)
    for t in range(count):
        known = errors[max(0, t - ahead - _ERRORS) : max(0, t - ahead)].tolist()
        planned[t] = peaks[t] * math.exp(find_spread(known, quantile, float(rates[t])))
    scored = slice(min(count - 1, round(skip_s / step_s)), count)
    over = came[scored] - planned[scored]
    loss = np.maximum(quantile * over, (quantile - 1.0) * over).mean()
    return Backtest(
        loss=float(loss / rates.mean()),
        covered=float((over <= 0.0).mean()),
        excess=float(planned[scored].mean() / came[scored].mean()),
    )
