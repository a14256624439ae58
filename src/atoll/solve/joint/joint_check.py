"""Whether an answer to the joint problem keeps (5b) to (5k) and stock: plain loops, straight from these.

Shares no code with the solvers, nor with the problem's derived arrays. (5h) is taken as a cap on all storage
together, which is what the paper's text says. Its formula, which sums over models and tiers only, could be
read once per type; that reading is looser (what keeps the total keeps each part), and `per_type=True`
checks it instead: on the paper's instances a type stores a sixth of the total, so it would never bind.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.solve.joint.joint_problem import JointAnswer, JointProblem

TOLERANCE = 1e-6


@dataclass(frozen=True)
class JointViolation:
    """A constraint that is broken, at which indices, and by how much in its own units (USD, GB, s, ...)."""

    constraint: str
    where: tuple[int, ...]
    amount: float


class _CheckedAnswer:
    def __init__(self, tolerance: float) -> None:
        self.found: list[JointViolation] = []
        self._tolerance = tolerance

    def at_most(self, constraint: str, where: tuple[int, ...], value: float, limit: float) -> None:
        # Written so that a value that is not a number is found too.
        if not value - limit <= self._tolerance * max(1.0, abs(limit)):
            self.found.append(JointViolation(constraint, where, value - limit))


def violations(
    problem: JointProblem,
    answer: JointAnswer,
    *,
    tolerance: float = TOLERANCE,
    per_type: bool = False,
) -> list[JointViolation]:
    """Return all constraints that the answer breaks by more than `tolerance` (relative, 1 at least)."""
    types, models, tiers, configs = problem.delay.shape
    ledger = _CheckedAnswer(tolerance)
    shapes = {
        "config": (answer.config.shape, (models, tiers)),
        "routed": (answer.routed.shape, (types, models, tiers)),
        "placed": (answer.placed.shape, (types, models, tiers)),
        "unmet": (answer.unmet.shape, (types,)),
    }
    for name, (has, wants) in shapes.items():
        if has != wants:
            raise ValueError(f"{name}: has shape {has}, the problem wants {wants}")
    spent, stored = 0.0, [0.0] * types
    for j in range(models):
        for k in range(tiers):
            c = int(answer.config[j, k])
            if not -1 <= c < configs or (c >= 0 and not problem.allowed[k, c]):
                ledger.found.append(JointViolation("5d", (j, k), float(c)))
                continue
            gpus = int(problem.tp[c]) * int(problem.pp[c]) if c >= 0 else 0
            spent += problem.horizon_h * float(problem.gpu_usd[k]) * gpus
            work = cache = 0.0
            for i in range(types):
                x, z = float(answer.routed[i, j, k]), bool(answer.placed[i, j, k])
                ledger.at_most("5k", (i, j, k), -x, 0.0)
                ledger.at_most("5k", (i, j, k), x, 1.0 if z else 0.0)
                ledger.at_most("5k", (i, j, k), 1.0 if z else 0.0, 1.0 if c >= 0 else 0.0)
                tokens_h = float(problem.tokens[i]) * float(problem.rate[i])
                work += float(problem.compute[i, j, k]) * tokens_h / 1e3 * x
                cache += float(problem.tokens[i]) * float(problem.residence_s[i, j, k]) * x
                weights = float(problem.weights_gb[j]) if z else 0.0
                stored[i] += weights + float(problem.data_gb[i]) * tokens_h * x
            ledger.at_most(
                "5g", (j, k), work, problem.efficiency * 3600.0 * float(problem.tflops[k]) * gpus
            )
            if c >= 0:
                shard = (float(problem.weights_gb[j]) + float(problem.kv_gb[j]) * cache) / gpus
                ledger.at_most("5f", (j, k), shard, float(problem.memory_gb[k]))
    spent += problem.horizon_h * problem.storage_usd * sum(stored)
    _check_stock(problem, answer, ledger)
    ledger.at_most("5c", (), spent, problem.budget)
    if per_type:
        for i in range(types):
            ledger.at_most("5h", (i,), stored[i], problem.storage_gb)
    else:
        ledger.at_most("5h", (), sum(stored), problem.storage_gb)
    for i in range(types):
        _check_type(problem, answer, i, ledger)
    return ledger.found


def _check_stock(problem: JointProblem, answer: JointAnswer, ledger: _CheckedAnswer) -> None:
    if problem.lot is None or problem.stock is None:
        return
    used = [0.0] * len(problem.stock)
    for configs in answer.config.tolist():
        for k, c in enumerate(configs):
            if c >= 0:
                used[int(problem.lot[k])] += float(problem.tp[c] * problem.pp[c])
    for lot, gpus in enumerate(used):
        ledger.at_most("stock", (lot,), gpus, float(problem.stock[lot]))


def _check_type(problem: JointProblem, answer: JointAnswer, i: int, ledger: _CheckedAnswer) -> None:
    _, models, tiers, configs = problem.delay.shape
    unmet = float(answer.unmet[i])
    served = delay = error = 0.0
    for j in range(models):
        for k in range(tiers):
            x, c = float(answer.routed[i, j, k]), int(answer.config[j, k])
            served += x
            error += float(problem.error[i, j, k]) * x
            if 0 <= c < configs:
                delay += float(problem.delay[i, j, k, c]) * x
    ledger.at_most("5b", (i,), abs(served + unmet - 1.0), 0.0)
    ledger.at_most("u", (i,), -unmet, 0.0)
    ledger.at_most("u", (i,), unmet, float(problem.max_unmet[i]))
    ledger.at_most("5i", (i,), delay, float(problem.delay_limit[i]))
    ledger.at_most("5j", (i,), error, float(problem.error_limit[i]))
