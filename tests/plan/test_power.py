"""What plans draw: every GPU of a machine in use, no more than its limit, and what the grid makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UsageError
from atoll.perf.energy import power_model
from atoll.plan.footprint import ObjectiveWeights, PowerGrid
from atoll.plan.plan import Plan
from atoll.plan.power import (
    draw_of,
    guess_machine_w,
    kg_per_hour,
    machine_idle_w,
    min_request_joules,
    power_of,
    usd_per_watt,
    weighted_usd,
)
from atoll.plan.problem import Problem
from atoll.solve.assembly import NewInstance
from tests.plan.builders import EAST, WEST, catalog, offer, plan_of, problem, service, small
from tests.plan.builders import layout as lay
from tests.seeds import examples

FACTS = catalog()
GRID = PowerGrid(g_per_kwh={EAST: 400.0, WEST: 50.0}, pue=1.25)


def loaded(rate: float) -> tuple[Plan, Problem]:
    """The plan for the small problem, and that problem with other rates."""
    asked, made = small()
    services = tuple(s.model_copy(update={"rate_per_s": rate}) for s in asked.services)
    return made, asked.replace(services=services)


def test_machines_draw_what_instances_do() -> None:
    asked, made = small()
    draw = draw_of(made, asked, FACTS)
    assert draw.watts == pytest.approx(sum(one.watts for one in draw.instances.values()))
    assert draw.counts == dict(made.count_nodes())
    for key, watts in draw.machines.items():
        count = draw.counts[key]
        gpu = power_model(FACTS.gpu(key[1].partition(":")[0]))
        assert count * gpu.idle_w < watts <= count * gpu.limit_w


def test_idle_gpus_of_a_cut_machine_count() -> None:
    asked = problem(
        services=(service("mini", model="llama-3.2-1b", phases="together", rate_per_s=1.0),),
        offers=(offer(EAST, "L4:4", 3.0),),
    )
    chosen = NewInstance(
        "mini/llm/both", EAST, lay((0, 16, ("L4:1",))), {("L4:1", "L4:4", "on-demand"): 1}
    )
    made = plan_of(asked, chosen)
    draw = draw_of(made, asked, FACTS)
    one = draw.instances[made.instances[0].id]
    assert made.idle_gpus == 3
    assert draw.watts == pytest.approx(machine_idle_w(FACTS, "L4:4") + one.dynamic_w)
    assert one.idle_w == pytest.approx(machine_idle_w(FACTS, "L4:4") / 4)


def test_nothing_arrives_and_gpus_wait() -> None:
    draw = draw_of(*loaded(0.0), FACTS)
    assert all(one.dynamic_w == 0.0 and one.busy == 0.0 for one in draw.instances.values())
    assert draw.watts == pytest.approx(
        sum(n * machine_idle_w(FACTS, kind) for (_, kind, _), n in draw.counts.items())
    )


@examples(15)
@given(rate=st.floats(0.1, 200.0), more=st.floats(1.1, 5.0))
def test_more_requests_draw_more_up_to_the_limit(rate: float, more: float) -> None:
    few, many = (draw_of(*loaded(r), FACTS) for r in (rate, rate * more))
    assert many.watts >= few.watts * (1.0 - 1e-6)
    for (_, kind, _), watts in (*few.machines.items(), *many.machines.items()):
        limit = power_model(FACTS.gpu(kind.partition(":")[0])).limit_w
        assert watts <= 3 * limit + 1e-6


def test_use_counts_site_and_grid() -> None:
    asked, made = small()
    asked = asked.replace(grid=GRID, weights=ObjectiveWeights(usd_per_kwh=0.2, usd_per_tonne=100))
    draw = draw_of(made, asked, FACTS)
    use = power_of(made, asked, FACTS)
    east, west = (draw.region_watts()[region] * 1.25 / 1e3 for region in (EAST, WEST))
    assert use.watts == pytest.approx(1e3 * (east + west))
    assert use.kg_per_hour == pytest.approx(0.4 * east + 0.05 * west)
    rent = made.usd_per_hour + made.init_usd
    assert use.weighted_usd_per_hour == pytest.approx(
        rent + 0.2 * (east + west) + 0.1 * (0.4 * east + 0.05 * west)
    )
    # Per token: what a service's instances draw in the time that its tokens take.
    chat = asked.service("chat")
    own = sum(one.watts for one in draw.instances.values() if one.service == "chat")
    tokens = chat.rate_per_s * chat.lengths.output_mean
    assert use.joules_per_token["chat"] == pytest.approx(1.25 * own / tokens)
    assert power_of(made, asked.replace(weights=ObjectiveWeights()), FACTS).weighted_bound is None


def test_an_unknown_grid_is_said() -> None:
    asked, made = small()
    half = PowerGrid(g_per_kwh={EAST: 400.0})
    draw = draw_of(made, asked, FACTS)
    assert kg_per_hour(half, draw) is None
    carbon = ObjectiveWeights(usd=0.0, usd_per_tonne=1.0)
    with pytest.raises(UsageError, match=f"grid: .*{WEST}"):
        weighted_usd(made, carbon, half, draw)
    energy = ObjectiveWeights(usd=0.0, usd_per_kwh=1.0)
    assert weighted_usd(made, energy, half, draw) == pytest.approx(draw.watts / 1e3)
    assert usd_per_watt(carbon, GRID, EAST) == pytest.approx(1.25 * 400.0 / 1e9)


def test_guesses_lie_between_waiting_and_the_limit() -> None:
    asked, _ = small()
    for one in asked.offers:
        gpu = power_model(FACTS.gpu(one.node_type.partition(":")[0]))
        assert one.gpus * gpu.idle_w < guess_machine_w(asked, FACTS, one) <= one.gpus * gpu.limit_w


def test_no_plan_works_below_the_min_joules_of_a_request() -> None:
    asked, made = small()
    draw = draw_of(made, asked, FACTS)
    for one in asked.services:
        taken = sum(d.dynamic_w for d in draw.instances.values() if d.service == one.name)
        assert taken >= one.rate_per_s * min_request_joules(asked, FACTS, one) > 0.0
