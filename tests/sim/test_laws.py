"""What must hold in every run: nothing is lost, nobody works more than all the time, memory is finite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.ids import Phase
from atoll.plan.plan import Plan
from atoll.sim.api import simulate
from atoll.sim.event_loop import run
from atoll.sim.sim_arrays import DONE, DROPPED
from atoll.sim.sim_build import build
from atoll.sim.sim_kernel import table_of
from atoll.sim.sim_options import Admission, Failure, Order, SimOptions
from atoll.sim.sim_result import SimReport
from atoll.workload.requests import PrefixBlocks, Requests
from tests.seeds import examples
from tests.sim.builders import (
    CATALOG,
    cluster_plan,
    cluster_problem,
    laid_out,
    placed,
    planned,
    poisson,
    problem,
    service,
    whole,
)

BLOCK = 16
"""Tokens of a block of a prompt."""
POLICIES = ("iwrr", "swarm", "random", "shortest-queue", "least-load", "two-choices")
TOGETHER = problem()
APART = problem(service(apart=True))
STAGED = problem(service(model="qwen3-32b", apart=True), nodes=("L40S:2", "L40S:4"))
AUTO = problem(service(model="qwen3-32b").model_copy(update={"phases": "auto"}))


def _mixed() -> Plan:
    """Phases together on copies in slices, and apart, one side in stages, in two regions."""
    all_layers = (0, 64, ("L40S:8",))
    instances = [
        placed(AUTO, "b", Phase.BOTH, all_layers, gpus=4, tp=2),
        placed(AUTO, "d0", Phase.DECODE, all_layers, gpus=4, tp=2, region="there"),
        placed(AUTO, "d1", Phase.DECODE, (0, 24, ("L40S:2",)), (24, 64, ("L40S:4",))),
        placed(AUTO, "p0", Phase.PREFILL, (0, 32, ("L40S:4",)), (32, 64, ("L40S:4",)), tp=2),
        placed(AUTO, "p1", Phase.PREFILL, all_layers, region="there"),
    ]
    ways = {("b",): 0.3, ("p0", "d1"): 0.3, ("p1", "d0"): 0.2, ("p1", "d1"): 0.2}
    return planned(AUTO, instances, ways)


PLANS = {
    "whole": (TOGETHER, whole(TOGETHER, copies=2)),
    "apart": (APART, whole(APART, copies=2)),
    "stages": (STAGED, laid_out(STAGED, (0, 30, ("L40S:2",)), (30, 64, ("L40S:2", "L40S:4")))),
    "mixed": (AUTO, _mixed()),
}


def _with_prefixes(work: Requests, seed: int) -> Requests:
    """The same requests, each with a prompt that begins like those of one of three groups."""
    counts = work.input // BLOCK
    group = np.random.default_rng(seed).integers(0, 3, len(work))
    ids = [g * 1000 + k for g, count in zip(group, counts, strict=True) for k in range(count)]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return replace(work, prefix=PrefixBlocks(offsets, np.array(ids, np.int64), BLOCK))


def _check(own: object, plan: object, work: object, options: SimOptions) -> SimReport:
    """Run to the end and check all laws."""
    built = build(plan, own, CATALOG, work, options)  # type: ignore[arg-type]
    table = table_of(built.sim)
    while not run(table, 997):
        used, room = built.sim.unit["used"], built.sim.unit["room"]
        assert np.all(used >= 0.0)
        assert np.all(used <= room + 1e-6)
    sim = built.sim
    q = sim.request[: int(sim.run["requests"][0])]
    # All chunks of prompts are given back.
    chunks, one = 0, int(sim.run["spare"][0])
    while one >= 0:
        chunks, one = chunks + 1, int(sim.request["after"][one])
    assert chunks == len(sim.request) - len(q)
    # Every request is done or accounted for, and nothing is held any more.
    assert np.all((q["state"] == DONE) | (q["state"] == DROPPED))
    assert int(sim.run["finished"][0]) == np.count_nonzero(q["state"] == DONE)
    for left in (sim.unit["used"], sim.unit["running"], sim.unit["owned"], sim.unit["context"]):
        assert np.all(left == 0)
    for left in (sim.vertex["booked"], sim.vertex["queue"], sim.instance["holds"], sim.leg["hops"]):
        assert np.allclose(left, 0.0, atol=1e-6)
    assert np.all(sim.list["head"] < 0)
    assert int(sim.run["moving"][0]) == 0
    # Links are not busy for more than all the time until their last byte has left.
    last = np.maximum(sim.link["free_s"], sim.link["quick_s"])
    assert np.all(sim.link["busy_s"] <= last + 1e-9)
    # Tokens asked for are tokens made.
    done = q["state"] == DONE
    assert np.array_equal(q["made"][done], q["answer"][done])
    assert int(sim.service_bin[2].sum()) == int(q["made"].sum())
    # Time goes forward, and nobody is busy for more than all of it.
    assert np.all(q["first_s"][done] > q["arrival_s"][done])
    assert np.all(q["end_s"][done] >= q["first_s"][done])
    clock = float(sim.run["clock_s"][0])
    # Nobody uses a block any more, and those that are kept have room.
    assert np.all(sim.block["users"] <= 0)
    for unit in sim.unit[sim.unit["cache"] >= 0]:
        assert unit["kept"] == np.count_nonzero(sim.block["users"][unit["cache"]])
        assert unit["kept"] * BLOCK <= unit["room"]
    assert np.all(sim.service["waiting"] == 0)
    assert np.all(sim.unit["busy_s"] <= clock * (1 + 1e-9))
    assert np.all(sim.unit["peak"] <= sim.unit["room"] + 1e-6)
    found = SimReport.of(built, own, options, 0.0)  # type: ignore[arg-type]
    assert found.finished + found.dropped + found.rejected == len(q)
    gaps = found.requests.largest_gap_s
    assert np.all(gaps[done] >= found.requests.tpot_s[done] - 1e-9)
    return found


@examples(20)
@given(
    kind=st.sampled_from(sorted(PLANS)),
    seed=st.integers(0, 1000),
    rate=st.floats(0.5, 60.0),
    prompt=st.integers(1, 3000),
    answer=st.integers(1, 300),
    policy=st.sampled_from(POLICIES),
    batching=st.sampled_from(["engine", "best-effort"]),
    budget=st.integers(16, 4096),
    fails=st.booleans(),
    admission=st.sampled_from(["prompts", "booked"]),
    order=st.sampled_from(["arrival", "slack", "shortest"]),
    prefixes=st.booleans(),
)
def test_nothing_is_lost_and_nothing_is_overdrawn(
    kind: str,
    seed: int,
    rate: float,
    prompt: int,
    answer: int,
    policy: str,
    batching: str,
    budget: int,
    fails: bool,
    admission: Admission,
    order: Order,
    prefixes: bool,
) -> None:
    own, plan = PLANS[kind]
    victim = plan.instances[seed % len(plan.instances)]
    failures = (Failure(2.0, instance=victim.id, back_s=20.0),) if fails else ()
    options = SimOptions(
        seed=seed,
        policy=policy,
        batching="engine" if batching == "engine" else "best-effort",
        token_budget=budget,
        admission=admission,
        order=order,
        failures=failures,
    )
    work = poisson(150, rate, seed, prompt, answer)
    _check(own, plan, _with_prefixes(work, seed) if prefixes else work, options)


@examples(13)
@given(
    seed=st.integers(0, 1000),
    room=st.integers(150, 3000),
    rate=st.floats(1.0, 50.0),
    partial=st.booleans(),
    single=st.booleans(),
    known=st.booleans(),
    ratio=st.floats(0.0, 2.0),
    prompts=st.booleans(),
    budget=st.integers(8, 200),
    whole=st.booleans(),
)
def test_scarce_memory_delays_and_recomputes_but_never_overflows(
    seed: int,
    room: int,
    rate: float,
    partial: bool,
    single: bool,
    known: bool,
    ratio: float,
    prompts: bool,
    budget: int,
    whole: bool,
) -> None:
    own = cluster_problem((2e4, 1e4, 2e4, 3e4), kv_tokens=float(room))
    ranges = [(0, 40), (0, 30), (30 if partial else 40, 80), (30, 80)]
    flows = [
        ("source", "n0", 2.0),
        ("source", "n1", 1.0),
        ("n0", "n2", 2.0),
        ("n1", "n3", 1.0),
        ("n2", "sink", 2.0),
        ("n3", "sink", 1.0),
    ]
    if whole:
        ranges = [(0, 80), (0, 80), (0, 40), (40, 80)]
        flows = [("source", f"n{i}", 1.0) for i in range(3)]
        flows += [("n0", "sink", 1.0), ("n1", "sink", 1.0), ("n2", "n3", 1.0), ("n3", "sink", 1.0)]
    plan = cluster_plan(own, ranges, flows, partial=partial and not whole)
    options = SimOptions(
        seed=seed,
        single_messages=single,
        known_outputs=known,
        output_ratio=ratio,
        high_water=1.0,
        admission="prompts" if prompts else "booked",
        token_budget=budget,
        prefix_caching=True,
        order="slack",
    )
    found = _check(own, plan, _with_prefixes(poisson(120, rate, seed, 40, 25), seed), options)
    if known and not prompts and room >= 2000:
        assert found.retries == 0


def test_a_full_cache_sends_the_youngest_back_to_compute_again() -> None:
    own = cluster_problem((1e6,), kv_tokens=400.0)
    plan = cluster_plan(own, [(0, 80)], [("source", "n0", 1.0), ("n0", "sink", 1.0)])
    work = poisson(40, 1000.0, 3, 30, 60)

    careless = SimOptions(output_ratio=0.0, high_water=1.0)
    found = _check(own, plan, work, careless)
    assert found.retries > 0
    assert found.finished + found.dropped == 40

    careful = SimOptions(known_outputs=True, high_water=1.0)
    assert _check(own, plan, work, careful).retries == 0


def test_the_same_seed_gives_the_same_bits() -> None:
    own, plan = PLANS["stages"]
    work = poisson(300, 5.0, 1)
    options = SimOptions(policy="two-choices", seed=3)
    one, two = (simulate(plan, own, CATALOG, work, options) for _ in range(2))
    for name in ("ttft_s", "tpot_s", "e2e_s", "largest_gap_s"):
        left, right = getattr(one.requests, name), getattr(two.requests, name)
        assert left.tobytes() == right.tobytes()
    assert one.services == two.services
    other = simulate(plan, own, CATALOG, work, SimOptions(policy="two-choices", seed=4))
    assert other.requests.e2e_s.tobytes() != one.requests.e2e_s.tobytes()
