"""The rules of `validate` for any-to-any models: executors, paths over them, what is served.

Everything is worked out again from the problem, the catalog and the performance model.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError, UnknownNameError, UsageError
from atoll.perf.components.executor import ExecutorWork
from atoll.plan.component_sharing import may_share
from atoll.plan.executors import (
    cores_needed,
    cores_of_slice,
    first_text_parts,
    group_of,
    handover_s,
    machine_of,
    node_work,
    parts_overlap,
    request_bytes,
    routes_of,
)
from atoll.plan.plan import Instance, Plan, RequestPath
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.violation import TOLERANCE, Violation, differs, exceeds, violation
from atoll.workload.classes import RequestClass

Works = Mapping[tuple[str, str], ExecutorWork]
"""What executors do, by executor and service."""
_Machine = tuple[object, ...]
"""What tells a machine from others (`machine_of`)."""


def check_executor(
    instance: Instance, problem: Problem, catalog: Catalog
) -> tuple[list[Violation], dict[tuple[str, str], ExecutorWork]]:
    """Return what is wrong with one executor, and what work it does for its services if it stands."""
    service = problem.service(instance.service)
    model = catalog.model(service.model)
    here = instance.id
    if len(instance.nodes) != 1 or instance.stages != 1:
        return [
            violation(
                "layers",
                here,
                "an executor stands on one node: its parts share GPUs, and no layers are handed on",
            )
        ], {}
    (node,) = instance.nodes
    broken: list[Violation] = []
    if (node.start, node.end) != (0, 1):
        message = f"its node holds [{node.start}, {node.end}), and parts have no layers"
        broken.append(violation("layers", here, message))
    unknown = [part for part in instance.parts if part not in model.graph.parts()]
    if unknown:
        return [violation("name", here, f"{model.name} has no part {unknown[0]}")], {}
    if parts_overlap(instance.parts):
        broken.append(violation("name", here, f"{instance.role} has a part twice"))
    broken += _check_guests(instance, service, problem)
    if broken:
        return broken, {}
    services = [problem.service(name) for name in instance.services]
    for one in services:
        if not one.allows(node.kind):
            message = f"{one.name} may not stand on {node.kind}"
            broken.append(violation("pinning", here, message))
    if node.region is not None and node.region != instance.region:
        broken.append(violation("region", here, f"its node is in {node.region}"))
    broken += _check_cores(instance, services, problem)
    works: dict[tuple[str, str], ExecutorWork] = {}
    for one in services:
        try:
            work = node_work(problem, catalog, one, instance)
        except (InputError, UsageError) as error:
            broken.append(violation("memory", here, error.message))
            return broken, {}
        if work is None:
            message = f"{'+'.join(instance.parts)} does not fit on {node.kind}"
            broken.append(violation("memory", here, message))
            return broken, {}
        works[here, one.name] = work
    return broken, works


def _check_cores(
    instance: Instance, services: list[Service], problem: Problem
) -> Iterator[Violation]:
    """An executor's slice has the CPU cores that its parts need."""
    (node,) = instance.nodes
    offer = problem.offer(instance.region, node.node_type, node.market)
    cores = math.inf if offer is None else cores_of_slice(offer, node.gpus)
    needed = cores_needed(services, instance.parts)
    if exceeds(needed, cores):
        message = f"needs {needed:g} CPU cores, and {node.kind} has {cores:g}"
        yield violation("cores", instance.id, message, needed - cores)


def _check_guests(instance: Instance, service: Service, problem: Problem) -> Iterator[Violation]:
    """Only services with the same components share an executor, each once."""
    graphs = {one.name: one for one in problem.graph_services}
    for name, count in Counter(instance.services).items():
        if count > 1:
            yield violation("name", instance.id, f"{name} shares it {count} times")
        elif name not in graphs:
            yield violation("name", instance.id, f"{name} has no classes of requests")
        elif name != service.name and not may_share(problem, service, graphs[name], instance.parts):
            what = "+".join(instance.parts)
            message = f"{name} and {service.name} do not have {what} in common"
            yield violation("sharing", instance.id, message)


def check_paths(plan: Plan, problem: Problem, catalog: Catalog) -> list[Violation]:
    """Return what is wrong with the paths of a plan and the executors that they lead over."""
    found: list[Violation] = []
    works: dict[tuple[str, str], ExecutorWork] = {}
    executors = {i.id: i for i in plan.executor_instances}
    graphs = {service.name for service in problem.graph_services}
    for instance in executors.values():
        if instance.service not in graphs:
            message = f"{instance.service} has no classes of requests"
            found.append(violation("name", instance.id, message))
            continue
        broken, work = check_executor(instance, problem, catalog)
        found += broken
        works |= work
    found += [
        violation("name", path.service, "a path of a service that has no classes")
        for path in plan.paths
        if path.service not in graphs
    ]
    if found:
        return found  # the rest would trip over the same names
    found += [v for path in plan.paths for v in _check_path(path, plan, problem, catalog, works)]
    if found:
        return found
    found += _check_shares(plan, problem)
    found += _check_work(plan, problem, works)
    found += _check_interfaces(plan, problem, catalog)
    found += _check_pairs(plan, problem, catalog)
    found += _check_groups(plan, problem, catalog)
    return found


def _check_path(
    path: RequestPath, plan: Plan, problem: Problem, catalog: Catalog, works: Works
) -> Iterator[Violation]:
    service = problem.service(path.service)
    here = f"{path.service} {path.klass}"
    try:
        klass = service.klass(path.klass)
    except UnknownNameError as error:
        yield violation("name", here, error.message)
        return
    executors = {i.id: i for i in plan.executor_instances if path.service in i.services}
    regions = set()
    for step in path.steps:
        if differs(sum(step.instances.values()), 1.0):
            message = f"weights of a step sum to {sum(step.instances.values()):g}"
            yield violation("route", here, message)
        for name in step.instances:
            executor = executors.get(name)
            if executor is None:
                yield violation("route", here, f"leads to {name}, which is no executor of it")
                return
            regions.add(executor.region)
            missing = [part for part in step.parts if part not in executor.parts]
            if missing:
                yield violation("route", here, f"leads to {name} for {missing[0]}, which it lacks")
                return
    if len(regions) > 1:
        yield violation(
            "route", here, f"leads from region to region ({', '.join(sorted(regions))})"
        )
    edges = request_bytes(catalog, service, klass)
    if service.paths and not any(
        _follows(path, executors, allowed, edges) for allowed in service.paths
    ):
        yield violation("route", here, "is none of the paths that the service allows")
    order = [part for step in path.steps for part in step.parts]
    routes = routes_of(catalog, service, klass)
    if not any(sorted(order) == sorted(route) for route in routes):
        message = f"runs {', '.join(order)}, and the class needs {', '.join(routes[0])}"
        yield violation("layers", here, message)
        return
    yield from _check_order(here, order, catalog, service, klass)
    yield from _check_promise(here, path, service, klass, catalog, executors, works)


def _follows(
    path: RequestPath,
    executors: Mapping[str, Instance],
    allowed: tuple[str, ...],
    edges: Iterable[tuple[str, str]],
) -> bool:
    """Whether the executors of a path are some of an allowed one; `_check_order` knows their order.

    Parts of one executor of it, one of which takes what the other makes, are run by the very same one.
    """
    held = {
        part: (number, {executors[name].role_id.component for name in step.instances})
        for number, step in enumerate(path.steps)
        for part in step.parts
    }
    if any(not kinds <= set(allowed) for _, kinds in held.values()):
        return False
    for first, second in edges:
        if first in held and second in held and held[first][0] != held[second][0]:
            shared = held[first][1] & held[second][1]
            if any(allowed.count(kind) < 2 for kind in shared):
                return False
    return True


def _check_order(
    here: str, order: list[str], catalog: Catalog, service: Service, klass: RequestClass
) -> Iterator[Violation]:
    """No part runs before one whose result it takes."""
    for before, after in request_bytes(catalog, service, klass):
        if before in order and after in order and order.index(after) < order.index(before):
            yield violation("layers", here, f"runs {after} before {before}, which feeds it")


def _check_promise(
    here: str,
    path: RequestPath,
    service: Service,
    klass: RequestClass,
    catalog: Catalog,
    executors: Mapping[str, Instance],
    works: Works,
) -> Iterator[Violation]:
    """Every executor of a path can do its parts, and the slowest of each step keep the promise together."""
    slowest: dict[str, float] = {}
    holders: dict[str, list[Instance]] = {}
    step_of = {part: number for number, step in enumerate(path.steps) for part in step.parts}
    for step in path.steps:
        for part in step.parts:
            holders[part] = [executors[name] for name, w in step.instances.items() if w > 0]
            for executor in holders[part]:
                work = works[executor.id, service.name]
                took = work.latency_s.get((klass.name, part))
                if took is None or (klass.name, part) not in work.seconds:
                    message = f"{executor.id} cannot keep its promise with {part}"
                    yield violation("node-capacity", here, message)
                    return
                slowest[part] = max(slowest.get(part, 0.0), took)
    model = catalog.model(service.model)
    route = [part for step in path.steps for part in step.parts]
    size = request_bytes(catalog, service, klass)

    def moving_s(first: str, second: str) -> float:
        per = size.get((first, second), 0.0)
        return max(
            (
                handover_s(catalog, a, b, per)
                for a in holders[first]
                for b in holders[second]
                # Parts of one step run on one and the same executor, whichever that is.
                if step_of[first] != step_of[second] and a.id != b.id
            ),
            default=0.0,
        )

    encoders, llm = first_text_parts(model, route)
    if klass.ttft_s is not None and llm is not None:
        before = max((slowest[e] + moving_s(e, llm) for e in encoders), default=0.0)
        if exceeds(before + slowest[llm], klass.ttft_s):
            message = (
                f"first text after {before + slowest[llm]:.3g} s, {klass.ttft_s:g} s are promised"
            )
            yield violation("handover", here, message, before + slowest[llm] - klass.ttft_s)
    if klass.image_s is not None:
        took = sum(slowest[part] for part in route)
        took += sum(moving_s(a, b) for a, b in size if a in route and b in route)
        if exceeds(took, klass.image_s):
            message = f"an image after {took:.3g} s, {klass.image_s:g} s are promised"
            yield violation("handover", here, message, took - klass.image_s)


def _check_shares(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Shares of a class's paths add up to 1 where it is served, and no path is there twice."""
    counted = Counter(
        (p.service, p.klass, tuple((s.parts, tuple(s.instances.items())) for s in p.steps))
        for p in plan.paths
    )
    for (name, of_class, _), count in counted.items():
        if count > 1:
            yield violation("route", f"{name} {of_class}", f"{count} paths are the same")
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    for path in plan.paths:
        shares[path.service, path.klass] += path.share
    for service in problem.graph_services:
        served = plan.served_fraction.get(service.name, 1.0)
        asked = service.demand_per_s > 0.0 and served > 0.0 and plan.status != "infeasible"
        for klass in service.classes:
            total = shares[service.name, klass.name]
            if (asked or total > 0.0) and differs(total, 1.0):
                message = f"shares of its paths sum to {total:g}"
                yield violation("route", f"{service.name} {klass.name}", message, abs(total - 1.0))


def _check_work(plan: Plan, problem: Problem, works: Works) -> Iterator[Violation]:
    """No executor works more than a second a second, and it carries what it says."""
    busy, passing = executor_loads(plan, problem, works)
    for instance in plan.executor_instances:
        spent = {name: busy.get((instance.id, name), 0.0) for name in instance.services}
        seconds = sum(spent.values())
        if seconds > 1.0 + TOLERANCE:
            message = f"works {seconds:.4g} seconds a second"
            yield violation("node-capacity", instance.id, message, seconds - 1.0)
        by_service = {name: passing.get((instance.id, name), 0.0) for name in instance.services}
        stated = {"": instance.throughput_per_s, **{g.service: g.per_s for g in instance.guests}}
        for name, said in stated.items():
            carried = by_service[name] if name else sum(by_service.values())
            if differs(carried, said):
                message = f"{carried:g} requests/s pass{' for ' + name if name else ''}"
                message += f", {said:g}/s are stated"
                yield violation("throughput", instance.id, message)
        for guest in instance.guests if seconds > 0.0 else ():
            share = spent[guest.service] / seconds
            if differs(share, guest.share):
                message = f"{guest.service} is {share:.4g} of its work, {guest.share:.4g} is stated"
                yield violation("throughput", instance.id, message)
        for name in instance.services:
            for klass, part, told in instance.work_of(name):
                real = works[instance.id, name].seconds.get((klass, part), math.inf)
                if exceeds(real, told):
                    message = f"{part} takes {real:.4g} s of '{klass}', {told:.4g} s are stated"
                    yield violation("node-capacity", instance.id, message, real - told)


def executor_loads(
    plan: Plan, problem: Problem, works: Works
) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """Return by executor and service the seconds of work a second, and the requests/s that pass it."""
    busy: defaultdict[tuple[str, str], float] = defaultdict(float)
    passing: defaultdict[tuple[str, str], float] = defaultdict(float)
    for path in plan.paths:
        service = problem.service(path.service)
        served = plan.served_fraction.get(service.name, 1.0)
        rate = service.class_rate_per_s(service.klass(path.klass)) * served * path.share
        for step in path.steps:
            for name, weight in step.instances.items():
                passing[name, path.service] += rate * weight
                work = works[name, path.service]
                seconds = sum(work.seconds[path.klass, part] for part in step.parts)
                busy[name, path.service] += rate * weight * seconds
    return dict(busy), dict(passing)


def _check_interfaces(plan: Plan, problem: Problem, catalog: Catalog) -> Iterator[Violation]:
    """Check that traffic between machines is within their interfaces, in and out."""
    executors = {i.id: i for i in plan.executor_instances}
    for machine, (region, node_type, sent, received) in machine_traffic(
        plan, problem, catalog, executors
    ).items():
        limit = catalog.links.nic_bytes_per_s(region, node_type)
        for leaves, used in (("leave", sent), ("enter", received)):
            if exceeds(used, limit):
                message = f"{used / 1e9:.3g} GB/s {leaves} an interface of {limit / 1e9:.3g} GB/s"
                where = " ".join(map(str, machine))
                yield violation("link-capacity", where, message, used - limit)


def _check_pairs(plan: Plan, problem: Problem, catalog: Catalog) -> Iterator[Violation]:
    """Check that traffic between two machines is within the link that is stated for them, if one is."""
    executors = {i.id: i for i in plan.executor_instances}
    used: defaultdict[tuple[_Machine, _Machine], float] = defaultdict(float)
    limits: dict[tuple[_Machine, _Machine], float] = {}
    for sender, receiver, per_s in _sent_out(plan, problem, catalog, executors):
        types = sender.nodes[0].node_type, receiver.nodes[0].node_type
        stated = catalog.links.node_pairs.get(types)
        if stated is not None:
            pair = machine_of(sender), machine_of(receiver)
            used[pair] += per_s
            limits[pair] = stated.bandwidth_bytes_per_s
    for pair, limit in limits.items():
        if exceeds(used[pair], limit):
            message = f"{used[pair] / 1e9:.3g} GB/s over a link of {limit / 1e9:.3g} GB/s"
            where = " to ".join(" ".join(map(str, machine)) for machine in pair)
            yield violation("link-capacity", where, message, used[pair] - limit)


def _check_groups(plan: Plan, problem: Problem, catalog: Catalog) -> Iterator[Violation]:
    """Check that traffic between two groups of a machine's GPUs is within the link that joins them."""
    if not catalog.links.groups:
        return
    executors = {i.id: i for i in plan.executor_instances}
    used: defaultdict[tuple[_Machine, int, int], float] = defaultdict(float)
    for one in executors.values():
        (node,) = one.nodes
        groups = catalog.links.groups.get(node.node_type)
        if groups is None or not node.gpu_ids or node.gpus > groups.gpus:
            continue
        if max(node.gpu_ids) // groups.gpus != min(node.gpu_ids) // groups.gpus:
            yield violation("node-capacity", one.id, "reaches over the end of a group of GPUs")
    for sender, receiver, per_s in _sent(plan, problem, catalog, executors):
        at, to = group_of(catalog, sender), group_of(catalog, receiver)
        if machine_of(sender) == machine_of(receiver) and at != to:
            used[machine_of(sender), at, to] += per_s
    for (machine, at, to), per_s in used.items():
        limit = catalog.links.groups[str(machine[1])].link.bandwidth_bytes_per_s
        if exceeds(per_s, limit):
            message = (
                f"{per_s / 1e9:.3g} GB/s from GPU group {at} to {to}, {limit / 1e9:.3g} GB/s go"
            )
            yield violation("link-capacity", " ".join(map(str, machine)), message, per_s - limit)


def machine_traffic(
    plan: Plan, problem: Problem, catalog: Catalog, executors: Mapping[str, Instance]
) -> dict[tuple[object, ...], tuple[str, str, float, float]]:
    """Return by machine its region, its type, and the bytes/s that paths send out of and into it."""
    sent: defaultdict[tuple[object, ...], float] = defaultdict(float)
    received: defaultdict[tuple[object, ...], float] = defaultdict(float)
    places: dict[tuple[object, ...], tuple[str, str]] = {}
    for out, into, per_s in _sent_out(plan, problem, catalog, executors):
        sent[machine_of(out)] += per_s
        received[machine_of(into)] += per_s
        places[machine_of(out)] = (out.region, out.nodes[0].node_type)
        places[machine_of(into)] = (into.region, into.nodes[0].node_type)
    return {m: (*place, sent[m], received[m]) for m, place in places.items()}


def _sent_out(
    plan: Plan, problem: Problem, catalog: Catalog, executors: Mapping[str, Instance]
) -> Iterator[tuple[Instance, Instance, float]]:
    """Yield what `_sent` does of executors on two machines."""
    for out, into, per_s in _sent(plan, problem, catalog, executors):
        if machine_of(out) != machine_of(into):
            yield out, into, per_s


def _sent(
    plan: Plan, problem: Problem, catalog: Catalog, executors: Mapping[str, Instance]
) -> Iterator[tuple[Instance, Instance, float]]:
    """Yield which executor sends to which other one, and how many bytes/s, path by path."""
    for path in plan.paths:
        service = problem.service(path.service)
        klass = service.klass(path.klass)
        served = plan.served_fraction.get(service.name, 1.0)
        rate = service.class_rate_per_s(klass) * served * path.share
        step_of = {part: step for step in path.steps for part in step.parts}
        for (first, second), size in request_bytes(catalog, service, klass).items():
            a_step, b_step = step_of.get(first), step_of.get(second)
            if a_step is None or b_step is None or a_step is b_step:
                continue
            for a, x in a_step.instances.items():
                for b, y in b_step.instances.items():
                    out, into = executors[a], executors[b]
                    if a != b:
                        yield out, into, rate * x * y * size
