"""Several models on one fixed cluster: split the nodes so that the worst served gets the most.

Every node serves one model. A split is good if the smallest share of its demand that any service gets is
large. Splits are searched by moving and exchanging nodes, first with the coverage bound of each part for what
it carries, which takes no search; then the real placements are found, and nodes move from services that
have more than their share while that helps.

The bound lets nodes serve several models in parts: with share t of every demand D_s, node i spends the
share x_is of its time on service s, and

    sum_s x_is <= 1,    sum_i x_is max_j j min(T_is(j), t D_s) >= t D_s L_s

must have a solution; the largest such t bounds every split. Nodes of a type are counted together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.core.rng import stream
from atoll.plan.cluster_profiles import cluster_of, request_tokens
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.assembly import infeasible
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.instance import FlowInstance
from atoll.solve.place.service import (
    FlowEffort,
    ServicePlacement,
    place,
    reasons,
    shortage,
)
from atoll.solve.place.to_plan import plan_of

_BISECTION = 40
_TRIES = 3000
_REAL_MOVES = 12
_QUICK_SHARE = 0.3
"""Share of the time for placements of splits that may not last."""

Split = tuple[int, ...]
"""The service, by number, of every node."""


def solve_fairly(name: str, problem: Problem, catalog: Catalog, effort: FlowEffort) -> Plan:
    """Return the plan that gives the worst served service the largest share of its demand."""
    began, cpu = time.perf_counter(), time.process_time()
    for service in problem.services:
        if service.rate_per_s <= 0:
            raise InputError(
                f"{service.name} asks for nothing, so no split is fair to it",
                field=f"models.{service.name}.rate",
                hint="give every model of a shared cluster a rate above 0",
            )
    lacking = [shortage(problem, catalog, service) for service in problem.services]
    short = tuple(text for text in lacking if text is not None)
    if short:
        return infeasible(problem, solver=name, reasons=short)
    shared = _Shared(problem, catalog, name, effort)
    split = shared.first_split()
    answers = shared.place_all(split) if split is not None else None
    if answers is None:
        why = f"no split of {len(shared.names)} nodes holds all {len(problem.services)} models"
        return infeasible(problem, solver=name, reasons=(why,))
    answers = shared.improve(split or (), answers)
    spent = (time.perf_counter() - began, time.process_time() - cpu)
    plan = plan_of(
        problem,
        catalog,
        [answer.placed for answer in answers],
        goal="fair",
        bound=shared.bound() * sum(shared.demand),
        solver=name,
        seconds=spent[0],
        cpu_seconds=spent[1],
    )
    return plan.model_copy(update={"reasons": tuple(reasons(plan, problem, catalog))})


@dataclass
class _Shared:
    """The search for a split; demand in tokens/s."""

    problem: Problem
    catalog: Catalog
    solver: str
    effort: FlowEffort
    names: tuple[str, ...] = field(init=False)
    demand: tuple[float, ...] = field(init=False)
    _alone: tuple[FlowInstance, ...] = field(init=False)
    _bound: float | None = field(init=False, default=None)
    _known: dict[tuple[int, frozenset[str]], ServicePlacement | None] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self.names = tuple(node.name for node in cluster_of(self.problem).nodes)
        services = self.problem.services
        self.demand = tuple(s.rate_per_s * s.headroom * request_tokens(s) for s in services)
        self._alone = tuple(
            flow_instance(self.problem, self.catalog, s, partial=self.effort.partial)
            for s in services
        )

    # The split by bounds

    def first_split(self) -> Split | None:
        """Return the best split by coverage bounds, None if none holds all models."""
        rng = stream(self.problem.settings.seed, "fair split")
        split = self._deal()
        value = self._estimate(split)
        for _ in range(_TRIES):
            tried = list(split)
            first, second = (int(i) for i in rng.integers(len(split), size=2))
            if rng.random() < 0.5:
                tried[first] = int(rng.integers(len(self.demand)))
            else:
                tried[first], tried[second] = tried[second], tried[first]
            if tuple(tried) == split:
                continue
            new = self._estimate(tuple(tried))
            if new >= value:
                split, value = tuple(tried), new
        return split if value[0] > 0 else None

    def _deal(self) -> Split:
        """Deal nodes of every type in proportion to the work each service asks for."""
        work = np.array(
            [d * instance.layers for d, instance in zip(self.demand, self._alone, strict=True)]
        )
        given = np.zeros(len(work))
        split = []
        for _ in self.names:
            at = int(np.argmin((given + 1) / work))
            given[at] += 1
            split.append(at)
        kinds = [node.node_type for node in cluster_of(self.problem).nodes]
        order = sorted(range(len(kinds)), key=lambda i: kinds[i])
        dealt = [0] * len(kinds)
        for position, i in enumerate(order):
            dealt[i] = split[position]
        return tuple(dealt)

    def _estimate(self, split: Split) -> tuple[float, float]:
        """The smallest share by coverage bounds, and the mean one to tell ties apart.

        Where a model has no room at all, shares count how much of it has.
        """
        shares = []
        for s, (instance, demand) in enumerate(zip(self._alone, self.demand, strict=True)):
            names = {name for name, at in zip(self.names, split, strict=True) if at == s}
            rows = [i for i, name in enumerate(instance.names) if name in names]
            held = int(instance.most[rows].sum())
            if held < instance.layers:
                shares.append(held / instance.layers - 1.0)
            else:
                shares.append(_coverage(instance, rows) / demand)
        return min(shares), sum(shares)

    # Real placements

    def place_all(
        self, split: Split, seconds: float | None = None
    ) -> list[ServicePlacement] | None:
        """Place every service on its nodes, None if one of them has no placement."""
        placements = []
        for s in range(len(self.demand)):
            answer = self._place(s, split, seconds)
            if answer is None:
                return None
            placements.append(answer)
        return placements

    def _place(self, s: int, split: Split, seconds: float | None) -> ServicePlacement | None:
        nodes = frozenset(name for name, at in zip(self.names, split, strict=True) if at == s)
        known = (s, nodes)
        if known not in self._known:
            service = self.problem.services[s]
            part = len(self.demand) * (_REAL_MOVES + 1)
            quick = self.effort.seconds * _QUICK_SHARE / part if seconds is None else seconds
            effort = replace(self.effort, seconds=quick, log=None)
            names = sorted(nodes)
            lacking = shortage(self.problem, self.catalog, service, names)
            self._known[known] = (
                None
                if lacking
                else place(self.solver, self.problem, self.catalog, service, effort, nodes=names)
            )
        return self._known[known]

    def share(self, answers: Sequence[ServicePlacement]) -> float:
        """Return the smallest share of its demand that a service gets."""
        values = (answer.placed.flows.value for answer in answers)
        return min(value / demand for value, demand in zip(values, self.demand, strict=True))

    def improve(self, split: Split, answers: list[ServicePlacement]) -> list[ServicePlacement]:
        """Move nodes to the worst served service while that helps, then place all with the time left."""
        began = time.perf_counter()
        for _ in range(_REAL_MOVES):
            values = [answer.placed.flows.value for answer in answers]
            shares = [value / demand for value, demand in zip(values, self.demand, strict=True)]
            self._tell(time.perf_counter() - began, min(shares))
            poor = int(np.argmin(shares))
            better = self._help_poorest(split, poor, min(shares))
            if better is None:
                break
            split, answers = better
        left = self.effort.seconds * (1 - _QUICK_SHARE) / len(self.demand)
        self._known.clear()
        final = self.place_all(split, left)
        if final is not None and self.share(final) > self.share(answers):
            return final
        return answers

    def _help_poorest(
        self, split: Split, poor: int, share: float
    ) -> tuple[Split, list[ServicePlacement]] | None:
        """Give the worst served service a node, of each kind from each other service until one helps."""
        seen: set[tuple[int, str, str]] = set()
        nodes = cluster_of(self.problem).nodes
        for i, node in enumerate(nodes):
            kind = (split[i], node.node_type, node.region)
            if split[i] == poor or kind in seen:
                continue
            seen.add(kind)
            tried = (*split[:i], poor, *split[i + 1 :])
            if self._estimate(tried)[0] <= share:
                continue
            answers = self.place_all(tried)
            if answers is not None and self.share(answers) > share * (1 + 1e-9):
                return tried, answers
        return None

    def _tell(self, seconds: float, share: float) -> None:
        if self.effort.log is not None:
            total = sum(self.demand)
            self.effort.log(seconds, share * total, self.bound() * total)

    # The bound

    def bound(self) -> float:
        """Return the largest share of every demand that the relaxed split could serve."""
        if self._bound is None:
            low, high = 0.0, 1.0
            while self._could_serve(high) and high < 1e9:
                low, high = high, 2 * high
            for _ in range(_BISECTION):
                middle = (low + high) / 2
                low, high = (middle, high) if self._could_serve(middle) else (low, middle)
            self._bound = high
        return self._bound

    def _could_serve(self, share: float) -> bool:
        """Whether nodes that serve several models in parts could serve this share of every demand."""
        from scipy.optimize import linprog

        counts = cluster_of(self.problem).counts()
        kinds = sorted(counts)
        services = len(self.demand)
        work = np.zeros((len(kinds), services))
        for s, (instance, demand) in enumerate(zip(self._alone, self.demand, strict=True)):
            best = _best_work(instance, share * demand)
            for k, kind in enumerate(kinds):
                work[k, s] = best.get(kind, 0.0)
        need = [
            share * demand * instance.layers
            for instance, demand in zip(self._alone, self.demand, strict=True)
        ]
        # x[k, s] is how many nodes of type k work for service s, in parts; work is scaled to the need.
        serve = np.zeros((services, len(kinds) * services))
        hold = np.zeros((len(kinds), len(kinds) * services))
        for k in range(len(kinds)):
            for s in range(services):
                serve[s, k * services + s] = -work[k, s] / max(need[s], 1e-12)
                hold[k, k * services + s] = 1.0
        limits = np.concatenate([-np.ones(services), [counts[kind] for kind in kinds]])
        solved = linprog(
            np.zeros(len(kinds) * services),
            A_ub=np.vstack([serve, hold]),
            b_ub=limits,
            method="highs",
        )
        return bool(solved.status == 0)


def _best_work(instance: FlowInstance, flow: float) -> Mapping[str, float]:
    """Layers times tokens/s that a node of each type does at most, with no more flow than this."""
    held = np.arange(instance.rate.shape[1])
    best = (held * np.minimum(instance.rate, flow)).max(axis=1)
    return {kind: float(best[i]) for i, kind in enumerate(instance.node_types)}


def _coverage(instance: FlowInstance, rows: Sequence[int]) -> float:
    """The coverage bound of some nodes, links not counted, in tokens/s."""
    held = np.arange(instance.rate.shape[1])
    rate = instance.rate[list(rows)]
    low, high = 0.0, float(rate.sum())
    for _ in range(_BISECTION):
        middle = (low + high) / 2
        work = (held * np.minimum(rate, middle)).max(axis=1).sum()
        low, high = (middle, high) if work >= middle * instance.layers else (low, middle)
    return low
