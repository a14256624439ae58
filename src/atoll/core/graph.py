"""A model as a graph of components: encoders, llms and generators joined by data flow.

    image_encoder --+
                    +--> llm --> image_generator
    audio_encoder --+

A plain LLM is the graph with one component. The graph says what feeds what; which of the paths a
request takes is a matter of its request class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import Phase, slug


class ComponentKind(StrEnum):
    """Kind of a component; it decides its phases and its performance model."""

    ENCODER = "encoder"
    LLM = "llm"
    GENERATOR = "generator"


_PHASES: dict[ComponentKind, tuple[Phase, ...]] = {
    ComponentKind.ENCODER: (Phase.ENCODE,),
    ComponentKind.LLM: (Phase.PREFILL, Phase.DECODE),
    ComponentKind.GENERATOR: (Phase.GENERATE,),
}


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a model that runs on its own."""

    name: str
    kind: ComponentKind

    def __post_init__(self) -> None:
        """Refuse names that could not stand in a role id."""
        slug(self.name, field="component name")
        if "/" in self.name:
            raise InputError(f"component name {self.name!r} holds a '/'", field="component name")


@dataclass(frozen=True, slots=True)
class Edge:
    """Data flows from component `src` to component `dst`."""

    src: str
    dst: str


@dataclass(frozen=True, slots=True)
class ComponentGraph:
    """An acyclic, connected graph of uniquely named components; invalid ones cannot be built."""

    components: tuple[Component, ...]
    edges: tuple[Edge, ...] = ()

    @classmethod
    def single_llm(cls, name: str = "llm") -> ComponentGraph:
        """Return the graph of a plain LLM: one component, no edges."""
        return cls((Component(name, ComponentKind.LLM),))

    def __post_init__(self) -> None:
        """Check names, references, acyclicity and connectedness."""
        if not self.components:
            raise InputError("a component graph needs at least one component", field="components")
        names = [component.name for component in self.components]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"component {name!r} appears twice", field="components")
        for edge in self.edges:
            for end in (edge.src, edge.dst):
                if end not in names:
                    raise UnknownNameError("component", end, names, field="edges")
            if self.edges.count(edge) > 1:
                raise InputError(f"edge {edge.src} -> {edge.dst} appears twice", field="edges")
        ordered = {component.name for component in self._peel()}
        in_cycle = [name for name in names if name not in ordered]
        if in_cycle:
            raise InputError(
                f"the component graph has a cycle through or before {', '.join(in_cycle)}",
                field="edges",
            )
        # After the check for cycles: here edges count in both directions.
        stray = [name for name in names if name not in self._reached_from(names[0])]
        if stray:
            raise InputError(
                f"component {stray[0]!r} is not connected to {names[0]!r}",
                field="edges",
                hint="add an edge or describe it as a model of its own",
            )

    def __iter__(self) -> Iterator[Component]:
        return iter(self.components)

    def component(self, name: str) -> Component:
        """Return the component called `name`."""
        for component in self.components:
            if component.name == name:
                return component
        raise UnknownNameError("component", name, (c.name for c in self.components))

    def predecessors(self, name: str) -> tuple[Component, ...]:
        """Return the components that feed `name`, in declaration order."""
        feeding = {edge.src for edge in self.edges if edge.dst == self.component(name).name}
        return tuple(c for c in self.components if c.name in feeding)

    def successors(self, name: str) -> tuple[Component, ...]:
        """Return the components that `name` feeds, in declaration order."""
        fed = {edge.dst for edge in self.edges if edge.src == self.component(name).name}
        return tuple(c for c in self.components if c.name in fed)

    def topological_order(self) -> tuple[Component, ...]:
        """Return the components so that every edge points forward; ties keep declaration order."""
        return self._peel()

    def sources(self) -> tuple[Component, ...]:
        """Return the components nothing feeds."""
        fed = {edge.dst for edge in self.edges}
        return tuple(c for c in self.components if c.name not in fed)

    def sinks(self) -> tuple[Component, ...]:
        """Return the components that feed nothing."""
        feeding = {edge.src for edge in self.edges}
        return tuple(c for c in self.components if c.name not in feeding)

    def paths(self) -> tuple[tuple[Component, ...], ...]:
        """Return every path from a source to a sink, depth first in declaration order."""

        def onward(path: tuple[Component, ...]) -> Iterator[tuple[Component, ...]]:
            following = self.successors(path[-1].name)
            if not following:
                yield path
            for component in following:
                yield from onward((*path, component))

        return tuple(path for source in self.sources() for path in onward((source,)))

    def phases(self, component: str | Component) -> tuple[Phase, ...]:
        """Return the phases a component goes through: an llm prefill then decode, others one."""
        name = component if isinstance(component, str) else component.name
        return _PHASES[self.component(name).kind]

    def parts(self) -> tuple[str, ...]:
        """Return what may be placed on its own, in order: components, and the phases of llms.

        An llm is "llm" where one executor runs both of its phases, "llm.prefill" and "llm.decode" apart.
        """
        names: list[str] = []
        for component in self.topological_order():
            names.append(component.name)
            if component.kind is ComponentKind.LLM:
                names += [f"{component.name}.{phase.value}" for phase in self.phases(component)]
        return tuple(names)

    def _peel(self) -> tuple[Component, ...]:
        """Take away, again and again, the first component whose feeders are all gone (Kahn)."""
        left = list(self.components)
        done: list[Component] = []
        while True:
            names_left = {component.name for component in left}
            blocked = {edge.dst for edge in self.edges if edge.src in names_left}
            free = next((c for c in left if c.name not in blocked), None)
            if free is None:
                return tuple(done)
            left.remove(free)
            done.append(free)

    def _reached_from(self, start: str) -> set[str]:
        reached, frontier = {start}, [start]
        while frontier:
            name = frontier.pop()
            # Both directions: a component that only feeds others is connected, too.
            beside = {e.dst for e in self.edges if e.src == name} | {
                e.src for e in self.edges if e.dst == name
            }
            frontier.extend(beside - reached)
            reached |= beside
        return reached
