"""Every layout gives, token for token, what transformers gives on the whole model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra 'engine'")

from atoll.core.request_parameters import SamplingParams
from atoll.engine.batcher import MaxInFlight
from atoll.engine.engine_messages import Hop, PipelineRoute
from atoll.engine.model_stage import StageModel
from atoll.engine.node_core import CoreSettings
from atoll.engine.pipeline_routes import RouteQuery
from atoll.engine.scheduler_core import GenerateRequest, SchedulerSettings
from atoll.engine.weights.matrix_reader import AtLoad
from atoll.engines.limits import Scheduling
from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.models import ARCHITECTURES, LAYERS, VOCABULARY
from tests.engine.split_router import SplitRouter
from tests.seeds import examples, slow_except

pytestmark = pytest.mark.engine

CUTS = st.sampled_from(
    [
        ((0, 4),),
        ((0, 1), (1, 4)),
        ((0, 3), (3, 4)),
        ((0, 1), (1, 3), (3, 4)),
        ((0, 2), (0, 2), (2, 4)),
        ((0, 1), (1, 4), (1, 4)),
        ((0, 3), (1, 4), (0, 4)),
        ((0, 2), (1, 3), (2, 4), (0, 4)),
    ]
)
POOL = random.Random(5)
SHARED = [POOL.randrange(3, VOCABULARY) for _ in range(12)]
PROMPTS = [SHARED[: POOL.randrange(4, 13)] for _ in range(4)] + [
    SHARED[: POOL.randrange(0, 13)]
    + [POOL.randrange(3, VOCABULARY) for _ in range(POOL.randrange(1, 20))]
    for _ in range(8)
]


class Wanderer:
    """Takes any valid route at random, leaving and entering nodes in the middle of their ranges."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, query: RouteQuery) -> PipelineRoute | None:
        hops: list[Hop] = []
        at = 0
        while at < LAYERS:
            holders = [n for n in query.nodes if n.start <= at < n.end]
            if not holders:
                return None
            node = self._random.choice(holders)
            end = self._random.randint(at + 1, node.end)
            hops.append(node.hop(at, end))
            at = end
        return PipelineRoute(prefill=tuple(hops))


def check(cluster: Cluster, asked: dict[str, tuple[list[int], int]], model: Any) -> None:
    cluster.run()
    cluster.settle()
    for name, (prompt, count) in asked.items():
        events = cluster.events[name]
        assert events[-1].error is None
        assert cluster.tokens(name) == model.answer(prompt, count)
        assert [e.index for e in events] == list(range(count))
        assert events[-1].finish_reason == "length"


def ask(cluster: Cluster, requests: list[tuple[int, int, int]]) -> dict[str, tuple[list[int], int]]:
    """Submit (prompt number, tokens, steps to wait after) and return what was asked."""
    asked = {}
    for number, (prompt, count, wait) in enumerate(requests):
        name = f"r{number}"
        asked[name] = (PROMPTS[prompt], count)
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        cluster.submit(GenerateRequest(tuple(PROMPTS[prompt]), sampling, id=name))
        for _ in range(wait):
            cluster.step()
    return asked


REQUESTS = st.lists(
    st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 12), st.integers(0, 25)),
    min_size=1,
    max_size=6,
)


@examples(20)
@given(
    cuts=CUTS,
    requests=REQUESTS,
    seed=st.integers(0, 10_000),
    chunk=st.integers(1, 16),
    budget=st.integers(1, 32),
    in_flight=st.sampled_from(("auto", "free", 1, 2, 3)),
    blocks=st.sampled_from((12, 64)),
    caching=st.booleans(),
    wander=st.booleans(),
    scheduling=st.sampled_from(("sync", "async")),
)
def test_any_layout_is_exact(
    tiny: Callable[[str], Any],
    cuts: tuple[tuple[int, int], ...],
    requests: list[tuple[int, int, int]],
    seed: int,
    chunk: int,
    budget: int,
    in_flight: MaxInFlight,
    blocks: int,
    caching: bool,
    wander: bool,
    scheduling: Scheduling,
) -> None:
    model = tiny("llama")
    limits = CoreSettings(
        token_budget=budget, chunk=chunk, max_in_flight=in_flight, scheduling=scheduling
    )
    setups = [
        NodeSetup(a, b, blocks=blocks, prefix_caching=caching, settings=limits) for a, b in cuts
    ]
    router = Wanderer(seed) if wander else None
    cluster = Cluster(model.folder, LAYERS, setups, router=router, seed=seed)
    check(cluster, ask(cluster, requests), model)


@examples(8)
@given(
    sides=st.tuples(CUTS, CUTS),
    requests=REQUESTS,
    seed=st.integers(0, 10_000),
    chunk=st.integers(2, 16),
    scheduling=st.sampled_from(("sync", "async")),
)
def test_prompts_and_answers_on_different_nodes_are_exact(
    tiny: Callable[[str], Any],
    sides: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]],
    requests: list[tuple[int, int, int]],
    seed: int,
    chunk: int,
    scheduling: Scheduling,
) -> None:
    model = tiny("llama")
    limits = CoreSettings(token_budget=24, chunk=chunk, scheduling=scheduling)
    setups = [NodeSetup(a, b, settings=limits) for side in sides for a, b in side]
    names = [f"n{i}" for i in range(len(setups))]
    router = SplitRouter(LAYERS, names[: len(sides[0])], names[len(sides[0]) :])
    cluster = Cluster(model.folder, LAYERS, setups, router=router, seed=seed)
    check(cluster, ask(cluster, requests), model)


@pytest.mark.parametrize(
    "architecture", slow_except(("gemma3", "qwen3-moe", "gpt-oss"), ARCHITECTURES)
)
def test_every_architecture_is_exact(tiny: Callable[[str], Any], architecture: str) -> None:
    model = tiny(architecture)
    setups = [NodeSetup(0, 1), NodeSetup(1, 4), NodeSetup(1, 4)]
    cluster = Cluster(model.folder, LAYERS, setups, seed=3)
    asked = ask(cluster, [(4, 12, 9), (7, 10, 0), (9, 12, 3), (4, 8, 0)])
    assert len(set(model.answer(PROMPTS[9], 12))) > 2, "an answer of one token proves little"
    check(cluster, asked, model)


@pytest.mark.parametrize(
    ("architecture", "quantization", "fused"),
    [
        ("llama", None, True),
        ("mixtral", None, True),
        ("qwen3-moe", None, True),
        ("qwen3-moe-mixed", None, True),
        ("qwen3", "fp8", True),
        # Experts in 8 bits, and other experts, run as transformers' do.
        ("qwen3-moe", "fp8", False),
        ("mixtral", "fp8", False),
        ("gpt-oss", None, False),
        ("gemma3", None, False),
    ],
)
def test_layers_of_the_plain_shape_are_fused(
    tiny: Callable[[str], Any], architecture: str, quantization: AtLoad | None, fused: bool
) -> None:
    stage = StageModel(tiny(architecture).folder, 0, LAYERS, blocks=1, quantization=quantization)
    assert (stage.fused is not None) is fused


def test_prefixes_are_reused_on_every_stage(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 1), NodeSetup(1, 4)])
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    for name in ("first", "second"):
        prompt = PROMPTS[9]
        cluster.submit(GenerateRequest(tuple(prompt), sampling, id=name))
        check(cluster, {name: (prompt, 6)}, model)
    for core in cluster.nodes.values():
        assert core.pool.hits == (len(PROMPTS[9]) - 1) // 4


def test_too_little_room_costs_time_and_not_tokens(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    setups = [NodeSetup(0, 2, blocks=9), NodeSetup(2, 4, blocks=10)]
    # Full to the brim: the scheduler lets in what the nodes must then throw out again.
    settings_ = SchedulerSettings(kv_fill=2.0, dead_after_s=1.0, heartbeat_s=0.1, stall_s=1e9)
    cluster = Cluster(model.folder, LAYERS, setups, settings=settings_, seed=2)
    check(cluster, ask(cluster, [(5, 12, 0), (6, 12, 0), (7, 12, 0), (8, 12, 0)]), model)
    assert sum(core.preemptions for core in cluster.nodes.values()) > 0


def test_a_request_that_can_never_fit_fails_with_a_reason(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 4, blocks=3)])
    cluster.submit(GenerateRequest(tuple(range(3, 40)), SamplingParams(), id="long"))
    cluster.submit(GenerateRequest((5, 6), SamplingParams(max_tokens=30), id="grows"))
    cluster.run()
    assert cluster.events["long"][-1].finish_reason == "error"
    assert "KV blocks" in str(cluster.events["long"][-1].error)
    assert cluster.events["grows"][-1].finish_reason == "error"
    cluster.settle()


def test_cancelling_frees_everything_at_once(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 1), NodeSetup(1, 4)])
    ask(cluster, [(9, 12, 40)])
    assert any(core.pool.used for core in cluster.nodes.values())
    cluster.scheduler.cancel("r0")
    assert cluster.events["r0"][-1].finish_reason == "cancelled"
    cluster.settle()


def test_the_answer_stops_at_an_end_token(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    answer = model.answer(PROMPTS[9], 12)
    end = answer[5]
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 2), NodeSetup(2, 4)], eos=(end,))
    request = GenerateRequest(tuple(PROMPTS[9]), SamplingParams(max_tokens=12), id="r")
    cluster.submit(request)
    cluster.run()
    assert cluster.tokens("r") == answer[: answer.index(end) + 1]
    assert cluster.events["r"][-1].finish_reason == "stop"
    cluster.settle()


def test_a_token_that_is_none_harms_only_its_own_request(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 2), NodeSetup(2, 4)])
    cluster.submit(GenerateRequest((5, VOCABULARY), SamplingParams(), id="bad"))
    asked = ask(cluster, [(4, 6, 0)])
    cluster.run()
    assert "vocabulary" in str(cluster.events.pop("bad")[-1].error)
    check(cluster, asked, model)
