"""Stage 2: what a placement costs once delays, errors and arrivals are known, (12a) to (12f).

The placement (config and z) is fixed; each scenario routes anew at the least cost of delay and unserved
demand. Memory, budget and storage are no rows of stage 2, as in the paper. Delays and errors vary for each
(i, j, k) on its own, arrivals for each type; a stress factor multiplies all delays and errors.

Without (12c) a scenario falls apart into one small program per type, with three rows: share, delay,
error. Its vertices have at most three routes, so they are listed, for all scenarios at once, and the best
one is exact. Where these routes together overload a GPU group, the scenario is solved whole with HiGHS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from atoll.core.errors import UsageError
from atoll.core.rng import stream
from atoll.solve.joint.joint_problem import (
    Bools,
    Floats,
    Ints,
    JointAnswer,
    JointCost,
    JointProblem,
)
from atoll.solve.lp import INFINITY, LinearProgram, Sparse

UNSERVED = 0.01
"""A type of which more than this share is unserved counts as a violation, as in the paper."""
_SLACK = 1e-9


@dataclass(frozen=True)
class Scenarios:
    """Factors on the nominal values: `delay`, `error` [s, i, j, k] (or 1 for an axis), `rate` [s, i]."""

    delay: Floats
    error: Floats
    rate: Floats

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.rate)


def draw_scenarios(
    problem: JointProblem,
    count: int = 500,
    seed: int = 0,
    *,
    delay: float = 0.25,
    error: float = 0.25,
    rate: float = 0.2,
    stress: float = 1.0,
) -> Scenarios:
    """Draw uniform factors within +- those shares; `stress` (1.2, 1.5) then inflates delays and errors."""
    if count < 1:
        raise UsageError(f"count: at least one scenario is needed, got {count}")
    types, models, tiers, _ = problem.shape

    def drawn(name: str, spread: float, shape: tuple[int, ...]) -> Floats:
        return stream(seed, "choice", "scenario", name).uniform(1.0 - spread, 1.0 + spread, shape)

    box = (count, types, models, tiers)
    return Scenarios(
        stress * drawn("delay", delay, box),
        stress * drawn("error", error, box),
        drawn("rate", rate, (count, types)),
    )


def demand_only(rate: Floats) -> Scenarios:
    """Scenarios in which nothing but arrivals change; `rate` [s, i] are factors."""
    one = np.ones((len(rate), 1, 1, 1))
    return Scenarios(one, one, np.asarray(rate, np.float64))


@dataclass(frozen=True)
class OperatedCost:
    """Mean cost of a placement over scenarios (USD for the horizon), its terms, and each scenario's cost.

    `violation_rate` is the share of (scenario, type) with more than 1 % unserved; `unmet` [s, i];
    `solved_whole` counts the scenarios in which GPU groups were short.
    """

    mean: float
    violation_rate: float
    terms: JointCost
    each: Floats
    unmet: Floats
    solved_whole: int


def evaluate(problem: JointProblem, answer: JointAnswer, scenarios: Scenarios) -> OperatedCost:
    """Route anew in every scenario and return what the placement costs on average."""
    routed, delay, short = _operate(problem, answer, scenarios)
    unmet = np.clip(1.0 - routed.sum(axis=2), 0.0, 1.0)
    return _cost(problem, answer, scenarios, routed, unmet, delay, short)


def reroute(problem: JointProblem, answer: JointAnswer) -> JointAnswer:
    """Return a placement with the routes that cost least at nominal values."""
    routed, _, _ = _operate(problem, answer, demand_only(np.ones((1, problem.shape[0]))))
    model, tier = np.nonzero(answer.config >= 0)
    whole = np.zeros(answer.placed.shape)
    whole[:, model, tier] = routed[0]
    unmet = np.clip(1.0 - routed[0].sum(axis=1), 0.0, 1.0)
    return JointAnswer(answer.config, whole, answer.placed, unmet)


def _operate(
    problem: JointProblem, answer: JointAnswer, scenarios: Scenarios
) -> tuple[Floats, Floats, int]:
    """Return x and delays [s, i, pair] of the active pairs, and in how many scenarios GPUs were short."""
    count, types = scenarios.number, problem.shape[0]
    model, tier = (np.asarray(axis, np.int64) for axis in np.nonzero(answer.config >= 0))
    config = answer.config[model, tier]
    placed = answer.placed[:, model, tier]
    delay = problem.delay[:, model, tier, config] * _at(scenarios.delay, model, tier)
    error = problem.error[:, model, tier] * _at(scenarios.error, model, tier)
    load = problem.load_tflop[:, model, tier] / (
        problem.capacity_tflop[tier] * problem.gpus[config]
    )
    load = load * scenarios.rate[:, :, None]
    shape = (count, types, len(model))
    delay, error = np.broadcast_to(delay, shape), np.broadcast_to(error, shape)
    gain = problem.unmet_usd[:, None] - problem.delay_usd[:, None] * delay
    routed = np.zeros(shape)
    for i in range(types):
        routes = np.nonzero(placed[i])[0]
        rows = np.stack(
            [
                np.ones((count, len(routes))),
                delay[:, i, routes] / problem.delay_limit[i],
                error[:, i, routes] / problem.error_limit[i],
            ],
            axis=1,
        )
        routed[:, i, routes] = _best_vertex(gain[:, i, routes], rows)
    short = np.nonzero(((routed * load).sum(axis=1) > 1.0 + _SLACK).any(axis=1))[0]
    limited = delay / problem.delay_limit[:, None], error / problem.error_limit[:, None]
    for s in short:
        routed[s] = _whole(gain[s], limited[0][s], limited[1][s], load[s], placed)
    return routed, delay, len(short)


def _cost(
    problem: JointProblem,
    answer: JointAnswer,
    scenarios: Scenarios,
    routed: Floats,
    unmet: Floats,
    delay: Floats,
    short: int,
) -> OperatedCost:
    hours, price = problem.horizon_h, problem.storage_usd
    gpus = np.where(answer.config >= 0, problem.gpus[np.maximum(answer.config, 0)], 0)
    rent = hours * float(gpus.sum(axis=0) @ problem.gpu_usd)
    weights = hours * price * float(answer.placed.sum(axis=(0, 2)) @ problem.weights_gb)
    data = hours * price * (scenarios.rate * (1.0 - unmet)) @ problem.data_stored_gb
    late = (routed * delay).sum(axis=2) @ problem.delay_usd
    missed = unmet @ problem.unmet_usd
    each = rent + weights + data + late + missed
    return OperatedCost(
        mean=float(each.mean()),
        violation_rate=float((unmet > UNSERVED).mean()),
        terms=JointCost(
            rent, weights, float(data.mean()), float(late.mean()), float(missed.mean())
        ),
        each=each,
        unmet=unmet,
        solved_whole=short,
    )


def _at(factor: Floats, model: Ints, tier: Ints) -> Floats:
    """Return the factors of the active pairs, [s, i, pair] or with axes of 1."""
    if factor.shape[2] == 1 and factor.shape[3] == 1:
        return factor[:, :, 0, :]
    return factor[:, :, model, tier]


def _best_vertex(gain: Floats, rows: Floats) -> Floats:
    """Maximise gain x, rows x <= 1, x >= 0 in every scenario: `gain` [s, a], `rows` [s, 3, a] -> x [s, a]."""
    count, routes = gain.shape
    best = np.zeros((count, routes))
    value = np.zeros(count)
    for chosen, share in _vertices(rows):
        use = np.einsum("sra,sa->sr", rows[:, :, chosen], share)
        # Sums that are not numbers compare false: a singular choice is no vertex.
        fine = (share >= -_SLACK).all(axis=1) & (use <= 1.0 + _SLACK).all(axis=1)
        worth = np.where(fine, (gain[:, chosen] * share).sum(axis=1), -INFINITY)
        better = np.nonzero(worth > value)[0]
        value[better] = worth[better]
        best[better] = 0.0
        best[np.ix_(better, np.array(chosen))] = np.maximum(share[better], 0.0)
    return best


def _vertices(rows: Floats) -> Iterator[tuple[list[int], Floats]]:
    """Yield routes and their shares [s, routes] where as many rows are tight as there are routes."""
    routes = rows.shape[2]
    with np.errstate(divide="ignore", invalid="ignore"):
        for size in range(1, min(3, routes) + 1):
            for chosen in combinations(range(routes), size):
                part = rows[:, :, list(chosen)]
                if size == 1:
                    yield list(chosen), 1.0 / part.max(axis=1)
                    continue
                for tight in combinations(range(3), size):
                    yield list(chosen), _cramer(part[:, list(tight), :])


def _cramer(matrix: Floats) -> Floats:
    """Solve matrix x = 1 for a stack of 2 x 2 or 3 x 3 matrices; not finite where singular."""
    whole = _determinant(matrix)
    whole = np.where(np.abs(whole) < 1e-12, np.nan, whole)
    shares = []
    for column in range(matrix.shape[2]):
        other = matrix.copy()
        other[:, :, column] = 1.0
        shares.append(_determinant(other) / whole)
    return np.stack(shares, axis=1)


def _determinant(matrix: Floats) -> Floats:
    if matrix.shape[1] == 2:
        return np.asarray(matrix[:, 0, 0] * matrix[:, 1, 1] - matrix[:, 0, 1] * matrix[:, 1, 0])
    a, b, c = matrix[:, 0], matrix[:, 1], matrix[:, 2]
    return np.asarray((a * np.cross(b, c)).sum(axis=1))


def _whole(gain: Floats, delay: Floats, error: Floats, load: Floats, placed: Bools) -> Floats:
    """Solve one scenario with (12c): all arrays [i, pair]; return x [i, pair]."""
    types, pairs = gain.shape
    i, a = np.nonzero(placed)
    columns = np.arange(len(i))
    entries = Sparse.of(
        np.concatenate([i, types + i, 2 * types + i, 3 * types + a]),
        np.tile(columns, 4),
        np.concatenate([np.ones(len(i)), delay[i, a], error[i, a], load[i, a]]),
        3 * types + pairs,
    )
    lp = LinearProgram()
    nothing = np.zeros(0, np.int64)
    lp.add_columns(
        -gain[i, a],
        np.zeros(len(i)),
        np.ones(len(i)),
        Sparse.of(nothing, nothing, np.zeros(0), len(i)),
    )
    number = 3 * types + pairs
    lp.add_rows(np.full(number, -INFINITY), np.ones(number), entries)
    routed = np.zeros((types, pairs))
    routed[i, a] = np.clip(lp.solve().values, 0.0, 1.0)
    return routed
