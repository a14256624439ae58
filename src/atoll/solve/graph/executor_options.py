"""Which parts of a model may share an executor.

By default every set of parts that some class of requests uses and that hangs together: each of its parts but
one takes what another makes, or makes what another takes. An llm counts whole, or as one of its phases; with
its prompt phase go encoders, with its answer phase generators. So a model with an image encoder and an llm
has vision, llm, vision+llm and, where phases may run apart, llm.prefill, vision+llm.prefill and llm.decode.
Parts that do not touch (two encoders without their llm) never share: two executors do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from atoll.catalog.models import ModelSpec
from atoll.core.ids import Phase
from atoll.perf.components.class_loads import component_of
from atoll.plan.executors import DECODE, PREFILL
from atoll.plan.problem import Service

Option = tuple[str, ...]
"""Parts in the order of the model."""


def options_of(
    model: ModelSpec, service: Service, routes: Iterable[Sequence[str]]
) -> tuple[Option, ...]:
    """Return the sets of parts that may share an executor of a service, small ones first."""
    if service.paths:
        named = {tuple(executor.split("+")) for path in service.paths for executor in path}
        return tuple(sorted(named, key=lambda option: (len(option), option)))
    used = {part for route in routes for part in route}
    order = [part for part in model.graph.parts() if part in used]
    return tuple(
        some
        for size in range(1, len(order) + 1)
        for some in combinations(order, size)
        if _fits_together(model, some)
    )


def _fits_together(model: ModelSpec, parts: Option) -> bool:
    components = [component_of(part) for part in parts]
    if len(set(components)) < len(components):
        return False  # an llm twice: both phases are the llm
    reached, left = {parts[0]}, set(parts[1:])
    while left:
        near = {part for part in left if any(_touch(model, part, other) for other in reached)}
        if not near:
            return False
        reached |= near
        left -= near
    return True


def _touch(model: ModelSpec, a: str, b: str) -> bool:
    """Whether one part takes what the other makes."""
    return _feeds(model, a, b) or _feeds(model, b, a)


def _feeds(model: ModelSpec, first: str, second: str) -> bool:
    if first.endswith(PREFILL) or second.endswith(DECODE):
        # Prompts are handed to the answer phase of the same llm only, which then is the whole llm.
        return False
    edges = {(edge.src, edge.dst) for edge in model.graph.edges}
    return (component_of(first), component_of(second)) in edges


def named_options(
    name: str, model: ModelSpec, routes: Sequence[Sequence[str]]
) -> tuple[Option, ...]:
    """Return the executors of a way to deploy that has a name: monolith, E/PD, EP/D, E/P/D.

    Generators go with the part that feeds them: with the llm, or its answers. A model without an llm is cut
    after its encoders; one without encoders has none to cut off. What a component is here its phases say.
    """
    used = {part for route in routes for part in route}
    order = [part for part in model.graph.parts() if part in used]
    phases = {part: model.graph.phases(component_of(part)) for part in order}
    encoders = [part for part in order if Phase.ENCODE in phases[part]]
    rest = [part for part in order if Phase.ENCODE not in phases[part]]
    generators = [part for part in rest if Phase.GENERATE in phases[part]]
    whole = [part for part in rest if component_of(part) == part]
    prefill = [part for part in rest if part.endswith(PREFILL)]
    decode = [part for part in rest if part.endswith(DECODE)]
    groups = {
        "monolith": [encoders + whole],
        "E/PD": [*([part] for part in encoders), whole],
        "EP/D": [encoders + prefill, decode + generators] if prefill else [encoders + whole],
        "E/P/D": [
            *([part] for part in encoders),
            *([prefill, decode + generators] if prefill else [whole]),
        ],
    }[name]
    return tuple(_in_order(group, order) for group in groups if group)


def _in_order(parts: Iterable[str], order: Sequence[str]) -> Option:
    return tuple(sorted(parts, key=order.index))


def label(parts: Sequence[str], option: Option) -> str:
    """Return what parts are called that one executor of this kind runs for a request, all of them."""
    return f"{','.join(parts)}@{'+'.join(option)}"


def by_way(labelled: str, way: int) -> str:
    """Return what parts are called that are reached by one of several ways (`link_ways`)."""
    return f"{labelled}#{way}"


def without_way(labelled: str) -> str:
    """Return what parts are called whichever way they are reached."""
    return labelled.partition("#")[0]


def plain_parts(labelled: str) -> tuple[str, ...]:
    """Return the parts that a label speaks of; a part without one is itself."""
    return tuple(without_way(labelled).partition("@")[0].split(","))


def runs_on(labelled: str, option: Option) -> bool:
    """Whether executors of these parts run what a label speaks of."""
    _, at, where = without_way(labelled).partition("@")
    parts = plain_parts(labelled)
    return where == "+".join(option) if at else all(part in option for part in parts)


def allowed_routes(
    model: ModelSpec, paths: Sequence[Sequence[str]], routes: Sequence[Sequence[str]]
) -> Iterator[tuple[str, ...]]:
    """Yield the routes of a class over the paths that a service allows, labelled by their executors.

    Every part runs on the first executor of a path that has it, and with parts that take what it makes and
    run there, too, on the very same one. Executors that a class needs nothing of are passed by. A path that
    lacks a part of a route is none for it.
    """
    for path in paths:
        executors = [tuple(executor.split("+")) for executor in path]
        for route in routes:
            holders = {
                part: next((option for option in executors if part in option), None)
                for part in route
            }
            if all(holder is not None for holder in holders.values()):
                yield _grouped(model, {part: o for part, o in holders.items() if o is not None})


def _grouped(model: ModelSpec, holders: Mapping[str, Option]) -> tuple[str, ...]:
    """Put parts of one executor together where one feeds the other, in an order that they can run in."""
    groups: list[list[str]] = []
    for part, option in holders.items():
        near = [
            group
            for group in groups
            if holders[group[0]] == option and any(_touch(model, part, other) for other in group)
        ]
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), part])
    placed: list[list[str]] = []
    while groups:
        ready = next(
            group
            for group in groups
            if not any(
                _before(model, other, part)
                for rest in groups
                if rest is not group
                for other in rest
                for part in group
            )
        )
        groups.remove(ready)
        placed.append(ready)
    return tuple(label(group, holders[group[0]]) for group in placed)


def _before(model: ModelSpec, first: str, second: str) -> bool:
    """Whether a part takes what another makes, phases of an llm included."""
    if component_of(first) == component_of(second):
        return first.endswith(PREFILL) and second.endswith(DECODE)
    edges = {(edge.src, edge.dst) for edge in model.graph.edges}
    return (component_of(first), component_of(second)) in edges
