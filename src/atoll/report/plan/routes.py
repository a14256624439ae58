"""Which ways requests take: phases apart or together, where, and over which pairs of instances."""

from __future__ import annotations

from atoll.core.units import format_share
from atoll.plan.plan import Plan
from atoll.report.render import Grid

MOST_PAIRS = 120
"""Pairs listed one by one."""


def list_ways(plan: Plan) -> Grid:
    """Return a row for each service, region and manner with the share of its requests."""
    regions = {instance.id: instance.region for instance in plan.instances}
    shares: dict[tuple[str, str, str], float] = {}
    for route in plan.routes:
        places = [regions.get(name, "?") for name in route.instances]
        manner = "apart" if len(places) > 1 else "together"
        place = places[0] if len(set(places)) == 1 else " to ".join(places)
        key = (route.service, manner, place)
        shares[key] = shares.get(key, 0.0) + route.share
    columns = ("service", "phases", "region", "requests")
    return Grid(columns, [(*key, format_share(shares[key])) for key in sorted(shares)], columns[3:])


def list_pairs(plan: Plan) -> Grid:
    """Return the largest routes, with prefill and decode instance or the one that runs both."""
    columns = ("service", "prefill", "decode", "requests")
    largest = sorted(plan.routes, key=lambda route: (-route.share, route.service, route.instances))
    shown = sorted(
        largest[:MOST_PAIRS], key=lambda route: (route.service, -route.share, route.instances)
    )
    rows = [
        (route.service, route.instances[0], route.instances[-1], format_share(route.share))
        for route in shown
    ]
    return Grid(columns, rows, columns[3:])
