"""Why a plan is what it is, by planning again; the words are in `plan_explanation`.

All figures compare with the plan that is given. What loosening a constraint is worth, which changes help and
at which price a node type would be used are questions to a `Planner`, asked in the order of what they
promise. How many are asked depends on the problem, not on the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from atoll.catalog.catalog import Catalog
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.deadline import Deadline
from atoll.solve.derating import Derating
from atoll.solve.effort import Effort
from atoll.solve.explain.break_even import estimate_worth, nearest_first, price_use
from atoll.solve.explain.changes import Change, faster_links, loosen, soft, with_more
from atoll.solve.explain.engine_limits import price_engines
from atoll.solve.explain.explain_choices import ErrorQuestions
from atoll.solve.explain.explain_graph import ask_ways, executor_facts, leave_room
from atoll.solve.explain.loss_costs import price_losses
from atoll.solve.explain.merit import merit
from atoll.solve.explain.node_types import node_use
from atoll.solve.explain.plan_explanation import (
    Constraint,
    Explanation,
    ExtraNodes,
    NodeUse,
    Worth,
    served_share,
    slacks,
    tight_constraints,
)
from atoll.solve.explain.planning_again import (
    MAX_PLANS,
    MAX_SECONDS,
    OutOfTimeError,
    Planner,
    SolvedProblem,
    gains,
    worth,
)
from atoll.solve.explain.repairs import find_repairs
from atoll.solve.explain.solvers import PlanSolver, RentSolver
from atoll.solve.place.bottleneck import bottleneck
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.resizing import lower_priors, sized_like
from atoll.solve.simplicity import SAID
from atoll.solve.templates.library import Libraries, template_libraries

_SHARE = 0.5
"""Share of the plans that the worth of constraints may take, so that repairs are asked about, too."""
_WORK = {"rent": 0.05, "place": 0.05, "graph": 0.2}
"""The share of the usual work that goes into the answer to a question. On a cluster it goes into the plan,
too, where none is given: searches compare only if they try as hard."""
_MIN_PLANS = 6
"""Plans that an explanation may make however large the problem is."""
_MIN_PLANS_PLACED = 2
"""The same on a fixed cluster, where a plan takes longer."""
_COLUMNS = 30_000
"""Templates in regions up to which as many plans are made as ever, and it takes seconds."""
_ITERATIONS = 10_000
"""Iterations of simplex after which no more questions are asked: they take some seconds."""
_NODES = 100
"""Machines of a cluster, times plans, that take seconds."""
_CHOICE_PLANS = 12
"""Plans that say what right answers cost."""
_GRAPH_PLANS = 16
"""Plans that an explanation of any-to-any models may make."""
_WORTHS = {"rent": 6, "place": 6, "graph": 4}
"""Constraints whose worth is asked, the most promising first."""

_MEMORY = "KV cache"
"""How the placing solvers begin a reason that is about memory."""

Bound = tuple[Constraint, Change]
"""A constraint, and the change that loosens it."""


def explain(
    plan: Plan | None,
    planner: Planner,
    *,
    node_types: Sequence[str] | None = None,
    constraints: bool = True,
    repairs: bool = True,
    libraries: Libraries | None = None,
) -> Explanation:
    """Return why a plan is what it is; without one, why the best that is found is.

    `node_types` are those to say something about (None: all on offer); `repairs` are looked for unless False.
    What there is no time for is named in `left_out`.
    """
    # A plan that serves a part says more about what binds than none at all.
    problem = soft(planner.problem)
    strict = problem is not planner.problem
    planner.problem = problem
    left_out: list[str] = []
    if plan is not None:
        planner.learn(problem, plan)
    first = planner.effort
    if plan is None and problem.cluster is None:
        first = replace(first, work=1.0)
    try:
        again = planner.ask(problem, "planning again", effort=first, always=plan is None)
    except OutOfTimeError:
        if plan is None:
            raise
        late = ("everything that needs planning again",)
        return _read_off(plan, plan, planner, late)
    planner.work = 0  # What planning for the problem itself takes says nothing of the questions.
    # Of an infeasible plan nothing can be read off; the most that can be served says what binds.
    base = again if plan is None or plan.status == "infeasible" else plan
    stated = base if plan is None else plan
    if plan is None and strict and base.status == "partial":
        stated = base.model_copy(update={"status": "infeasible"})
    graph = problem.family == "graph"
    ways = ask_ways(planner, base, left_out) if graph and constraints else ()
    # Constraints first, then repairs, then prices: each is asked with what plans are left.
    tight = _list_constraints(base, planner)
    if constraints:
        _ask_worths(tight, planner, left_out)
    possible = find_repairs(planner, base, left_out) if repairs else None
    # Answers to other questions may have shown a better plan for the problem itself.
    again = planner.best(problem) or again
    engines = price_engines(planner, left_out) if constraints and problem.family == "rent" else ()
    losses = price_losses(base, planner, left_out) if constraints else ()
    uses = _explain_node_types(node_types, base, planner, libraries, left_out)
    return _read_off(stated, base, planner, tuple(left_out), node_types).model_copy(
        update={
            "bound": again.bound if merit(base, problem).meets_demand else None,
            "again": worth(base, again, problem, base, None),
            "constraints": tuple(
                _settle(each, base, again, planner, estimated=constraints) for each in tight
            ),
            "repairs": possible,
            "node_types": uses,
            "ways": ways,
            "engines": engines,
            "losses": losses,
            "plans": planner.plans + len(ways),
        }
    )


def explain_problem(
    problem: Problem,
    plan: Plan | None = None,
    request: PlanRequest | None = None,
    *,
    node_types: Sequence[str] | None = None,
    repairs: bool | None = None,
    max_plans: int | None = None,
    whole: Problem | None = None,
) -> Explanation:
    """Return why a plan for a problem is what it is; without a plan, why the best that is found is.

    `node_types` are those to say something about, and then nothing else is said; `repairs` are looked for
    unless False. Planning again is done at most `max_plans` times (None: the harder it is the fewer), and the
    request's deadline is for all of it together. Of its effort only `cached` counts, and on a fixed cluster
    `promise`: whether the plan was made to keep promises. Choices between models are taken as the plan has
    settled them, but for what right answers cost and for what repairs do: `whole` is the problem with its
    choices where this one is what a plan has settled.
    """
    request = request or PlanRequest(deadline_s=MAX_SECONDS)
    catalog, cached, deadline_s = (
        request.catalog_for(problem),
        request.effort.cached,
        request.deadline_s,
    )
    request = replace(request, catalog=catalog)
    if not problem.is_settled:
        return _explain_choices(
            problem, plan, request, node_types=node_types, repairs=repairs, max_plans=max_plans
        )
    family, stated, derating = problem.family, problem, None
    if plan is not None:
        problem, derating = sized_like(plan, problem, catalog)
    libraries = None
    solver: RentSolver | PlanSolver = PlanSolver(catalog)
    if family == "rent":
        libraries = template_libraries(
            problem, catalog, cached=cached, on_progress=request.on_progress
        )
        solver = RentSolver(catalog, cached)
        solver.use(problem, libraries)

    max_asked = _count_plans(problem, libraries) if max_plans is None else max_plans

    def tell(plans: int, question: str) -> None:
        request.say("planning again", question, min(1.0, plans / max_asked))

    effort = Effort(cached=cached, work=_WORK[family], derating=derating)
    sized = plan is not None and plan.status != "infeasible"
    if family == "place":
        goal = None if plan is None or plan.goal == "cost" else plan.goal
        effort = replace(effort, objective=goal, promise=request.effort.promise)
    elif isinstance(solver, PlanSolver):
        if plan is not None and sized and plan.promises:
            tell(0, "planning again")
            effort = leave_room(effort, plan, stated, soft(problem), solver, deadline_s)
    elif plan is not None and sized and derating is not None:
        given, asked, plain = plan, soft(problem), effort

        def is_beaten(shares: Derating) -> bool:
            again = solver(asked, replace(plain, derating=shares), deadline_s).plan
            return gains(given, again, asked)

        tell(0, "planning again")
        effort = replace(effort, derating=lower_priors(derating, is_beaten))
    planner = Planner(
        problem,
        catalog,
        solver,
        effort,
        max_plans=max_asked,
        max_work=_ITERATIONS if max_plans is None else None,
        max_seconds=deadline_s,
        progress=tell,
        remix=None if whole is None else _Remixer(whole, catalog),
    )
    return explain(
        plan,
        planner,
        node_types=node_types,
        constraints=node_types is None,
        repairs=node_types is None if repairs is None else repairs,
        libraries=libraries,
    )


@dataclass(frozen=True)
class _Remixer:
    """Answers a variant of what a mix of models has settled with the models chosen anew."""

    whole: Problem
    catalog: Catalog

    def __call__(self, problem: Problem, effort: Effort, seconds: float) -> SolvedProblem:
        """Return the cheapest plan found over all mixes."""
        changed = {service.name: service for service in problem.services}
        services = tuple(
            changed[own.name].model_copy(update={"rate_per_s": own.rate_per_s})
            if own.name in changed
            else own
            for own in self.whole.services
        )
        asked = self.whole.replace(
            services=services,
            offers=problem.offers,
            limits=problem.limits,
            settings=problem.settings,
        )
        request = PlanRequest(effort=effort, deadline_s=seconds, catalog=self.catalog)
        return SolvedProblem(solve(asked, request))


def _explain_choices(
    problem: Problem,
    plan: Plan | None,
    request: PlanRequest,
    *,
    node_types: Sequence[str] | None,
    repairs: bool | None,
    max_plans: int | None,
) -> Explanation:
    """Return why a plan with mixes of models is what it is: what right answers cost, and what is settled."""
    deadline = Deadline(request.deadline_s)
    catalog, cached = request.catalog_for(problem), request.effort.cached
    if plan is None or not plan.mixes:
        plan = solve(problem, PlanRequest(deadline_s=deadline.share(_SHARE), catalog=catalog))
    max_asked = _CHOICE_PLANS if max_plans is None else int(_SHARE * max_plans)

    def tell(plans: int, question: str) -> None:
        request.say("planning again", question, min(1.0, plans / max_asked))

    questions = ErrorQuestions(
        problem, catalog, Deadline(deadline.share(_SHARE)), max_asked, cached, tell
    )
    qualities = () if node_types is not None else questions.ask(plan)
    found = explain_problem(
        problem.settled(plan.mixes),
        plan,
        replace(request, deadline_s=max(0.5, deadline.left)),
        node_types=node_types,
        repairs=repairs,
        max_plans=None if max_plans is None else max(1, max_plans - questions.plans),
        whole=problem,
    )
    return found.model_copy(
        update={
            "choices": qualities,
            "plans": found.plans + questions.plans,
            "left_out": (*questions.left_out, *found.left_out),
        }
    )


def _count_plans(problem: Problem, libraries: Libraries | None) -> int:
    """Return how often to plan again, so that all of it takes seconds: as often as one plan is quick."""
    if problem.family == "graph":
        return _GRAPH_PLANS
    if libraries is None:
        nodes = len(problem.cluster.nodes) if problem.cluster is not None else 1
        # Several services share the machines out, which takes several placements.
        return max(
            _MIN_PLANS_PLACED, min(MAX_PLANS, round(_NODES / (nodes * len(problem.services) ** 2)))
        )
    columns = len(problem.regions) * sum(map(len, libraries.roles.values()))
    # Larger programs take longer per plan, so fewer plans are made.
    share = float((_COLUMNS / max(1, columns)) ** 0.4)
    return round(max(_MIN_PLANS, min(1.0, share) * MAX_PLANS))


def _read_off(
    stated: Plan,
    plan: Plan,
    planner: Planner,
    left_out: tuple[str, ...],
    node_types: Sequence[str] | None = None,
) -> Explanation:
    """Return what a plan says without planning again."""
    problem = planner.problem
    found = Explanation(
        problem_name=stated.problem_name,
        status=stated.status,
        goal=plan.goal,
        served=served_share(plan, problem),
        usd_per_hour=plan.usd_per_hour,
        objective=plan.objective,
        constraints=tight_constraints(plan, problem),
        demand=tuple(s for s in slacks(plan, problem) if s.demand_per_s or s.capacity_per_s),
        left_out=left_out,
        simple=any(note.startswith(SAID) for note in plan.notes),
    )
    if problem.family != "graph":
        return found
    return found.model_copy(update=executor_facts(plan, problem, planner.catalog, node_types))


def _list_constraints(base: Plan, planner: Planner) -> list[Bound]:
    """Return what binds, with the change that loosens each."""
    problem = planner.problem
    if problem.cluster is not None:
        found = list(cluster_constraints(base, problem, planner.catalog))
        # Promises stand in the way of demand, not of what could be carried beyond it.
        promised = planner.effort.promise and not merit(base, problem).meets_demand
        return [*found, promise_constraint(problem)] if promised else found
    return [
        (constraint, Change("limits", constraint.where, loosen(problem, constraint)))
        for constraint in tight_constraints(base, problem)
    ]


def _ask_worths(tight: Sequence[Bound], planner: Planner, left_out: list[str]) -> None:
    """Ask what loosening each constraint would do, the most promising first."""
    problem = planner.problem
    answer = planner.answer(problem)

    def promise(index: int) -> tuple[bool, float, int]:
        rental = tight[index][0].rental
        rented = rental is not None and problem.family == "rent"
        worth = estimate_worth(answer, problem, rental) if rental and rented else 0.0
        return (rented, -(worth or 0.0), index)

    order = sorted(range(len(tight)), key=promise)
    # Only a share of the plans, so that some are left for repairs.
    max_asked = max(1, min(_WORTHS[problem.family], int(_SHARE * planner.plans_left)))
    asked = 0
    for index in order[:max_asked]:
        constraint, change = tight[index]
        question = f"{constraint.loosened}: {constraint.where}"
        try:
            planner.ask(change.problem, question, best_effort=change.best_effort)
        except OutOfTimeError:
            break
        asked += 1
    if asked < len(order):
        left_out.append(f"what {len(order) - asked} of the constraints are worth")


def _settle(
    bound: Bound, base: Plan, again: Plan, planner: Planner, *, estimated: bool
) -> Constraint:
    """Return a constraint with what loosening it is worth, by all plans that are known in the end.

    Where it was not asked about it is `estimated`, if that is wanted.
    """
    constraint, change = bound
    answer = planner.answer(change.problem, best_effort=change.best_effort)
    if answer is None:
        return _estimate(constraint, base, planner) if estimated else constraint
    then = planner.best(change.problem, best_effort=change.best_effort) or base
    least = None if answer.plan.status == "partial" else answer.plan.bound
    gained = worth(base, then, planner.problem, again, least)
    return constraint.model_copy(update={"worth": gained})


def _estimate(constraint: Constraint, base: Plan, planner: Planner) -> Constraint:
    """Return a constraint with about what loosening it is worth, if the relaxation says so."""
    problem, rental = planner.problem, constraint.rental
    if rental is None or problem.cluster is not None or not merit(base, problem).meets_demand:
        return constraint
    usd = estimate_worth(planner.answer(problem), problem, rental)
    if usd is None:
        return constraint
    gained = Worth(usd_per_hour=usd, served=1.0, served_now=1.0, estimated=True)
    return constraint.model_copy(update={"worth": gained})


def _explain_node_types(
    node_types: Sequence[str] | None,
    base: Plan,
    planner: Planner,
    libraries: Libraries | None,
    left_out: list[str],
) -> tuple[NodeUse, ...]:
    problem = planner.problem
    wanted = problem.node_types if node_types is None else tuple(node_types)
    uses = [node_use(kind, base, problem, planner.catalog, libraries) for kind in wanted]
    short = not merit(base, problem).meets_demand
    # Where demand is not met, and of any-to-any models, prices are asked only of node types that were named.
    if problem.cluster is not None or (node_types is None and (short or problem.family == "graph")):
        return tuple(uses)
    dear = [use.node_type for use in uses if use.verdict == "too-dear"]
    if node_types is None and libraries is not None:
        dear = nearest_first(dear, base, problem, libraries)
    best = planner.best(problem) or base
    by_type = {use.node_type: use for use in uses}
    for done, kind in enumerate(dear):
        try:
            by_type[kind] = price_use(by_type[kind], best, planner)
        except OutOfTimeError:
            left_out.append(f"at which price {', '.join(dear[done:])} would be used")
            break
    return tuple(by_type[use.node_type] for use in uses)


def cluster_constraints(plan: Plan, problem: Problem, catalog: Catalog) -> Iterator[Bound]:
    """Yield what a plan on a fixed cluster uses up, with the change that loosens each; most of it first."""
    cluster = cluster_of(problem)
    machines: Counter[tuple[str, str]] = Counter()
    rules: Counter[int] = Counter()
    for instance in plan.instances:
        cut = bottleneck(instance, problem, catalog)
        if cut is None:
            continue
        machines.update((cluster.node(n.host).region, n.node_type) for n in cut.nodes if n.host)
        links = (cluster.link(src, dst) for src, dst in cut.links)
        rules.update(cluster.links.index(link) for link in links if link is not None)
    for (region, kind), count in sorted(machines.items(), key=lambda item: (-item[1], item[0])):
        noun = "machine" if count == 1 else "machines"
        yield _one_more(problem, region, kind, f"{count} full {noun} {kind} in {region}", "machine")
    for index, count in sorted(rules.items(), key=lambda item: (-item[1], item[0])):
        link = cluster.links[index]
        noun = "link" if count == 1 else "links"
        where = f"{count} full {noun} ({link.src} - {link.dst})"
        constraint = Constraint(kind="link", where=where, loosened="links ten times as fast")
        yield constraint, Change("links", where, faster_links(problem, [index]))
    for reason in plan.reasons:
        if reason.startswith(_MEMORY):
            yield from _memory(reason, problem)


def promise_constraint(problem: Problem) -> Bound:
    """Return the promises of all services as one constraint."""
    names = ", ".join(service.name for service in problem.services)
    constraint = Constraint(kind="promise", where=f"promises of {names}", loosened="best effort")
    return constraint, Change("best-effort", constraint.where, problem, best_effort=True)


def _memory(reason: str, problem: Problem) -> Iterator[Bound]:
    """Yield the machine whose memory is full: the reason names it."""
    for node in cluster_of(problem).nodes:
        if f"{_MEMORY} of {node.name} " in reason:
            yield _one_more(problem, node.region, node.node_type, reason, "memory")


def _one_more(problem: Problem, region: str, kind: str, where: str, what: str) -> Bound:
    more = ExtraNodes(region=region, node_type=kind, market="owned", count=1)
    constraint = Constraint(
        kind="memory" if what == "memory" else "machine",
        where=where,
        loosened=f"one more {kind} in {region}",
        rental=more,
    )
    return constraint, Change("nodes", kind, with_more(problem, (more,)), rentals=(more,))
