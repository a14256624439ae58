"""Where a placement on a fixed cluster is full: the machines and links that no more can get past.

The smallest cut of the flow graph. Every node is an arc of what it carries, every link an arc of what it
lets through, also links without flow; what can still be reached from the source lies before the cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.catalog.catalog import Catalog
from atoll.plan.cluster_capacities import promised_limits
from atoll.plan.cluster_profiles import (
    activation_bytes,
    cluster_of,
    request_tokens,
    service_rates,
)
from atoll.plan.plan import SINK, SOURCE, Instance, Node
from atoll.plan.problem import Problem

_SLACK = 1e-6
Arc = tuple[str, str]


@dataclass(frozen=True)
class Use:
    """Flow and capacity of a machine or a link, in tokens/s."""

    tokens_per_s: float
    capacity: float

    @property
    def share(self) -> float:
        """The share of it that is in use."""
        return self.tokens_per_s / self.capacity if self.capacity > 0 else 0.0


@dataclass(frozen=True)
class Bottleneck:
    """Machines and links, all full, that together carry `tokens_per_s`: the whole flow."""

    nodes: tuple[Node, ...]
    links: tuple[tuple[str, str], ...]
    tokens_per_s: float

    def __str__(self) -> str:
        kinds = Counter((node.node_type, node.layers) for node in self.nodes)
        parts = [
            f"{f'{n}x ' if n > 1 else ''}{kind} with {layers} layer{'s' if layers > 1 else ''}"
            for (kind, layers), n in sorted(kinds.items())
        ]
        shown = [f"{src} -> {dst}" for src, dst in self.links[:3]]
        more = f" and {len(self.links) - 3} more" if len(self.links) > 3 else ""
        if shown:
            word = "link" if len(self.links) == 1 else "links"
            parts.append(f"{word} {', '.join(shown)}{more}")
        return f"{' + '.join(parts)}: {self.tokens_per_s:,.0f} tokens/s"


def node_use(instance: Instance, problem: Problem, catalog: Catalog) -> dict[str, Use]:
    """Return what every node of an instance carries and could carry, by node id."""
    service = problem.service(instance.service)
    rates = service_rates(problem, catalog, service)
    tokens = request_tokens(service)
    through = {node.id: 0.0 for node in instance.nodes}
    for flow in instance.flows:
        if flow.dst in through:
            through[flow.dst] += flow.per_s * tokens
    use = {
        node.id: Use(through[node.id], _rate(rates.get(node.kind, ()), node.layers))
        for node in instance.nodes
    }
    if all(own.share <= 1.0 + _SLACK for own in use.values()):
        return use
    # A plan within a promise counts nodes as rented ones are counted, which may be more than the estimate.
    within = promised_limits(instance, problem, catalog)
    return {
        name: Use(own.tokens_per_s, max(own.capacity, within[name] * tokens))
        for name, own in use.items()
    }


def _rate(rates: Sequence[float], layers: int) -> float:
    return rates[layers - 1] if layers <= len(rates) else 0.0


def link_use(instance: Instance, problem: Problem, catalog: Catalog) -> dict[Arc, Use]:
    """Return what every possible hop of an instance carries and could carry, by (from, to)."""
    cluster = cluster_of(problem)
    service = problem.service(instance.service)
    tokens, between = request_tokens(service), activation_bytes(catalog, service)
    layers = catalog.model(service.model).llm.layers
    carried = {(flow.src, flow.dst): flow.per_s * tokens for flow in instance.flows}
    uses: dict[Arc, Use] = {}

    def add(src: str, dst: str, a: str, b: str, size: float) -> None:
        link = cluster.link(a, b)
        if link is not None:
            uses[src, dst] = Use(carried.get((src, dst), 0.0), link.bytes_per_s / size)

    for node in instance.nodes:
        host = node.host or ""
        if node.start == 0:
            add(SOURCE, node.id, SOURCE, host, cluster.token_bytes)
        if node.end == layers:
            add(node.id, SINK, host, SINK, cluster.token_bytes)
        for other in instance.nodes:
            if follows(node, other, partial=instance.partial):
                add(node.id, other.id, host, other.host or "", between)
    return uses


def follows(node: Node, other: Node, *, partial: bool) -> bool:
    """Return whether a request may go from one node to the other."""
    return other.start == node.end or (partial and other.start <= node.end < other.end)


def bottleneck(instance: Instance, problem: Problem, catalog: Catalog) -> Bottleneck | None:
    """Return the full machines and links nearest the source, None if more could flow."""
    nodes = node_use(instance, problem, catalog)
    links = link_use(instance, problem, catalog)
    total = sum(use.tokens_per_s for (src, _), use in links.items() if src == SOURCE)
    slack = max(total, 1.0) * _SLACK
    # A node is two places: before it ("n0") and behind it ("n0 out").
    arcs: dict[Arc, Use] = {(i, _out(i)): use for i, use in nodes.items()}
    arcs |= {(_out(src), dst): use for (src, dst), use in links.items()}
    ways: dict[str, set[str]] = {}
    for (a, b), use in arcs.items():
        if use.capacity - use.tokens_per_s > slack:
            ways.setdefault(a, set()).add(b)
        if use.tokens_per_s > slack:
            ways.setdefault(b, set()).add(a)
    reached, ahead = {SOURCE}, [SOURCE]
    while ahead:
        for place in ways.get(ahead.pop(), set()) - reached:
            reached.add(place)
            ahead.append(place)
    if SINK in reached:
        return None
    full = {arc for arc in arcs if arc[0] in reached and arc[1] not in reached}
    hosts = {node.id: node.host or node.id for node in instance.nodes} | {
        SOURCE: SOURCE,
        SINK: SINK,
    }
    return Bottleneck(
        nodes=tuple(node for node in instance.nodes if (node.id, _out(node.id)) in full),
        links=tuple((hosts[a], hosts[b]) for a, b in links if (_out(a), b) in full),
        tokens_per_s=total,
    )


def _out(place: str) -> str:
    return place if place == SOURCE else f"{place} out"
