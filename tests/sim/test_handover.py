"""Prompts and answers apart: what moving the KV cache takes, who waits for whom, and where it never goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.perf.batch import Batch
from atoll.perf.layers import layer_kinds
from atoll.perf.step import analytic, step_seconds
from atoll.plan.cluster import Cluster, ClusterLink, ClusterNode
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.handover import kv_bytes, transfer_s
from atoll.plan.plan import Instance, Node, Plan
from atoll.plan.problem import Problem
from atoll.sim.api import simulate
from atoll.sim.event_loop import run
from atoll.sim.sim_build import build
from atoll.sim.sim_kernel import table_of
from atoll.sim.sim_links import link_names
from atoll.sim.sim_options import Epoch, Failure, SimOptions
from atoll.solve.registry import solve
from atoll.workload.requests import Requests
from tests.seeds import examples
from tests.sim.builders import (
    CATALOG,
    READ_S,
    TOKENIZE_S,
    placed,
    planned,
    poisson,
    problem,
    requests,
    service,
    whole,
)

NO_WAY = SimOptions(coordinator_s=0.0)
OWN = problem(service(apart=True))
SPEC = CATALOG.model("llama-3.1-8b").llm
KV = SPEC.layers * SPEC.kv_bytes_per_token_layer
"""Bytes of KV cache of a token."""


def read_twice_s(tokens: int) -> float:
    """Seconds to be read by both sides; the first turns the text into tokens."""
    return 2 * READ_S + tokens * TOKENIZE_S


"""vLLM asks who computes the prompt first, then who decodes."""
NODE = "A100-80:1"
ALL = (0, SPEC.layers, (NODE,))
EAST, WEST = "us-east-1", "us-west-2"


def prompt_s(tokens: int, start: int = 0, end: int = SPEC.layers, node: str = NODE) -> float:
    return float(
        step_seconds(analytic(SPEC, CATALOG.node(node)), Batch.prefill(tokens), start, end)
    )


def run_links(
    plan: Plan, own: Problem, work: Requests, options: SimOptions
) -> tuple[dict[str, float], Any]:
    """Run to the end; return the bytes each link carried, and the arrays of the run."""
    built = build(plan, own, CATALOG, work, options)
    while not run(table_of(built.sim), 100_000):
        pass
    names = link_names(built.sites, [one.instance for one in built.history.standing])
    return dict(zip(names, built.sim.link["bytes"].tolist(), strict=True)), built.sim


def test_the_first_token_comes_when_the_cache_has_arrived() -> None:
    link = CATALOG.links.between("here", "here", NODE, NODE)
    model = analytic(SPEC, CATALOG.node(NODE))
    later = sum(step_seconds(model, Batch.decode(1, 800 + k), 0, SPEC.layers) for k in range(1, 12))

    found = simulate(whole(OWN), OWN, CATALOG, requests([0.0], 800, 12), NO_WAY)

    first = read_twice_s(800) + prompt_s(800) + link.time_s(800 * KV)
    assert found.requests.ttft_s[0] == pytest.approx(first, abs=1e-5)
    assert found.requests.e2e_s[0] == pytest.approx(first + later, abs=1e-5)
    # The move is part of the time to the first token, not of the time between tokens.
    assert found.requests.tpot_s[0] == pytest.approx(later / 11, abs=1e-6)


def test_layers_with_a_window_move_no_more_than_it() -> None:
    own = problem(service(model="gpt-oss-20b", apart=True), nodes=("H100:1",))
    spec = CATALOG.model("gpt-oss-20b").llm
    windows = [kind.window for kind in layer_kinds(spec)]
    assert None in windows
    assert any(windows)
    kept = sum(3000 if window is None else min(3000, window) for window in windows)
    model = analytic(spec, CATALOG.node("H100:1"))
    prompt = step_seconds(model, Batch.prefill(3000), 0, spec.layers)
    link = CATALOG.links.between("here", "here", "H100:1", "H100:1")

    found = simulate(whole(own, node="H100:1"), own, CATALOG, requests([0.0], 3000, 2), NO_WAY)

    move = link.time_s(kept * spec.kv_bytes_per_token_layer)
    assert found.requests.ttft_s[0] == pytest.approx(read_twice_s(3000) + prompt + move, abs=2e-5)


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "deepseek-v3"])
def test_states_and_latents_move_as_planned(model: str) -> None:
    own = problem(service(model=model, apart=True), nodes=("B200:8",))
    spec = CATALOG.model(model).llm
    step = analytic(spec, CATALOG.node("B200:8"))
    prompt = step_seconds(step, Batch.prefill(500), 0, spec.layers)
    link = CATALOG.links.between("here", "here", "B200:8", "B200:8")

    found = simulate(whole(own, node="B200:8"), own, CATALOG, requests([0.0], 500, 2), NO_WAY)

    moved = kv_bytes(spec, 0, spec.layers, 500.0)
    assert moved > 500 * spec.kv_bytes_per_token or spec.delta is None
    expected = read_twice_s(500) + prompt + link.time_s(moved)
    assert found.requests.ttft_s[0] == pytest.approx(expected, abs=1e-5)


FLEET = """\
services:
  chat: {model: llama-3.1-8b, ttft: 3s, tpot: 60ms, rate: 1/s, lengths: 1024x128, phases: apart}
pool:
  offers:
    - {region: here, node_type: L4:1, available: 8, usd_per_hour: 0.7}
    - {region: here, node_type: L40S:1, available: 2, usd_per_hour: 1.9}
settings: {engines: [vllm]}
"""


@pytest.mark.parametrize("tokens", [200, 3000])
def test_pairs_planned_on_vllm_move_what_and_where_was_planned(tokens: int) -> None:
    own = parse_fleet(FLEET)
    plan = solve(own)
    assert {one.engine for one in plan.instances} == {"vllm"}
    by_id = {one.id: one for one in plan.instances}
    (way, *others) = [[by_id[name] for name in route.instances] for route in plan.routes]
    assert [one.phase for one in way] == [Phase.PREFILL, Phase.DECODE]
    times = {transfer_s(CATALOG, own.services[0], *pair, tokens=float(tokens)) for pair in others}
    planned_s = transfer_s(CATALOG, own.services[0], way[0], way[1], tokens=float(tokens))
    assert times <= {planned_s}

    def first_s(answer: int) -> float:
        found = simulate(plan, own, CATALOG, requests([0.0], tokens, answer), NO_WAY)
        return float(found.requests.ttft_s[0])

    # An answer of one token needs no move: what the others wait longer is the move, and who decodes.
    assert first_s(2) - first_s(1) - READ_S == pytest.approx(planned_s, rel=1e-3)
    carried, _ = run_links(plan, own, requests([0.0], tokens, 2), NO_WAY)
    assert sum(carried.values()) >= kv_bytes(SPEC, 0, SPEC.layers, float(tokens))


def test_an_answer_of_one_token_needs_no_move() -> None:
    found = simulate(whole(OWN), OWN, CATALOG, requests([0.0], 800, 1), NO_WAY)
    assert found.requests.ttft_s[0] == pytest.approx(
        READ_S + 800 * TOKENIZE_S + prompt_s(800), abs=1e-5
    )


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_a_slice_has_its_share_of_the_interface(gpus: int) -> None:
    kind = "L40S:8"
    layout = (0, SPEC.layers, (kind,))
    instances = [
        placed(OWN, name, phase, layout, gpus=gpus, tp=1)
        for name, phase in (("p", Phase.PREFILL), ("d", Phase.DECODE))
    ]
    plan = planned(OWN, instances, {("p", "d"): 1.0})
    link = CATALOG.links.between("here", "here", kind, kind)

    found = simulate(plan, OWN, CATALOG, requests([0.0], 800, 2), NO_WAY)

    share = link.bandwidth_bytes_per_s * gpus / 8
    expected = read_twice_s(800) + prompt_s(800, node="L40S:1") + link.latency_s + 800 * KV / share
    assert found.requests.ttft_s[0] == pytest.approx(expected, abs=1e-5)


def test_every_node_moves_its_own_layers() -> None:
    cut = [(0, 20, (NODE,)), (20, SPEC.layers, (NODE,))]
    link = CATALOG.links.between("here", "here", NODE, NODE)
    staged = planned(
        OWN,
        [placed(OWN, "p", Phase.PREFILL, *cut), placed(OWN, "d", Phase.DECODE, *cut)],
        {("p", "d"): 1.0},
    )
    into_one = planned(
        OWN,
        [placed(OWN, "p", Phase.PREFILL, *cut), placed(OWN, "d", Phase.DECODE, ALL)],
        {("p", "d"): 1.0},
    )
    prompt = read_twice_s(800) + prompt_s(800, 0, 20) + prompt_s(800, 20, SPEC.layers)
    prompt += link.time_s(800 * (SPEC.hidden * 2.0 + 4.0))
    work = requests([0.0], 800, 2)

    # Side by side, 20 of 32 layers take longest; into one node, all go through its interface.
    for plan, layers in ((staged, 20), (into_one, SPEC.layers)):
        found = simulate(plan, OWN, CATALOG, work, NO_WAY)
        move = link.time_s(800 * KV * layers / SPEC.layers)
        assert found.requests.ttft_s[0] == pytest.approx(prompt + move, abs=1e-5)


@examples(13)
@given(
    tokens=st.integers(1, 4000),
    marks=st.tuples(st.integers(1, SPEC.layers), st.integers(1, SPEC.layers)),
    kinds=st.tuples(*[st.sampled_from(["A100-80:1", "L40S:8", "H100:8"])] * 4),
    gpus=st.sampled_from([None, 1]),
    far=st.booleans(),
)
def test_an_idle_move_takes_what_planners_count_it_with(
    tokens: int,
    marks: tuple[int, int],
    kinds: tuple[str, str, str, str],
    gpus: int | None,
    far: bool,
) -> None:
    sides: list[Instance] = []
    for at, (name, phase, region) in enumerate(
        (("p", Phase.PREFILL, EAST), ("d", Phase.DECODE, WEST if far else EAST))
    ):
        cut = [(0, marks[at]), (marks[at], SPEC.layers)]
        stages = [
            (*held, (kind,))
            for held, kind in zip(cut, kinds[2 * at : 2 * at + 2], strict=True)
            if held[0] < held[1]
        ]
        sides.append(placed(OWN, name, phase, *stages, region=region, tp=1, gpus=gpus))
    plan = planned(OWN, sides, {("p", "d"): 1.0})
    built = build(plan, OWN, CATALOG, requests([0.0], tokens, 2), NO_WAY)
    sent_s = 0.0
    while not run(table_of(built.sim), 1) and np.isnan(built.sim.request["first_s"][0]):
        # The last event before the cache is there is the one that sent it.
        sent_s = float(built.sim.run["clock_s"][0])
    took = float(built.sim.request["first_s"][0]) - sent_s
    counted = transfer_s(CATALOG, OWN.services[0], *sides, tokens=float(tokens))
    assert took == pytest.approx(READ_S + counted, rel=1e-9)


def test_caches_for_one_node_take_turns_at_its_interface() -> None:
    plan = planned(
        OWN,
        [
            placed(OWN, "p0", Phase.PREFILL, ALL),
            placed(OWN, "p1", Phase.PREFILL, ALL),
            placed(OWN, "d", Phase.DECODE, ALL),
        ],
        {("p0", "d"): 0.5, ("p1", "d"): 0.5},
    )
    link = CATALOG.links.between("here", "here", NODE, NODE)
    move = 800 * KV / link.bandwidth_bytes_per_s
    found = simulate(plan, OWN, CATALOG, requests([0.0, 0.0], 800, 2), NO_WAY)
    first = read_twice_s(800) + prompt_s(800) + link.latency_s
    assert sorted(found.requests.ttft_s) == pytest.approx(
        [first + move, first + 2 * move], abs=2e-5
    )


def test_a_planned_pair_across_regions_shares_their_link() -> None:
    instances = [
        *(placed(OWN, f"p{k}", Phase.PREFILL, ALL, region=EAST) for k in range(2)),
        *(placed(OWN, f"d{k}", Phase.DECODE, ALL, region=WEST) for k in range(2)),
    ]
    plan = planned(OWN, instances, {("p0", "d0"): 0.5, ("p1", "d1"): 0.5})
    link = CATALOG.links.between(EAST, WEST)
    move = 100 * KV / link.bandwidth_bytes_per_s
    found = simulate(plan, OWN, CATALOG, requests([0.0, 0.0], 100, 2), NO_WAY)
    first = read_twice_s(100) + prompt_s(100) + link.latency_s
    # Nodes of their own on both sides, and one link between the coasts.
    assert sorted(found.requests.ttft_s) == pytest.approx(
        [first + move, first + 2 * move], abs=2e-5
    )


def two_coasts(share: float = 0.5) -> Plan:
    """A pair in each of two regions, and a second decode instance in the east."""
    instances = [
        placed(OWN, f"{kind}-{region}", phase, ALL, region=region)
        for region in (EAST, WEST)
        for kind, phase in (("p", Phase.PREFILL), ("d", Phase.DECODE))
    ]
    instances.append(placed(OWN, "d2", Phase.DECODE, ALL, region=EAST))
    return planned(
        OWN,
        instances,
        {
            (f"p-{EAST}", f"d-{EAST}"): share / 2,
            (f"p-{EAST}", "d2"): share / 2,
            (f"p-{WEST}", f"d-{WEST}"): 1 - share,
        },
    )


@examples(10)
@given(
    share=st.floats(0.1, 0.9),
    seed=st.integers(0, 99),
    rate=st.floats(0.5, 15.0),
    victims=st.sets(st.sampled_from([f"p-{EAST}", f"d-{EAST}", f"d-{WEST}", "d2"]), max_size=3),
)
def test_caches_never_leave_their_region(
    share: float, seed: int, rate: float, victims: set[str]
) -> None:
    failures = tuple(Failure(5.0, instance=name, back_s=60.0) for name in sorted(victims))
    options = SimOptions(seed=seed, failures=failures)
    work = poisson(120, rate, seed)
    moved, sim = run_links(two_coasts(share), OWN, work, options)
    assert int(sim.run["finished"][0]) == 120
    assert moved[f"{EAST} -> {WEST}"] == moved[f"{WEST} -> {EAST}"] == 0.0
    assert sum(moved[f"-> {name}/n0"] for name in (f"d-{EAST}", f"d-{WEST}", "d2")) > 0.0


def test_a_region_that_is_full_does_not_hold_up_another() -> None:
    def crowd(count: int) -> Requests:
        return Requests.of(
            np.zeros(count), np.full(count, 2000, np.int32), np.full(count, 400, np.int32)
        )

    def pair(region: str, decode: str) -> list[Instance]:
        kinds = ((f"p-{region}", Phase.PREFILL, "H100:1"), (f"d-{region}", Phase.DECODE, decode))
        return [
            placed(OWN, name, phase, (0, SPEC.layers, (kind,)), region=region)
            for name, phase, kind in kinds
        ]

    # The decode side of the first region has little room, and its requests wait in front.
    small, large = pair(EAST, "L4:1"), pair(WEST, "H100:1")
    ways = {tuple(one.id for one in some): 0.5 for some in (small, large)}
    found = simulate(planned(OWN, [*small, *large], ways), OWN, CATALOG, crowd(300), NO_WAY)
    alone = planned(OWN, large, {tuple(one.id for one in large): 1.0})
    lone = simulate(alone, OWN, CATALOG, crowd(150), NO_WAY)
    assert found.finished == 300
    done = np.sort(found.requests.e2e_s)
    assert done[149] == pytest.approx(float(lone.requests.e2e_s.max()), rel=0.01)
    assert done[-1] > 2 * done[149]


WAYS = [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1"), ("b0",), ("b1",)]
MIXED = problem(service().model_copy(update={"phases": "auto"}))


def mixed(shares: dict[tuple[str, ...], float]) -> Plan:
    phases = {"p": Phase.PREFILL, "d": Phase.DECODE, "b": Phase.BOTH}
    names = sorted({name for way in shares for name in way})
    return planned(MIXED, [placed(MIXED, name, phases[name[0]], ALL) for name in names], shares)


@examples(10)
@given(
    parts=st.dictionaries(st.sampled_from(WAYS), st.integers(1, 9), min_size=1),
    seed=st.integers(0, 99),
)
def test_every_instance_gets_the_share_of_requests_that_the_plan_says(
    parts: dict[tuple[str, ...], int], seed: int
) -> None:
    total = sum(parts.values())
    plan = mixed({way: part / total for way, part in parts.items()})
    count = 400
    prompt, answer = 300, 20
    work = requests(np.cumsum(np.full(count, 0.2)).tolist(), prompt, answer)
    found = simulate(plan, MIXED, CATALOG, work, SimOptions(seed=seed))
    assert found.finished == count
    for node in found.nodes:
        share = plan.weights("m", Phase(node.phase))[node.instance]
        tokens = node.decode_tokens / (answer - 1)
        if node.phase != Phase.DECODE:
            tokens = node.prompt_tokens / prompt
        # Two decisions, each within a request of its share at every vertex.
        assert tokens == pytest.approx(share * count, abs=2 + len(parts))


def test_a_plan_with_other_pairs_takes_over_and_loses_nothing() -> None:
    before = mixed({("p0", "d0"): 0.5, ("b0",): 0.5})
    after = mixed({("p1", "d1"): 0.7, ("b1",): 0.3})
    renamed = after.model_copy(
        update={
            "instances": tuple(
                i.model_copy(update={"nodes": tuple(_moved(n) for n in i.nodes)})
                for i in after.instances
            )
        }
    )
    work = poisson(400, 8.0, prompt=1500, answer=100)
    options = SimOptions(epochs=(Epoch(10.0, renamed), Epoch(30.0, before)), startup_s=5.0)
    found = simulate(before, MIXED, CATALOG, work, options)
    assert found.finished == 400
    by_name = {one.instance: one for one in found.instances if one.rented_s == 10.0}
    assert set(by_name) == {"p1", "d1", "b1"}
    assert all(one.tokens > 0 for name, one in by_name.items() if name != "p1")
    gone = [one for one in found.instances if one.gone_s is not None]
    assert {one.instance for one in gone} == {"p0", "d0", "b0", "p1", "d1", "b1"}
    # Prompts under way when their instance goes are decoded by those who stay.
    assert found.retries == 0


def _moved(node: Node) -> Node:
    """The node on another kind of machine, so that no plan keeps it."""
    return node.model_copy(update={"node_type": "H100:1"})


def test_prompts_whose_only_partner_dies_start_over_elsewhere() -> None:
    plan = two_coasts()
    failures = (
        Failure(5.0, instance=f"d-{EAST}"),
        Failure(5.0, instance="d2"),
    )
    found = simulate(plan, OWN, CATALOG, poisson(200, 8.0), SimOptions(failures=failures))
    assert found.finished == 200
    assert found.retries > 0
    west = {one.instance: one for one in found.instances}[f"d-{WEST}"]
    assert west.tokens > 0


def test_without_anyone_to_decode_requests_wait_for_them() -> None:
    plan = whole(OWN)
    failure = Failure(1.0, instance="m-decode-0", back_s=50.0)
    found = simulate(
        plan, OWN, CATALOG, requests([0.9, 2.0], 500, 100), SimOptions(failures=(failure,))
    )
    assert found.finished == 2
    assert found.dropped == 0
    assert np.all(found.requests.e2e_s > 45.0)


def cluster(*links: ClusterLink) -> tuple[Problem, Plan]:
    """A machine of eight that computes prompts with half of itself and decodes with the other."""
    node = ClusterNode(name="box", node_type="L40S:8", region="here")
    own = Problem(name="box", services=OWN.services, cluster=Cluster(nodes=(node,), links=links))
    halves: list[Instance] = []
    for name, phase, ids in (("p", Phase.PREFILL, range(4)), ("d", Phase.DECODE, range(4, 8))):
        made = placed(own, name, phase, (0, SPEC.layers, ("L40S:8",)), gpus=4, tp=1)
        cut = made.nodes[0].model_copy(
            update={"gpu_ids": tuple(ids), "host": "box", "market": "owned", "slot": None}
        )
        halves.append(made.model_copy(update={"nodes": (cut,)}))
    return own, planned(own, halves, {("p", "d"): 1.0})


def test_slices_of_one_machine_of_a_cluster_talk_over_their_share() -> None:
    own, plan = cluster(ClusterLink(src="*", dst="*", bytes_per_s=8e9, latency_s=0.0))
    found = simulate(plan, own, CATALOG, requests([0.0], 800, 2))
    expected = read_twice_s(800) + prompt_s(800, node="L40S:1") + 800 * KV / 4e9
    assert found.requests.ttft_s[0] == pytest.approx(expected, abs=1e-5)

    rules = [("source", "*"), ("*", "sink")]
    own, plan = cluster(
        *(ClusterLink(src=a, dst=b, bytes_per_s=8e9, one_way=True) for a, b in rules)
    )
    found = simulate(plan, own, CATALOG, requests([0.0], 800, 2))
    nic = CATALOG.links.between("here", "here", "L40S:8", "L40S:8")
    expected = read_twice_s(800) + prompt_s(800, node="L40S:1") + nic.latency_s
    expected += 800 * KV / (nic.bandwidth_bytes_per_s / 2)
    assert found.requests.ttft_s[0] == pytest.approx(expected, abs=1e-5)


def test_a_pair_that_no_link_of_the_cluster_joins_is_refused() -> None:
    nodes = tuple(ClusterNode(name=n, node_type=NODE, region="here") for n in ("one", "two"))
    links = tuple(
        ClusterLink(src=a, dst=b, bytes_per_s=1e9, one_way=True)
        for a, b in (("source", "*"), ("*", "sink"))
    )
    own = Problem(name="c", services=OWN.services, cluster=Cluster(nodes=nodes, links=links))
    instances = []
    for name, phase, host in (("p", Phase.PREFILL, "one"), ("d", Phase.DECODE, "two")):
        made = placed(own, name, phase, ALL)
        there = made.nodes[0].model_copy(update={"host": host, "market": "owned"})
        instances.append(made.model_copy(update={"nodes": (there,)}))
    plan = planned(own, instances, {("p", "d"): 1.0})
    with pytest.raises(InputError, match="from one to two, which no link joins"):
        simulate(plan, own, CATALOG, requests([0.0], 10, 2))


def test_an_instance_that_only_decodes_takes_requests_as_it_has_room() -> None:
    # Far more requests at once than their KV cache has room for, in a pipeline.
    own = problem(service(apart=True), nodes=("A10G:1",))
    layers = SPEC.layers
    pair = placed(
        own, "d", Phase.DECODE, (0, layers // 2, ("A10G:1",)), (layers // 2, layers, ("A10G:1",))
    )
    plan = planned(own, [pair], {("d",): 1.0})

    found = simulate(plan, own, CATALOG, requests([0.0] * 200, 2000, 40), SimOptions(until_s=1e5))

    assert found.finished == 200
    assert found.dropped == 0
