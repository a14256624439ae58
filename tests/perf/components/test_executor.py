"""What executors carry: by hand where it can be, in order everywhere, and as plain llms where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.ids import Phase
from atoll.engines.limits import HostTime
from atoll.engines.table import profile_engine
from atoll.perf.capacity import CapacityModel, RoleLoad
from atoll.perf.components.batches import ENGINE_HOST, BatchTime, Host
from atoll.perf.components.class_loads import llm_lengths
from atoll.perf.components.executor import batched, executor_work
from atoll.perf.components.sites import executor_profile
from atoll.perf.memory_model import MemoryModel
from atoll.perf.mixed_capacity import MixedCapacityModel
from atoll.perf.step import Position, analytic
from atoll.workload.classes import ImageOutput, Images, RequestClass, Video
from tests.perf.components.builders import (
    AUDIO,
    IMAGE,
    PICTURE,
    SPEECH,
    TEXT,
    VIDEO,
    model,
    node,
    work,
)
from tests.seeds import examples

bounded = examples(25)
PROMISED = TEXT.model_copy(update={"ttft_s": 1.0, "tpot_s": 0.05})


class TestPlainLlm:
    """An executor of the llm alone is what the capacity models say of a plain one that prepares no steps."""

    @pytest.mark.parametrize("tp", [1, 2])
    def test_both_phases(self, tp: int) -> None:
        on = node("A100-80:2")
        spec, lengths = model("qwen3-32b").llm, llm_lengths(model("qwen3-32b"), PROMISED)
        one = node(f"A100-80:{tp}")
        prompts = RoleLoad("p", spec, Phase.PREFILL, 1.0, lengths)
        answers = RoleLoad("a", spec, Phase.DECODE, 0.05, lengths)
        mixed = MixedCapacityModel(
            prompts, answers, analytic(spec, one, tp=tp, engine=executor_profile("atoll", one))
        )
        rate = mixed.throughputs([1], [Position.WHOLE])[0, 0, spec.layers] * (2 // tp)
        found = work("qwen3-32b", ["llm"], "A100-80:2", PROMISED, tp=tp, engine="atoll")
        engine = analytic(spec, on, tp=tp, engine="atoll").engine
        memory = MemoryModel.of(spec, on, tp=tp, engine=engine)
        assert found.kv_tokens == memory.kv_tokens(0, spec.layers) * (2 // tp)
        if rate == 0.0:
            assert found.seconds == {}
        else:
            assert found.seconds["text", "llm"] == 1.0 / rate

    @pytest.mark.parametrize(
        ("part", "phase", "slo", "tokens"),
        [
            ("llm.prefill", Phase.PREFILL, 1.0, 1000.0),
            ("llm.decode", Phase.DECODE, 0.05, 100.0),
        ],
    )
    def test_phases_apart(self, part: str, phase: Phase, slo: float, tokens: float) -> None:
        spec, lengths = model("qwen3-32b").llm, llm_lengths(model("qwen3-32b"), PROMISED)
        role = RoleLoad("r", spec, phase, slo, lengths)
        on = node("A100-80:2")
        step = analytic(spec, on, tp=2, engine=executor_profile("atoll", on))
        capacity = CapacityModel(role, step)
        rate = capacity.throughput([1], [slo], Position.WHOLE)[0, spec.layers] / tokens
        found = work("qwen3-32b", [part], "A100-80:2", PROMISED, tp=2, engine="atoll")
        assert found.seconds["text", part] == 1.0 / rate

    def test_servers_count_as_executors_run_them(self) -> None:
        """No step is prepared, nothing goes by beside steps, and the host takes what executors' does."""
        spec, lengths = model("qwen3-32b").llm, llm_lengths(model("qwen3-32b"), PROMISED)
        plain = profile_engine("vllm", node("A100-80:2").gpu)
        host = HostTime(step_s=0.3e-3, sequence_s=1e-6)
        own = replace(plain, host=host, schedules_ahead=False, request_s=0.0)
        prompts = RoleLoad("p", spec, Phase.PREFILL, 1.0, lengths)
        answers = RoleLoad("a", spec, Phase.DECODE, 0.05, lengths)
        steps = [analytic(spec, node("A100-80:2"), tp=2, engine=engine) for engine in (own, plain)]
        rates = [
            MixedCapacityModel(prompts, answers, step).throughputs([1], [Position.WHOLE])[
                0, 0, spec.layers
            ]
            for step in steps
        ]
        found = work("qwen3-32b", ["llm"], "A100-80:2", PROMISED, tp=2)
        assert found.seconds["text", "llm"] == 1.0 / rates[0]
        assert rates[0] != rates[1]

    def test_without_a_promise_the_whole_kv_cache_is_used(self) -> None:
        promised = work(
            "qwen3-32b", ["llm"], "A100-80:1", TEXT.model_copy(update={"ttft_s": 900.0})
        )
        free = work("qwen3-32b", ["llm"], "A100-80:1", TEXT)
        assert free.seconds["text", "llm"] < promised.seconds["text", "llm"]


class TestMemory:
    """Parts share the memory of an executor."""

    def test_an_encoder_takes_kv_cache_from_the_llm(self) -> None:
        alone = work("internvl3-38b", ["llm"], "A100-80:2", IMAGE, tp=2)
        beside = work("internvl3-38b", ["vision", "llm"], "A100-80:2", IMAGE, tp=2)
        weights = 5628282240 * 2
        assert beside.weight_bytes - alone.weight_bytes == pytest.approx(weights, rel=0.01)
        kv = model("internvl3-38b").llm.kv_bytes_per_token
        assert (alone.kv_tokens - beside.kv_tokens) * kv > weights
        key = ("image+text", "llm")
        assert beside.seconds[key] > alone.seconds[key]

    def test_what_does_not_fit(self) -> None:
        for parts in (["vision", "llm"], ["vision", "llm.prefill"]):
            found = executor_work(model("internvl3-38b"), parts, node("A100-80:1"), [IMAGE])
            assert found is None
        assert executor_work(model("qwen-image"), ["dit"], node("L4:1"), [PICTURE]) is None

    def test_phases_on_the_same_gpus_share_weights(self) -> None:
        both = work("qwen3-32b", ["llm.prefill", "llm.decode"], "A100-80:2", TEXT, tp=2)
        whole = work("qwen3-32b", ["llm"], "A100-80:2", TEXT, tp=2)
        assert both.weight_bytes == whole.weight_bytes

    @bounded
    @given(
        st.lists(
            st.sampled_from(["vision", "audio", "llm", "talker", "vocoder"]),
            unique=True,
            min_size=1,
        ),
        st.sampled_from(["vision", "audio", "llm", "talker", "vocoder"]),
        st.sampled_from(["A100-80:1", "L4:1", "L40S:2"]),
    )
    def test_adding_a_part_never_leaves_more_kv_cache(
        self, parts: list[str], more: str, on: str
    ) -> None:
        omni, classes = model("qwen2.5-omni-7b"), [TEXT, IMAGE, AUDIO, SPEECH]
        where = node(on)
        few = executor_work(omni, parts, where, classes, tp=1)
        many = executor_work(omni, list(dict.fromkeys([*parts, more])), where, classes, tp=1)
        if few is None:
            assert many is None
        elif "llm" in parts:
            assert many is None or many.kv_tokens <= few.kv_tokens
        else:
            assert few.kv_tokens == 0

    def test_more_memory_is_never_less_kv_cache(self) -> None:
        parts = ["vision", "llm", "talker"]
        held = [
            work("qwen2.5-omni-7b", parts, on, IMAGE, SPEECH, tp=1).kv_tokens
            for on in ("A100-40:1", "A100-80:1", "H200:1")
        ]
        assert held == sorted(held)


class TestOrder:
    """More work is never faster."""

    @bounded
    @given(
        st.sampled_from(["qwen2.5-vl-7b", "internvl3-38b", "qwen3-omni-30b"]),
        st.integers(100, 2000),
        st.integers(1, 4),
        st.floats(1.0, 6.0),
    )
    def test_more_pixels_of_a_shape(self, name: str, side: int, times: int, count: float) -> None:
        def seconds(size: int) -> float:
            images = Images(count=count, width_px=size, height_px=size)
            klass = IMAGE.model_copy(update={"images": images})
            return work(name, ["vision"], "A100-80:1", klass).seconds["image+text", "vision"]

        assert seconds(side * times) >= seconds(side) * (1.0 - 1e-9)

    def test_more_of_everything(self) -> None:
        longer: list[tuple[RequestClass, dict[str, object], str, str]] = [
            (VIDEO, {"video": Video(frames=64)}, "vision", "qwen2.5-omni-7b"),
            (AUDIO, {"audio_s": 100.0}, "audio", "qwen2.5-omni-7b"),
            (SPEECH, {"speech_s": 90.0}, "talker", "qwen2.5-omni-7b"),
            (SPEECH, {"speech_s": 90.0}, "vocoder", "qwen2.5-omni-7b"),
            (SPEECH, {"speech_s": 90.0}, "code2wav", "qwen3-omni-30b"),
        ]
        for klass, changes, part, name in longer:
            key = (klass.name, part)
            more = klass.model_copy(update=changes)
            few, many = work(name, [part], "H100:1", klass), work(name, [part], "H100:1", more)
            assert many.seconds[key] > few.seconds[key], key
            assert many.latency_s[key] > few.latency_s[key], key

    def test_pictures_take_steps_and_passes(self) -> None:
        def alone(**changes: object) -> float:
            wanted = ImageOutput(width_px=512, height_px=512, steps=20)
            klass = PICTURE.model_copy(update={"image_output": wanted.model_copy(update=changes)})
            return work("qwen-image", ["dit"], "A100-80:1", klass).latency_s["text -> image", "dit"]

        assert alone(steps=40) == pytest.approx(2.0 * alone())
        assert alone(guided=True) > 1.5 * alone()
        assert alone(width_px=1024) > alone()

    def test_copies_side_by_side_share_the_work(self) -> None:
        one = work("qwen2.5-vl-7b", ["vision"], "A100-80:1", IMAGE)
        four = work("qwen2.5-vl-7b", ["vision"], "A100-80:4", IMAGE, tp=1)
        key = ("image+text", "vision")
        assert four.seconds[key] == pytest.approx(one.seconds[key] / 4.0)
        assert four.latency_s[key] == one.latency_s[key]
        best = work("qwen2.5-vl-7b", ["vision"], "A100-80:4", IMAGE)
        assert best.seconds[key] <= four.seconds[key]


class TestPromises:
    """Batches are as large as promises allow, and what cannot keep one is left out."""

    TIMES = BatchTime(fixed_s=1.0, item_s=0.5, max_batch=8, rounds=2, request_bytes=1.0)

    def test_batches_by_hand(self) -> None:
        assert self.TIMES.seconds(4) == 6.0
        assert [self.TIMES.largest_within(s) for s in (2.9, 3.0, 6.0, 6.5, 99.0)] == [0, 1, 4, 4, 8]
        # Four in 6 s.
        assert batched(self.TIMES, 6.0, 10.0, 8).seconds == 1.5
        assert batched(self.TIMES, 6.0, 10.0, 2).limit == "memory"
        # Too long for its share, not for the promise: alone.
        assert batched(self.TIMES, 2.0, 10.0, 8).seconds == 3.0
        assert batched(self.TIMES, 2.0, 2.9, 8).seconds == 0.0

    @pytest.mark.parametrize(
        ("name", "klass", "changes", "part"),
        [
            ("internvl3-38b", IMAGE, {"ttft_s": 0.05}, "vision"),
            ("internvl3-38b", IMAGE, {"ttft_s": 0.05}, "llm.prefill"),
            ("internvl3-38b", IMAGE, {"tpot_s": 0.001}, "llm.decode"),
            ("qwen2.5-omni-7b", SPEECH, {"ahead_s": 29.99}, "talker"),
            ("qwen2.5-omni-7b", SPEECH, {"ahead_s": 29.99}, "vocoder"),
            ("qwen-image", PICTURE, {"image_s": 1.0}, "dit"),
        ],
    )
    def test_what_cannot_be_kept(
        self, name: str, klass: RequestClass, changes: dict[str, float], part: str
    ) -> None:
        on = "A100-80:2"
        kept = work(name, [part], on, klass, tp=2 if "llm" in part else 1)
        assert (klass.name, part) in kept.seconds
        harder = klass.model_copy(update=changes)
        found = work(name, [part], on, harder, tp=2 if "llm" in part else 1)
        assert found.seconds == {}
        assert (klass.name, part) in found.latency_s

    def test_a_tighter_promise_is_never_cheaper(self) -> None:
        costs = []
        for image_s in (4.0, 8.0, 16.0, 60.0):
            klass = PICTURE.model_copy(update={"image_s": image_s})
            found = work("qwen-image", ["text", "dit", "vae"], "A100-80:1", klass)
            costs.append(sum(found.seconds.values()))
        assert costs == sorted(costs, reverse=True)
        assert costs[0] > costs[-1]

    def test_latency_of_an_llm_is_its_prefill(self) -> None:
        found = work("qwen2.5-vl-7b", ["llm"], "A100-80:1", IMAGE)
        apart = work("qwen2.5-vl-7b", ["llm.prefill", "llm.decode"], "A100-80:1", IMAGE)
        assert found.latency_s["image+text", "llm"] > 0.0
        assert apart.latency_s["image+text", "llm.decode"] == 0.0


def test_parts_must_be_the_models() -> None:
    vl, on = model("qwen2.5-vl-7b"), node("A100-80:1")
    with pytest.raises(UnknownNameError):
        executor_work(vl, ["talker"], on, [IMAGE])
    with pytest.raises(UsageError, match="at least one part"):
        executor_work(vl, [], on, [IMAGE])
    with pytest.raises(UsageError, match="cannot be split over 3"):
        executor_work(vl, ["vision"], on, [IMAGE], tp=3)


def test_provenance_names_the_parts() -> None:
    found = work("qwen2.5-omni-7b", ["llm", "vocoder"], "A100-80:1", SPEECH)
    assert "llm: " in found.provenance
    assert "vocoder: shapes from public configurations" in found.provenance


def test_a_better_host_prepares_media_sooner() -> None:
    vl, on, key = model("qwen2.5-vl-7b"), node("A100-80:1"), ("image+text", "vision")
    usual = executor_work(vl, ["vision"], on, [IMAGE])
    better = executor_work(vl, ["vision"], on, [IMAGE], host=Host(0.0, 0.0))
    assert usual is not None
    assert better is not None
    spent = ENGINE_HOST.request_s + ENGINE_HOST.megapixel_s * 0.84 * 0.56
    # The host works beside the GPU: the longer sets the rate, and a request alone waits for both.
    assert usual.seconds[key] == pytest.approx(max(better.seconds[key], spent), rel=0.03)
    assert usual.latency_s[key] == pytest.approx(better.latency_s[key] + spent)
    text = executor_work(vl, ["llm"], on, [IMAGE], host=Host(1.0, 1.0))
    plain = executor_work(vl, ["llm"], on, [IMAGE])
    assert text is not None
    assert plain is not None
    assert text.seconds == plain.seconds


def test_an_encoder_of_sounds_takes_no_longer_for_the_pictures_beside_them() -> None:
    both = RequestClass(name="video+audio+text", share=0.5, audio_s=8.0, video=Video(frames=32))
    alone = AUDIO.model_copy(update={"share": 0.5})
    found = work("qwen2.5-omni-7b", ["audio"], "A100-80:1", both, alone)
    assert found.seconds[both.name, "audio"] == found.seconds[alone.name, "audio"]
    assert found.latency_s[both.name, "audio"] == found.latency_s[alone.name, "audio"]
