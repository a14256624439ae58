"""The executors of one any-to-any service and the routes of its classes, as numbers for the program.

A route is a set of parts. What a request takes until its first text hangs on the way that data goes between
them: nothing is handed over inside one executor, nor between executors of one machine (from one group of its
GPUs to another it takes the link between those), and between machines it takes the link of the two. So a
route is copied: once for every set of neighbours that one executor runs as one, and once for every way
between the others (`link_ways`). Copies that allow nothing that another does not are left out: with fast
links one is left.

What a way takes is looked at in three ways, by `Links`:

- `cheapest`: which machines executors stand on is not known, so every pair of kinds takes the least that it
  could: nothing where one machine can give both. What is proven of that holds for every plan.
- `machine`: machines are told apart (`patterns`), so that every pair takes what it takes.
- `slowest`: all pairs take what the slowest does. Plans keep their promises wherever executors stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, product
from typing import Literal

from atoll.catalog.catalog import Catalog
from atoll.catalog.models import ModelSpec
from atoll.catalog.nodes import NodeType
from atoll.core.errors import UsageError
from atoll.core.ids import parse_node_type
from atoll.engines.table import EngineChoice
from atoll.perf.components.executor import ExecutorWork
from atoll.perf.components.measured import MeasuredRate
from atoll.perf.components.sites import ALONE, Company
from atoll.plan.capacities import node_source
from atoll.plan.component_sharing import list_sharers, name_services
from atoll.plan.executors import (
    company_of,
    cores_needed,
    cores_of_slice,
    first_text_parts,
    request_bytes,
    routes_of,
    work_on,
)
from atoll.plan.handover import cut_sizes, pair_link
from atoll.plan.problem import Offer, Problem, Service
from atoll.solve.effort import Effort
from atoll.solve.graph.executor_options import (
    Option,
    allowed_routes,
    by_way,
    options_of,
    plain_parts,
    runs_on,
    without_way,
)
from atoll.solve.graph.graph_types import Chain, ClassDemand, ExecutorType, PartKey, Place
from atoll.solve.graph.link_ways import LinkWay, list_ways
from atoll.workload.classes import RequestClass

Links = Literal["cheapest", "machine", "slowest"]
TypeKey = tuple[tuple[str, ...], Option, str]
"""Services that share an executor (none where it is one's alone), its parts, and the kind of node."""
ChooseOptions = Callable[[Service, Sequence[Sequence[str]]], tuple[Option, ...]]

SIDE_SHARE = 0.2
"""Of an image's promise, the most that a part beside the two longest may take."""
_MAX_COPIES = 24
"""Copies of one route by ways; beyond, ways are not told apart."""
_SAME_S = 1e-9


def kinds_on_offer(problem: Problem, catalog: Catalog) -> dict[str, tuple[Offer, ...]]:
    """Return by kind of node the offers whose machines give it."""
    cuts = cut_sizes(problem, catalog)
    found: dict[str, list[Offer]] = {}
    for offer in problem.offers:
        for size, kind in zip(offer.sizes, offer.kinds, strict=True):
            if size in cuts[offer.key]:
                found.setdefault(kind, []).append(offer)
    return {kind: tuple(offers) for kind, offers in sorted(found.items())}


class _OptionTimes:
    """What sets of parts take on kinds of nodes: the same in every plan on the way, so found once.

    It hangs neither on demand nor on prices: plans of a fleet whose dials are turned find it, too.
    """

    def __init__(
        self,
        model: ModelSpec,
        classes: tuple[RequestClass, ...],
        rates: tuple[MeasuredRate, ...],
        engine: EngineChoice,
        nodes: tuple[tuple[str, tuple[NodeType, ...]], ...],
        companies: tuple[tuple[tuple[str, ...], Company], ...],
    ) -> None:
        self.model, self.classes, self.rates, self.engine = model, classes, rates, engine
        self.companies = {(): ALONE, **dict(companies)}
        self.nodes = dict(nodes)
        self.copies: dict[Hashable, tuple[Catalog, list[_Copy]]] = {}
        """Copies of routes (`ServiceProgram.copies_of`), with the catalog whose identity is in the key."""
        self._works: dict[TypeKey, tuple[ExecutorWork, ...] | None] = {}
        self._times: dict[tuple[TypeKey, str, str], tuple[float, float] | None] = {}

    def works(self, key: TypeKey) -> tuple[ExecutorWork, ...] | None:
        """Return the work on every machine that gives the kind; None where not all of them run it."""
        if key not in self._works:
            found = [self._work(key, node) for node in self.nodes[key[2]]]
            # It must run on every machine that gives the kind: which one it gets is decided later.
            sure = tuple(work for work in found if work is not None)
            self._works[key] = sure if sure and len(sure) == len(found) else None
        return self._works[key]

    def time(self, of_type: TypeKey, klass: RequestClass, label: str) -> tuple[float, float] | None:
        """Return seconds of an executor that a request takes for parts, and how long it is there.

        As slow as on any machine that gives the kind; None where it cannot be.
        """
        key = (of_type, klass.name, label)
        if key not in self._times:
            self._times[key] = self._work_out(of_type, klass, label)
        return self._times[key]

    def _work_out(
        self, of_type: TypeKey, klass: RequestClass, label: str
    ) -> tuple[float, float] | None:
        works = self.works(of_type)
        keys = [(klass.name, each) for each in plain_parts(label)]
        if works is None or not runs_on(label, of_type[1]):
            return None
        if not all(key in work.seconds for key in keys for work in works):
            return None
        took = {key[1]: max(work.latency_s[key] for work in works) for key in keys}
        alone = self._latency_s(klass, took)
        if alone is None:
            return None
        return sum(max(work.seconds[key] for work in works) for key in keys), alone

    def _latency_s(self, klass: RequestClass, took: Mapping[str, float]) -> float | None:
        """How long a request is at parts of one executor, as chains count it; None where that is too long.

        For an image that is all of them. Until the first text it is the llm, encoders beside it being
        checked here, or the longest of the encoders.
        """
        if klass.image_s is not None:
            total = sum(took.values())
            return total if len(took) == 1 or total <= klass.image_s else None
        encoders, llm = first_text_parts(self.model, tuple(took))
        if llm is None:
            return max(took.values())
        before = max((took[encoder] for encoder in encoders), default=0.0)
        if klass.ttft_s is not None and encoders and before + took[llm] > klass.ttft_s:
            return None
        return took[llm]

    def _work(self, key: TypeKey, node: NodeType) -> ExecutorWork | None:
        shared, option, kind = key
        tp = parse_node_type(kind).gpu_count
        try:
            return work_on(
                self.model,
                option,
                node,
                self.classes,
                tp,
                self.engine,
                self.rates,
                self.companies[shared],
            )
        except UsageError:
            return None  # it does not split over so many GPUs


_times_of = lru_cache(maxsize=32)(_OptionTimes)


@dataclass(frozen=True)
class _Kind:
    """A set of parts on a kind of node, which some offers give, and how much slower it is taken to be.

    `shared` are the services that executors of it take requests of, none where they are one's alone.
    """

    option: Option
    kind: str
    offers: tuple[Offer, ...]
    slowed: float
    shared: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "+".join(self.option)

    @property
    def key(self) -> TypeKey:
        return self.shared, self.option, self.kind


@dataclass
class _Copy:
    """A copy of a route: its parts, the chains between them, and where those may stand (None: anywhere)."""

    route: tuple[str, ...]
    chains: list[Chain] = field(default_factory=list)
    places: dict[str, frozenset[Hashable]] = field(default_factory=dict)


class ServiceProgram:
    """The executors and classes of one any-to-any service.

    Executors take its requests alone, or those of all services that may share them: both are there, since
    room for the largest inputs of all is room that one alone may not need.
    """

    def __init__(
        self,
        problem: Problem,
        catalog: Catalog,
        service: Service,
        effort: Effort,
        choose: ChooseOptions | None,
        usable: Callable[[str], bool],
        until: Callable[[], bool],
        *,
        share: bool,
    ) -> None:
        self.problem, self.catalog, self.service, self.effort = problem, catalog, service, effort
        self.model = catalog.model(service.model)
        routes = {k.name: routes_of(catalog, service, k) for k in service.classes}
        every = [route for some in routes.values() for route in some]
        paths = service.paths
        if choose is None:
            options = options_of(self.model, service, every)
        else:
            options = choose(service, every)
            # Nothing but what was chosen runs, so routes consist of it.
            paths = (tuple("+".join(option) for option in options),)
        if paths:
            routes = {
                name: tuple(dict.fromkeys(allowed_routes(self.model, paths, some)))
                for name, some in routes.items()
            }
        self.routes = routes
        sharers = {one: list_sharers(problem, service, one) if share else () for one in options}
        shared = {one: names if len(names) > 1 else () for one, names in sharers.items()}
        on_offer = kinds_on_offer(problem, catalog)
        self.kinds = {k: o for k, o in on_offer.items() if service.allows(k) and usable(k)}
        self.types: list[_Kind] = []
        self.late = False
        self.times = _times_of(
            self.model,
            service.classes,
            service.rates,
            problem.engine_of(service),
            tuple((kind, self._nodes(kind, offers)) for kind, offers in self.kinds.items()),
            tuple(
                (names, company_of(problem, catalog, service, names))
                for names in sorted(set(shared.values()))
                if names
            ),
        )
        self._slow: dict[float, float] = {}
        free = choose is None and not service.paths
        for option in options:
            # Small ones come first: single parts can run all that there is.
            if free and len(option) > 1 and until():
                self.late = True
                break
            for kind, offers in self.kinds.items():
                for names in dict.fromkeys(((), shared[option])):
                    self._add(option, kind, offers, names)

    def _nodes(self, kind: str, offers: Sequence[Offer]) -> tuple[NodeType, ...]:
        """The nodes of a kind, one for each machine that gives it."""
        machines = sorted({offer.node_type for offer in offers})
        return tuple(node_source(self.catalog, kind, machine=each).node for each in machines)

    def _add(
        self, option: Option, kind: str, offers: tuple[Offer, ...], shared: tuple[str, ...]
    ) -> None:
        """Add the executor of an option on a kind of node, as slow as was found, if it runs anything."""
        key = (shared, option, kind)
        services = map(self.problem.service, shared or (self.service.name,))
        gpus = parse_node_type(kind).gpu_count
        # Which machine gives the slice is decided later: all that may must have the cores.
        cores = min(cores_of_slice(offer, gpus) for offer in offers)
        if cores_needed(services, option) > cores:
            return
        if self.times.works(key) is None or not any(
            self.times.time(key, klass, part)
            for klass in self.service.classes
            for route in self.routes[klass.name]
            for part in route
        ):
            return
        whose = name_services(shared or (self.service.name,))
        slowed = self.effort.slowdown_of(whose, "+".join(option), kind)
        self.types.append(_Kind(option, kind, offers, slowed, shared))

    def _time(self, index: int, klass: RequestClass, label: str) -> tuple[float, float] | None:
        one = self.types[index]
        return self.times.time(one.key, klass, label)

    # ---------------------------------------------------------------- programs

    @property
    def keys(self) -> tuple[TypeKey, ...]:
        """What tells its executors apart from all others but those that are shared."""
        return tuple(one.key for one in self.types)

    def list_classes(
        self, links: Links, *, within_interfaces: bool = False
    ) -> tuple[list[ExecutorType], list[ClassDemand]]:
        """Return the executors, one for each of `types`, and the classes.

        With `within_interfaces` no executor takes more requests than its share of the machine's interface
        hands over, as if nothing were handed over inside machines.
        """
        seconds: list[dict[PartKey, float]] = [{} for _ in self.types]
        latency: list[dict[PartKey, float]] = [{} for _ in self.types]
        classes = []
        for klass in self.service.classes:
            copies = self.copies_of(klass, links)
            classes.append(self._class(klass, copies, links))
            places = {part: where for copy in copies for part, where in copy.places.items()}
            max_s = self._side_limits(klass, copies) if links != "cheapest" else {}
            for index, one in enumerate(self.types):
                for part in sorted({part for copy in copies for part in copy.route}):
                    time = self._time(index, klass, without_way(part))
                    if time is None or not self._stands(one, places.get(part), links):
                        continue
                    busy, alone = one.slowed * time[0], time[1]
                    if alone > max_s.get(part, math.inf):
                        continue
                    if within_interfaces:
                        busy = max(busy, self._handing_s(klass, part, one, copies))
                    seconds[index][self.service.name, klass.name, part] = busy
                    latency[index][self.service.name, klass.name, part] = alone
        executors = [
            ExecutorType(
                self.service.name,
                tuple(sorted({part for *_, part in seconds[index]})),
                ((one.kind, 1),),
                seconds[index],
                latency[index],
                label=one.name,
                guests=tuple(name for name in one.shared if name != self.service.name),
            )
            for index, one in enumerate(self.types)
        ]
        return executors, classes

    def is_exact(self, klass: RequestClass) -> bool:
        """Whether copies with machines told apart leave out nothing: for images, shares are set aside."""
        return klass.image_s is None or all(len(route) == 1 for route in self.routes[klass.name])

    def _class(self, klass: RequestClass, copies: Sequence[_Copy], links: Links) -> ClassDemand:
        size = request_bytes(self.catalog, self.service, klass)
        routes = tuple(copy.route for copy in copies)
        between = {
            (a, b): moved
            for route in routes
            for a in route
            for b in route
            if a != b and (moved := _bytes_between(size, a, b)) > 0.0
        }
        places: dict[str, frozenset[Place]] = {}
        if links == "machine":
            places = {
                part: frozenset(place for place in where if isinstance(place, tuple))
                for copy in copies
                for part, where in copy.places.items()
            }
        return ClassDemand(
            self.service.name,
            klass.name,
            self.service.class_rate_per_s(klass),
            routes,
            tuple(dict.fromkeys(chain for copy in copies for chain in copy.chains)),
            between,
            self.service.priority,
            places,
        )

    def _stands(self, one: _Kind, places: frozenset[Hashable] | None, links: Links) -> bool:
        """Whether executors of a type stand at one of some places."""
        if places is None:
            return True
        return not places.isdisjoint(self._places(one, links))

    def _places(self, one: _Kind, links: Links) -> list[Hashable]:
        if links != "machine":
            return [one.kind]
        return [(offer.region, offer.node_type, one.kind) for offer in one.offers]

    def _handing_s(
        self, klass: RequestClass, part: str, one: _Kind, copies: Sequence[_Copy]
    ) -> float:
        """Seconds that a share of the interface takes for what a request hands to some parts, or they on."""
        size = request_bytes(self.catalog, self.service, klass)
        # A slice has a share of its machine's interface, by GPUs.
        gpus = parse_node_type(one.kind).gpu_count
        links = self.catalog.links
        # As if all went over one link, where one is stated for two machines.
        stated = {
            offer.node_type: min(
                (
                    link.bandwidth_bytes_per_s
                    for pair, link in links.node_pairs.items()
                    if offer.node_type in pair
                ),
                default=math.inf,
            )
            for offer in one.offers
        }
        slowest = min(
            min(
                links.nic_bytes_per_s(offer.region, offer.node_type),
                stated[offer.node_type],
                math.inf
                if offer.node_type not in links.groups
                else links.groups[offer.node_type].link.bandwidth_bytes_per_s,
            )
            * gpus
            / offer.gpus
            for offer in one.offers
        )
        max_bytes = 0.0
        for copy in copies:
            if part in copy.route:
                others = [other for other in copy.route if other != part]
                taken = sum(_bytes_between(size, other, part) for other in others)
                given = sum(_bytes_between(size, part, other) for other in others)
                # An interface takes in and gives out at once: the larger counts.
                max_bytes = max(max_bytes, taken, given)
        return max_bytes / slowest

    # ---------------------------------------------------------------- copies of routes

    def copies_of(self, klass: RequestClass, links: Links) -> list[_Copy]:
        """Return the copies of a class's routes: however slow executors are taken to be, so found once."""
        # Of offers no more than where machines stand and how large they are.
        stand = {
            kind: tuple(dict.fromkeys((one.region, one.node_type, one.gpus) for one in offers))
            for kind, offers in self.kinds.items()
        }
        where = (tuple(stand.items()), id(self.catalog))
        key = (klass.name, links, self.routes[klass.name], self.keys, where)
        known = self.times.copies.get(key)
        if known is None:
            known = self.times.copies[key] = (self.catalog, self._copies(klass, links))
        return known[1]

    def _copies(self, klass: RequestClass, links: Links) -> list[_Copy]:
        copies: list[_Copy] = []
        for route in self.routes[klass.name]:
            for merged in self._merged(klass, route):
                if klass.image_s is not None and len(merged) > 1:
                    copies.append(self._image_copy(klass, merged, links))
                elif klass.ttft_s is not None:
                    copies += self._text_copies(klass, merged, links, len(copies))
                else:
                    copies.append(_Copy(merged))
        return copies

    def _merged(self, klass: RequestClass, route: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """A route as it is, and with neighbours put together that one executor may run as one.

        Those are looked at only where it makes a difference that nothing is handed over. Routes whose parts
        have executors already (paths, cuts) stay as they are.
        """
        yield route
        edges = self._edges(klass, route)
        if (
            not edges
            or any("@" in part for part in route)
            or not self._hangs_on_links(klass, edges)
        ):
            return
        for number in range(1, len(edges) + 1):
            for some in combinations(edges, number):
                merged = _put_together(route, some, edges)
                if merged is not None and all(
                    any(self._time(i, klass, part) for i in range(len(self.types)))
                    for part in merged
                ):
                    yield merged

    def _edges(self, klass: RequestClass, route: Sequence[str]) -> list[tuple[str, str]]:
        """Pairs of parts of a route that follow each other before a promised moment."""
        named = {each: part for part in route for each in plain_parts(part)}
        size = request_bytes(self.catalog, self.service, klass)
        if klass.image_s is not None:
            pairs = [(named[a], named[b]) for a, b in size if a in named and b in named]
        else:
            encoders, llm = first_text_parts(self.model, tuple(named))
            if klass.ttft_s is None or llm is None:
                return []
            pairs = [(named[encoder], named[llm]) for encoder in encoders]
        return list(dict.fromkeys((a, b) for a, b in pairs if a != b))

    def _hangs_on_links(self, klass: RequestClass, edges: Sequence[tuple[str, str]]) -> bool:
        """Whether some executors keep a promise together only if they hand over faster than the slowest."""
        size = request_bytes(self.catalog, self.service, klass)
        if klass.image_s is not None:
            parts = dict.fromkeys(part for edge in edges for part in edge)
            took = sum(max(self._latencies(klass, part), default=0.0) for part in parts)
            moving = sum(self._slowest_s(_bytes_between(size, a, b)) for a, b in edges)
            return took + moving > klass.image_s
        within_s = self._first_text_s(klass)
        return any(
            within_s - self._slowest_s(_bytes_between(size, a, b)) < one + two - _SAME_S <= within_s
            for a, b in edges
            for one in self._latencies(klass, a)
            for two in self._latencies(klass, b)
        )

    def _first_text_s(self, klass: RequestClass) -> float:
        """Seconds until the first text that executors and links may take."""
        return math.inf if klass.ttft_s is None else klass.ttft_s

    def _latencies(self, klass: RequestClass, part: str) -> list[float]:
        """How long a request is at a part, over executors; each time once."""
        times = (self._time(i, klass, part) for i in range(len(self.types)))
        return sorted({time[1] for time in times if time is not None})

    def _text_copies(
        self, klass: RequestClass, route: tuple[str, ...], links: Links, before: int
    ) -> list[_Copy]:
        """Copies of a route by the ways from its encoders to the part that writes the first text."""
        edges = self._edges(klass, route)
        size = request_bytes(self.catalog, self.service, klass)
        budget_s = self._first_text_s(klass)
        ways = [
            self._ways(klass, a, b, _bytes_between(size, a, b), budget_s, links) for a, b in edges
        ]
        if math.prod(map(len, ways)) > _MAX_COPIES:
            # Too many to tell apart: as fast as the fastest where that is to bound, else as the widest.
            fastest = min if links == "cheapest" else max
            ways = [
                [LinkWay(some[0].first, some[0].second, fastest(way.seconds for way in some))]
                for some in ways
            ]
        whole = {part: self._all_places(klass, part, links) for edge in edges for part in edge}
        copies = []
        for number, chosen in enumerate(product(*ways)):
            places: dict[str, frozenset[Hashable]] = {}
            for (a, b), way in zip(edges, chosen, strict=True):
                for part, where in ((a, way.first), (b, way.second)):
                    places[part] = places.get(part, where) & where
            limited = any(places[part] != whole[part] for part in places)
            # Ways that differ have names that differ.
            apart = limited or math.prod(map(len, ways)) > 1
            names = {
                part: by_way(part, before + number) if apart and part in places else part
                for part in route
            }
            chains = [
                Chain(names[a], names[b], budget_s - way.seconds, budget_s)
                for (a, b), way in zip(edges, chosen, strict=True)
            ]
            copies.append(
                _Copy(
                    tuple(names[part] for part in route),
                    chains,
                    {names[part]: where for part, where in places.items()} if limited else {},
                )
            )
        return copies

    def _all_places(self, klass: RequestClass, part: str, links: Links) -> frozenset[Hashable]:
        return frozenset(self._by_place(klass, part, links))

    def _by_place(
        self, klass: RequestClass, part: str, links: Links
    ) -> dict[Hashable, list[float]]:
        """How long a request is at a part, by the places where executors may stand that run it."""
        found: dict[Hashable, list[float]] = {}
        for index, one in enumerate(self.types):
            time = self._time(index, klass, part)
            if time is not None:
                for place in self._places(one, links):
                    found.setdefault(place, []).append(time[1])
        return found

    def _ways(
        self, klass: RequestClass, a: str, b: str, size: float, budget_s: float, links: Links
    ) -> list[LinkWay]:
        first, second = (self._by_place(klass, part, links) for part in (a, b))
        if links == "slowest":
            return [LinkWay(frozenset(first), frozenset(second), self._slowest_s(size))]
        if links == "cheapest":
            return list_ways(
                first, second, lambda x, y: self._least_s(str(x), str(y), size), budget_s
            )
        # Places whose links are alike are one, so that there are few.
        alike: dict[Hashable, list[Hashable]] = {}
        for place in {**first, **second}:
            alike.setdefault(self._end(place), []).append(place)
        ends: tuple[dict[Hashable, list[float]], dict[Hashable, list[float]]] = ({}, {})
        for of_end, by_place in zip(ends, (first, second), strict=True):
            for place, times in by_place.items():
                of_end.setdefault(self._end(place), []).extend(times)
        found = list_ways(
            *ends, lambda x, y: self._between_s(alike[x][0], alike[y][0], size), budget_s
        )
        return [
            LinkWay(
                frozenset(place for end in way.first for place in alike[end] if place in first),
                frozenset(place for end in way.second for place in alike[end] if place in second),
                way.seconds,
            )
            for way in found
        ]

    def _image_copy(self, klass: RequestClass, route: tuple[str, ...], links: Links) -> _Copy:
        """A route to an image, with the bound on its two longest parts; those beside them have a share."""
        assert klass.image_s is not None
        size = request_bytes(self.catalog, self.service, klass)
        edges = self._edges(klass, route)
        moving = {edge: self._image_moving_s(klass, edge, size, links) for edge in edges}
        first, second = self._longest(klass, route)
        side = [part for part in route if part not in (first, second)]
        if links == "cheapest":
            aside = sum(min(self._latencies(klass, part), default=0.0) for part in side)
        else:
            limit_s = SIDE_SHARE * klass.image_s
            aside = sum(
                max((s for s in self._latencies(klass, part) if s <= limit_s), default=0.0)
                for part in side
            )
        budget_s = klass.image_s - sum(moving.values()) - aside
        inside_s = budget_s + moving.get((first, second), 0.0)
        chains = [Chain(first, second, budget_s, inside_s)]
        named = {each: part for part in route for each in plain_parts(part)}
        encoders, llm = first_text_parts(self.model, tuple(named))
        if klass.ttft_s is not None and llm is not None:
            for edge in ((named[encoder], named[llm]) for encoder in encoders):
                if edge[0] != edge[1]:
                    took = self._image_moving_s(klass, edge, size, links)
                    within_s = self._first_text_s(klass)
                    chains.append(Chain(*edge, within_s - took, within_s))
        return _Copy(route, chains)

    def _image_moving_s(
        self,
        klass: RequestClass,
        edge: tuple[str, str],
        size: Mapping[tuple[str, str], float],
        links: Links,
    ) -> float:
        moved = _bytes_between(size, *edge)
        if links != "cheapest":
            return self._slowest_s(moved)
        first, second = (self._by_place(klass, part, links) for part in edge)
        return min(
            (self._least_s(str(x), str(y), moved) for x in first for y in second), default=0.0
        )

    def _longest(self, klass: RequestClass, route: Sequence[str]) -> tuple[str, str]:
        """The two parts of a route that take longest at least, in their order: the rest is small beside."""
        longest = sorted(route, key=lambda part: -min(self._latencies(klass, part), default=0.0))
        first, second = sorted(longest[:2], key=list(route).index)
        return first, second

    def _side_limits(self, klass: RequestClass, copies: Sequence[_Copy]) -> dict[str, float]:
        """The longest that executors may take for parts beside the two longest of an image's route."""
        if klass.image_s is None:
            return {}
        return {
            part: SIDE_SHARE * klass.image_s
            for copy in copies
            if len(copy.route) > 1
            for part in copy.route
            if part not in self._longest(klass, copy.route)
        }

    # ---------------------------------------------------------------- links

    def _end(self, place: Hashable) -> Hashable:
        """What the links of a place hang on: two places with the same have the same links."""
        region, node_type, gpus = _machine_slice(place)
        stated = any(node_type in pair for pair in self.catalog.links.node_pairs)
        link = pair_link(self.catalog, (region, node_type, gpus), (region, node_type, gpus))
        return (node_type if stated else "", link.bandwidth_bytes_per_s, link.latency_s)

    def _between_s(self, a: Hashable, b: Hashable, size: float) -> float:
        """Seconds that bytes take from a slice of one machine to a slice of another."""
        return pair_link(self.catalog, _machine_slice(a), _machine_slice(b)).time_s(size)

    def _least_s(self, a: str, b: str, size: float) -> float:
        """The least that handing over takes between two executors on these kinds of nodes."""
        gpus = [parse_node_type(kind).gpu_count for kind in (a, b)]
        of_a, of_b = self.kinds[a], self.kinds[b]
        groups = self.catalog.links.groups
        inside = []
        for offer in of_a:
            if offer in of_b and sum(gpus) <= offer.gpus:
                known = groups.get(offer.node_type)
                if known is None or sum(gpus) <= known.gpus:
                    return 0.0
                inside.append(known.link.time_s(size))
        between = (
            self._between_s((x.region, x.node_type, a), (y.region, y.node_type, b), size)
            for x in of_a
            for y in of_b
            if x.region == y.region
        )
        return min([*inside, *between], default=math.inf)

    def _slowest_s(self, size: float) -> float:
        """Seconds that bytes take between the slowest slices on offer."""
        if size not in self._slow:
            places = {
                self._end(place): place
                for kind, offers in self.kinds.items()
                for place in [(offer.region, offer.node_type, kind) for offer in offers]
            }.values()
            times = (self._between_s(x, y, size) for x in places for y in places)
            groups = self.catalog.links.groups
            inner = (
                groups[offer.node_type].link.time_s(size)
                for offers in self.kinds.values()
                for offer in offers
                if offer.node_type in groups
            )
            self._slow[size] = max([*times, *inner], default=0.0)
        return self._slow[size]


def _machine_slice(place: Hashable) -> tuple[str, str, int]:
    """Region, node type and GPUs of a place where machines are told apart."""
    assert isinstance(place, tuple)
    region, node_type, kind = place
    return region, node_type, parse_node_type(kind).gpu_count


def _put_together(
    route: Sequence[str], some: Sequence[tuple[str, str]], edges: Sequence[tuple[str, str]]
) -> tuple[str, ...] | None:
    """Return a route with the ends of some edges run as one, None where they cannot be."""
    group = {part: part for part in route}
    for a, b in some:
        old, new = group[a], group[b]
        group = {part: new if of == old else of for part, of in group.items()}
    members = {of: [part for part in route if group[part] == of] for of in group.values()}
    # A group runs where its last part stood.
    order = [of for part in route if members[of := group[part]][-1] == part]
    if any(order.index(group[a]) > order.index(group[b]) for a, b in edges):
        return None  # something runs between two of its parts
    return tuple(
        ",".join(each for part in members[of] for each in plain_parts(part)) for of in order
    )


def _bytes_between(size: Mapping[tuple[str, str], float], first: str, second: str) -> float:
    """Bytes of a request that go from some parts to others."""
    return sum(size.get((a, b), 0.0) for a in plain_parts(first) for b in plain_parts(second))
