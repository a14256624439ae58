"""Solvers for nodes that can be rented behind one call: a problem with offers in, a plan out.

`optimal` is the default: exact templates, then the cheapest allocation of them. `fast` is a heuristic over
few templates (`rent.fast`). The others are simple rules to compare with (`rent_baselines`,
`choosing.joint_fleet`). All of them choose among templates, which are made when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from atoll.catalog.catalog import Catalog
from atoll.core.compiling import compile_entries
from atoll.core.units import format_price, format_share
from atoll.perf import capacity_kernel as _capacity_kernel  # noqa: F401 - compiled before time is taken
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.assembly import infeasible
from atoll.solve.deadline import Deadline
from atoll.solve.family import SolverFamily
from atoll.solve.plan_request import PlanRequest
from atoll.solve.rent import optimal
from atoll.solve.rent.allocation_types import Statistics
from atoll.solve.rent.choosing.joint_fleet import CHOOSERS, COMPILED
from atoll.solve.rent.fast.fast_solver import SOLVER as FAST
from atoll.solve.rent.fast.fast_solver import plan_fast
from atoll.solve.rent.optimal import Draft
from atoll.solve.rent.rent_baselines import BASELINES as PLAIN_BASELINES
from atoll.solve.rent.rent_search import MANY_TABLES
from atoll.solve.solve_progress import OnProgress
from atoll.solve.templates.library import Libraries, template_libraries

DEFAULT = optimal.SOLVER
BASELINES = {**PLAIN_BASELINES, **CHOOSERS}
NAMES = (DEFAULT, FAST, *BASELINES)
_TEMPLATES = 0.75
"""Share of a deadline after which templates are those that there are; a cache may have all of them."""
_READ = 0.35
"""Share of a deadline in which all templates must be read, or those of single nodes come first."""
_READ_BEGUN = 0.25
"""Share of them by which the pace is judged at first: what comes before the first role takes time, too."""
_SHORT_TIME_SHARE = 0.05
"""Time is short where single nodes alone take this share of a deadline."""
_ROUGH = 0.1
"""Gap, and share of the effort, of the allocation that is kept in case nothing better comes in time."""


def solve(problem: Problem, request: PlanRequest) -> Plan:
    """Return the plan of the request's solver; "infeasible", with reasons, where there is none."""
    name, effort = request.solver or DEFAULT, request.effort
    catalog = request.catalog_for(problem)
    effort.refuse_cluster_options()
    # The deadline is for planning: on a machine where nothing was compiled yet, that comes before.
    if len(problem.services) * len(problem.regions) > MANY_TABLES:
        # Only needed, and compiled, where services are very many.
        from atoll.solve.rent.many import share_kernel as _share_kernel  # noqa: F401
    for rooms in ("atoll.perf", "atoll.solve.templates", "atoll.solve.cover", "atoll.solve.rent"):
        compile_entries(rooms)
    if name in CHOOSERS:
        compile_entries(COMPILED)
    deadline = Deadline(request.deadline_s)
    # Losses take a program; what is found within seconds is a program of its own for these.
    if name == FAST and not problem.limits.survival.lost:
        return plan_fast(problem, catalog, derating=effort.derating, cached=effort.cached)
    if name not in (DEFAULT, FAST):
        # Replicas on equal nodes need the capacities that come with templates, but none of the templates.
        tables = template_libraries(
            problem,
            catalog,
            cached=effort.cached,
            until=lambda: deadline.left < deadline.seconds * (1.0 - _TEMPLATES),
            single=True,
        )
        if effort.derating is not None:
            tables = effort.derating.scale(tables)
        plan = BASELINES[name](problem, catalog, tables)
        return plan if tables.complete else plan.model_copy(update={"cut_short": True})
    search = _TimedSearch(problem, catalog, request, deadline)
    return search.run() if effort.simpler_than is None else search.simplify(effort.simpler_than)


class _TimedSearch:
    """The cheapest allocation of all templates; where time is short, one that needs few of them before.

    The first is over single nodes, kept in case nothing better is found in time. A search that ends by
    itself is not shaped by it.
    """

    def __init__(
        self,
        problem: Problem,
        catalog: Catalog,
        request: PlanRequest,
        deadline: Deadline,
    ) -> None:
        self.problem, self.catalog, self.request = problem, catalog, request
        self.effort, self.deadline = request.effort, deadline

    def run(self) -> Plan:
        seconds = self.deadline.seconds
        # `until` holds at once: what caches have, and else what is made whatever the time.
        libraries = self._libraries(lambda: True, None, self._may_read)
        first: Draft | None = None
        first_s = 0.0
        if libraries.cut_short and self.deadline.left < seconds * (1 - _SHORT_TIME_SHARE):
            began = self.deadline.left
            first = self._allocate(libraries, gap=_ROUGH, work=_ROUGH * self.effort.work)
            first_s = began - self.deadline.left
        if libraries.cut_short:
            # Time for the allocation: a share of the deadline, or twice what the rough one took.
            keep_s = max(seconds * (1 - _TEMPLATES), 2.0 * first_s)
            libraries = self._libraries(
                lambda: self.deadline.left < keep_s, self.request.on_progress
            )
        # More templates take longer: not begun where there was hardly time for the fewest.
        if first is not None and self.deadline.left < first_s + optimal.finish_s(self.problem):
            return self._finish(first)
        draft = self._allocate(libraries, gap=self.effort.gap, work=self.effort.work)
        late = libraries.cut_short or draft.allocation.cut_short
        # A search that came to its end by itself is not shaped by the first one.
        if first is not None and late and first.merit > draft.merit:
            draft = first
        return self._finish(draft)

    def simplify(self, cheapest: Plan) -> Plan:
        """Return the simplest plan that costs little more than another; "infeasible" where none was found."""
        draft = optimal.redraft(
            self.problem,
            self.catalog,
            self._libraries(lambda: False, None),
            cheapest,
            deadline_s=self.deadline.share(1.0),
            derating=self.effort.derating,
            rent_limit=self.effort.rent_limit,
        )
        if draft is None:
            return infeasible(self.problem, solver=DEFAULT, reasons=())
        return self._finish(draft)

    def _may_read(self, left: float) -> bool:
        """Return whether what is left to read, a share of all, is read in time at the pace so far."""
        done = max(_READ_BEGUN, 1.0 - left)
        return self.deadline.spent <= self.deadline.seconds * _READ * done

    def _libraries(
        self,
        until: Callable[[], bool],
        tell: OnProgress | None,
        read: Callable[[float], bool] | None = None,
    ) -> Libraries:
        return template_libraries(
            self.problem,
            self.catalog,
            cached=self.effort.cached,
            on_progress=tell,
            until=until,
            read=read,
        )

    def _allocate(self, libraries: Libraries, *, gap: float, work: float) -> Draft:
        return optimal.draft(
            self.problem,
            self.catalog,
            libraries,
            deadline_s=self.deadline.share(1.0),
            gap=gap,
            work=work,
            log=self._log,
            derating=self.effort.derating,
            rent_limit=self.effort.rent_limit,
        )

    def _log(self, _seconds: float, objective: float, bound: float) -> None:
        self.request.say("allocating", _describe(objective, bound))

    def _finish(self, draft: Draft) -> Plan:
        self.request.say("allocating", "done", 1.0, _count_work(draft.allocation.statistics))
        return _stamp(draft.plan(), draft.libraries)


def _stamp(plan: Plan, libraries: Libraries) -> Plan:
    """Return the plan; where templates are missing, as one of which nothing is proven."""
    if not libraries.cut_short:
        return plan
    status = "feasible" if plan.status == "optimal" else plan.status
    return plan.model_copy(update={"cut_short": True, "bound": None, "gap": None, "status": status})


def _count_work(statistics: Statistics) -> dict[str, int]:
    return {
        "relaxations": statistics.rounds,
        "integer programs": statistics.mips,
        "nodes": statistics.nodes,
        "iterations": statistics.iterations,
    }


def count_templates(problem: Problem, request: PlanRequest) -> dict[str, dict[str, int]]:
    """Return by role how many templates there are, of how many sets of nodes."""
    if not problem.roles:
        return {}
    libraries = template_libraries(
        problem, request.catalog_for(problem), cached=request.effort.cached
    )
    return {
        role: {"templates": len(library), "multisets": library.multisets}
        for role, library in libraries.roles.items()
    }


def _describe(objective: float, bound: float) -> str:
    best = "no plan yet"
    if math.isfinite(objective) and objective > 0:
        best = f"best {format_price(objective)}, gap {format_share(max(0, 1 - bound / objective))}"
    return f"{best}, bound {format_price(max(0.0, bound))}"


FAMILY = SolverFamily(
    names=NAMES,
    baselines=tuple(BASELINES),
    solve=solve,
    count_templates=count_templates,
    failure="no plan meets the demand of {name}",
    hint="`atoll explain --fleet FLEET` finds what would help",
    quick=(FAST,),
    choosers=tuple(CHOOSERS),
)
