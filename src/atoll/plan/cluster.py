"""A fixed cluster: its nodes by name, what joins them, and how fast each node type is if that was measured.

Links are rules. An end of a rule is a node's name, a region, "source", "sink" or "*" (anything). For a pair
of ends the most specific rule counts, and among equally specific ones the last: a node, the source or
the sink counts two, a region one, "*" none. Where no rule speaks of a pair there is no link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.frozen import Frozen
from atoll.plan.name_types import Name, NodeTypeName, refuse
from atoll.plan.plan import SINK, SOURCE, NotNegative

ANY = "*"
TOKEN_BYTES = 2.0
"""Bytes of a token between the coordinator and a node."""
KV_FILL = 0.9
"""Share of a node's KV cache that is filled before requests have to wait."""

Positive = Annotated[float, Field(gt=0)]
Whole = Annotated[int, Field(ge=1)]
Points = Annotated[tuple[tuple[NotNegative, NotNegative], ...], Field(min_length=1)]


class ClusterNode(Frozen):
    """One machine of the cluster."""

    name: Name
    node_type: NodeTypeName
    region: Name


class ClusterLink(Frozen):
    """Link between two ends, both ways unless `one_way`: bytes/s, and seconds to the first byte."""

    src: str
    dst: str
    bytes_per_s: Positive
    latency_s: NotNegative = 0.0
    one_way: bool = False

    @property
    def ends(self) -> tuple[tuple[str, str], ...]:
        """The pairs of ends the rule applies to, in its direction and, unless one way, in the other."""
        there = (self.src, self.dst)
        return (there,) if self.one_way or self.src == self.dst else (there, there[::-1])


class NodeProfile(Frozen):
    """How fast a node type runs a model, and how much of it it holds.

    Tuples by number of layers begin at one layer. `kv_tokens` are the tokens whose KV cache of all the held
    layers fits beside them. The curves are (prompt tokens or decoding sequences in a step, seconds per
    layer), linear in between, constant before the first point and on with the last slope. A step takes
    `step_s` more, whatever it does. Prompts and sequences in one step take the sum of their curves less
    `shared_s_per_layer`, since weights are read once for both. `prefill_requests` and `decode_sequences`
    bound a step's batch where given. `tokens_per_s` is what the node carries with so many layers, worked out
    where not given; `typical_layers` (with room, and with none to spare) and `start_rate` are where that
    begins.
    """

    max_layers: int = Field(ge=1, description="Most layers the machine holds.")
    kv_tokens: tuple[NotNegative, ...] = Field(
        description="Tokens whose KV cache fits beside 1, 2, ... layers."
    )
    prefill_s_per_layer: Points = Field(description="Points (prompt tokens, seconds per layer).")
    decode_s_per_layer: Points = Field(description="Points (sequences, seconds per layer).")
    step_s: NotNegative = Field(default=0.0, description="Seconds a step takes beside its layers.")
    shared_s_per_layer: NotNegative = Field(
        default=0.0, description="Seconds per layer that prompts and sequences of a step share."
    )
    prefill_requests: tuple[Whole, ...] | None = Field(
        default=None, description="Most prompts in a step with 1, 2, ... layers."
    )
    decode_sequences: tuple[Whole, ...] | None = Field(
        default=None, description="Most sequences in a step with 1, 2, ... layers."
    )
    tokens_per_s: tuple[Positive, ...] | None = Field(
        default=None, description="Tokens/s with 1, 2, ... layers; worked out if left out."
    )
    typical_layers: tuple[Whole, Whole] | None = Field(
        default=None, description="Layers typically held, with room and with none to spare."
    )
    start_rate: Positive | None = Field(
        default=None, description="Layers times tokens/s to begin with where they are worked out."
    )

    @model_serializer(mode="wrap")
    def _only_what_is_shared(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out what is not there, so that older problems keep their hash."""
        found: dict[str, object] = write(self)
        if not self.shared_s_per_layer:
            found.pop("shared_s_per_layer", None)
        return found

    @field_validator("prefill_s_per_layer", "decode_s_per_layer")
    @classmethod
    def _rising(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        x = [point[0] for point in points]
        if any(b <= a for a, b in pairwise(x)):
            raise refuse(InputError("the batch sizes of a curve must rise", hint="sort its points"))
        return points

    @model_validator(mode="after")
    def _for_every_number_of_layers(self) -> Self:
        max_layers = self.max_layers
        for name in ("kv_tokens", "prefill_requests", "decode_sequences", "tokens_per_s"):
            values = getattr(self, name)
            if values is not None and len(values) != max_layers:
                message = f"{name} has {len(values)} values for 1 to {max_layers} layers"
                raise refuse(InputError(message, hint="give one for each number of layers"))
        curves = (self.prefill_s_per_layer, self.decode_s_per_layer)
        min_s = min(seconds for curve in curves for _, seconds in curve)
        if self.shared_s_per_layer > min_s:
            message = f"shared_s_per_layer {self.shared_s_per_layer:g} is more than a step takes"
            raise refuse(InputError(message, hint=f"give at most {min_s:g}"))
        for layers in self.typical_layers or ():
            if layers > max_layers:
                message = f"typically {layers} layers, and {max_layers} at most"
                raise refuse(InputError(message, hint="lower typical_layers"))
        return self


class Cluster(Frozen):
    """Machines that are there, and no others.

    `profiles` are by service or model, then by node type; where there are none the performance model
    speaks. `kv_fill` is the share of the KV cache that may be filled, `token_bytes` the size of a token
    between the coordinator and a node.
    """

    nodes: tuple[ClusterNode, ...] = Field(min_length=1)
    links: tuple[ClusterLink, ...] = Field(min_length=1)
    profiles: dict[str, dict[str, NodeProfile]] = Field(default_factory=dict)
    kv_fill: float = Field(default=KV_FILL, gt=0, le=1)
    token_bytes: Positive = TOKEN_BYTES

    @field_validator("nodes")
    @classmethod
    def _nodes_in_order(cls, nodes: tuple[ClusterNode, ...]) -> tuple[ClusterNode, ...]:
        taken = {ANY, SOURCE, SINK, *(node.region for node in nodes)}
        for node in nodes:
            if node.name in taken:
                message = f"{node.name!r} names two things: nodes, regions, source and sink differ"
                raise refuse(InputError(message, hint="rename one"))
            taken.add(node.name)
        return tuple(sorted(nodes, key=lambda node: node.name))

    @model_validator(mode="after")
    def _ends_exist(self) -> Self:
        known = self._known_ends
        for link in self.links:
            for end in (link.src, link.dst):
                if end not in known:
                    error = UnknownNameError("end of a link", end, known)
                    raise refuse(InputError(error.message, hint=error.hint))
        return self

    @cached_property
    def _known_ends(self) -> dict[str, int]:
        """How specific each end of a rule is."""
        ends = {ANY: 0, SOURCE: 2, SINK: 2}
        ends |= {node.region: 1 for node in self.nodes}
        return ends | {node.name: 2 for node in self.nodes}

    @cached_property
    def by_name(self) -> Mapping[str, ClusterNode]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    @property
    def regions(self) -> tuple[str, ...]:
        """Every region with a node, sorted."""
        return tuple(sorted({node.region for node in self.nodes}))

    def counts(self) -> Counter[str]:
        """Return how many nodes of each type there are."""
        return Counter(node.node_type for node in self.nodes)

    def node(self, name: str) -> ClusterNode:
        """Return the node of this name."""
        try:
            return self.by_name[name]
        except KeyError:
            raise UnknownNameError("node", name, self.by_name) from None

    def weakest_first(self) -> Iterator[tuple[str, str, ClusterLink]]:
        """Yield (from, to, rule) for every rule and direction, so that the last for a pair is the one."""
        ends = self._known_ends
        ranked = [
            (ends[src] + ends[dst], index, src, dst)
            for index, link in enumerate(self.links)
            for src, dst in link.ends
        ]
        for _, index, src, dst in sorted(ranked):
            yield src, dst, self.links[index]

    @cached_property
    def _rules(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """By pair of ends, how specific the pair is and the last rule of it."""
        ends = self._known_ends
        return {
            (src, dst): (ends[src] + ends[dst], index)
            for index, link in enumerate(self.links)
            for src, dst in link.ends
        }

    def link(self, src: str, dst: str) -> ClusterLink | None:
        """Return the rule for the way from `src` to `dst` (node names, "source", "sink"), None if no link."""
        matches = [
            self._rules[pair]
            for pair in ((a, b) for a in self._names_of(src) for b in self._names_of(dst))
            if pair in self._rules
        ]
        return self.links[max(matches)[1]] if matches else None

    def _names_of(self, end: str) -> Iterable[str]:
        """Return what a rule may call an end: its name, its region if it is a node, or "*"."""
        return (end, ANY) if end in (SOURCE, SINK) else (end, self.node(end).region, ANY)
