"""Small random joint problems, and the paper's own formulation of them, solved by scipy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from atoll.solve.joint.joint_problem import JointProblem

Term = tuple[tuple[object, ...], float]


def random_problem(seed: int, *, types: int = 3, models: int = 3, tiers: int = 2) -> JointProblem:
    """A problem in which every constraint can bind, unserved demand included."""
    draw = np.random.default_rng(seed)
    tp, pp = np.array([1, 2, 4, 1, 2]), np.array([1, 1, 1, 2, 2])
    weights = np.sort(draw.uniform(4, 60, models))
    memory, speed = draw.uniform(20, 50, tiers), draw.uniform(0.5, 2.0, tiers)
    comp = draw.uniform(0.02, 0.05, (types, 1, 1)) * weights[None, :, None] / speed
    comm = draw.uniform(0.0, 0.2, (types, models, tiers))
    error = draw.uniform(0.05, 0.15, (types, 1, 1)) * (10.0 / weights[None, :, None]) ** 0.5
    allowed = draw.random((tiers, len(tp))) < 0.8
    allowed[:, 0] = True
    return JointProblem(
        horizon_h=24.0,
        budget=float(draw.uniform(60, 200)),
        storage_gb=float(draw.uniform(150, 500)),
        storage_usd=0.002,
        efficiency=0.9,
        rate=draw.uniform(1000, 4000, types),
        tokens=draw.uniform(200, 600, types),
        data_gb=draw.uniform(1e-5, 6e-5, types),
        delay_usd=draw.uniform(0.1, 2.0, types),
        unmet_usd=draw.uniform(50, 300, types),
        max_unmet=np.ones(types),
        delay_limit=draw.uniform(0.8, 2.5, types),
        error_limit=draw.uniform(0.04, 0.12, types),
        weights_gb=weights,
        kv_gb=draw.uniform(1e-4, 4e-4, models),
        memory_gb=memory,
        tflops=draw.uniform(3, 12, tiers),
        gpu_usd=draw.uniform(0.4, 2.0, tiers),
        tp=tp,
        pp=pp,
        allowed=allowed,
        delay=comp[..., None] / tp + comm[..., None] * pp,
        error=error * draw.uniform(0.9, 1.3, (1, 1, tiers)),
        compute=2.0 * weights[None, :, None] * draw.uniform(0.8, 1.2, (types, 1, tiers)),
        residence_s=draw.uniform(10, 100, (types, models, tiers)),
    )


def paper_optimum(problem: JointProblem) -> float:  # noqa: C901  (as long as the paper's list)
    """Solve (5a) to (5k) as printed, with x, y, z, q, w and McCormick's v; return the least cost."""
    p, (types, models, tiers, configs) = problem, problem.delay.shape
    names: dict[tuple[object, ...], int] = {}
    cost: list[float] = []
    top: list[float] = []
    whole: list[int] = []

    def new(key: tuple[object, ...], usd: float, most: float, integer: bool) -> None:
        names[key] = len(cost)
        cost.append(usd)
        top.append(most)
        whole.append(int(integer))

    stock = p.horizon_h * p.storage_usd
    pairs = [(j, k) for j in range(models) for k in range(tiers)]
    for j, k in pairs:
        new(("y", j, k), p.horizon_h * p.gpu_usd[k], 1e3, True)
        new(("q", j, k), 0.0, 1.0, True)
        for c in range(configs):
            new(("w", j, k, c), 0.0, 1.0 if p.allowed[k, c] else 0.0, True)
        for i in range(types):
            new(("z", i, j, k), stock * p.weights_gb[j], 1.0, True)
            new(("x", i, j, k), stock * p.data_gb[i] * p.tokens[i] * p.rate[i], 1.0, False)
            for c in range(configs):
                new(("v", i, j, k, c), p.delay_usd[i] * p.delay[i, j, k, c], 1.0, False)
    for i in range(types):
        new(("u", i), p.unmet_usd[i], p.max_unmet[i], False)
    rows: list[np.ndarray] = []
    lower: list[float] = []
    upper: list[float] = []

    def row(terms: Sequence[Term], low: float, high: float) -> None:
        line = np.zeros(len(cost))
        for key, value in terms:
            line[names[key]] += value
        rows.append(line)
        lower.append(low)
        upper.append(high)

    inf = np.inf
    every = range(configs)
    gpus = [int(n) * int(m) for n, m in zip(p.tp, p.pp, strict=True)]
    storage: list[Term] = []
    for j, k in pairs:
        row([(("w", j, k, c), 1.0) for c in every] + [(("q", j, k), -1.0)], 0.0, 0.0)
        row([(("w", j, k, c), gpus[c]) for c in every] + [(("y", j, k), -1.0)], 0.0, 0.0)
        memory: list[Term] = [(("w", j, k, c), p.weights_gb[j] / gpus[c]) for c in every]
        memory += [
            (("v", i, j, k, c), p.kv_gb[j] / gpus[c] * p.tokens[i] * p.residence_s[i, j, k])
            for c in every
            for i in range(types)
        ]
        row([*memory, (("q", j, k), -p.memory_gb[k])], -inf, 0.0)
        work: list[Term] = [
            (("x", i, j, k), p.compute[i, j, k] * p.tokens[i] * p.rate[i] / 1e3)
            for i in range(types)
        ]
        row([*work, (("y", j, k), -p.efficiency * 3600 * p.tflops[k])], -inf, 0.0)
        for i in range(types):
            x, z = ("x", i, j, k), ("z", i, j, k)
            row([(x, 1.0), (z, -1.0)], -inf, 0.0)
            row([(z, 1.0), (("q", j, k), -1.0)], -inf, 0.0)
            storage += [(z, p.weights_gb[j]), (x, p.data_gb[i] * p.tokens[i] * p.rate[i])]
            for c in every:
                v, w = ("v", i, j, k, c), ("w", j, k, c)
                row([(v, 1.0), (x, -1.0)], -inf, 0.0)
                row([(v, 1.0), (w, -1.0)], -inf, 0.0)
                row([(v, 1.0), (x, -1.0), (w, -1.0)], -1.0, inf)
    row(storage, -inf, p.storage_gb)
    rent: list[Term] = [(("y", j, k), p.horizon_h * p.gpu_usd[k]) for j, k in pairs]
    row(rent + [(key, stock * gb) for key, gb in storage], -inf, p.budget)
    for i in range(types):
        row([(("x", i, j, k), 1.0) for j, k in pairs] + [(("u", i), 1.0)], 1.0, 1.0)
        delay: list[Term] = [
            (("v", i, j, k, c), p.delay[i, j, k, c]) for j, k in pairs for c in every
        ]
        row(delay, -inf, p.delay_limit[i])
        row([(("x", i, j, k), p.error[i, j, k]) for j, k in pairs], -inf, p.error_limit[i])
    found = milp(
        np.array(cost),
        constraints=LinearConstraint(np.array(rows), lower, upper),
        bounds=Bounds(0.0, np.array(top)),
        integrality=np.array(whole),
        options={"mip_rel_gap": 1e-7},
    )
    return float(found.fun)
