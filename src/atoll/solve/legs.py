"""How the requests of a service are split over its instances: legs between regions, then routes.

Instances carry P_g requests/s of prefill, D_g of decode and B_g of both together in region g. A request
runs together in a region, or its prompt runs in g and its answer in h: f_gh <= what the link from g to h
carries, h = g without limit. What is served is

    sum_g B_g + max { sum f_gh :  sum_h f_gh <= P_g,  sum_g f_gh <= D_h }

or the demand if that is less. Requests stay in a region as far as they can: links are used only for what
is still missing. Services share links in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase
from atoll.plan.plan import Instance, Route
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.violation import exceeds

Pair = tuple[str, str]
_ALL_PAIRS = 64
"""Up to so many pairs of instances between two regions each gets its share; above, as few as can be."""
_TRICKLE = 1e-12
"""Share of the whole below which a flow is rounding."""


class _Served(NamedTuple):
    """The routes of one service and the share of its demand that they serve."""

    routes: tuple[Route, ...]
    fraction: float


def routes_of(
    problem: Problem, catalog: Catalog | None, instances: Iterable[Instance]
) -> tuple[tuple[Route, ...], dict[str, float]]:
    """Return the routes of every service, and by service the share of its demand that is served.

    Shares of a service add up to 1 where anything is served, and no instance gets more than it carries.
    An instance of a phase that has no partner gets no route. The catalog is the problem's unless given.
    """
    standing = sorted((i for i in instances if i.throughput_per_s > 0), key=lambda i: i.id)
    used: dict[Pair, float] = {}
    routes: list[Route] = []
    fractions: dict[str, float] = {}
    for service in problem.services:
        own = [i for i in standing if i.service == service.name and i.role_id in service.roles]
        served = _serve(problem, catalog, service, own, used)
        routes += served.routes
        fractions[service.name] = served.fraction
    return tuple(routes), fractions


def requests_per_s(service: Service, instance: Instance) -> float:
    """Return how many requests/s of its phase an instance carries."""
    tokens = {
        Phase.PREFILL: service.lengths.input_mean,
        Phase.DECODE: service.lengths.output_mean,
    }.get(instance.phase, 1.0)
    return instance.throughput_per_s / tokens


def _serve(
    problem: Problem,
    catalog: Catalog | None,
    service: Service,
    instances: Sequence[Instance],
    used: dict[Pair, float],
) -> _Served:
    """Return the routes of one service; `used` is what the links carry in bytes/s, and is added to."""
    carries: dict[Phase, dict[str, dict[str, float]]] = {}
    for instance in instances:
        region = carries.setdefault(instance.phase, {}).setdefault(instance.region, {})
        region[instance.id] = requests_per_s(service, instance)
    together = {
        i: rate for group in carries.get(Phase.BOTH, {}).values() for i, rate in group.items()
    }
    first, second = carries.get(Phase.PREFILL, {}), carries.get(Phase.DECODE, {})
    prefill = {region: sum(group.values()) for region, group in sorted(first.items())}
    decode = {region: sum(group.values()) for region, group in sorted(second.items())}
    legs = {(g, g): min(rate, decode[g]) for g, rate in prefill.items() if g in decode}
    demand = service.demand_per_s
    missing = demand - sum(together.values()) - sum(legs.values())
    links = _Links.of(problem, catalog, service, used) if missing > 0 and first and second else None
    if links is not None and links.room:
        legs = _augment(prefill, decode, legs, links.room, missing)
    total = sum(together.values()) + sum(legs.values())
    if total <= 0:
        return _Served((), 0.0 if exceeds(demand, 0.0) else 1.0)
    if links is not None:
        for (g, h), rate in legs.items():
            if g != h:
                used[g, h] = used.get((g, h), 0.0) + rate * links.bytes_per_request
    shares: dict[tuple[str, ...], float] = {(i,): rate / total for i, rate in together.items()}
    for (g, h), rate in sorted(legs.items()):
        shares |= _pair(first[g], second[h], rate / total)
    routes = tuple(
        Route(service=service.name, instances=pair, share=min(1.0, share))
        for pair, share in sorted(shares.items())
        if share > _TRICKLE
    )
    return _Served(routes, total / demand if exceeds(demand, total) else 1.0)


class _Links(NamedTuple):
    """Between which regions prompts may be handed over, and how many requests/s there is room for."""

    room: Mapping[Pair, float]
    bytes_per_request: float

    @classmethod
    def of(
        cls,
        problem: Problem,
        catalog: Catalog | None,  # noqa: ARG003
        service: Service,  # noqa: ARG003
        used: Mapping[Pair, float],  # noqa: ARG003
    ) -> _Links | None:
        """Return what `used` leaves of the links; None where a service never leaves a region."""
        if len(problem.regions) < 2 or problem.cluster is not None:
            return None
        return None  # stub: until plan.handover says between which regions


def _augment(
    prefill: Mapping[str, float],
    decode: Mapping[str, float],
    legs: Mapping[Pair, float],
    room: Mapping[Pair, float],
    missing: float,
) -> dict[Pair, float]:
    """Return the legs with up to `missing` requests/s more, by shortest augmenting ways.

    A way runs from a region whose prefill has something left over links with room, and back over legs
    that can be given up, to a region whose decode has something left.
    """
    flow = {pair: rate for pair, rate in legs.items() if rate > 0}
    least = _TRICKLE * max(1.0, sum(prefill.values()), sum(decode.values()))
    while missing > least:
        left = {
            g: rate - sum(f for (a, _), f in flow.items() if a == g) for g, rate in prefill.items()
        }
        open_ = {
            h: rate - sum(f for (_, b), f in flow.items() if b == h) for h, rate in decode.items()
        }
        way = _shortest(left, open_, flow, room, least)
        if way is None:
            break
        step = min(missing, left[way[0]], open_[way[-1]])
        hops = list(pairwise(way))
        for index, (a, b) in enumerate(hops):
            pair = (a, b) if index % 2 == 0 else (b, a)
            step = min(step, _space(pair, flow, room) if index % 2 == 0 else flow[pair])
        for index, (a, b) in enumerate(hops):
            pair = (a, b) if index % 2 == 0 else (b, a)
            flow[pair] = flow.get(pair, 0.0) + (step if index % 2 == 0 else -step)
        missing -= step
    return {pair: rate for pair, rate in flow.items() if rate > least}


def _space(pair: Pair, flow: Mapping[Pair, float], room: Mapping[Pair, float]) -> float:
    """Return what may still be sent from one region to another."""
    if pair[0] == pair[1]:
        return float("inf")
    return room.get(pair, 0.0) - flow.get(pair, 0.0)


def _shortest(
    left: Mapping[str, float],
    open_: Mapping[str, float],
    flow: Mapping[Pair, float],
    room: Mapping[Pair, float],
    least: float,
) -> list[str] | None:
    """Return the regions of a shortest augmenting way, prefill and decode in turn, None if there is none."""
    ways = [[g] for g in sorted(left) if left[g] > least]
    seen_first, seen_second = {way[0] for way in ways}, set[str]()
    while ways:
        longer: list[list[str]] = []
        for way in ways:
            for h in sorted(open_):
                if h in seen_second or _space((way[-1], h), flow, room) <= least:
                    continue
                seen_second.add(h)
                if open_[h] > least:
                    return [*way, h]
                for g in sorted(left):
                    if g not in seen_first and flow.get((g, h), 0.0) > least:
                        seen_first.add(g)
                        longer.append([*way, h, g])
        ways = longer
    return None


def _pair(
    first: Mapping[str, float], second: Mapping[str, float], share: float
) -> dict[tuple[str, ...], float]:
    """Return the share of each pair of instances; both sides are loaded in proportion to what they carry."""
    before = {i: share * rate / sum(first.values()) for i, rate in sorted(first.items())}
    after = {j: share * rate / sum(second.values()) for j, rate in sorted(second.items())}
    if len(before) * len(after) <= _ALL_PAIRS:
        return {
            (i, j): x * y / share for i, x in before.items() for j, y in after.items() if share > 0
        }
    shares: dict[tuple[str, ...], float] = {}
    waiting = list(after.items())
    for i, amount in before.items():
        rest = amount
        while waiting and rest > _TRICKLE * share:
            j, free = waiting[0]
            taken = min(rest, free)
            shares[i, j] = taken
            rest -= taken
            if free - taken > _TRICKLE * share:
                waiting[0] = (j, free - taken)
            else:
                waiting.pop(0)
    return shares
