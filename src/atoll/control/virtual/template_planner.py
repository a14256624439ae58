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

from atoll.core.errors import UsageError
from atoll.plan.plan import Instance, Market, OfferKey, Plan, Route
from atoll.prove.sized_templates import SizedTemplate, size_for_share
from atoll.solve.derating import Derating, find_templates, node_set

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.problem import Problem, Service
    from atoll.solve.templates.library import Libraries

_Machines = tuple[tuple[int, int], ...]
"""How many machines of each offer, by its number."""

GRID = 1200
"""Steps of demand; a cover is dearer than the cheapest by about as many of them as it has instances."""
_KEEP = 1e-6
"""Share of its price that what runs is cheaper by, so that equal instances are kept."""
_GAP = 5e-3
"""Proven gap of the usual allocation, where it is needed."""
_WORK = 0.2
"""Share of the usual effort that it gets."""
_ALL_CARRIED = 1.0 - 1e-9
"""Share of demand from which on it counts as carried: the rest is rounding."""
_MAX_KEPT = 4096
"""Covers that are remembered."""
_DEMAND_MARGINS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3)
"""By how much more is covered, in turn, until rounding leaves nothing uncovered."""


@dataclass(frozen=True, slots=True, eq=False)
class _TemplatePlace:
    """Where a template can stand: the market of each kind in a region, and machines of offers by number."""

    template: SizedTemplate
    region: str
    markets: tuple[tuple[str, Market], ...]
    machines: _Machines


@dataclass(frozen=True, slots=True)
class _CoverItem:
    """Something to cover demand with: so many times at most, at a cost and a throughput each."""

    cost: float
    per_s: float
    most: int
    machines: _Machines
    place: _TemplatePlace | None = None
    running: tuple[Instance, ...] = ()


@dataclass(frozen=True)
class _OfferList:
    """The offers of a problem by number: keys, prices, how many."""

    number: dict[OfferKey, int]
    usd: list[float]
    available: list[int]

    def rent(self, machines: Iterable[tuple[int, int]]) -> float:
        """Return dollars per hour of some machines."""
        return sum(self.usd[k] * nodes for k, nodes in machines)


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
        self._made: dict[_TemplatePlace, Instance] = {}
        self._covers: dict[object, tuple[int, ...] | None] = {}
        self._places: dict[object, list[list[_TemplatePlace]]] = {}
        self._rates: dict[int, tuple[object, float]] = {}
        self._libraries: dict[tuple[str, ...], Libraries] = {}

    def __call__(self, asked: Problem) -> Plan:
        """Return the plan of a problem."""
        found = self._cover_all(asked) if _is_separable(asked) else None
        if found is None:
            self.slow += 1
            return self._allocate(asked)
        self.quick += 1
        return found

    def renewed(self) -> TemplatePlanner:
        """Return one that has planned nothing yet."""
        return TemplatePlanner(self.catalog, self.templates)

    def per_s(self, instance: Instance) -> float:
        """Return what an instance carries: what its template does, or what it says itself."""
        # Copies of an instance share their nodes, and are looked up again and again.
        found = self._rates.get(id(instance.nodes))
        if found is None or found[0] is not instance.nodes:
            known = self._known.get((instance.role, node_set(instance)))
            rate = instance.throughput_per_s if known is None else known.per_s
            found = self._rates[id(instance.nodes)] = (instance.nodes, rate)
            if len(self._rates) > 16 * _MAX_KEPT:
                self._rates.clear()
        return found[1]

    def _cover_all(self, asked: Problem) -> Plan | None:
        """Cover every service by itself, or one after the other where not all fit; None where none can be."""
        offers = _OfferList(
            {offer.key: k for k, offer in enumerate(asked.offers)},
            [offer.usd_per_hour for offer in asked.offers],
            [offer.available for offer in asked.offers],
        )
        running = self._sort_running(asked, offers)
        chosen = self._choose(asked, offers, running, asked.services, shared=False)
        if chosen is None:
            return None
        if chosen[1]:
            # Several want the same machines: who chooses first takes them.
            first = asked.services
            # Every service is the first once; all orders would be far too many.
            orders = [(*first[at:], *first[:at]) for at in range(len(first))]
            found = [
                one
                for order in orders
                if (one := self._choose(asked, offers, running, order, shared=True)) is not None
            ]
            if not found:
                return None
            chosen = min(found, key=lambda one: one[2])
        return self._assemble(asked, offers, chosen[0])

    def _choose(
        self,
        asked: Problem,
        offers: _OfferList,
        running: Mapping[str, list[_CoverItem]],
        order: Iterable[Service],
        *,
        shared: bool,
    ) -> tuple[dict[str, list[tuple[_CoverItem, int]]], bool, float] | None:
        """Return what covers each service, whether that is more than there is, and what it costs.

        With `shared` a service has what those before it left.
        """
        left = list(offers.available)
        found: dict[str, list[tuple[_CoverItem, int]]] = {}
        cost = 0.0
        for service in order:
            (role,) = map(str, service.roles)
            kept = running.get(role, [])
            there = left if shared else offers.available
            if shared:
                kept = [
                    replace(item, most=most)
                    for item in kept
                    if (most := min(item.most, *(there[k] // n for k, n in item.machines))) > 0
                ]
            items = self._list_items(asked, service, role, offers, kept, there)
            counts = self._cover(items, service.demand_per_s)
            if counts is None:
                return None
            picked = [(item, n) for item, n in zip(items, counts, strict=True) if n]
            for item, number in picked:
                cost += item.cost * number
                for k, nodes in item.machines:
                    left[k] -= nodes * number
            found[service.name] = picked
        return found, min(left, default=0) < 0, cost

    def _assemble(
        self,
        asked: Problem,
        offers: _OfferList,
        chosen: Mapping[str, list[tuple[_CoverItem, int]]],
    ) -> Plan:
        instances: list[Instance] = []
        usd = fresh = 0.0
        for service in asked.services:
            number = 0
            for item, count in chosen[service.name]:
                rent = offers.rent(item.machines)
                usd += rent * count
                if item.place is None:
                    instances += [self._keep(one, rent) for one in item.running[:count]]
                    continue
                fresh += rent * count
                made = self._make(item.place)
                for _ in range(count):
                    update = {"id": f"{service.name}-{number}", "usd_per_hour": rent}
                    instances.append(made.model_copy(update=update))
                    number += 1
        init = asked.settings.init_penalty * fresh
        return Plan(
            problem_hash="",
            problem_name=asked.name,
            instances=tuple(instances),
            routes=_route_all(instances),
            served_fraction={service.name: 1.0 for service in asked.services},
            usd_per_hour=usd,
            init_usd=init,
            objective=usd + init,
            status="feasible",
            solver="cover",
        )

    def _list_items(
        self,
        asked: Problem,
        service: Service,
        role: str,
        offers: _OfferList,
        running: Sequence[_CoverItem],
        available: Sequence[int],
    ) -> list[_CoverItem]:
        demand = service.demand_per_s
        items = list(running)
        standing: Counter[object] = Counter()
        for item in running:
            standing[item.machines] += item.most
        penalty = 1.0 + asked.settings.init_penalty
        for places in self._list_places(asked, service, role, offers):
            per_s = places[0].template.per_s
            needed = math.ceil(demand / per_s) + 1
            for rent, at in sorted((offers.rent(p.machines), i) for i, p in enumerate(places)):
                place = places[at]
                most = min(available[k] // nodes for k, nodes in place.machines)
                # What runs there holds some of them already.
                most -= standing[place.machines]
                if most <= 0:
                    continue
                most = min(most, needed)
                items.append(_CoverItem(penalty * rent, per_s, most, place.machines, place))
                needed -= most
                if needed <= 0:
                    break  # dearer places of the same template are never needed
        items.sort(key=lambda item: item.cost / item.per_s)
        return items

    def _list_places(
        self, asked: Problem, service: Service, role: str, offers: _OfferList
    ) -> list[list[_TemplatePlace]]:
        """Return where each template of a role can stand, whatever that costs."""
        key = (role, service.only, service.avoid, tuple(offers.number))
        if key not in self._places:
            found = []
            for template in self._by_role.get(role, ()):
                if all(service.allows(kind) for kind, _ in template.nodes):
                    places = _find_places(template, asked.regions, offers.number)
                    found += [places] if places else []
            self._places[key] = found
        return self._places[key]

    def _sort_running(self, asked: Problem, offers: _OfferList) -> dict[str, list[_CoverItem]]:
        """Return what runs by role, equal instances as one item."""
        groups: dict[tuple[str, _Machines, float], list[Instance]] = {}
        number = offers.number
        for one in asked.running:
            keys = [(node.region or one.region, node.node_type, node.market) for node in one.nodes]
            if all(key in number for key in keys):
                machines = tuple(sorted(Counter(number[key] for key in keys).items()))
                groups.setdefault((one.role, machines, self.per_s(one)), []).append(one)
        items: dict[str, list[_CoverItem]] = {}
        for (role, machines, per_s), group in groups.items():
            if per_s > 0.0:
                cost = offers.rent(machines) * (1.0 - _KEEP)
                items.setdefault(role, []).append(
                    _CoverItem(cost, per_s, len(group), machines, None, tuple(group))
                )
        return items

    def _cover(self, items: Sequence[_CoverItem], demand: float) -> tuple[int, ...] | None:
        """Return how many of each item cover the demand most cheaply; None where all do not."""
        if demand <= 0.0:
            return (0,) * len(items)
        key = (demand, tuple((item.cost, item.per_s, item.most) for item in items))
        if key not in self._covers:
            if len(self._covers) > _MAX_KEPT:
                self._covers.clear()
            self._covers[key] = _find_cover(items, demand)
        return self._covers[key]

    def _keep(self, one: Instance, rent: float) -> Instance:
        """Return what runs as it is kept: at today's price."""
        per_s = self.per_s(one)
        if one.kept and one.usd_per_hour == rent and one.throughput_per_s == per_s:
            return one
        update = {"kept": True, "usd_per_hour": rent, "throughput_per_s": per_s}
        return one.model_copy(update=update)

    def _make(self, place: _TemplatePlace) -> Instance:
        """Return a new instance of a template in its place."""
        if place not in self._made:
            markets, instance = dict(place.markets), place.template.instance
            whole = {"slot": None, "gpu_ids": None}
            nodes = tuple(
                node.model_copy(
                    update={"market": markets[node.kind], "node_type": node.kind, **whole}
                )
                for node in instance.nodes
            )
            self._made[place] = instance.model_copy(
                update={"nodes": nodes, "region": place.region, "kept": False}
            )
        return self._made[place]

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
                roles[role] = replace(library, counts=counts, throughput=library.throughput[rows])
            self._libraries[asked.kinds] = replace(whole, roles=roles)
        return self._libraries[asked.kinds]


def _route_all(instances: Iterable[Instance]) -> tuple[Route, ...]:
    """Return routes by what instances carry, all of which run both phases."""
    total: dict[str, float] = {}
    for one in instances:
        total[one.service] = total.get(one.service, 0.0) + one.throughput_per_s
    return tuple(
        Route.model_construct(
            service=one.service,
            instances=(one.id,),
            share=min(1.0, one.throughput_per_s / total[one.service]),
        )
        for one in instances
    )


def _is_separable(asked: Problem) -> bool:
    """Whether services share nothing but the machines on offer, whole ones."""
    limits = asked.limits
    free = (
        limits.budget_usd_per_hour is None
        and limits.spot_share is None
        and limits.max_nodes is None
        and limits.spread == 1
        and not limits.survival.lost
    )
    return (
        free
        and asked.cluster is None
        and all(service.phases == "together" for service in asked.services)
        and all(len(offer.sizes) == 1 for offer in asked.offers)
    )


def _find_places(
    template: SizedTemplate, regions: Iterable[str], number: Mapping[OfferKey, int]
) -> list[_TemplatePlace]:
    """Return every region and choice of markets in which all machines of a template are offered."""
    found = []
    for region in regions:
        choices: list[list[OfferKey]] = []
        for kind, _ in template.nodes:
            keys: list[OfferKey] = [(region, kind, market) for market in _MARKETS]
            choices.append([key for key in keys if key in number])
        for chosen in product(*choices):
            machines = tuple(
                sorted((number[key], n) for key, (_, n) in zip(chosen, template.nodes, strict=True))
            )
            markets = tuple((kind, market) for _, kind, market in chosen)
            found.append(_TemplatePlace(template, region, markets, machines))
    return found


_MARKETS: tuple[Market, ...] = ("owned", "on-demand", "spot")


def _covers(items: Sequence[_CoverItem], counts: Sequence[int], demand: float) -> bool:
    carried = sum(item.per_s * count for item, count in zip(items, counts, strict=True))
    return carried >= demand * _ALL_CARRIED


def _find_cover(items: Sequence[_CoverItem], demand: float) -> tuple[int, ...] | None:
    """Return the cheapest cover found; None where all items together fall short.

    Rounded to the nearest step a cover may fall short by a hair: then a hair more is covered.
    """
    for more in _DEMAND_MARGINS:
        found = _cover_grid(items, demand * (1.0 + more), nearest=True)
        if found is not None and _covers(items, found, demand):
            return _drop_spare(items, found, demand)
    # At last rounded down, which never promises too much.
    found = _cover_grid(items, demand, nearest=False)
    return None if found is None else _drop_spare(items, found, demand)


def _drop_spare(
    items: Sequence[_CoverItem], counts: Sequence[int], demand: float
) -> tuple[int, ...]:
    """Return a cover without what it does not need, the dearest first: rounding may leave some."""
    left = list(counts)
    spare = (
        sum(item.per_s * n for item, n in zip(items, counts, strict=True)) - demand * _ALL_CARRIED
    )
    for at in sorted(range(len(items)), key=lambda i: -items[i].cost):
        while left[at] and items[at].per_s <= spare:
            left[at] -= 1
            spare -= items[at].per_s
    return tuple(left)


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
        # In powers of two: few parts, of which any number of the item can be put together.
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
        # Less demand than the part carries is covered by it alone.
        candidate[:weight] = cost
        np.add(least[: GRID + 1 - weight], cost, out=candidate[weight:])
        np.less(candidate, least, out=taken[number])
        np.minimum(candidate, least, out=least)
    if not np.isfinite(least[GRID]):
        return None
    counts = [0] * len(items)
    left = GRID
    # From the last part back: those that the cheapest cover of what is left took.
    for number in range(len(parts) - 1, -1, -1):
        if left > 0 and taken[number, left]:
            at, size, _, weight = parts[number]
            counts[at] += size
            left = max(0, left - weight)
    return tuple(counts)
