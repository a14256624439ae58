"""From a problem to the template libraries of its roles."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.catalog import Catalog
from atoll.catalog.link_table import Link
from atoll.core.ids import Phase, RoleId, parse_node_type, parse_role
from atoll.engines.table import find_engine
from atoll.perf.layers import tp_sizes
from atoll.plan.capacities import POSITIONS, NodeSource, node_source, role_table
from atoll.plan.handover import cut_sizes, handover_engine
from atoll.plan.problem import Problem, Service
from atoll.solve.solve_progress import OnProgress, Progress
from atoll.solve.templates.generate import (
    EngineSearch,
    EngineTables,
    RoleTables,
    TemplateLibrary,
    generate,
    merge,
    search_limits,
)
from atoll.solve.templates.template_cache import TemplateCache

_FIRST_NODES = 3
"""Where time may run out, all roles get their sets of so few nodes before any gets larger ones."""

RoleProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Libraries:
    """Template libraries of all roles of a problem, over the same kinds of nodes.

    `cut_short`: time was up before all sets of nodes were searched; then `roles[...].max_nodes` says how far
    each role got. `complete`: capacities of all roles are there, and not just those of single nodes.
    """

    kinds: tuple[str, ...]
    roles: Mapping[str, TemplateLibrary]
    cut_short: bool = False
    complete: bool = True

    @property
    def node_types(self) -> tuple[str, ...]:
        """The kinds of nodes that templates are made of."""
        return self.kinds


Sources = Mapping[str, tuple[NodeSource, ...]]
"""By kind: nodes of it that are no faster than any on offer (`slowest_sources`)."""


def engine_searches(problem: Problem, catalog: Catalog, role: RoleId) -> tuple[EngineSearch, ...]:
    """Return which layouts of a role are searched, the preferred engine first.

    Free ones where the problem names no engines. An engine without pipelines has single nodes, one with rows
    of equal nodes those beside, for each number of GPUs that nodes have; so has one that runs no copies side
    by side, all GPUs of a node then hold one, also in pipelines of unlike nodes.
    """
    service, kinds = problem.service_of(str(role)), problem.kinds
    usable = [c for c, kind in enumerate(kinds) if service.allows(kind)]
    if not problem.settings.engines:
        return (EngineSearch(None, tuple(range(len(kinds)))),)
    spec = catalog.model(service.model).llm
    apart = role.phase is not Phase.BOTH
    connector = find_engine(handover_engine(problem, catalog, service).name).connector
    searches: list[EngineSearch] = []
    for name in problem.settings.engines:
        engine = find_engine(name)
        if apart and (connector is None or engine.connector != connector):
            continue
        if engine.refuses_launch(service.engine_limits) is not None:
            continue
        whole = engine.max_node_copies == 1
        own = tuple(
            c
            for c in usable
            if engine.refuses(spec, (node := catalog.node(kinds[c])).gpu) is None
            and (not whole or node.count in tp_sizes(spec, node.count))
        )
        if not own:
            continue
        guessing = service.engine_limits.speculative is not None
        # No engine guesses tokens ahead in a pipeline.
        pipelines = "none" if guessing else engine.pipelines_in(role.phase)
        if pipelines == "free":
            searches.append(EngineSearch(name, own, tp="all" if whole else None))
            continue
        rows, copies = pipelines == "rows", engine.max_copies != 1
        if copies:
            searches.append(EngineSearch(name, own, max_nodes=1))
        sizes = sorted({catalog.node(kinds[c]).count for c in own})
        for gpus in sizes if rows or not copies else ():
            if gpus in tp_sizes(spec, gpus):
                alike = tuple(c for c in own if catalog.node(kinds[c]).count == gpus)
                if not copies:
                    searches.append(EngineSearch(name, alike, tp=gpus, max_nodes=1))
                # Ranks of a pipeline do not find each other on one GPU.
                apart_gpus = tuple(c for c in alike if catalog.node(kinds[c]).gpu.shares == 1)
                if rows and apart_gpus:
                    searches.append(EngineSearch(name, apart_gpus, tp=gpus, rows=True))
    return tuple(searches)


def role_tables(
    problem: Problem,
    catalog: Catalog,
    role: RoleId,
    search: EngineSearch | None = None,
    *,
    stages: int | None = None,
    sources: Sources | None = None,
    known: NDArray[np.float64] | None = None,
) -> RoleTables:
    """Return the capacities of a role on every kind of node that is searched and its service may use.

    A kind may come from machines of its own and from slices of several larger ones, in regions with links of
    their own. A template must hold wherever its nodes come from, so each kind counts as its slowest source.
    Kinds the service must not use carry nothing. `search` None is for free layouts of all kinds. `stages` is
    the most there may be, by default those that the problem allows; `sources` are those of all kinds where
    they are known, and `known` are the rates of such tables where those were worked out before.
    """
    service = problem.service_of(str(role))
    search = search or EngineSearch(None, tuple(range(len(problem.kinds))))
    run = problem.run_by(search.engine)
    kinds = tuple(problem.kinds[c] for c in search.columns)
    max_stages = min(stages or _max_stages(problem), search.max_nodes)
    layers = catalog.model(service.model).llm.layers
    shape = (max_stages, 3, len(kinds), layers + 1)
    # Rates from before count only with as many stages, kinds and layers.
    fits = known is not None and known.shape == shape and known.dtype == np.float64
    rates = np.zeros(shape) if known is None or not fits else known
    for c, kind in enumerate(() if fits else kinds):
        if not service.allows(kind):
            continue
        nodes = slowest_sources(problem, catalog, kind) if sources is None else sources[kind]
        split = catalog.node(kind).count if search.tp == "all" else search.tp
        table = np.minimum.reduce(
            [
                role_table(run, catalog, service, role, kind, max_stages, source=node, tp=split)
                for node in nodes
            ]
        )
        # POSITIONS is first, middle, last, whole; a single stage holds the whole model.
        rates[0, 0, c] = table[3, 0]
        rates[1:, :, c] = np.moveaxis(table[:3, 1:], 0, 1)
    memory = tuple(float(catalog.node(kind).memory_bytes) for kind in kinds)
    limit = problem.settings.memory_ratio * catalog.model(service.model).llm.weight_bytes
    return RoleTables(str(role), kinds, rates, memory, limit, search.rows)


def engine_tables(
    problem: Problem,
    catalog: Catalog,
    role: RoleId,
    *,
    stages: int | None = None,
    sources: Sources | None = None,
) -> tuple[EngineTables, ...]:
    """Return the capacities of a role for all that is searched (`engine_searches`)."""
    searches = engine_searches(problem, catalog, role)
    return tuple(
        EngineTables(
            search,
            role_tables(problem, catalog, role, search, stages=stages, sources=sources),
        )
        for search in searches
    )


class MakeLibrary(Protocol):
    """Makes the templates of capacities: `generate`, or a cache in front of it."""

    def __call__(
        self,
        tables: RoleTables,
        max_nodes: int,
        *,
        progress: Callable[[int, int], None] | None = None,
        until: Callable[[], bool] | None = None,
    ) -> TemplateLibrary:
        """Return templates of at most `max_nodes` nodes."""
        ...


def role_library(
    problem: Problem,
    parts: Sequence[EngineTables],
    max_nodes: int,
    *,
    make: MakeLibrary = generate,
    progress: Callable[[int, int], None] | None = None,
    until: Callable[[], bool] | None = None,
) -> TemplateLibrary:
    """Return the templates of a role from all that is searched; see `generate`."""
    kinds = problem.kinds
    if len(parts) == 1 and parts[0].search.engine is None:
        return make(parts[0].tables, max_nodes, progress=progress, until=until)
    whole, _ = search_limits(len(kinds), max_nodes)
    reached, made = whole, []
    for number, part in enumerate(parts):

        def tell(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress(number * total + done, len(parts) * total)

        nodes = min(max_nodes, part.search.max_nodes)
        library = make(part.tables, nodes, progress=tell, until=until)
        if library.max_nodes < search_limits(len(part.search.columns), nodes)[0]:
            reached = min(reached, library.max_nodes)
        made.append((part, library))
    return replace(merge(kinds, made), max_nodes=reached)


def _max_stages(problem: Problem) -> int:
    return problem.settings.max_stages or problem.settings.max_nodes_per_instance


def slowest_sources(problem: Problem, catalog: Catalog, kind: str) -> tuple[NodeSource, ...]:
    """Return nodes of a kind that are no faster than any that is on offer.

    All have the thinnest link of any source and the longest latency; there is one for each way in which
    the machines on offer join their GPUs.
    """
    cuts = cut_sizes(problem, catalog)
    sources = {
        node_source(catalog, kind, region=offer.region, machine=offer.node_type)
        for offer in problem.offers
        if kind in offer.kinds and parse_node_type(kind).gpu_count in cuts[offer.key]
    }
    link = Link(
        min(source.link.bandwidth_bytes_per_s for source in sources),
        max(source.link.latency_s for source in sources),
    )
    joints = {source.node.interconnect.name: source.node for source in sources}
    return tuple(NodeSource(node, link) for _, node in sorted(joints.items()))


def libraries(
    problem: Problem,
    catalog: Catalog,
    *,
    cache: TemplateCache | None = None,
    progress: RoleProgress | None = None,
    until: Callable[[], bool] | None = None,
    single: bool = False,
    start: Libraries | None = None,
    known: Mapping[str, TemplateLibrary] | None = None,
    read: Callable[[float], bool] | None = None,
) -> Libraries:
    """Return the template library of every role; `progress(role, done, total)` as they are computed.

    Roles that are asked the same share theirs. With `until`, all roles first get templates of single nodes,
    then of a few nodes, then of all; once `until()` holds they keep what they have. Where the cache has all
    of the first role, that of the others is read before, while `read` allows: it is told which share of them
    is left. `single` asks for the
    capacities of all sets of nodes, but for templates of single nodes only. `start` are libraries of the
    same problem that were cut short, to go on from; `known` are whole ones of roles that are asked the same
    on the same offers, by what is asked.
    """
    made = _RoleLibraries(problem, catalog, cache, until, known or {})
    if start is not None:
        made.go_on(start)
    elif until is not None:
        made.read_all(read)
        made.take_single_nodes()
    made.take_few_nodes(1 if single else _FIRST_NODES)
    if not single:
        made.take_all(progress)
    return made.result()


class _RoleLibraries:
    """Template libraries of all roles as they grow, by what is asked of a role (`alike_roles`)."""

    def __init__(
        self,
        problem: Problem,
        catalog: Catalog,
        cache: TemplateCache | None,
        until: Callable[[], bool] | None,
        known: Mapping[str, TemplateLibrary],
    ) -> None:
        # `role_tables` reads positions by number.
        assert [p.value for p in POSITIONS] == ["first", "middle", "last", "whole"]
        self.problem, self.catalog, self.cache, self.until = problem, catalog, cache, until
        self.max_nodes = problem.settings.max_nodes_per_instance
        self.whole, _ = search_limits(len(problem.kinds), self.max_nodes)
        self.sources = {kind: slowest_sources(problem, catalog, kind) for kind in problem.kinds}
        self.alike = alike_roles(problem)
        self.found = {key: known[key] for key in self.alike if key in known}
        self.tables: dict[str, tuple[EngineTables, ...]] = {
            key: self._tables_of(library) for key, library in self.found.items()
        }

    @property
    def is_over(self) -> bool:
        """Whether time is up."""
        return self.until is not None and self.until()

    def _make_tables(self, key: str, stages: int | None = None) -> tuple[EngineTables, ...]:
        role = parse_role(self.alike[key][0])
        return engine_tables(self.problem, self.catalog, role, stages=stages, sources=self.sources)

    def _tables_of(self, library: TemplateLibrary) -> tuple[EngineTables, ...]:
        """Return what a library was made from."""
        free = EngineSearch(None, tuple(range(len(self.problem.kinds))))
        return library.made_from or (EngineTables(free, library.tables),)

    def go_on(self, start: Libraries) -> None:
        """Take what was made before."""
        for key, roles in self.alike.items():
            self.found[key] = library = start.roles[roles[0]]
            # Tables of fewer stages were made for single nodes: those are made anew.
            if len(library.tables.rates) == _max_stages(self.problem):
                self.tables[key] = self._tables_of(library)

    def read_all(self, allowed: Callable[[float], bool] | None) -> None:
        """Take what a cache has, up to the first role of which it has not all."""
        left = [key for key in self.alike if key not in self.found]
        for number, key in enumerate(left):
            if self.cache is None or allowed is None or not allowed(1.0 - number / len(left)):
                return
            self.tables[key] = self._make_tables(key)
            found = self._read(self.tables[key])
            if found is None:
                return
            self.found[key] = found

    def _read(self, parts: Sequence[EngineTables]) -> TemplateLibrary | None:
        missing = False

        def make(tables: RoleTables, max_nodes: int, **_: object) -> TemplateLibrary:
            nonlocal missing
            known = None if self.cache is None or missing else self.cache.read(tables, max_nodes)
            missing = known is None
            return generate(tables, 1) if known is None else known

        library = role_library(self.problem, parts, self.max_nodes, make=make)
        return None if missing else library

    def take_single_nodes(self) -> None:
        """Give every role its templates of single nodes, whatever the time."""
        for key in self.alike:
            if key not in self.found:
                self.found[key] = role_library(self.problem, self._make_tables(key, 1), 1)

    def take_few_nodes(self, nodes: int) -> None:
        """Work out capacities; where time may run out, templates of up to so many nodes as well.

        Roles that no single node can serve come first, whatever the time.
        """
        served = {key for key, library in self.found.items() if len(library)}
        max_nodes = min(nodes, self.whole)
        # False sorts first: roles without a template go before the others.
        for key in sorted(self.alike, key=lambda key: key in served):
            if key in served and self.is_over:
                continue
            if key not in self.tables:
                self.tables[key] = self._make_tables(key)
            elif self.found[key].max_nodes >= max_nodes:
                continue
            # Without a deadline, all templates are made at once in `take_all`.
            if self.until is None and max_nodes > 1:
                continue
            until = self.until if key in served else None
            self.found[key] = self._generate(self.tables[key], max_nodes, until)

    def _generate(
        self, parts: Sequence[EngineTables], nodes: int, until: Callable[[], bool] | None
    ) -> TemplateLibrary:
        """Return templates of up to so many nodes, or all of them where a cache has those."""
        if self.cache is not None and nodes >= self.whole:
            return role_library(
                self.problem, parts, self.max_nodes, make=self.cache.library, until=until
            )
        make = generate if self.cache is None else self.cache.library_or_fewer(self.max_nodes)
        return role_library(self.problem, parts, nodes, make=make, until=until)

    def take_all(self, progress: RoleProgress | None) -> None:
        """Give every role all of its templates."""
        make: MakeLibrary = generate if self.cache is None else self.cache.library
        for role, key in self._keys():

            def report(done: int, total: int, role: str = role) -> None:
                if progress is not None:
                    progress(role, done, total)

            done = key in self.found and self.found[key].max_nodes >= self.whole
            if key in self.tables and not done and not self.is_over:
                better = role_library(
                    self.problem,
                    self.tables[key],
                    self.max_nodes,
                    make=make,
                    progress=report,
                    until=self.until,
                )
                # A search that time has ended may have got less far than what is there.
                if key not in self.found or better.max_nodes > self.found[key].max_nodes:
                    self.found[key] = better
            report(1, 1)

    def _keys(self) -> list[tuple[str, str]]:
        """Roles with their keys, in the problem's order."""
        keys = {role: key for key, roles in self.alike.items() for role in roles}
        return [(str(role), keys[str(role)]) for role in self.problem.roles]

    def result(self) -> Libraries:
        roles = {role: self.found[key] for role, key in self._keys()}
        cut_short = any(library.max_nodes < self.whole for library in roles.values())
        complete = len(self.tables) == len(self.alike)
        return Libraries(self.problem.kinds, roles, cut_short, complete)


def alike_roles(problem: Problem) -> dict[str, list[str]]:
    """Return roles that are asked the same, under one key each: they have the same capacities."""
    alike: dict[str, list[str]] = {}
    for role in problem.roles:
        key = f"{role.component}/{role.phase} {_asked(problem.service_of(str(role)))}"
        alike.setdefault(key, []).append(str(role))
    return alike


def _asked(service: Service) -> str:
    """Return all that templates of a service depend on, but for what is on offer."""
    unread = {"name", "rate_per_s", "headroom", "priority"}
    return json.dumps(service.model_dump(mode="json", exclude=unread))


_MAX_KEPT = 2


@dataclass(frozen=True)
class _KeptLibraries:
    """Libraries of a problem, the catalog and offers they are for, and its roles' by what is asked."""

    catalog: Catalog
    libraries: Libraries
    place: str
    by_asked: Mapping[str, TemplateLibrary]


_KEPT: OrderedDict[str, _KeptLibraries] = OrderedDict()
"""Libraries used last, by `template_key`: planning again with other prices or rates needs them again."""


def template_libraries(
    problem: Problem,
    catalog: Catalog,
    *,
    cached: bool = True,
    on_progress: OnProgress | None = None,
    until: Callable[[], bool] | None = None,
    single: bool = False,
    read: Callable[[float], bool] | None = None,
) -> Libraries:
    """Return the templates of all roles of a problem: those of the last problems, from disk, or new ones.

    With `cached` False nothing is read from disk and nothing kept there. For `until`, `single` and `read`
    see `libraries`.
    """
    cache = TemplateCache() if cached else None
    key = f"{template_key(problem)} {cache and cache.folder}"
    kept = _KEPT.get(key)
    start = kept.libraries if kept is not None and kept.catalog == catalog else None
    if start is not None:
        enough = start.complete if single else not start.cut_short
        if enough or (until is not None and until()):
            _KEPT.move_to_end(key)
            return start
    teller = _teller(problem, on_progress)
    place = f"{place_key(problem)} {cache and cache.folder}"
    known = {
        asked: library
        for one in _KEPT.values()
        if one.place == place and not one.libraries.cut_short and one.catalog == catalog
        for asked, library in one.by_asked.items()
    }
    made = libraries(
        problem,
        catalog,
        cache=cache,
        progress=teller,
        until=until,
        single=single,
        start=start,
        known=known,
        read=read,
    )
    by_asked = {asked: made.roles[roles[0]] for asked, roles in alike_roles(problem).items()}
    _KEPT[key] = _KeptLibraries(catalog, made, place, by_asked)
    while len(_KEPT) > _MAX_KEPT:
        _KEPT.popitem(last=False)
    return made


def template_key(problem: Problem) -> str:
    """Return a hash of all that templates depend on, the catalog apart.

    Rates, priorities, prices, availability, limits and what runs are not among it.
    """
    services = [(service.name, _asked(service)) for service in problem.services]
    return hashlib.sha256(json.dumps([services, place_key(problem)]).encode()).hexdigest()


def place_key(problem: Problem) -> str:
    """Return what templates of any service depend on: offers and settings."""
    settings = problem.settings.model_dump(
        mode="json",
        include={
            "max_nodes_per_instance",
            "memory_ratio",
            "max_stages",
            "engine",
            "engines",
            "sized_for",
        },
    )
    places = sorted({(offer.region, offer.node_type, offer.whole) for offer in problem.offers})
    return json.dumps([settings, places])


def _teller(problem: Problem, on_progress: OnProgress | None) -> RoleProgress | None:
    """Tell of templates, role by role."""
    if on_progress is None:
        return None
    roles = [str(role) for role in problem.roles]

    def tell(role: str, done: int, total: int) -> None:
        at = roles.index(role)
        name = role if done < total or at + 1 == len(roles) else roles[at + 1]
        on_progress(Progress("templates", name, (at + done / max(1, total)) / len(roles)))

    return tell
