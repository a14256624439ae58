"""Templates with engines, against every order and cut that the engines' own rules allow."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import numpy as np
import pytest

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.handover import handover_engine
from atoll.plan.problem import Problem
from atoll.plan.validate.check import check
from atoll.solve.derating import Derating
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.templates.generate import PREFERENCE, TemplateLibrary
from atoll.solve.templates.library import engine_tables, role_library, template_libraries
from tests.reference.engine_layouts import engine_rates
from tests.reference.rent_layouts import Kinds

FLEET = """\
services:
  chat: {{model: {model}, ttft: 2s, tpot: 90ms, rate: 2/s, lengths: 512x128}}
pool:
  offers:
    - {{region: here, node_type: L40S:2, available: 2, usd_per_hour: 3.6}}
    - {{region: here, node_type: A10G:1, available: 3, usd_per_hour: 1.0}}
    - {{region: here, node_type: T4:1, available: 3, usd_per_hour: 0.5}}
    - {{region: here, node_type: V100-16:1, available: 3, usd_per_hour: 0.9}}
settings: {{max_nodes_per_instance: 3, engines: [{engines}]}}
"""
CASES = [
    ("phi-4-14b", "vllm"),
    ("phi-4-14b", "atoll"),
    ("phi-4-14b", "vllm, atoll"),
    ("qwen3-32b@int4", "vllm, atoll"),
    ("llama-3.1-8b@fp8", "sglang, vllm, atoll"),
    ("llama-3.1-8b@q4_k_m", "vllm, llamacpp"),
    ("phi-4-14b", "vllm, llamacpp"),
]


@cache
def catalog() -> Catalog:
    return Catalog.default()


def asked(model: str, engines: str) -> Problem:
    return parse_fleet(FLEET.format(model=model, engines=engines))


def by_nodes(library: TemplateLibrary) -> dict[Kinds, int]:
    kinds = library.tables.node_types
    return {
        tuple(sorted(Counter(dict(zip(kinds, map(int, row), strict=True))).elements())): at
        for at, row in enumerate(library.counts)
    }


@pytest.mark.parametrize(("model", "engines"), CASES)
@pytest.mark.parametrize("phase", [Phase.BOTH, Phase.PREFILL, Phase.DECODE])
def test_every_set_of_nodes_carries_what_its_best_engine_does(
    model: str, engines: str, phase: Phase
) -> None:
    problem = asked(model, engines)
    role = next(r for r in problem.roles if r.phase is phase)
    wanted = {
        name: engine_rates(problem, catalog(), name, role) for name in problem.settings.engines
    }
    library = role_library(problem, engine_tables(problem, catalog(), role), 3)
    found = by_nodes(library)
    best = {
        some: max(own.get(some, 0.0) for own in wanted.values())
        for some in set().union(*wanted.values())
    }
    for some, at in found.items():
        layout = library.layout(at)
        assert layout.engine is not None
        rate = float(library.throughput[at])
        # What the engine that was chosen carries, and no other carries more than is given up for preference.
        assert rate == pytest.approx(wanted[layout.engine][some], rel=1e-6)
        assert best[some] <= rate * (1.0 + PREFERENCE) * (1.0 + 1e-6)
        assert layout.throughput == pytest.approx(rate)
    for some, rate in best.items():
        # What is left out carries no more than its nodes apart.
        parts = (
            (part, tuple(sorted((Counter(some) - Counter(part)).elements())))
            for size in range(1, len(some))
            for part in set(itertools.combinations(some, size))
        )
        apart = max(
            (best.get(a, 0.0) + best.get(b, 0.0) for a, b in parts),
            default=0.0,
        )
        assert some in found or rate <= apart * (1.0 + 1e-6)


def test_templates_are_run_by_the_engines_that_are_chosen_for_them() -> None:
    problem = asked("llama-3.1-8b@fp8", "sglang, vllm, atoll")
    role = next(r for r in problem.roles if r.phase is Phase.BOTH)
    wanted = {
        name: engine_rates(problem, catalog(), name, role) for name in problem.settings.engines
    }
    libraries = template_libraries(problem, catalog(), cached=False)
    library, tried = libraries.roles[str(role)], 0
    for some, at in by_nodes(library).items():
        rivals = library.rivals(at)
        best = {engine for engine, rates in wanted.items() if rates.get(some, 0.0) > 0.0}
        assert {one.engine for one in rivals} == best - {library.layout(at).engine}
        for rival in rivals:
            key = str(role), tuple(sorted(Counter(some).items()))
            chosen = Derating(engines={key: rival.engine}).choose_engines(libraries)
            changed = chosen.roles[str(role)]
            assert changed.layout(at) == rival
            assert changed.throughput[at] == pytest.approx(wanted[rival.engine or ""][some])
            others = np.arange(len(library)) != at
            assert (changed.throughput == library.throughput)[others].all()
            tried += 1
    assert tried > 3


@pytest.mark.parametrize(("model", "engines"), CASES)
def test_every_instance_of_a_plan_has_an_engine_that_runs_it(model: str, engines: str) -> None:
    problem = asked(model, engines)
    plan = solve(problem, PlanRequest())
    assert plan.instances
    check(plan, problem)
    assert {one.engine for one in plan.instances} <= set(problem.settings.engines)


def test_free_layouts_cost_no_more_than_those_that_run() -> None:
    problem = asked("phi-4-14b", "vllm, atoll")
    free = problem.replace(settings={**dict(problem.settings), "engines": ()})
    assert solve(free).usd_per_hour <= solve(problem).usd_per_hour
    assert all(one.engine is None for one in solve(free).instances)


def test_without_an_engine_for_the_weights_there_is_no_plan() -> None:
    plan = solve(asked("llama-3.1-8b@nvfp4", "atoll"))
    assert plan.status == "infeasible"


@pytest.mark.parametrize(
    ("model", "engines", "chosen"),
    [
        # It fits on one L40S with two GPUs, which the stage engine would have to cut.
        ("phi-4-14b", "vllm, atoll", "vllm"),
        ("phi-4-14b", "sglang, vllm", "sglang"),
        ("phi-4-14b", "atoll, vllm", "atoll"),
        # No node holds it whole: only the stage engine's connector takes pipelines on both sides.
        ("llama-3.1-70b", "vllm, atoll", "atoll"),
        ("llama-3.1-70b", "vllm", "vllm"),
    ],
)
def test_kv_cache_goes_the_way_of_the_first_engine_that_holds_the_model(
    model: str, engines: str, chosen: str
) -> None:
    problem = asked(model, engines)
    (service,) = problem.services
    assert handover_engine(problem, catalog(), service).name == chosen


def test_pairs_of_a_plan_are_of_one_connector_and_cut_as_it_takes_them() -> None:
    text = FLEET.format(model="phi-4-14b", engines="vllm, atoll").replace("ttft: 2s", "ttft: 4s")
    plan = solve(parse_fleet(text.replace("rate: 2/s", "rate: 2/s, phases: apart")))
    assert plan.status == "optimal"
    assert {one.phase for one in plan.instances} == {Phase.PREFILL, Phase.DECODE}
    for one in plan.instances:
        assert one.engine == "vllm"
        assert one.phase is Phase.PREFILL or len(one.layout()) == 1
