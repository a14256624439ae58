"""How the requests of a service are split over its instances: legs between regions, then routes.

Instances carry P_g requests/s of prefill, D_g of decode and B_g of both together in region g. A request
runs together in a region, or its prompt runs in g and its answer in h: f_gh <= what the link from g to h
carries, h = g without limit. What is served is

    sum_g B_g + max { sum f_gh :  sum_h f_gh <= P_g,  sum_g f_gh <= D_h }

or the demand if that is less. Requests stay in a region as far as they can: links are used only for what
is still missing. Where services want more of a link than it carries, they get the same share of their demand
each as far as that goes, or in the order of their priority where the problem weighs by it.

Where the share of requests on spot is limited, instances with spot nodes and what they are paired with serve
requests by themselves, and get no more than that share. An instance off spot that has a phase alone may serve
both: a part of what it carries is lent (`_Sides`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase
from atoll.plan.handover import handover
from atoll.plan.plan import Instance, Route
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.violation import exceeds

Pair = tuple[str, str]
_APART = (Phase.PREFILL, Phase.DECODE)
_ALL_PAIRS = 64
"""Up to so many pairs of instances between two regions each gets its share; above, as few as can be."""
_TRICKLE = 1e-12
"""Share of the whole below which a flow is rounding."""
_HALVINGS = 40
"""Steps in which the share of demand that services have in common is found."""


def routes_of(
    problem: Problem, catalog: Catalog | None, instances: Iterable[Instance]
) -> tuple[tuple[Route, ...], dict[str, float]]:
    """Return the routes of every service, and by service the share of its demand that is served.

    Shares of a service add up to 1 where anything is served, and no instance gets more than it carries.
    An instance of a phase that has no partner gets no route. The catalog is the problem's unless given.
    """
    # In order of ids: routes do not depend on the order given.
    standing = sorted((i for i in instances if i.throughput_per_s > 0), key=lambda i: i.id)
    parts: list[_Part] = []
    both: list[tuple[_Part, _Part | None]] = []
    limit = problem.limits.spot_share
    for service in problem.plain_services:
        own = [i for i in standing if i.service == service.name]
        first, second = _split(service, own, limit)
        both.append((first, second))
        parts += [first] if second is None else [first, second]
    # Links between regions are for what cannot be served at home.
    short = [part for part in parts if part.served < 1.0 and part.prefill and part.decode]
    if short and len(problem.regions) > 1 and problem.cluster is None:
        _cross(problem, problem.catalog() if catalog is None else catalog, short)
    routes: list[Route] = []
    served: dict[str, float] = {}
    for first, second in both:
        share = 0.0
        served[first.service.name] = first.served
        if second is not None and limit is not None and first.carried > 0.0:
            carried = first.carried + second.carried
            share = min(limit, second.carried / carried)
            total = min(carried, first.carried / (1.0 - limit))
            demand = first.service.demand_per_s
            served[first.service.name] = total / demand if exceeds(demand, total) else 1.0
            routes += second.routes(share)
        routes += first.routes(1.0 - share)
    return _join(routes), served


def _join(routes: Iterable[Route]) -> tuple[Route, ...]:
    """Return routes of which no two are the same way."""
    shares: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for route in routes:
        shares[route.service, route.instances] += route.share
    return tuple(
        Route(service=service, instances=way, share=min(1.0, share))
        for (service, way), share in shares.items()
    )


@dataclass
class _Sides:
    """What the instances of a service carry of one phase in one region off spot and on it, requests/s.

    `lent` of what is off spot is for requests that another phase serves on spot.
    """

    off: float = 0.0
    on: float = 0.0
    lent: float = 0.0

    def lend(self, share: float) -> None:
        """Let a share of all that is left be for requests on spot, what stands there first."""
        self.lent += max(0.0, min(self.off, share * (self.off + self.on) - self.on))


def _split(
    service: Service, instances: Sequence[Instance], limit: float | None
) -> tuple[_Part, _Part | None]:
    """Return a service as it serves off spot and, where spot is limited and in use, as it serves on it."""
    spot = {i.id for i in instances if any(node.market == "spot" for node in i.nodes)}
    if limit is None or limit >= 1.0 or not spot:
        return _Part.of(service, [(i, 1.0) for i in instances]), None
    sides: dict[tuple[Phase, str], _Sides] = defaultdict(_Sides)
    for one in instances:
        if one.role_id in service.roles:
            here = sides[one.phase, one.region]
            rate = requests_per_s(service, one)
            here.on += rate * (one.id in spot)
            here.off += rate * (one.id not in spot)
    _lend(sides, limit)
    lent = {key: here.lent / here.off if here.off > 0.0 else 0.0 for key, here in sides.items()}
    off = [i for i in instances if i.id not in spot and i.role_id in service.roles]
    first = [(i, 1.0 - lent[i.phase, i.region]) for i in off]
    second = [(i, lent[i.phase, i.region]) for i in off]
    second += [(i, 1.0) for i in instances if i.id in spot]
    return _Part.of(service, first), _Part.of(service, second, asked=limit)


def _lend(sides: Mapping[tuple[Phase, str], _Sides], limit: float) -> None:
    """Lend so much that all are equally busy, or as few requests as can be on spot if those are too many.

    First inside regions, then what they leave for hand-overs between them.
    """
    regions = sorted({region for _, region in sides})
    pairs = [[sides.get((phase, g), _Sides()) for phase in _APART] for g in regions]
    whole = [here for (phase, _), here in sides.items() if phase is Phase.BOTH]
    total = sum(here.off + here.on for here in whole) + sum(map(_carried, pairs))
    room = limit * total - sum(here.on for here in whole)
    least = [_share_on_spot(pair, most=False) for pair in pairs]
    even = [_share_on_spot(pair, most=True) for pair in pairs]
    low, high = (
        sum(share * _carried(pair) for share, pair in zip(shares, pairs, strict=True))
        for shares in (least, even)
    )
    part = 1.0 if high <= room else 0.0 if low >= room else (room - low) / (high - low)
    for pair, a, b in zip(pairs, least, even, strict=True):
        for here in pair:
            here.lend(a + part * (b - a))
    if len(regions) > 1:
        _lend_across(pairs)


def _lend_across(pairs: Sequence[Sequence[_Sides]]) -> None:
    """Lend of what regions leave as much as what they leave on spot has no partner for."""
    rests = []
    for pair in pairs:
        for side in (0, 1):
            carried = [(p.on + p.lent) if side else (p.off - p.lent) for p in pair]
            rests.append([rate - min(carried) for rate in carried])
    every = [_Sides(sum(r[n] for r in rests[::2]), sum(r[n] for r in rests[1::2])) for n in (0, 1)]
    share = _share_on_spot(every, most=False)
    for number, joint in enumerate(every):
        joint.lend(share)
        if joint.off > 0.0:
            for rest, pair in zip(rests[::2], pairs, strict=True):
                pair[number].lent += joint.lent * rest[number] / joint.off


def _carried(pair: Sequence[_Sides]) -> float:
    """Requests/s that prefill and decode carry together."""
    return min(here.off + here.on for here in pair)


def _share_on_spot(pair: Sequence[_Sides], *, most: bool) -> float:
    """Share of what two phases carry that is on spot: as little as can be, or with all equally busy."""
    total = _carried(pair)
    if total <= 0.0 or not any(here.on for here in pair):
        return 0.0
    if most:
        return max(here.on / (here.off + here.on) for here in pair)
    return max(0.0, 1.0 - min(here.off for here in pair) / total)


def requests_per_s(service: Service, instance: Instance) -> float:
    """Return how many requests/s of its phase an instance carries."""
    tokens = {
        Phase.PREFILL: service.lengths.input_mean,
        Phase.DECODE: service.lengths.output_mean,
    }.get(instance.phase, 1.0)
    return instance.throughput_per_s / tokens


@dataclass
class _Part:
    """One service: what its instances carry by region and id, and the legs of its requests, in requests/s."""

    service: Service
    prefill: dict[str, dict[str, float]]
    decode: dict[str, dict[str, float]]
    together: dict[str, float]
    legs: dict[Pair, float]
    pairs: Sequence[Pair] = ()
    bytes_per_request: float = field(default=1.0)
    asked: float = 1.0

    @classmethod
    def of(
        cls, service: Service, instances: Iterable[tuple[Instance, float]], asked: float = 1.0
    ) -> _Part:
        """Return a service whose requests stay in their region, asked for a share of its demand.

        Of each instance it has a share.
        """
        carries: dict[Phase, dict[str, dict[str, float]]] = {
            phase: {} for phase in (Phase.PREFILL, Phase.DECODE, Phase.BOTH)
        }
        for instance, share in instances:
            if instance.role_id in service.roles and share > _TRICKLE:
                region = carries[instance.phase].setdefault(instance.region, {})
                region[instance.id] = share * requests_per_s(service, instance)
        first, second = carries[Phase.PREFILL], carries[Phase.DECODE]
        at_home = {
            (g, g): min(sum(group.values()), sum(second[g].values()))
            for g, group in first.items()
            if g in second
        }
        both = {i: rate for group in carries[Phase.BOTH].values() for i, rate in group.items()}
        return cls(service, first, second, both, at_home, asked=asked)

    @property
    def demand_per_s(self) -> float:
        """Requests/s that are asked of it."""
        return self.service.demand_per_s * self.asked

    @property
    def carried(self) -> float:
        """Requests/s over all legs."""
        return sum(self.together.values()) + sum(self.legs.values())

    @property
    def served(self) -> float:
        """The share of the demand that is served."""
        demand, carried = self.demand_per_s, self.carried
        return carried / demand if exceeds(demand, carried) else 1.0

    def used(self) -> dict[Pair, float]:
        """Return the bytes/s of KV between regions."""
        return {
            (g, h): rate * self.bytes_per_request for (g, h), rate in self.legs.items() if g != h
        }

    def extend(self, left: Mapping[Pair, float], share: float) -> None:
        """Send more over links that have `left` so many bytes/s, until a share of the demand is served."""
        wanted = share * self.demand_per_s
        missing = wanted - self.carried
        if exceeds(wanted, self.carried):  # no way for what is rounding
            size = self.bytes_per_request
            room = {p: left[p] / size + self.legs.get(p, 0.0) for p in self.pairs}
            prefill = {g: sum(group.values()) for g, group in sorted(self.prefill.items())}
            decode = {h: sum(group.values()) for h, group in sorted(self.decode.items())}
            self.legs = _augment(prefill, decode, self.legs, room, missing)

    def routes(self, whole: float = 1.0) -> Iterable[Route]:
        """Yield the routes of a share of the service's requests, by instances."""
        if self.carried <= 0.0 or whole <= 0.0:
            return
        total = self.carried / whole
        shares: dict[tuple[str, ...], float] = {
            (name,): rate / total for name, rate in self.together.items()
        }
        for (g, h), rate in sorted(self.legs.items()):
            shares |= _pair(self.prefill[g], self.decode[h], rate / total)
        for way, share in sorted(shares.items()):
            if share > _TRICKLE:
                yield Route(service=self.service.name, instances=way, share=min(1.0, share))


def _cross(problem: Problem, catalog: Catalog, parts: Sequence[_Part]) -> None:
    """Let services that are short at home use the links between regions."""
    links: dict[Pair, float] = {}
    for part in parts:
        allowed = handover(problem, catalog, part.service)
        if allowed is not None:
            part.pairs, part.bytes_per_request = sorted(allowed.pairs), allowed.bytes_per_request
            links |= {p: catalog.links.between(*p).bandwidth_bytes_per_s for p in part.pairs}
    if not links:
        return
    at_home = [dict(part.legs) for part in parts]

    def fill(shares: Sequence[float]) -> list[float]:
        """Serve up to these shares of demand, from home, and return those that are reached."""
        for part, legs in zip(parts, at_home, strict=True):
            part.legs = dict(legs)
        return extend(shares, range(len(parts)))

    def extend(shares: Sequence[float], order: Iterable[int]) -> list[float]:
        for at in order:
            used = [other.used() for other in parts]
            left = {
                p: max(0.0, limit - sum(u.get(p, 0.0) for u in used)) for p, limit in links.items()
            }
            parts[at].extend(left, shares[at])
        return [part.served for part in parts]

    # What each reaches with all links to itself: to ask for more is of no use.
    alone = [fill([float(n == at) for n in range(len(parts))])[at] for at in range(len(parts))]
    reached = fill(alone)
    if all(a - r <= _TRICKLE for a, r in zip(alone, reached, strict=True)):
        return
    low, high = 0.0, 1.0
    # By priority nothing is shared in common first: all of the links go in order below.
    if problem.settings.on_shortage != "priority":
        for _ in range(_HALVINGS):
            share = (low + high) / 2
            wanted = [min(share, max_share) for max_share in alone]
            got = fill(wanted)
            enough = all(w - g <= 1e-9 for w, g in zip(wanted, got, strict=True))
            low, high = (share, high) if enough else (low, share)
    # The last halving may have failed: once more with the share that is known to work.
    fill([min(low, max_share) for max_share in alone])
    # What is left of the links goes to those of higher priority first.
    extend(alone, sorted(range(len(parts)), key=lambda at: -parts[at].service.priority))


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
    min_flow = _TRICKLE * max(1.0, sum(prefill.values()), sum(decode.values()))
    while missing > min_flow:
        left = {
            g: rate - sum(f for (a, _), f in flow.items() if a == g) for g, rate in prefill.items()
        }
        open_ = {
            h: rate - sum(f for (_, b), f in flow.items() if b == h) for h, rate in decode.items()
        }
        way = _shortest(left, open_, flow, room, min_flow)
        if way is None:
            break
        step = min(missing, left[way[0]], open_[way[-1]])
        hops = list(pairwise(way))
        for index, (a, b) in enumerate(hops):
            # Hops alternate: forward over a link, then back over a leg that gives way.
            pair = (a, b) if index % 2 == 0 else (b, a)
            step = min(step, _space(pair, flow, room) if index % 2 == 0 else flow[pair])
        for index, (a, b) in enumerate(hops):
            pair = (a, b) if index % 2 == 0 else (b, a)
            flow[pair] = flow.get(pair, 0.0) + (step if index % 2 == 0 else -step)
        missing -= step
    return {pair: rate for pair, rate in flow.items() if rate > min_flow}


def _space(pair: Pair, flow: Mapping[Pair, float], room: Mapping[Pair, float]) -> float:
    """Return what may still be sent from one region to another."""
    if pair[0] == pair[1]:
        # Inside a region no link limits it.
        return float("inf")
    return room.get(pair, 0.0) - flow.get(pair, 0.0)


def _shortest(
    left: Mapping[str, float],
    open_: Mapping[str, float],
    flow: Mapping[Pair, float],
    room: Mapping[Pair, float],
    min_flow: float,
) -> list[str] | None:
    """Return the regions of a shortest augmenting way, prefill and decode in turn, None if there is none."""
    ways = [[g] for g in sorted(left) if left[g] > min_flow]
    seen_first, seen_second = {way[0] for way in ways}, set[str]()
    while ways:
        longer: list[list[str]] = []
        for way in ways:
            for h in sorted(open_):
                if h in seen_second or _space((way[-1], h), flow, room) <= min_flow:
                    continue
                # Breadth first: each region is reached once on either side.
                seen_second.add(h)
                if open_[h] > min_flow:
                    return [*way, h]
                for g in sorted(left):
                    if g not in seen_first and flow.get((g, h), 0.0) > min_flow:
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
    # One after the other, so that there are as few pairs as can be.
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
