"""From a problem to the program of its executors: what could run where, and what that would do.

Any-to-any services bring executors: every set of parts (`executor_options`) on every kind of node where it
fits. Plain ones bring their templates, as executors of a phase or of the whole llm: all compete for the same
machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from atoll.catalog.catalog import Catalog
from atoll.catalog.models import ModelSpec
from atoll.catalog.nodes import NodeType
from atoll.core.errors import UsageError
from atoll.core.ids import Phase, RoleId, parse_node_type
from atoll.engines.table import EngineChoice
from atoll.perf.components.executor import ExecutorWork
from atoll.plan.capacities import node_source
from atoll.plan.executors import first_text_parts, request_bytes, routes_of, work_on
from atoll.plan.handover import cut_sizes, hop_link
from atoll.plan.plan import Instance, OfferKey
from atoll.plan.problem import Offer, Problem, Service
from atoll.solve.assembly import keep
from atoll.solve.effort import Effort, KnownPlan
from atoll.solve.graph.executor_options import (
    Option,
    allowed_routes,
    options_of,
    plain_parts,
    runs_on,
)
from atoll.solve.graph.graph_types import (
    Chain,
    ClassDemand,
    ExecutorType,
    GraphProgram,
    Machines,
    StandingExecutors,
)
from atoll.solve.templates.library import Libraries
from atoll.workload.classes import RequestClass

TEXT_CLASS = "text"
"""The one class of a plain service."""
SIDE_SHARE = 0.2
"""Of an image's promise, the most that a part beside the two longest may take."""
_PART_OF = {Phase.PREFILL: "llm.prefill", Phase.DECODE: "llm.decode", Phase.BOTH: "llm"}

ChooseOptions = Callable[[Service, Sequence[Sequence[str]]], tuple[Option, ...]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of an executor type: parts on a kind of node, a template of a role, or what runs."""

    service: str
    parts: Option
    kind: str | None = None
    role: RoleId | None = None
    template: int | None = None
    running: tuple[Instance, ...] = ()


@dataclass(frozen=True)
class BuiltProgram:
    """A program and, by executor type, what it stands for."""

    program: GraphProgram
    origins: tuple[Origin, ...]
    cut_short: bool = False
    """Whether time was up before all sets of parts were looked at: nothing is proven then."""


def build_program(
    problem: Problem,
    catalog: Catalog,
    effort: Effort,
    libraries: Libraries | None,
    *,
    choose: ChooseOptions | None = None,
    usable: Callable[[str], bool] = lambda _: True,
    within_interfaces: bool = False,
    until: Callable[[], bool] = lambda: False,
) -> BuiltProgram:
    """Return the program of a problem.

    `libraries` has the templates of its plain services, None where there are none. `choose` picks the options
    of a service, all that make sense by default; `usable` says which kinds of nodes count. With
    `within_interfaces` no executor takes more requests than its share of the machine's interface hands over,
    as if nothing were handed over inside machines: its plans keep that limit, and there may be cheaper ones.
    Parts that share an executor are left out once `until` says that time is up.
    """
    executors: list[ExecutorType] = []
    origins: list[Origin] = []
    classes: list[ClassDemand] = []
    late = False
    for service in problem.services:
        if service.is_graph:
            made = _GraphService(
                problem, catalog, service, effort, choose, usable, within_interfaces, until
            )
            late = late or made.late
            executors += made.executors
            origins += made.origins
            classes += made.classes
        elif libraries is not None:
            for executor, origin in _templates(service, libraries, effort, usable):
                executors.append(executor)
                origins.append(origin)
            classes.append(_plain_class(service))
    standing = _standing(problem, catalog, effort, executors, origins)
    used = [(one.service, one.label, tuple(sorted(one.uses))) for one in executors]
    known = effort.known or KnownPlan(frozenset(), 0.0, 0.0)
    limits = problem.limits
    program = GraphProgram(
        machines=tuple(machines_of(problem, catalog)),
        executors=tuple(executors),
        classes=tuple(classes),
        standing=tuple(standing),
        budget_usd_per_hour=limits.budget_usd_per_hour,
        spot_share=limits.spot_share,
        max_machines=limits.max_nodes,
        init_penalty=problem.settings.init_penalty,
        shortage=problem.settings.on_shortage,
        alike=True,
        unproven=effort.unproven,
        likely=tuple(at for at, one in enumerate(used) if one in effort.likely),
        known=tuple(at for at, one in enumerate(used) if one in known.used),
        known_usd=known.objective,
        at_least=known.at_least,
    )
    return BuiltProgram(program, tuple(origins), late)


def machines_of(problem: Problem, catalog: Catalog) -> list[Machines]:
    """Return the machines on offer, in the problem's order."""
    cuts = cut_sizes(problem, catalog)
    return [
        Machines(
            offer.key,
            parse_node_type(offer.node_type).gpu,
            offer.gpus,
            offer.available,
            offer.usd_per_hour,
            tuple(size for size in offer.sizes if size in cuts[offer.key]),
            catalog.links.nic_bytes_per_s(offer.region, offer.node_type),
        )
        for offer in problem.offers
    ]


def kinds_on_offer(problem: Problem, catalog: Catalog) -> dict[str, tuple[Offer, ...]]:
    """Return by kind of node the offers whose machines give it."""
    cuts = cut_sizes(problem, catalog)
    found: dict[str, list[Offer]] = {}
    for offer in problem.offers:
        for size, kind in zip(offer.sizes, offer.kinds, strict=True):
            if size in cuts[offer.key]:
                found.setdefault(kind, []).append(offer)
    return {kind: tuple(offers) for kind, offers in sorted(found.items())}


class _OptionTime(NamedTuple):
    """Parts on a kind of node: seconds that a request takes and how long it is there, by class and part."""

    kind: str
    parts: tuple[str, ...]
    seconds: Mapping[tuple[str, str], float]
    latency_s: Mapping[tuple[str, str], float]


class _OptionTimes:
    """What options of a service take on kinds of nodes: the same in every plan on the way, so found once."""

    def __init__(
        self,
        model: ModelSpec,
        service: Service,
        engine: EngineChoice,
        routes: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...],
        nodes: tuple[tuple[str, tuple[NodeType, ...]], ...],
    ) -> None:
        self.model, self.service, self.engine = model, service, engine
        self.routes, self.nodes = dict(routes), nodes
        self._found: dict[Option, tuple[_OptionTime, ...]] = {}

    def of(self, option: Option) -> tuple[_OptionTime, ...]:
        """Return what an option takes on every kind of node that runs it."""
        if option not in self._found:
            found = (self._on(option, kind, nodes) for kind, nodes in self.nodes)
            self._found[option] = tuple(timed for timed in found if timed is not None)
        return self._found[option]

    def _on(self, option: Option, kind: str, nodes: Sequence[NodeType]) -> _OptionTime | None:
        """Return how long requests take on an option, as slow as on any machine that gives the kind."""
        works = [self._work(option, kind, node) for node in nodes]
        # It must run on every machine that gives the kind: which one it gets is decided later.
        if not works or any(work is None for work in works):
            return None
        sure = [work for work in works if work is not None]
        seconds: dict[tuple[str, str], float] = {}
        latency: dict[tuple[str, str], float] = {}
        for klass in self.service.classes:
            labels = {part for route in self.routes[klass.name] for part in route}
            for part in sorted(labels):
                keys = [(klass.name, each) for each in plain_parts(part)]
                known = all(key in work.seconds for key in keys for work in sure)
                if not runs_on(part, option) or not known:
                    continue
                took = {key[1]: max(work.latency_s[key] for work in sure) for key in keys}
                alone = self._latency_s(klass, took)
                if alone is not None:
                    busy = sum(max(work.seconds[key] for work in sure) for key in keys)
                    seconds[klass.name, part] = busy
                    latency[klass.name, part] = alone
        if not seconds:
            return None
        return _OptionTime(kind, tuple(sorted({part for _, part in seconds})), seconds, latency)

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

    def _work(self, option: Option, kind: str, node: NodeType) -> ExecutorWork | None:
        tp = parse_node_type(kind).gpu_count
        try:
            return work_on(
                self.model, option, node, self.service.classes, tp, self.engine, self.service.rates
            )
        except UsageError:
            return None  # it does not split over so many GPUs


_times_of = lru_cache(maxsize=32)(_OptionTimes)


class _GraphService:
    """The executors and classes of one any-to-any service."""

    def __init__(
        self,
        problem: Problem,
        catalog: Catalog,
        service: Service,
        effort: Effort,
        choose: ChooseOptions | None,
        usable: Callable[[str], bool],
        within_interfaces: bool,
        until: Callable[[], bool],
    ) -> None:
        self.within_interfaces = within_interfaces
        self.problem, self.catalog, self.service, self.effort = problem, catalog, service, effort
        self.model = catalog.model(service.model)
        routes = {k.name: routes_of(catalog, service, k) for k in service.classes}
        every = [route for some in routes.values() for route in some]
        paths = service.paths
        if choose is None:
            self.options = options_of(self.model, service, every)
        else:
            self.options = choose(service, every)
            # Nothing but what was chosen runs, so routes consist of it.
            paths = (tuple("+".join(option) for option in self.options),)
        if paths:
            routes = {
                name: tuple(dict.fromkeys(allowed_routes(self.model, paths, some)))
                for name, some in routes.items()
            }
        self.routes = routes
        self.kinds = {
            kind: offers
            for kind, offers in kinds_on_offer(problem, catalog).items()
            if service.allows(kind) and usable(kind)
        }
        self.executors: list[ExecutorType] = []
        self.origins: list[Origin] = []
        self.late = False
        times = _times_of(
            self.model,
            service,
            problem.engine_of(service),
            tuple(routes.items()),
            tuple((kind, self._nodes(kind, offers)) for kind, offers in self.kinds.items()),
        )
        free = choose is None and not service.paths
        for option in self.options:
            # Small ones come first: single parts can run all that there is.
            if free and len(option) > 1 and until():
                self.late = True
                break
            for timed in times.of(option):
                self._add(option, timed)
        self.classes = [self._class(klass) for klass in service.classes]

    def _nodes(self, kind: str, offers: Sequence[Offer]) -> tuple[NodeType, ...]:
        """The nodes of a kind, one for each machine that gives it."""
        machines = sorted({offer.node_type for offer in offers})
        return tuple(node_source(self.catalog, kind, machine=each).node for each in machines)

    def _add(self, option: Option, timed: _OptionTime) -> None:
        """Add an executor, as slow as was found."""
        slow, name, kind = self.effort.slowdown, "+".join(option), timed.kind
        # What was measured for the kind, else for the option on any kind, else nothing.
        others = slow.get((self.service.name, name, "*"), 1.0)
        slowed = slow.get((self.service.name, name, kind), others)
        seconds = {key: slowed * busy for key, busy in timed.seconds.items()}
        if self.within_interfaces:
            seconds = {
                (klass, part): max(
                    busy, self._handing_s(self.service.klass(klass), part, kind, self.kinds[kind])
                )
                for (klass, part), busy in seconds.items()
            }
        executor = ExecutorType(
            self.service.name, timed.parts, ((kind, 1),), seconds, timed.latency_s, label=name
        )
        self.executors.append(executor)
        self.origins.append(Origin(self.service.name, option, kind=kind))

    def _handing_s(
        self, klass: RequestClass, part: str, kind: str, offers: Sequence[Offer]
    ) -> float:
        """Seconds that a share of the interface takes for what a request hands to some parts, or they on."""
        size = request_bytes(self.catalog, self.service, klass)
        # A slice has a share of its machine's interface, by GPUs.
        gpus = parse_node_type(kind).gpu_count
        slowest = min(
            self.catalog.links.nic_bytes_per_s(offer.region, offer.node_type) * gpus / offer.gpus
            for offer in offers
        )
        max_s = 0.0
        for route in self.routes[klass.name]:
            if part in route:
                others = [other for other in route if other != part]
                taken = sum(_bytes_between(size, other, part) for other in others)
                given = sum(_bytes_between(size, part, other) for other in others)
                # An interface takes in and gives out at once: the larger counts.
                max_s = max(max_s, taken, given)
        return max_s / slowest

    def _class(self, klass: RequestClass) -> ClassDemand:
        routes = self.routes[klass.name]
        size = request_bytes(self.catalog, self.service, klass)
        chains = tuple(
            dict.fromkeys(c for route in routes for c in self._chains(klass, route, size))
        )
        between = {
            (a, b): moved
            for route in routes
            for a in route
            for b in route
            if a != b and (moved := _bytes_between(size, a, b)) > 0.0
        }
        return ClassDemand(
            self.service.name,
            klass.name,
            self.service.class_rate_per_s(klass),
            routes,
            chains,
            between,
            self.service.priority,
        )

    def _chains(
        self, klass: RequestClass, route: Sequence[str], size: Mapping[tuple[str, str], float]
    ) -> list[Chain]:
        """Return the bound on the latency of two parts together; parts beside them have a share set aside."""
        named = {each: part for part in route for each in plain_parts(part)}
        found: list[Chain] = []
        encoders, llm = first_text_parts(self.model, tuple(named))
        if klass.ttft_s is not None and llm is not None:
            for encoder in encoders:
                if named[encoder] != named[llm]:
                    moving = self._moving_s(size.get((encoder, llm), 0.0))
                    found.append(Chain(named[encoder], named[llm], klass.ttft_s - moving))
        if klass.image_s is not None and len(route) > 1:
            moving = sum(
                self._moving_s(size.get((a, b), 0.0))
                for a, b in size
                if a in named and b in named and named[a] != named[b]
            )
            # The two that come first take longest of their least: the rest is small beside them.
            longest = sorted(route, key=lambda part: -self._min_s(klass, part))[:2]
            first, second = sorted(longest, key=list(route).index)
            # This also takes the part from executors that are slower than its share allows.
            aside = sum(
                self._max_s(klass, part, SIDE_SHARE * klass.image_s)
                for part in route
                if part not in longest
            )
            found.append(Chain(first, second, klass.image_s - moving - aside))
        return found

    def _moving_s(self, size: float) -> float:
        """Seconds that bytes take between the slowest slices on offer."""
        links = [
            hop_link(self.catalog, offer.node_type, offer.region, parse_node_type(kind).gpu_count)
            for kind, offers in self.kinds.items()
            for offer in offers
        ]
        if not links:
            return 0.0
        # The least bandwidth with the largest latency: no link is slower than that.
        slowest = min(link.bandwidth_bytes_per_s for link in links)
        return size / slowest + max(link.latency_s for link in links)

    def _min_s(self, klass: RequestClass, part: str) -> float:
        key = (klass.name, part)
        return min((e.latency_s[key] for e in self.executors if key in e.latency_s), default=0.0)

    def _max_s(self, klass: RequestClass, part: str, limit_s: float) -> float:
        """The longest that a part may take: executors that take longer than the limit are none for it."""
        kept, key = [], (klass.name, part)
        for index, executor in enumerate(self.executors):
            if key not in executor.seconds:
                continue
            if executor.latency_s[key] > limit_s:
                left = {other: s for other, s in executor.seconds.items() if other != key}
                self.executors[index] = replace(executor, seconds=left)
            else:
                kept.append(executor.latency_s[key])
        return max(kept, default=0.0)


def _bytes_between(size: Mapping[tuple[str, str], float], first: str, second: str) -> float:
    """Bytes of a request that go from some parts to others."""
    return sum(size.get((a, b), 0.0) for a in plain_parts(first) for b in plain_parts(second))


# Plain services


def _plain_class(service: Service) -> ClassDemand:
    parts = [_PART_OF[role.phase] for role in service.roles]
    routes: list[tuple[str, ...]] = []
    if "llm" in parts:
        routes.append(("llm",))
    if "llm.prefill" in parts:
        routes.append(("llm.prefill", "llm.decode"))
    return ClassDemand(
        service.name, TEXT_CLASS, service.demand_per_s, tuple(routes), priority=service.priority
    )


def _templates(
    service: Service,
    libraries: Libraries,
    effort: Effort,
    usable: Callable[[str], bool],
) -> list[tuple[ExecutorType, Origin]]:
    """The templates of a plain service as executors; one second of them is so many requests."""
    found: list[tuple[ExecutorType, Origin]] = []
    for role in service.roles:
        library = libraries.roles[str(role)]
        rates = library.throughput
        if effort.derating is not None:
            rates = effort.derating.throughput(str(role), library)
        # Without demand any number of seconds serves it.
        per_request = service.demand(role) / service.demand_per_s if service.demand_per_s else 1.0
        part = _PART_OF[role.phase]
        for index, (row, rate) in enumerate(zip(library.counts, rates, strict=True)):
            uses = tuple(
                (kind, int(count))
                for kind, count in zip(libraries.kinds, row, strict=True)
                if count
            )
            if rate <= 0.0 or not all(service.allows(k) and usable(k) for k, _ in uses):
                continue
            seconds = {(TEXT_CLASS, part): per_request / float(rate)}
            executor = ExecutorType(
                service.name, (part,), uses, seconds, {(TEXT_CLASS, part): 0.0}, label=str(role)
            )
            found.append((executor, Origin(service.name, (part,), role=role, template=index)))
    return found


# What runs


def _standing(
    problem: Problem,
    catalog: Catalog,
    effort: Effort,
    executors: list[ExecutorType],
    origins: list[Origin],
) -> list[StandingExecutors]:
    """Return what runs and may stay: executors of a type that there is, and plain instances as they are."""
    # Templates have no kind: plain instances that run become types of their own.
    known = {
        (origin.service, origin.parts, origin.kind): index
        for index, origin in enumerate(origins)
        if origin.kind is not None
    }
    offers = {offer.key: offer for offer in problem.offers}
    names = {service.name: service for service in problem.services}
    groups: dict[tuple[int, tuple[OfferKey, ...]], list[Instance]] = {}
    for instance in problem.running:
        service = names.get(instance.service)
        keys = tuple((instance.region, n.node_type, n.market) for n in instance.nodes)
        if service is None or any(key not in offers for key in keys):
            continue
        if any(
            node.gpus not in offers[key].sizes or not service.allows(node.kind)
            for node, key in zip(instance.nodes, keys, strict=True)
        ):
            continue
        index: int | None = None
        if instance.is_executor and service.is_graph:
            node = instance.nodes[0]
            if node.tp != node.gpus or len(instance.nodes) > 1:
                continue  # another split takes other times
            index = known.get((service.name, instance.parts, instance.nodes[0].kind))
        elif not instance.is_executor and instance.role_id in service.roles:
            index = _add_running(problem, catalog, effort, service, instance, executors, origins)
        if index is not None:
            groups.setdefault((index, keys), []).append(instance)
    standing = []
    for (index, keys), group in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1])):
        standing.append(StandingExecutors(index, keys, len(group)))
        origin = origins[index]
        origins[index] = Origin(
            origin.service,
            origin.parts,
            origin.kind,
            origin.role,
            origin.template,
            (*origin.running, *group),
        )
    return standing


def _add_running(
    problem: Problem,
    catalog: Catalog,
    effort: Effort,
    service: Service,
    instance: Instance,
    executors: list[ExecutorType],
    origins: list[Origin],
) -> int | None:
    """Add a plain instance that runs as a type of its own: it has its own layout."""
    kept = keep(problem, catalog, instance)
    share = 1.0 if effort.derating is None else effort.derating.share(kept)
    rate = kept.throughput_per_s * share
    if rate <= 0.0:
        return None
    role = instance.role_id
    per_request = service.demand(role) / service.demand_per_s if service.demand_per_s else 1.0
    part = _PART_OF[role.phase]
    executors.append(
        ExecutorType(
            service.name,
            (part,),
            instance.node_counts,
            {(TEXT_CLASS, part): per_request / rate},
            {(TEXT_CLASS, part): 0.0},
            label=f"running {instance.id}",
        )
    )
    origins.append(Origin(service.name, (part,), role=role))
    return len(executors) - 1
