"""The rules of `validate` about engines: every instance has a layout that its engine runs."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError, UsageError
from atoll.core.ids import Phase
from atoll.engines.table import ENGINES
from atoll.plan.capacities import count_slots, share_kv_bytes
from atoll.plan.engine_layout import engine_layout
from atoll.plan.handover import handover_engine
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.violation import Violation, violation


def check_engine(instance: Instance, problem: Problem, catalog: Catalog) -> Iterator[Violation]:
    """Yield why an engine does not run an instance; an instance without one is for problems without any."""
    allowed, here = problem.settings.engines, instance.id
    if instance.engine is None:
        if allowed:
            yield violation(
                "engine", here, f"no engine runs it, and one of {', '.join(allowed)} must"
            )
        return
    engine = ENGINES[instance.engine]
    if allowed and engine.name not in allowed:
        yield violation("engine", here, f"{instance.engine} is none of the engines that may run it")
        return
    service = problem.service(instance.service)
    if allowed and instance.phase is not Phase.BOTH and not service.is_graph:
        handing = ENGINES[handover_engine(problem, catalog, service).name]
        if engine.connector != handing.connector:
            message = f"KV cache of {service.name} is handed over by {handing.title}"
            yield violation("engine", here, f"{message}, not by {engine.title}")
    try:
        engine.check_layout(engine_layout(instance), service.engine_limits)
    except InputError as error:
        yield violation("engine", here, error.message)
    spec = catalog.model(service.model).llm
    for node in instance.nodes:
        why = engine.refuses(spec, catalog.node(node.kind).gpu)
        copies, most = node.gpus // node.tp, engine.max_node_copies
        if most is not None and copies > most:
            why = f"{engine.title} runs {most} of its {copies} copies of the layers"
        if why is not None:
            yield violation("engine", f"{here} {node.id}", why)
    yield from _check_slots(instance, problem, catalog)
    yield from _check_share_memory(instance, problem, catalog)


def _check_share_memory(
    instance: Instance, problem: Problem, catalog: Catalog
) -> Iterator[Violation]:
    """Yield nodes whose KV cache is more than their share of a GPU has room for.

    With it no more is taken of a GPU than it has: shares are equal, and each is held once (`check_gpus`).
    """
    for node in instance.nodes:
        try:
            room = share_kv_bytes(problem, catalog, instance, node)
        except UsageError:  # A split that there is not: the rules of nodes say so.
            return
        if (room is None) != (node.kv_bytes is None) or (node.kv_bytes or 0) > (room or 0):
            message = f"{node.kv_bytes} bytes of KV cache are stated, {room} have room"
            yield violation("memory", f"{instance.id} {node.id}", message)


def _check_slots(instance: Instance, problem: Problem, catalog: Catalog) -> Iterator[Violation]:
    """Yield that an instance runs more requests at a time than have room."""
    try:
        room = count_slots(problem, catalog, instance)
    except UsageError:  # A split that there is not: the rules of nodes say so.
        return
    stated = instance.slots
    if room is None and stated is not None:
        yield violation(
            "engine", instance.id, f"{instance.engine} has no slots, {stated} are stated"
        )
    elif room is not None and (stated is None or stated > room):
        message = f"{stated or 'no'} slots are stated, and {room} have room for the longest request"
        yield violation("engine", instance.id, message)


def check_connectors(plan: Plan) -> Iterator[Violation]:
    """Yield pairs of instances that have no way to hand KV cache over."""
    engines = {one.id: ENGINES.get(one.engine or "") for one in plan.instances}
    phases = {one.id: one.phase for one in plan.instances}
    for route in plan.routes:
        first, *rest = route.instances
        sender = engines.get(first)
        for second in rest:
            taker = engines.get(second)
            if sender is None or taker is None or phases[first] is not Phase.PREFILL:
                continue
            if sender.connector is None or sender.connector != taker.connector:
                message = f"{sender.title} hands no KV cache to {taker.title}"
                yield violation("engine", f"{first} to {second}", message)
