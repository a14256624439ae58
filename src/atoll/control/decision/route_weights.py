"""Which share of a service's requests goes to which instances while a fleet changes.

Where just the planned instances serve, the plan's routes hold, and those that it has ready for a loss where
just that is gone (`Plan.after_loss`). Otherwise every instance gets a share by what it carries: requests that
run both phases in one place, and pairs of prefill and decode, filled up in order inside each region first,
then across regions with what is left: few more pairs than instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.core.ids import Phase
from atoll.plan.plan import Instance, LossRoutes, Route
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
