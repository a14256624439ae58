"""Simulated latencies of services by their replicas, filled as far as they are asked for.

An entry says how many replicas a service has of which shapes, at most one shape for each GPU type of a site:
the data and tensor parallel degrees of OpenFabric. Its cost is the mean latency of the service's requests
over a horizon, in simulation, weighted by its share of all requests.

Replicas share arrivals in proportion to what they carry, so every replica of an entry has the same load:
arrivals over capacity. Until an entry is simulated its optimistic cost comes from few replicas of each of its
shapes, simulated alone at that load or a lighter one,

    latency ~ sum_shapes share * latency of the shape at that load

between loads on a grid, less a slack for chance; where these are not known either, from lighter loads and,
with more arrivals than capacity, from the least time until they can be done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.plan.problem import Problem, Service
from atoll.solve.array_types import Bools, Floats, Ints
from atoll.solve.effort import Answered, Latency
from atoll.solve.place.cp.replica_shapes import (
    Replicas,
    ReplicaShape,
    plan_of_replicas,
    shapes_of,
    site_stock,
)

LOADS = (
    *(0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75),
    *(2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0, 50.0),
)  # fmt: skip
"""Arrivals over capacity at which shapes are simulated."""
SLACK = 0.07
"""Share by which replicas simulated alone may be slower, by chance, than the same beside others."""
_CAPACITY = 1.25
"""More than this many times what a shape is said to carry, it cannot: in bounds for too many arrivals."""
_ALONE = 4
"""Replicas of a shape that are simulated together, where so many fit."""
_LIGHT_LOAD = 0.5
"""Arrivals over capacity up to which a load is light: few requests arrive over the horizon."""
_LIGHT_REQUESTS = 100
"""Requests that are simulated at light loads, so that their mean says something."""
_MAX_LIGHT_HORIZON = 40.0
"""How many times the horizon such a simulation may last."""
_MAX_ENTRIES = 40_000
"""Entries of one service: with more GPU types, fewer numbers of replicas are tried."""
_MIN_HORIZON_S = 30.0
_MAX_HORIZON_S = 300.0
_MIN_REQUESTS = 1_000
"""Requests over the horizon of the service that is asked least often."""
_MAX_REQUESTS = 40_000
"""Requests over the horizon of all services: what a simulation takes grows with them."""

Asked = tuple[int, int, int]
"""A service, one of its shapes, and a load on the grid, by number."""


def horizon_of(problem: Problem) -> float:
    """Return the seconds of arrivals that latencies are taken over, the same for all services."""
    rates = [service.rate_per_s for service in problem.services]
    enough_s = max(_MIN_HORIZON_S, _MIN_REQUESTS / min(rates))
    return min(_MAX_HORIZON_S, max(_MIN_HORIZON_S, min(enough_s, _MAX_REQUESTS / sum(rates))))


@dataclass
class SimulatedTable:
    """The table of a problem: entries by service, with what simulations have said of them so far.

    `max_stages` is how many slices a replica may be cut over; 1 is OpenFabric's choice.
    """

    problem: Problem
    catalog: Catalog
    latency: Latency
    max_stages: int = 1
    promise: bool = True
    sites: tuple[tuple[str, str], ...] = field(init=False)
    stock: Ints = field(init=False)
    horizon_s: float = field(init=False)
    shapes: list[list[ReplicaShape]] = field(init=False)
    entries: list[list[tuple[tuple[int, int], ...]]] = field(init=False)
    uses: list[Ints] = field(init=False)
    answered: dict[tuple[int, int], Answered] = field(init=False, default_factory=dict)
    tightest: float = field(init=False, default=np.inf)
    _alone: dict[Asked, float] = field(init=False, default_factory=dict)
    _load: list[Floats] = field(init=False)
    _share: list[Floats] = field(init=False)
    _costs: list[Floats] = field(init=False)
    _exact: list[Bools] = field(init=False)

    def __post_init__(self) -> None:
        stock = site_stock(self.problem)
        self.sites = tuple(stock)
        self.stock = np.array([stock[site] for site in self.sites], np.int64)
        self.horizon_s = horizon_of(self.problem)
        self.shapes, self.entries, self.uses = [], [], []
        self._load, self._share, self._costs, self._exact = [], [], [], []
        for number, service in enumerate(self.problem.services):
            shapes = shapes_of(
                self.problem,
                self.catalog,
                service,
                max_stages=self.max_stages,
                promise=self.promise,
            )
            self.shapes.append(shapes)
            self._add_service(number, service, shapes)

    @property
    def size(self) -> int:
        """How many entries there are, of all services."""
        return sum(len(own) for own in self.entries)

    @property
    def alone(self) -> int:
        """How many simulations of shapes by themselves there were."""
        return len(self._alone)

    def replicas(self, service: int, entry: int) -> Replicas:
        """Return how many replicas of which shapes an entry stands for."""
        return tuple((self.shapes[service][k], count) for k, count in self.entries[service][entry])

    def with_stages(self, max_stages: int) -> list[Bools]:
        """Return which entries have no replica of more stages, by service."""
        return [
            np.array(
                [all(shapes[k].stages <= max_stages for k, _ in entry) for entry in own], np.bool_
            )
            for shapes, own in zip(self.shapes, self.entries, strict=True)
        ]

    # What the lazy solver asks

    def costs(self, service: int) -> Floats:
        """Return what each entry adds to the mean latency of all requests, at least, in seconds."""
        return self._costs[service]

    def exact(self, service: int) -> Bools:
        """Return which entries were simulated."""
        return self._exact[service]

    def look(self, service: int, entry: int) -> None:
        """Simulate the shapes of an entry idle, then at its load, and where that was done the entry."""
        load = float(self._load[service][entry])
        grid = self._grid(load)
        # Idle replicas first: what is too slow even then needs no other look.
        for loads in ((0,), (grid, min(grid + 1, len(LOADS) - 1))):
            missing = [
                asked
                for k, _ in self.entries[service][entry]
                for at in loads
                if (asked := (service, k, at)) not in self._alone
            ]
            for asked in missing:
                self._alone[asked] = self._simulate_shape(asked)
            if missing:
                self._refresh(service)
                return
        found = self._simulate(service, self.replicas(service, entry))
        weight = self._weight(service)
        exact = found.mean_s * weight
        optimistic = float(self._costs[service][entry])
        if optimistic > 0:
            self.tightest = min(self.tightest, exact / optimistic)
        self.answered[service, entry] = found
        self._costs[service][entry], self._exact[service][entry] = exact, True

    # Entries

    def _add_service(self, number: int, service: Service, shapes: Sequence[ReplicaShape]) -> None:
        if service.rate_per_s <= 0:
            raise InputError(
                f"{service.name} asks for nothing, so it has no latency",
                field=f"models.{service.name}.rate",
                hint="give every model a rate above 0",
            )
        entries = _entries(shapes, self.sites, self.stock)
        gpus = np.zeros((len(entries), len(self.sites)), np.int64)
        capacity, share = np.zeros(len(entries)), np.zeros((len(entries), len(shapes)))
        for e, entry in enumerate(entries):
            for k, count in entry:
                gpus[e, self.sites.index(shapes[k].site)] += shapes[k].gpus * count
                share[e, k] = shapes[k].per_s * count
            capacity[e] = share[e].sum()
        self.entries.append(entries)
        self.uses.append(gpus)
        self._load.append(service.rate_per_s / np.maximum(capacity, 1e-12))
        self._share.append(share / np.maximum(capacity, 1e-12)[:, None])
        self._costs.append(np.zeros(len(entries)))
        self._exact.append(np.zeros(len(entries), np.bool_))
        self._refresh(number)

    def _weight(self, service: int) -> float:
        rates = [s.rate_per_s for s in self.problem.services]
        return rates[service] / sum(rates)

    def _grid(self, load: float) -> int:
        """The heaviest load on the grid that is no heavier."""
        return max(0, bisect_right(LOADS, load) - 1)

    def _refresh(self, service: int) -> None:
        """Work out the optimistic costs of a service's entries that were not simulated."""
        load, share = self._load[service], self._share[service]
        min_s = np.zeros(share.shape)
        for k in range(share.shape[1]):
            known = {at: s for at in range(len(LOADS)) if (s := self._alone.get((service, k, at)))}
            for at, found in known.items():
                # As slow as at the heaviest load that was simulated and is no heavier.
                own = load >= LOADS[at]
                min_s[own, k] = np.maximum(min_s[own, k], found)
                if at + 1 in known:
                    own &= load < LOADS[at + 1]
                    part = (load[own] - LOADS[at]) / (LOADS[at + 1] - LOADS[at])
                    between = found + part * max(0.0, known[at + 1] - found)
                    min_s[own, k] = np.maximum(min_s[own, k], between)
        late = 0.5 * self.horizon_s * np.maximum(0.0, load / _CAPACITY - 1.0)
        bound = (
            np.maximum((share * min_s).sum(axis=1), late) * (1.0 - SLACK) * self._weight(service)
        )
        free = ~self._exact[service]
        self._costs[service][free] = np.maximum(self._costs[service], bound)[free]

    # Simulations

    def _simulate(
        self,
        service: int,
        replicas: Replicas,
        per_s: float | None = None,
        seconds: float | None = None,
    ) -> Answered:
        own = self.problem.services[service]
        if per_s is not None:
            own = own.model_copy(update={"rate_per_s": per_s})
        alone = self.problem.replace(services=(own,))
        plan = plan_of_replicas(alone, self.catalog, {own.name: replicas}, solver="cp")
        return self.latency(plan, alone, seconds or self.horizon_s)

    def _simulate_shape(self, asked: Asked) -> float:
        service, k, at = asked
        shape = self.shapes[service][k]
        held = int(self.stock[self.sites.index(shape.site)]) // shape.gpus
        count = max(1, min(_ALONE, held))
        per_s = LOADS[at] * shape.per_s * count
        # Where nobody waits for long a longer horizon changes nothing but chance.
        longer = _LIGHT_REQUESTS / per_s if LOADS[at] <= _LIGHT_LOAD else 0.0
        seconds = max(self.horizon_s, min(longer, _MAX_LIGHT_HORIZON * self.horizon_s))
        return self._simulate(service, ((shape, count),), per_s, seconds).mean_s


def _entries(
    shapes: Sequence[ReplicaShape], sites: Sequence[tuple[str, str]], stock: Ints
) -> list[tuple[tuple[int, int], ...]]:
    """All numbers of replicas with at most one shape for each GPU type of a site; coarser where too many."""
    step = 1
    while True:
        choices: list[list[tuple[int, int] | None]] = []
        for n, site in enumerate(sites):
            own: list[tuple[int, int] | None] = [None]
            for k, shape in enumerate(shapes):
                if shape.site == site:
                    max_count = int(stock[n]) // shape.gpus
                    counts = [
                        c
                        for c in range(1, max_count + 1)
                        if c <= 2 or c % step == 0 or c == max_count
                    ]
                    own += [(k, count) for count in counts]
            choices.append(own)
        if np.prod([float(len(own)) for own in choices]) <= _MAX_ENTRIES or step > max(stock):
            break
        step *= 2
    return [entry for pick in product(*choices) if (entry := tuple(p for p in pick if p))]
