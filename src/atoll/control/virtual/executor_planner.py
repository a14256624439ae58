"""Planning any-to-any services again and again, quickly, over executors whose times are known.

Sets of parts and kinds of nodes are those that plans for the fleet's own mixes had, with the room that
simulation found them to need. What requests take of them is found once, at the fleet file's shares of
classes; what is asked of each class is what a problem says. Services are planned one after the other, each
with the machines that those before it left, which is the cheapest as long as there are enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.control.virtual.template_planner import TemplatePlanner
from atoll.plan.plan import Instance, OfferKey, Plan, count_machines
from atoll.solve.effort import Effort

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.catalog.catalog import Catalog
    from atoll.plan.problem import Problem, Service
    from atoll.prove.sized_templates import SizedTemplate
    from atoll.solve.graph.executor_options import Option
    from atoll.solve.graph.graph_build import BuiltProgram

_GAP = 0.01
"""Proven gap of a plan; what is between is less than what a start costs."""
_WORK = 0.1
"""Share of the usual effort that a plan gets."""
_DEADLINE_S = 600.0
_MAX_KEPT = 4096
"""Plans that are remembered."""


@dataclass(frozen=True)
class KnownExecutors:
    """Executors of an any-to-any service: sets of parts, kinds of nodes, and by what each is slowed down.

    Classes have the shares in `service` that times were found at.
    """

    service: Service
    options: tuple[Option, ...]
    kinds: frozenset[str]
    slowdown: Mapping[tuple[str, str, str], float]

    def slower(self, factor: float) -> KnownExecutors:
        """Return the same, all so many times as slow, but none faster than the model says."""
        slow = {
            (self.service.name, "+".join(option), kind): max(1.0, factor * self._slow(option, kind))
            for option in self.options
            for kind in self.kinds
        }
        return replace(self, slowdown=slow)

    def _slow(self, option: Option, kind: str) -> float:
        effort = Effort(slowdown=self.slowdown)
        return effort.slowdown_of(self.service.name, "+".join(option), kind)


class ExecutorPlanner:
    """Plans of one any-to-any service with known executors. Equal problems have equal plans."""

    def __init__(self, catalog: Catalog, known: KnownExecutors) -> None:
        self.catalog, self.known = catalog, known
        self._effort = Effort(slowdown=known.slowdown, gap=_GAP, work=_WORK)
        self._plans: dict[object, Plan] = {}

    def __call__(self, asked: Problem) -> Plan:
        """Return the plan of a problem with this service alone."""
        (service,) = asked.services
        running = sorted(asked.running, key=lambda one: one.id)
        key = (
            service.rate_per_s,
            tuple(klass.share for klass in service.classes),
            tuple((one.key, one.available, one.usd_per_hour) for one in asked.offers),
            tuple((one.id, one.placement_key) for one in running),
            asked.settings.init_penalty,
        )
        if key not in self._plans:
            if len(self._plans) > _MAX_KEPT:
                self._plans.clear()
            self._plans[key] = self._plan(asked, service)
        return self._plans[key]

    def _plan(self, asked: Problem, service: Service) -> Plan:
        from atoll.solve.graph.executor_program import solve_program
        from atoll.solve.graph.graph_to_plan import plan_of

        # Times are those of the shares that they were found at: what is asked changes, not they.
        alike = service.model_copy(update={"classes": self.known.service.classes})
        base = asked.model_copy(update={"services": (alike,)})
        built = self._build(base)
        rates = {klass.name: service.class_rate_per_s(klass) for klass in service.classes}
        program = replace(
            built.program,
            classes=tuple(
                replace(one, rate_per_s=rates[one.name]) for one in built.program.classes
            ),
        )
        built = replace(built, program=program)
        answer = solve_program(program, gap=_GAP, work=_WORK, deadline_s=_DEADLINE_S)
        return plan_of(base, self.catalog, built, answer, None, self._effort, solver="executors")

    def _build(self, base: Problem) -> BuiltProgram:
        from atoll.solve.graph.graph_build import build_program

        known = self.known
        return build_program(
            base,
            self.catalog,
            self._effort,
            None,
            choose=lambda _service, _routes: known.options,
            usable=known.kinds.__contains__,
        )


class FleetPlanner:
    """A planner for `decide`: plain services by templates, any-to-any ones by executors, side by side."""

    def __init__(
        self,
        catalog: Catalog,
        plain: TemplatePlanner | None,
        known: Mapping[str, KnownExecutors],
    ) -> None:
        self.catalog, self.plain = catalog, plain
        self.known = dict(known)
        self._executors = {name: ExecutorPlanner(catalog, one) for name, one in known.items()}

    @property
    def templates(self) -> Sequence[SizedTemplate]:
        """The templates of plain services."""
        return () if self.plain is None else self.plain.templates

    def renewed(self) -> FleetPlanner:
        """Return one that has planned nothing yet."""
        plain = None if self.plain is None else self.plain.renewed()
        return FleetPlanner(self.catalog, plain, self.known)

    def __call__(self, asked: Problem) -> Plan:
        """Return the plan of a problem."""
        if not asked.graph_services and self.plain is not None:
            return self.plain(asked)
        plans: list[Plan] = []
        left = {offer.key: offer.available for offer in asked.offers}
        # Executors first: plain services have more machines to choose from.
        for service in asked.graph_services:
            plans.append(self._executors[service.name](_part(asked, (service,), left)))
            _take(left, plans[-1].instances)
        if asked.plain_services and self.plain is not None:
            plans.append(self.plain(_part(asked, asked.plain_services, left)))
        return _join(asked, plans)


def _part(asked: Problem, services: tuple[Service, ...], left: Mapping[OfferKey, int]) -> Problem:
    """Return the problem of some services, with the machines that others leave."""
    names = {service.name for service in services}
    offers = tuple(
        offer.model_copy(update={"available": left[offer.key]}) for offer in asked.offers
    )
    running = tuple(one for one in asked.running if one.service in names)
    return asked.model_copy(update={"services": services, "offers": offers, "running": running})


def _take(left: dict[OfferKey, int], instances: Iterable[Instance]) -> None:
    for key, number in count_machines(instances).items():
        left[key] = max(0, left[key] - number)


def _join(asked: Problem, plans: Sequence[Plan]) -> Plan:
    """Return plans of services side by side as one; infeasible where one of them is."""
    missing = [plan for plan in plans if not plan.instances]
    if missing:
        return missing[0]
    served: dict[str, float] = {}
    for plan in plans:
        served |= plan.served_fraction
    objectives = [plan.objective or plan.usd_per_hour for plan in plans]
    partial = any(plan.status == "partial" for plan in plans)
    return Plan(
        problem_hash="",
        problem_name=asked.name,
        instances=tuple(one for plan in plans for one in plan.instances),
        routes=tuple(route for plan in plans for route in plan.routes),
        paths=tuple(path for plan in plans for path in plan.paths),
        served_fraction=served,
        usd_per_hour=sum(plan.usd_per_hour for plan in plans),
        init_usd=sum(plan.init_usd for plan in plans),
        objective=sum(objectives),
        status="partial" if partial else "feasible",
        solver="cover and executors",
    )
