from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.catalog import Catalog
from atoll.core.errors import UnknownNameError
from atoll.core.ids import Phase
from atoll.engines.limits import MIXED_TOKENS, EngineLimits, HostTime
from atoll.engines.profile import EAGER_LATENT_S, SERVER_REQUEST_S, EngineProfile
from atoll.engines.table import ENGINES, EngineChoice, is_asked_in_turn, profile_engine

PLANNED = sorted(name for name, engine in ENGINES.items() if engine.defaults is not None)
GPUS = [Catalog.default().gpu(name) for name in ("B200", "H200", "A100-80", "L40S", "L4", "T4")]


def test_unknown_engine() -> None:
    with pytest.raises(UnknownNameError, match="did you mean vllm") as caught:
        profile_engine("vlm")
    assert caught.value.kind == "engine"
    assert set(caught.value.known) == set(PLANNED)


def test_names_are_those_of_the_profiles() -> None:
    for name in PLANNED:
        assert profile_engine(name).name == EngineChoice(name).on(None).name == name


def test_none_is_kernel_time_alone() -> None:
    assert [profile_engine("none").host_seconds(n) for n in (1.0, 2.0, 512.0)] == [0.0, 0.0, 0.0]


def test_host_time_by_hand() -> None:
    profile = EngineProfile("x", HostTime(step_s=1e-3, sequence_s=5e-5))
    assert profile.host_seconds(1.0) == pytest.approx(1.05e-3)
    assert profile.host_seconds(100.0) == pytest.approx(6e-3)
    some = np.array([0.0, 20.0])
    assert profile.host_seconds(some) == pytest.approx([1e-3, 2e-3])


def test_host_time_of_the_stage_engine_is_what_it_showed_beside_an_h200() -> None:
    """`h200_host.csv` of the benchmarks' results: 0.26 ms for one sequence, 1.5 for 128, 2.6 for 256."""
    plain = profile_engine("atoll").of_stage()
    assert plain.host == profile_engine("atoll", limits=EngineLimits(scheduling="sync")).host
    for sequences, measured_s in ((1.0, 0.264e-3), (128.0, 1.492e-3), (256.0, 2.597e-3)):
        assert plain.host_seconds(sequences) == pytest.approx(measured_s, rel=0.3)


def test_the_stage_engine_prepares_steps_of_a_whole_model_and_not_those_of_a_stage() -> None:
    profile = profile_engine("atoll")
    assert profile.host_seconds(250.0) == pytest.approx(0.3e-3)
    assert profile.of_stage().host_seconds(250.0) == pytest.approx(2.82e-3)
    # What was measured on the machine holds for both.
    measured = HostTime(step_s=1e-3)
    own = profile_engine("atoll", limits=EngineLimits(host=measured))
    assert own.host == own.of_stage().host == measured


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_host_time_is_what_servers_show(name: str) -> None:
    """Where steps are prepared: 0.05 ms and 0.001 (SGLang: 0.026) a sequence. Otherwise about 1 and 0.05."""
    overlapped = profile_engine(name)
    assert overlapped == profile_engine(name, limits=EngineLimits(scheduling="async"))
    sequence_s = {"vllm": 1e-6, "sglang": 26e-6}[name]
    assert overlapped.host_seconds(1.0) == pytest.approx(0.05e-3 + sequence_s)
    assert overlapped.host_seconds(250.0) == pytest.approx(0.05e-3 + 250 * sequence_s)
    plain = profile_engine(name, limits=EngineLimits(scheduling="sync"))
    assert plain.host_seconds(1.0) == pytest.approx(1.05e-3)
    assert plain.host_seconds(128.0) == pytest.approx(7.4e-3)


@pytest.mark.parametrize("name", PLANNED)
def test_only_servers_prepare_steps_and_take_time_beside_them(name: str) -> None:
    server = name in ("vllm", "sglang", "atoll", "trtllm")
    for scheduling in ("async", "sync"):
        profile = profile_engine(name, limits=EngineLimits(scheduling=scheduling))
        assert profile.schedules_ahead == (server and scheduling == "async")
        assert profile.request_s == (SERVER_REQUEST_S if server else 0.0)


def test_who_decodes_is_asked_after_prefill_by_vllm_and_beside_it_by_sglang() -> None:
    for phase in Phase.PREFILL, Phase.BOTH:
        assert all(is_asked_in_turn(name, phase) for name in PLANNED)
    decode = {name: is_asked_in_turn(name, Phase.DECODE) for name in PLANNED}
    assert decode == {name: name != "sglang" for name in PLANNED}


def test_batches_of_vllm_depend_on_the_gpu() -> None:
    limits = {
        gpu.name: (p.max_sequences, p.max_tokens)
        for gpu in GPUS
        for p in [profile_engine("vllm", gpu)]
    }
    assert limits["H200"] == limits["B200"] == (1024, 8192)
    assert limits["A100-80"] == limits["L40S"] == limits["T4"] == (256, 2048)
    assert profile_engine("vllm", GPUS[0]).memory_share == 0.9
    assert profile_engine("vllm", GPUS[0]).mixed_tokens == MIXED_TOKENS


@given(
    st.sampled_from(PLANNED),
    st.sampled_from([None, *GPUS]),
    st.none() | st.integers(1, 5000),
    st.none() | st.integers(16, 50_000),
)
def test_limits_count_and_leave_a_batch_that_can_run(
    name: str, gpu: object, sequences: int | None, tokens: int | None
) -> None:
    if sequences is not None and tokens is not None and tokens < sequences:
        with pytest.raises(ValidationError, match="no room"):
            EngineLimits(max_num_seqs=sequences, max_num_batched_tokens=tokens)
        return
    limits = EngineLimits(max_num_seqs=sequences, max_num_batched_tokens=tokens)
    profile = profile_engine(name, gpu, limits)  # type: ignore[arg-type]
    assert profile.max_sequences <= profile.mixed_tokens <= profile.max_tokens
    assert sequences is None or profile.max_sequences == sequences
    if tokens is not None:
        assert profile.max_tokens == profile.mixed_tokens == tokens


def test_what_is_set_counts_and_the_rest_is_the_engines() -> None:
    own = profile_engine("vllm", GPUS[1])
    host = HostTime(step_s=2e-3)
    limits = EngineLimits(gpu_memory_utilization=0.5, prefix_caching=False, host=host)
    changed = EngineChoice("vllm", limits).on(GPUS[1])
    assert changed == EngineProfile(
        "vllm",
        host=host,
        memory_share=0.5,
        max_sequences=own.max_sequences,
        max_tokens=own.max_tokens,
        mixed_tokens=own.mixed_tokens,
        prefix_caching=False,
        launch=own.launch,
        fuses_all_reduce=True,
        schedules_ahead=True,
        request_s=SERVER_REQUEST_S,
        stream_s=0.15e-3,
        tokenize_s=3e-6,
        admits_by_prompts=True,
    )
    assert limits.given == {
        "gpu_memory_utilization": 0.5,
        "prefix_caching": False,
        "host": {"step_s": 2e-3, "sequence_s": 0.0},
    }


@pytest.mark.parametrize(
    ("name", "before", "since"),
    [("vllm", "0.12", "0.14"), ("sglang", "0.3", "0.5.9"), ("trtllm", "0.21", "1.2.0")],
)
def test_versions_schedule_as_they_do_unless_told(name: str, before: str, since: str) -> None:
    new, old = profile_engine(name), profile_engine(f"{name}@{before}")
    assert replace(profile_engine(f"{name}@{since}"), version=None) == new
    assert old == profile_engine(name, limits=EngineLimits(version=before))
    # What else versions change stays as it was.
    sync = profile_engine(name, limits=EngineLimits(scheduling="sync"))
    assert replace(old, version=None, fuses_widely=new.fuses_widely) == sync
    told = profile_engine(name, limits=EngineLimits(version=before, scheduling="async"))
    assert replace(told, version=None, fuses_widely=new.fuses_widely) == new
    with pytest.raises(ValueError, match="version"):
        profile_engine(f"{name}@new")


def test_experts_are_one_launch_on_large_blackwells() -> None:
    catalog = Catalog.default()
    hopper, blackwell = (profile_engine("vllm", catalog.gpu(name)) for name in ("H200", "B200"))
    assert hopper.launch.beyond_graphs_s(experts=True) == pytest.approx(1.45e-3)
    assert blackwell.launch.beyond_graphs_s(experts=True) == pytest.approx(0.4e-3)
    assert profile_engine("vllm", catalog.gpu("RTX5090")).launch == hopper.launch


def test_limits_that_an_engine_has_no_option_for_count_nowhere() -> None:
    asked = EngineLimits(prompt_interval=30, mxfp8=True)
    found = {name: profile_engine(name, limits=asked) for name in ("vllm", "sglang", "trtllm")}
    assert {name: profile.prompt_interval for name, profile in found.items()} == {
        "vllm": 1,
        "sglang": 60,
        "trtllm": 30,
    }
    assert {name: profile.mxfp8 for name, profile in found.items()} == {
        "vllm": True,
        "sglang": False,
        "trtllm": True,
    }
    assert not profile_engine("vllm").mxfp8


def test_prompts_are_computed_first_unless_chunks_are_mixed() -> None:
    mixed = EngineLimits(mixed_chunk=True)
    assert profile_engine("sglang").prompts_first
    assert not profile_engine("sglang", limits=mixed).prompts_first
    assert not profile_engine("vllm").prompts_first


def test_latent_attention_takes_longer_to_launch() -> None:
    catalog = Catalog.default()
    launch = profile_engine("sglang", catalog.gpu("H200")).launch
    names = ("qwen3-235b-a22b", "deepseek-v3")
    plain, latent = (launch.of(catalog.model(name).llm) for name in names)
    more = latent.beyond_graphs_s(experts=True) - plain.beyond_graphs_s(experts=True)
    assert more == pytest.approx(EAGER_LATENT_S)
