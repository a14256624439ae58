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
from typing import TYPE_CHECKING

from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.perf.components.class_loads import component_of
from atoll.plan.executors import DECODE, PREFILL
from atoll.plan.plan import PROVEN_GAP
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
)
from atoll.prove.kept import FRESH_SEED, look_at
from atoll.prove.rent_promises import keep_promises
from atoll.solve.deadline import Deadline
from atoll.solve.derating import NodeSet, node_set
from atoll.solve.registry import solve
from atoll.solve.resizing import derating_of

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem, Service
    from atoll.solve.effort import Effort
    from atoll.solve.plan_request import PlanRequest

Executors = tuple[str, str, str]
"""Executors that are alike: service, parts, kind of node."""

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
"""Plans that are proven with fresh arrivals, one after the other, until one keeps its promises."""
_FINE_GAP = 0.01
"""Proven gap of plans that may be taken: what is proven of the promised plan is not as close."""
_ROUGH_GAP = 0.05
"""The same of plans from which it is learnt what executors carry."""
_ROUGH_WORK = 0.2
"""Share of the effort that such a plan may take."""
_MIN_SAVING = 1e-3
"""A plan that is not cheaper by this share is none."""


def keep_graph_promises(problem: Problem, request: PlanRequest) -> Plan:
    """Return the cheapest plan found whose promises enough of every service's requests keep.

    Where a target cannot be met the plan comes as close as was found, and says what falls short.
    """
    for limit in ("survive", "spot_loss_per_h"):
        if getattr(problem.limits, limit):
            name = limit.removesuffix("_per_h")
            raise UsageError(
                "losses of machines are not simulated for any-to-any models yet",
                field=f"limits.{name}",
                hint="leave it out, or plan plain services in a fleet of their own",
            )
    return _GraphProver(problem, request).run()


class _GraphProver:
    def __init__(self, problem: Problem, request: PlanRequest) -> None:
        # Plain services of the fleet are sized alone first: those have solvers of their own.
        self.problem, self.request = problem, replace(request, solver=None)
        self.catalog, self.effort = request.catalog_for(problem), request.effort
        self.deadline = Deadline(request.deadline_s)
        self.graphs = [s for s in problem.graph_services if s.rate_per_s > 0.0]
        self.plain = plain_problem(problem)
        self.slow: dict[Executors, float] = {}
        self.known: set[Executors] = set()
        self.likely: set[tuple[str, str, NodeSet]] = set()

    def run(self) -> Plan:
        # Small questions first: what is learnt from them makes the whole plan need fewer rounds.
        if self.plain is not None:
            self._size_plain(self.plain)
        if len(self.problem.services) > 1:
            for service in self.graphs:
                self._size_alone(service)
        attempt = 0
        while True:
            plan, tried = self._search(self.problem, rough=False)
            if plan.status == "infeasible":
                return plan
            fresh = self._look(plan, attempt)
            kept = {name: mean_of(runs) for name, runs in fresh.items()}
            short = self._short(kept)
            attempt += 1
            # What was missed in trials, too, has been searched as far as it goes.
            over = attempt == _FRESH_TRIES or self.deadline.passed or self._short(tried)
            if not short or over or not self._tighten(plan, kept, short, 1):
                return self._finish(plan, fresh)
            self._say("too few requests keep their promises on other arrivals")

    def _look(self, plan: Plan, attempt: int) -> dict[str, list[GraphShares]]:
        """Return what requests keep on arrivals that no plan was sized with, other ones for every plan."""
        return sample_graphs(
            plan,
            self.problem,
            self.catalog,
            first_seed=FRESH_SEED + attempt * _MAX_FRESH,
            min_runs=_FRESH_RUNS,
            max_runs=_MAX_FRESH,
        )

    def _size_plain(self, plain: Problem) -> None:
        """Size the plain services alone; what their templates carry there they carry in the whole plan."""
        self._say("plain services alone")
        alone = keep_promises(plain, self._step(self.effort))
        if alone.promises:
            derating = derating_of(alone, plain, self.catalog)
            self.effort = replace(self.effort, derating=derating)
        self._note_likely(alone)

    def _size_alone(self, service: Service) -> None:
        """Find what executors of one service carry in a plan of its own: that is a smaller question."""
        self._say(f"{service.name} alone")
        running = tuple(i for i in self.problem.running if i.service == service.name)
        self._search(self.problem.replace(services=(service,), running=running), rough=True)

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
            load = load_alone(plan, problem, self.catalog, instance)
            if load < 1.0:
                self.slow[key] = max(self.slow.get(key, 1.0), 1.0 / load)
        return self.slow != before

    def _search(self, problem: Problem, *, rough: bool) -> tuple[Plan, dict[str, GraphShares]]:
        """Return the cheapest plan found that keeps its promises, or the one that comes closest.

        Plans are rough ones at first, and where `rough` to the end: enough to learn what executors carry.
        """
        closest: tuple[float, Plan, dict[str, GraphShares]] | None = None
        lacking: dict[Executors, float] = {}
        fine, eager = False, 0
        before: Counter[Executors] = Counter()
        found: Plan | None = None
        for number in range(_MAX_ROUNDS):
            plan = self._plan(problem, fine=fine)
            if plan.status == "infeasible" or not self.graphs:
                # More room than there is was asked for: what was found before is as close as it gets.
                if closest is None and found is not None:
                    return found, self._try(found, problem)
                return (plan, {}) if closest is None else closest[1:]
            found = plan
            late = self.deadline.passed
            # What was just learnt changes the plan: it is planned again before the whole is simulated.
            if self._learn(plan, problem) and number < _MAX_ROUNDS - 1 and not late:
                self._say(f"round {number + 1}: ${plan.usd_per_hour:.2f}/h, executors alone")
                continue
            kept = self._try(plan, problem)
            short = self._short(kept)
            worst = min((k.all - self._target(name) for name, k in kept.items()), default=0.0)
            self._say(
                f"trial {number + 1}: ${plan.usd_per_hour:.2f}/h, {worst:+.1%} over the target"
            )
            # A fine plan wins over a rough one that is as close.
            if closest is None or (worst, fine) > (closest[0], False):
                closest = (worst, plan, kept)
            if not short and (rough or fine or late):
                if rough or late:
                    return plan, kept
                return self._loosen(problem, (plan, kept), dict(self.slow), lacking)
            if not short:
                # Rough plans keep the promises: what is learnt holds, so the last plan is worth more effort.
                fine = True
                continue
            lacking = dict(self.slow)
            now = Counter(_kind_of(i) for i in plan.executor_instances)
            # Where more room for the same executors changes nothing, more of it will.
            eager = eager + 1 if now == before else 0
            before = now
            if not self._tighten(plan, kept, short, 1 << eager) or late:
                break
        assert closest is not None
        return closest[1], closest[2]

    def _loosen(
        self,
        problem: Problem,
        best: tuple[Plan, dict[str, GraphShares]],
        enough: Mapping[Executors, float],
        lacking: Mapping[Executors, float],
    ) -> tuple[Plan, dict[str, GraphShares]]:
        """Try less than what was enough, half way to what was not, while that makes the plan cheaper."""
        low, high = dict(lacking), dict(enough)
        for _ in range(_MAX_PROBES):
            if low == high or not high or self.deadline.passed:
                break
            self.slow = {key: 0.5 * (high[key] + low.get(key, 1.0)) for key in high}
            plan = self._plan(problem, fine=False)
            if not _saves(plan, best[0]):
                low = dict(self.slow)
                continue
            kept = self._try(plan, problem)
            if self._short(kept):
                low = dict(self.slow)
            else:
                best, high = (plan, kept), dict(self.slow)
                self._say(f"${plan.usd_per_hour:.2f}/h will do")
        self.slow = dict(high)
        return best

    def _plan(self, problem: Problem, *, fine: bool = True, guess: bool = True) -> Plan:
        """Plan with executors as slow as was found; others of the same parts by a guess, or in full.

        Plans that are not `fine` are looked for among what is likely, unless a bound is asked for.
        """
        slow = dict(self.slow)
        for (service, parts, _), factor in self.slow.items() if guess else ():
            key = (service, parts, "*")
            # The least slowdown seen: kinds that no plan has used are not to be put off more than needed.
            slow[key] = min(slow.get(key, factor**0.5), factor**0.5)
        effort = replace(self.effort, slowdown=slow, likely=frozenset(self.likely))
        if fine:
            effort = replace(effort, gap=max(_FINE_GAP, effort.gap))
        else:
            effort = replace(_rough(effort), unproven=guess)
        plan = solve(problem, self._step(effort))
        self._note_likely(plan)
        return plan

    def _note_likely(self, plan: Plan) -> None:
        """Let the next plans be searched from what this one has: most of it is in them again."""
        for one in plan.instances:
            label = one.role_id.component if one.is_executor else one.role
            self.likely.add((one.service, label, node_set(one)))

    def _step(self, effort: Effort) -> PlanRequest:
        """The request for one plan on the way: half of the time left."""
        return replace(self.request, effort=effort, deadline_s=self.deadline.share(0.5))

    def _say(self, text: str) -> None:
        self.request.say("promises", text)

    def _target(self, service: str) -> float:
        return self.problem.service(service).attainment

    def _try(self, plan: Plan, problem: Problem) -> dict[str, GraphShares]:
        """Return what requests keep on the arrivals of trials."""
        samples = sample_graphs(
            plan,
            problem,
            self.catalog,
            first_seed=_TRIAL_SEED,
            min_runs=_TRIAL_RUNS,
            max_runs=_MAX_RUNS,
        )
        return {name: mean_of(runs) for name, runs in samples.items()}

    def _short(self, kept: Mapping[str, GraphShares]) -> list[str]:
        return [name for name, shares in kept.items() if shares.all < self._target(name)]

    def _tighten(
        self, plan: Plan, kept: Mapping[str, GraphShares], short: list[str], power: int
    ) -> bool:
        """Slow the executors down that lose requests; False where none can be any further."""
        moved = False
        for name in short:
            shares = kept[name]
            lost = {promise: 1.0 - share for promise, share in shares.each.items()}
            worst = max(lost.values(), default=0.0)
            guilty = {promise for promise, share in lost.items() if share >= 0.5 * worst}
            parts = set(guilty_parts(self.catalog, self.problem.service(name), guilty))
            blamed = [
                i for i in plan.executor_instances if i.service == name and parts & set(i.parts)
            ]
            max_busy = max((shares.busy.get(i.id, 0.0) for i in blamed), default=0.0)
            missing = self._target(name) - shares.all
            step = next(factor for min_missing, factor in _STEPS if missing >= min_missing) ** power
            keys = {
                _kind_of(i)
                for i in blamed
                if shares.busy.get(i.id, 0.0) >= _BLAMED_SHARE * max_busy
            }
            for key in sorted(keys):
                now = self.slow.get(key, self._start(key))
                if now < _MAX_SLOWDOWN:
                    self.slow[key] = min(_MAX_SLOWDOWN, now * step)
                    moved = True
        return moved

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
            promises += look_at(
                plain_plan(plan), self.plain, self.catalog, self.deadline, first_seed=FRESH_SEED
            )
        found = tuple(sorted(promises, key=lambda promise: promise.service))
        return plan.model_copy(update={"promises": found, **self._bounds(plan)})

    def _bounds(self, plan: Plan) -> dict[str, object]:
        """Return the proven bounds: for executors as simulated, others in full; and for capacity.

        A rough search proves a bound, too, and a plan in short supply has none to compare with.
        """
        if plan.status == "partial" or plan.objective is None:
            return {"bound": None, "gap": None}
        # Without guesses executors that no plan used count in full, which makes it a bound.
        known = self._plan(self.problem, fine=False, guess=False).bound
        capacity = solve(
            self.problem, self._step(replace(_rough(self.effort), derating=None))
        ).bound
        bound = None if known is None else min(known, plan.objective)
        gap = None
        if bound is not None:
            gap = 1.0 - bound / plan.objective if plan.objective > 0 else 0.0
        status = "optimal" if gap is not None and gap <= PROVEN_GAP else "feasible"
        return {"bound": bound, "gap": gap, "status": status, "capacity_bound": capacity}


def _saves(plan: Plan, best: Plan) -> bool:
    """Whether a plan serves as much as another one and costs less."""
    served = [min(one.served_fraction.values(), default=0.0) for one in (plan, best)]
    cheaper = plan.usd_per_hour < best.usd_per_hour * (1.0 - _MIN_SAVING)
    return plan.status != "infeasible" and cheaper and served[0] >= served[1]


def _rough(effort: Effort) -> Effort:
    """The effort of plans from which it is learnt what executors carry."""
    return replace(
        effort, gap=max(_ROUGH_GAP, effort.gap), work=max(0.01, _ROUGH_WORK * effort.work)
    )


def _kind_of(executor: Instance) -> Executors:
    return (executor.service, executor.role_id.component, executor.nodes[0].kind)


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
