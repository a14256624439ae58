"""From a problem to the program of its executors: what could run where, and what that would do.

Any-to-any services bring executors: every set of parts (`executor_options`) on every kind of node where it
fits. Plain ones bring their templates, as executors of a phase or of the whole llm: all compete for the same
machines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase, RoleId, parse_node_type
from atoll.plan.component_sharing import name_services
from atoll.plan.handover import cut_sizes
from atoll.plan.plan import Instance, OfferKey
from atoll.plan.problem import Problem, Service
from atoll.solve.assembly import keep
from atoll.solve.effort import Effort, KnownPlan
from atoll.solve.graph.executor_options import Option
from atoll.solve.graph.graph_service import ChooseOptions, ServiceProgram, TypeKey
from atoll.solve.graph.graph_types import (
    ClassDemand,
    ExecutorType,
    GraphProgram,
    Machines,
    StandingExecutors,
)
from atoll.solve.templates.library import Libraries

TEXT_CLASS = "text"
"""The one class of a plain service."""
_PART_OF = {Phase.PREFILL: "llm.prefill", Phase.DECODE: "llm.decode", Phase.BOTH: "llm"}


Groups = Literal["ignored", "shared", "apart"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of an executor type: parts on a kind of node, a template of a role, or what runs.

    `guests` are the services that share executors of the type beside their own.
    """

    service: str
    parts: Option
    kind: str | None = None
    guests: tuple[str, ...] = ()
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
    by_machine: GraphProgram | None = None
    """The same with machines told apart, for `patterns`; None where plans need none."""
    exact: bool = True
    """Whether that one leaves out nothing that keeps its promises."""
    hangs_on_links: bool = False
    """Whether it makes a difference which way data goes."""


def build_program(
    problem: Problem,
    catalog: Catalog,
    effort: Effort,
    libraries: Libraries | None,
    *,
    choose: ChooseOptions | None = None,
    usable: Callable[[str], bool] = lambda _: True,
    anywhere: bool = False,
    within_interfaces: bool = False,
    groups: Groups = "ignored",
    share: bool = True,
    until: Callable[[], bool] = lambda: False,
) -> BuiltProgram:
    """Return the program of a problem.

    `libraries` has the templates of its plain services, None where there are none. `choose` picks the options
    of a service, all that make sense by default; `usable` says which kinds of nodes count, and `share`
    whether services share executors where they may.

    Handing over takes the least that it could, so that what is proven of the program holds for every plan.
    With `anywhere` it takes what it does on the slowest link: its plans keep their promises wherever
    executors stand, and there may be cheaper ones. With `within_interfaces` it does, and no executor takes
    more requests than its share of the machine's interface hands over, as if nothing were handed over inside
    machines. Parts that share an executor are left out once `until` says that time is up.

    `groups` of GPUs inside machines: "ignored", which is proven of all plans; or executors that fit into one
    are taken to be "shared" by it; or all to be "apart", so that plans hold wherever they stand.
    """
    classes: list[ClassDemand] = []
    by_machine: list[ClassDemand] = []
    late, exact, hangs = False, groups == "ignored", False
    programs = {
        service.name: ServiceProgram(
            problem, catalog, service, effort, choose, usable, until, share=share
        )
        for service in problem.graph_services
    }
    types = _Types(programs)
    executors, origins = types.executors, types.origins
    kept = anywhere or within_interfaces
    for service in problem.services:
        if service.is_graph:
            made = programs[service.name]
            late = late or made.late
            some, own = made.list_classes(
                "slowest" if kept else "cheapest", within_interfaces=within_interfaces
            )
            apart: list[ExecutorType] = []
            if not kept:
                apart, more = made.list_classes("machine")
                by_machine += more
                exact = exact and all(made.is_exact(klass) for klass in service.classes)
                hangs = hangs or any(len(k.routes) > len(made.routes[k.name]) for k in own)
            types.add(service.name, some, apart)
            classes += own
        elif libraries is not None:
            for executor, origin in _templates(service, libraries, effort, usable):
                executors.append(executor)
                origins.append(origin)
            classes.append(_plain_class(service))
            by_machine.append(classes[-1])
    standing = _standing(problem, catalog, effort, executors, origins)
    used = [(name_services(one.services), one.label, tuple(sorted(one.uses))) for one in executors]
    known = effort.known or KnownPlan(frozenset(), 0.0, 0.0)
    limits = problem.limits
    program = GraphProgram(
        machines=tuple(machines_of(problem, catalog, groups)),
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
    if kept:
        return BuiltProgram(program, tuple(origins), late)
    apart_types = tuple(types.told.get(at, one) for at, one in enumerate(executors))
    return BuiltProgram(
        program,
        tuple(origins),
        late,
        replace(program, executors=apart_types, classes=tuple(by_machine)),
        exact,
        hangs,
    )


class _Types:
    """Executor types of all services, shared ones once; `told` are those with machines told apart."""

    def __init__(self, programs: Mapping[str, ServiceProgram]) -> None:
        self.executors: list[ExecutorType] = []
        self.origins: list[Origin] = []
        self.told: dict[int, ExecutorType] = {}
        self._programs = programs
        self._at: dict[TypeKey, int] = {}
        # Executors that are shared must be of use to all who share them.
        self._ready = Counter(key for made in programs.values() for key in made.keys if key[0])

    def add(
        self, service: str, some: Sequence[ExecutorType], apart: Sequence[ExecutorType]
    ) -> None:
        """Add the types of a service, or what those of others do for it."""
        for number, key in enumerate(self._programs[service].keys):
            shared, parts, kind = key
            at = self._at.get(key)
            if at is not None:
                self.executors[at] = _with_guest(self.executors[at], some[number])
                if apart:
                    self.told[at] = _with_guest(self.told[at], apart[number])
            elif self._ready[key] == len(shared):
                at = len(self.executors)
                if shared:
                    self._at[key] = at
                if apart:
                    self.told[at] = apart[number]
                self.executors.append(some[number])
                self.origins.append(Origin(service, parts, kind, some[number].guests))


def _with_guest(one: ExecutorType, guest: ExecutorType) -> ExecutorType:
    """Return executors with what they do for another service that shares them, too."""
    return replace(
        one,
        parts=tuple(sorted({*one.parts, *guest.parts})),
        seconds={**one.seconds, **guest.seconds},
        latency_s={**one.latency_s, **guest.latency_s},
    )


def machines_of(problem: Problem, catalog: Catalog, groups: Groups = "ignored") -> list[Machines]:
    """Return the machines on offer, in the problem's order."""
    cuts = cut_sizes(problem, catalog)
    known = {} if groups == "ignored" else catalog.links.groups

    def inside(node_type: str) -> tuple[float, float, float]:
        one = known.get(node_type)
        if one is None:
            return math.inf, math.inf, 0.0
        gpus = float(one.gpus) if groups == "shared" else 0.0
        return gpus, one.link.bandwidth_bytes_per_s, one.link.latency_s

    return [
        Machines(
            offer.key,
            parse_node_type(offer.node_type).gpu,
            offer.gpus,
            offer.available,
            offer.usd_per_hour,
            tuple(size for size in offer.sizes if size in cuts[offer.key]),
            catalog.links.nic_bytes_per_s(offer.region, offer.node_type),
            *inside(offer.node_type),
        )
        for offer in problem.offers
    ]


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
            key = (service.name, TEXT_CLASS, part)
            seconds = {key: per_request / float(rate)}
            executor = ExecutorType(
                service.name, (part,), uses, seconds, {key: 0.0}, label=str(role)
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
    offers = {offer.key: offer for offer in problem.offers}
    served = frozenset(name for one in problem.running for name in one.services)
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
            index = _type_of(instance, origins, served)
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
            origin.guests,
            origin.role,
            origin.template,
            (*origin.running, *group),
        )
    return standing


def _type_of(executor: Instance, origins: Sequence[Origin], served: frozenset[str]) -> int | None:
    """Return the type of an executor that runs; None where there is none.

    Who shares it may change without a start: the same as now where all who may are `served` already, since
    then it was planned so, else all who may.
    """
    own = executor.service, executor.parts, executor.nodes[0].kind
    same = [at for at, one in enumerate(origins) if (one.service, one.parts, one.kind) == own]
    widest = max(same, key=lambda at: len(origins[at].guests), default=None)
    if widest is None or not served.issuperset(origins[widest].guests):
        return widest
    guests = executor.services[1:]
    return next((at for at in same if origins[at].guests == guests), widest)


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
    key = (service.name, TEXT_CLASS, part)
    executors.append(
        ExecutorType(
            service.name,
            (part,),
            instance.node_counts,
            {key: per_request / rate},
            {key: 0.0},
            label=f"running {instance.id}",
        )
    )
    origins.append(Origin(service.name, (part,), role=role))
    return len(executors) - 1
