"""Which executors single requests visit: an answer's flows, taken apart into paths.

The flows of a route say how many requests/s each executor type runs a part for. Without a chain any coupling
of parts will do, so one is taken that hands requests over rarely: the same type for parts that follow each
other, wherever that is possible. Parts in chains are coupled by latency, the slowest of one part with the
fastest of the other. If any coupling keeps the bounds, that one does; and one order of requests does it for
several chains at once, such as parallel encoders before one llm (`colour_parts` has the directions).

Every coupling step uses up a path or an executor type, so a route has fewer paths than flows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.solve.graph.graph_types import ClassDemand, GraphAnswer, GraphProgram
from atoll.solve.graph.program_table import colour_parts, route_chains

_SAME_S = 1e-9
_ZERO = 1e-12
"""Share of a route's requests below which a path is rounding."""

_Flows = dict[str, dict[int, float]]
"""Requests/s by part and executor type."""
_Path = tuple[float, dict[str, int]]
"""Requests/s, and the executor type of each part."""


@dataclass(frozen=True, slots=True)
class RouteFlow:
    """Requests/s of a class that visit executors in this order; `route` is that of the class.

    A step is an executor type, by its index, and the parts that it runs one after the other.
    """

    service: str
    klass: str
    region: str
    rate_per_s: float
    steps: tuple[tuple[int, tuple[str, ...]], ...]
    route: int = 0


def match_routes(program: GraphProgram, answer: GraphAnswer) -> tuple[RouteFlow, ...]:
    """Return paths whose rates add up to the flows of an answer and that keep every chain."""
    flows: dict[tuple[str, str, str], _Flows] = defaultdict(dict)
    for flow in answer.flows:
        at = flows[flow.service, flow.klass, flow.region].setdefault(flow.part, {})
        at[flow.executor] = at.get(flow.executor, 0.0) + flow.rate_per_s
    classes = {klass.key: klass for klass in program.classes}
    found: list[RouteFlow] = []
    for (service, name, region), left in sorted(flows.items()):
        klass = classes[service, name]
        rates = {
            route: rate
            for (s, t, route, r), rate in sorted(answer.routes.items())
            if (s, t, r) == (service, name, region)
        }
        # Routes with chains have flows of their own; what is left is for the others.
        tied = [route for route in rates if route_chains(klass, klass.routes[route])]
        free = [route for route in rates if route not in tied]
        for route in tied:
            mine = _own_flows(answer, klass, route, region)
            for part, each in mine.items():
                for e, rate in each.items():
                    left[part][e] -= rate
            paths = _couple(program, klass, route, mine, rates[route])
            found += _name(klass, route, region, paths)
        for i, route in enumerate(free):
            mine = left if i == len(free) - 1 else _take(left, klass.routes[route], rates[route])
            paths = _couple(program, klass, route, mine, rates[route])
            found += _name(klass, route, region, paths)
    return tuple(found)


def _own_flows(answer: GraphAnswer, klass: ClassDemand, route: int, region: str) -> _Flows:
    flows: _Flows = {}
    for (service, name, w, part, e, r), rate in sorted(answer.split.items()):
        if (service, name, w, r) == (*klass.key, route, region):
            flows.setdefault(part, {})[e] = rate
    return flows


def _take(left: _Flows, route: tuple[str, ...], rate: float) -> _Flows:
    """Take the flows of one route out of those of several, first from executor types that run many parts."""
    shared = {
        e: sum(e in left.get(part, {}) for part in route)
        for part in route
        for e in left.get(part, {})
    }
    taken: _Flows = {}
    for part in route:
        need = rate
        for e in sorted(left.get(part, {}), key=lambda e: (-shared[e], e)):
            some = min(need, left[part][e])
            if some > 0.0:
                taken.setdefault(part, {})[e] = some
                left[part][e] -= some
                need -= some
    return taken


def _couple(
    program: GraphProgram, klass: ClassDemand, route: int, flows: _Flows, rate: float
) -> list[_Path]:
    """Return the paths of one route."""
    parts = tuple(dict.fromkeys(klass.routes[route]))
    blocks = []
    done: set[str] = set()
    tied = _binding(program, klass, parts, flows)
    colour = colour_parts(klass, parts)
    for part in parts:
        if part in done:
            continue
        group = _component(part, tied)
        done |= group
        members = [p for p in parts if p in group]
        block: list[_Path] | None = None
        for p in members:
            late = _latencies(program, klass, p, flows[p])
            sign = -1.0 if colour.get(p, False) else 1.0
            order = sorted(flows[p], key=lambda e: (sign * late[e], e))
            items = [(r, {p: e}) for r, e in _scale(flows[p], order, rate)]
            block = items if block is None else _join(block, items, by_order=True)
        blocks.append(block or [])
    paths = blocks[0]
    for block in blocks[1:]:
        paths = _join(paths, block, by_order=False)
    return [(r, at) for r, at in paths if r > _ZERO * rate]


def _latencies(
    program: GraphProgram, klass: ClassDemand, part: str, executors: Mapping[int, float]
) -> dict[int, float]:
    return {
        e: float(program.executors[e].latency_s.get((*klass.key, part), 0.0)) for e in executors
    }


def _binding(
    program: GraphProgram, klass: ClassDemand, parts: tuple[str, ...], flows: _Flows
) -> list[tuple[str, str]]:
    """Return the chains that not every coupling keeps."""
    binding = []
    for first, second, budget in route_chains(klass, parts):
        worst = sum(
            max(_latencies(program, klass, part, flows[part]).values()) for part in (first, second)
        )
        if worst > budget + _SAME_S:
            binding.append((first, second))
    return binding


def _component(part: str, chains: list[tuple[str, str]]) -> set[str]:
    group = {part}
    while True:
        more = {p for chain in chains if group & set(chain) for p in chain} - group
        if not more:
            return group
        group |= more


def _scale(flows: Mapping[int, float], order: list[int], rate: float) -> list[tuple[float, int]]:
    """Return flows in an order, adding up to the rate of the route (they do but for rounding)."""
    total = sum(flows[e] for e in order)
    return [(flows[e] * (rate / total), e) for e in order if flows[e] > 0.0]


def _join(paths: list[_Path], items: list[_Path], *, by_order: bool) -> list[_Path]:
    """Couple paths with the flows of more parts: in the order of both, or the same executors first."""
    have = [rate for rate, _ in paths]
    want = [rate for rate, _ in items]
    joined: list[_Path] = []

    def pair(i: int, k: int) -> None:
        some = min(have[i], want[k])
        have[i] -= some
        want[k] -= some
        joined.append((some, {**paths[i][1], **items[k][1]}))

    if not by_order:
        # Same type as the part just before, then as any part before.
        for recent in (True, False):
            for i, (_, at) in enumerate(paths):
                seen = [list(at.values())[-1]] if recent else list(at.values())
                for k, (_, more) in enumerate(items):
                    if have[i] > 0.0 and want[k] > 0.0 and next(iter(more.values())) in seen:
                        pair(i, k)
    i = k = 0
    while i < len(have) and k < len(want):
        if have[i] <= 0.0:
            i += 1
        elif want[k] <= 0.0:
            k += 1
        else:
            pair(i, k)
    return [(rate, at) for rate, at in joined if rate > 0.0]


def _name(klass: ClassDemand, route: int, region: str, paths: list[_Path]) -> list[RouteFlow]:
    """Return paths with equal steps as one, the parts in the order of the route."""
    rates: dict[tuple[tuple[int, tuple[str, ...]], ...], float] = {}
    for rate, at in paths:
        steps: list[tuple[int, tuple[str, ...]]] = []
        for part in dict.fromkeys(klass.routes[route]):
            if steps and steps[-1][0] == at[part]:
                steps[-1] = (at[part], (*steps[-1][1], part))
            else:
                steps.append((at[part], (part,)))
        rates[tuple(steps)] = rates.get(tuple(steps), 0.0) + rate
    return [
        RouteFlow(*klass.key, region, rate, steps, route) for steps, rate in sorted(rates.items())
    ]
