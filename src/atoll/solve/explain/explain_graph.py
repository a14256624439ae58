"""Why a plan with any-to-any models is what it is.

Beside what every explanation says (what binds, what would help, why node types are used or not): what the
best plan costs under each way to deploy that has a name, how busy each part keeps its executors, and which
parts cannot run on which kinds of nodes, and why.

A plan that keeps its promises leaves its executors some time, which simulation found that they need. Planning
again leaves the same: executors of a kind that the plan has as much as there, others of the service as much
as its executors on average, or more, until planning again finds nothing cheaper. The search that made the
plan simulated what came near it, and what it found of the others is not part of a plan. So nothing looks
cheaper only because it was not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError
from atoll.core.ids import parse_node_type
from atoll.core.units import format_bytes, format_duration
from atoll.perf.components.class_loads import class_parts, component_of
from atoll.perf.components.component_shapes import component_weight_bytes
from atoll.perf.components.executor import ExecutorWork
from atoll.plan.executor_use import executor_use
from atoll.plan.executors import work_of
from atoll.plan.files.offers_file import can_be_cut
from atoll.plan.plan import Plan
from atoll.plan.problem import Offer, Problem, Service
from atoll.solve.comparison import Compared, compare_solvers
from atoll.solve.effort import Effort
from atoll.solve.explain.break_even import price_use
from atoll.solve.explain.changes import (
    Change,
    cuts,
    free_paths,
    free_phases,
    loosen,
    loosen_classes,
    soft,
    unpinned,
    with_spot,
)
from atoll.solve.explain.merit import merit
from atoll.solve.explain.plan_explanation import (
    FITS,
    Constraint,
    DeployedWay,
    Explanation,
    NodeUse,
    PartFit,
    Repair,
    served_share,
    slacks,
    tight_constraints,
)
from atoll.solve.explain.planning_again import OutOfTimeError, Planner, SolvedProblem, gains, worth
from atoll.solve.explain.repairs import Found, sort_repairs, weigh
from atoll.solve.family import baselines
from atoll.solve.graph.room import Slowdown, slow_others, slowdown_of
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.resizing import sized_like

MAX_PLANS = 16
_WORK = 0.2
"""The share of the usual work that goes into the answer to a question."""
_WAYS = 0.4
"""Share of the time that the ways to deploy with a name may take, all together."""
_WORTHS = 4
_GPUS = 3
"""Constraints whose worth is asked, and GPU types that are not on offer yet."""
_LOOSER = 2.0
_SIZING = 0.1
"""Share of the time that finding that out may take each time."""


def explain_executors(
    problem: Problem,
    plan: Plan | None,
    request: PlanRequest,
    *,
    node_types: Sequence[str] | None,
    repairs: bool,
    max_plans: int | None,
) -> Explanation:
    """Return why a plan for a problem with any-to-any models is what it is; see `explain.explain_problem`."""
    most = MAX_PLANS if max_plans is None else max_plans

    def tell(plans: int, question: str) -> None:
        request.say("planning again", question, min(1.0, plans / most))

    catalog = request.catalog_for(problem)
    sized, derating = (problem, None) if plan is None else sized_like(plan, problem, catalog)
    effort = Effort(cached=request.effort.cached, work=_WORK, derating=derating)
    asked = soft(sized)
    solver = ExecutorSolver(catalog)
    if plan is not None and plan.promises and plan.status != "infeasible":
        tell(0, "planning again")
        given, known = plan, slowdown_of(plan, problem, catalog)

        def is_beaten(slow: Slowdown) -> bool:
            again = solver(asked, replace(effort, slowdown=slow), _SIZING * request.deadline_s).plan
            return gains(given, again, asked)

        effort = replace(effort, slowdown=slow_others(known, is_beaten))
    planner = Planner(
        asked,
        catalog,
        solver,
        effort,
        max_plans=most,
        max_seconds=request.deadline_s,
        progress=tell,
    )
    told = _Told(planner, plan, strict=asked is not sized)
    told.begin()
    if told.again is None:
        return told.finish()
    if node_types is None:
        told.ask_ways()
        told.ask_worths()
    if repairs:
        told.ask_repairs()
    told.explain_nodes(node_types)
    return told.finish(only_nodes=node_types is not None)


@dataclass
class ExecutorSolver:
    """Answers about any-to-any models, each a checked plan of the default solver."""

    catalog: Catalog

    def __call__(self, problem: Problem, effort: Effort, seconds: float) -> SolvedProblem:
        """Return the cheapest plan of a problem that was found."""
        request = PlanRequest(effort=effort, deadline_s=seconds, catalog=self.catalog)
        return SolvedProblem(solve(problem, request))


class _Told:
    """An explanation while it is put together."""

    def __init__(self, planner: Planner, plan: Plan | None, *, strict: bool) -> None:
        self.planner, self.plan, self.strict = planner, plan, strict
        self.problem, self.catalog = planner.problem, planner.catalog
        self.again: Plan | None = None
        self.left_out: list[str] = []
        self.ways: list[DeployedWay] = []
        self.asked: list[tuple[Constraint, Problem]] = []
        self.found: list[Found] | None = None
        self.uses: tuple[NodeUse, ...] = ()
        self.kinds: frozenset[str] | None = None

    @property
    def base(self) -> Plan:
        """The plan that all figures compare with."""
        if self.plan is not None and (self.plan.status != "infeasible" or self.again is None):
            return self.plan
        assert self.again is not None
        return self.again

    def begin(self) -> None:
        """Plan for the problem itself, and learn the plan given."""
        if self.plan is not None:
            self.planner.learn(self.problem, self.plan)
        effort = self.planner.effort
        if self.plan is None:
            effort = replace(effort, work=1.0)
        try:
            self.again = self.planner.ask(
                self.problem, "planning again", effort=effort, always=self.plan is None
            )
        except OutOfTimeError:
            self.left_out.append("everything that needs planning again")

    def ask_ways(self) -> None:
        """Ask what the best plan costs under each way to deploy that has a name."""
        names = [name for name in baselines(self.problem) if name != self.base.solver]
        seconds = _WAYS * self.planner.seconds_left
        if seconds > 0:
            if self.planner.progress is not None:
                self.planner.progress(self.planner.plans, "ways to deploy")
            request = PlanRequest(
                effort=self.planner.effort, deadline_s=seconds, catalog=self.catalog
            )
            compared = list(compare_solvers(self.base, self.problem, request))
            estimated = bool(self.base.promises)
            self.ways = [_way(one, estimated=estimated) for one in compared]
        missing = [name for name in names if name not in {way.name for way in self.ways}]
        if missing:
            self.left_out.append(f"what {', '.join(missing)} would cost")

    def ask_worths(self) -> None:
        """Ask what loosening each constraint would do."""
        tight = tight_constraints(self.base, self.problem)
        for at, constraint in enumerate(tight):
            looser = loosen(self.problem, constraint)
            self.asked.append((constraint, looser))
            if at >= _WORTHS:
                continue
            try:
                self.planner.ask(looser, f"{constraint.loosened}: {constraint.where}")
            except OutOfTimeError:
                continue
        unknown = sum(self.planner.answer(looser) is None for _, looser in self.asked)
        if unknown:
            self.left_out.append(f"what {unknown} of the constraints are worth")

    def ask_repairs(self) -> None:
        """Ask what single changes would save, or serve more."""
        self.found = []
        groups = {
            "looser promises": list(_looser_promises(self.problem)),
            "other GPU types": list(more_gpu_types(self.problem, self.catalog)),
            "cutting machines": cuts(self.problem),
            "other ways to run": [*free_phases(self.problem), *free_paths(self.problem)],
            "spot nodes": with_spot(self.problem, self.catalog),
            "other nodes": unpinned(self.problem),
        }
        for name, changes in groups.items():
            for change in changes:
                try:
                    self.planner.ask(change.problem, change.question)
                except OutOfTimeError:
                    self.left_out.append(f"changes by {name}, in part")
                    break
                self.found.append(Found(change))

    def explain_nodes(self, node_types: Sequence[str] | None) -> None:
        """Say who uses each node type; of those that are asked for, at which price they would be used."""
        wanted = self.problem.node_types if node_types is None else node_types
        uses = [_node_use(kind, self.base, self.problem) for kind in wanted]
        if node_types is not None:
            self.kinds = frozenset(
                kind for o in self.problem.offers if o.node_type in wanted for kind in o.kinds
            )
            uses = [self._price(use) for use in uses]
        self.uses = tuple(uses)

    def _price(self, use: NodeUse) -> NodeUse:
        """Add at which price a node type would be used, where it is not and there is time to ask."""
        if use.verdict != "too-dear":
            return use
        try:
            return price_use(use, self.planner.best(self.problem) or self.base, self.planner)
        except OutOfTimeError:
            self.left_out.append(f"at which price {use.node_type} would be used")
            return use

    def finish(self, *, only_nodes: bool = False) -> Explanation:
        """Return everything that was found."""
        base, problem = self.base, self.problem
        again = self.planner.best(problem) or self.again or base
        status = base.status if self.plan is None else self.plan.status
        if self.plan is None and self.strict and base.status == "partial":
            status = "infeasible"
        met = merit(base, problem).meets_demand
        constraints = tuple(self._settle(*each, again) for each in self.asked)
        fixed: tuple[Repair, ...] | None = None
        if self.found is not None:
            weighed = (weigh(self.planner, base, each) for each in self.found)
            fixed = sort_repairs(each for each in weighed if each is not None)
        use = executor_use(base, problem, self.catalog)
        return Explanation(
            problem_name=base.problem_name,
            status=status,
            served=served_share(base, problem),
            usd_per_hour=base.usd_per_hour,
            objective=base.objective,
            bound=again.bound if met and self.again is not None else None,
            again=None if self.again is None else worth(base, again, problem, base, None),
            constraints=constraints if self.asked else tight_constraints(base, problem),
            demand=tuple(s for s in slacks(base, problem) if s.demand_per_s or s.capacity_per_s),
            repairs=fixed,
            node_types=self.uses,
            plans=self.planner.plans + len(self.ways),
            left_out=tuple(self.left_out),
            ways=tuple(self.ways),
            parts=() if only_nodes else use.parts(),
            fits=tuple(
                fit
                for fit in part_fits(problem, self.catalog)
                if self.kinds is None or fit.kind in self.kinds
            ),
        )

    def _settle(self, constraint: Constraint, looser: Problem, again: Plan) -> Constraint:
        answer = self.planner.answer(looser)
        if answer is None:
            return constraint
        then = self.planner.best(looser) or self.base
        least = None if answer.plan.status == "partial" else answer.plan.bound
        gained = worth(self.base, then, self.problem, again, least)
        return constraint.model_copy(update={"worth": gained})


# Ways to deploy


def _way(compared: Compared, *, estimated: bool) -> DeployedWay:
    return DeployedWay(
        name=compared.solver,
        status=compared.status,
        usd_per_hour=compared.usd_per_hour,
        nodes=compared.nodes,
        served=compared.served,
        ratio=compared.ratio,
        broken=compared.broken,
        estimated=estimated,
    )


# Changes


def _looser_promises(problem: Problem) -> Iterator[Change]:
    """Yield promises of any-to-any services loosened to twice what they are, one kind of them at a time."""
    for service in problem.graph_services:
        if service.rate_per_s > 0:
            for kind in ("ttft", "tpot", "ahead", "image"):
                change = loosen_classes(problem, service, kind, _LOOSER)
                if change is not None:
                    yield change


def more_gpu_types(problem: Problem, catalog: Catalog) -> Iterator[Change]:
    """Yield the problem with one more GPU type on offer, at the catalog's prices, the cheapest types first.

    As many machines as the problem has of any of its own types.
    """
    rented = [offer for offer in problem.offers if offer.market != "owned"]
    if not rented:
        return
    own = {parse_node_type(offer.node_type).gpu for offer in problem.offers}
    most = max(offer.available for offer in rented)
    found: dict[str, list[Offer]] = {}
    for region in sorted({offer.region for offer in rented}):
        for kind, price in catalog.prices.cheapest_by_node(region).items():
            usd, gpu = price.cost(), parse_node_type(kind).gpu
            if gpu in own or usd is None or not _is_known(catalog, kind):
                continue
            offer = Offer(
                region=region,
                node_type=kind,
                available=most,
                usd_per_hour=usd,
                instance=price.instance,
                whole=not can_be_cut(catalog, kind),
            )
            found.setdefault(gpu, []).append(offer)
    cheapest = {gpu: min(o.usd_per_hour / o.gpus for o in some) for gpu, some in found.items()}
    for gpu in sorted(found, key=lambda gpu: (cheapest[gpu], gpu))[:_GPUS]:
        offers = (*problem.offers, *found[gpu])
        yield Change("gpus", f"{gpu} on offer, too", problem.replace(offers=offers))


def _is_known(catalog: Catalog, kind: str) -> bool:
    try:
        catalog.node(kind)
    except AtollError:
        return False
    return True


# What fits where


def part_fits(problem: Problem, catalog: Catalog) -> Iterator[PartFit]:
    """Yield whether each part of each any-to-any service runs alone on each kind of node, and if not, why."""
    machines: dict[str, str] = {}
    for offer in problem.offers:
        for kind in offer.kinds:
            machines.setdefault(kind, offer.node_type)
    for service in problem.graph_services:
        model = catalog.model(service.model)
        needed = {klass.name: class_parts(model, klass) for klass in service.classes}
        for part in model.graph.parts():
            classes = [name for name, parts in needed.items() if part in parts]
            for kind, machine in sorted(machines.items()) if classes else ():
                yield _fit(problem, catalog, service, part, kind, machine, classes)


def _fit(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    part: str,
    kind: str,
    machine: str,
    classes: Sequence[str],
) -> PartFit:
    """Say whether a part runs on a kind of node, for some classes at least, and if not, why."""

    def found(reason: str, detail: str = "", *, carries: bool = False) -> PartFit:
        return PartFit(
            service=service.name,
            part=part,
            kind=kind,
            carries=carries,
            reason=reason,
            detail=detail,
        )

    if not service.allows(kind):
        return found("may not stand there (`only`, `avoid`)")
    gpus = parse_node_type(kind).gpu_count
    try:
        work = work_of(problem, catalog, service, (part,), kind, machine=machine, tp=gpus)
    except AtollError as error:
        return found("does not split over so many GPUs", error.message)
    if work is None:
        weights = component_weight_bytes(catalog.model(service.model), component_of(part))
        memory = catalog.node(kind).gpu.memory_bytes
        each = f"{_size(weights / gpus)} of weights on a GPU of {_size(memory)}"
        return found(f"memory: {_size(weights)} of weights", each)
    late = [name for name in classes if (name, part) not in work.seconds]
    if not late:
        return found(FITS, carries=True)
    some = len(late) < len(classes)
    named = ", ".join(f"'{name}'" for name in late)
    return found(f"promise of {named}", _lateness(work, part, late[0]), carries=some)


def _lateness(work: ExecutorWork, part: str, klass: str) -> str:
    alone = format_duration(float(f"{work.latency_s.get((klass, part), 0.0):.3g}"))
    return f"{work.limits.get((klass, part), 'too slow')} ({alone} alone)"


def _size(size_bytes: float) -> str:
    return format_bytes(float(f"{size_bytes:.3g}"))


# Node types


def _node_use(node_type: str, plan: Plan, problem: Problem) -> NodeUse:
    offers = [offer for offer in problem.offers if offer.node_type == node_type]
    used = sum(n for (_, kind, _), n in plan.count_nodes().items() if kind == node_type)
    standing = [i for i in plan.instances if any(n.node_type == node_type for n in i.nodes)]
    users = dict.fromkeys(
        f"{i.service} {i.role_id.component if i.is_executor else i.phase}" for i in standing
    )
    available = sum(offer.available for offer in offers)
    verdict = "used" if used else "too-dear" if available else "not-offered"
    return NodeUse(
        node_type=node_type,
        verdict=verdict,
        used=used,
        available=available,
        instances=tuple(instance.id for instance in standing),
        used_by=tuple(users),
        usd_per_hour=min((o.usd_per_hour for o in offers if o.available), default=None),
        asked=False,
    )
