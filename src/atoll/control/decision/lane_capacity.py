"""Capacity of instances and demand, in lanes that can be compared.

A lane is a role where a service's phases are fixed, in units of that role per second. Where phases are "auto"
a request may go either way, and the lane is the service, in requests/s: those that run both phases together,
and apart as many as the weaker of prefill and decode carries. So it is for a service whose phases were
changed while instances of the other way still serve (`find_mixed`), and for any-to-any models: there it
carries what its executors do with the mix of classes that is asked for (`executor_capacity`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from atoll.catalog.models import ModelSpec
from atoll.control.decision.executor_capacity import (
    ClassNeed,
    ExecutorKind,
    kind_of,
    max_requests,
)
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
        self._executors: dict[str, Counter[ExecutorKind]] = {}
        for instance in instances:
            self.add(instance)

    def add(self, instance: Instance) -> None:
        """Count an instance."""
        self._count(instance, 1)

    def remove(self, instance: Instance) -> None:
        """Count an instance no more."""
        self._count(instance, -1)

    def _count(self, instance: Instance, times: int) -> None:
        if instance.is_executor:
            for name in instance.services:
                if instance.part_of(name) > 0.0:
                    own = self._executors.setdefault(name, Counter())
                    own[kind_of(instance, name)] += times
            return
        per_s = times * instance.throughput_per_s
        self._by_role[instance.role] = self._by_role.get(instance.role, 0.0) + per_s

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
            return max_requests(self._needs[service.name], self._executors.get(service.name, {}))
        prefill, decode, both = (self._by_role.get(role, 0.0) for role in self._roles[service.name])
        lengths = service.lengths
        return both + min(prefill / lengths.input_mean, decode / lengths.output_mean)


_PHASES = (Phase.PREFILL, Phase.DECODE, Phase.BOTH)


def _find_needs(problem: Problem) -> dict[str, tuple[ClassNeed, ...]]:
    """Return, by any-to-any service, its classes with the components that they need."""
    graphs = problem.graph_services
    if not graphs:
        return {}
    models = problem.catalog().models
    return {service.name: list_needs(models[service.model], service) for service in graphs}


def list_needs(model: ModelSpec, service: Service) -> tuple[ClassNeed, ...]:
    """Return the classes of an any-to-any service with the components that they need."""
    # The first route has phases together: components by their own names.
    return tuple(
        ClassNeed(klass.name, klass.share, class_routes(model, klass)[0])
        for klass in service.classes
    )


def is_short(carried: float, asked: float) -> bool:
    """Return whether a lane carries less than is asked, by more than rounding."""
    return carried < asked * (1.0 - ROUNDING)


def find_short(carried: Lanes, asked: Lanes) -> tuple[str, ...]:
    """Return the lanes that carry less than is asked, in order."""
    return tuple(
        sorted(lane for lane, need in asked.items() if is_short(carried.get(lane, 0.0), need))
    )
