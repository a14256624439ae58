"""The few templates that a quick plan is made of: single nodes of all kinds, and sets of promising ones.

Template libraries hold every set of nodes worth having, which takes seconds for fleets of many kinds. Most
of what a cheap plan uses is of the kinds that carry most per dollar. So a role gets every single node, every
set of equal nodes, and every set of up to `max_nodes_per_instance` nodes of its best kinds, as many of these
as effort allows, laid out exactly (`templates.generate`). What was made for the last fleets stays in memory,
and on disk (`fast_cache`).
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
from atoll.solve.array_types import Floats
from atoll.solve.rent.fast.fast_cache import Arrays, RoleCache, code_digest, facts_of
from atoll.solve.templates.generate import (
    EngineSearch,
    EngineTables,
    RoleTables,
    TemplateLibrary,
    equal_nodes,
    generate,
    merge,
    multiset_count,
    search_limits,
)
from atoll.solve.templates.library import (
    Libraries,
    Sources,
    alike_roles,
    engine_searches,
    place_key,
    role_tables,
    slowest_sources,
)

_MIN_KINDS = 4
_SETS = 12_000
"""Sets of nodes that are laid out, of all roles together: those of about six kinds for twelve roles."""
_MAX_SETS = 3_000
_MAX_KEPT = 256

_KEPT: OrderedDict[tuple[int, str, str], tuple[Catalog, TemplateLibrary]] = OrderedDict()
"""Libraries made last, by what a role is asked, where, and which kinds were tried."""


def promising_libraries(problem: Problem, catalog: Catalog, *, cached: bool = True) -> Libraries:
    """Return templates of every role: all single nodes, and sets of the kinds that carry most per dollar.

    With `cached` False nothing is read from disk and nothing kept there.
    """
    makers: _Maker | None = None
    roles: dict[str, TemplateLibrary] = {}
    usd = _cheapest(problem)
    every = alike_roles(problem)
    effort = min(_MAX_SETS, _SETS // max(1, len(every)))
    place = f"{place_key(problem)}{json.dumps(usd)} {effort}"
    for asked, alike in every.items():
        key = (id(catalog), asked, place)
        known = _KEPT.get(key)
        if known is None or known[0] is not catalog:
            if makers is None:
                makers = _Maker(problem, catalog, usd, effort, RoleCache() if cached else None)
            known = (catalog, makers.library(asked, alike[0]))
            _KEPT[key] = known
            while len(_KEPT) > _MAX_KEPT:
                _KEPT.popitem(last=False)
        _KEPT.move_to_end(key)
        roles |= dict.fromkeys(alike, known[1])
    if makers is not None:
        makers.close()
    return Libraries(problem.kinds, {str(r): roles[str(r)] for r in problem.roles})


def _cheapest(problem: Problem) -> list[float]:
    """Return the least price of a node of each kind, as its share of a machine; inf where there is none."""
    usd = dict.fromkeys(problem.kinds, np.inf)
    for offer in problem.offers:
        if offer.available > 0:
            for gpus, kind in zip(offer.sizes, offer.kinds, strict=True):
                usd[kind] = min(usd[kind], offer.usd_per_hour * gpus / offer.gpus)
    return list(usd.values())


class _Maker:
    """Makes the libraries of a problem's roles, or finds them on disk."""

    def __init__(
        self,
        problem: Problem,
        catalog: Catalog,
        usd: Sequence[float],
        effort: int,
        cache: RoleCache | None,
    ) -> None:
        self.problem, self.catalog, self.usd, self.effort = problem, catalog, usd, effort
        self.cache = cache if code_digest() else None
        self.has_written = False
        self._sources: Sources | None = None
        self._facts = ""
        if self.cache is not None:
            self._facts = f"{code_digest()} {place_key(problem)} {facts_of(problem, catalog)}"

    @property
    def sources(self) -> Sources:
        """Nodes of every kind that are no faster than any on offer."""
        if self._sources is None:
            problem, catalog = self.problem, self.catalog
            self._sources = {
                kind: slowest_sources(problem, catalog, kind) for kind in problem.kinds
            }
        return self._sources

    def library(self, asked: str, role: str) -> TemplateLibrary:
        """Return the templates of a role; `asked` is what it is asked."""
        spec = self.catalog.model(self.problem.service_of(role).model).llm
        key = f"{self._facts} {spec!r} {asked}" if self.cache is not None else ""
        searches = engine_searches(self.problem, self.catalog, parse_role(role))
        made = [self._search(f"{search} {key}", role, search) for search in searches]
        if len(made) == 1 and searches[0].engine is None:
            return made[0][1]
        return merge(self.problem.kinds, made)

    def _search(
        self, key: str, role: str, search: EngineSearch
    ) -> tuple[EngineTables, TemplateLibrary]:
        """Return capacities and templates of one search."""
        tables = self._tables(f"rates {key}", role, search)
        usd = [self.usd[c] for c in search.columns]
        chosen = f"templates {json.dumps(self.usd)} {self.effort} {key}"
        known = None if self.cache is None else _library_of(tables, self.cache.read(chosen))
        if known is None:
            nodes = min(self.problem.settings.max_nodes_per_instance, search.max_nodes)
            known = _make(tables, nodes, usd, self.effort)
            limits = np.array([known.multisets, known.max_nodes, known.max_kinds])
            self._keep(
                chosen,
                {"counts": known.counts, "throughput": known.throughput, "limits": limits},
            )
        return EngineTables(search, tables), known

    def _tables(self, key: str, role: str, search: EngineSearch) -> RoleTables:
        found = None if self.cache is None else self.cache.read(key)
        known = None if found is None else found.get("rates")
        sources = None if known is not None else self.sources
        role_id = parse_role(role)
        tables = role_tables(
            self.problem, self.catalog, role_id, search, sources=sources, known=known
        )
        if tables.rates is not known:
            self._keep(key, {"rates": tables.rates})
        return tables

    def _keep(self, key: str, arrays: Arrays) -> None:
        if self.cache is not None:
            self.cache.write(key, arrays)
            self.has_written = True

    def close(self) -> None:
        """Keep the folder small."""
        if self.cache is not None and self.has_written:
            self.cache.prune()


def _library_of(tables: RoleTables, found: Arrays | None) -> TemplateLibrary | None:
    """The library that was kept, None where it does not fit the tables."""
    if found is None or {"counts", "throughput", "limits"} - set(found):
        return None
    counts, throughput, limits = found["counts"], found["throughput"], found["limits"]
    shape = (len(throughput), len(tables.node_types))
    if counts.shape != shape or counts.dtype != np.int8 or limits.shape != (3,):
        return None
    multisets, max_nodes, max_kinds = (int(value) for value in limits)
    return TemplateLibrary(tables, counts, throughput, multisets, max_nodes, max_kinds)


def _make(tables: RoleTables, max_nodes: int, usd: Sequence[float], effort: int) -> TemplateLibrary:
    price = np.array(usd)
    best = _most_promising(tables, price, _number_of_kinds(len(usd), max_nodes, effort))
    nodes, _ = search_limits(len(best), max_nodes)
    found = generate(_only(tables, best), nodes)
    counts = np.zeros((len(found), len(tables.node_types)), np.int8)
    counts[:, best] = found.counts
    others = [c for c in range(len(price)) if c not in best and np.isfinite(price[c])]
    alone = _equal_nodes(tables, others, max_nodes)
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
    number = min(kinds, _MIN_KINDS)
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
    tables: RoleTables, kinds: Sequence[int], max_nodes: int
) -> tuple[NDArray[np.int8], Floats]:
    """Templates of nodes of one kind, for some kinds."""
    counts, rates = [np.zeros((0, len(tables.node_types)), np.int8)], [np.zeros(0)]
    for c in kinds:
        found = equal_nodes(_only(tables, [c]), max_nodes)
        useful = np.flatnonzero(found > 0.0)
        some = np.zeros((len(useful), len(tables.node_types)), np.int8)
        some[:, c] = useful + 1
        counts.append(some)
        rates.append(found[useful])
    return np.concatenate(counts), np.concatenate(rates)
