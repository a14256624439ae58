"""The few templates that a quick plan is made of: single nodes of all kinds, and sets of promising ones.

Template libraries hold every set of nodes worth having, which takes seconds for fleets of many kinds. Most
of what a cheap plan uses is of the kinds that carry most per dollar. So a role gets every single node, every
set of equal nodes, and every set of up to `max_nodes_per_instance` nodes of its best kinds, as many of these
as effort allows, laid out exactly (`templates.generate`). Nothing is read from disk; what was made for the
last fleets stays in memory.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.catalog import Catalog
from atoll.core.ids import parse_role
from atoll.plan.problem import Problem
from atoll.solve.templates.generate import (
    RoleTables,
    TemplateLibrary,
    generate,
    multiset_count,
    search_limits,
)
from atoll.solve.templates.library import (
    Libraries,
    Sources,
    alike_roles,
    place_key,
    role_tables,
    slowest_sources,
)

Floats = NDArray[np.float64]

_LEAST_KINDS = 4
_SETS = 12_000
"""Sets of nodes that are laid out, of all roles together: those of about six kinds for twelve roles."""
_MOST_SETS = 3_000
_MOST_KEPT = 256

_KEPT: OrderedDict[tuple[int, str, str], tuple[Catalog, TemplateLibrary]] = OrderedDict()
"""Libraries made last, by what a role is asked, where, and which kinds were tried."""


def promising_libraries(problem: Problem, catalog: Catalog) -> Libraries:
    """Return templates of every role: all single nodes, and sets of the kinds that carry most per dollar."""
    usd = _cheapest(problem)
    sources: Sources | None = None
    roles: dict[str, TemplateLibrary] = {}
    place = place_key(problem) + json.dumps(usd)
    every = alike_roles(problem)
    effort = min(_MOST_SETS, _SETS // max(1, len(every)))
    place = f"{place} {effort}"
    for asked, alike in every.items():
        key = (id(catalog), asked, place)
        known = _KEPT.get(key)
        if known is None or known[0] is not catalog:
            if sources is None:
                sources = {kind: slowest_sources(problem, catalog, kind) for kind in problem.kinds}
            known = (catalog, _make(problem, catalog, alike[0], sources, usd, effort))
            _KEPT[key] = known
            while len(_KEPT) > _MOST_KEPT:
                _KEPT.popitem(last=False)
        _KEPT.move_to_end(key)
        roles |= dict.fromkeys(alike, known[1])
    return Libraries(problem.kinds, {str(r): roles[str(r)] for r in problem.roles})


def _cheapest(problem: Problem) -> list[float]:
    """What a node of each kind costs at least, as its share of a machine; inf where none is to be had."""
    usd = dict.fromkeys(problem.kinds, np.inf)
    for offer in problem.offers:
        if offer.available > 0:
            for gpus, kind in zip(offer.sizes, offer.kinds, strict=True):
                usd[kind] = min(usd[kind], offer.usd_per_hour * gpus / offer.gpus)
    return list(usd.values())


def _make(
    problem: Problem,
    catalog: Catalog,
    role: str,
    sources: Sources,
    usd: Sequence[float],
    effort: int,
) -> TemplateLibrary:
    tables = role_tables(problem, catalog, parse_role(role), sources=sources)
    most = problem.settings.max_nodes_per_instance
    price = np.array(usd)
    best = _most_promising(tables, price, _number_of_kinds(len(usd), most, effort))
    nodes, _ = search_limits(len(best), most)
    found = generate(_only(tables, best), nodes)
    counts = np.zeros((len(found), len(tables.node_types)), np.int8)
    counts[:, best] = found.counts
    others = [c for c in range(len(price)) if c not in best and np.isfinite(price[c])]
    alone = _equal_nodes(tables, others, most)
    return TemplateLibrary(
        tables,
        np.concatenate([counts, alone[0]]),
        np.concatenate([found.throughput, alone[1]]),
        found.multisets + len(alone[1]),
        nodes,
        found.max_kinds,
    )


def _number_of_kinds(kinds: int, nodes: int, effort: int) -> int:
    """How many kinds may be combined so that there are no more than `effort` sets of them."""
    number = min(kinds, _LEAST_KINDS)
    while number < kinds and multiset_count(number + 1, nodes) <= effort:
        number += 1
    return number


def _most_promising(tables: RoleTables, usd: Floats, number: int) -> list[int]:
    """The kinds that carry most layers times flow per dollar, in any number of stages."""
    held = np.arange(tables.layers + 1)
    work = (tables.steady * held).max(axis=(0, 1, 3)) / tables.layers
    with np.errstate(divide="ignore", invalid="ignore"):
        worth = np.where(np.isfinite(usd), work / np.maximum(usd, 1e-6), 0.0)
    order = np.argsort(-worth, kind="stable")
    return sorted(int(c) for c in order[:number] if worth[c] > 0.0) or [int(order[0])]


def _only(tables: RoleTables, kinds: Sequence[int]) -> RoleTables:
    """Capacities of some kinds only."""
    return replace(
        tables,
        node_types=tuple(tables.node_types[c] for c in kinds),
        rates=np.ascontiguousarray(tables.rates[:, :, list(kinds)]),
        memory_bytes=tuple(tables.memory_bytes[c] for c in kinds),
    )


def _equal_nodes(
    tables: RoleTables, kinds: Sequence[int], most: int
) -> tuple[NDArray[np.int8], Floats]:
    """Templates of nodes of one kind, for some kinds."""
    counts, rates = [np.zeros((0, len(tables.node_types)), np.int8)], [np.zeros(0)]
    for c in kinds:
        found = generate(_only(tables, [c]), search_limits(1, most)[0])
        some = np.zeros((len(found), len(tables.node_types)), np.int8)
        some[:, c] = found.counts[:, 0]
        counts.append(some)
        rates.append(found.throughput)
    return np.concatenate(counts), np.concatenate(rates)
