"""From a plan for any-to-any models to what is simulated: its executors, machines, classes and paths."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from atoll.catalog.catalog import Catalog
from atoll.catalog.media import GeneratorSpec
from atoll.catalog.models import ModelSpec
from atoll.catalog.nodes import NodeType
from atoll.core.errors import InputError
from atoll.core.graph import ComponentKind
from atoll.core.ids import Phase
from atoll.engines.table import EngineChoice
from atoll.perf.components.class_loads import component_of, media_tokens, speech_codes
from atoll.perf.components.executor_steps import ExecutorSteps, PartSteps, executor_steps
from atoll.perf.components.measured import MeasuredRate
from atoll.perf.components.sites import Company
from atoll.perf.constants import ConstantTable
from atoll.plan.capacities import node_source
from atoll.plan.executors import (
    DECODE,
    PREFILL,
    company_of,
    group_of,
    machine_of,
    measured_rates,
    node_work,
    request_bytes,
    routes_of,
)
from atoll.plan.handover import hop_link
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem, Service
from atoll.sim.api import Progress
from atoll.sim.tasks.simulate_tasks import Routing, simulate_tasks
from atoll.sim.tasks.task_demand import Arrivals, draw_demand
from atoll.sim.tasks.task_fleet import (
    Amount,
    BatchPart,
    Box,
    BoxLink,
    ClassSpec,
    DiffusionPart,
    Emits,
    ExecutorSpec,
    PartEdge,
    PartModel,
    PartNeed,
    PathSpec,
    PhaseName,
    Promises,
    StepSpec,
    TaskFleet,
    TokenPart,
)
from atoll.sim.tasks.task_result import TaskResult
from atoll.workload.classes import RequestClass

CHUNK_S = 6.0
"""Seconds of speech that are rendered at a time, as their codes come."""
SENTENCE_TOKENS = 20.0
"""A spoken sentence where a class does not say how long they are: about fifteen words."""
_MAX_WARM_UP = 0.5
"""Share of a run that may be left out of its figures, and is not reached."""


def task_fleet(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    *,
    services: Collection[str] | None = None,
    constants: ConstantTable | None = None,
    scale: float = 1.0,
) -> TaskFleet:
    """Return the any-to-any services of a plan as a simulator runs them, or those named, at their demand.

    Demand is what arrives, without headroom, times `scale`, and the share of it that the plan serves.
    """
    graphs = [
        service
        for service in problem.graph_services
        if (services is None or service.name in services)
        and service.rate_per_s > 0.0
        and plan.served_fraction.get(service.name, 1.0) > 0.0
    ]
    if not graphs:
        raise InputError(
            "the plan serves no any-to-any model", field="paths", hint="simulate it as a plain one"
        )
    names = {service.name for service in graphs}
    used = _used_parts(plan, names)
    standing = [i for i in plan.executor_instances if i.id in used]
    steps = _all_steps(problem, catalog, standing, constants)
    return TaskFleet(
        executors=tuple(
            _executor(problem, catalog, i, steps, used[i.id], group_of(catalog, i))
            for i in standing
        ),
        classes=tuple(
            _class(plan, catalog, service, klass, steps, scale)
            for service in graphs
            for klass in service.classes
        ),
        paths=tuple(
            PathSpec(
                path.service,
                path.klass,
                path.share,
                tuple(StepSpec(step.parts, tuple(step.instances.items())) for step in path.steps),
            )
            for path in plan.paths
            if path.service in names and path.share > 0.0
        ),
        boxes=tuple(_boxes(catalog, standing)),
        links=_links(catalog, standing),
    )


def _used_parts(plan: Plan, services: Collection[str]) -> dict[str, set[str]]:
    """The parts that paths of these services lead to, by executor.

    An executor may hold parts that nobody asks it for, with no room to run them: they set no limits.
    """
    used: dict[str, set[str]] = {}
    for path in plan.paths:
        if path.share > 0.0 and path.service in services:
            for step in path.steps:
                for name, weight in step.instances.items():
                    if weight > 0.0:
                        used.setdefault(name, set()).update(step.parts)
    return used


_Steps = Mapping[tuple[str, str], ExecutorSteps]
"""How executors step, by executor and service."""


def _all_steps(
    problem: Problem,
    catalog: Catalog,
    standing: Iterable[Instance],
    constants: ConstantTable | None,
) -> _Steps:
    return {
        (i.id, name): _steps(problem, catalog, i, problem.service(name), constants)
        for i in standing
        for name in i.services
    }


def _steps(
    problem: Problem,
    catalog: Catalog,
    instance: Instance,
    service: Service,
    constants: ConstantTable | None,
) -> ExecutorSteps:
    (node,) = instance.nodes
    found = _find_steps(
        catalog.model(service.model),
        instance.parts,
        node_source(catalog, node.kind, machine=node.node_type).node,
        service.classes,
        node.tp,
        problem.engine_of(service),
        service.rates,
        constants,
        company_of(problem, catalog, service, instance.services),
    )
    if found is None:
        raise InputError(f"{instance.id} does not fit on {node.kind}", hint="plan again")
    return found


@lru_cache(maxsize=512)
def _find_steps(
    model: ModelSpec,
    parts: tuple[str, ...],
    node: NodeType,
    classes: tuple[RequestClass, ...],
    tp: int,
    engine: EngineChoice,
    rates: tuple[MeasuredRate, ...],
    constants: ConstantTable | None,
    company: Company,
) -> ExecutorSteps | None:
    """Return how executors of some parts step: a plan is simulated many times while it is sized."""
    return executor_steps(
        model,
        parts,
        node,
        classes,
        tp=tp,
        engine=engine,
        constants=constants,
        measured=measured_rates(rates),
        company=company,
    )


def _box_name(instance: Instance) -> str:
    return " ".join(map(str, machine_of(instance)))


def _boxes(catalog: Catalog, standing: list[Instance]) -> list[Box]:
    boxes = {}
    for instance in standing:
        node = instance.nodes[0]
        link = hop_link(catalog, node.node_type, instance.region)
        groups = catalog.links.groups.get(node.node_type)
        boxes[_box_name(instance)] = Box(
            _box_name(instance),
            catalog.links.nic_bytes_per_s(instance.region, node.node_type),
            link.latency_s,
            math.inf if groups is None else groups.link.bandwidth_bytes_per_s,
            0.0 if groups is None else groups.link.latency_s,
        )
    return [boxes[name] for name in sorted(boxes)]


def _links(catalog: Catalog, standing: list[Instance]) -> dict[tuple[str, str], BoxLink]:
    """The links that are stated for two types of machines, between all of them."""
    stated = catalog.links.node_pairs
    types = {_box_name(one): one.nodes[0].node_type for one in standing} if stated else {}
    return {
        (a, b): BoxLink(link.bandwidth_bytes_per_s, link.latency_s)
        for a, of_a in types.items()
        for b, of_b in types.items()
        if a != b and (link := stated.get((of_a, of_b))) is not None
    }


# Parts


def _executor(
    problem: Problem,
    catalog: Catalog,
    instance: Instance,
    steps: _Steps,
    used: Collection[str],
    group: int | None = None,
) -> ExecutorSpec:
    """An executor with those of its parts that are used, as they are to each of its services."""
    own = {name: steps[instance.id, name] for name in instance.services}
    parts: dict[str, dict[str, PartModel]] = {name: {} for name in own}
    for part in own[instance.service].parts:
        found = _part(problem, catalog, part, own) if part in used else {}
        for name, model in found.items():
            parts[name][part] = model
    return ExecutorSpec(
        instance.id,
        _box_name(instance),
        instance.service,
        parts.pop(instance.service),
        group,
        parts,
        max(one.slowed for one in own.values()),
    )


def _part(
    problem: Problem, catalog: Catalog, part: str, steps: Mapping[str, ExecutorSteps]
) -> dict[str, PartModel]:
    """A part of an executor by service; none where no class of any asks for it."""
    by_class = {
        (name, klass): one
        for name, of_service in steps.items()
        for (klass, of_part), one in sorted(of_service.steps.items())
        if of_part == part
    }
    if not by_class:
        return {}
    models = {name: catalog.model(problem.service(name).model) for name in steps}
    (name, _), first = next(iter(by_class.items()))
    if first.model is not None:
        return dict.fromkeys(steps, _tokens(models[name], part, first))
    # One fixed time for batches of all classes: what a class has more of it counts with its items.
    fixed = min(one.fixed_s for one in by_class.values())
    max_batch = max(1, min(one.max_batch for one in by_class.values()))
    kind = DiffusionPart if first.rounds > 1 and not _speaker(models[name], part) else BatchPart
    rounds = first.rounds if kind is BatchPart else 1
    found: dict[str, PartModel] = {}
    for name, model in models.items():
        service = problem.service(name)
        items = {
            k: (one.item_s + one.fixed_s - fixed) / _pieces(model, part, service.klass(k)) * rounds
            for (of_service, k), one in by_class.items()
            if of_service == name
        }
        found[name] = kind(items, fixed * rounds, max_batch, _emits(model, part))
    return found


def _tokens(model: ModelSpec, part: str, one: PartSteps) -> TokenPart:
    assert one.model is not None
    phase: PhaseName = "both"
    if part.endswith(PREFILL):
        phase = "prefill"
    elif part.endswith(DECODE):
        phase = "decode"
    return TokenPart(
        one.model,
        max(2, one.kv_tokens),
        one.model.engine.max_sequences,
        one.model.engine.max_tokens,
        phase,
        "text" if _is_llm(model, part) else "",
    )


def _is_llm(model: ModelSpec, part: str) -> bool:
    return model.graph.component(component_of(part)).kind is ComponentKind.LLM


def _emits(model: ModelSpec, part: str) -> Emits:
    """Output of a part that the client gets: the last of the generators makes sound or pictures."""
    name = component_of(part)
    if Phase.GENERATE not in model.graph.phases(name) or model.graph.successors(name):
        return ""
    return "audio" if model.has_llm else "image"


def _speaker(model: ModelSpec, part: str) -> GeneratorSpec | None:
    """The part that makes the codes which another one makes sound of, None where it makes none of codes."""
    for component in model.graph.predecessors(component_of(part)):
        spec = model.components[component.name]
        if isinstance(spec, GeneratorSpec) and spec.kind == "autoregressive":
            return spec
    return None


def _pieces(model: ModelSpec, part: str, klass: RequestClass) -> float:
    """In how many pieces a request of a class comes to a part: speech in some seconds at a time."""
    speaker = _speaker(model, part)
    if klass.speech_s is None:
        return 1.0
    if speaker is None:
        return max(1.0, klass.output_tokens / _sentence(klass)) if _reads(model, part) else 1.0
    return max(1.0, speech_codes(speaker, klass) / _chunk_tokens(speaker))


def _reads(model: ModelSpec, part: str) -> bool:
    """Whether a part begins to speak an llm's text with its first sentence."""
    name = component_of(part)
    spec = model.components[name]
    return (
        isinstance(spec, GeneratorSpec)
        and spec.by_sentence
        and any(each.kind is ComponentKind.LLM for each in model.graph.predecessors(name))
    )


def _sentence(klass: RequestClass) -> int:
    return max(1, round(klass.sentence_tokens or SENTENCE_TOKENS))


def _chunk_tokens(speaker: GeneratorSpec) -> int:
    return max(1, round((speaker.frames_per_second or 1.0) * CHUNK_S))


# Classes


def _class(
    plan: Plan,
    catalog: Catalog,
    service: Service,
    klass: RequestClass,
    steps: _Steps,
    scale: float,
) -> ClassSpec:
    model = catalog.model(service.model)
    parts = sorted({part for route in routes_of(catalog, service, klass) for part in route})
    rounds = {
        part: next(
            (
                one.steps[klass.name, part].rounds
                for (_, name), one in steps.items()
                if name == service.name and (klass.name, part) in one.steps
            ),
            1,
        )
        for part in parts
    }
    served = plan.served_fraction.get(service.name, 1.0)
    # A fraction is one of the demand with its headroom; the headroom is the first to go.
    rate = service.rate_per_s * klass.share * min(1.0, served * service.headroom) * scale
    size = request_bytes(catalog, service, klass)
    return ClassSpec(
        service.name,
        klass.name,
        rate,
        needs={part: _need(model, part, klass, rounds[part]) for part in parts},
        edges=tuple(
            _edge(model, klass, first, second, amount)
            for (first, second), amount in sorted(size.items())
            if first in parts and second in parts
        ),
        promises=Promises(klass.ttft_s, klass.tpot_s, klass.ahead_s, klass.image_s),
        input_tokens=klass.input_tokens,
        output_tokens=klass.output_tokens,
        input_cv=klass.input_cv,
        output_cv=klass.output_cv,
        speech=Amount(per_output=(klass.speech_s or 0.0) / klass.output_tokens),
    )


def _need(model: ModelSpec, part: str, klass: RequestClass, rounds: int) -> PartNeed:
    """Work that a request asks of a part; batches are of whole requests."""
    media = sum(media_tokens(model, klass).values()) if model.has_llm else 0.0
    if _is_llm(model, part):
        return PartNeed(prompt=Amount(fixed=media, per_input=1.0))
    spec = model.components[component_of(part)]
    if isinstance(spec, GeneratorSpec) and spec.kind == "autoregressive":
        # Speech takes as long as what it says.
        codes = speech_codes(spec, klass) / klass.output_tokens
        return PartNeed(
            prompt=Amount(fixed=media, per_input=1.0, per_output=1.0),
            answer=Amount(per_output=codes),
        )
    return PartNeed(steps=1 if _speaker(model, part) else rounds)


def _edge(model: ModelSpec, klass: RequestClass, first: str, second: str, size: float) -> PartEdge:
    """Data that goes from part to part; codes become sound as they come, and text sentence by sentence."""
    spec = model.components[component_of(first)]
    writes = _is_llm(model, first) and not first.endswith(PREFILL)
    chunk = _sentence(klass) if writes and _reads(model, second) else None
    if isinstance(spec, GeneratorSpec) and spec.kind == "autoregressive":
        chunk = _chunk_tokens(spec)
    if chunk is not None:
        return PartEdge(first, second, Amount(fixed=size), chunk_tokens=chunk, streamed=True)
    return PartEdge(first, second, Amount(fixed=size))


def alone_fleet(
    plan: Plan, problem: Problem, catalog: Catalog, executor: Instance, load: float
) -> TaskFleet | None:
    """Return one executor of a plan by itself, as busy as `load` by what its parts are planned to take.

    Requests of all classes of its services, in their shares, come to it for the parts that it has, and are
    promised what those parts have to do with. None where it serves no class.
    """
    services = [problem.service(name) for name in executor.services]
    total = sum(service.rate_per_s for service in services)
    weights = [s.rate_per_s / total if len(services) > 1 else 1.0 for s in services]
    works = [node_work(problem, catalog, service, executor) for service in services]
    steps = _all_steps(problem, catalog, [executor], None)
    served: list[tuple[Service, RequestClass, tuple[str, ...], float]] = []
    # Seconds of work that a request of the mix brings on average.
    busy = 0.0
    for service, weight, work in zip(services, weights, works, strict=True):
        if work is None:
            return None
        for klass in service.classes:
            used = {part for route in routes_of(catalog, service, klass) for part in route}
            own = tuple(p for p in executor.parts if p in used and (klass.name, p) in work.seconds)
            share = weight * klass.share
            if own and share > 0.0:
                served.append((service, klass, own, share))
                busy += share * sum(work.seconds[klass.name, part] for part in own)
    if busy <= 0.0:
        return None
    classes = []
    for service, klass, parts, share in served:
        model = catalog.model(service.model)
        whole = _class(plan, catalog, service, klass, steps, 1.0)
        edges = tuple(e for e in whole.edges if e.src in parts and e.dst in parts)
        # What nothing here feeds gets all its pieces at once.
        fed = {edge.dst for edge in edges}
        needs = {
            part: need if part in fed else replace(need, items=_pieces(model, part, klass))
            for part, need in whole.needs.items()
            if part in parts
        }
        classes.append(
            replace(
                whole,
                rate_per_s=share * load / busy,
                needs=needs,
                edges=edges,
                promises=_own_promises(model, klass, parts),
            )
        )
    return TaskFleet(
        executors=(_executor(problem, catalog, executor, steps, executor.parts),),
        classes=tuple(classes),
        paths=tuple(
            PathSpec(service.name, klass.name, 1.0, (StepSpec(parts, ((executor.id, 1.0),)),))
            for service, klass, parts, _ in served
        ),
        boxes=tuple(_boxes(catalog, [executor])),
    )


def _own_promises(model: ModelSpec, klass: RequestClass, parts: Collection[str]) -> Promises:
    """The promises of a class that an executor of some parts can keep or break by itself."""
    first = any(_is_llm(model, p) and not p.endswith(DECODE) for p in parts)
    later = any(_is_llm(model, p) and not p.endswith(PREFILL) for p in parts)
    made = {_emits(model, p) for p in parts}
    return Promises(
        klass.ttft_s if first else None,
        klass.tpot_s if later else None,
        klass.ahead_s if "audio" in made else None,
        klass.image_s if "image" in made else None,
    )


def simulate_services(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    services: Sequence[str],
    *,
    requests: int,
    seed: int,
    constants: ConstantTable | None = None,
    routing: Routing = "dealt",
    progress: Progress | None = None,
) -> TaskResult:
    """Simulate any-to-any services of a plan that share executors with no others, under their demand.

    How long requests are at each part is not found.
    """
    fleet = task_fleet(plan, problem, catalog, services=services, constants=constants)
    arrivals = Arrivals(cv_of={name: problem.service(name).burstiness for name in services})
    return simulate_tasks(
        fleet,
        requests=requests,
        seed=seed,
        routing=routing,
        arrivals=arrivals,
        progress=progress,
        part_times=False,
    )


def simulate_plan(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    *,
    duration_s: float,
    seed: int = 0,
    routing: Routing = "dealt",
    query_s: float = 0.0,
    warm_up_s: float = 0.0,
    until_s: float = math.inf,
    constants: ConstantTable | None = None,
) -> TaskResult:
    """Simulate all any-to-any services of a plan together: they share machines and their interfaces.

    Their demand lasts `duration_s` seconds, and all of it is waited for, or until `until_s`. Requests of the
    first `warm_up_s` seconds are left out of the figures. See `simulate_tasks` for the rest.
    """
    fleet = task_fleet(plan, problem, catalog, constants=constants)
    names = {klass.service for klass in fleet.classes}
    arrivals = Arrivals(cv_of={s.name: s.burstiness for s in problem.services if s.name in names})
    demand = draw_demand(fleet, arrivals, requests=None, duration_s=duration_s, seed=seed)
    last_s = float(demand.arrival_s[-1])
    if warm_up_s >= _MAX_WARM_UP * last_s:
        raise InputError(
            f"a warm-up of {warm_up_s:g} s leaves less than half of {last_s:g} s to judge",
            field="warm_up",
            hint="let it run for longer",
        )
    return simulate_tasks(
        fleet,
        demand=demand,
        duration_s=None if math.isinf(until_s) else until_s,
        seed=seed,
        routing=routing,
        query_s=query_s,
        warmup=warm_up_s / last_s,
    )
