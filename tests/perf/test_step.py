from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.transformer import MoeSpec, TransformerSpec
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.ids import Phase
from atoll.engines.limits import HostTime
from atoll.engines.profile import EngineProfile, LaunchTime
from atoll.engines.table import profile_engine
from atoll.perf.batch import Batch
from atoll.perf.constants import OpClass, default_constants
from atoll.perf.layers import layer_kinds
from atoll.perf.operators import Array
from atoll.perf.step import (
    AnalyticStepModel,
    Position,
    StepModel,
    analytic,
    check_tp,
    range_counts,
    slowest_run,
    step_seconds,
    window_counts,
)
from tests.perf.builders import constants, hybrid, mixture, model, node, node_type, spec

LLAMA = model("llama-3.1-8b")
FOUR_KINDS = spec(
    layers=9,
    windows=(64, None, 64, 64, None, None, 64, None, 64),
    moe=MoeSpec(8, 2, 256, dense_layers=frozenset({0, 1, 5})),
)
CASES: dict[str, tuple[TransformerSpec, str]] = {
    "dense": (model("llama-3.1-8b"), "L4:1"),
    "tied": (model("llama-3.2-1b"), "T4:2"),
    "experts": (model("qwen3-235b-a22b"), "H100:8"),
    "hybrid": (model("gpt-oss-20b"), "A100-80:1"),
    "mixture": (mixture(), "L40S:2"),
    "four kinds": (FOUR_KINDS, "H100:1"),
}
batches = st.one_of(
    st.builds(
        Batch.prefill, st.integers(1, 8192), st.integers(1, 8), st.integers(0, 4000)
    ),
    st.builds(Batch.decode, st.integers(1, 512), st.integers(1, 8000)),
    st.builds(
        lambda t, s, c: Batch(float(t), 1.0, 0.0, float(s), float(c)),
        st.integers(1, 4096),
        st.integers(1, 256),
        st.integers(1, 4000),
    ),
)  # fmt: skip


def step_model(name: str, profile: str = "vllm") -> AnalyticStepModel:
    llm, machine = CASES[name]
    return analytic(llm, node_type(machine), engine=profile)


def stacked(rows: Sequence[Batch[float]]) -> Batch[Array]:
    def column(field: str) -> Array:
        return np.array([getattr(row, field) for row in rows])

    return Batch(
        column("prefill_tokens"),
        column("prefill_sequences"),
        column("prefill_context"),
        column("decode_sequences"),
        column("decode_context"),
    )


@given(st.sampled_from(sorted(CASES)), batches, st.data())
def test_pieces_of_any_split_add_up_to_the_whole(
    name: str, batch: Batch[float], data: st.DataObject
) -> None:
    own = step_model(name)
    layers = own.spec.layers
    cuts = data.draw(st.sets(st.integers(1, layers - 1), max_size=5))
    ends = [0, *sorted(cuts), layers]
    pieces = [
        step_seconds(own, batch, start, end, host=False) for start, end in itertools.pairwise(ends)
    ]
    whole = step_seconds(own, batch, 0, layers, host=False)
    assert sum(pieces) == pytest.approx(whole, rel=1e-9)
    # Host time is paid by every node.
    with_host = [step_seconds(own, batch, a, b) for a, b in itertools.pairwise(ends)]
    host = own.engine.host_seconds(batch.outputs)
    assert sum(with_host) == pytest.approx(whole + len(pieces) * host, rel=1e-9)


@given(st.sampled_from(sorted(CASES)), st.lists(batches, min_size=1, max_size=4), st.data())
def test_floats_and_arrays_agree(name: str, rows: list[Batch[float]], data: st.DataObject) -> None:
    own = step_model(name)
    start = data.draw(st.integers(0, own.spec.layers - 1))
    end = data.draw(st.integers(start + 1, own.spec.layers))
    many = step_seconds(own, stacked(rows), start, end)
    one = [step_seconds(own, row, start, end) for row in rows]
    assert all(isinstance(value, float) for value in one)
    assert many == pytest.approx(one, rel=1e-12)


@given(st.sampled_from(sorted(CASES)), batches)
def test_a_step_grows_with_its_layers(name: str, batch: Batch[float]) -> None:
    own = step_model(name)
    times = [step_seconds(own, batch, 0, end) for end in range(1, own.spec.layers + 1)]
    assert times == sorted(times)
    assert times[0] > 0.0


def test_the_ends_of_a_model() -> None:
    own = step_model("dense", "none")
    batch = Batch.prefill(512)
    parts = own.parts(batch)
    assert parts.host == 0.0
    layer = parts.layers[0]
    assert step_seconds(own, batch, 3, 5) == pytest.approx(2 * layer)
    assert step_seconds(own, batch, 0, 2) == pytest.approx(2 * layer + parts.embedding)
    assert step_seconds(own, batch, 30, 32) == pytest.approx(2 * layer + parts.head)


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (0, 33), (5, 5), (6, 5), (32, 33)])
def test_ranges_outside_the_model(start: int, end: int) -> None:
    with pytest.raises(UsageError, match=rf"\[{start}, {end}\).* 0 to 32"):
        step_seconds(step_model("dense"), Batch.decode(1, 1), start, end)


# Hybrid models.


def test_ranges_of_gpt_oss() -> None:
    # 24 layers, every second one looks back 128 tokens, the first among them.
    own = step_model("hybrid")
    assert [kind.window for kind in own.kinds] == [128, None]
    assert range_counts(own.spec, own.kinds, 0, 24) == (12, 12)
    assert range_counts(own.spec, own.kinds, 0, 1) == (1, 0)
    assert range_counts(own.spec, own.kinds, 1, 2) == (0, 1)
    assert range_counts(own.spec, own.kinds, 3, 8) == (2, 3)
    long = Batch.decode(64, 30_000)
    windowed, full = step_seconds(own, long, 2, 3), step_seconds(own, long, 3, 4)
    assert full > windowed
    short = Batch.decode(64, 100)
    assert step_seconds(own, short, 2, 3) == pytest.approx(step_seconds(own, short, 3, 4))


@given(st.sampled_from(sorted(CASES)), st.data())
def test_range_counts_count(name: str, data: st.DataObject) -> None:
    own = step_model(name)
    start = data.draw(st.integers(0, own.spec.layers - 1))
    end = data.draw(st.integers(start, own.spec.layers))
    kinds = layer_kinds(own.spec)[start:end]
    counts = range_counts(own.spec, own.kinds, start, end)
    assert counts == tuple(sum(k == kind for k in kinds) for kind in own.kinds)


def check_slowest_run(llm: TransformerSpec, seconds: Sequence[float]) -> None:
    own = layer_kinds(llm)
    kinds = tuple(dict.fromkeys(own))
    cost = dict(zip(kinds, seconds, strict=False))
    times = [np.array([cost[kind], 2 * cost[kind]]) for kind in kinds]
    found = slowest_run(window_counts(llm, kinds), times)
    assert found.shape == (llm.layers + 1, 2)
    for j in range(llm.layers + 1):
        runs = [sum(cost[k] for k in own[i : i + j]) for i in range(llm.layers - j + 1)]
        assert all(found[j, 0] >= run * (1 - 1e-12) for run in runs)
        # Not only a bound: some run is that slow.
        assert found[j] == pytest.approx([max(runs), 2 * max(runs)], rel=1e-12)


@given(
    st.lists(st.sampled_from([None, 64, 512]), min_size=1, max_size=12),
    st.lists(st.floats(1e-6, 1e-2), min_size=3, max_size=3),
)
def test_the_slowest_run_against_every_start(
    windows: list[int | None], seconds: list[float]
) -> None:
    check_slowest_run(hybrid(windows), seconds)


def test_the_slowest_run_of_four_kinds() -> None:
    for seconds in itertools.permutations((1.0, 2.0, 4.0, 8.0)):
        check_slowest_run(FOUR_KINDS, seconds)
    check_slowest_run(model("gpt-oss-120b"), (1.0, 3.0))
    check_slowest_run(model("llama-3.1-8b"), (1.0,))


def test_window_counts_are_real_runs() -> None:
    kinds = tuple(dict.fromkeys(layer_kinds(FOUR_KINDS)))
    counts = window_counts(FOUR_KINDS, kinds)
    for j in range(FOUR_KINDS.layers + 1):
        real = {range_counts(FOUR_KINDS, kinds, i, i + j) for i in range(FOUR_KINDS.layers - j + 1)}
        assert {tuple(int(n) for n in run) for run in counts[j]} == real


# What hardware and precision do.


@pytest.mark.parametrize("name", ["H100", "H200", "B200", "A100-80", "V100-16"])
def test_more_gpus_on_nvlink_prefill_faster(name: str) -> None:
    llm = model("llama-3-70b")
    batch = Batch.prefill(8192, 8)
    times = [
        step_seconds(analytic(llm, node_type(f"{name}:{n}")), batch, 0, 80) for n in (1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)
    # And the sums over GPUs and the host keep it from being perfect.
    assert times[0] / 8 < times[-1] < times[0] / 3


def test_tensor_parallel_part_of_a_node() -> None:
    llm = model("llama-3.1-8b")
    batch = Batch.prefill(4096, 4)
    whole, pair = analytic(llm, node_type("H100:8")), analytic(llm, node_type("H100:8"), tp=2)
    assert (whole.tp, pair.tp) == (8, 2)
    alone = analytic(llm, node_type("H100:2"))
    assert step_seconds(pair, batch, 0, 32) == step_seconds(alone, batch, 0, 32)
    assert step_seconds(whole, batch, 0, 32) < step_seconds(pair, batch, 0, 32)


def test_groups_that_do_not_divide_the_model() -> None:
    phi = model("phi-4-14b")  # 40 heads share 10 KV heads
    assert check_tp(node_type("H100:8"), None, phi) == 2
    for tp in (4, 8):
        with pytest.raises(UsageError, match=f"10 KV heads do not split over {tp}") as caught:
            analytic(phi, node_type("H100:8"), tp=tp)
        assert caught.value.hint == "use 2 for H100:8"


@pytest.mark.parametrize("tp", [0, -1, 3, 16])
def test_groups_that_do_not_divide_the_node(tp: int) -> None:
    with pytest.raises(UsageError, match=r"does not divide the 8 GPUs of H100:8"):
        check_tp(node_type("H100:8"), tp, model("llama-3.1-8b"))
    with pytest.raises(UsageError):
        analytic(model("llama-3.1-8b"), node_type("H100:8"), tp=tp)


@pytest.mark.parametrize("name", ["llama-3-70b", "qwen3-32b", "llama-3.1-8b"])
@pytest.mark.parametrize(
    "batch", [Batch.prefill(8192, 8), Batch.decode(1, 1000), Batch.decode(32, 1000)]
)
def test_fp8_is_faster_on_an_h100(name: str, batch: Batch[float]) -> None:
    llm = model(name)
    wide = analytic(llm, node_type("H100:1"), engine="none")
    narrow = analytic(llm.with_weights("fp8"), node_type("H100:1"), engine="none")
    assert step_seconds(narrow, batch, 0, llm.layers) < step_seconds(wide, batch, 0, llm.layers)


@pytest.mark.parametrize("name", ["llama-3-70b", "qwen3-32b", "qwen3-235b-a22b"])
def test_fp8_on_an_a100_only_reads_less(name: str) -> None:
    llm = model(name)
    narrow = llm.with_weights("fp8")
    assert narrow.weight_bytes < 0.6 * llm.weight_bytes
    wide, small = (analytic(m, node_type("A100-80:1"), engine="none") for m in (llm, narrow))
    decode = Batch.decode(1, 1000)
    few = step_seconds(small, decode, 1, 2) / step_seconds(wide, decode, 1, 2)
    assert 0.45 < few < 0.75
    # Where arithmetic rules there is nothing to gain: no FP8 cores.
    prefill = Batch.prefill(65536, 64)
    many = step_seconds(small, prefill, 1, 2) / step_seconds(wide, prefill, 1, 2)
    assert 0.97 < many <= 1.0


@pytest.mark.parametrize("machine", ["H100:8", "H200:8"])
def test_fp8_experts_are_faster_on_hopper(machine: str) -> None:
    llm = model("qwen3-235b-a22b")
    for batch, gain in ((Batch.prefill(8192, 8), 0.95), (Batch.decode(64, 1000), 1.1)):
        wide = analytic(llm, node_type(machine), engine="none")
        narrow = analytic(llm.with_weights("fp8"), node_type(machine), engine="none")
        # Prompts gain nothing: block scales cost what the faster units save.
        assert gain * step_seconds(narrow, batch, 0, 94) < step_seconds(wide, batch, 0, 94)


def test_a_narrow_cache_halves_reading_on_blackwell_and_not_on_hopper() -> None:
    llm = model("llama-3.1-8b")
    batch = Batch.decode(64, 16_000)
    ratios = {}
    for machine in ("H100:1", "H200:1", "B200:1", "L40S:1"):
        wide, narrow = (
            analytic(own, node_type(machine), engine="none").ops.layers[0].attention_seconds(batch)
            for own in (llm, llm.with_kv_dtype("fp8"))
        )
        ratios[machine] = narrow / wide
    assert ratios["B200:1"] == pytest.approx(0.5, abs=0.05)
    assert ratios["L40S:1"] == pytest.approx(0.5, abs=0.05)
    assert 0.55 < ratios["H100:1"] < ratios["H200:1"] < 0.85


def test_fused_sums_save_a_millisecond_or_two_on_blackwell() -> None:
    llm = model("llama-3-70b")
    for machine, low, high in (
        ("B200:2", 0.5e-3, 2.5e-3),
        ("H200:2", 0.0, 0.0),
        ("B200:8", 0.0, 0.0),
    ):
        profile = profile_engine("vllm", node_type(machine).gpu)
        apart = replace(profile, fuses_all_reduce=False)
        for batch in (Batch.decode(1, 1000), Batch.decode(64, 1000)):
            fused, plain = (
                step_seconds(analytic(llm, node_type(machine), engine=own), batch, 0, 80)
                for own in (profile, apart)
            )
            assert low <= plain - fused <= high


def test_tensorrt_llm_fuses_sums_on_any_nvlink_since_1_1() -> None:
    llm, batch = model("llama-3-70b"), Batch.decode(8, 1000)
    for machine in ("H200:2", "H200:8", "B200:8"):
        old, new = (
            step_seconds(analytic(llm, node_type(machine), engine=engine), batch, 0, 80)
            for engine in ("trtllm@1.0", "trtllm@1.1")
        )
        assert 0.3e-3 < old - new < 2.5e-3
    plain, shared = (
        analytic(llm, node_type("L40S:8"), engine=f"trtllm@{v}") for v in ("1.0", "1.1")
    )
    assert plain.ops == shared.ops


def test_steps_with_prompts_take_as_long_as_launching_them() -> None:
    llm = spec(layers=6)
    profile = EngineProfile("x", launch=LaunchTime(1e-3))
    own = analytic(llm, node(), engine=profile, constants=constants())
    free = analytic(llm, node(), engine=EngineProfile("x"), constants=constants())
    tiny, mixed = Batch.prefill(1.0), Batch(1.0, 1.0, 0.0, 4.0, 100.0)
    for batch in (tiny, mixed):
        assert own.parts(batch).layers[0] == 1e-3 > free.parts(batch).layers[0]
    decode, long = Batch.decode(4.0, 100.0), Batch.prefill(1e6)
    for batch in (decode, long):
        assert own.parts(batch) == free.parts(batch)
    columns = [np.array(x) for x in zip(*map(_row, (tiny, decode, long)), strict=True)]
    many: Batch[Array] = Batch(columns[0], columns[1], columns[2], columns[3], columns[4])
    found = own.parts(many).layers[0]
    assert found == pytest.approx([own.parts(b).layers[0] for b in (tiny, decode, long)])


def test_experts_in_steps_beyond_the_graphs_take_as_long_as_launching_them() -> None:
    launch = LaunchTime(1e-5, experts_s=3e-3, graph_tokens=512)
    profile = EngineProfile("x", launch=launch)
    small, large = Batch(500.0, 1.0, 0.0, 12.0, 100.0), Batch(500.0, 1.0, 0.0, 13.0, 100.0)
    own = analytic(model("qwen3-30b-a3b"), node(), engine=profile, constants=constants())
    free = replace(own, engine=EngineProfile("x"))
    assert own.parts(small) == free.parts(small)
    assert own.parts(large).layers[0] == 3e-3 > free.parts(large).layers[0]
    columns = [np.array(x) for x in zip(*map(_row, (small, large)), strict=True)]
    many: Batch[Array] = Batch(columns[0], columns[1], columns[2], columns[3], columns[4])
    assert own.parts(many).layers[0][1] == 3e-3 > own.parts(many).layers[0][0]
    decode = Batch.decode(600.0, 100.0)
    assert own.parts(decode) == free.parts(decode)
    dense = analytic(spec(layers=6), node(), engine=profile, constants=constants())
    assert dense.parts(large) == replace(dense, engine=EngineProfile("x")).parts(large)


def _row(batch: Batch[float]) -> tuple[float, ...]:
    prompts = (batch.prefill_tokens, batch.prefill_sequences, batch.prefill_context)
    return (*prompts, batch.decode_sequences, batch.decode_context)


@given(st.sampled_from(sorted(CASES)), batches)
def test_a_longer_context_and_a_larger_batch_take_longer(name: str, batch: Batch[float]) -> None:
    own = step_model(name)
    more = Batch(
        batch.prefill_tokens * 2,
        batch.prefill_sequences * 2,
        batch.prefill_context,
        batch.decode_sequences * 2,
        batch.decode_context,
    )
    longer = Batch(
        batch.prefill_tokens,
        batch.prefill_sequences,
        batch.prefill_context * 2,
        batch.decode_sequences,
        batch.decode_context * 2,
    )
    base = step_seconds(own, batch, 0, own.spec.layers)
    assert step_seconds(own, more, 0, own.spec.layers) > base
    assert step_seconds(own, longer, 0, own.spec.layers) >= base
    graph_tokens = own.engine.launch.graph_tokens
    if (batch.tokens > graph_tokens) == (more.tokens > graph_tokens):
        # A larger batch amortises what is paid once.
        assert step_seconds(own, more, 0, own.spec.layers) <= 2 * base


# Building a model.


def test_a_backend_says_what_it_is() -> None:
    own: StepModel = step_model("dense")
    dense = (OpClass.GEMM, OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE)
    assert own.provenance == default_constants().gpu("L4").summary(dense)
    # The weakest ground comes first.
    assert own.provenance.startswith("proxy")
    assert own.node is node_type("L4:1")
    assert own.engine == profile_engine("vllm", own.node.gpu)


def test_constants_and_engines_of_ones_own() -> None:
    profile = EngineProfile("mine", HostTime(step_s=0.5, sequence_s=0.25))
    own = analytic(spec(), node(), engine=profile, constants=constants())
    assert own.parts(Batch.decode(1, 1)).host == 0.75
    assert own.parts(Batch.prefill(100, 2)).host == 1.0
    assert own.provenance == "measured (a test)"
    other = node(name="OTHER")
    with pytest.raises(UnknownNameError, match="OTHER"):
        analytic(spec(), other, constants=constants())
    with pytest.raises(UnknownNameError, match="engine"):
        analytic(spec(), node(), engine="none such", constants=constants())


def test_a_gpu_nobody_has_constants_for_takes_those_of_a_relative() -> None:
    own = analytic(spec(), node(name="OTHER", architecture="hopper"))
    assert own.provenance.startswith("proxy (")
    assert own.parts(Batch.decode(1, 1)).layers[0] > 0.0


def test_steps_that_an_engine_can_take() -> None:
    own = analytic(LLAMA, node_type("L4:1"), engine=EngineProfile("x", max_sequences=7))
    assert own.largest_batch(Phase.DECODE) == 7.0
    assert own.largest_batch(Phase.PREFILL) == 8192.0


def test_positions() -> None:
    assert [p.embedding for p in Position] == [True, False, False, True]
    assert [p.head for p in Position] == [False, False, True, True]
