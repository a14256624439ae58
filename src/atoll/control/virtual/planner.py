"""Planning the same fleet again and again, quickly, over templates whose capacities are known.

Where services run both phases together on whole machines and nothing but availability limits the whole, they
compete for nothing as long as there are machines enough: each is the cheapest cover of its demand by
instances, a knapsack, and the cheapest plan is all of them side by side. That takes milliseconds:

    minimise  sum_j c_j n_j   subject to   sum_j t_j n_j >= D,  0 <= n_j <= u_j

over items j: a template in a region on a market, or what runs already. New ones cost 1 + K times their rent.
It is solved on a grid of demand, as `solve.cover` does. Whatever else a problem asks for, and wherever
machines are short, the usual allocation answers, with the same templates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import UsageError
from atoll.plan.plan import Instance, Market, OfferKey, Plan
from atoll.prove.templates import SizedTemplate, size_for_share
from atoll.solve.derating import Derating, find_templates, node_set

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.problem import Offer, Problem, Service
    from atoll.solve.templates.library import Libraries

Bools = NDArray[np.bool_]

GRID = 3000
"""Steps of demand; a cover is dearer than the cheapest by about as many of them as it has instances."""
_KEEP = 1e-6
"""Share of its price that what runs is cheaper by, so that equal instances are kept."""
_GAP, _WORK = 5e-3, 0.2
"""Proven gap and share of the usual effort of the usual allocation, where it is needed."""
_ENOUGH = 1.0 - 1e-9
_MORE = (0.0, 1e-4, 3e-4, 1e-3, 3e-3)
"""By how much more is covered, in turn, until rounding leaves nothing uncovered."""


@dataclass(frozen=True, slots=True)
class _CoverItem:
    """Something to cover demand with: so many times at most, at a cost and a throughput each."""

    cost: float
    per_s: float
    most: int
    machines: tuple[tuple[OfferKey, int], ...]
    template: SizedTemplate | None = None
    region: str = ""
    markets: tuple[tuple[str, Market], ...] = ()
    running: tuple[Instance, ...] = ()


class TemplatePlanner:
    """A planner for `decide`: a problem in, the cheapest plan of known templates out.

    `quick` counts plans by covers, `slow` those of the usual allocation. Equal problems have equal plans.
    """

    def __init__(self, catalog: Catalog, templates: Iterable[SizedTemplate]) -> None:
        self.catalog = catalog
        self.templates = tuple(templates)
        if not self.templates:
            raise UsageError("no template keeps its promises", hint="promise less, or offer more")
        self.quick = self.slow = 0
        self._by_role: dict[str, list[SizedTemplate]] = {}
        for one in self.templates:
            self._by_role.setdefault(one.role, []).append(one)
        self._known = {(one.role, one.nodes): one for one in self.templates}
        self._made: dict[object, Instance] = {}
        self._covers: dict[object, tuple[int, ...] | None] = {}
        self._libraries: dict[tuple[str, ...], Libraries] = {}

    def __call__(self, asked: Problem) -> Plan:
        """Return the plan of a problem."""
        found = self._cover_all(asked) if _is_separable(asked) else None
        if found is None:
            self.slow += 1
            return self._allocate(asked)
        self.quick += 1
        return found

    def per_s(self, instance: Instance) -> float:
        """Return what an instance carries: what its template does, or what it says itself."""
        known = self._known.get((instance.role, node_set(instance)))
        return instance.throughput_per_s if known is None else known.per_s

    def _cover_all(self, asked: Problem) -> Plan | None:
        """Cover every service by itself; None where they do not all fit."""
        offers = {offer.key: offer for offer in asked.offers}
        used: Counter[OfferKey] = Counter()
        instances: list[Instance] = []
        for service in asked.services:
            items = self._list_items(asked, service, offers)
            counts = self._cover(items, service.demand_per_s)
            if counts is None:
                return None
            number = 0
            for item, count in zip(items, counts, strict=True):
                for key, nodes in item.machines:
                    used[key] += nodes * count
                if item.template is None:
                    instances += [self._keep(one, offers) for one in item.running[:count]]
                    continue
                for _ in range(count):
                    made = self._make(item, offers)
                    instances.append(made.model_copy(update={"id": f"{service.name}-{number}"}))
                    number += 1
        if any(count > offers[key].available for key, count in used.items()):
            return None
        usd = sum(count * offers[key].usd_per_hour for key, count in used.items())
        fresh = sum(one.usd_per_hour for one in instances if not one.kept)
        init = asked.settings.init_penalty * fresh
        return Plan(
            problem_hash="",
            problem_name=asked.name,
            instances=tuple(instances),
            served_fraction={service.name: 1.0 for service in asked.services},
            usd_per_hour=usd,
            init_usd=init,
            objective=usd + init,
            status="feasible",
            solver="cover",
        )

    def _list_items(
        self, asked: Problem, service: Service, offers: Mapping[OfferKey, Offer]
    ) -> list[_CoverItem]:
        (role,) = map(str, service.roles)
        demand = service.demand_per_s
        items = self._list_running(asked, role, offers)
        standing = Counter({_place_of(item): item.most for item in items})
        penalty = 1.0 + asked.settings.init_penalty
        for template in self._by_role.get(role, ()):
            if not all(service.allows(kind) for kind, _ in template.nodes):
                continue
            needed = math.ceil(demand / template.per_s) + 1
            here = _places(template, asked.regions, offers)
            here.sort(key=lambda place: (place[0], place[1], place[2]))
            for rent, region, markets, machines in here:
                most = min(offers[key].available // nodes for key, nodes in machines)
                most -= standing[region, machines]
                if most <= 0:
                    continue
                items.append(
                    _CoverItem(
                        penalty * rent, template.per_s, min(most, needed), machines, template,
                        region, markets,
                    )  # fmt: skip
                )
                needed -= most
                if needed <= 0:
                    break  # dearer places of the same template are never needed
        items.sort(key=lambda item: item.cost / item.per_s)
        return items

    def _list_running(
        self, asked: Problem, role: str, offers: Mapping[OfferKey, Offer]
    ) -> list[_CoverItem]:
        groups: dict[tuple[object, float], list[Instance]] = {}
        for one in asked.running:
            if one.role == role and all(key in offers for key in _keys_of(one)):
                groups.setdefault((_machines_of(one), self.per_s(one)), []).append(one)
        items = []
        for (_, per_s), group in sorted(groups.items(), key=lambda pair: pair[1][0].id):
            machines = _machines_of(group[0])
            rent = sum(offers[key].usd_per_hour * nodes for key, nodes in machines)
            if per_s > 0.0:
                items.append(
                    _CoverItem(
                        rent * (1.0 - _KEEP), per_s, len(group), machines, None,
                        group[0].region, (), tuple(group),
                    )  # fmt: skip
                )
        return items

    def _cover(self, items: Sequence[_CoverItem], demand: float) -> tuple[int, ...] | None:
        """Return how many of each item cover the demand most cheaply; None where all do not."""
        if demand <= 0.0:
            return (0,) * len(items)
        key = (demand, tuple((item.cost, item.per_s, item.most) for item in items))
        if key not in self._covers:
            if len(self._covers) > 4096:
                self._covers.clear()
            self._covers[key] = _find_cover(items, demand)
        return self._covers[key]

    def _keep(self, one: Instance, offers: Mapping[OfferKey, Offer]) -> Instance:
        usd = sum(offers[key].usd_per_hour * nodes for key, nodes in _machines_of(one))
        update = {"kept": True, "usd_per_hour": usd, "throughput_per_s": self.per_s(one)}
        return one.model_copy(update=update)

    def _make(self, item: _CoverItem, offers: Mapping[OfferKey, Offer]) -> Instance:
        """Return a new instance of a template, at today's price."""
        assert item.template is not None
        key = (item.template.role, item.template.nodes, item.region, item.markets)
        if key not in self._made:
            markets = dict(item.markets)
            nodes = tuple(
                node.model_copy(
                    update={
                        "market": markets[node.kind], "node_type": node.kind,
                        "slot": None, "gpu_ids": None,
                    }  # fmt: skip
                )
                for node in item.template.instance.nodes
            )
            self._made[key] = item.template.instance.model_copy(
                update={"nodes": nodes, "region": item.region, "kept": False}
            )
        usd = sum(offers[at].usd_per_hour * nodes for at, nodes in item.machines)
        return self._made[key].model_copy(update={"usd_per_hour": usd})

    def _allocate(self, asked: Problem) -> Plan:
        """Answer with the usual allocation over the same templates."""
        from atoll.solve.rent import optimal

        sized = size_for_share(asked).replace(running=asked.running)
        derating = Derating(
            {(one.role, one.nodes): one.share for one in self.templates}, default=0.0
        )
        drafted = optimal.draft(
            sized,
            self.catalog,
            self._reduce(sized),
            deadline_s=600.0,
            gap=_GAP,
            work=_WORK,
            derating=derating,
        )
        return drafted.plan()

    def _reduce(self, asked: Problem) -> Libraries:
        """Return the libraries with the known templates alone."""
        from atoll.solve.templates.library import template_libraries

        if asked.kinds not in self._libraries:
            whole = template_libraries(asked, self.catalog)
            roles = {}
            for role, library in whole.roles.items():
                sets = [one.nodes for one in self._by_role.get(role, ())]
                found = find_templates(library.counts, library.tables.node_types, sets)
                rows = np.array(sorted({int(i) for at in found.values() for i in at}), np.int64)
                counts = np.ascontiguousarray(library.counts[rows])
                roles[role] = replace(
                    library, counts=counts, throughput=library.throughput[rows]
                )
            self._libraries[asked.kinds] = replace(whole, roles=roles)
        return self._libraries[asked.kinds]


def _is_separable(asked: Problem) -> bool:
    """Whether services share nothing but the machines on offer, whole ones."""
    limits = asked.limits
    free = (
        limits.budget_usd_per_hour is None
        and limits.spot_share is None
        and limits.max_nodes is None
        and limits.spread == 1
        and limits.survive == 0
    )
    return (
        free
        and asked.cluster is None
        and all(service.phases == "together" for service in asked.services)
        and all(len(offer.sizes) == 1 for offer in asked.offers)
    )


def _places(
    template: SizedTemplate, regions: Iterable[str], offers: Mapping[OfferKey, Offer]
) -> list[tuple[float, str, tuple[tuple[str, Market], ...], tuple[tuple[OfferKey, int], ...]]]:
    """Return where a template can stand: rent, region, the market of each kind, machines of offers."""
    found = []
    for region in regions:
        choices: list[list[OfferKey]] = []
        for kind, _ in template.nodes:
            keys = [(region, kind, market) for market in _MARKETS]
            choices.append([key for key in keys if key in offers])  # type: ignore[misc]
        for keys in product(*choices):
            machines = tuple(
                (key, nodes) for key, (_, nodes) in zip(keys, template.nodes, strict=True)
            )
            rent = sum(offers[key].usd_per_hour * nodes for key, nodes in machines)
            markets = tuple((kind, market) for _, kind, market in keys)
            found.append((rent, region, markets, tuple(sorted(machines))))
    return found


_MARKETS: tuple[Market, ...] = ("owned", "on-demand", "spot")


def _keys_of(one: Instance) -> list[OfferKey]:
    return [(one.region_of(node), node.node_type, node.market) for node in one.nodes]


def _machines_of(one: Instance) -> tuple[tuple[OfferKey, int], ...]:
    return tuple(sorted(Counter(_keys_of(one)).items()))


def _place_of(item: _CoverItem) -> tuple[str, tuple[tuple[OfferKey, int], ...]]:
    return (item.region, item.machines)


def _covers(items: Sequence[_CoverItem], counts: Sequence[int], demand: float) -> bool:
    carried = sum(item.per_s * count for item, count in zip(items, counts, strict=True))
    return carried >= demand * _ENOUGH


def _find_cover(items: Sequence[_CoverItem], demand: float) -> tuple[int, ...] | None:
    """Return the cheapest cover found; None where all items together fall short.

    Rounded to the nearest step a cover may fall short by a hair: then a hair more is covered.
    """
    for more in _MORE:
        found = _cover_grid(items, demand * (1.0 + more), nearest=True)
        if found is not None and _covers(items, found, demand):
            return found
    return _cover_grid(items, demand, nearest=False)


def _cover_grid(
    items: Sequence[_CoverItem], demand: float, *, nearest: bool
) -> tuple[int, ...] | None:
    """Return the cheapest cover on the grid, items in powers of two; None where all fall short.

    What items carry is rounded to steps, or rounded down, which never promises too much.
    """
    step = demand / GRID
    parts: list[tuple[int, int, float, int]] = []
    for at, item in enumerate(items):
        weight = round(item.per_s / step) if nearest else math.floor(item.per_s / step)
        most = min(item.most, math.ceil(GRID / weight)) if weight > 0 else 0
        size = 1
        while most > 0:
            size = min(size, most)
            parts.append((at, size, item.cost * size, weight * size))
            most -= size
            size *= 2
    least = np.full(GRID + 1, np.inf)
    least[0] = 0.0
    taken = np.zeros((len(parts), GRID + 1), np.bool_)
    candidate = np.empty(GRID + 1)
    for number, (_, _, cost, weight) in enumerate(parts):
        weight = min(weight, GRID)
        candidate[:weight] = cost
        np.add(least[: GRID + 1 - weight], cost, out=candidate[weight:])
        np.less(candidate, least, out=taken[number])
        np.minimum(candidate, least, out=least)
    if not np.isfinite(least[GRID]):
        return None
    counts = [0] * len(items)
    left = GRID
    for number in range(len(parts) - 1, -1, -1):
        if left > 0 and taken[number, left]:
            at, size, _, weight = parts[number]
            counts[at] += size
            left = max(0, left - weight)
    return tuple(counts)


