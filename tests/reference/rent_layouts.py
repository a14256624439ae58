"""What every small set of nodes carries of a role, by trying every partition, order and cut.

Written from the problem alone: it knows `plan.capacities` and no solver. Throughputs are not rounded. Of a
kind of node that several machines or regions give, the least that any of them carries counts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.catalog import Catalog
from atoll.catalog.link_table import Link
from atoll.core.ids import RoleId, parse_node_type
from atoll.plan.capacities import NodeSource, node_source, role_table
from atoll.plan.handover import cut_sizes
from atoll.plan.problem import Problem

Floats = NDArray[np.float64]
Kinds = tuple[str, ...]
"""A multiset of kinds of nodes, sorted."""

_FIRST, _MIDDLE, _LAST, _WHOLE = range(4)


@dataclass(frozen=True)
class Cut:
    """A layout: the kinds of each stage, where each stage ends, and what the slowest carries per second."""

    stages: tuple[Kinds, ...]
    ends: tuple[int, ...]
    throughput: float


def rates_by_kind(
    problem: Problem, catalog: Catalog, role: RoleId, *, tp: int | None = None
) -> dict[str, Floats]:
    """Return, by kind, what a node carries per position, number of stages and layers, per second.

    With `tp` all of its GPUs that it splits layers over are so many.
    """
    service = problem.service_of(role)
    tables: dict[str, Floats] = {}
    cuts = cut_sizes(problem, catalog)
    for kind in problem.kinds_for(service.name):
        sources = [
            node_source(catalog, kind, region=offer.region, machine=offer.node_type)
            for offer in problem.offers
            if kind in offer.kinds and parse_node_type(kind).gpu_count in cuts[offer.key]
        ]
        # Wherever its nodes come from, a layout must hold: each way of joining GPUs, over the worst link.
        worst = Link(
            min(source.link.bandwidth_bytes_per_s for source in sources),
            max(source.link.latency_s for source in sources),
        )
        tables[kind] = np.minimum.reduce(
            [
                role_table(
                    problem,
                    catalog,
                    service,
                    role,
                    kind,
                    problem.settings.stages,
                    source=NodeSource(source.node, worst),
                    tp=tp,
                )
                for source in {source.node.interconnect.name: source for source in sources}.values()
            ]
        )
    return tables


def best_cuts(
    tables: Mapping[str, Floats],
    max_nodes: int,
    memory_bytes: Mapping[str, float],
    memory_limit: float,
) -> dict[Kinds, Cut]:
    """Return the best layout of every multiset of kinds that carries anything.

    Of several nodes those count that have no more than `memory_limit` bytes together; one node always does.
    """
    cuts: dict[Kinds, Cut] = {}
    for size in range(1, max_nodes + 1):
        for kinds in itertools.combinations_with_replacement(sorted(tables), size):
            if size > 1 and sum(memory_bytes[kind] for kind in kinds) > memory_limit:
                continue
            cut = best_cut(tables, kinds)
            if cut.throughput > 0.0:
                cuts[kinds] = cut
    return cuts


def worth_having(cuts: Mapping[Kinds, Cut]) -> dict[Kinds, Cut]:
    """Leave out layouts whose nodes carry as much with a node idle, or as two instances side by side.

    Both use no node that the layout does not, in the same region, so no plan gets worse.
    """
    useful: dict[Kinds, Cut] = {}
    for kinds, cut in cuts.items():
        parts = (
            (part, tuple(sorted((Counter(kinds) - Counter(part)).elements())))
            for size in range(1, len(kinds))
            for part in set(itertools.combinations(kinds, size))
        )
        apart = (
            sum(cuts[some].throughput for some in both if some in cuts)
            for both in ((a, b) for a, b in parts)
        )
        if cut.throughput > max(apart, default=0.0):
            useful[kinds] = cut
    return useful


def best_cut(tables: Mapping[str, Floats], kinds: Kinds) -> Cut:
    """Return the best layout of one multiset of kinds."""
    first = next(iter(tables.values()))
    max_stages, layers = first.shape[1], first.shape[2] - 1
    side_by_side = sum(float(tables[kind][_WHOLE, 0, layers]) for kind in kinds)
    best = Cut((kinds,), (layers,), side_by_side)
    for stages in range(2, min(len(kinds), max_stages, layers) + 1):
        for groups in ordered_partitions(kinds, stages):
            rates = [
                _stage_rates(tables, group, stages, place) for place, group in enumerate(groups)
            ]
            found = cut_layers(rates, layers)
            if found is not None and found[1] > best.throughput:
                best = Cut(groups, found[0], found[1])
    return best


def _stage_rates(tables: Mapping[str, Floats], group: Kinds, stages: int, place: int) -> Floats:
    """What a stage carries, by the number of layers that it holds."""
    position = _FIRST if place == 0 else _LAST if place == stages - 1 else _MIDDLE
    rates: Floats = np.sum([tables[kind][position, stages - 1] for kind in group], axis=0)
    return rates


def cut_layers(rates: Sequence[Floats], layers: int) -> tuple[tuple[int, ...], float] | None:
    """Share the layers out so that the slowest stage carries most: (where stages end, what it carries).

    best[s][l] = max over j of min(best[s - 1][l - j], rate_s(j)): nothing is assumed of the rates.
    """
    best = rates[0].copy()
    best[0] = 0.0
    choice: list[NDArray[np.int64]] = []
    before, held = _splits(layers)
    for rate in rates[1:]:
        carried = np.where(before >= 0, np.minimum(best[before], rate[held]), 0.0)
        taken = np.argmax(carried, axis=1)
        best = np.take_along_axis(carried, taken[:, None], axis=1)[:, 0]
        choice.append(taken)
    if best[layers] <= 0.0:
        return None
    ends = [layers]
    for taken in reversed(choice):
        ends.append(ends[-1] - int(taken[ends[-1]]))
    return tuple(reversed(ends)), float(best[layers])


@lru_cache(maxsize=32)
def _splits(layers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For l layers in all and j of them in the last stage: l - j (-1: impossible) and j."""
    total = np.arange(layers + 1)[:, None]
    held = np.broadcast_to(np.arange(layers + 1)[None, :], (layers + 1, layers + 1))
    before = np.where((held >= 1) & (total - held >= 1), total - held, -1)
    return before, held


@lru_cache(maxsize=4096)
def _partitions(pattern: tuple[int, ...], groups: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    found = set()
    for where in itertools.product(range(groups), repeat=len(pattern)):
        if len(set(where)) == groups:
            found.add(
                tuple(
                    tuple(p for p, place in zip(pattern, where, strict=True) if place == group)
                    for group in range(groups)
                )
            )
    return tuple(sorted(found))


def ordered_partitions(kinds: Kinds, groups: int) -> Iterator[tuple[Kinds, ...]]:
    """Yield every way to divide a sorted multiset into so many groups that stand in an order."""
    names = sorted(set(kinds))
    pattern = tuple(names.index(kind) for kind in kinds)
    for split in _partitions(pattern, groups):
        yield tuple(tuple(names[p] for p in group) for group in split)
