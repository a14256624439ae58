"""Executors and the services over them, as they will stand on this machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.core.errors import UsageError
from atoll.plan.plan import Instance, Plan, RequestPath
from atoll.runtime.graph_server.graph_config import GraphService
from atoll.runtime.task_fleet.parts import ServedParts

_PREFILL = ".prefill"
_DECODE = ".decode"


@dataclass(frozen=True, slots=True)
class PlacedExecutor:
    """An executor: its components with their options, its device, and how much work it has beside others.

    `parts` and `node_type` are the plan's, for people; empty where there is none.
    """

    id: str
    components: Mapping[str, Mapping[str, Any]]
    device: str = "cpu"
    work: float = 1.0
    threads: int | None = None
    parts: tuple[str, ...] = ()
    node_type: str = ""


@dataclass(frozen=True, slots=True)
class TaskDeployment:
    """All executors and services that one graph server stands before."""

    services: tuple[GraphService, ...]
    executors: tuple[PlacedExecutor, ...]
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """By service, what serves instead of what."""
    notes: tuple[str, ...] = ()
    """Differences from the plan, in words."""


def deployment_of(
    plan: Plan, services: Sequence[str], parts: Mapping[str, ServedParts]
) -> TaskDeployment:
    """Return the executors of a plan's any-to-any services, and the ways requests take over them.

    Executors serve an llm's phases together: where a plan has them apart, all of it is done where it decodes.
    """
    executors = [
        _executor(instance, parts)
        for instance in plan.executor_instances
        if not set(services).isdisjoint(instance.services)
    ]
    # A stand-in may have nothing for a part (a talker's codes): who would run only that is not started.
    executors = [executor for executor in executors if executor.components]
    if not executors:
        raise UsageError(f"no executor of {', '.join(services)} runs anything here", field="parts")
    # Those that are not started are on no path, though they may be planned.
    started = {executor.id for executor in executors}
    served = {name: parts[name] for name in services}
    graph_services = services_over(served, plan.paths, started)
    stand_ins = {name: text for name in services if (text := parts[name].stand_in)}
    apart = {
        name
        for instance in plan.executor_instances
        if any(part.endswith(_DECODE) for part in instance.parts)
        for name in instance.services
        if name in services
    }
    notes = tuple(
        f"{name}: planned to prefill apart; served with the llm whole where the plan decodes"
        for name in sorted(apart)
    )
    return TaskDeployment(graph_services, tuple(executors), stand_ins, notes)


def components_of(
    instance: Instance, parts: Mapping[str, ServedParts]
) -> dict[str, dict[str, Any]]:
    """Return the components of an executor, with their options: none where its parts are nothing here.

    `parts` are by service. Services that share an executor must name the same for its parts.
    """
    found: dict[str, dict[str, Any]] | None = None
    for service in instance.services:
        served = parts.get(service)
        if served is None:
            continue
        names = [name for part in _together(instance.parts) for name in served.parts.get(part, ())]
        own = {name: dict(served.settings.get(name, {})) for name in dict.fromkeys(names)}
        if found is not None and own != found:
            raise UsageError(
                f"{instance.whose} share {'+'.join(instance.parts)}, and name other components for it",
                field="parts",
                hint="name the same ones with the same options, or give one of them share: false",
            )
        found = own
    return found or {}


def services_over(
    parts: Mapping[str, ServedParts],
    paths: Sequence[RequestPath] = (),
    there: Collection[str] | None = None,
) -> tuple[GraphService, ...]:
    """Return any-to-any services with the ways of their requests over executors, those that are `there`."""
    return tuple(
        GraphService(
            name=name,
            tasks=served.tasks,
            options=served.options,
            parts=served.parts,
            paths=_live_paths([path for path in paths if path.service == name], there),
            stand_in=served.stand_in,
        )
        for name, served in parts.items()
    )


def _executor(instance: Instance, parts: Mapping[str, ServedParts]) -> PlacedExecutor:
    (node,) = instance.nodes
    return PlacedExecutor(
        id=instance.id,
        components=components_of(instance, parts),
        work=instance.throughput_per_s or 1.0,
        parts=_together(instance.parts),
        node_type=node.node_type,
    )


def _together(parts: Sequence[str]) -> tuple[str, ...]:
    """Return parts with an llm's phases as one, where it decodes."""
    return tuple(part.removesuffix(_DECODE) for part in parts if not part.endswith(_PREFILL))


def _live_paths(
    paths: Sequence[RequestPath], known: Collection[str] | None
) -> tuple[RequestPath, ...]:
    """Return paths with only the steps that do something, and whose executors are known (None: all)."""
    found = []
    for path in paths:
        steps = tuple(
            step.model_copy(update={"instances": weights, "parts": parts})
            for step in path.steps
            if (weights := {k: v for k, v in step.instances.items() if known is None or k in known})
            and (parts := _together(step.parts))
        )
        if steps:
            found.append(path.model_copy(update={"steps": steps}))
    return tuple(found)
