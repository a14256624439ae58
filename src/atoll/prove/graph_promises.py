"""Plans with any-to-any models that keep their promises for a share of requests: simulated and tightened.

The plan for capacity alone is simulated first. Where too few requests of a service keep a promise, executors
that the promise is about are planned as if they took longer, those of the same parts and the same kind of
node together: with encoders and prompts where first texts are late, with the llm's answers where tokens are,
with generators where speech or images are. Kinds of executors that no plan has used yet count in full, those
with parts that were too slow elsewhere by the root of what these were: parts that share a device wait for
each other, and only a simulation says how long. When a plan keeps its promises, half of what was added last
is taken back as long as that makes it cheaper. Plain services in the same fleet are sized alone first
(`promise`), and their templates carry in the whole plan what they carry there; a simulation of the whole plan
looks at all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.perf.components.class_loads import component_of
from atoll.plan.component_sharing import list_sharers, name_services
from atoll.plan.executors import DECODE, PREFILL
from atoll.plan.plan import PROVEN_GAP
from atoll.plan.validate.violation import InvalidPlanError
from atoll.prove.graph_kept import (
    AHEAD,
    IMAGE,
    TPOT,
    TTFT,
    GraphShares,
    load_alone,
    mean_of,
    plain_plan,
    plain_problem,
    promise_of,
    sample_graphs,
    served_groups,
)
from atoll.prove.kept import FRESH_SEED, look_at
from atoll.prove.rent_promises import keep_promises
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve.deadline import Deadline
from atoll.solve.derating import node_set
from atoll.solve.effort import KnownPlan
from atoll.solve.graph.graph_solver import CUTS, UNPLANNED, all_options, hangs_on_links
from atoll.solve.registry import solve
from atoll.solve.resizing import derating_of

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem, Service
    from atoll.solve.effort import Effort, Used
    from atoll.solve.plan_request import PlanRequest

Executors = tuple[str, str, str]
"""Executors that are alike: service (all that share them), parts, kind of node."""

_SEARCH_SHARE = 0.8
"""Share of the deadline for the search; the rest is for what the plan found keeps and what is proven."""
_ALONE_SHARE = 0.5
"""Share of the time then left for services alone."""
_MAX_ROUNDS = 40
"""How often promises may be missed before the best plan so far is taken."""
_MAX_PROBES = 4
"""How often less than what was enough is tried then, half way to what was not."""
_STEPS = ((0.5, 1.6), (0.2, 1.35), (0.05, 1.2), (0.0, 1.1))
"""By what executors are slowed down that lose requests: by how far the share kept is from its target."""
_MAX_SLOWDOWN = 30.0
"""By what executors are slowed down at most."""
_BLAMED_SHARE = 0.7
"""Executors are to blame for what is late that are busy for this share of what the busiest of them is."""
_TRIAL_SEED = 1
_TRIAL_RUNS = 2
_MAX_RUNS = 6
"""Simulations of a plan while it is sized: at least `_TRIAL_RUNS`, more while it is not sure what is kept."""
_FRESH_RUNS = 4
_MAX_FRESH = 16
"""The same for the proof, with arrivals that no plan was sized with."""
_FRESH_TRIES = 3
"""Plans that are proven with fresh arrivals, one after the other, until one surely keeps its promises."""
_FINE_GAP = 0.01
"""Proven gap of plans that may be taken: what is proven of the promised plan is not as close."""
_ROUGH_GAP = 0.05
"""The same of plans from which it is learnt what executors carry."""
_ROUGH_WORK = 0.2
"""Share of the effort that such a plan may take."""
_CUT_SLOWDOWNS = (1.0, 1.25, 1.5, 2.0)
"""By what executors of simple rules are slowed down, one after the other, until enough requests are kept."""
_MAX_LOOKED_BACK = 4
"""How many plans that were passed over are tried whole."""
_MIN_SAVING = 1e-3
"""A plan that is not cheaper by this share is none."""


def keep_graph_promises(problem: Problem, request: PlanRequest) -> Plan:
    """Return the cheapest plan found whose promises enough of every service's requests keep.

    Where a target cannot be met the plan comes as close as was found, and says what falls short.
    """
    limits = problem.limits
    asked = {"survive": bool(limits.survival.lost), "spot_loss": limits.spot_loss_per_h > 0.0}
    for name, is_set in asked.items():
        if is_set:
            raise UsageError(
                UNPLANNED[name],
                field=f"limits.{name}",
                hint="leave it out, or plan plain services in a fleet of their own",
            )
    return _GraphProver(problem, request).run()


class SizedExecutors(NamedTuple):
    """A plan that keeps its promises, and by what simulation found that executors are to be slowed down.

    By service, parts and kind of node; "*" stands for kinds that no plan on the way had.
    """

    plan: Plan
    slowdown: Mapping[Executors, float]


def size_executors(problem: Problem, request: PlanRequest) -> SizedExecutors:
    """Return the plan of `keep_graph_promises`, with what was found on the way to it."""
    prover = _GraphProver(problem, request)
    return SizedExecutors(prover.run(), prover.slowdowns())


class _Enough(NamedTuple):
    """A plan that keeps its promises, what it keeps, and how slow executors are taken to be.

    With those in `lacking`, taken to be so slow, too few requests kept them.
    """

    plan: Plan
    kept: dict[str, GraphShares]
    slow: dict[Executors, float]
    lacking: dict[Executors, float]


class _Planned(NamedTuple):
    """A plan on the way: of what problem, with how slow executors ("*": all kinds that are not named)."""

    problem: Problem
    slow: Mapping[Executors, float]
    plan: Plan

    def is_easier(self, slow: Mapping[Executors, float]) -> bool:
        """Whether no executor was taken to be slower than it is with `slow`."""
        return all(_slowness(self.slow, key) <= _slowness(slow, key) for key in {*self.slow, *slow})


class _GraphProver:
    def __init__(self, problem: Problem, request: PlanRequest) -> None:
        # Plain services of the fleet are sized alone first: those have solvers of their own.
        self.problem, self.request = problem, replace(request, solver=None)
        self.catalog, self.effort = request.catalog_for(problem), request.effort
        self.deadline = Deadline(request.deadline_s)
        self.until = Deadline(_SEARCH_SHARE * request.deadline_s)
        """When the search ends; the rest of the time is for what the plan found keeps."""
        self.plan_s = 0.0
        """Seconds that the last plan on the way took."""
        self.late = False
        self.graphs = [s for s in problem.graph_services if s.rate_per_s > 0.0]
        self.plain = plain_problem(problem)
        self.slow: dict[Executors, float] = {}
        self.known: set[Executors] = set()
        self.likely: set[Used] = set()
        self._planned: list[_Planned] = []
        self._tried: dict[object, dict[str, GraphShares]] = {}
        self.passed_over: dict[str, Plan] = {}
        """Plans that were not simulated whole, for what their executors carry alone; by hash."""
        self.cuts_tried = False
        """Whether plans of simple rules were tried."""
        self.found: Plan | None = None
        """The last plan of a search."""
        self.closest: tuple[float, Plan, dict[str, GraphShares]] | None = None
        """The plan of a search that comes closest to its promises, by how much, and what it keeps."""

    def run(self) -> Plan:
        # Before all else a plan for capacity: it is there if time is up, and bounds what others cost.
        self._say("planning for capacity")
        self.capacity = self._plan_capacity()
        if self.capacity.status == "infeasible":
            return self.capacity
        # Small questions first: what is learnt from them makes the whole plan need fewer rounds.
        if self.plain is not None and not self.until.is_over():
            self._size_plain(self.plain)
        if len(self.problem.services) > 1:
            part = Deadline(self.until.share(_ALONE_SHARE))
            for service in self.graphs:
                self._size_alone(service, part)
        return self._stamp_late(self._search_sure())

    def _search_sure(self) -> Plan:
        """Return the first plan that surely keeps its promises on fresh arrivals, else the closest."""
        best: tuple[tuple[bool, float], Plan, dict[str, list[GraphShares]]] | None = None
        for attempt in range(_FRESH_TRIES):
            plan, tried = self._search_until(self.problem, self.until, rough=False)
            if plan.status == "infeasible":
                return plan if best is None else self._finish(*best[1:])
            try:
                fresh = self._look(plan, attempt)
            except SimulationCutShortError:
                self.late = True
                if best is None:
                    return plan.model_copy(update=self._bounds(plan))
                break
            kept = {name: mean_of(runs) for name, runs in fresh.items()}
            unsure = self._unsure(fresh)
            rank = not unsure, self._margin(kept)
            if best is None or rank > best[0]:
                best = rank, plan, fresh
            if unsure:
                self.passed_over.pop(plan.content_hash(), None)
            # What was missed in trials, too, has been searched as far as it goes.
            over = not unsure or self.late or bool(self._short(tried))
            if over or not self._tighten(plan, kept, unsure, 1):
                break
            self._say("it is not sure that enough requests keep their promises on other arrivals")
        assert best is not None
        return self._finish(*best[1:])

    def _margin(self, kept: Mapping[str, GraphShares]) -> float:
        """By how much the service that keeps least exceeds its target."""
        margins = (one.margin(self._target(name)) for name, one in kept.items())
        return min(margins, default=0.0)

    def _unsure(self, fresh: Mapping[str, list[GraphShares]]) -> list[str]:
        """The services of which it is not sure that enough requests keep their promises, of every class."""
        found = (promise_of(self.problem.service(name), runs) for name, runs in fresh.items())
        return [promise.service for promise in found if not promise.is_surely_kept]

    def _plan_capacity(self) -> Plan:
        """Return a plan for capacity alone; where a rough search finds none, with all of the effort."""
        request = replace(
            self.request, effort=_rough(self.effort), deadline_s=self.until.share(0.5)
        )
        plan = solve(self.problem, request)
        if plan.status == "infeasible" and not self.until.passed:
            request = replace(request, effort=self.effort, deadline_s=self.until.share(0.5))
            plan = solve(self.problem, request)
        self.plan_s, self.late = self.until.spent, plan.cut_short
        return plan

    def _stamp_late(self, plan: Plan) -> Plan:
        """The plan with whether the deadline came before all was done."""
        late = self.late or self.until.missed or plan.cut_short
        return plan.model_copy(update={"cut_short": late})

    def _look(self, plan: Plan, attempt: int) -> dict[str, list[GraphShares]]:
        """Return what requests keep on arrivals that no plan was sized with, other ones for every plan."""
        return sample_graphs(
            plan,
            self.problem,
            self.catalog,
            first_seed=FRESH_SEED + attempt * _MAX_FRESH,
            min_runs=_FRESH_RUNS,
            max_runs=_MAX_FRESH,
            deadline=self.deadline,
        )

    def _size_plain(self, plain: Problem) -> None:
        """Size the plain services alone; what their templates carry there they carry in the whole plan."""
        self._say("plain services alone")
        alone = keep_promises(plain, self._step(self.effort))
        self.late = self.late or alone.cut_short
        if alone.promises:
            derating = derating_of(alone, plain, self.catalog)
            self.effort = replace(self.effort, derating=derating)
        self._note_likely(alone)

    def _size_alone(self, service: Service, until: Deadline) -> None:
        """Find what executors of one service carry in a plan of its own: that is a smaller question."""
        self._say(f"{service.name} alone")
        running = tuple(i for i in self.problem.running if i.service == service.name)
        alone = self.problem.replace(services=(service,), running=running)
        self._search_until(alone, until, rough=True)

    def _search_until(
        self, problem: Problem, until: Deadline, *, rough: bool
    ) -> tuple[Plan, dict[str, GraphShares]]:
        """Search as `_search` does; where time is up, return the best so far and what is known of it."""
        whole, self.until = self.until, until
        self.found = self.closest = None
        try:
            return self._search(problem, rough=rough)
        except SimulationCutShortError:
            self.late = True
            return self._best_so_far()
        finally:
            self.until = whole

    def _best_so_far(self) -> tuple[Plan, dict[str, GraphShares]]:
        if self.closest is not None:
            return self.closest[1:]
        return self.found or self.capacity, {}

    def _learn(self, plan: Plan, problem: Problem) -> bool:
        """Simulate kinds of executors alone that no plan has used before; whether that slows any down."""
        new: dict[Executors, Instance] = {}
        for instance in plan.executor_instances:
            if _kind_of(instance) not in self.known:
                new.setdefault(_kind_of(instance), instance)
        before = dict(self.slow)
        # Sorted, so that the same plan always learns in the same order.
        for key, instance in sorted(new.items()):
            self.known.add(key)
            load = load_alone(plan, problem, self.catalog, instance, self.until)
            if load < 1.0:
                self.slow[key] = max(self.slow.get(key, 1.0), 1.0 / load)
        return self.slow != before

    def _search(self, problem: Problem, *, rough: bool) -> tuple[Plan, dict[str, GraphShares]]:
        """Return the cheapest plan found that keeps its promises, or the one that comes closest.

        Plans are rough ones at first, and where `rough` to the end: enough to learn what executors carry.
        """
        lacking: dict[Executors, float] = {}
        good: _Enough | None = None
        fine, eager = not self.graphs, 0
        before: list[Counter[Executors]] = []
        for number in range(_MAX_ROUNDS):
            plan = self._plan(problem, fine=fine)
            if not self.graphs:
                return plan, {}
            if plan.status == "infeasible":
                return self._take_closest(problem, plan)
            self.found = plan
            if good is not None and not _saves(plan, good.plan):
                break  # more effort finds nothing cheaper that keeps its promises
            # What was just learnt changes the plan: it is planned again before the whole is simulated.
            if self._learn(plan, problem) and number < _MAX_ROUNDS - 1:
                self._say(f"round {number + 1}: ${plan.usd_per_hour:.2f}/h, executors alone")
                self._pass_over(problem, plan)
                continue
            kept = self._try(plan, problem)
            short = self._short(kept)
            worst = self._margin(kept)
            self._say(
                f"trial {number + 1}: ${plan.usd_per_hour:.2f}/h, {worst:+.1%} over the target"
            )
            # A fine plan wins over a rough one that is as close.
            if self.closest is None or (worst, fine) > (self.closest[0], False):
                self.closest = (worst, plan, kept)
            if not short:
                if rough:
                    return plan, kept
                good = _Enough(plan, kept, dict(self.slow), lacking)
                if fine:
                    break
                # Rough plans keep the promises: what is learnt holds, so the last plan is worth more effort.
                fine = True
                continue
            good = good or self._try_cuts(problem, rough=rough)
            lacking = dict(self.slow)
            now = Counter(_kind_of(i) for i in plan.executor_instances)
            # Where more room leads back to executors that were too few before, a larger step does not.
            eager = eager + 1 if now in before else 0
            before.append(now)
            if self._is_close(problem, good) or not self._tighten(plan, kept, short, 1 << eager):
                break
        if good is not None:
            return self._look_back(self._loosen(problem, good))
        assert self.closest is not None
        return self.closest[1:]

    def _try_cuts(self, problem: Problem, *, rough: bool) -> _Enough | None:
        """Return the cheapest plan by a simple rule that keeps its promises, None where none does.

        Once, for the whole problem, and where links make a difference: on slow ones executors that take less
        time for a request are worth more than their seconds say, and trials may lead far astray, to dearer
        plans than a simple rule makes with some room.
        """
        if rough or problem is not self.problem or self.cuts_tried:
            return None
        self.cuts_tried = True
        best: _Enough | None = None
        for cut in CUTS if hangs_on_links(problem, self.catalog) else ():
            for slowed in _CUT_SLOWDOWNS:
                slow = {
                    (whose, "+".join(option), "*"): slowed
                    for service in self.graphs
                    for option in all_options(self.catalog, service)
                    for whose in (
                        service.name,
                        name_services(list_sharers(self.problem, service, option)),
                    )
                }
                effort = replace(_rough(self.effort), slowdown=slow)
                try:
                    plan = solve(self.problem, replace(self._step(effort), solver=cut))
                except InvalidPlanError:
                    break  # rules know no limits of the whole
                if plan.status not in ("optimal", "feasible"):
                    break
                if best is not None and not _saves(plan, best.plan):
                    break  # with more room it costs no less
                kept = self._try(plan, self.problem)
                if not self._short(kept):
                    self._say(f"{cut}: ${plan.usd_per_hour:.2f}/h will do")
                    plan = plan.model_copy(update={"solver": self.capacity.solver})
                    best = _Enough(plan, kept, dict(self.slow), dict(self.slow))
                    break
        return best

    def _pass_over(self, problem: Problem, plan: Plan) -> None:
        """Remember a plan of the whole problem that is not simulated whole (`_look_back`)."""
        if problem is self.problem and plan.status != "partial":
            self.passed_over[plan.content_hash()] = plan

    def _take_closest(self, problem: Problem, none: Plan) -> tuple[Plan, dict[str, GraphShares]]:
        """Return the plan that comes closest; `none` has no plan with so much room, nor may any have one."""
        if self.closest is not None:
            return self.closest[1:]
        found = self.capacity if self.found is None and problem is self.problem else self.found
        return (none, {}) if found is None else (found, self._try(found, problem))

    def _loosen(self, problem: Problem, good: _Enough) -> tuple[Plan, dict[str, GraphShares]]:
        """Try less than what was enough, half way to what was not, while that makes the plan cheaper."""
        best = good.plan, good.kept
        low, high = dict(good.lacking), dict(good.slow)
        for _ in range(_MAX_PROBES):
            if low == high or not high:
                break
            self.slow = {key: 0.5 * (high[key] + low.get(key, 1.0)) for key in high}
            try:
                plan = self._plan(problem, fine=False)
                if not _saves(plan, best[0]):
                    low = dict(self.slow)
                    continue
                kept = self._try(plan, problem)
            except SimulationCutShortError:
                self.late = True
                break
            if self._short(kept):
                low = dict(self.slow)
            else:
                best, high = (plan, kept), dict(self.slow)
                self._say(f"${plan.usd_per_hour:.2f}/h will do")
        self.slow = dict(high)
        return best

    def _look_back(
        self, best: tuple[Plan, dict[str, GraphShares]]
    ) -> tuple[Plan, dict[str, GraphShares]]:
        """Try plans that were passed over and cost less than the best, the dearest first.

        What executors carry alone is careful: together they may keep enough.
        """
        cheaper = [plan for plan in self.passed_over.values() if _saves(plan, best[0])]
        cheaper.sort(key=lambda plan: (-plan.usd_per_hour, plan.content_hash()))
        for plan in cheaper[:_MAX_LOOKED_BACK]:
            if not _saves(plan, best[0]):
                continue  # as dear as one that was just taken
            try:
                kept = self._try(plan, self.problem)
            except SimulationCutShortError:
                self.late = True
                break
            if not self._short(kept):
                best = (plan, kept)
                self._say(f"${plan.usd_per_hour:.2f}/h will do")
        return best

    def _plan(self, problem: Problem, *, fine: bool = True) -> Plan:
        """Plan with executors as slow as was found; others of the same parts by a guess.

        Plans that are not `fine` are looked for among what is likely. Raises
        SimulationCutShortError where less time is left than the last one took.
        """
        if self.until.left <= self.plan_s:
            raise SimulationCutShortError("no time is left to plan again")
        slow = self.slowdowns()
        likely, known = frozenset(self.likely), self._known(problem, slow)
        effort = replace(self.effort, slowdown=slow, likely=likely, known=known)
        if fine:
            effort = replace(effort, gap=max(_FINE_GAP, effort.gap))
        else:
            effort = replace(_rough(effort), unproven=True)
        began_s = self.until.spent
        plan = solve(problem, self._step(effort))
        self.plan_s = self.until.spent - began_s
        self.late = self.late or plan.cut_short
        if plan.cut_short and plan.status == "infeasible":
            raise SimulationCutShortError("time was up before a plan was found")
        self._note_likely(plan)
        if plan.status in ("optimal", "feasible"):
            self._planned.append(_Planned(problem, slow, plan))
        return plan

    def slowdowns(self) -> dict[Executors, float]:
        """By how much executors are slowed down; kinds that no plan has used ("*") by a guess."""
        slow = dict(self.slow)
        for (service, parts, _), factor in self.slow.items():
            key = (service, parts, "*")
            # The least slowdown seen: kinds that no plan has used are not to be put off more than needed.
            slow[key] = min(slow.get(key, factor**0.5), factor**0.5)
        return slow

    def _is_close(self, problem: Problem, good: _Enough | None) -> bool:
        """Whether no plan with executors as slow as was found costs much less than one that is enough."""
        if good is None:
            return False
        easier = self._easier(problem, self.slowdowns())
        least = max((one.plan.bound or 0.0 for one in easier), default=0.0)
        return least >= (1.0 - _FINE_GAP) * (good.plan.objective or 0.0)

    def _easier(self, problem: Problem, slow: Mapping[Executors, float]) -> list[_Planned]:
        """Return the plans so far of a problem with executors that were no slower."""
        return [one for one in self._planned if one.problem is problem and one.is_easier(slow)]

    def _known(self, problem: Problem, slow: Mapping[Executors, float]) -> KnownPlan | None:
        """Return the last plan, if no executor was slower, and what is proven of all plans like that."""
        easier = self._easier(problem, slow)
        if not easier or easier[-1].plan is not self.found:
            return None
        plan = easier[-1].plan
        used = frozenset(_used(one) for one in plan.instances)
        return KnownPlan(used, plan.objective or 0.0, max(e.plan.bound or 0.0 for e in easier))

    def _note_likely(self, plan: Plan) -> None:
        """Let the next plans be searched from what this one has: most of it is in them again."""
        self.likely |= {_used(one) for one in plan.instances}

    def _step(self, effort: Effort) -> PlanRequest:
        """The request for one plan on the way: half of the time left, and no rule instead of it."""
        seconds = self.until.share(0.5)
        return replace(self.request, effort=effort, deadline_s=seconds, rescue=False)

    def _say(self, text: str) -> None:
        self.request.say("promises", text)

    def _target(self, service: str) -> float:
        return self.problem.service(service).target

    def _try(self, plan: Plan, problem: Problem) -> dict[str, GraphShares]:
        """Return what requests keep on the arrivals of trials; where a service was tried so, what it kept.

        Services that share executors are simulated together, others by themselves.
        """
        found: dict[str, GraphShares] = {}
        for group in served_groups(plan, problem):
            names = tuple(service.name for service in group)
            key = _trial_key(plan, names)
            if key not in self._tried:
                samples = sample_graphs(
                    plan,
                    problem,
                    self.catalog,
                    first_seed=_TRIAL_SEED,
                    min_runs=_TRIAL_RUNS,
                    max_runs=_MAX_RUNS,
                    deadline=self.until,
                    services=names,
                )
                self._tried[key] = {name: mean_of(runs) for name, runs in samples.items()}
            found |= self._tried[key]
        return found

    def _short(self, kept: Mapping[str, GraphShares]) -> list[str]:
        """The services of which too few requests keep their promises, or too few of one class."""
        return [name for name, shares in kept.items() if shares.margin(self._target(name)) < 0.0]

    def _tighten(
        self, plan: Plan, kept: Mapping[str, GraphShares], short: list[str], power: int
    ) -> bool:
        """Slow the executors down that lose requests; False where none can be any further."""
        steps: dict[Executors, float] = {}
        for name in short:
            shares = kept[name]
            for klass, each, missing in _list_missed(shares, self._target(name)):
                step = next(factor for least, factor in _STEPS if missing >= least) ** power
                for key in self._blame(plan, name, klass, each, shares.busy):
                    steps[key] = max(step, steps.get(key, 1.0))
        moved = False
        for key, step in sorted(steps.items()):
            now = self.slow.get(key, self._start(key))
            if now < _MAX_SLOWDOWN:
                self.slow[key] = min(_MAX_SLOWDOWN, now * step)
                moved = True
        return moved

    def _blame(
        self,
        plan: Plan,
        service: str,
        klass: str | None,
        each: Mapping[str, float],
        busy: Mapping[str, float],
    ) -> set[Executors]:
        """Return the executors that lose requests of a service, or of one class: the busiest it goes to.

        `each` is by promise the share of requests that keep it.
        """
        worst = max((1.0 - share for share in each.values()), default=0.0)
        guilty = {promise for promise, share in each.items() if 1.0 - share >= 0.5 * worst}
        parts = set(guilty_parts(self.catalog, self.problem.service(service), guilty))
        passed = {
            name
            for path in plan.paths
            if path.service == service and klass in (None, path.klass)
            for step in path.steps
            if parts & set(step.parts)
            for name in step.instances
        }
        blamed = [i for i in plan.executor_instances if i.id in passed]
        max_busy = max((busy.get(i.id, 0.0) for i in blamed), default=0.0)
        return {_kind_of(i) for i in blamed if busy.get(i.id, 0.0) >= _BLAMED_SHARE * max_busy}

    def _start(self, key: Executors) -> float:
        """Return the slowdown that executors of a kind start with before they are simulated."""
        like = [factor for (s, p, _), factor in self.slow.items() if (s, p) == key[:2]]
        return float(min(like)) ** 0.5 if like else 1.0

    def _finish(self, plan: Plan, samples: Mapping[str, list[GraphShares]]) -> Plan:
        """The plan with what its requests keep on arrivals that it was not sized with."""
        promises = [
            promise_of(self.problem.service(name), runs) for name, runs in sorted(samples.items())
        ]
        if self.plain is not None:
            try:
                promises += look_at(
                    plain_plan(plan), self.plain, self.catalog, self.deadline, first_seed=FRESH_SEED
                )
            except SimulationCutShortError:
                # What some services keep is no proof of a plan for all.
                self.late, promises = True, []
        found = tuple(sorted(promises, key=lambda promise: promise.service))
        return plan.model_copy(update={"promises": found, **self._bounds(plan)})

    def _bounds(self, plan: Plan) -> dict[str, object]:
        """Return the bound by the capacity model.

        What executors carry alone, or in a plan that was tried, is no bound of what they carry in others. A
        plan in short supply has none to compare with.
        """
        if plan.status == "partial" or plan.objective is None:
            return {"bound": None, "gap": None}
        capacity = self.capacity.bound
        bound = None if capacity is None else min(capacity, plan.objective)
        gap = None
        if bound is not None:
            gap = 1.0 - bound / plan.objective if plan.objective > 0 else 0.0
        status = "optimal" if gap is not None and gap <= PROVEN_GAP else "feasible"
        return {"bound": bound, "gap": gap, "status": status, "capacity_bound": capacity}


def _list_missed(
    shares: GraphShares, target: float
) -> list[tuple[str | None, Mapping[str, float], float]]:
    """List the classes that fall short, what each keeps and by how much; where none does, those that may.

    None stands for all requests of the service.
    """
    short = [group for group in shares.groups if group.is_kept is False]
    if not short and shares.all >= target:
        short = [group for group in shares.groups if group.is_kept and group.low < group.target]
    if not short:
        return [(None, shares.each, max(0.0, target - shares.all))]
    return [(one.name, one.each, max(0.0, one.target - (one.kept or 0.0))) for one in short]


def _saves(plan: Plan, best: Plan) -> bool:
    """Whether a plan serves as much as another one and costs less."""
    served = [min(one.served_fraction.values(), default=0.0) for one in (plan, best)]
    cheaper = plan.usd_per_hour < best.usd_per_hour * (1.0 - _MIN_SAVING)
    return plan.status != "infeasible" and cheaper and served[0] >= served[1]


def _trial_key(plan: Plan, services: tuple[str, ...]) -> object:
    """What a simulation of services depends on: their executors where they stand, and their paths."""
    paths = [path for path in plan.paths if path.service in services]
    return (
        services,
        tuple(plan.served_fraction.get(name) for name in services),
        tuple(
            (i.id, i.placement_key, i.services)
            for i in plan.executor_instances
            if set(services) & set(i.services)
        ),
        tuple((path.service, path.klass, path.share) for path in paths),
        tuple((s.parts, *sorted(s.instances.items())) for path in paths for s in path.steps),
    )


def _slowness(slow: Mapping[Executors, float], key: Executors) -> float:
    """By how much executors are slowed down: what is said of the kind, else of any kind, else nothing."""
    return slow.get(key, slow.get((*key[:2], "*"), 1.0))


def _used(one: Instance) -> Used:
    parts = one.role_id.component if one.is_executor else one.role
    return name_services(one.services), parts, node_set(one)


def _rough(effort: Effort) -> Effort:
    """The effort of plans from which it is learnt what executors carry."""
    return replace(
        effort, gap=max(_ROUGH_GAP, effort.gap), work=max(0.01, _ROUGH_WORK * effort.work)
    )


def _kind_of(executor: Instance) -> Executors:
    return (
        name_services(executor.services),
        executor.role_id.component,
        executor.nodes[0].kind,
    )


def guilty_parts(catalog: Catalog, service: Service, promises: set[str]) -> list[str]:
    """Return the parts of a model that promises are about: those to give more room where they are broken."""
    model = catalog.model(service.model)
    parts = set()
    concerned = {Phase.GENERATE: {AHEAD, IMAGE}, Phase.ENCODE: {TTFT, IMAGE}}
    for part in model.graph.parts():
        phase = model.graph.phases(component_of(part))[0]
        about = concerned.get(phase, {TTFT, TPOT})
        if part.endswith(PREFILL):
            about = {TTFT}
        elif part.endswith(DECODE):
            about = {TPOT}
        if promises & about:
            parts.add(part)
    return sorted(parts)
