"""Several models on one fixed cluster: share it so that the worst served gets the most.

Every machine, or slice of one, serves one model. Within a promise, replicas of exact templates say how
(`replicas`); where there are none, or no promise is kept, the nodes are split: a split is good if the
smallest share of its demand that any service gets is large. Splits are searched by moving and exchanging
nodes, first with the coverage bound of each part for what it carries, which takes no search; then the real
placements are found, and nodes move from services that have more than their share while that helps.

The bound lets machines serve several models in parts: with share t of every demand D_s, machine i spends
the share x_is of its time on service s, and

    sum_s x_is <= 1,    sum_i x_is max_j j min(T_is(j), t D_s) >= t D_s L_s

must have a solution, with the best cut of i for s; the largest such t bounds every plan. Machines of a
type at a site are counted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.core.rng import stream
from atoll.plan.cluster_profiles import request_tokens
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.array_types import Ints
from atoll.solve.assembly import infeasible
from atoll.solve.deadline import Deadline
from atoll.solve.place.coverage import Coverage, coverage_of
from atoll.solve.place.flow_instance import FlowInstance
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.latency import max_within
from atoll.solve.place.machine_cuts import Cut, even_cuts
from atoll.solve.place.place_service import (
    SEARCH,
    FlowEffort,
    ServicePlacement,
    places,
    reasons,
    shortage,
)
from atoll.solve.place.place_to_plan import Placed, fit_links, plan_of
from atoll.solve.place.replicas import place_replicas

_BISECTION = 40
_TRIES = 3000
_REAL_MOVES = 12
_MAX_PLACED = 12
"""Placements of parts of the cluster that are tried while nodes move."""
_QUICK_WORK = 0.01
"""Share of the usual work for the placement of a split that may yet change."""
_LAST_WORK = 0.2
"""Share of the usual work for the placement of the last split."""
_MAX_SPLIT = 64
"""Pieces up to which a cluster that is cut evenly is split."""

Split = tuple[int, ...]
"""The service, by number, of every node."""


def solve_fairly(
    name: str, problem: Problem, catalog: Catalog, effort: FlowEffort, deadline: Deadline
) -> Plan:
    """Return the plan that gives the worst served service the largest share of its demand."""
    # A share of nothing has no meaning, and the program divides by the demand.
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
    found = _share_out(name, problem, catalog, effort, deadline)
    if found is None:
        return infeasible(problem, solver=name, reasons=(_why(problem, effort),))
    plan = plan_of(
        problem,
        catalog,
        found,
        goal="fair",
        bound=fair_bound(problem, catalog, promise=effort.promise) * sum(_demands(problem)),
        solver=name,
    )
    return plan.model_copy(update={"reasons": tuple(reasons(plan, problem, catalog))})


def _share_out(
    name: str, problem: Problem, catalog: Catalog, effort: FlowEffort, deadline: Deadline
) -> list[Placed] | None:
    """Return the services placed so that the smallest share is largest, None if one has no place."""
    cuts = even_cuts(problem)
    options: list[list[Placed]] = []
    if name == SEARCH:
        replicas = place_replicas(
            problem,
            catalog,
            deadline,
            partial=effort.partial,
            work=min(1.0, effort.work),
            done=effort.done,
        )
        if replicas is not None:
            cut, placed = replicas
            # Replicas of exact templates keep the promise for every service: no split of nodes is needed
            # then.
            if effort.promise and min(entry.flows.value for entry in placed) > 0:
                return placed
            cuts = [cuts[0], cut] if cut != cuts[0] else [cut]
    else:
        # Other solvers are not tried on slices: they get the machines whole.
        cuts = cuts[:1]
    for cut in cuts:
        # Where the demand is met there is no need to cut.
        met = any(_merit(problem, option)[0] >= 1.0 for option in options)
        if met or (options and (deadline.is_over() or len(cut) > _MAX_SPLIT)):
            break
        split = _NodeSplit(problem, catalog, name, effort, deadline, cut).best()
        if split is not None:
            options.append(fit_links(problem, catalog, [answer.placed for answer in split]))
    return max(options, key=lambda option: _merit(problem, option), default=None)


def _merit(problem: Problem, placed: Sequence[Placed]) -> tuple[float, float, float]:
    """Return the order of plans: the least and the mean share served, then the least however large."""
    demands = _demands(problem)
    shares = [entry.flows.value / demand for entry, demand in zip(placed, demands, strict=True)]
    met = [min(1.0, share) for share in shares]
    # Shares count up to 1 first: more than the demand for one service is no comfort to another.
    return min(met), sum(met), min(shares)


def _why(problem: Problem, effort: FlowEffort) -> str:
    count = len(problem.services)
    nodes = len(problem.hosts)
    if effort.promise:
        return (
            f"no split of {nodes} nodes keeps the promises of all {count} models; promise less, or take "
            "what these machines give (--best-effort)"
        )
    return f"no split of {nodes} nodes holds all {count} models"


def _demands(problem: Problem) -> tuple[float, ...]:
    """Tokens/s asked of each service."""
    return tuple(s.demand_per_s * request_tokens(s) for s in problem.services)


@dataclass
class _NodeSplit:
    """The search for a split of the nodes of one cut; demand in tokens/s."""

    problem: Problem
    catalog: Catalog
    solver: str
    effort: FlowEffort
    deadline: Deadline
    units: Cut
    names: tuple[str, ...] = field(init=False)
    demand: tuple[float, ...] = field(init=False)
    _alone: tuple[FlowInstance, ...] = field(init=False)
    _rate_groups: tuple[Ints, ...] = field(init=False)
    _covered: dict[tuple[int, tuple[int, ...]], float] = field(init=False, default_factory=dict)
    _known: dict[tuple[int, frozenset[str]], ServicePlacement | None] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self.names = tuple(unit.name for unit in self.units)
        self.demand = _demands(self.problem)
        alone = (
            flow_instance(
                self.problem,
                self.catalog,
                s,
                partial=self.effort.partial,
                units=self.units,
                promised=self.effort.promise,
            )
            for s in self.problem.services
        )
        # Within a promise nodes carry less; the bound of a part must hold for any number of hops.
        self._alone = tuple(
            max_within(own) if self.effort.promise and own.size else own for own in alone
        )
        self._rate_groups = tuple(
            np.unique(own.rate, axis=0, return_inverse=True)[1].ravel() for own in self._alone
        )

    def best(self) -> list[ServicePlacement] | None:
        """Return the placements of the best split found, None if there is none."""
        split = self.first_split()
        answers = self.place_all(split) if split is not None else None
        if split is None or answers is None:
            return None
        return self.improve(split, answers)

    # The split by bounds

    def first_split(self) -> Split | None:
        """Return the best split by coverage bounds, None if none holds all models."""
        rng = stream(self.problem.settings.seed, "fair split")
        split = self._deal()
        value = self._estimate(split)
        # Bounds take no search, so thousands of exchanges cost less than one real placement.
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
            # Splits that are as good are taken, too, so that the search can cross a plateau.
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
        # Dealt in order of kind: each service gets its part of every type and not one type alone.
        kinds = [unit.kind for unit in self.units]
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
            held = int(instance.max_layers[rows].sum())
            if held < instance.layers:
                # Below 0: less than a whole model is worse than any share, but more of it is still better
                # than less.
                shares.append(held / instance.layers - 1.0)
            else:
                shares.append(self._cover(s, rows) / demand)
        return min(shares), sum(shares)

    def _cover(self, s: int, rows: Sequence[int]) -> float:
        """The coverage bound of some nodes of a service; nodes of equal rates are as good as each other."""
        known = (s, tuple(self._rate_groups[s][rows].tolist()))
        if known not in self._covered:
            self._covered[known] = _coverage(self._alone[s], rows)
        return self._covered[known]

    # Real placements

    def place_all(self, split: Split, work: float = _QUICK_WORK) -> list[ServicePlacement] | None:
        """Place every service on its nodes, None if one of them has no placement."""
        placements = []
        for s in range(len(self.demand)):
            answer = self._place(s, split, work)
            if answer is None:
                return None
            placements.append(answer)
        return placements

    def _place(self, s: int, split: Split, work: float) -> ServicePlacement | None:
        nodes = frozenset(name for name, at in zip(self.names, split, strict=True) if at == s)
        known = (s, nodes)
        if known not in self._known:
            service = self.problem.services[s]
            # Without a bound and a log: a split that may yet change is not worth either.
            effort = replace(self.effort, work=self.effort.work * work, bounded=False, log=None)
            found = places(
                self.solver, self.problem, self.catalog, service, effort, self.deadline,
                nodes=sorted(nodes), units=self.units,
            )  # fmt: skip
            self._known[known] = found[0] if found else None
        return self._known[known]

    def share(self, answers: Sequence[ServicePlacement]) -> float:
        """Return the smallest share of its demand that a service gets."""
        values = (answer.placed.flows.value for answer in answers)
        return min(value / demand for value, demand in zip(values, self.demand, strict=True))

    def improve(self, split: Split, answers: list[ServicePlacement]) -> list[ServicePlacement]:
        """Move nodes to the worst served service while that helps, then place all with more work."""
        for _ in range(_REAL_MOVES):
            values = [answer.placed.flows.value for answer in answers]
            shares = [value / demand for value, demand in zip(values, self.demand, strict=True)]
            self._tell(min(shares))
            if self.deadline.is_over():
                return answers
            better = self._help_poorest(split, int(np.argmin(shares)), min(shares))
            if better is None:
                break
            split, answers = better
        if self.deadline.is_over():
            return answers
        # What is known was found with little work; the last placements must be searched anew.
        self._known.clear()
        final = self.place_all(split, _LAST_WORK)
        # More work on the same split is not always better, since the search is another one.
        if final is not None and self.share(final) > self.share(answers):
            return final
        return answers

    def _help_poorest(
        self, split: Split, poor: int, share: float
    ) -> tuple[Split, list[ServicePlacement]] | None:
        """Give the worst served service a node, of each kind from each other service until one helps."""
        seen: set[tuple[int, str, str]] = set()
        for i, unit in enumerate(self.units):
            # Nodes of one kind in one region from one service are as good as each other: one of them is
            # tried.
            kind = (split[i], unit.kind, unit.region)
            if split[i] == poor or kind in seen or self._is_enough():
                continue
            seen.add(kind)
            tried = (*split[:i], poor, *split[i + 1 :])
            # The bound already says that this split is no better, so no placement is searched.
            if self._estimate(tried)[0] <= share:
                continue
            answers = self.place_all(tried)
            if answers is not None and self.share(answers) > share * (1 + 1e-9):
                return tried, answers
        return None

    def _is_enough(self) -> bool:
        return len(self._known) >= _MAX_PLACED or self.deadline.is_over()

    def _tell(self, share: float) -> None:
        if self.effort.log is not None:
            self.effort.log(self.deadline.spent, share * sum(self.demand), np.inf)


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


# The bound


def fair_bound(problem: Problem, catalog: Catalog, *, promise: bool) -> float:
    """Return the largest share of every demand that machines could serve, however cut and shared."""
    covers = [coverage_of(problem, catalog, s, promise=promise) for s in problem.services]
    demand = _demands(problem)
    low, high = 0.0, 1.0
    # Doubling finds a share that cannot be served; the end at 1e9 is for demands that are next to nothing.
    while _could_serve(covers, demand, high) and high < 1e9:
        low, high = high, 2 * high
    for _ in range(_BISECTION):
        middle = (low + high) / 2
        low, high = (middle, high) if _could_serve(covers, demand, middle) else (low, middle)
    # The upper end: a bound must not be too low.
    return high


def _could_serve(covers: Sequence[Coverage], demand: Sequence[float], share: float) -> bool:
    """Whether machines that serve several models in parts could serve this share of every demand."""
    from scipy.optimize import linprog

    keys = sorted(covers[0].stock)
    services = len(demand)
    # x[k, s] is how many machines of type k work for service s, in parts; work is scaled to the need.
    serve = np.zeros((services, len(keys) * services))
    hold = np.zeros((len(keys), len(keys) * services))
    for s, (cover, asked) in enumerate(zip(covers, demand, strict=True)):
        work = cover.work(share * asked)
        for k, key in enumerate(keys):
            # A demand of next to nothing would divide by 0.
            need = max(share * asked * cover.layers, 1e-12)
            serve[s, k * services + s] = -work[key] / need
            hold[k, k * services + s] = 1.0
    limits = np.concatenate([-np.ones(services), [covers[0].stock[key] for key in keys]])
    solved = linprog(
        np.zeros(len(keys) * services),
        A_ub=np.vstack([serve, hold]),
        b_ub=limits,
        method="highs",
    )
    return bool(solved.status == 0)
