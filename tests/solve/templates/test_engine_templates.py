"""Templates with engines, against every order and cut that the engines' own rules allow."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import numpy as np
import pytest

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase, RoleId, parse_node_type
from atoll.engines.table import find_engine
from atoll.perf.layers import tp_sizes
from atoll.plan.capacities import role_table
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.handover import handover_engine
from atoll.plan.problem import Problem
from atoll.plan.validate.check import check
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.templates.generate import PREFERENCE, TemplateLibrary
from atoll.solve.templates.library import engine_tables, role_library, slowest_sources
from tests.reference.rent_layouts import Floats, Kinds, best_cut, cut_layers

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


def rates(problem: Problem, engine: str, role: RoleId, kind: str, tp: int | None) -> Floats:
    """What a node of a kind carries, wherever it comes from, on an engine."""
    service, stages = problem.service_of(role), problem.settings.stages
    run = problem.run_by(engine)
    found: Floats = np.minimum.reduce(
        [
            role_table(run, catalog(), service, role, kind, stages, source=source, tp=tp)
            for source in slowest_sources(problem, catalog(), kind)
        ]
    )
    return found


def usable(problem: Problem, engine: str, role: RoleId) -> list[str]:
    """Kinds that an engine runs the model on, as its file says it."""
    spec, rules = catalog().model(problem.service_of(role).model).llm, find_engine(engine)
    return [
        kind
        for kind in problem.kinds
        if rules.refuses(spec, catalog().node(kind).gpu) is None
        and parse_node_type(kind).gpu_count <= (rules.max_node_gpus or 99)
    ]


def carried(problem: Problem, engine: str, role: RoleId) -> dict[Kinds, float]:
    """The most that every set of nodes carries on an engine, by trying everything that it runs."""
    rules, kinds = find_engine(engine), usable(problem, engine, role)
    chosen = handover_engine(problem, catalog(), problem.service_of(role)).name
    if role.phase is not Phase.BOTH and rules.connector != find_engine(chosen).connector:
        return {}
    pipelines = rules.pipelines_in(role.phase)
    spec = catalog().model(problem.service_of(role).model).llm
    free = {kind: rates(problem, engine, role, kind, None) for kind in kinds}
    found: dict[Kinds, float] = {}
    for size in range(1, problem.settings.max_nodes_per_instance + 1):
        for some in itertools.combinations_with_replacement(sorted(kinds), size):
            if size == 1 and rules.max_copies == 1:
                gpus = parse_node_type(some[0]).gpu_count
                found[some] = float(rates(problem, engine, role, some[0], gpus)[3, 0, -1])
            elif size == 1:
                found[some] = float(free[some[0]][3, 0, -1])
            elif pipelines == "free":
                found[some] = best_cut(free, some).throughput
            elif pipelines == "rows":
                sizes = {parse_node_type(kind).gpu_count for kind in some}
                (gpus, *unlike) = sorted(sizes)
                if not unlike and gpus in tp_sizes(spec, gpus):
                    found[some] = best_row(problem, engine, role, some, gpus)
    limit = problem.settings.memory_ratio * spec.weight_bytes
    return {
        some: rate
        for some, rate in found.items()
        if rate > 0.0
        and (len(some) == 1 or sum(catalog().node(k).memory_bytes for k in some) <= limit)
    }


def best_row(problem: Problem, engine: str, role: RoleId, some: Kinds, tp: int) -> float:
    """The most that nodes in a row carry, one a stage, in any order and with any layers."""
    best = 0.0
    for order in set(itertools.permutations(some)):
        last = len(order) - 1
        places = [0 if at == 0 else 2 if at == last else 1 for at in range(len(order))]
        tables = [
            rates(problem, engine, role, kind, tp)[place, last]
            for kind, place in zip(order, places, strict=True)
        ]
        found = cut_layers(tables, len(tables[0]) - 1)
        best = max(best, 0.0 if found is None else found[1])
    return best


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
    wanted = {name: carried(problem, name, role) for name in problem.settings.engines}
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
    plan = solve(asked("llama-3.1-8b@fp8", "atoll"))
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
