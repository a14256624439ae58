"""A launch becomes a command, and the command is read back as that launch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.engines.engine import (
    Engine,
    EngineLayout,
    ServedModel,
    ServerCommand,
    ServerHost,
    Standing,
)
from atoll.engines.limits import MIXED_TOKENS, EngineLaunch, Handover
from atoll.engines.llamacpp import ENGINE as LLAMACPP
from atoll.engines.sglang import ENGINE as SGLANG
from atoll.engines.stage import ENGINE as STAGE
from atoll.engines.vllm import ENGINE as VLLM
from atoll.engines.vllm import KV_KEPT_S

SERVERS = (VLLM, SGLANG)
PARSERS = ("hermes", "llama3_json", "openai", "qwen3_coder")
_NOT_ITS_OWN = {"vllm": ("prompt_interval", "mixed_chunk"), "sglang": ("mxfp8",)}
"""Limits that an engine has no option for, and that its profile does not count."""


@st.composite
def launches(draw: st.DrawFn) -> EngineLaunch:
    """Launches with any of the fields set."""
    sequences = draw(st.none() | st.integers(1, 4096))
    tokens = draw(st.none() | st.integers(max(16, sequences or 0), 1 << 20))
    return EngineLaunch(
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        gpu_memory_utilization=draw(st.none() | st.floats(0.05, 1.0)),
        prefix_caching=draw(st.none() | st.booleans()),
        scheduling=draw(st.sampled_from([None, "sync", "async"])),
        kv_cache_dtype=draw(st.sampled_from([None, "fp8", "bf16"])),
        max_model_len=draw(st.none() | st.integers(1, 1 << 20)),
        dtype=draw(st.sampled_from([None, "fp16", "bf16"])),
        quantization=draw(st.sampled_from([None, "fp8"])),
        prompt_interval=draw(st.none() | st.integers(1, 1000)),
        mixed_chunk=draw(st.sampled_from([None, True])),
        mxfp8=draw(st.sampled_from([None, True])),
        load_format=draw(st.sampled_from([None, "runai_streamer"])),
        tool_parser=draw(st.sampled_from([None, *PARSERS])),
        reasoning_parser=draw(st.sampled_from([None, "qwen3", "openai_gptoss"])),
        promised_ttft_s=draw(st.none() | st.floats(0.01, 10.0)),
        handover=draw(st.sampled_from([None, "prefill", "decode"])),
    )


@st.composite
def layouts(draw: st.DrawFn) -> EngineLayout:
    """Rows of equal nodes: pipelines have one copy."""
    layers = tuple(draw(st.lists(st.integers(1, 60), min_size=1, max_size=4)))
    copies = draw(st.sampled_from([1, 2, 4])) if len(layers) == 1 else 1
    return EngineLayout("one", len(layers), draw(st.sampled_from([1, 2, 8])), copies, layers)


@pytest.mark.parametrize("engine", SERVERS, ids=lambda engine: engine.name)
@given(launch=launches(), layout=layouts())
def test_a_command_is_read_back_as_what_was_planned(
    engine: Engine, launch: EngineLaunch, layout: EngineLayout
) -> None:
    if launch.handover is not None:
        piped = len(layout.layers) > 1
        layout = replace(layout, phase=Phase(launch.handover))
        if piped and engine is VLLM:
            launch = launch.model_copy(update={"handover": "prefill-push"})
            layout = replace(layout, phase=Phase.PREFILL)
    served = ServedModel("hf://org/model", ("chat",), launch)
    command = engine.command(layout, served, ServerHost("8000", "python3"))
    parsed = engine.parse(command)
    assert parsed.served.source == "org/model"
    assert parsed.served.names == ("chat",)
    assert (parsed.tp, parsed.copies, parsed.port) == (layout.tp, layout.copies, "8000")
    if engine is VLLM:
        assert parsed.layers == (layout.layers if len(layout.layers) > 1 else ())
    settled = engine.settle(launch)
    assert parsed.served.launch == settled
    # Nothing that is set is lost, but what no command says.
    for name, value in launch.given.items():
        if name not in ("promised_ttft_s", *_NOT_ITS_OWN[engine.name]):
            assert getattr(settled, name) == value
    # What was read starts the same server.
    again = ServedModel("org/model", ("chat",), parsed.served.launch)
    assert engine.command(layout, again, ServerHost("8000", "python3")) == command


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_ranks_of_a_pipeline_are_read_as_one_server(engine: Engine) -> None:
    layout = EngineLayout("one", 2, 2, 1, (20, 12))
    served = ServedModel("org/model", ("chat",), EngineLaunch(max_model_len=4096))
    command = engine.command(layout, served, ServerHost("8000", "python3"))
    late = {"vllm": None, "sglang": "@port2:n1"}[engine.name]
    for rank in range(2):
        ranked = engine.rank_command(command, rank, ("n0", "n1"))
        assert f"@host:n{rank}" in ranked.environment.values()
        parsed = engine.parse(ranked)
        assert parsed.tp == 2
        assert parsed.layers == (20, 12)
        assert parsed.served.names == ("chat",)
        assert parsed.served.launch == engine.settle(EngineLaunch(max_model_len=4096))
        assert parsed.port == (late if rank else "8000")
    spread = ServerCommand((*command.arguments, *engine.ray_options), command.environment)
    assert engine.parse(spread) == engine.parse(command)


TOLD = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefix_caching")
"""Fields of a launch that llama.cpp has options for, beside the format of the KV cache."""


@given(
    launch=launches(),
    tp=st.sampled_from([1, 2, 4]),
    source=st.sampled_from(["org/name-GGUF:Q4_K_M", "name.gguf"]),
    threads=st.none() | st.integers(1, 64),
)
def test_llamacpp_is_read_back_as_what_was_planned(
    launch: EngineLaunch, tp: int, source: str, threads: int | None
) -> None:
    layout, host = EngineLayout("one", 1, tp, 1, (30,)), ServerHost("8000", "python3", threads)
    if launch.kv_cache_dtype == "fp8":
        with pytest.raises(InputError, match="no KV cache in fp8"):
            LLAMACPP.command(layout, ServedModel(source, ("chat",), launch), host)
        launch = launch.model_copy(update={"kv_cache_dtype": "fp16"})
    command = LLAMACPP.command(layout, ServedModel(f"hf://{source}", ("chat",), launch), host)
    parsed, settled = LLAMACPP.parse(command), LLAMACPP.settle(launch)
    assert (parsed.tp, parsed.copies, parsed.port) == (tp, 1, "8000")
    assert parsed.served == ServedModel(source, ("chat",), settled)
    for name in (*TOLD, "kv_cache_dtype"):
        assert getattr(launch, name) in (None, getattr(settled, name))
    # A slot has room for the longest request.
    words = command.arguments
    slots, tokens = (int(words[words.index(o) + 1]) for o in ("--parallel", "--ctx-size"))
    assert settled.max_model_len is not None
    assert slots * settled.max_model_len == tokens
    again = LLAMACPP.command(layout, parsed.served, host)
    assert again == command


def test_llamacpp_says_what_it_is_not_told() -> None:
    launch = EngineLaunch(max_model_len=8192, max_num_seqs=3, scheduling="async", dtype="fp16")
    assert LLAMACPP.list_unkept(launch, "") == ("scheduling async", "dtype fp16")
    settled = LLAMACPP.settle(EngineLaunch())
    assert (settled.max_num_seqs, settled.max_model_len) == (4, 2048)


@pytest.mark.parametrize("engine", SERVERS, ids=lambda engine: engine.name)
def test_an_option_that_no_plan_sets_is_refused(engine: Engine) -> None:
    layout = EngineLayout("one", 1, 1, 1, (30,))
    served = ServedModel("org/model", ("chat",), EngineLaunch())
    command = engine.command(layout, served, ServerHost("8000", "python3"))
    changed = ServerCommand((*command.arguments, "--enforce-eager"), command.environment)
    with pytest.raises(InputError, match="--enforce-eager"):
        engine.parse(changed)
    with pytest.raises(InputError, match="no option"):
        engine.parse(ServerCommand((*command.arguments[:3], "word", "--x"), {}))


def test_a_parser_that_an_engine_does_not_have_is_left_out() -> None:
    launch = EngineLaunch(tool_parser="pythonic", reasoning_parser="qwen3")
    settled = SGLANG.settle(launch)
    assert settled.tool_parser is None
    assert settled.reasoning_parser == "qwen3"


@pytest.mark.parametrize(
    ("phase", "way", "connector", "role"),
    [
        (Phase.PREFILL, "prefill", "NixlConnector", "kv_producer"),
        (Phase.DECODE, "decode", "NixlConnector", "kv_consumer"),
        (Phase.PREFILL, "prefill-push", "NixlPushConnector", "kv_producer"),
        (Phase.DECODE, "decode-push", "NixlPushConnector", "kv_consumer"),
        (Phase.DECODE, None, "NixlConnector", "kv_consumer"),
    ],
)
def test_vllm_is_told_how_kv_cache_travels_and_when_it_is_let_go(
    phase: Phase, way: Handover | None, connector: str, role: str
) -> None:
    layout = EngineLayout("one", 1, 2, 1, (32,), phase=phase)
    served = ServedModel("org/model", ("chat",), EngineLaunch(handover=way))
    host = ServerHost("8000", "python3", address="10.0.0.7", handover_port="5717")
    command = VLLM.command(layout, served, host)
    said = json.loads(command.arguments[command.arguments.index("--kv-transfer-config") + 1])
    assert (said["kv_connector"], said["kv_role"]) == (connector, role)
    assert said["kv_load_failure_policy"] == "recompute"
    assert said["kv_connector_extra_config"] == {"kv_lease_duration": KV_KEPT_S}
    assert command.environment == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5717",
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": str(KV_KEPT_S),
    }
    parsed = VLLM.parse(command).served.launch
    assert parsed is not None
    assert parsed.handover == (way or str(phase))


def test_prompts_alone_are_cut_as_the_engine_likes() -> None:
    for engine in SERVERS:
        assert engine.settle(EngineLaunch(handover="prefill")).max_num_batched_tokens is None
        assert engine.settle(EngineLaunch(handover="decode")).max_num_batched_tokens == MIXED_TOKENS


def test_sglang_meets_at_the_prefill_side() -> None:
    host = ServerHost("8000", "python3", address="10.0.0.7", handover_port="5717")
    served = ServedModel("org/model", ("chat",), EngineLaunch())
    for phase, own in (
        (Phase.PREFILL, ["--disaggregation-bootstrap-port", "5717"]),
        (Phase.DECODE, []),
    ):
        words = SGLANG.command(EngineLayout("one", 1, 1, 1, (32,), phase=phase), served, host)
        said = list(words.arguments)
        assert said[said.index("--disaggregation-mode") + 1] == phase
        assert said[said.index("--host") + 1] == "0.0.0.0"
        assert said[len(said) - len(own) :] == own
        assert set(words.environment.values()) == {"60"}


@pytest.mark.parametrize(
    ("phase", "stages", "engine", "runs"),
    [
        (Phase.PREFILL, 2, VLLM, True),
        (Phase.DECODE, 2, VLLM, False),
        (Phase.DECODE, 1, VLLM, True),
        (Phase.PREFILL, 2, SGLANG, True),
        (Phase.DECODE, 2, SGLANG, False),
        (Phase.PREFILL, 1, SGLANG, True),
        (Phase.PREFILL, 1, LLAMACPP, False),
    ],
)
def test_an_engine_takes_the_cuts_that_its_connector_does(
    phase: Phase, stages: int, engine: Engine, runs: bool
) -> None:
    assert engine.runs(EngineLayout("one", stages, 1, 1, (8,) * stages, phase=phase)) is runs


@pytest.mark.parametrize(
    ("engine", "nodes", "standing"),
    [
        (VLLM, 1, Standing.TESTED),
        (VLLM, 2, Standing.WRITTEN),
        (SGLANG, 1, Standing.WRITTEN),
        (STAGE, 2, Standing.TESTED),
    ],
)
def test_pairs_stand_as_far_as_they_were_tried(
    engine: Engine, nodes: int, standing: Standing
) -> None:
    layout = EngineLayout("one", nodes, 1, 1, (8,) * nodes, phase=Phase.PREFILL)
    assert engine.standing(layout, {"ada"}) is standing


def test_a_pipeline_cannot_be_fetched_from() -> None:
    layout = EngineLayout("one", 2, 1, 1, (8, 8), phase=Phase.PREFILL)
    served = ServedModel("org/model", ("chat",), EngineLaunch(handover="prefill"))
    with pytest.raises(InputError, match="by fetching it"):
        VLLM.command(layout, served, ServerHost("8000", "python3"))
