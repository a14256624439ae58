"""A plan as it can stand here: layer ranges of the model that is served, endpoints, weights.

A plan for a large model can be tried with a small one: every range keeps its share of the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.plan.plan import Instance, Plan

LLM = "llm"


@dataclass(frozen=True, slots=True)
class PlannedEndpoint:
    """An endpoint to be: the instances behind it, each with its share of their phase, and its weight."""

    name: str
    service: str
    instances: tuple[tuple[Instance, float], ...]
    weight: float

    @property
    def nodes(self) -> int:
        """How many node processes it takes."""
        return sum(len(instance.nodes) for instance, _ in self.instances)


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


def standings(plan: Plan, layers: Mapping[str, int]) -> tuple[PlannedEndpoint, ...]:
    """Return the endpoints of the services in `layers`, which has the layers of each one's model."""
    endpoints: list[PlannedEndpoint] = []
    for service, count in layers.items():
        instances = [scale_layers(i, count) for i in plan.instances if i.service == service]
        if not instances:
            raise InputError(
                f"the plan has no instance of {service!r}",
                field="instances",
                hint="serve another plan, or plan again with more nodes",
            )
        for instance in instances:
            if instance.role_id.component != LLM:
                raise InputError(
                    f"{instance.id} is no language model", hint="serve the others with --only"
                )
        endpoints += _of_service(plan, service, instances)
    return tuple(endpoints)


def _of_service(plan: Plan, service: str, instances: Sequence[Instance]) -> list[PlannedEndpoint]:
    shares = {
        (route.phase, name): share
        for route in plan.routes
        if route.service == service
        for name, share in route.weights.items()
    }

    def share(instance: Instance) -> float:
        return shares.get((instance.phase, instance.id), instance.throughput_per_s)

    whole = [i for i in instances if i.phase is Phase.BOTH]
    apart = [i for i in instances if i.phase in (Phase.PREFILL, Phase.DECODE)]
    endpoints = [PlannedEndpoint(i.id, service, ((i, 1.0),), share(i)) for i in whole]
    if apart:
        missing = {Phase.PREFILL, Phase.DECODE} - {i.phase for i in apart}
        if missing:
            raise InputError(
                f"{service} has no instance for {', '.join(sorted(missing))}",
                field="instances",
                hint="plan again: every phase of a service needs an instance",
            )
        # Prompts and answers of a request may meet any pair of instances: one endpoint for all.
        endpoints.append(
            PlannedEndpoint(service, service, tuple((i, share(i)) for i in apart), 1.0)
        )
    return endpoints
