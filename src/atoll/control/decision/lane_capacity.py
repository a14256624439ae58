"""Capacity of instances and demand, in lanes that can be compared.

A lane is a role where a service's phases are fixed, in units of that role per second. Where phases are "auto"
a request may go either way, and the lane is the service, in requests/s: those that run both phases together,
and apart as many as the weaker of prefill and decode carries. So it is for a service whose phases were
changed while instances of the other way still serve (`find_mixed`), and for any-to-any models: there it
carries what the weakest of its components does, each counted for the share of requests that need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.catalog.models import ModelSpec
from atoll.core.ids import Phase, RoleId
from atoll.perf.components.class_loads import class_routes
from atoll.plan.plan import Instance
from atoll.plan.problem import COMPONENT, Problem, Service

Lanes = Mapping[str, float]
ROUNDING = 1e-6
"""Capacities that differ by less than this share are the same."""


def find_mixed(problem: Problem, instances: Iterable[Instance]) -> frozenset[str]:
    """Return services whose lane is the service: any-to-any, "auto", or with a role it asks for no more."""
    roles = {service.name: set(map(str, service.roles)) for service in problem.services}
    mixed = {
        service.name for service in problem.services if service.phases == "auto" or service.is_graph
    }
    for instance in instances:
        if instance.service in roles and instance.role not in roles[instance.service]:
            mixed.add(instance.service)
    return frozenset(mixed)


def demand_by_lane(problem: Problem, mixed: frozenset[str]) -> dict[str, float]:
    """Return what every lane must carry, headroom included."""
    demand: dict[str, float] = {}
    for service in problem.services:
        if service.name in mixed:
            demand[service.name] = service.demand_per_s
        else:
            demand |= {str(role): service.demand(role) for role in service.roles}
    return demand


class CarriedLoad:
    """Capacity of a changing set of instances, by lane."""

    def __init__(
        self, problem: Problem, mixed: frozenset[str], instances: Iterable[Instance] = ()
    ) -> None:
        self._services = {service.name: service for service in problem.services}
        self._roles = {
            service.name: [str(RoleId(service.name, COMPONENT, phase)) for phase in _PHASES]
            for service in problem.services
        }
        self._lanes = {
            service.name: [str(role) for role in service.roles] for service in problem.services
        }
        self._mixed = mixed
        self._needs = _find_needs(problem)
        self._by_role: dict[str, float] = {}
        self._by_part: dict[tuple[str, str], float] = {}
        for instance in instances:
            self.add(instance)

    def add(self, instance: Instance) -> None:
        """Count an instance."""
        self._count(instance, instance.throughput_per_s)

    def remove(self, instance: Instance) -> None:
        """Count an instance no more."""
        self._count(instance, -instance.throughput_per_s)

    def _count(self, instance: Instance, per_s: float) -> None:
        self._by_role[instance.role] = self._by_role.get(instance.role, 0.0) + per_s
        whole = instance.throughput_per_s
        for name in instance.services if whole > 0.0 else ():
            own = per_s * instance.carries(name) / whole
            for part in instance.executor_parts:
                self._by_part[name, part] = self._by_part.get((name, part), 0.0) + own

    def of_service(self, name: str) -> dict[str, float]:
        """Return the lanes of a service; none where nobody asks for it."""
        service = self._services.get(name)
        if service is None:
            return {}
        if name in self._mixed:
            return {name: self._requests(service)}
        return {role: self._by_role.get(role, 0.0) for role in self._lanes[name]}

    def of_instance(self, instance: Instance) -> dict[str, float]:
        """Return the lanes of the services whose requests an instance takes."""
        return {
            lane: carried
            for name in instance.services
            for lane, carried in self.of_service(name).items()
        }

    def lanes(self) -> dict[str, float]:
        """Return all lanes."""
        found: dict[str, float] = {}
        for name in self._services:
            found |= self.of_service(name)
        return found

    def without(self, instance: Instance) -> dict[str, float]:
        """Return the lanes of the instance's services if it were not there."""
        self.remove(instance)
        left = self.of_instance(instance)
        self.add(instance)
        return left

    def _requests(self, service: Service) -> float:
        if service.is_graph:
            return min(
                self._component(service.name, component) / share
                for component, share in self._needs[service.name].items()
            )
        prefill, decode, both = (self._by_role.get(role, 0.0) for role in self._roles[service.name])
        lengths = service.lengths
        return both + min(prefill / lengths.input_mean, decode / lengths.output_mean)

    def _component(self, service: str, component: str) -> float:
        """Return the requests/s that executors with a component carry, whole or in phases."""
        whole, prefill, decode = (
            self._by_part.get((service, part), 0.0)
            for part in (component, f"{component}.prefill", f"{component}.decode")
        )
        return whole + min(prefill, decode)


_PHASES = (Phase.PREFILL, Phase.DECODE, Phase.BOTH)


def _find_needs(problem: Problem) -> dict[str, dict[str, float]]:
    """Return, by any-to-any service, the share of its requests that need each component."""
    graphs = problem.graph_services
    if not graphs:
        return {}
    models = problem.catalog().models
    return {service.name: _share_needs(models[service.model], service) for service in graphs}


def _share_needs(model: ModelSpec, service: Service) -> dict[str, float]:
    needs: dict[str, float] = {}
    for klass in service.classes:
        # The first route has phases together: components by their own names.
        for component in class_routes(model, klass)[0]:
            needs[component] = needs.get(component, 0.0) + klass.share
    return {component: share for component, share in sorted(needs.items()) if share > 0.0}


def is_short(carried: float, asked: float) -> bool:
    """Return whether a lane carries less than is asked, by more than rounding."""
    return carried < asked * (1.0 - ROUNDING)


def find_short(carried: Lanes, asked: Lanes) -> tuple[str, ...]:
    """Return the lanes that carry less than is asked, in order."""
    return tuple(
        sorted(lane for lane, need in asked.items() if is_short(carried.get(lane, 0.0), need))
    )
