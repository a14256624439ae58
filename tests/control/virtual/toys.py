"""A small fleet in virtual time whose templates are given, so that nothing has to be simulated."""

from __future__ import annotations

from atoll.control.virtual.fluid import KeptCurve
from atoll.control.virtual.fluid_calibration import CalibratedFleet
from atoll.control.virtual.market import MarketSeries, draw_market, hold_market
from atoll.control.virtual.template_planner import TemplatePlanner
from atoll.control.virtual.virtual_demand import DemandSeries, draw_demand
from atoll.control.virtual.virtual_run import VirtualSetting
from atoll.control.virtual.world import WorldSettings
from atoll.plan.problem import Problem
from atoll.prove.sized_templates import SizedTemplate
from atoll.solve.derating import node_set
from tests.control import world as small

CALM = WorldSettings(
    startup_s=240.0,
    startup_spread=0.0,
    failures_per_h=0.0,
    preemptions_per_h=0.0,
    failed_starts=0.0,
)
"""Machines that never fail, with instances that start in four minutes."""


def templates(services: tuple[str, ...] = ("chat", "code")) -> tuple[SizedTemplate, ...]:
    found = []
    for name in services:
        for node_type, _, _ in small.TEMPLATES:
            one = small.instance("template", f"{name}/llm/both", node_type)
            found.append(SizedTemplate(one.role, node_set(one), one, 1.0))
    return tuple(found)


def problem(chat: float = 40.0, code: float = 25.0, available: int = 60) -> Problem:
    usd = {"H100:1": 4.0, "L40S:1": 1.8, "L4:1": 0.8}
    offers = []
    for region in (small.EAST, small.WEST):
        for node_type, price in usd.items():
            offers.append(small.offer(node_type, price, available, region))
            offers.append(small.offer(node_type, 0.4 * price, available, region, "spot"))
    services = (small.service("chat", chat), small.service("code", code))
    return small.problem(*services).replace(offers=tuple(offers))


def planner() -> TemplatePlanner:
    return TemplatePlanner(problem().catalog(), templates())


def fleet(asked: Problem | None = None) -> CalibratedFleet:
    given = asked or problem()
    curves = {service.name: KeptCurve() for service in given.services}
    return CalibratedFleet(given, planner(), curves)


def setting(
    days: float = 0.25,
    *,
    seed: int = 3,
    machines: WorldSettings | None = None,
    demand: DemandSeries | None = None,
    market: MarketSeries | None = None,
    moving: bool = True,
) -> VirtualSetting:
    asked = problem()
    return VirtualSetting(
        asked,
        demand or draw_demand(asked, days, seed, history_days=2.0),
        market or (draw_market(asked.offers, days, seed) if moving else hold_market(asked.offers)),
        fleet(asked).curves,
        machines or WorldSettings(),
        seed,
    )
