"""The (model, tier, configuration) triples that are worth opening, as rows of arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.solve.joint.joint_problem import Floats, Ints, JointProblem


@dataclass(frozen=True)
class Candidates:
    """Configurations worth opening, one row each: pair (j, k), configuration c, and what they can do.

    `delay`, `error`, `load`, `cache`, `most` are [candidate, type]; `load` and `cache` are shares of what the
    configuration has, `most` the share of a type that it could serve alone.
    """

    model: Ints
    tier: Ints
    config: Ints
    pair: Ints
    rent: Floats
    delay: Floats
    error: Floats
    load: Floats
    cache: Floats
    most: Floats

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.model)

    @classmethod
    def of(cls, problem: JointProblem) -> Candidates:
        """Collect those that fit memory and budget and that no other of their pair beats."""
        _, models, tiers, _ = problem.shape
        rows = [
            (j, k, c) for j in range(models) for k in range(tiers) for c in _useful(problem, j, k)
        ]
        j, k, c = (np.array([row[axis] for row in rows], np.int64) for axis in range(3))
        gpus = problem.gpus[c]
        load = problem.load_tflop[:, j, k].T / (problem.capacity_tflop[k] * gpus)[:, None]
        room = problem.memory_gb[k] * gpus - problem.weights_gb[j]
        cache = problem.kv_load_gb[:, j, k].T / np.maximum(room, 1e-12)[:, None]
        delay, error = problem.delay[:, j, k, c].T, problem.error[:, j, k].T
        tightest = np.maximum.reduce(
            [load, cache, delay / problem.delay_limit, error / problem.error_limit]
        )
        return cls(
            j,
            k,
            c,
            np.asarray(np.unique(j * tiers + k, return_inverse=True)[1], np.int64),
            problem.horizon_h * problem.gpu_usd[k] * gpus,
            delay,
            error,
            load,
            cache,
            1.0 / np.maximum(tightest, 1.0),
        )


def _useful(problem: JointProblem, j: int, k: int) -> list[int]:
    gpus, delay = problem.gpus, problem.delay[:, j, k]
    rent = problem.horizon_h * problem.gpu_usd[k] * gpus
    fits = [
        c
        for c in range(problem.shape[3])
        if problem.allowed[k, c]
        and problem.weights_gb[j] < problem.memory_gb[k] * gpus[c]
        and rent[c] <= problem.budget
    ]

    def beaten(c: int, by: int) -> bool:
        # Fewer GPUs would also mean less memory and FLOP/s, so only equal numbers compare.
        if by == c or gpus[by] != gpus[c] or not (delay[:, by] <= delay[:, c]).all():
            return False
        return bool((delay[:, by] < delay[:, c]).any()) or by < c

    return [c for c in fits if not any(beaten(c, by) for by in fits)]
