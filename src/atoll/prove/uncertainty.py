"""How sure a plan is: promises kept over what the performance model may be wrong by.

Constants of the performance model carry an error: small where they were measured, larger where they were
fitted, wide where they were taken over from another GPU. They are drawn at random, all at once, and the plan
is simulated with each draw. The share of draws in which a service keeps enough promises is the chance that it
does in truth, as far as the model's shape is right. The constant whose draws go most with what is kept is the
one to measure first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.ids import parse_node_type
from atoll.core.rng import stream
from atoll.perf.constants import default_constants, sample_constants
from atoll.perf.layers import ground_constants
from atoll.prove.kept import find_worst, simulate_kept
from atoll.prove.simulation_deadline import keep_deadline

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.perf.constants import ConstantTable
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.deadline import Deadline

DRAWS = 24
_SEED = 401
_REQUESTS_PER_DRAW = 1_500
"""Requests of the service that is asked least often, per draw."""


@dataclass(frozen=True)
class Certainty:
    """The chance that each service keeps enough promises, and what to measure to be surer.

    `measure` is a GPU and a class of operators, "host" or "links"; None where nothing matters or nothing is
    uncertain.
    """

    chance: dict[str, float]
    measure: tuple[str, str] | None = None


def judge_certainty(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    *,
    draws: int = DRAWS,
    deadline: Deadline | None = None,
) -> Certainty:
    """Return how sure a plan is of its promises, from so many draws of the constants."""
    names = sorted(
        {parse_node_type(n.node_type).whole_gpu for i in plan.instances for n in i.nodes}
    )
    gpus = [catalog.gpu(name) for name in names]
    specs = [catalog.model(service.model).llm for service in problem.services]
    limits = [service.engine_limits for service in problem.services]
    guessed = any(each.speculative for each in limits)
    spread = any(each.expert_parallel for each in limits)
    table = ground_constants(default_constants(), specs, gpus, guessed=guessed, spread=spread)
    luck = stream(problem.settings.seed, "constants")
    targets = {service.name: service.target for service in problem.services}
    kept: list[dict[str, float]] = []
    factors: list[dict[tuple[str, str], float]] = []
    watch = keep_deadline(deadline)
    for number in range(draws):
        # Short simulations end before they look at the time themselves.
        watch(number, draws, 0.0)
        drawn = sample_constants(table, luck, gpus)
        found = simulate_kept(
            plan, problem, catalog, _SEED, deadline, constants=drawn, requests=_REQUESTS_PER_DRAW
        )
        kept.append({n: find_worst(one, targets[n]).both for n, one in found.items()})
        factors.append(_factors(table, drawn, names))
    chance = {
        name: float(np.mean([run[name] >= targets[name] for run in kept])) for name in kept[0]
    }
    return Certainty(chance, _matters_most(kept, factors))


def _factors(
    table: ConstantTable, drawn: ConstantTable, gpus: list[str]
) -> dict[tuple[str, str], float]:
    """How much slower classes of operators, host and links of each GPU were drawn, as logarithms."""
    found: dict[tuple[str, str], float] = {}
    for gpu in gpus:
        before, after = table.gpu(gpu), drawn.gpu(gpu)
        for op, one in after.ops.items():
            found[gpu, op.value] = float(np.log(before.op(op).e_b / one.e_b))
        found[gpu, "host"] = float(np.log(after.host))
        found[gpu, "links"] = float(np.log(after.links))
    return found


def _matters_most(
    kept: list[dict[str, float]], factors: list[dict[tuple[str, str], float]]
) -> tuple[str, str] | None:
    """The constant whose draws go most with the least share kept."""
    min_kept = np.array([min(run.values()) for run in kept])
    if len(kept) < 3 or float(min_kept.std()) < 1e-6:
        return None
    best: tuple[float, tuple[str, str]] | None = None
    for key in sorted(factors[0]):
        drawn = np.array([one[key] for one in factors])
        if float(drawn.std()) < 1e-9:
            continue
        strength = abs(float(np.corrcoef(drawn, min_kept)[0, 1]))
        if best is None or strength > best[0]:
            best = strength, key
    return None if best is None else best[1]
