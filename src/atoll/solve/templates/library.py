"""From a problem to the template libraries of its roles."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.catalog.links import Link
from atoll.core.ids import RoleId, parse_node_type
from atoll.plan.capacities import POSITIONS, NodeSource, node_source, role_table
from atoll.plan.handover import cut_sizes
from atoll.plan.problem import Problem
from atoll.solve.progress import OnProgress, Progress
from atoll.solve.templates.cache import TemplateCache
from atoll.solve.templates.generate import RoleTables, TemplateLibrary, generate, search_limits

_FIRST_NODES = 3
"""Where time may run out, all roles get their sets of so few nodes before any gets larger ones."""

RoleProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Libraries:
    """Template libraries of all roles of a problem, over the same kinds of nodes.

    `cut_short`: time was up before all sets of nodes were searched; then `roles[...].max_nodes` says how far
    each role got.
    """

    kinds: tuple[str, ...]
    roles: Mapping[str, TemplateLibrary]
    cut_short: bool = False

    @property
    def node_types(self) -> tuple[str, ...]:
        """The kinds of nodes that templates are made of."""
        return self.kinds


def role_tables(problem: Problem, catalog: Catalog, role: RoleId) -> RoleTables:
    """Return the capacities of a role on every kind of node of the problem that its service may use.

    A kind may come from machines of its own and from slices of several larger ones, in regions with links of
    their own. A template must hold wherever its nodes come from, so each kind counts as its slowest source.
    Kinds the service must not use carry nothing.
    """
    service = problem.service_of(str(role))
    kinds, settings = problem.kinds, problem.settings
    stages = settings.max_stages or settings.max_nodes_per_instance
    layers = catalog.model(service.model).llm.layers
    rates = np.zeros((stages, 3, len(kinds), layers + 1))
    for c, kind in enumerate(kinds):
        if not service.allows(kind):
            continue
        table = np.minimum.reduce(
            [
                role_table(problem, catalog, service, role, kind, stages, source=source)
                for source in slowest_sources(problem, catalog, kind)
            ]
        )
        # POSITIONS is first, middle, last, whole; a single stage holds the whole model.
        rates[0, 0, c] = table[3, 0]
        rates[1:, :, c] = np.moveaxis(table[:3, 1:], 0, 1)
    memory = tuple(float(catalog.node(kind).memory_bytes) for kind in kinds)
    limit = settings.memory_ratio * catalog.model(service.model).llm.weight_bytes
    return RoleTables(str(role), kinds, rates, memory, limit)


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
) -> Libraries:
    """Return the template library of every role; `progress(role, done, total)` as they are computed.

    Once `until()` holds, roles that are not done get what there is: templates of fewer nodes, and of single
    nodes always.
    """
    assert [p.value for p in POSITIONS] == ["first", "middle", "last", "whole"]
    most = problem.settings.max_nodes_per_instance
    whole, _ = search_limits(len(problem.kinds), most)
    tables = {str(role): role_tables(problem, catalog, role) for role in problem.roles}
    make = generate if cache is None else cache.library
    by_role: dict[str, TemplateLibrary] = {}
    if until is not None and whole > _FIRST_NODES:
        for role, own in tables.items():
            known = cache.read(own, most) if cache is not None else None
            if known is None:
                known = generate(own, _FIRST_NODES, until=until)
            by_role[role] = known
    for role, own in tables.items():

        def report(done: int, total: int, role: str = role) -> None:
            if progress is not None:
                progress(role, done, total)

        first = by_role.get(role)
        if first is None or (first.max_nodes < whole and not (until is not None and until())):
            found = make(own, most, progress=report, until=until)
            if first is None or found.max_nodes > first.max_nodes:
                by_role[role] = found
        report(1, 1)
    cut_short = any(library.max_nodes < whole for library in by_role.values())
    return Libraries(problem.kinds, by_role, cut_short)


_MOST_KEPT = 2
_KEPT: OrderedDict[str, tuple[Catalog, Libraries]] = OrderedDict()
"""Libraries used last, by `template_key`: planning again with other prices or rates needs them again."""


def template_libraries(
    problem: Problem,
    catalog: Catalog,
    *,
    cached: bool = True,
    on_progress: OnProgress | None = None,
    until: Callable[[], bool] | None = None,
) -> Libraries:
    """Return the templates of all roles of a problem: those of the last problems, from disk, or new ones.

    With `cached` False nothing is read from disk and nothing kept there. For `until` see `libraries`.
    """
    cache = TemplateCache() if cached else None
    key = f"{template_key(problem)} {cache and cache.folder}"
    kept = _KEPT.get(key)
    if kept is not None and kept[0] == catalog and (not kept[1].cut_short or _is_over(until)):
        _KEPT.move_to_end(key)
        return kept[1]
    teller = _teller(problem, on_progress)
    made = libraries(problem, catalog, cache=cache, progress=teller, until=until)
    _KEPT[key] = (catalog, made)
    while len(_KEPT) > _MOST_KEPT:
        _KEPT.popitem(last=False)
    return made


def _is_over(until: Callable[[], bool] | None) -> bool:
    """Whether time is up already: then templates that were cut short are as good as can be."""
    return until is not None and until()


def template_key(problem: Problem) -> str:
    """Return a hash of all that templates depend on, the catalog apart.

    Rates, priorities, prices, availability, limits and what runs are not among it.
    """
    services = [
        service.model_dump(mode="json", exclude={"rate_per_s", "headroom", "priority", "burstiness"})
        for service in problem.services
    ]
    settings = problem.settings.model_dump(
        mode="json", include={"max_nodes_per_instance", "memory_ratio", "max_stages", "engine", "sized_for"}
    )
    places = sorted({(offer.region, offer.node_type, offer.whole) for offer in problem.offers})
    return hashlib.sha256(json.dumps([services, settings, places]).encode()).hexdigest()


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
