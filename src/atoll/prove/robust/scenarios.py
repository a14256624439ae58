"""Ways that things may turn out: scenarios, drawn from a risk model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.ids import parse_node_type
from atoll.core.rng import stream
from atoll.perf.constants import default_constants, sample_constants
from atoll.perf.layers import ground_constants
from atoll.plan.robustness import SPOT_LOSS, RiskModel

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.perf.constants import ConstantTable
    from atoll.plan.problem import Problem

Pool = tuple[str, str]
"""Spot machines that are lost together: a region and a node type."""
DRAWS = 64
"""Draws of the constants that scenarios share: what follows from one is worked out once."""


@dataclass(frozen=True)
class Scenario:
    """One way that things may turn out.

    `demand` is by service what is asked over what the fleet file says, `price` the same for the price of
    spot pools, `lost` are pools whose machines are gone, `draw` is which of the set's `constants` hold.
    """

    number: int
    demand: Mapping[str, float]
    price: Mapping[Pool, float]
    lost: frozenset[Pool]
    draw: int


@dataclass(frozen=True)
class ScenarioSet:
    """Scenarios drawn together, and the constants that they refer to; `name` tells sets apart."""

    name: str
    scenarios: tuple[Scenario, ...]
    constants: tuple[ConstantTable, ...]

    def __len__(self) -> int:
        return len(self.scenarios)


def spot_pools(problem: Problem) -> tuple[Pool, ...]:
    """Return the pools of spot machines on offer, sorted."""
    return tuple(sorted({(o.region, o.node_type) for o in problem.offers if o.market == "spot"}))


def resolve_risk(problem: Problem, risk: RiskModel | None = None) -> RiskModel:
    """Return a risk model (unless given the fleet's, else the usual one) with no question left open."""
    asked = risk or problem.risk or RiskModel()
    if asked.spot_loss is not None:
        return asked
    rate_per_h = problem.limits.spot_loss_per_h
    # The chance of a loss within an hour, from a rate of losses.
    chance = 1.0 - math.exp(-rate_per_h) if rate_per_h > 0.0 else SPOT_LOSS
    return asked.model_copy(update={"spot_loss": chance})


def draw_scenarios(
    problem: Problem,
    catalog: Catalog,
    risk: RiskModel,
    number: int,
    *,
    name: str,
    together: Mapping[str, str] | None = None,
) -> ScenarioSet:
    """Return so many scenarios; the set's `name` and the problem's seed fix them.

    Each number of demand, price and loss has a stream of its own, so that a service or a pool more changes
    none of the others. Services that are `together` (by service, the name of a group) have the same demand.
    Demand and prices are log-normal with the fleet's figures for means.
    """
    seed = problem.settings.seed
    groups = {s.name: (together or {}).get(s.name, s.name) for s in problem.services}
    common = stream(seed, "robust", name, "demand").standard_normal(number)
    own = {
        group: stream(seed, "robust", name, "demand", group).standard_normal(number)
        for group in sorted(set(groups.values()))
    }
    rho = risk.demand_correlation
    demand = {}
    for service, group in groups.items():
        spread = risk.demand_spread(service)
        # A common part and one of its own: any two groups are then correlated by rho.
        z = math.sqrt(rho) * common + math.sqrt(1.0 - rho) * own[group]
        # Half the variance is taken off, so that the mean of the log-normal is 1.
        demand[service] = [math.exp(spread * float(x) - 0.5 * spread**2) for x in z]
    pools = spot_pools(problem)
    price, lost = {}, {}
    for pool in pools:
        z = stream(seed, "robust", name, "price", *pool).standard_normal(number)
        sd = risk.spot_price_sd
        price[pool] = [math.exp(sd * float(x) - 0.5 * sd**2) for x in z]
        lost[pool] = stream(seed, "robust", name, "loss", *pool).random(number)
    chance = risk.spot_loss or 0.0
    # Few tables of constants, shared in turn: what nodes carry is worked out once for each.
    draws = min(number, DRAWS) if risk.performance else 1
    return ScenarioSet(
        name,
        tuple(
            Scenario(
                at,
                {service: some[at] for service, some in demand.items()},
                {pool: some[at] for pool, some in price.items()},
                frozenset(pool for pool in pools if lost[pool][at] < chance),
                at % draws,
            )
            for at in range(number)
        ),
        _constants(problem, catalog, draws, risk.performance, name),
    )


def _constants(
    problem: Problem, catalog: Catalog, draws: int, uncertain: bool, name: str
) -> tuple[ConstantTable, ...]:
    table = default_constants()
    if not uncertain:
        return (table,)
    gpus = [
        catalog.gpu(gpu) for gpu in sorted({parse_node_type(k).whole_gpu for k in problem.kinds})
    ]
    specs = [catalog.model(service.model).llm for service in problem.services]
    limits = [service.engine_limits for service in problem.services]
    guessed = any(each.speculative for each in limits)
    spread = any(each.expert_parallel for each in limits)
    table = ground_constants(table, specs, gpus, guessed=guessed, spread=spread)
    luck = stream(problem.settings.seed, "robust", name, "constants")
    return tuple(sample_constants(table, luck, gpus) for _ in range(draws))
