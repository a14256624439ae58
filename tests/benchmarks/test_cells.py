"""The benchmark of any-to-any plans asks what it says it asks, and reads its answers right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.api.fleet import Fleet
from atoll.catalog import Catalog
from atoll.catalog.media import EncoderSpec
from atoll.solve.graph.graph_types import ClassDemand, ExecutorType, GraphProgram, Machines
from benchmarks.any_to_any import cells, cells_fleets, cells_paper
from benchmarks.report import ROOT
from tests.benchmarks.test_benchmarks import last_line, number, python

KEYS = (
    "exact_checked",
    "exact_equal",
    "alg2_worse_share",
    "alg2_worst_ratio",
    "omni8_vs_monolith",
    "omni16_vs_monolith",
    "figure2_winners_of_8",
    "hetero_saving",
    "plan_cpu_s_max",
    "cpu_s",
    "wall_s",
)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog.default()


def tiles(workload: cells_paper.Workload, catalog: Catalog) -> float:
    """Tiles of InternVL3 that a request of a workload brings."""
    vision = catalog.model(cells_paper.INTERNVL).components["vision"]
    assert isinstance(vision, EncoderSpec)
    return workload.images * vision.image_tokens(workload.height, workload.width) / 256


def program(*executors: ExecutorType, gpus: int = 4) -> GraphProgram:
    """One request/s that needs parts a and b, on one box."""
    box = Machines(("lab", f"P:{gpus}", "owned"), "P", gpus, 1, float(gpus), (1, 2, 4))
    return GraphProgram((box,), executors, (ClassDemand("s", "x", 1.0, (("a", "b"),)),))


def executor(parts: str, gpus: int, **seconds: float) -> ExecutorType:
    """An executor that takes so long for each part, and twice as long alone."""
    known = {("s", "x", part): value for part, value in seconds.items()}
    alone = {key: 2.0 * value for key, value in known.items()}
    kinds = ((f"P:{gpus}", 1),)
    return ExecutorType("s", tuple(parts.split("+")), kinds, known, alone, label=parts)


def test_servegen_is_footnote_6(catalog: Catalog) -> None:
    problem = cells_paper.equal_gpus(cells_paper.OMNI, cells_paper.servegen(), 1)
    (service,) = problem.services
    assert len(service.classes) == 8
    assert all(klass.images is not None for klass in service.classes)
    for has, share in (("video", 0.5), ("audio_s", 0.5), ("speech_s", 0.2)):
        found = sum(k.share for k in service.classes if getattr(k, has) is not None)
        assert found == pytest.approx(share)
    assert all(k.ttft_s is k.tpot_s is k.ahead_s is None for k in service.classes)
    assert sum(offer.gpus * offer.available for offer in problem.offers) == 8
    quiet = cells_paper.equal_gpus(
        cells_paper.QWEN_VL, cells_paper.servegen(audio=False, speech=0.0), 2
    )
    assert len(quiet.services[0].classes) == 2
    assert sum(k.share for k in quiet.services[0].classes) == pytest.approx(1.0)


def test_no_column_of_figure_2_has_more_tiles_than_two_encoders_carry(catalog: Catalog) -> None:
    measured = cells_paper.FIGURE2_PAPER[cells_paper.E_PD]
    most = tiles(cells_paper.FIGURE2[0], catalog) * measured[0]
    rates = [tiles(w, catalog) * r for w, r in zip(cells_paper.FIGURE2, measured, strict=True)]
    assert max(rates) <= most * 1.001
    assert [round(rate) for rate in rates][:3] == [29, 29, 29]


def test_winners_of_the_paper() -> None:
    winners = [cells_paper.figure2_winner(column) for column in range(8)]
    assert winners.count(cells_paper.MONOLITHS) == 3
    assert winners.count(cells_paper.E_PD) == 5
    for deployment in cells_paper.FIGURE2_DEPLOYMENTS.values():
        assert sum(gpus * count for (_, gpus), count in deployment.items()) == 8
    for name, deployment in cells_paper.TABLE3_DEPLOYMENTS.items():
        used = sum(gpus * count for (_, gpus), count in deployment.items())
        assert used == (14 if name == "E/P/D" else 16)


def test_the_scarcest_executor_bounds_a_deployment() -> None:
    asked = program(executor("a", 1, a=0.5), executor("b", 1, b=0.25), executor("a+b", 2, a=0.2))
    assert cells_paper.deployed(asked, {("a", 1): 1, ("b", 1): 3}) == pytest.approx(2.0)
    assert cells_paper.deployed(asked, {("a", 1): 3, ("b", 1): 1}) == pytest.approx(4.0)
    assert cells_paper.deployed(asked, {("a", 1): 1, ("b", 4): 1}) == 0.0
    # It runs both parts, and there is no telling how long b takes it.
    assert cells_paper.deployed(asked, {("a+b", 2): 1}) == 0.0


def test_the_max_is_found_and_bounded() -> None:
    both = executor("a+b", 1, a=0.5, b=0.5)
    asked = program(executor("a", 1, a=0.5), executor("b", 1, b=0.25), both)
    apart = cells_paper.carry_most(asked, lambda e: len(e.parts) == 1)
    assert apart is not None
    # Two of a carry 4, one of b carries 4; a fourth GPU has nothing to add.
    assert apart.per_s == pytest.approx(4.0)
    most = cells_paper.carry_most(asked)
    assert most is not None
    assert most.per_s > 4.0
    assert most.bound_per_s >= most.per_s * (1.0 - 1e-9)
    assert sum(gpus * count for (_, gpus), count in most.executors.items()) <= 4
    assert cells_paper.carry_most(asked, lambda e: e.parts == ("a",)) is None
    smaller = cells_paper.carry_most(cells_paper.cut_down(asked, 1))
    assert smaller is not None
    assert smaller.per_s == pytest.approx(1.0)


def test_one_request_at_a_time_takes_as_long_as_alone() -> None:
    asked = program(executor("a+b", 1, a=0.5, b=0.5), gpus=1)
    slowed = cells_paper.one_at_a_time(asked, asked, ("b",))
    (only,) = slowed.executors
    assert only.seconds == {("s", "x", "a"): 0.5, ("s", "x", "b"): 1.0}
    most = cells_paper.carry_most(slowed)
    assert most is not None
    assert most.per_s == pytest.approx(1.0 / 1.5)
    whole = replace(
        asked.executors[0], parts=("a,b@a+b",), seconds={("s", "x", "a,b@a+b"): 1.0}, latency_s={}
    )
    joined = cells_paper.one_at_a_time(replace(asked, executors=(whole,)), asked, ("a", "b"))
    assert joined.executors[0].seconds == {("s", "x", "a,b@a+b"): 2.0}


def test_no_fixed_deployment_beats_the_exact_plan(catalog: Catalog) -> None:
    workload = cells_paper.FIGURE2[2]
    problem = cells_paper.equal_gpus(cells_paper.INTERNVL, workload.classes(), 1)
    built = cells_paper.build(problem, catalog).program
    mix = cells_paper.carry_most(built, cells.papers_executors)
    free = cells_paper.carry_most(built)
    assert mix is not None
    assert free is not None
    rates = cells_paper.figure2_rates(workload, catalog)
    assert min(rates.values()) > 0.0
    assert max(rates.values()) <= mix.per_s * 1.001
    assert mix.per_s <= free.per_s * 1.001
    # 38 billion parameters do not fit one GPU with room for anything else.
    assert cells_paper.carry_most(cells_paper.cut_down(built, 1)) is None


def test_monoliths_that_batch_less_carry_less(catalog: Catalog) -> None:
    found = cells.monoliths_of(1, catalog)
    rates = [most.per_s for most in found.values()]
    assert list(found) == ["ideal", "speech one at a time", "all one at a time"]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 3


def test_fleets_are_those_of_the_example() -> None:
    example = Fleet.load(ROOT / "examples" / "any-to-any.yaml").problem
    cases = dict(cells_fleets.mixed_cases(quick=False))
    assert len(cases) == 12
    mine = cases["speech, documents, chat, aws/us-east-1, x1"]
    assert mine.services == example.services
    kinds = {o.node_type for o in mine.offers}
    assert kinds == {o.node_type for o in example.offers}
    busy = cases["speech, documents, chat, aws/us-east-1, x4"]
    assert [s.rate_per_s for s in busy.services] == [4 * s.rate_per_s for s in mine.services]


def test_large_fleet_is_sixteen_boxes() -> None:
    problem = cells_fleets.large_fleet(2.0)
    assert len(problem.services) == 4
    assert sum(service.is_graph for service in problem.services) == 3
    assert sum(offer.available for offer in problem.offers) == 16
    assert {offer.gpus for offer in problem.offers} == {8}
    assert len({offer.node_type for offer in problem.offers}) == 4


def test_saving_is_against_the_best_single_type() -> None:
    found = cells_fleets.Saving("f", 10.0, 0.0, {"A": 15.0, "B": 12.0, "C": None})
    assert found.ratio == pytest.approx(1.2)
    assert cells_fleets.Saving("f", 10.0, 0.0, {"A": None}).ratio is None


@pytest.mark.slow
def test_cells() -> None:
    figures = last_line(python("-m", "benchmarks.cells", "--quick"))
    for key in KEYS:
        assert number(figures, key) >= 0.0, key
    assert number(figures, "exact_equal") == number(figures, "exact_checked") >= 40
    assert number(figures, "alg2_worst_ratio") > 1.0
    assert number(figures, "omni8_vs_monolith") >= 0.999
    assert number(figures, "hetero_saving_min") >= 0.999
