"""Large clusters by counts: bounds hold, whole machines fill stages as said, plans are valid and repeat."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.rng import stream
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.problem import Problem
from atoll.plan.validate.check import check, goal_value
from atoll.solve.array_types import Ints
from atoll.solve.deadline import Deadline
from atoll.solve.place.flow_instance import FlowInstance, Placement, Unit, part_of
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.latency import flow_within
from atoll.solve.place.place_service import FlowEffort
from atoll.solve.place.place_solver import solve
from atoll.solve.place.place_to_plan import plan_of
from atoll.solve.place.sites.pipeline_bound import bound_pipelines
from atoll.solve.place.sites.site_placement import (
    LARGE,
    _cut_off,
    _ServiceGroups,
    deal,
    is_large,
    join_small,
    merge_alike,
    place_sites,
)
from atoll.solve.place.sites.spread_flow import spread_within
from atoll.solve.place.sites.stage_exchange import Filled
from atoll.solve.place.sites.stage_fill import fill_best
from atoll.solve.place.sites.stage_patterns import fill_alike
from atoll.solve.place.sites.stage_rates import Place, StageTable, cap_rates, place_of
from atoll.solve.place.sites.stock import Stock, StockEntry, list_entries, list_sites, take_stock
from benchmarks.placement.flow_cases import small_cluster
from benchmarks.planning.scale_placement import fleet
from tests.reference.flow_brute import brute
from tests.seeds import examples

few = examples(12)
FLOW = FlowEffort(objective="max-flow")
PROMISED = FlowEffort(promise=True)


def stock_of(instance: FlowInstance) -> Stock:
    """Every node of an instance as an entry of its own."""
    entries = tuple(
        StockEntry("here", kind, (name,))
        for name, kind in zip(instance.names, instance.node_types, strict=True)
    )
    every = np.arange(instance.size)
    return Stock(entries, every, np.ones(instance.size, np.int64), every, instance)


@cache
def problem_of(n: int) -> Problem:
    return parse_fleet(fleet(n))


@cache
def stock_from(n: int, *, promised: bool = True) -> Stock:
    problem = problem_of(n)
    stock = take_stock(
        problem, problem.catalog(), problem.services[0], partial=False, promised=promised
    )
    assert stock is not None
    return stock


@few
@given(st.integers(0, 2**20))
def test_no_placement_carries_more_than_the_bound(seed: int) -> None:
    instance = small_cluster(stream(seed, "sites"))
    stock = stock_of(instance)
    place = place_of(stock, np.arange(instance.size), FLOW)
    bound = bound_pipelines([place], stock.machines).value
    above = bound * (1 + 1e-6)
    # Nothing above the bound: what was asked for comes back.
    assert brute(instance, above=above).value == above


def test_the_bound_is_the_largest_flow_where_one_machine_holds_the_model_best() -> None:
    stock = stock_from(12, promised=False)
    only = np.array([i for i, e in enumerate(stock.entries) if e.node_type == "A100-80:1"][:1])
    place = place_of(stock, only, FLOW)
    machines = np.zeros(len(stock.entries), np.int64)
    machines[only] = 1
    # A single machine has all of the flow, so it carries what it does with all layers.
    whole = stock.sample.rate[stock.row[stock.entry == only[0]][0], stock.sample.layers]
    assert bound_pipelines([place], machines).value == pytest.approx(whole, rel=0.02)


@pytest.mark.slow
def test_no_flow_within_a_promise_exceeds_the_bound() -> None:
    problem = problem_of(16)
    instance = flow_instance(problem, problem.catalog(), problem.services[0], promised=True)
    stock = stock_from(16)
    every = np.arange(len(stock.entries))
    places = [place_of(stock, site, PROMISED) for site in list_sites(stock)]
    bound = bound_pipelines([*places, place_of(stock, every, PROMISED)], stock.machines).value
    random = np.random.default_rng(5)
    best = 0.0
    for _ in range(25):
        stages = int(random.integers(1, 4))
        cuts = np.array([0, *sorted(random.choice(np.arange(1, 64), stages - 1, False)), 64])
        stage = random.integers(0, stages, instance.size)
        start, end = cuts[stage].astype(np.int64), cuts[stage + 1].astype(np.int64)
        fits = end - start <= instance.max_layers
        placement = Placement(np.where(fits, start, 0), np.where(fits, end, 0))
        best = max(best, flow_within(instance, placement).value)
    assert 0.0 < best <= bound


def check_machines(filled: Filled, place: Place, stock: Stock, machines: Ints) -> None:
    """All layers are held, by no more machines than there are."""
    assert sum(filled.cut) == stock.sample.layers
    used = np.zeros(len(machines))
    np.add.at(used, place.entry, filled.number.sum(axis=0) / place.pieces)
    assert (used <= machines).all()


@pytest.mark.slow
@examples(6)
@given(st.integers(0, 2**20))
def test_filled_stages_carry_what_is_said_with_the_machines_that_are_there(seed: int) -> None:
    random = np.random.default_rng(seed)
    stock = stock_from(12)
    site = list_sites(stock)[0]
    place = place_of(stock, site, PROMISED)
    machines = np.zeros(len(stock.entries), np.int64)
    machines[site] = random.integers(0, 12, len(site))
    bound = bound_pipelines([place], machines)
    filled = fill_best(place, machines, bound.cuts, tries=2, steps=30)
    if filled is None:
        return
    check_machines(filled, place, stock, machines)
    carried = [
        float(number @ (filled.table.at(s)[:, j] / place.pieces))
        for s, (number, j) in enumerate(zip(filled.number, filled.cut, strict=True))
    ]
    assert filled.flow == pytest.approx(min(carried))
    assert 0.0 < filled.flow <= bound.value * (1 + 1e-6)


@examples(6)
@given(st.integers(0, 2**20))
def test_stages_of_the_largest_flow_have_no_more_machines_than_there_are(seed: int) -> None:
    random = np.random.default_rng(seed)
    stock = stock_from(12, promised=False)
    site = list_sites(stock)[0]
    place = place_of(stock, site, FLOW)
    machines = np.zeros(len(stock.entries), np.int64)
    machines[site] = random.integers(0, 12, len(site))
    bound = bound_pipelines([place], machines).value
    link = float(random.uniform(1e2, 1e5))
    filled = fill_alike(place, machines, bound, link)
    if filled is None:
        return
    check_machines(filled, place, stock, machines)
    each = place.tables[0].middle[:, list(filled.cut)].T / place.pieces
    carried = (filled.number * each).sum(axis=1)
    assert filled.flow == pytest.approx(carried.min())
    assert 0.0 < filled.flow <= bound * (1 + 1e-6)


def alike(machines: int, layers: int = 4) -> tuple[Place, Ints]:
    """Machines that do 12 layers a second each, whole or in halves."""
    held = np.arange(1, layers + 1)
    rate = np.concatenate([[0.0], 12.0 / held])[None, :].repeat(2, axis=0)
    table = StageTable(1, rate, rate, rate)
    entry = np.zeros(2, np.int64)
    return Place(np.arange(2), entry, np.array([1, 2]), (table,)), np.array([machines])


def test_stages_of_the_largest_flow_are_the_best_ones() -> None:
    # Six machines do 72 layers a second: 18 tokens/s of four layers, which whole stages reach.
    place, machines = alike(6)
    filled = fill_alike(place, machines, 18.0, np.inf)
    assert filled is not None
    assert filled.flow == pytest.approx(18.0, rel=0.005)


def test_no_machine_of_a_stage_carries_more_than_links_take() -> None:
    place, machines = alike(6)
    filled = fill_alike(place, machines, 18.0, 2.0)
    assert filled is not None
    # A machine of a flow of F carries sqrt(2 F) at most: one of 18 is 6, though with a layer it could do 12.
    share = filled.number @ (1.0 / place.pieces)
    assert (share >= filled.flow / np.sqrt(2.0 * 18.0)).all()
    assert fill_alike(place, machines, 18.0, 1e-9) is None


def test_small_sites_join_until_they_are_many_machines() -> None:
    stock = stock_from(200, promised=False)
    sites = list_sites(stock)
    (pool,) = join_small(stock, sites)
    assert sorted(np.concatenate(pool).tolist()) == list(range(len(stock.entries)))
    large = stock_from(1000, promised=False)
    assert all(len(pool) == 1 for pool in join_small(large, list_sites(large)))


def test_machines_of_a_type_are_one_entry_wherever_they_are() -> None:
    stock = stock_from(12, promised=False)
    place = place_of(stock, np.arange(len(stock.entries)), FLOW)
    hosts = [list(entry.hosts) for entry in stock.entries]
    merged, machines, names = merge_alike(place, stock, stock.machines, hosts)
    kinds = [stock.entries[entry].node_type for entry in merged.entry]
    assert len(set(kinds)) == len(kinds) == len({entry.node_type for entry in stock.entries})
    assert sorted(chain(*names)) == sorted(chain(*hosts))
    assert [len(own) for own in names] == machines.tolist()
    assert merged.tables[0].middle.shape[0] == len(kinds)


def test_the_largest_flow_of_small_sites_is_no_less_than_of_each_by_itself() -> None:
    problem = problem_of(12)
    catalog, (service,) = problem.catalog(), problem.services
    found = place_sites(problem, catalog, service, FLOW, Deadline(np.inf))
    stock = stock_from(12, promised=False)
    placer = _ServiceGroups(problem, catalog, service, stock, FLOW)
    alone = [p for site in list_sites(stock) for p in placer.place_all(site, Deadline(np.inf))]
    assert found is not None
    value = sum(placed.flows.value for placed in found.placed)
    assert (
        sum(placed.flows.value for placed in alone)
        <= value * (1 + 1e-9)
        <= found.bound * (1 + 2e-9)
    )
    plan = plan_of(problem, catalog, found.placed, goal="max-flow", bound=found.bound, solver="")
    check(plan, problem, catalog)
    assert goal_value(plan, problem) == pytest.approx(value)


def test_rates_above_the_whole_flow_are_cut_to_it() -> None:
    stock = stock_from(12, promised=False)
    place = place_of(stock, np.arange(len(stock.entries)), FLOW)
    capped = cap_rates(place, 1000.0)
    assert max(float(table.middle.max()) for table in capped.tables) == 1000.0
    assert len({id(table.middle) for table in capped.tables}) == 1
    assert cap_rates(place, 1e12) is place


def test_a_flow_spread_over_links_keeps_the_promise() -> None:
    problem = problem_of(16)
    instance = flow_instance(problem, problem.catalog(), problem.services[0], promised=True)
    able = np.flatnonzero(np.array(instance.node_types) == "A100-80:1")
    start, end = np.zeros(instance.size, np.int64), np.zeros(instance.size, np.int64)
    start[able[::2]], end[able[::2]] = 0, 30
    start[able[1::2]], end[able[1::2]] = 30, 64
    used = Placement(start, end)
    # Nodes without layers stand in no stage.
    assert spread_within(instance, used) is None
    part, placement = part_of(instance, able), Placement(start[able], end[able])
    spread, best = spread_within(part, placement), flow_within(part, placement)
    assert spread is not None
    assert spread.value >= 0.9 * best.value > 0.0
    through = spread.enter + spread.edge.sum(axis=0)
    assert through == pytest.approx(spread.leave + spread.edge.sum(axis=1))


def test_groups_hold_every_machine_once() -> None:
    stock = stock_from(1000)
    for site in list_sites(stock):
        groups = list(deal(stock, site))
        total: Ints = sum((group.machines for group in groups), np.zeros(len(stock.entries), int))
        assert (total[site] == stock.machines[site]).all()
        assert len({group.machines.tobytes() for group in groups}) <= 2


def test_machines_that_a_rule_names_are_alone() -> None:
    text = fleet(12) + "    - {between: [site-0, site-0-l4-0], bandwidth: 1Gbit/s, latency: 1ms}\n"
    problem = problem_of(12)
    name = cluster_of(problem).nodes[0].name
    text = text.replace("site-0-l4-0", name)
    entries = {entry.hosts for entry in list_entries(parse_fleet(text))}
    assert (name,) in entries
    assert sum(len(hosts) for hosts in entries) == 12


def test_slices_of_a_machine_are_apart() -> None:
    chunks = [Unit("a", "H100:8", "here")]
    taken = [_cut_off(chunks, pieces) for pieces in (2, 4, 8, 8)]
    assert [unit.gpu_ids for unit in taken] == [(0, 1, 2, 3), (4, 5), (6,), (7,)]
    assert _cut_off([Unit("a", "L4:1", "here")], 1).gpu_ids is None


@pytest.mark.parametrize(
    "effort",
    [
        pytest.param(PROMISED, id="promised", marks=pytest.mark.slow),
        pytest.param(FLOW, id="max-flow"),
    ],
)
def test_a_large_cluster_comes_close_to_its_bound(effort: FlowEffort) -> None:
    problem = problem_of(200)
    assert is_large(problem)
    assert not is_large(problem_of(LARGE))
    catalog = problem.catalog()
    plan = solve("flow.search", problem, catalog, replace(effort, work=0.1, seconds=1e6))
    check(plan, problem, catalog)
    assert plan.bound is not None
    assert 0.9 * plan.bound <= goal_value(plan, problem) <= plan.bound
    if effort.promise:
        again = solve("flow.search", problem, catalog, replace(effort, work=0.1, seconds=1e6))
        assert again == plan


def test_a_promise_that_no_pipeline_keeps_is_said() -> None:
    problem = parse_fleet(fleet(102).replace("tpot: 200ms", "tpot: 1ms"))
    plan = solve("flow.search", problem, problem.catalog(), PROMISED)
    assert plan.status == "infeasible"
    assert "no pipeline within a site keeps ttft 10s and tpot 1ms" in plan.reasons[0]
