"""A fleet as the problem of GH and AGH, and their answer to it as a plan.

What is asked for is a query type, and every way to answer it a model; ways that several choices share are
left out. A tier is a single machine of an offer, whole, with one configuration: the machines that serve a way
at all (1, or a prefill machine and the decode machines that it feeds, where phases run apart). Capacities
keep the promises, so the delay of a pair is either no matter or too much. A least share of a model is a type
of its own. (5c) is the budget, and the machines of an offer are a stock, which the paper does not have.

The paper's types are smaller than its tiers; services are larger than machines. So pairs are filled as far as
they carry (`greedy_steps.FILL`); taken literally nothing of such a service would be served. An offer is at
most `MAX_TIERS` tiers, of several machines each where that is too few. What no request needs is not rented.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.plan.choice import ModelMix
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.joint.greedy.agh import agh
from atoll.solve.joint.greedy.gh import gh
from atoll.solve.joint.greedy.greedy_steps import FIRST_SHARE
from atoll.solve.joint.joint_problem import HOUR_S, JointAnswer, JointProblem
from atoll.solve.rent.choosing.level_rows import LevelRows
from atoll.solve.rent.rent_baselines import (
    HomogeneousReplica,
    combinations,
    plan_replicas,
    replicas,
)
from atoll.solve.templates.library import Libraries

MAX_TIERS = 24
"""Tiers that an offer is taken for."""
_DEAR = 10.0
"""What leaving everything unserved costs, in multiples of renting everything."""
_TOO_LONG = 2.0
"""Delay of a pair that does not keep a promise, where 1 is allowed."""
_ROUNDING = 1e-9
_HALVINGS = 12


@dataclass(frozen=True)
class _QueryType:
    """A query type: requests/s of a service or choice that these ways, by number, may answer."""

    name: str
    rate: float
    errors: Mapping[int, float]
    max_error: float
    priority: float


@dataclass(frozen=True)
class _MinMachines:
    """The fewest machines of an offer that serve a way, and requests/s that they carry."""

    offer: int
    per_s: float
    replicas: tuple[tuple[HomogeneousReplica, int], ...]

    @property
    def machines(self) -> int:
        return sum(number for _, number in self.replicas)


@dataclass(frozen=True)
class _Tier:
    """A tier: an offer, and by way how many units it is, where it can serve that."""

    offer: int
    units: Mapping[int, int]


class JointFleet:
    """The types, units and tiers of a fleet, and its arrays (`joint`)."""

    def __init__(self, problem: Problem, libraries: Libraries) -> None:
        self.problem = problem
        self.queries = _queries(problem)
        self.units = _units(problem, libraries)
        self.ways = sorted({way for query in self.queries for way in query.errors})
        self.tiers = self._tiers()

    def _tiers(self) -> list[_Tier]:
        tiers = []
        for at, offer in enumerate(self.problem.offers):
            units = {m: self.units[m, at] for m in self.ways if (m, at) in self.units}
            if not units:
                continue
            whole = {m: math.ceil(self._most(m) / unit.per_s) for m, unit in units.items()}
            need = sum(
                max((whole[m] * units[m].machines for m in query.errors if m in units), default=0)
                for query in self.queries
            )
            usable = min(offer.available, max(1, need))
            number = min(usable, MAX_TIERS)
            each = {
                m: max(1, min(whole[m], math.ceil(usable / number / unit.machines)))
                for m, unit in units.items()
            }
            tiers += [_Tier(at, each)] * number
        return tiers

    def _most(self, way: int) -> float:
        return max(query.rate for query in self.queries if way in query.errors)

    def _machines(self, way: int, tier: _Tier) -> int:
        return self.units[way, tier.offer].machines * tier.units[way]

    @cached_property
    def joint(self) -> JointProblem:
        """The fleet as (5a) to (5k), over an hour; load is counted in machines."""
        offers, queries, tiers = self.problem.offers, self.queries, self.tiers
        sizes = sorted({self._machines(m, tier) for tier in tiers for m in tier.units})
        shape = (len(queries), len(self.ways), len(tiers))
        delay = np.full((*shape, len(sizes)), _TOO_LONG)
        error, compute = np.ones(shape), np.ones(shape)
        allowed = np.zeros((len(tiers), len(sizes)), np.bool_)
        for k, tier in enumerate(tiers):
            for j, m in enumerate(self.ways):
                if m not in tier.units:
                    continue
                size, unit = sizes.index(self._machines(m, tier)), self.units[m, tier.offer]
                allowed[k, size] = True
                for i, query in enumerate(queries):
                    if m in query.errors:
                        delay[i, j, k, size] = 0.0
                        error[i, j, k] = query.errors[m]
                        compute[i, j, k] = unit.machines / unit.per_s
        all_usd = 1.0 + sum(offer.usd_per_hour * offer.available for offer in offers)
        limit = self.problem.limits.budget_usd_per_hour
        nothing = np.zeros(len(queries))
        return JointProblem(
            horizon_h=1.0,
            # Without a budget the first phase has no share of it to keep to.
            budget=all_usd / FIRST_SHARE if limit is None else limit,
            storage_gb=1.0,
            storage_usd=0.0,
            efficiency=1.0,
            rate=np.array([query.rate for query in queries]),
            tokens=np.full(len(queries), 1e3),
            data_gb=nothing,
            delay_usd=nothing,
            unmet_usd=_DEAR * all_usd * np.array([query.priority for query in queries]),
            max_unmet=np.ones(len(queries)),
            delay_limit=np.ones(len(queries)),
            error_limit=np.array([query.max_error for query in queries]),
            weights_gb=np.zeros(len(self.ways)),
            kv_gb=np.zeros(len(self.ways)),
            memory_gb=np.ones(len(tiers)),
            tflops=np.full(len(tiers), 1.0 / HOUR_S),
            gpu_usd=np.array([offers[tier.offer].usd_per_hour for tier in tiers]),
            tp=np.array(sizes, np.int64),
            pp=np.ones(len(sizes), np.int64),
            allowed=allowed,
            delay=delay,
            error=error,
            compute=compute,
            residence_s=np.zeros(shape),
            lot=np.array([tier.offer for tier in tiers], np.int64),
            stock=np.array([offer.available for offer in offers], np.int64),
        )

    def carried(self, answer: JointAnswer) -> dict[tuple[int, int], float]:
        """Return requests/s by way and offer of an answer."""
        carried: defaultdict[tuple[int, int], float] = defaultdict(float)
        for i, j, k in np.argwhere(answer.routed > 0.0).tolist():
            rate = self.queries[i].rate * float(answer.routed[i, j, k])
            carried[self.ways[j], self.tiers[k].offer] += rate
        return dict(carried)

    def replicas(
        self, carried: Mapping[tuple[int, int], float]
    ) -> list[tuple[HomogeneousReplica, int]]:
        """Return the replicas that carry so many requests/s by way and offer, and no more."""
        taken = []
        for key in sorted(carried):
            unit = self.units[key]
            for replica, number in unit.replicas:
                # Of two phases one may have room to spare in whole units.
                share = self._share(replica, number, unit, carried[key])
                taken.append((replica, math.ceil(share - _ROUNDING)))
        return taken

    def _share(
        self, replica: HomogeneousReplica, number: int, unit: _MinMachines, rate: float
    ) -> float:
        service = self.problem.service_of(replica.role)
        each = self.problem.demand(replica.role) / service.demand_per_s
        return min(number * math.ceil(rate / unit.per_s), rate * each / replica.throughput)


def _queries(problem: Problem) -> list[_QueryType]:
    """What is asked for: services that answer no choice, choices, and least shares of models."""
    number = {service.name: m for m, service in enumerate(problem.services)}
    users = Counter(name for names in problem.variants.values() for name in names)
    queries = [
        _QueryType(s.name, s.demand_per_s, {number[s.name]: 0.0}, 1.0, s.priority)
        for s in problem.services
        if s.name not in users
    ]
    for choice in problem.choices:
        own = [v for v in choice.variants if users[v.service] == 1]
        first = problem.service(choice.variants[0].service)
        errors = {number[v.service]: v.error for v in own}
        left, error_left = 1.0, 1.0 if choice.max_error is None else choice.max_error
        for model, share in choice.min_share.items():
            some = {number[v.service]: v.error for v in own if v.model == model}
            if share <= 0.0 or not some:
                continue
            rate = first.demand_per_s * share
            queries.append(_QueryType(choice.name, rate, some, 1.0, first.priority))
            left, error_left = left - share, error_left - share * max(some.values())
        if left > _ROUNDING:
            most = max(0.0, error_left / left)
            rate = first.demand_per_s * left
            queries.append(_QueryType(choice.name, rate, errors, min(1.0, most), first.priority))
    return [query for query in queries if query.rate > 0.0]


def _units(problem: Problem, libraries: Libraries) -> dict[tuple[int, int], _MinMachines]:
    """The cheapest unit per request of each way on each offer that has the machines for it."""
    every = replicas(problem, libraries, 1)
    found: dict[tuple[int, int], list[_MinMachines]] = {}
    for m, service in enumerate(problem.services):
        for role in service.roles:
            if role.phase is Phase.BOTH:
                for one in every[str(role)]:
                    unit = _MinMachines(one.offer, one.throughput, ((one, 1),))
                    found.setdefault((m, one.offer), []).append(unit)
    for pair in combinations(problem, every):
        if pair.prefill.offer == pair.decode.offer:
            both = ((pair.prefill, 1), (pair.decode, pair.decodes))
            unit = _MinMachines(pair.prefill.offer, pair.requests, both)
            found.setdefault((pair.service, unit.offer), []).append(unit)
    enough = {
        key: [unit for unit in units if unit.machines <= problem.offers[key[1]].available]
        for key, units in found.items()
    }
    return {
        key: min(units, key=lambda unit: unit.machines / unit.per_s)
        for key, units in enough.items()
        if units
    }


def _mixes(problem: Problem, rates: Mapping[int, float]) -> tuple[ModelMix, ...]:
    """Return the mixes of requests/s by way, or near them where those are not allowed."""
    levels: dict[str, float] = {}
    for row in LevelRows.of(problem).by_choice:
        demand = problem.services[row.ways[0]].demand_per_s
        shares = {way: rates.get(way, 0.0) / demand if demand > 0.0 else 0.0 for way in row.ways}
        total = sum(shares.values())
        own = {way: share / total if total > 0.0 else 0.0 for way, share in shares.items()}
        rows = LevelRows((row,))
        # What is served of a choice may err more than all of it would, or lack a least share.
        found = own if rows.hold(own) else _stretch(rows, shares)
        if found is None:
            raise UsageError(
                f"no mix of models meets what {row.name} asks for",
                hint="allow more error (max_error) or lower min_share",
                field="max_error",
            )
        levels |= {problem.services[way].name: level for way, level in found.items()}
    return problem.mixes_at(levels)


def _stretch(rows: LevelRows, shares: Mapping[int, float]) -> dict[int, float] | None:
    """Return the levels of which these shares serve the largest fraction; None if there are none at all."""
    best = rows.settle({})
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        found = rows.settle({way: share / middle for way, share in shares.items()})
        if found is None:
            high = middle
        else:
            low, best = middle, found
    return best


def plan_jointly(problem: Problem, catalog: Catalog, libraries: Libraries, *, name: str) -> Plan:
    """Return the plan of GH or AGH, with the mixes of models that it is for."""
    fleet = JointFleet(problem, libraries)
    carried: dict[tuple[int, int], float] = {}
    if fleet.tiers and fleet.queries:
        carried = fleet.carried(RULES[name](fleet.joint, problem.settings.seed))
    rates: defaultdict[int, float] = defaultdict(float)
    for (way, _), rate in carried.items():
        rates[way] += rate
    mixes = _mixes(problem, rates)
    settled = problem.settled(mixes)
    roles = {str(role) for role in settled.roles}
    taken = [(one, number) for one, number in fleet.replicas(carried) if one.role in roles]
    plan = plan_replicas(settled, catalog, libraries, taken, name)
    return plan.model_copy(update={"mixes": mixes}) if mixes else plan


RULES: dict[str, Callable[[JointProblem, int], JointAnswer]] = {
    "gh": lambda problem, _: gh(problem, fill=True),
    "agh": lambda problem, seed: agh(problem, seed, fill=True),
}
CHOOSERS: dict[str, Callable[[Problem, Catalog, Libraries], Plan]] = {
    name: partial(plan_jointly, name=name) for name in RULES
}
"""Baselines that choose models themselves."""
COMPILED = "atoll.solve.joint"
"""Where their compiled parts are."""
