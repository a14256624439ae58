"""Small fleets that were once planned wrong; each test says what a right answer looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.perf.step import Position
from atoll.plan.capacities import node_capacity
from atoll.plan.files.fleet_file import load_fleet
from atoll.plan.handover import handover
from atoll.plan.plan import Instance, Node, Plan
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings
from atoll.plan.validate.check import check
from atoll.solve import solve
from atoll.solve.plan_request import PlanRequest
from atoll.workload.lengths import LengthMix
from benchmarks.report import DATA
from tests.reference.rent_ilp import RentReference

CASES = DATA / "cases" / "planner"
NEEDS_CASES = pytest.mark.skipif(
    not CASES.is_dir(), reason="needs the planner cases in ../shared/data/cases/planner"
)
DEADLINE_S = 600.0

FAST_LINKS = {
    "links": {"between_regions": {"bandwidth": "100Tbit/s", "latency": "1us"}},
}
"""As if all regions were one: KV crosses between any two in no time."""

MARKETS = """
services:
  chat: {model: llama-3.1-8b, ttft: 2s, tpot: 100ms, rate: 8/s, lengths: 512x128, phases: PHASES}
pool:
  offers:
    - {region: r/a, node_type: L40S:1, market: on-demand, available: 8, usd_per_hour: 2.00}
"""
SPOT = "    - {region: r/a, node_type: L40S:1, market: spot, available: 8, usd_per_hour: 0.50}\n"

LAB = """
services:
  big: {model: qwen3-32b, ttft: 2s, tpot: 80ms, rate: 3/s, lengths: azure-conv}
  small: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 8/s, lengths: azure-conv}
pool:
  owned:
    onprem: {"A100-40:8": 1, "L4:1": 4, "T4:4": 4}
"""

BOXES = """
services:
  chat: {model: qwen3-32b, ttft: 3s, tpot: 100ms, rate: 20/s, lengths: azure-conv}
  small: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 60/s, lengths: azure-conv}
pool:
  offers:
    - {region: r/a, node_type: H100:8, market: on-demand, available: 50, usd_per_hour: 40, whole: WHOLE}
    - {region: r/a, node_type: A100-80:8, market: on-demand, available: 50, usd_per_hour: 22, whole: WHOLE}
    - {region: r/a, node_type: L40S:8, market: on-demand, available: 50, usd_per_hour: 18, whole: WHOLE}
    - {region: r/a, node_type: L4:8, market: on-demand, available: 50, usd_per_hour: 7, whole: WHOLE}
settings:
  max_nodes_per_instance: NODES
"""

COASTS = """
services:
  chat:  {model: qwen3-32b, ttft: 3s, tpot: 100ms, rate: 5/s, lengths: azure-conv}
  code:  {model: gpt-oss-20b, ttft: 1500ms, tpot: 60ms, rate: 10/s, lengths: azure-code}
  small: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, rate: 15/s, lengths: azure-conv}
  large: {model: llama-3-70b@fp8, ttft: 4s, tpot: 120ms, rate: 2/s, lengths: azure-conv}
  phi:   {model: phi-4-14b, ttft: 2s, tpot: 80ms, rate: 5/s, lengths: 800x200}
pool:
  cloud: {regions: [aws/us-east-1, aws/us-west-2], gpus: [L4, A10G, L40S], spot: true, available: 8}
limits: {budget: $50/h, spot_share: 60%}
settings: {max_nodes_per_instance: 3}
"""


def read(text: str, folder: Path) -> Problem:
    path = folder / "fleet.yaml"
    path.write_text(text, encoding="utf-8")
    return load_fleet(path)


def plan(problem: Problem) -> Plan:
    """A plan that is checked, and met in all its promises unless it says otherwise."""
    found = solve(problem, PlanRequest(deadline_s=DEADLINE_S))
    check(found, problem)
    assert not found.cut_short
    return found


def served(found: Plan) -> float:
    return min(found.served_fraction.values(), default=1.0)


# Markets


@pytest.mark.parametrize(("phases", "machines"), [("apart", 2), ("auto", 1)])
def test_cheaper_spot_replaces_what_runs(phases: str, machines: int, tmp_path: Path) -> None:
    text = MARKETS.replace("PHASES", phases)
    first = plan(read(text, tmp_path))
    assert first.usd_per_hour == pytest.approx(2.0 * machines)
    again = plan(read(text + SPOT, tmp_path).replace(running=first.instances))
    assert again.usd_per_hour == pytest.approx(0.5 * machines)
    assert again.status == "optimal"


@pytest.mark.parametrize("phases", ["apart", "auto"])
def test_a_budget_holds_whatever_runs(phases: str, tmp_path: Path) -> None:
    text = MARKETS.replace("PHASES", phases)
    first = plan(read(text, tmp_path))
    tight = read(text + SPOT, tmp_path).replace(
        running=first.instances, limits=Limits(budget_usd_per_hour=3.0)
    )
    found = plan(tight)
    assert served(found) == 1.0
    assert found.usd_per_hour <= 3.0


def problem_of(name: str, *, joined: bool = False) -> Problem:
    problem = Problem.model_validate_json((CASES / f"{name}.json").read_text(encoding="utf-8"))
    return problem.replace(overlays=(FAST_LINKS,)) if joined else problem


@NEEDS_CASES
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("replan-15", marks=pytest.mark.slow),  # 30 s, for what the others show too
        pytest.param("replan-24", marks=pytest.mark.slow),
        *("replan-25", "init-penalty"),
    ],
)
def test_planned_again_at_the_optimum(name: str, joined: bool) -> None:
    problem = problem_of(name, joined=joined)
    reference = RentReference(problem, problem.catalog())
    optimum = reference.min_cost()
    assert optimum.proved
    found = plan(problem)
    if optimum.value is None:
        assert found.status == "partial"
        # Whether all can get more is proved far sooner than how much they can get.
        better = (served(found) + 1e-4) / (1.0 - 1e-3)
        more = reference.min_cost({service.name: better for service in problem.services})
        assert more.proved
        assert more.value is None
        return
    assert found.objective == pytest.approx(optimum.value, rel=1e-3)
    assert found.bound is not None
    assert found.bound <= optimum.value * (1.0 + 1e-6)


@NEEDS_CASES
def test_a_known_cost_where_regions_are_as_one() -> None:
    found = plan(problem_of("init-penalty", joined=True))
    assert found.objective == pytest.approx(31.4404, rel=1e-3)


@NEEDS_CASES
def test_spread_serves_what_it_can() -> None:
    problem = problem_of("spread")
    found = plan(problem)
    assert found.status == "partial"
    standing = {service for service, share in found.served_fraction.items() if share > 0.0}
    most = RentReference(problem, problem.catalog()).max_standing()
    assert most.proved
    assert len(standing) == round(most.value or 0.0) == 2


# Rounding


def long_prompts(rate: float) -> Problem:
    """Requests so long that a node carries a fraction of one per second."""
    lengths = Lengths.of(LengthMix.fixed(100_000.0, 3000.0))
    service = Service(
        name="long",
        model="llama-3.1-8b",
        ttft_s=60.0,
        tpot_s=0.5,
        rate_per_s=rate,
        lengths=lengths,
        phases="together",
    )
    offer = Offer(region="r", node_type="L40S:1", available=400, usd_per_hour=1.86)
    return Problem(
        name="rounding",
        services=(service,),
        offers=(offer,),
        settings=Settings(max_nodes_per_instance=1),
    )


@pytest.mark.parametrize("number", [20, 100, 200])
def test_rounding_costs_no_node(number: int) -> None:
    bare = long_prompts(1.0)
    one = node_capacity(
        bare, bare.catalog(), bare.services[0], bare.roles[0], "L40S:1", 32, 1, Position.WHOLE
    )
    found = plan(long_prompts(0.9999 * number * one))
    assert served(found) == 1.0
    assert found.nodes == number
    assert found.bound is not None
    assert found.bound <= 1.86 * number * (1.0 + 1e-9)


# What runs


def pipeline(rate: float) -> Problem:
    """A model that needs two nodes, and just two on offer."""
    service = Service(
        name="chat",
        model="qwen3-32b",
        ttft_s=4.0,
        tpot_s=0.3,
        rate_per_s=rate,
        lengths=Lengths.of(LengthMix.fixed(512.0, 128.0)),
        phases="together",
    )
    offer = Offer(region="r", node_type="L40S:1", available=2, usd_per_hour=2.0)
    return Problem(
        name="moved",
        services=(service,),
        offers=(offer,),
        settings=Settings(max_nodes_per_instance=2),
    )


@pytest.mark.parametrize("layers", [4, 8, 12])
def test_what_runs_counts_with_its_own_layout(layers: int) -> None:
    best = plan(pipeline(0.01)).instances
    assert len(best) == 1
    assert len(best[0].layout()) == 2
    asked = pipeline(0.98 * best[0].throughput_per_s)
    found = plan(asked.replace(running=(moved(best[0], layers),)))
    assert served(found) == 1.0
    assert found.usd_per_hour == pytest.approx(plan(asked).usd_per_hour)


def moved(instance: Instance, layers: int) -> Instance:
    cut = instance.layout()[0].end

    def move(node: Node) -> Node:
        if node.end == cut:
            return node.model_copy(update={"end": cut - layers})
        return node.model_copy(update={"start": cut - layers})

    return instance.model_copy(update={"nodes": tuple(map(move, instance.nodes))})


# Shared machines


def test_a_box_of_eight_is_cut_for_two_models(tmp_path: Path) -> None:
    found = plan(read(LAB, tmp_path))
    assert served(found) == 1.0
    kinds = {node.kind for i in found.instances for node in i.nodes if "A100" in node.node_type}
    assert "A100-40:8" not in kinds


@pytest.mark.slow
def test_boxes_of_eight_by_the_best_split(tmp_path: Path) -> None:
    whole = plan(read(BOXES.replace("WHOLE", "true").replace("NODES", "3"), tmp_path))
    assert served(whole) == 1.0
    assert whole.usd_per_hour <= 76.0
    cut = plan(read(BOXES.replace("WHOLE", "false").replace("NODES", "2"), tmp_path))
    assert served(cut) == 1.0
    assert cut.usd_per_hour <= whole.usd_per_hour


# Phases


@pytest.mark.slow
def test_phases_stand_where_kv_can_travel(tmp_path: Path) -> None:
    problem = read(COASTS, tmp_path)
    found = plan(problem)
    assert served(found) == 1.0
    assert found.usd_per_hour <= 50.0
    regions = {instance.id: instance.region for instance in found.instances}
    catalog = problem.catalog()
    for route in found.routes:
        if len(route.instances) == 2:
            way = tuple(regions[name] for name in route.instances)
            moving = handover(problem, catalog, problem.service(route.service))
            assert moving is not None
            assert moving.reaches(*way), route
