"""Simulate a plan, and plan with more headroom until its promises are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from atoll.core.errors import InfeasibleError, UsageError
from atoll.core.ids import Phase
from atoll.prove.deadline import SimulationCutShortError, keep_deadline
from atoll.solve.effort import DEADLINE_S

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.sim.result import ServiceSummary
    from atoll.solve.effort import Countdown

_REQUESTS = 20_000
"""Requests simulated per service that is asked least often, at most `_LONGEST_S` seconds of them."""
_SHORTEST_S = 600.0
_LONGEST_S = 3600.0
_MOST_REQUESTS = 400_000
"""Requests simulated in all, unless that is less than `_SHORTEST_S` seconds of them."""
_STEP = 1.1
"""Factor by which headroom grows where a promise is broken."""
_ROUNDS = 18
_PATIENCE = 3
"""Plans with more headroom and no gain after which no more is tried."""
_GAIN = 1e-3
PLANNING = 0.6
"""Share of a deadline for the first plan; the rest is for simulating it and planning again."""


class UnverifiedError(InfeasibleError):
    """No plan keeps its promises for the share of requests asked for; `plan` comes closest."""

    def __init__(self, message: str, *, hint: str, plan: Plan) -> None:
        super().__init__(message, hint=hint)
        self.plan = plan


def refuse_cluster(problem: Problem) -> None:
    """Refuse a fixed cluster: there are no more nodes to give it headroom with."""
    if problem.cluster is not None:
        raise UsageError("--verify is for rented fleets", hint="run `atoll simulate` on the plan")


def verify(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    solve: Callable[[Problem, float], Plan],
    attainment: float,
    *,
    deadline: Countdown | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> Plan:
    """Return a plan for `problem` that keeps both promises for a share of every service's requests.

    The headroom of services that fall short grows by a tenth at a time, and where that does not help their
    phases are taken apart; `solve` plans with it, in so many seconds at most. The bound stays the one proven
    for the problem as it was given: the gap says what keeping promises under queueing costs at most. Where
    nothing helps, `UnverifiedError` says what does and has the plan that comes closest. Where the deadline
    comes first the last plan is returned, `cut_short`, with a note of what was found. `say` is told of
    progress.
    """
    refuse_cluster(problem)
    if plan.status not in ("optimal", "feasible"):
        return plan
    loop = _Loop(plan, problem, catalog, attainment, deadline)
    for number in range(1, _ROUNDS + 1):
        say(f"round {number}: simulating")
        try:
            short = loop.simulate()
        except SimulationCutShortError:
            return loop.cut_short()
        if not short:
            return loop.stamp()
        if loop.is_hopeless and not loop.part_phases(short):
            break
        if deadline is not None and deadline.passed:
            return loop.cut_short()
        say(f"round {number}: more headroom for {', '.join(sorted(short))}")
        if not loop.plan_again(short, solve):
            if loop.was_late:
                return loop.cut_short()
            break
    raise UnverifiedError(
        _why(loop.closest_seen, attainment), hint=_hint(loop.closest_seen), plan=loop.closest
    )


class _Loop:
    """Where a verification stands: the last plan, and of those simulated the one that comes closest."""

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        catalog: Catalog,
        attainment: float,
        deadline: Countdown | None,
    ) -> None:
        self.first = self.found = plan
        self.problem = self.raised = problem
        self.catalog, self.attainment, self.deadline = catalog, attainment, deadline
        self.seen: Mapping[str, ServiceSummary] = {}
        self._closest: tuple[Plan, Problem] = (plan, problem)
        self.closest_seen: Mapping[str, ServiceSummary] = {}
        self._closest_share = -math.inf
        self._simulated: tuple[object, object] | None = None
        self._idle = 0
        self.was_late = False
        """Whether the last planning was cut short."""

    def simulate(self) -> set[str]:
        """Simulate the last plan, unless it is the one before, and return the services that fall short."""
        plan = (self.found.instances, self.found.routes)
        if plan != self._simulated:
            self.seen, self._simulated = {}, None
            self.seen = simulate_services(self.found, self.problem, self.catalog, self.deadline)
            self._simulated = plan
            self._note_closest()
        return {
            name for name, own in self.seen.items() if (own.attainment or 0.0) < self.attainment
        }

    def _note_closest(self) -> None:
        least = min((own.attainment or 0.0 for own in self.seen.values()), default=1.0)
        self._idle = 0 if least > self._closest_share + _GAIN else self._idle + 1
        if least > self._closest_share:
            self._closest, self._closest_share = (self.found, self.raised), least
            self.closest_seen = self.seen

    @property
    def is_hopeless(self) -> bool:
        """Whether further instances have not helped for some rounds."""
        return self._idle >= _PATIENCE

    def part_phases(self, short: set[str]) -> bool:
        """Have services that fall short run their phases apart, and return whether any did not before.

        Prompts hold up the tokens of others on an instance that does both, however many of them there are.
        """
        together = {i.service for i in self.found.instances if i.phase is Phase.BOTH}
        parted = {
            service.name
            for service in self.raised.services
            if service.phases == "auto" and service.name in short & together
        }
        if not parted:
            return False
        self.raised = self.raised.replace(
            services=tuple(
                service.model_copy(
                    update={
                        "phases": "apart",
                        "headroom": self.problem.service(service.name).headroom,
                    }
                )
                if service.name in parted
                else service
                for service in self.raised.services
            )
        )
        self._idle = 0
        # Headroom that did not help is taken back, and grows again from the next round on.
        return True

    def plan_again(self, short: set[str], solve: Callable[[Problem, float], Plan]) -> bool:
        """Plan with more headroom and return whether that can be had."""
        raised = _raise_headroom(self.raised, short)
        seconds = DEADLINE_S if self.deadline is None else self.deadline.share(0.5)
        found = solve(raised, seconds)
        self.was_late = found.cut_short
        if found.status not in ("optimal", "feasible"):
            return False
        self.raised, self.found = raised, found
        return True

    def stamp(self) -> Plan:
        """Return the last plan, which keeps its promises."""
        return _stamp(self.found, self.first, self.problem, _notes(self.raised, self.seen))

    @property
    def closest(self) -> Plan:
        """The plan that comes closest of those simulated."""
        plan, raised = self._closest
        return _stamp(plan, self.first, self.problem, _notes(raised, self.closest_seen))

    def cut_short(self) -> Plan:
        """Return the last plan as it is: of those there are it has the most headroom."""
        from atoll.solve.registry import CUT_SHORT

        said = _notes(self.raised, self.seen) or (
            "not simulated to its end: the deadline came first",
        )
        plan = _stamp(self.found, self.first, self.problem, said)
        reasons = tuple(dict.fromkeys((*plan.reasons, CUT_SHORT)))
        return plan.model_copy(update={"cut_short": True, "reasons": reasons})


def _why(seen: Mapping[str, ServiceSummary], attainment: float) -> str:
    worst = min(seen.values(), key=lambda own: own.attainment or 0.0)
    return (
        f"{worst.name} keeps ttft for {worst.attainment_ttft or 0.0:.1%} and tpot for "
        f"{worst.attainment_tpot or 0.0:.1%} of requests, {attainment:.1%} should have both; "
        "more headroom does not help or cannot be had"
    )


def _hint(seen: Mapping[str, ServiceSummary]) -> str:
    worst = min(seen.values(), key=lambda own: own.attainment or 0.0)
    late = (worst.attainment_ttft or 0.0) < (worst.attainment_tpot or 0.0)
    if late:
        return (
            "long prompts take longer than ttft by themselves: loosen ttft, state input_tail, or lower "
            "--attainment"
        )
    return "loosen tpot, make more nodes available, or lower --attainment"


def simulate_services(
    plan: Plan, problem: Problem, catalog: Catalog, deadline: Countdown | None = None
) -> dict[str, ServiceSummary]:
    """Return what a simulation finds of each service under its own demand."""
    from atoll.sim.api import simulate
    from atoll.sim.demand import demand_of
    from atoll.sim.options import SimOptions
    from atoll.workload.requests import collect

    rates = [service.rate_per_s for service in problem.services if service.rate_per_s > 0]
    if not rates:
        return {}
    seconds = min(_LONGEST_S, _REQUESTS / min(rates), _MOST_REQUESTS / sum(rates))
    seconds = max(_SHORTEST_S, seconds)
    requests = collect(demand_of(problem, seconds), problem.settings.seed)
    options = SimOptions(seed=problem.settings.seed, from_s=seconds / 20.0)
    result = simulate(plan, problem, catalog, requests, options, progress=keep_deadline(deadline))
    return {service.name: service for service in result.services}


def _raise_headroom(problem: Problem, short: set[str]) -> Problem:
    services = tuple(
        service.model_copy(update={"headroom": service.headroom * _STEP})
        if service.name in short
        else service
        for service in problem.services
    )
    return problem.replace(services=services)


def _notes(raised: Problem, seen: Mapping[str, ServiceSummary]) -> tuple[str, ...]:
    """Say of each service simulated how it fares, and with how much headroom."""
    return tuple(
        f"{service.name} keeps its promises for {seen[service.name].attainment or 0.0:.1%} of "
        f"requests, with headroom {service.headroom:.2f}"
        for service in raised.services
        if service.name in seen
    )


def _stamp(found: Plan, first: Plan, problem: Problem, notes: tuple[str, ...]) -> Plan:
    """Return the plan as one for the problem as it was given, checked, saying what was found."""
    from atoll.plan.validate.check import check
    from atoll.solve.assembly import relative_gap

    bound, objective = first.bound, found.objective
    plan = found.model_copy(
        update={
            "problem_hash": problem.content_hash(),
            "bound": bound,
            "gap": relative_gap(objective, bound),
            "status": first.status if found is first else "feasible",
            "notes": notes,
        }
    )
    check(plan, problem)
    return plan
