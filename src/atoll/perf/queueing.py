"""Queueing: how much of its capacity a server can be given before half of what arrives waits too long.

Requests arrive at random (Poisson). Where one is served after the other, s seconds each on average, a server
that is busy for a share rho of the time makes them wait K s / (1 - rho) on average if at all, with
K = E[s^2] / (2 E[s]^2) (Pollaczek and Khinchine), and the wait is close to exponential, so that half of them
wait longer than

    K s H(rho),   H(rho) = ln(2 rho) / (1 - rho)     (0 up to rho = 1/2: half of them find it idle)

In a pipeline several such waits add up, and half of their sums are longer than about the mean of it: there
H(rho) = rho / (1 - rho).

Where there are c places instead, half of those that arrive find one free if a places are taken on average
and c = a + sqrt(a) / 2 (square-root staffing: Halfin and Whitt's chance to wait is 0.505 there); places
of different sizes count with q = E[x^2] / E[x]^2, sqrt(a q) / 2.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from atoll.perf.operators import Array

BUSIEST = 0.95
"""The largest share of its capacity that a server is given; beyond it a wait takes too long to settle."""


@lru_cache(maxsize=64)
def waits_by_load(share: float) -> tuple[Array, Array]:
    """Return H at rising loads of a single stage, and those loads; shared arrays, not to be written to."""
    # From where H is 0; closer to each other towards `BUSIEST`, where waits grow fast.
    loads = 1.0 - np.geomspace(share, 1.0 - BUSIEST, 128)
    if share == 0.5:
        return np.log(2.0 * loads) / (1.0 - loads), loads
    return np.log(np.maximum(loads / (1.0 - share), 1.0)) / (1.0 - loads), loads


def longest_wait(load: Array, stages: Array, share: float = 0.5) -> Array:
    """Return H: how long a share of what arrives waits at most at a stage, in units of K s.

    Infinite past `BUSIEST`.
    """
    within = np.clip(load, 0.0, BUSIEST)
    if share != 0.5:
        once = np.log(np.maximum(within / (1.0 - share), 1.0)) / (1.0 - within)
        return np.asarray(np.where(load > BUSIEST, np.inf, once / stages))
    one = np.log(np.maximum(2.0 * within, 1.0)) / (1.0 - within)
    wait = np.where(stages > 1.0, within / (1.0 - within), one)
    return np.asarray(np.where(load > BUSIEST, np.inf, wait))


def load_within(wait: Array, stages: Array, share: float = 0.5) -> Array:
    """Return the largest load at which a share of what arrives waits `wait` at most, in units of K s."""
    if share != 0.5:
        strict = np.interp(wait * stages, *waits_by_load(share))
        return np.asarray(np.minimum(strict, load_within(wait, stages)) if share > 0.5 else strict)
    one = np.interp(wait, *waits_by_load(0.5))
    # Without the fraction of two infinities: 1 - 1 / (1 + wait).
    many = np.minimum(1.0 - 1.0 / (1.0 + np.maximum(wait, 0.0)), BUSIEST)
    return np.asarray(np.where(stages > 1.0, many, one))


def places_taken(places: Array, spread: float) -> Array:
    """Return how many of so many places may be taken on average for half of what arrives to find one free.

    `spread` is q, 1 where all that arrives takes the same room.
    """
    quarter = np.sqrt(spread) / 4.0
    return np.asarray((np.sqrt(places + quarter**2) - quarter) ** 2)
