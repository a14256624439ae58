"""Six days that are hard to operate, for a fleet of a few instances.

| Day | What is unlike any other day |
|---|---|
| flash crowd | five times the requests of one service for 45 minutes at noon, within three minutes |
| twice the history | from the first minute on twice what the two weeks before asked |
| region outage | all machines of one region die at eleven; it has nothing on offer for four hours |
| dear spot | spot costs 1.3 times what machines cost on demand, from eight to eight |
| slow starts | every start takes 20 minutes, which the fleet file says |
| dear spot, slow starts | both |

Services, templates and curves are those of the week, at a 25th of its rates: one to four instances of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from atoll.control.virtual.fluid_calibration import CalibratedFleet, scale_rates
from atoll.control.virtual.market import (
    MarketSeries,
    RegionOutage,
    draw_market,
    lose_region,
    move_market,
)
from atoll.control.virtual.template_planner import TemplatePlanner
from atoll.control.virtual.virtual_demand import DemandSeries, draw_demand
from atoll.control.virtual.virtual_run import VirtualSetting
from atoll.control.virtual.world import HOUR_S, WorldSettings
from atoll.core.rng import stream
from atoll.plan.problem import Offer

SHARE = 0.04
"""Rates over those of the week."""
CROWDED = "chat"
CROWD = 5.0
SLOW_S = 1200.0
DEAR = 1.3
"""What dear spot machines cost over the same on demand."""
HISTORY_DAYS = 14.0


def make_days(fleet: CalibratedFleet, seed: int) -> Iterator[tuple[str, VirtualSetting]]:
    """Yield the days by name; a fleet of the week in, smaller ones out."""
    problem = scale_rates(
        fleet.problem, dict.fromkeys((s.name for s in fleet.problem.services), SHARE)
    )
    slow = problem.replace(settings=problem.settings.model_copy(update={"startup_s": SLOW_S}))
    demand = draw_demand(problem, 1.0, seed, history_days=HISTORY_DAYS)
    market = draw_market(problem.offers, 1.0, seed)
    usual = VirtualSetting(problem, demand, market, fleet.curves, seed=seed)
    outage = RegionOutage(problem.regions[0], 11 * HOUR_S, 15 * HOUR_S)
    dear = make_spot_dear(market, 8 * HOUR_S, 20 * HOUR_S)
    yield "flash crowd", replace(usual, demand=crowd(demand, 720, 45, seed))
    yield "twice the history", replace(usual, demand=double(demand, seed))
    yield (
        "region outage",
        replace(
            usual, market=lose_region(market, outage), machines=WorldSettings(outages=(outage,))
        ),
    )
    yield "dear spot", replace(usual, market=dear)
    yield "slow starts", replace(usual, problem=slow)
    yield "dear spot, slow starts", replace(usual, problem=slow, market=dear)


def crowd(demand: DemandSeries, minute: int, minutes: int, seed: int) -> DemandSeries:
    """Return traffic with a flash crowd on one service, with ramps of three minutes."""
    counts = demand.counts.copy()
    begin = demand.history + minute
    inside = np.arange(minutes)
    ramp = np.minimum(1.0, (np.minimum(inside, minutes - 1 - inside) + 1) / 3.0)
    row = counts[demand.services.index(CROWDED)]
    here = row[begin : begin + minutes]
    more = stream(seed, "flash crowd").poisson(here * (CROWD - 1.0) * ramp)
    row[begin : begin + minutes] = here + more
    return DemandSeries(demand.services, counts, demand.history)


def double(demand: DemandSeries, seed: int) -> DemandSeries:
    """Return traffic of which twice as much comes from the start on, as if two of its kind came."""
    counts = demand.counts.copy()
    here = counts[:, demand.history :]
    counts[:, demand.history :] = here + stream(seed, "twice").poisson(here)
    return DemandSeries(demand.services, counts, demand.history)


def make_spot_dear(market: MarketSeries, begin_s: float, end_s: float) -> MarketSeries:
    """Return a market on which spot costs more than on demand for a while."""
    asked = {offer.key: offer.usd_per_hour for offer in market.offers}

    def move(offer: Offer) -> Offer:
        if offer.market != "spot":
            return offer
        usd = DEAR * asked[offer.region, offer.node_type, "on-demand"]
        return offer.model_copy(update={"usd_per_hour": usd})

    return move_market(market, begin_s, end_s, move)


def multiply(fleet: CalibratedFleet, number: int) -> CalibratedFleet:
    """Return a fleet of so many services, copies of those of the week in turn, that asks as much in all."""
    services, templates, curves = [], [], {}
    known = fleet.problem.services
    for k in range(number):
        one = known[k % len(known)]
        name = f"{one.name}-{k}"
        rate = one.rate_per_s * len(known) / number
        services.append(one.model_copy(update={"name": name, "rate_per_s": rate}))
        curves[name] = fleet.curves[one.name]
        for template in fleet.planner.templates:
            made = template.instance
            if made.service == one.name:
                role = made.role.replace(f"{one.name}/", f"{name}/", 1)
                made = made.model_copy(update={"service": name, "role": role})
                templates.append(replace(template, role=role, instance=made))
    problem = fleet.problem.replace(services=tuple(services))
    return CalibratedFleet(problem, TemplatePlanner(fleet.planner.catalog, templates), curves)
