"""Planning with simulation at hand: plans whose promises a share of requests keeps, and are seen to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from atoll.core.errors import UsageError
from atoll.plan.footprint import PowerGrid
from atoll.solve.effort import DEADLINE_S, Countdown, Effort
from atoll.solve.progress import OnProgress, Progress, SolveStats
from atoll.solve.registry import solve, solvers

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem


def plan(
    problem: Problem,
    *,
    solver: str | None = None,
    effort: Effort | None = None,
    deadline_s: float = DEADLINE_S,
    on_progress: OnProgress | None = None,
    catalog: Catalog | None = None,
    rank: bool = True,
    capacity_only: bool = False,
    error_bars: bool = True,
    stats: SolveStats | None = None,
) -> Plan:
    """Return a plan that keeps its promises for the share of requests that each service asks for.

    Where nodes are rented it is sized by simulation (`promise`); on a cluster the best placements are
    simulated, with `rank`, the one that generates most under full load is taken and changed further, and what
    requests keep there is simulated. With `capacity_only`, and for solvers other than the default, it is
    what `solve` finds. Simulations end with the deadline like everything else. With `error_bars` the plan
    says how likely each promise is kept, over what the performance model may be wrong by. Choices between
    models are settled by the mixes that the plan has (`choosing`).
    """
    facts = problem.catalog() if catalog is None else catalog
    deadline = Countdown(deadline_s)
    own = SolveStats()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    made = _plan(
        problem,
        solver=solver,
        effort=effort or Effort(),
        deadline_s=deadline_s,
        on_progress=on_progress,
        catalog=facts,
        rank=rank,
        capacity_only=capacity_only,
        stats=own,
    )
    if made.promises and error_bars and not problem.has_graphs:
        made = _with_chances(made, problem.settled(made.mixes), facts, deadline)
    if problem.weights.rent_only and problem.grid != PowerGrid() and not problem.has_graphs:
        from atoll.solve.weighted import stamp_power

        # Who says what electricity costs the climate wants to know what a plan does.
        made = stamp_power(made, problem, facts)
    if stats is not None:
        # All of it, simulations included, not only what solvers took.
        own.seconds, own.cpu_seconds = time.perf_counter() - began_s, time.process_time() - cpu_s
        stats.add(own)
    return made


def _plan(
    problem: Problem,
    *,
    solver: str | None,
    effort: Effort,
    deadline_s: float,
    on_progress: OnProgress | None,
    catalog: Catalog,
    rank: bool,
    capacity_only: bool,
    stats: SolveStats,
) -> Plan:
    if not deadline_s > 0:
        raise UsageError(f"a deadline of {deadline_s:g} s", hint="give it some time, as in 30.0")
    facts, chosen = catalog, effort
    _refuse_choices(problem)
    if not problem.weights.rent_only:
        return _plan_weighted(
            problem,
            solver=solver,
            effort=effort,
            deadline_s=deadline_s,
            on_progress=on_progress,
            catalog=catalog,
            capacity_only=capacity_only,
            stats=stats,
        )
    simulates = not capacity_only and (solver is None or solver == solvers(problem)[0])
    by_latency = _goes_by_latency(problem, solver, effort)
    if simulates or by_latency or (rank and problem.hosts):
        # Before the deadline begins.
        from atoll.core.compiling import compile_entries
        from atoll.sim import loop

        compile_entries(loop.__name__)
    deadline = Countdown(deadline_s)

    def say(phase: str, text: str) -> None:
        if on_progress is not None:
            on_progress(Progress(phase, text))

    def find(asked: Problem, spent: Effort, seconds: float) -> Plan:
        return solve(
            asked,
            solver=solver,
            effort=spent,
            deadline_s=seconds,
            on_progress=on_progress,
            catalog=facts,
            stats=stats,
        )

    if not problem.hosts:
        if not simulates:
            return find(problem, chosen, deadline_s)
        if problem.has_graphs:
            from atoll.prove.executors import keep_graph_promises

            return keep_graph_promises(
                problem,
                facts,
                # Plain services of the fleet are sized alone first: those have solvers of their own.
                lambda asked, spent, seconds: solve(
                    asked,
                    effort=spent,
                    deadline_s=seconds,
                    on_progress=on_progress,
                    catalog=facts,
                    stats=stats,
                ),
                chosen,
                deadline=deadline,
                say=lambda text: say("promises", text),
            )
        return _keep_rented(problem, facts, find, chosen, deadline, on_progress)
    chosen = _with_simulations(
        chosen, problem, facts, deadline, say, rank=rank, by_latency=by_latency
    )
    if not simulates:
        return find(problem, chosen, deadline_s)
    from atoll.prove.cluster import keep_on_cluster, see_promises

    if by_latency:
        # Tighter promises would not make it answer sooner.
        found = find(problem, chosen, deadline.share(0.5))
        return see_promises(
            found, problem, facts, deadline=deadline, say=lambda text: say("promises", text)
        )
    return keep_on_cluster(
        problem,
        facts,
        lambda asked: find(asked, chosen, deadline.share(0.5)),
        deadline=deadline,
        say=lambda text: say("promises", text),
    )


def _refuse_choices(problem: Problem) -> None:
    """Refuse choices between models where nothing can choose: on clusters, and for any-to-any models."""
    if problem.choices:
        from atoll.solve.rent.choosing.solver import refuse_others

        refuse_others(problem)


def _keep_rented(
    problem: Problem,
    catalog: Catalog,
    find: Callable[[Problem, Effort, float], Plan],
    effort: Effort,
    deadline: Countdown,
    on_progress: OnProgress | None,
) -> Plan:
    """Return a plan of rented nodes that keeps its promises, with a mix of models where there is a choice."""
    from atoll.prove.promise import keep_promises

    def say(text: str) -> None:
        if on_progress is not None:
            on_progress(Progress("promises", text))

    if not problem.choices:
        return keep_promises(problem, catalog, find, effort, deadline=deadline, say=say)
    from atoll.prove.choosing import keep_chosen_promises

    return keep_chosen_promises(
        problem,
        catalog,
        lambda asked, seconds: keep_promises(
            asked, catalog, find, effort, deadline=Countdown(seconds), say=say
        ),
        find,
        effort,
        deadline=deadline,
        say=say,
    )


def _plan_weighted(
    problem: Problem,
    *,
    solver: str | None,
    effort: Effort,
    deadline_s: float,
    on_progress: OnProgress | None,
    catalog: Catalog,
    capacity_only: bool,
    stats: SolveStats,
) -> Plan:
    """Plan where energy or carbon count: every plan on the way is one in which prices alone do."""
    from atoll.solve.weighted import plan_weighted

    def find(priced: Problem, spent: Effort, seconds: float, *, capacity: bool) -> Plan:
        return _plan(
            priced,
            solver=solver,
            effort=spent,
            deadline_s=seconds,
            on_progress=on_progress,
            catalog=catalog,
            rank=False,
            capacity_only=capacity,
            stats=stats,
        )

    return plan_weighted(
        problem,
        catalog,
        effort,
        partial(find, capacity=True),
        deadline_s=deadline_s,
        keep=None if capacity_only else partial(find, capacity=False),
        on_progress=on_progress,
    )


def _goes_by_latency(problem: Problem, solver: str | None, effort: Effort) -> bool:
    """Whether a solver asks for simulated latencies."""
    if not problem.hosts:
        return False
    from atoll.solve.place.service import CP

    return solver == CP or effort.objective == "latency"


def _with_simulations(
    effort: Effort,
    problem: Problem,
    catalog: Catalog,
    deadline: Countdown,
    say: Callable[[str, str], None],
    *,
    rank: bool,
    by_latency: bool,
) -> Effort:
    """The effort with the simulations that solvers for clusters ask for, unless it has its own."""
    if by_latency and effort.latency is None:
        from atoll.prove.cp_tables import SimulatedLatency

        fill = SimulatedLatency(catalog, lambda text: say("simulating", text), deadline=deadline)
        return replace(effort, latency=fill)
    if rank and not by_latency and effort.rank is None:
        from atoll.prove.rank import Simulated

        value = Simulated(problem, catalog, lambda text: say("ranking", text), deadline=deadline)
        return replace(effort, rank=value)
    return effort


def _with_chances(plan: Plan, problem: Problem, catalog: Catalog, deadline: Countdown) -> Plan:
    """The plan with how likely each promise is kept, over what the performance model may be wrong by."""
    from atoll.prove.deadline import SimulationCutShortError
    from atoll.prove.uncertainty import judge_certainty

    try:
        found = judge_certainty(plan, problem, catalog, deadline=deadline)
    except SimulationCutShortError:
        return plan
    promises = tuple(
        promise.model_copy(update={"chance": found.chance.get(promise.service)})
        for promise in plan.promises
    )
    notes = plan.notes
    if found.measure is not None and min(found.chance.values()) < 1.0:
        gpu, op = found.measure
        notes = (*notes, f"measuring {op} on {gpu} would make the promises surest")
    return plan.model_copy(update={"promises": promises, "notes": notes})
