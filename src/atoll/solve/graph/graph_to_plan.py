"""From what a program found to a plan: executors on slices of machines, and paths over them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InternalError
from atoll.core.ids import Phase, RoleId, parse_node_type
from atoll.plan.component_sharing import name_services
from atoll.plan.executors import node_work
from atoll.plan.plan import (
    SINK,
    SOURCE,
    Flow,
    Guest,
    Instance,
    Market,
    Node,
    OfferKey,
    PartWork,
    Plan,
    RequestPath,
    RequestStep,
)
from atoll.plan.problem import Problem
from atoll.solve.assembly import NewInstance, assemble, build_instance, infeasible, keep, price
from atoll.solve.derating import apply_all
from atoll.solve.effort import Effort
from atoll.solve.graph.boxes import LaidMachine
from atoll.solve.graph.executor_options import plain_parts
from atoll.solve.graph.executor_packing import local_paths, place_in
from atoll.solve.graph.graph_build import BuiltProgram, Origin
from atoll.solve.graph.graph_types import GraphAnswer, PlacedExecutors
from atoll.solve.graph.matching import RouteFlow, match_routes
from atoll.solve.templates.library import Libraries

_MARKETS: tuple[Market, ...] = ("owned", "on-demand", "spot")
_TRICKLE = 1e-9
"""Share of a class below which a path is rounding."""


def plan_of(
    problem: Problem,
    catalog: Catalog,
    built: BuiltProgram,
    answer: GraphAnswer,
    libraries: Libraries | None,
    effort: Effort,
    *,
    solver: str,
    reasons: Sequence[str] = (),
    boxes: Sequence[LaidMachine] = (),
    proven: bool = True,
) -> Plan:
    """Return the plan of an answer; "infeasible", with its reasons, where there is none.

    Its bound is the plan's if `proven`: that of a simple rule holds for plans by the rule alone.
    With `boxes` executors stand in these machines, and paths stay on a machine as far as they can.
    """
    if answer.status == "infeasible":
        return infeasible(
            problem,
            solver=solver,
            reasons=(*answer.reasons, *reasons),
            cut_short=answer.cut_short,
        )
    if not boxes:
        answer = _lean(built, answer)
    made = _Executors(problem, catalog, built, answer, libraries)
    routes = [
        route
        for route in match_routes(built.program, answer)
        if route.klass in made.classes(route.service)
    ]
    served = _served(problem, answer)
    paths = list(_paths(routes, made.by_type))
    passing = _passing(problem, paths, served)
    instances = [
        _carrying(instance, passing) if instance.is_executor else instance
        for instance in apply_all(effort.derating, made.instances)
    ]
    packed, seats = place_in(problem, sorted(instances, key=lambda i: i.id), boxes, made.by_type)
    if seats:
        # Plain services stand on the same machines, and have routes of their own.
        seated = local_paths(boxes, seats, built.program)
        paths = _seated_paths([each for each in seated if each[1] in made.classes(each[0])])
        passing = _passing(problem, paths, served)
        packed = tuple(_carrying(i, passing) if i.is_executor else i for i in packed)
    return assemble(
        problem,
        _with_shares(
            problem,
            paths,
            served,
            [
                _with_work(problem, catalog, effort, one) if one.is_executor else one
                for one in packed
            ],
        ),
        catalog=catalog,
        status=answer.status,
        solver=solver,
        bound=answer.bound if proven else None,
        reasons=(*answer.reasons, *reasons),
        cut_short=answer.cut_short,
        paths=paths,
        served_by_paths=served,
    )


def _lean(built: BuiltProgram, answer: GraphAnswer) -> GraphAnswer:
    """Return the answer with new executors that have no part which no request needs of them.

    The program is free to take executors of more parts than are used; those of fewer are as fast, which is
    looked up, and load less. Where paths or cuts name executors they stay as they are named.
    """
    used: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
    for flow in answer.flows:
        if flow.rate_per_s > 0.0:
            used[flow.executor, flow.region].add(flow.part)
    instead = {}
    for placed in answer.placed:
        at = (placed.executor, placed.region)
        lean = _leaner(built, placed.executor, used[at]) if placed.kept == 0 else None
        if lean is not None:
            instead[at] = lean
    split: defaultdict[tuple[str, str, int, str, int, str], float] = defaultdict(float)
    for (service, klass, route, part, executor, region), rate in answer.split.items():
        split[service, klass, route, part, instead.get((executor, region), executor), region] += (
            rate
        )
    return replace(
        answer,
        placed=tuple(
            replace(p, executor=instead.get((p.executor, p.region), p.executor))
            for p in answer.placed
        ),
        flows=tuple(
            replace(f, executor=instead.get((f.executor, f.region), f.executor))
            for f in answer.flows
        ),
        split=dict(split),
    )


def _leaner(built: BuiltProgram, index: int, used: set[str]) -> int | None:
    """The executor type of the parts used alone, None where there is none or it is slower."""
    origin, own = built.origins[index], built.program.executors[index]
    names = {each for part in used if "@" not in part for each in plain_parts(part)}
    parts = tuple(part for part in origin.parts if part in names)
    if origin.kind is None or not parts or parts == origin.parts:
        return None
    for other, lean in zip(built.origins, built.program.executors, strict=True):
        same_place = (other.service, other.guests, other.kind)
        if same_place == (origin.service, origin.guests, origin.kind) and other.parts == parts:
            same = all(
                lean.seconds.get(key, math.inf) <= seconds
                and lean.latency_s[key] <= own.latency_s[key]
                for key, seconds in own.seconds.items()
                if key[2] in used
            )
            return built.origins.index(other) if same else None
    return None


class _Executors:
    """The instances of an answer, by executor type and region."""

    def __init__(
        self,
        problem: Problem,
        catalog: Catalog,
        built: BuiltProgram,
        answer: GraphAnswer,
        libraries: Libraries | None,
    ) -> None:
        self.problem, self.catalog, self.built = problem, catalog, built
        self.libraries = libraries
        self.by_type: dict[tuple[int, str], list[str]] = defaultdict(list)
        self.instances: list[Instance] = []
        self.taken = {instance.id for instance in problem.running}
        left: dict[int, list[Instance]] = {
            index: list(origin.running) for index, origin in enumerate(built.origins)
        }
        for placed in answer.placed:
            self._place(placed, built.origins[placed.executor], left[placed.executor])

    def classes(self, service: str) -> tuple[str, ...]:
        """The classes of a service; none where it is a plain one."""
        return tuple(k.name for k in self.problem.service(service).classes)

    def _place(self, placed: PlacedExecutors, origin: Origin, running: list[Instance]) -> None:
        sources: Counter[tuple[OfferKey, str]] = Counter()
        for key, kind, number in placed.slices:
            sources[key, kind] += number
        # What runs on slices that are taken anyway stays, also where starting another costs nothing.
        stay = 0
        while stay < placed.count:
            same = next(
                (i for i in running if i.region == placed.region and _covered(i, sources)), None
            )
            if same is None:
                break
            running.remove(same)
            for node in same.nodes:
                sources[(same.region, node.node_type, node.market), node.kind] -= 1
            self._add(placed, self._kept(same, origin))
            stay += 1
        if stay < placed.kept:
            raise InternalError(f"nothing of {origin.service} runs in {placed.region} to keep")
        for _ in range(placed.count - stay):
            self._add(placed, self._new(placed, origin, sources))

    def _add(self, placed: PlacedExecutors, instance: Instance) -> None:
        self.taken.add(instance.id)
        self.instances.append(instance)
        self.by_type[placed.executor, placed.region].append(instance.id)

    def _kept(self, running: Instance, origin: Origin) -> Instance:
        if not running.is_executor:
            return keep(self.problem, self.catalog, running)
        usd = price(self.problem, running.region, running.nodes)
        return running.model_copy(
            update={"usd_per_hour": usd, "kept": True, "guests": _guests(origin)}
        )

    def _new(
        self, placed: PlacedExecutors, origin: Origin, sources: Counter[tuple[OfferKey, str]]
    ) -> Instance:
        if origin.kind is None:
            return self._new_template(placed, origin, sources)
        key = _take(sources, origin.kind)
        role = RoleId(origin.service, "+".join(origin.parts), Phase.SERVE)
        gpus, machine = parse_node_type(origin.kind).gpu_count, parse_node_type(key[1]).gpu_count
        node = Node(
            id="n0",
            node_type=key[1],
            market=key[2],
            start=0,
            end=1,
            tp=gpus,
            gpu_ids=None if gpus == machine else tuple(range(gpus)),
        )
        return Instance(
            id=self._next_id(f"{origin.service}-{'-'.join(origin.parts)}"),
            service=origin.service,
            role=str(role),
            region=placed.region,
            stages=1,
            nodes=(node,),
            flows=(),
            throughput_per_s=0.0,
            usd_per_hour=price(self.problem, placed.region, (node,)),
            guests=_guests(origin),
        )

    def _new_template(
        self, placed: PlacedExecutors, origin: Origin, sources: Counter[tuple[OfferKey, str]]
    ) -> Instance:
        if self.libraries is None or origin.role is None or origin.template is None:
            raise InternalError(f"{origin.service}: a second copy of what only runs")
        layout = self.libraries.roles[str(origin.role)].layout(origin.template)
        kinds = Counter(kind for stage in layout.stages for kind in stage.nodes)
        rented: Counter[tuple[str, str, Market]] = Counter()
        for kind, number in sorted(kinds.items()):
            for _ in range(number):
                _, node_type, market = _take(sources, kind)
                rented[kind, node_type, market] += 1
        choice = NewInstance(str(origin.role), placed.region, layout, dict(rented))
        name = self._next_id(f"{origin.service}-{origin.role.phase}")
        return build_instance(self.problem, self.catalog, choice, id=name)

    def _next_id(self, stem: str) -> str:
        number = 0
        while f"{stem}-{number}" in self.taken:
            number += 1
        return f"{stem}-{number}"


def _guests(origin: Origin) -> tuple[Guest, ...]:
    """The services that share an executor, before anybody is led over it."""
    return tuple(Guest(service=name, per_s=0.0) for name in origin.guests)


def _covered(instance: Instance, sources: Mapping[tuple[OfferKey, str], int]) -> bool:
    """Whether the slices that an answer takes are those that an instance has."""
    own = Counter(((instance.region, n.node_type, n.market), n.kind) for n in instance.nodes)
    return all(sources.get(key, 0) >= count for key, count in own.items())


def _take(sources: Counter[tuple[OfferKey, str]], kind: str) -> OfferKey:
    """Take a slice of this kind: one's own first, spot last."""
    offers = [key for (key, of_kind), left in sources.items() if of_kind == kind and left > 0]
    if not offers:
        raise InternalError(f"no {kind} left to take")
    key = min(offers, key=lambda k: (_MARKETS.index(k[2]), k))
    sources[key, kind] -= 1
    return key


def _served(problem: Problem, answer: GraphAnswer) -> dict[str, float]:
    """The share of its requests that each any-to-any service serves: that of its worst served class."""
    found = {}
    for service in problem.services:
        if service.is_graph:
            shares = [answer.served.get((service.name, k.name), 0.0) for k in service.classes]
            min_share = min(shares, default=1.0)
            found[service.name] = 1.0 if min_share >= 1.0 - 5e-7 else max(0.0, min_share)
    return found


def _paths(
    routes: Sequence[RouteFlow], by_type: Mapping[tuple[int, str], Sequence[str]]
) -> list[RequestPath]:
    """Routes over types of executors as paths over executors: those of a type share evenly."""
    totals: defaultdict[tuple[str, str], float] = defaultdict(float)
    for route in routes:
        totals[route.service, route.klass] += route.rate_per_s
    merged: defaultdict[
        tuple[str, str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]], float
    ] = defaultdict(float)
    for route in routes:
        total = totals[route.service, route.klass]
        if total <= 0.0 or route.rate_per_s <= _TRICKLE * total:
            continue
        steps = tuple(
            (
                tuple(each for part in parts for each in plain_parts(part)),
                tuple(by_type[executor, route.region]),
            )
            for executor, parts in route.steps
        )
        merged[route.service, route.klass, steps] += route.rate_per_s / total
    kept: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (service, klass, _), share in merged.items():
        kept[service, klass] += share
    return [
        RequestPath(
            service=service,
            klass=klass,
            share=min(1.0, share / kept[service, klass]),
            steps=tuple(
                RequestStep(parts=parts, instances={name: 1.0 / len(names) for name in names})
                for parts, names in steps
            ),
        )
        for (service, klass, steps), share in sorted(merged.items())
    ]


def _seated_paths(
    routes: Sequence[tuple[str, str, float, tuple[tuple[str, str], ...]]],
) -> list[RequestPath]:
    """Routes of parts over single executors as paths: parts that follow each other on one are one step."""
    totals: defaultdict[tuple[str, str], float] = defaultdict(float)
    merged: defaultdict[tuple[str, str, tuple[tuple[tuple[str, ...], str], ...]], float]
    merged = defaultdict(float)
    for service, klass, rate, visits in routes:
        steps: list[tuple[tuple[str, ...], str]] = []
        for part, name in visits:
            if steps and steps[-1][1] == name:
                steps[-1] = ((*steps[-1][0], *plain_parts(part)), name)
            else:
                steps.append((plain_parts(part), name))
        totals[service, klass] += rate
        merged[service, klass, tuple(steps)] += rate
    return [
        RequestPath(
            service=service,
            klass=klass,
            share=min(1.0, rate / totals[service, klass]),
            steps=tuple(RequestStep(parts=parts, instances={name: 1.0}) for parts, name in route),
        )
        for (service, klass, route), rate in sorted(merged.items())
    ]


def _passing(
    problem: Problem, paths: Sequence[RequestPath], served: Mapping[str, float]
) -> dict[tuple[str, str], float]:
    """Requests/s that paths lead over each executor, by executor and service."""
    passing: defaultdict[tuple[str, str], float] = defaultdict(float)
    for path in paths:
        service = problem.service(path.service)
        rate = service.class_rate_per_s(service.klass(path.klass)) * served[service.name]
        for step in path.steps:
            for name, weight in step.instances.items():
                passing[name, service.name] += rate * path.share * weight
    return dict(passing)


def _with_work(problem: Problem, catalog: Catalog, effort: Effort, instance: Instance) -> Instance:
    """The executor with the seconds that requests take of it, as slow as it was planned to be."""
    parts, kind = instance.role_id.component, instance.nodes[0].kind
    slowed = effort.slowdown_of(name_services(instance.services), parts, kind)
    told: dict[str, tuple[PartWork, ...]] = {}
    for name in instance.services:
        work = node_work(problem, catalog, problem.service(name), instance)
        found = {} if work is None else work.seconds
        told[name] = tuple(PartWork(*key, slowed * found[key]) for key in sorted(found))
    guests = tuple(
        guest.model_copy(update={"work": told[guest.service]}) for guest in instance.guests
    )
    return instance.model_copy(update={"work": told[instance.service], "guests": guests})


def _with_shares(
    problem: Problem,
    paths: Sequence[RequestPath],
    served: Mapping[str, float],
    instances: Sequence[Instance],
) -> tuple[Instance, ...]:
    """Executors with which part of their work each service that shares them is."""
    shared = {one.id: one for one in instances if one.guests}
    busy: defaultdict[tuple[str, str], float] = defaultdict(float)
    for path in paths:
        service = problem.service(path.service)
        rate = service.class_rate_per_s(service.klass(path.klass)) * served[service.name]
        for step in path.steps:
            for name in step.instances.keys() & shared.keys():
                took = {(k, part): s for k, part, s in shared[name].work_of(path.service)}
                seconds = sum(took.get((path.klass, part), 0.0) for part in step.parts)
                weight = path.share * step.instances[name]
                busy[name, path.service] += rate * weight * seconds
    made = []
    for one in instances:
        total = sum(busy[one.id, name] for name in one.services)
        guests = tuple(
            guest.model_copy(update={"share": min(1.0, busy[one.id, guest.service] / total)})
            for guest in one.guests
            if total > 0.0
        )
        made.append(one.model_copy(update={"guests": guests}) if guests else one)
    return tuple(made)


def _carrying(instance: Instance, passing: Mapping[tuple[str, str], float]) -> Instance:
    """The executor with the requests/s that pass it, of its own service and of those that share it."""
    by_service = [passing.get((instance.id, name), 0.0) for name in instance.services]
    per_s = sum(by_service)
    flows = (
        (Flow(src=SOURCE, dst="n0", per_s=per_s), Flow(src="n0", dst=SINK, per_s=per_s))
        if per_s > 0
        else ()
    )
    guests = tuple(
        Guest(service=guest.service, per_s=each)
        for guest, each in zip(instance.guests, by_service[1:], strict=True)
    )
    return instance.model_copy(update={"flows": flows, "throughput_per_s": per_s, "guests": guests})
