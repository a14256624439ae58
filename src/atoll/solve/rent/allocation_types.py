"""Questions to the allocator and its answers, as plain arrays.

Kinds of nodes are numbered c = 0..C-1, regions g = 0..R-1, offers k = 0..K-1, services m. Throughput is in
the unit of the role (tokens/s or requests/s), prices in USD per hour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Shortage = Literal["fraction", "priority", "fail"]
Status = Literal["optimal", "feasible", "partial", "infeasible"]
Log = Callable[[float, float, float], None]
"""Called with seconds since the start, the objective of the best plan (inf: none) and the proven bound."""

PREFILL, DECODE, BOTH = 0, 1, 2
"""Phases by number, as items have them."""


@dataclass(frozen=True)
class RoleTemplates:
    """Templates of one role: `counts[i, c]` nodes, `throughput[i]`; `demand` serves all of its service.

    Those that may be used are all, or `among` if that is given.
    """

    phase: int
    counts: NDArray[np.int8]
    throughput: NDArray[np.float64]
    demand: float
    among: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class ServiceDemand:
    """One service: the roles it may be served by, the kinds it may use, its weight under shortage.

    `pairs` are regions (g, h) between which KV caches may travel from prefill to decode, and
    `kv_bytes_per_s` what travels if all of its demand does. Of two with one name, both asked for all of the
    demand, one that `borrows` may use what instances of a single phase of the other leave.
    """

    name: str
    roles: tuple[RoleTemplates, ...]
    allowed: NDArray[np.bool_]
    weight: float = 1.0
    pairs: tuple[tuple[int, int], ...] = ()
    kv_bytes_per_s: float = 0.0
    borrows: bool = False


@dataclass(frozen=True)
class Supply:
    """Machines on offer: offer k is `available[k]` machines of `gpus[k]` GPUs in `region[k]` at `usd[k]`/h.

    `sizes[k]` are the slices (GPUs, kind) that a machine may be cut into, the last being all of it.
    `link[g, h]` bytes/s pass between two regions. `paid` is what counts against the budget, in USD per hour,
    where that is not `usd`.
    """

    regions: tuple[str, ...]
    kinds: tuple[str, ...]
    region: NDArray[np.int64]
    gpus: NDArray[np.int64]
    sizes: tuple[tuple[tuple[int, int], ...], ...]
    spot: NDArray[np.bool_]
    usd: NDArray[np.float64]
    available: NDArray[np.int64]
    link: NDArray[np.float64]
    paid: NDArray[np.float64] | None = None

    @property
    def budgeted(self) -> NDArray[np.float64]:
        """USD per hour that a machine of each offer counts against the budget."""
        return self.usd if self.paid is None else self.paid


@dataclass(frozen=True)
class LossLimits:
    """Losses to survive: any so many `machines` at once, or all that stands in any of some sets of regions.

    A share `keep` of the demand is then still served, of all services or of those named. Machines of offers
    in `spared` are never lost. With `safe` what is found survives also where that takes more than is proven
    to be needed.
    """

    machines: int = 0
    places: tuple[tuple[int, ...], ...] = ()
    keep: float = 1.0
    services: frozenset[str] = frozenset()
    spared: frozenset[int] = frozenset()
    safe: bool = False

    def covers(self, name: str) -> bool:
        """Return whether a service must be kept."""
        return not self.services or name in self.services


class NodePlace(NamedTuple):
    """A node that is a part of a machine: the offer, its GPUs, and which machine, counted from 0."""

    offer: int
    gpus: int
    slot: int


@dataclass(frozen=True)
class AllocationLimits:
    """Limits on the whole: USD per hour of rent, machines, regions per role.

    `losses` are what must be survived. A limit on spot is one on ways to serve (`spot_ways`).
    """

    budget: float | None = None
    max_nodes: int | None = None
    spread: int = 1
    losses: LossLimits | None = None

    def scaled(self, part: float) -> AllocationLimits:
        """Return them with a part of the budget and of the machines."""
        budget = None if self.budget is None else part * self.budget
        return replace(
            self,
            budget=budget,
            max_nodes=None if self.max_nodes is None else int(part * self.max_nodes),
        )


@dataclass(frozen=True)
class RunningColumn:
    """`number` equal instances that run now: keeping them costs no initialisation.

    `gpus` of each offer k that one of them uses, by k; `throughput` is that of its own layout, and `nodes`
    how many it has of each kind, by kind.
    """

    service: int
    phase: int
    region: int
    gpus: tuple[tuple[int, int], ...]
    number: int
    throughput: float
    nodes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class AllocatedInstances:
    """`number` equal instances of one phase of a service in one region.

    Either new ones of the `template` of that role, or kept ones of `running` column. Where spot is limited,
    only those that are `on_spot` may have nodes on spot. Where losses must be survived, `places` are the
    nodes of all of them that are parts of machines.
    """

    service: int
    phase: int
    region: int
    number: int
    template: int | None = None
    running: int | None = None
    on_spot: bool = True
    places: tuple[NodePlace, ...] = ()


@dataclass(frozen=True)
class Statistics:
    """Work done: relaxations, mixes of whole services, integer solves with their nodes, simplex iterations,
    and pairs of template and region: all, and those a better answer could still use.
    """

    rounds: int = 0
    mixes: int = 0
    mips: int = 0
    nodes: int = 0
    iterations: int = 0
    pairs: int = 0
    survivors: int = 0


@dataclass(frozen=True)
class Allocation:
    """The answer. `bound` is proven over all templates and regions; `gap` = (objective - bound) / objective.

    `slices[k, s]` of each size are taken anew of offer k. `objective` = `usd_per_hour` + `init_usd`. With
    status "partial" cost and bound are for the fractions served, and `fraction_bound` is the proven most that
    could be served (common fraction of the services that are served at all, or weighted mean under
    "priority"). Duals are of the relaxation that proved the bound: `demand_usd[m]` USD/h per unit of demand
    of its first role, `node_usd[g, c]` USD/h that one more node would save, at the price of the cheapest
    offer there. Unless it is `proven`, `bound` says nothing.
    """

    status: Status
    instances: tuple[AllocatedInstances, ...]
    machines: NDArray[np.int64]
    slices: dict[tuple[int, int], int]
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
    cut_short: bool = False
    proven: bool = True
    statistics: Statistics = field(default_factory=Statistics)
