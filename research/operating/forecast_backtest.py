"""The controller's forecast scored against a naive one and Holt-Winters, on series of rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atoll.control.decision.control_view import DAY_S
from atoll.control.decision.forecast import (
    MAX_ERRORS,
    MAX_RATIO,
    MIN_RATE,
    Floats,
    blend_level,
    build_profile,
    find_spread,
    predict_peak,
)

Method = Callable[[Floats, float, float], Floats]
"""From rates every `step_s` seconds, that step and a horizon in seconds to the predicted highest rate of the
horizon after each of them, made with what was known then."""


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
    peaks = np.maximum(method(rates, step_s, horizon_s), MIN_RATE)
    count = len(rates) - ahead
    windows = np.lib.stride_tricks.sliding_window_view(rates, ahead + 1)[:count]
    came = np.maximum(windows.max(axis=1), MIN_RATE)
    errors = np.log(np.clip(came / peaks[:count], 1.0 / MAX_RATIO, MAX_RATIO))
    planned = np.empty(count)
    for t in range(count):
        known = errors[max(0, t - ahead - MAX_ERRORS) : max(0, t - ahead)].tolist()
        planned[t] = peaks[t] * math.exp(find_spread(known, quantile, float(rates[t])))
    scored = slice(min(count - 1, round(skip_s / step_s)), count)
    over = came[scored] - planned[scored]
    loss = np.maximum(quantile * over, (quantile - 1.0) * over).mean()
    return Backtest(
        loss=float(loss / rates.mean()),
        covered=float((over <= 0.0).mean()),
        excess=float(planned[scored].mean() / came[scored].mean()),
    )
