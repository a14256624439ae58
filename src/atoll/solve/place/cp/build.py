"""From numbers of replicas to a plan: slices are cut for them, and each becomes an instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import Goal, Instance, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import goal_value
from atoll.solve.assembly import assemble
from atoll.solve.place.cp.shapes import ReplicaShape, replica_of
from atoll.solve.place.instance import Unit
from atoll.solve.place.slices import SiteType, cut_for

Replicas = tuple[tuple[ReplicaShape, int], ...]
"""How many replicas a service has of each shape."""


def describe_replicas(replicas: Replicas) -> str:
    """Return replicas in words, as in "3 x GH200:2 + 1 x A100-80:4"."""
    return " + ".join(shape.describe(count) for shape, count in replicas) or "none"


def gpus_by_type(replicas: Replicas) -> dict[str, int]:
    """Return how many GPUs replicas have of each type, as table 1 counts them."""
    gpus: Counter[str] = Counter()
    for shape, count in replicas:
        gpus[shape.kind.rsplit(":", 1)[0]] += shape.gpus * count
    return dict(sorted(gpus.items()))


def set_up(
    problem: Problem, catalog: Catalog, chosen: Mapping[str, Replicas]
) -> tuple[Instance, ...]:
    """Return the replicas of services as instances on slices of the cluster's machines."""
    wanted: dict[SiteType, Counter[int]] = {}
    for replicas in chosen.values():
        for shape, count in replicas:
            wanted.setdefault(shape.site, Counter())[shape.tp] += shape.stages * count
    free: dict[tuple[SiteType, int], list[Unit]] = {}
    for unit in cut_for(problem, wanted):
        free.setdefault(((unit.region, unit.machine), unit.gpus), []).append(unit)
    instances = []
    for service in problem.services:
        number = 0
        for shape, count in chosen.get(service.name, ()):
            left = free[shape.site, shape.tp]
            for _ in range(count):
                units = [left.pop(0) for _ in range(shape.stages)]
                instances.append(replica_of(problem, catalog, service, shape, units, number))
                number += 1
    return tuple(instances)


def plan_of_replicas(
    problem: Problem,
    catalog: Catalog,
    chosen: Mapping[str, Replicas],
    *,
    solver: str,
    goal: Goal = "latency",
    reasons: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Plan:
    """Return the plan of services' replicas; its objective is the tokens/s that they carry."""
    instances = set_up(problem, catalog, chosen)

    def build(value: float) -> Plan:
        return assemble(
            problem,
            instances,
            status="feasible",
            solver=solver,
            reasons=reasons,
            goal=goal,
            value=value,
        )

    plan = build(goal_value(build(0.0), problem))
    return plan.model_copy(update={"notes": tuple(notes)})
