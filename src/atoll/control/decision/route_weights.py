"""Which share of a service's requests goes to which instances while a fleet changes.

Where just the planned instances serve, the plan's routes hold, and those that it has ready for a loss where
just that is gone (`Plan.after_loss`). Otherwise every instance gets a share by what it carries: requests that
run both phases in one place, and pairs of prefill and decode, filled up in order inside each region first,
then across regions with what is left: few more pairs than instances.

So it is with the paths of any-to-any services (`spread_paths`): where others serve than the planned
executors, requests go over those that do in the way that carries most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from atoll.control.decision.control_view import Mixes
from atoll.control.decision.executor_capacity import (
    ClassNeed,
    ExecutorKind,
    best_flows,
    kind_of,
)
from atoll.control.decision.lane_capacity import list_needs
from atoll.core.ids import Phase
from atoll.plan.plan import Instance, LossRoutes, Plan, RequestPath, RequestStep, Route
from atoll.plan.problem import Problem, Service

MIN_ROUTE_SHARE = 1e-9


def spread_routes(
    problem: Problem,
    serving: Iterable[Instance],
    planned: Iterable[Route],
    after_loss: Sequence[LossRoutes] = (),
) -> tuple[Route, ...]:
    """Return the routes of all services over the instances that serve now, in order."""
    by_service: dict[str, list[Instance]] = {}
    for instance in serving:
        by_service.setdefault(instance.service, []).append(instance)
    routes_of: dict[str, list[Route]] = {}
    for route in planned:
        routes_of.setdefault(route.service, []).append(route)
    routes: list[Route] = []
    for service in problem.services:
        here = sorted(by_service.get(service.name, ()), key=lambda one: (one.region, one.id))
        given = routes_of.get(service.name, [])
        ids = {one.id for one in here}
        wanted = {name for route in given for name in route.instances}
        ready = next(
            (
                loss.routes
                for loss in after_loss
                if service.name in loss.services and wanted - {*loss.instances} == ids
            ),
            (),
        )
        own = [route for route in ready if route.service == service.name]
        if ids == wanted or own:
            routes += own or given
        else:
            routes += _share_out(service, here)
    return tuple(sorted(routes, key=lambda route: (route.service, route.instances)))


def spread_paths(
    problem: Problem, serving: Iterable[Instance], plan: Plan | None, mixes: Mixes
) -> tuple[RequestPath, ...]:
    """Return the paths of all any-to-any services over the executors that serve now.

    `mixes` are those that the plan is for: paths change with what serves, and not with every request.
    """
    graphs = problem.graph_services
    if not graphs or plan is None:
        return ()
    models = problem.catalog().models
    standing: dict[str, list[Instance]] = {}
    for one in serving:
        for name in one.services if one.is_executor else ():
            standing.setdefault(name, []).append(one)
    paths: list[RequestPath] = []
    for service in graphs:
        given = [path for path in plan.paths if path.service == service.name]
        here = standing.get(service.name, [])
        planned = {one.id for one in plan.executor_instances if service.name in one.services}
        if {one.id for one in here} != planned:
            mix = mixes.get(service.name, {})
            needs = tuple(
                need._replace(share=mix.get(need.klass, need.share))
                for need in list_needs(models[service.model], service)
            )
            given = _spread_parts(service.name, needs, here) or given
        paths += given
    return tuple(paths)


def _spread_parts(
    service: str, needs: Sequence[ClassNeed], here: Sequence[Instance]
) -> list[RequestPath]:
    """Return paths over executors in the way that carries most; none where a class has no way."""
    names: dict[ExecutorKind, list[str]] = {}
    for one in sorted(here, key=lambda each: each.id):
        names.setdefault(kind_of(one, service), []).append(one.id)
    best = best_flows(needs, {kind: len(own) for kind, own in names.items()})
    if best.per_s <= 0.0:
        return []
    doing: dict[tuple[str, str], dict[str, float]] = {}
    for kind, klass, part, rate in best.flows:
        for name in names[kind]:
            doing.setdefault((klass, part), {})[name] = rate / len(names[kind])
    paths = []
    for need in needs:
        for share, parts in _list_ways(need, doing):
            # Nobody asks for it: who serves it is asked when somebody does.
            if any((need.klass, part) not in doing for part in parts):
                continue
            steps: list[RequestStep] = []
            for part in parts:
                rates = doing[need.klass, part]
                total = sum(rates.values())
                weights = {name: rate / total for name, rate in rates.items()}
                # Who has seen also answers, where the same ones do both.
                if steps and steps[-1].instances == weights:
                    part_names = (*steps[-1].parts, part)
                    steps[-1] = RequestStep(parts=part_names, instances=weights)
                else:
                    steps.append(RequestStep(parts=(part,), instances=weights))
            paths.append(
                RequestPath(service=service, klass=need.klass, share=share, steps=tuple(steps))
            )
    return paths


def _list_ways(
    need: ClassNeed, doing: Mapping[tuple[str, str], Mapping[str, float]]
) -> list[tuple[float, list[str]]]:
    """Return the parts that requests of a class go over, whole and in phases, with the share of each way."""

    def rate(part: str) -> float:
        return sum(doing.get((need.klass, part), {}).values())

    cut = next((c for c in need.components if rate(f"{c}.prefill") and rate(f"{c}.decode")), None)
    if cut is None:
        return [(1.0, list(need.components))]
    phases = [f"{cut}.prefill", f"{cut}.decode"]
    apart = [p for c in need.components for p in (phases if c == cut else [c])]
    whole = rate(cut) / (rate(cut) + min(map(rate, phases)))
    ways = [(1.0 - whole, apart), (whole, list(need.components))]
    return [way for way in ways if way[0] > MIN_ROUTE_SHARE]


def _share_out(service: Service, serving: Sequence[Instance]) -> list[Route]:
    """Return routes by what instances carry, in requests/s."""
    lengths = service.lengths
    per_request = {Phase.PREFILL: lengths.input_mean, Phase.DECODE: lengths.output_mean}
    able: dict[Phase, list[tuple[Instance, float]]] = {}
    for one in serving:
        phase = one.phase
        able.setdefault(phase, []).append((one, one.throughput_per_s / per_request.get(phase, 1.0)))
    ways: list[tuple[tuple[str, ...], float]] = []
    ways += [((one.id,), rate) for one, rate in able.get(Phase.BOTH, [])]
    ways += _pair_up(able.get(Phase.PREFILL, []), able.get(Phase.DECODE, []))
    total = sum(rate for _, rate in ways)
    if total <= 0.0:
        return []
    # Not checked again, every turn: names are those of instances, and shares are shares.
    return [
        Route.model_construct(service=service.name, instances=names, share=min(1.0, rate / total))
        for names, rate in ways
        if rate > MIN_ROUTE_SHARE * total
    ]


def _pair_up(
    prefill: Sequence[tuple[Instance, float]], decode: Sequence[tuple[Instance, float]]
) -> list[tuple[tuple[str, ...], float]]:
    """Return pairs with requests/s, both sides scaled to the weaker one."""
    first, second = sum(rate for _, rate in prefill), sum(rate for _, rate in decode)
    if first <= 0.0 or second <= 0.0:
        return []
    total = min(first, second)
    left = {one.id: rate * total / first for one, rate in prefill}
    right = {one.id: rate * total / second for one, rate in decode}
    region = {one.id: one.region for one, _ in (*prefill, *decode)}
    pairs: dict[tuple[str, str], float] = {}
    for area in (*sorted(set(region.values())), None):
        a = [name for name in left if area is None or region[name] == area]
        b = [name for name in right if area is None or region[name] == area]
        i = j = 0
        while i < len(a) and j < len(b):
            rate = min(left[a[i]], right[b[j]])
            if rate > 0.0:
                pairs[a[i], b[j]] = pairs.get((a[i], b[j]), 0.0) + rate
                left[a[i]] -= rate
                right[b[j]] -= rate
            if left[a[i]] <= right[b[j]]:
                i += 1
            else:
                j += 1
    return list(pairs.items())
