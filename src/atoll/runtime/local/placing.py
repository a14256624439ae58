"""A plan as it can stand here: layer ranges of the model that is served, endpoints, weights.

A small model can stand in for a large one that was planned: every range keeps its share of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.core.errors import InputError
from atoll.plan.plan import Instance, Plan, Route

LLM = "llm"


@dataclass(frozen=True, slots=True)
class PlannedEndpoint:
    """An endpoint to be: the instances behind it, its weight, and, phases apart, the routes over them."""

    name: str
    service: str
    instances: tuple[Instance, ...]
    weight: float
    routes: tuple[Route, ...] = ()

    @property
    def nodes(self) -> int:
        """How many node processes it takes."""
        return sum(len(instance.nodes) for instance in self.instances)


def scale_layers(instance: Instance, layers: int) -> Instance:
    """Return the instance with its ranges stretched to a model of so many layers.

    Boundaries keep their order, and no range becomes empty.
    """
    last = max(node.end for node in instance.nodes)
    if last == layers:
        return instance
    marks = sorted({0, *(m for node in instance.nodes for m in (node.start, node.end))})
    if len(marks) - 1 > layers:
        raise InputError(
            f"{instance.id} cuts its model into {len(marks) - 1} pieces,"
            f" and the one served here has {layers} layers",
            field="model",
            hint="serve a model with more layers",
        )
    new = [round(mark * layers / last) for mark in marks]
    for i in range(1, len(new)):
        new[i] = max(new[i], new[i - 1] + 1)
    new[-1] = layers
    for i in range(len(new) - 2, 0, -1):
        new[i] = min(new[i], new[i + 1] - 1)
    moved = dict(zip(marks, new, strict=True))
    nodes = tuple(
        node.model_copy(update={"start": moved[node.start], "end": moved[node.end]})
        for node in instance.nodes
    )
    return instance.model_copy(update={"nodes": nodes})


def plan_endpoints(plan: Plan, layers: Mapping[str, int | None]) -> tuple[PlannedEndpoint, ...]:
    """Return the endpoints of the services in `layers`, which has the layers of each one's model.

    None: they are those of the plan.
    """
    endpoints: list[PlannedEndpoint] = []
    for service, count in layers.items():
        instances = [
            i if count is None else scale_layers(i, count)
            for i in plan.instances
            if i.service == service
        ]
        if not instances:
            raise InputError(
                f"the plan has no instance of {service!r}",
                field="instances",
                hint="serve another plan, or plan again with more nodes",
            )
        for instance in instances:
            if instance.role_id.component != LLM:
                raise InputError(
                    f"{instance.id} is no language model", hint="serve the others with `only`"
                )
        endpoints += _of_service(plan, service, instances)
    return tuple(endpoints)


def _of_service(plan: Plan, service: str, instances: Sequence[Instance]) -> list[PlannedEndpoint]:
    """Return an endpoint for each instance that runs both phases, and one for all pairs together.

    What no route leads over gets no requests, and does not stand here.
    """
    routes = [route for route in plan.routes if route.service == service and route.share > 0]
    if not routes:
        raise InputError(
            f"the plan has no route for {service!r}", field="routes", hint="plan again"
        )
    by_id = {instance.id: instance for instance in instances}
    for name in sorted({name for route in routes for name in route.instances} - by_id.keys()):
        raise InputError(
            f"a route of {service!r} leads over {name}, which is no instance of it",
            field="routes",
            hint="plan again",
        )
    whole = [route for route in routes if len(route.instances) == 1]
    pairs = tuple(route for route in routes if len(route.instances) == 2)
    endpoints = [
        PlannedEndpoint(route.instances[0], service, (by_id[route.instances[0]],), route.share)
        for route in whole
    ]
    if pairs:
        # A prefill instance may go with several decode instances, and the other way round.
        used = {name for route in pairs for name in route.instances}
        members = tuple(instance for instance in instances if instance.id in used)
        share = sum(route.share for route in pairs)
        endpoints.append(PlannedEndpoint(service, service, members, share, pairs))
    return endpoints
