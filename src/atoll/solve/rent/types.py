"""What an allocation is asked and what it answers, as plain arrays.

Node types are numbered c = 0..C-1, regions g = 0..R-1, offers k = 0..K-1. Rates are in the unit of the
role (tokens/s or requests/s), prices in USD per hour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Market = Literal["on-demand", "spot", "owned"]
Shortage = Literal["fraction", "priority", "fail"]
Status = Literal["optimal", "feasible", "partial", "infeasible"]
Log = Callable[[float, float, float], None]
"""Called with seconds since the start, the objective of the best plan (inf: none) and the proven bound."""


@dataclass(frozen=True)
class RoleDemand:
    """One role: its templates (`counts[i, c]` nodes, `throughput[i]` per second) and what is asked of it.

    `allowed[c]` says which node types may be used (None: all); `weight` is its priority under shortage.
    """

    name: str
    counts: NDArray[np.int8]
    throughput: NDArray[np.float64]
    demand: float
    allowed: NDArray[np.bool_] | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Supply:
    """What can be rented: offer k is up to `available[k]` nodes of `type[k]` in `region[k]` at `usd[k]`/h."""

    regions: tuple[str, ...]
    node_types: tuple[str, ...]
    gpus: NDArray[np.int64]
    region: NDArray[np.int64]
    type: NDArray[np.int64]
    market: tuple[Market, ...]
    usd: NDArray[np.float64]
    available: NDArray[np.int64]


@dataclass(frozen=True)
class AllocationLimits:
    """Limits on the whole: USD per hour of rent, share of GPUs in use on spot, nodes, regions per role."""

    budget: float | None = None
    spot_share: float | None = None
    max_nodes: int | None = None
    spread: int = 1


@dataclass(frozen=True)
class RunningColumn:
    """`number` instances of node multiset `counts` that run now: keeping them costs no initialisation.

    `throughput` is needed where the multiset is not among the role's templates (dominated ones are
    dropped there); it is looked up otherwise.
    """

    role: int
    region: int
    counts: NDArray[np.int8]
    number: int
    throughput: float | None = None


@dataclass(frozen=True)
class AllocatedInstances:
    """`number` equal instances of one role in one region, `kept` of which run already.

    `template` is the index into the role's templates, or None for a running multiset not among them.
    """

    role: int
    region: int
    template: int | None
    counts: NDArray[np.int8]
    throughput: float
    number: int
    kept: int = 0


@dataclass(frozen=True)
class Statistics:
    """Work done: relaxations solved, columns and cuts over single instances, mixes of whole roles, integer
    solves, and (template, region) pairs: all, and those a better answer could still use.
    """

    rounds: int = 0
    columns: int = 0
    cuts: int = 0
    pairs: int = 0
    survivors: int = 0
    mixes: int = 0
    mips: int = 0


@dataclass(frozen=True)
class Allocation:
    """The answer. `bound` is proven over all templates and regions; `gap` = (objective - bound) / objective.

    `objective` = `usd_per_hour` + `init_usd`. With status "partial" cost and bound are for the fractions
    served, and `fraction_bound` is the proven most that could be served (common fraction of the roles that
    are served at all, or weighted mean under "priority"). Duals are of the relaxation that proved the bound,
    0 where it needed none: `demand_usd[r]` USD/h per unit of demand rate, `node_usd[g, c]` USD/h
    that one more node on offer would save, at the price of the cheapest offer there.
    """

    status: Status
    instances: tuple[AllocatedInstances, ...]
    offers_used: NDArray[np.int64]
    usd_per_hour: float
    init_usd: float
    objective: float
    bound: float
    gap: float
    served: NDArray[np.float64]
    fraction_bound: float
    demand_usd: NDArray[np.float64]
    node_usd: NDArray[np.float64]
    binding: tuple[str, ...]
    seconds: float
    cpu_seconds: float
    statistics: Statistics = field(default_factory=Statistics)
