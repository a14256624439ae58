"""Machines in virtual time: what they cost, when they fail and are taken back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.control.virtual.market import (
    MarketSeries,
    RegionOutage,
    hold_market,
    lose_region,
    read_market,
)
from atoll.control.virtual.world import VirtualWorld, WorldSettings
from tests.control.virtual.toys import CALM
from tests.control.world import EAST, instance, offer

SPOT = offer("L40S:1", 0.6, 4, EAST, "spot")
OFFERS = (offer("L40S:1", 1.8, 4), SPOT, offer("L4:1", 0.8, 4))


def states(world: VirtualWorld) -> dict[str, str]:
    return {seen.id: seen.status.state for seen in world.observe()}


def advance(world: VirtualWorld, until_s: float) -> list[float]:
    """Move on whatever is lost; return the stretches."""
    stretches: list[float] = []
    while world.advance(until_s, stretches.append):
        pass
    return stretches


def market(tmp_path: Path, *rows: str) -> MarketSeries:
    path = tmp_path / "prices.csv"
    path.write_text("\n".join(("time,region,node_type,market,price,available", *rows)))
    return read_market(path, OFFERS)


def test_an_instance_starts_serves_drains_and_is_paid_until_it_is_gone() -> None:
    world = VirtualWorld(hold_market(OFFERS), CALM)
    world.start(instance("a"))
    assert world.usd_per_hour() == pytest.approx(1.8)
    stretches = advance(world, 600.0)
    assert states(world) == {"a": "ready"}
    assert stretches == [240.0, 360.0]
    world.drain("a")
    advance(world, 1200.0)
    assert states(world) == {}
    assert world.usd == pytest.approx(1.8 * 660.0 / 3600.0)
    assert world.usd_per_hour() == 0.0


def test_prices_of_the_moment_are_paid(tmp_path: Path) -> None:
    moving = market(tmp_path, f"0,{EAST},L40S:1,spot,0.6,4", f"1800,{EAST},L40S:1,spot,1.2,4")
    world = VirtualWorld(moving, CALM)
    world.start(instance("a", market="spot"))
    world.start(instance("b"))
    advance(world, 3600.0)
    assert world.usd == pytest.approx(0.5 * 0.6 + 0.5 * 1.2 + 1.8)


def test_a_region_that_is_out_loses_all_and_has_nothing_on_offer() -> None:
    outage = RegionOutage(EAST, 1000.0, 2000.0)
    out = lose_region(hold_market(OFFERS), outage)
    world = VirtualWorld(out, replace(CALM, outages=(outage,)))
    world.start(instance("a"))
    world.start(instance("b", market="spot"))
    assert world.advance(3000.0, lambda _: None)  # somebody should look now
    assert world.elapsed_s == 1000.0
    advance(world, 1001.0)
    assert set(states(world).values()) == {"gone"}
    assert world.counts.failures == 2
    assert {one.available for one in world.offers if one.region == EAST} == {0}
    world.start(instance("c"))
    assert states(world)["c"] == "failed"
    advance(world, 2000.0)
    assert world.offers == hold_market(OFFERS).at(0.0)


def test_what_a_market_has_no_more_is_taken_back_after_a_notice(tmp_path: Path) -> None:
    moving = market(tmp_path, f"1000,{EAST},L40S:1,spot,0.6,1")
    world = VirtualWorld(moving, CALM)
    for name in ("a", "b", "c"):
        world.start(instance(name, market="spot"))
    world.start(instance("d"))
    assert world.advance(2000.0, lambda _: None)  # somebody should look now
    assert world.elapsed_s == 1000.0
    ends = {seen.id: seen.status.ends_s for seen in world.observe()}
    assert [name for name, end in ends.items() if end is not None] == ["b", "c"]
    assert ends["b"] == world.time_s + world.settings.notice_s
    advance(world, 1119.0)
    assert len(world.ready()) == 4
    advance(world, 1121.0)
    assert [one.id for one in world.ready()] == ["a", "d"]
    assert world.counts.preempted == 2


def test_a_start_without_a_machine_is_refused_and_costs_nothing() -> None:
    world = VirtualWorld(hold_market(OFFERS), CALM)
    for k in range(5):
        world.start(instance(f"a{k}"))
    assert list(states(world).values()).count("failed") == 1
    assert world.counts.refused == 1
    assert world.usd_per_hour() == pytest.approx(4 * 1.8)
    world.start(instance("a0"))  # stands already
    assert world.counts.starts == 5


def test_machines_fail_as_often_as_they_should() -> None:
    law = WorldSettings(failures_per_h=0.5, preemptions_per_h=0.0, failed_starts=0.0)
    world = VirtualWorld(hold_market((offer("L40S:1", 1.8, 1000),)), law, seed=4)
    for k in range(400):
        world.start(instance(f"a{k}"))
    advance(world, 240.0 * 1.2 + 3600.0)
    assert world.counts.failures == pytest.approx(400 * (1.0 - 2.718**-0.5), rel=0.15)
    assert sum(state == "ready" for state in states(world).values()) == 400 - world.counts.failures


def test_starts_fail_and_spot_is_taken_back_by_chance_the_same_every_time() -> None:
    law = WorldSettings(failed_starts=0.3, preemptions_per_h=0.5)

    def live(seed: int) -> tuple[float, dict[str, int], dict[str, str]]:
        world = VirtualWorld(hold_market((SPOT.model_copy(update={"available": 99}),)), law, seed)
        for k in range(40):
            world.start(instance(f"a{k}", market="spot"))
        advance(world, 3600.0)
        return world.usd, vars(world.counts), states(world)

    assert live(1) == live(1)
    usd, counts, after = live(1)
    assert live(2)[0] != usd
    assert counts["failed_starts"] > 3
    assert counts["preempted"] > 5
    assert "failed" in after.values()
