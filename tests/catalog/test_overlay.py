from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.catalog.describe import describe
from atoll.catalog.facts import Fact
from atoll.catalog.load import load_catalog
from atoll.catalog.overlay import apply_overlay
from atoll.catalog.prices import Price
from atoll.core.errors import AtollError, InputError
from tests.seeds import examples

DEFAULT = Catalog.default()
NEW_GPU: dict[str, object] = {
    "architecture": "Future",
    "compute_capability": "12.0",
    "fp16_tflops": 500,
    "bf16": True,
    "memory": "100GB",
    "bandwidth": "2TB/s",
    "tdp_w": 500,
    "sms": 100,
    "l2": "64MiB",
}
NEW_MODEL: dict[str, object] = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "intermediate": 128,
    "vocab": 1000,
    "max_context": 2048,
}


class TestNothing:
    @pytest.mark.parametrize("overlay", [{}, {"gpus": {}}, {"prices": []}, {"links": {}}])
    def test_an_empty_overlay_changes_nothing(self, overlay: dict[str, object]) -> None:
        assert apply_overlay(DEFAULT, overlay) == DEFAULT

    def test_nor_does_an_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.yaml"
        path.write_text("# nothing\n")
        assert apply_overlay(DEFAULT, path) == DEFAULT

    @given(st.sampled_from(sorted(DEFAULT.gpus)))
    def test_nor_does_an_entry_without_fields(self, name: str) -> None:
        assert apply_overlay(DEFAULT, {"gpus": {name: {}}}) == DEFAULT

    @given(st.sampled_from(sorted(DEFAULT.models)))
    def test_nor_a_model_without_fields(self, name: str) -> None:
        changed = apply_overlay(DEFAULT, {"models": {name: {}}})
        assert changed == DEFAULT
        assert changed.model(name).facts == DEFAULT.model(name).facts

    def test_the_default_is_untouched(self) -> None:
        before = DEFAULT.gpu("L4")
        apply_overlay(DEFAULT, {"gpus": {"L4": {"memory": "25GB"}}})
        assert DEFAULT.gpu("L4") is before


class TestGpus:
    def test_change_one_field(self) -> None:
        changed = apply_overlay(
            DEFAULT, {"gpus": {"l4": {"memory": "23GB", "source": "nvidia-smi"}}}
        )
        gpu = changed.gpu("L4")
        assert gpu.memory_bytes == 23_000_000_000
        assert gpu.bandwidth_bytes_per_s == DEFAULT.gpu("L4").bandwidth_bytes_per_s
        assert gpu.facts["memory_bytes"].source == "nvidia-smi"
        assert gpu.facts["tdp_w"] == DEFAULT.gpu("L4").facts["tdp_w"]
        assert changed.node("L4:2").memory_bytes == 46_000_000_000

    def test_new_like_another(self) -> None:
        overlay = {"gpus": {"L40": {"like": "L40S", "fp16_tflops": 181, "aliases": ["NVIDIA L40"]}}}
        changed = apply_overlay(DEFAULT, overlay)
        assert changed.gpu("nvidia l40").fp16_tflops == 181
        assert changed.node("L40:4").interconnect == DEFAULT.node("L40S:4").interconnect
        assert changed.gpu("L40S") == DEFAULT.gpu("L40S")
        assert "L40:8" in changed.nodes

    def test_what_is_taken_over_says_so_and_is_trusted_less(self) -> None:
        changed = apply_overlay(DEFAULT, {"gpus": {"L40": {"like": "l40s", "fp16_tflops": 181}}})
        own, theirs = changed.gpu("L40"), DEFAULT.gpu("L40S")
        assert own.like == "L40S"
        assert own.facts["fp16_tflops"] == Fact(181, "overlay", "medium")
        assert theirs.facts["fp8_tflops"].confidence == "high"
        for field, fact in theirs.facts.items():
            if field != "fp16_tflops":
                taken = own.facts[field]
                assert taken.source == f"as L40S: {fact.source}"
                assert taken.confidence == ("low" if fact.confidence == "low" else "medium")
                assert taken.value == fact.value
        # Only from another GPU: what stays as it was keeps its source.
        again = apply_overlay(changed, {"gpus": {"L40": {"sms": 7}, "L4": {"sms": 7}}})
        assert again.gpu("L40").facts["tdp_w"] == own.facts["tdp_w"]
        assert again.gpu("L40").like == "L40S"
        assert again.gpu("L4").facts["tdp_w"] == DEFAULT.gpu("L4").facts["tdp_w"]
        assert again.gpu("L4").like is None
        rows = {row.field: row for row in describe(changed, "L40").rows}
        assert rows["like"].value == "L40S"
        assert rows["tdp_w"].source == own.facts["tdp_w"].source

    def test_new_from_nothing(self) -> None:
        changed = apply_overlay(DEFAULT, {"gpus": {"X1": NEW_GPU}})
        gpu = changed.gpu("x1")
        assert (gpu.fp8_tflops, gpu.nvlink_bytes_per_s) == (None, None)
        assert gpu.l2_bytes == 64 * 2**20
        assert gpu.facts["sms"].confidence == "medium"
        assert [n for n in changed.nodes if n.startswith("X1")] == ["X1:1"]

    def test_a_later_gpu_may_be_like_an_earlier_one(self) -> None:
        overlay = {"gpus": {"X1": NEW_GPU, "X2": {"like": "X1", "sms": 7}}}
        assert apply_overlay(DEFAULT, overlay).gpu("X2").sms == 7

    def test_null_takes_fp8_away(self) -> None:
        changed = apply_overlay(DEFAULT, {"gpus": {"L4": {"fp8_tflops": None}}})
        assert changed.gpu("L4").fp8_tflops is None


class TestNodes:
    def test_interconnect_of_one_node_type(self) -> None:
        changed = apply_overlay(
            DEFAULT,
            {
                "interconnects": {
                    "bridge": {
                        "kind": "nvlink",
                        "generation": 3,
                        "allreduce": {2: {"alpha_us": 6, "bus_bandwidth": "50GB/s"}},
                        "p2p_bandwidth": "50GB/s",
                    }
                },
                "nodes": {"RTX 3090:2": {"interconnect": "bridge"}},
            },
        )
        node = changed.node("RTX3090:2")
        assert node.interconnect.kind == "nvlink"
        assert node.interconnect.allreduce_for(2).bus_bandwidth_bytes_per_s == 50e9
        assert changed.node("RTX3090:4") == DEFAULT.node("RTX3090:4")
        assert changed.links.inside(node).bandwidth_bytes_per_s == 50e9

    def test_change_one_count_of_a_known_interconnect(self) -> None:
        overlay = {
            "interconnects": {"pcie4": {"allreduce": {4: {"alpha_us": 1, "bus_bandwidth": 4e9}}}}
        }
        changed = apply_overlay(DEFAULT, overlay)
        assert changed.node("L40S:4").interconnect.allreduce_for(4).alpha_us == 1
        assert changed.node("L40S:2").interconnect.allreduce_for(2) == (
            DEFAULT.node("L40S:2").interconnect.allreduce_for(2)
        )

    def test_the_sharpness_of_an_all_reduce(self) -> None:
        row = {"alpha_us": 1, "bus_bandwidth": "4GB/s"}
        changed = apply_overlay(
            DEFAULT,
            {
                "interconnects": {
                    "nvlink4": {"allreduce": {2: row, 4: row | {"p": 2}, 16: row}},
                    "mine": {"like": "nvlink4-h200", "allreduce": {8: row, 3: row}},
                    "new": {"kind": "pcie", "allreduce": {2: row, 4: row | {"p": 0.5}}},
                }
            },
        )
        before = DEFAULT.interconnect("nvlink4")

        def sharpness(name: str) -> dict[int, float]:
            return {n: cost.p for n, cost in changed.interconnect(name).allreduce.items()}

        # Kept where that count was known, else 1.
        assert before.allreduce[2].p != 1.0
        assert sharpness("nvlink4") == {
            2: before.allreduce[2].p,
            4: 2.0,
            8: before.allreduce[8].p,
            16: 1.0,
        }
        like = DEFAULT.interconnect("nvlink4-h200").allreduce
        assert sharpness("mine")[8] == like[8].p
        assert sharpness("mine")[3] == 1.0
        assert sharpness("new") == {2: 1.0, 4: 0.5}
        facts = changed.interconnect("nvlink4").facts
        assert facts["allreduce.2.p"] == before.facts["allreduce.2.p"]
        assert facts["allreduce.2.alpha_us"].source == "overlay"
        assert facts["allreduce.4.p"] == Fact(2.0, "overlay", "medium")
        assert facts["allreduce.16.p"] == Fact(1.0, "overlay", "medium")
        shown = {row.field: row for row in describe(changed, "H100:4").rows}
        assert shown["allreduce_p"].value == 2.0
        shown = {row.field: row for row in describe(changed, "new").rows}
        assert shown["allreduce.4.p"].value == 0.5

    @pytest.mark.parametrize("p", [0, -1, 17, "'2'", ".nan", "true"])
    def test_a_sharpness_that_is_none(self, tmp_path: Path, p: object) -> None:
        path = tmp_path / "o.yaml"
        path.write_text(
            "interconnects:\n  pcie4:\n    allreduce:\n"
            f"      2: {{alpha_us: 1, bus_bandwidth: 1GB/s, p: {p}}}\n"
        )
        with pytest.raises(InputError) as caught:
            apply_overlay(DEFAULT, path)
        assert caught.value.field == "interconnects.pcie4.allreduce.2.p"
        assert caught.value.line == 4

    def test_a_larger_node(self) -> None:
        changed = apply_overlay(DEFAULT, {"nodes": {"H100:32": {"interconnect": "nvlink4"}}})
        assert changed.node("H100:32").memory_bytes == 32 * 81559 * 2**20


class TestModels:
    def test_like(self) -> None:
        overlay = {
            "models": {
                "llama-3.1-70b": {
                    "like": "llama-3-70b",
                    "max_context": 131072,
                    "weights": "fp8",
                    "kv_dtype": "fp8",
                    "source": "model card",
                }
            }
        }
        model = apply_overlay(DEFAULT, overlay).model("Llama 3.1 70B")
        assert model.llm.max_context == 131072
        assert model.llm.attention_dtype.name == "fp8"
        assert model.llm.kv_bytes_per_token == 163840
        assert model.total_params == 70553706496
        assert model.facts["llm.max_context"].source == "model card"
        assert not any(key.startswith("reference.") for key in model.facts)

    def test_like_a_variant(self) -> None:
        overlay = {"models": {"mine": {"like": "llama-3-70b@int4"}}}
        assert apply_overlay(DEFAULT, overlay).model("mine").llm.mlp_dtype.name == "int4"

    def test_from_nothing(self) -> None:
        model = apply_overlay(DEFAULT, {"models": {"org/tiny": NEW_MODEL}}).model("org/tiny")
        assert model.llm.kv_heads == 4
        assert model.llm.head_dim == 16
        assert model.llm.total_params == 2 * (4 * 64 * 64 + 3 * 64 * 128 + 128) + 2 * 64000 + 64

    def test_experts_and_windows(self) -> None:
        entry = NEW_MODEL | {
            "layers": 4,
            "moe": {"experts": 8, "top_k": 2, "intermediate": 32, "dense_layers": [0]},
            "sliding": {"size": 128, "every": 2, "offset": 1},
        }
        llm = apply_overlay(DEFAULT, {"models": {"t": entry}}).model("t").llm
        assert llm.windows == (None, 128, None, 128)
        assert not llm.is_moe_layer(0)
        assert llm.moe is not None
        assert llm.moe.experts == 8
        listed = apply_overlay(DEFAULT, {"models": {"t": NEW_MODEL | {"windows": [None, 64]}}})
        assert listed.model("t").llm.windows == (None, 64)

    def test_fewer_layers(self) -> None:
        changed = apply_overlay(DEFAULT, {"models": {"llama-3-70b": {"layers": 40}}})
        assert changed.model("llama-3-70b").llm.windows == (None,) * 40

    def test_fewer_experts(self) -> None:
        changed = apply_overlay(DEFAULT, {"models": {"gpt-oss-20b": {"moe": {"experts": 16}}}})
        moe = changed.model("gpt-oss-20b").llm.moe
        assert moe is not None
        assert (moe.experts, moe.top_k) == (16, 4)

    def test_multimodal_keeps_its_other_parts(self) -> None:
        changed = apply_overlay(DEFAULT, {"models": {"qwen2.5-vl-7b": {"weights": "fp8"}}})
        model, before = changed.model("qwen2.5-vl-7b"), DEFAULT.model("qwen2.5-vl-7b")
        assert model.components["vision"] == before.components["vision"]
        assert model.llm.mlp_dtype.name == "fp8"

    def test_note_of_a_model_without_llm(self) -> None:
        changed = apply_overlay(DEFAULT, {"models": {"qwen-image": {"note": "hello"}}})
        assert changed.model("qwen-image").note == "hello"

    def test_hf_config_beside_the_overlay(self, tmp_path: Path) -> None:
        folder = tmp_path / "weights"
        folder.mkdir()
        config = {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 1000,
            "max_position_embeddings": 2048,
        }
        (folder / "config.json").write_text(json.dumps(config))
        path = tmp_path / "overlay.yaml"
        path.write_text("models:\n  tiny: {hf_config: weights, kv_dtype: fp8}\n")
        model = apply_overlay(DEFAULT, path).model("tiny")
        assert model.llm.total_params == (
            apply_overlay(DEFAULT, {"models": {"t": NEW_MODEL}}).model("t").llm.total_params
        )
        assert model.llm.kv_dtype.name == "fp8"


class TestPrices:
    def test_add_and_replace(self) -> None:
        overlay = {
            "prices": [
                {
                    "cloud": "mine",
                    "region": "basement",
                    "node": "rtx 3090:2",
                    "usd_per_hour": "$0.35/h",
                    "spot": "$2.40/day",
                },
                {
                    "cloud": "aws",
                    "region": "us-east-2",
                    "node": "L4",
                    "instance": "g6.xlarge",
                    "usd_per_hour": "$0.5/h",
                },
            ]
        }
        prices = apply_overlay(DEFAULT, overlay).prices
        assert len(prices) == len(DEFAULT.prices) + 1
        (own,) = prices.query(region="basement")
        spot = own.spot_usd_per_hour
        assert spot is not None
        assert spot.median == pytest.approx(0.1)
        assert own == Price("mine", "basement", "RTX3090:2", None, 0.35, spot)
        cheapest = prices.cheapest("us-east-2", "L4:1")
        assert cheapest is not None
        assert cheapest.usd_per_hour == 0.5

    def test_take_a_machine_off_the_market(self) -> None:
        row = {"cloud": "aws", "region": "us-east-2", "node": "L4:1", "instance": "g6.xlarge"}
        prices = apply_overlay(DEFAULT, {"prices": [row | {"offered": False}]}).prices
        cheapest = prices.cheapest("us-east-2", "L4:1")
        assert cheapest is not None
        assert cheapest.instance != "g6.xlarge"


class TestLinks:
    def test_an_interface_holds_in_every_region(self) -> None:
        links = apply_overlay(DEFAULT, {"links": {"nics": {"H100:1": "7Gbit/s"}}}).links
        for region in ("us-central1", "us-east-2"):
            assert links.nic_bytes_per_s(region, "H100:1") == 7e9 / 8
        assert links.nic_bytes_per_s("us-central1", "H100:2") == 50e9 / 8
        assert "nics.gcp.H100:1" not in links.facts
        assert "nics.gcp.H100:2" in links.facts

    def test_groups_of_gpus_inside_machines(self) -> None:
        groups = {"l40s:8": {"gpus": 4, "bandwidth": "20GB/s", "latency": "9us"}}
        links = apply_overlay(DEFAULT, {"links": {"groups": groups}}).links
        assert links.groups["L40S:8"].gpus == 4
        assert links.groups["L40S:8"].link.time_s(20e9) == pytest.approx(1.000009)

    def test_own_network(self) -> None:
        overlay = {
            "links": {
                "in_region": {"bandwidth": "25Gbit/s", "latency": "100us"},
                "regions": [
                    {"between": ["a", "b"], "bandwidth": "1Gbps", "latency": "10ms"},
                    {"between": ["b", "c"], "latency": "20ms", "one_way": True},
                ],
                "nodes": [{"between": ["n1", "n2"], "bandwidth": "10GB/s", "latency": "5us"}],
                "nics": {"l4:8": "50Gbit/s"},
            }
        }
        links = apply_overlay(DEFAULT, overlay).links
        assert links.between("r", "r", "H100:8", "H100:8").bandwidth_bytes_per_s == 25e9 / 8
        assert links.between("r", "r", "L4:8", "L4:8").bandwidth_bytes_per_s == 50e9 / 8
        assert not links.region_nics
        assert links.between("b", "a").latency_s == 0.01
        assert links.between("b", "c").latency_s == 0.02
        assert links.between("b", "c").bandwidth_bytes_per_s == 12.5e6
        assert links.between("c", "b").latency_s == 0.05
        assert links.between("r", "r", "n2", "n1").latency_s == pytest.approx(5e-6)


GPU_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "fp16_tflops": st.integers(1, 5000),
        "fp8_tflops": st.none() | st.integers(1, 5000),
        "memory": st.integers(1, 500).map(lambda n: f"{n}GB"),
        "bandwidth": st.integers(1, 9000).map(lambda n: f"{n}GB/s"),
        "sms": st.integers(1, 300),
    },
)
OVERLAYS = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.dictionaries(st.sampled_from(["L4", "H100", "T4"]), GPU_CHANGES, max_size=3),
        "models": st.dictionaries(
            st.sampled_from(["llama-3-70b", "qwen3-32b"]),
            st.fixed_dictionaries(
                {},
                optional={
                    "max_context": st.integers(1, 10**6),
                    "weights": st.sampled_from(["fp8", "int4"]),
                    "kv_dtype": st.sampled_from(["fp8", "bf16"]),
                },
            ),
            max_size=2,
        ),
        "prices": st.lists(
            st.fixed_dictionaries(
                {
                    "cloud": st.just("c"),
                    "region": st.sampled_from(["r", "s"]),
                    "node": st.sampled_from(["L4:1", "H100:8"]),
                    "usd_per_hour": st.floats(0, 100),
                }
            ),
            max_size=3,
        ),
    },
)


def merged(first: dict[str, object], second: dict[str, object]) -> dict[str, object]:
    """One overlay that says what two say, the second winning field by field."""
    out: dict[str, object] = dict(first)
    for section, entries in second.items():
        before = out.get(section)
        if isinstance(entries, list):
            out[section] = [*(before if isinstance(before, list) else []), *entries]
        elif isinstance(entries, dict) and isinstance(before, dict):
            out[section] = {
                key: {**before.get(key, {}), **entries.get(key, {})}
                for key in [*before, *(k for k in entries if k not in before)]
            }
        else:
            out[section] = entries
    return out


@examples(20)
@given(OVERLAYS, OVERLAYS)
def test_a_later_overlay_wins_field_by_field(
    first: dict[str, object], second: dict[str, object]
) -> None:
    assert apply_overlay(apply_overlay(DEFAULT, first), second) == apply_overlay(
        DEFAULT, merged(first, second)
    )


@examples(15)
@given(OVERLAYS)
def test_an_overlay_twice_is_an_overlay_once(overlay: dict[str, object]) -> None:
    once = apply_overlay(DEFAULT, overlay)
    assert apply_overlay(once, overlay) == once


BAD = [
    # overlay, line, field, message, fix
    ("gpu:\n  L4: {}", 1, "gpu", "no such field", "'gpus'"),
    ("gpus:\n  L4:\n    memry: 24GB", 3, "gpus.L4.memry", "no such field", "'memory'"),
    # Users write what datasheets say; the fix must not lead to the next error.
    ("gpus:\n  L4:\n    fp16: 25.5", 3, "gpus.L4.fp16", "no such", "'fp16_tflops: 25.5'"),
    ("gpus:\n  L4:\n    tflops: 25", 3, "gpus.L4.tflops", "no such", "'fp16_tflops: 25.5'"),
    ("gpus:\n  L4:\n    fp8: 60", 3, "gpus.L4.fp8", "no such", "'fp8_tflops: 60.4'"),
    ("gpus:\n  L4:\n    vram: 12GB", 3, "gpus.L4.vram", "no such", "'memory: 12GB'"),
    ("gpus:\n  L4:\n    memory_mib: 24", 3, "gpus.L4.memory_mib", "no such", "'memory: 12GB'"),
    ("gpus:\n  L4:\n    l2_mib: 4", 3, "gpus.L4.l2_mib", "no such", "'l2: 3MiB'"),
    ("gpus:\n  L4:\n    power: 72", 3, "gpus.L4.power", "no such", "'tdp_w: 170'"),
    ("gpus:\n  L4:\n    price: 1", 3, "gpus.L4.price", "no such", "known here: source"),
    ("gpus:\n  L4:\n    bf16: 25.5", 3, "gpus.L4.bf16", "boolean", "'bf16: true'"),
    (
        "gpus:\n  L4:\n    compute_capability: 8.9",
        3,
        "gpus.L4.compute_capability",
        "text is needed",
        "'compute_capability: \"8.6\"'",
    ),
    (
        "gpus:\n  L4:\n    compute_capability: sm_89",
        3,
        "gpus.L4.compute_capability",
        "a number, gfx... of ROCm, metal3, or vulkan",
        "'compute_capability: \"8.6\"'",
    ),
    (
        "gpus:\n  RTX3070:\n    fp16_tflops: 40.6",
        2,
        "gpus.RTX3070",
        "needs architecture",
        "'like: RTX3060'",
    ),
    (
        "gpus:\n  RTX3070:\n    like: RTX3080\n    memory: 8GB",
        3,
        "gpus.RTX3070.like",
        "unknown gpu 'RTX3080'",
        "write 'like: RTX3060'",
    ),
    (
        "gpus:\n  L4:\n    zzz: 1",
        3,
        "gpus.L4.zzz",
        "no such field",
        "known here: source, confidence",
    ),
    ("gpus:\n  L4:\n    memory: 24", 3, "gpus.L4.memory", "100000000, got 24", "its unit"),
    ("gpus:\n  L4:\n    memory: '24'", 3, "gpus.L4.memory", "no unit", "24GB"),
    ("gpus:\n  L4:\n    memory: -24GB", 3, "gpus.L4.memory", "negative", "zero or more"),
    ("gpus:\n  L4:\n    memory: 0GB", 3, "gpus.L4.memory", "greater than", "its unit"),
    ("gpus:\n  L4:\n    memory: 24GB/s", 3, "gpus.L4.memory", "unknown unit", "24GB"),
    ("gpus:\n  L4:\n    memory: .nan", 3, "gpus.L4.memory", "not a finite number", None),
    ("gpus:\n  L4:\n    fp16_tflops: .nan", 3, "gpus.L4.fp16_tflops", "finite number", "number"),
    (
        "gpus:\n  L4:\n    fp16_tflops: 121TF",
        3,
        "gpus.L4.fp16_tflops",
        "valid number",
        "plain number",
    ),
    ("gpus:\n  L4:\n    fp16_tflops: -1", 3, "gpus.L4.fp16_tflops", "greater than 0", "number"),
    ("gpus:\n  L4:\n    sms: true", 3, "gpus.L4.sms", "valid integer", "plain number"),
    ("gpus:\n  L4:\n    sms: 1.5", 3, "gpus.L4.sms", "valid integer", "plain number"),
    ("gpus:\n  L4:\n    sms: null", 3, "gpus.L4.sms", "cannot be null", "leave it out"),
    ("gpus:\n  L4:\n    confidence: sure", 3, "gpus.L4.confidence", "'high', 'medium'", None),
    ("gpus:\n  L4: 24GB", 2, "gpus.L4", "a mapping is needed", "write a mapping"),
    ("gpus: [L4]", 1, "gpus", "a mapping is needed", "write a mapping"),
    ("gpus:\n  'a b:c':\n    like: L4", 2, "gpus.a b:c", "not a node type", None),
    ("gpus:\n  X1:\n    memory: 24GB", 2, "gpus.X1", "a new GPU type needs", "like: L40S"),
    ("gpus:\n  X1:\n    like: H10", 3, "gpus.X1.like", "did you mean H100", "known name"),
    ("gpus:\n  L4: {}\n  L4: {}", 3, None, "given twice", None),
    ("gpus: {", None, None, "not valid YAML", None),
    ("- gpus", 1, None, "mapping of sections", "gpus"),
    ("interconnects:\n  x: {}", 2, "interconnects.x", "needs its kind", "kind: nvlink"),
    (
        "interconnects:\n  x:\n    kind: pcie\n    allreduce:\n      2: {alpha_us: 1}",
        5,
        "interconnects.x.allreduce.2.bus_bandwidth",
        "required",
        "add 'bus_bandwidth'",
    ),
    (
        "interconnects:\n  pcie4:\n    allreduce:\n      1: {alpha_us: 1, bus_bandwidth: 1GB/s}",
        4,
        "interconnects.pcie4.allreduce.1",
        "two GPUs or more",
        None,
    ),
    ("nodes:\n  L4:2:\n    interconnect: nvlnk4", 3, "nodes.L4:2.interconnect", "nvlink4", "known"),
    ("nodes:\n  L4:x:\n    interconnect: pcie4", 2, "nodes.L4:x", "not a node type", "L40S:2"),
    ("models:\n  tiny:\n    layers: 2", 2, "models.tiny", "a new model needs hidden", "hf_config"),
    ("models:\n  no good:\n    layers: 2", 2, "models.no good", "not a valid name", None),
    ("models:\n  phi-4:\n    kv_heads: 3", 3, "models.phi-4.kv_heads", "40 heads cannot", None),
    ("models:\n  phi-4:\n    weights: fp7", 3, "models.phi-4.weights", "did you mean fp8", None),
    ("models:\n  phi-4:\n    windows: [1]", 3, "models.phi-4.windows", "1 windows for 40", None),
    ("models:\n  x:\n    like: phi\n", 3, "models.x.like", "unknown model 'phi'", None),
    ("models:\n  x:\n    like: a\n    hf_config: b", 2, "models.x", "not both", "remove one"),
    ("models:\n  x:\n    hf_config: nowhere", None, None, "cannot read the file", None),
    ("models:\n  qwen-image:\n    layers: 3", 2, "models.qwen-image", "has no llm", None),
    ("models:\n  phi-4:\n    moe: {experts: 4}", 3, "models.phi-4.moe", "need top_k", "add"),
    (
        "models:\n  gpt-oss-20b:\n    layers: 12",
        2,
        "models.gpt-oss-20b.windows",
        "24 windows",
        None,
    ),
    ("prices:\n  - {cloud: a, region: b}", 2, "prices.0.node", "required", "add 'node'"),
    (
        "prices:\n  - {cloud: a, region: b, node: L4}",
        2,
        "prices.0",
        "needs a price",
        "usd_per_hour",
    ),
    (
        "prices:\n  - cloud: a\n    region: b\n    node: L4\n    usd_per_hour: 1.2 EUR/h",
        5,
        "prices.0.usd_per_hour",
        "unknown unit",
        "$1.86/h",
    ),
    ("prices:\n  - {cloud: a, region: b, node: Z9, spot: 1}", 2, "prices.0.node", "gpu 'Z9'", None),
    (
        "links:\n  in_region:\n    bandwidth: 0bit/s",
        3,
        "links.in_region.bandwidth",
        "greater",
        None,
    ),
    ("links:\n  regions:\n    - {between: [a]}", 3, "links.regions.0.between", "at least 2", None),
    ("links:\n  nodes:\n    - {between: [a, b]}", 3, "links.nodes.0", "needs bandwidth", None),
    ("links:\n  nics:\n    Q5:8: 1Gbit/s", 3, "links.nics.Q5:8", "unknown gpu", None),
    (
        "links:\n  groups:\n    L40S:8: {gpus: 3, bandwidth: 20GB/s, latency: 9us}",
        3,
        "links.groups.L40S:8",
        "no groups of 3",
        None,
    ),
]


@pytest.mark.parametrize(("text", "line", "field", "message", "fix"), BAD)
def test_errors_name_file_line_field_and_fix(
    tmp_path: Path,
    text: str,
    line: int | None,
    field: str | None,
    message: str,
    fix: str | None,
) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        apply_overlay(DEFAULT, path)
    error = caught.value
    assert message in error.message
    assert error.field == field
    if line is not None:
        assert (error.path, error.line) == (str(path), line)
    if fix is not None:
        assert fix in (error.hint or "")
    assert "\n" not in str(error)


def test_a_key_that_would_break_the_line() -> None:
    with pytest.raises(InputError) as caught:
        apply_overlay(DEFAULT, {"gpus": {"a\nb": None}})
    assert str(caught.value).startswith(r"gpus.'a\nb': a mapping is needed")


def test_a_file_too_large(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_text("#" * (16 * 2**20 + 1))
    with pytest.raises(InputError, match="larger than"):
        apply_overlay(DEFAULT, path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
SECTIONS = st.sampled_from(["gpus", "interconnects", "nodes", "models", "prices", "links"])


@examples(75)
@given(
    section=SECTIONS,
    name=st.sampled_from(["L4", "L4:2", "pcie4", "phi-4", "in_region", "x"]),
    field=st.sampled_from(
        ["memory", "like", "moe", "allreduce", "interconnect", "layers", "source"]
    ),
    junk=JUNK,
)
def test_junk_is_refused_in_one_line(section: str, name: str, field: str, junk: object) -> None:
    for overlay in ({section: junk}, {section: {name: junk}}, {section: {name: {field: junk}}}):
        try:
            result: Catalog | AtollError = apply_overlay(DEFAULT, overlay)
        except AtollError as error:
            result = error
        assert "\n" not in str(result)


class TestEnvironment:
    def test_variable_then_options(self, tmp_path: Path) -> None:
        first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
        first.write_text("gpus: {L4: {sms: 1, tdp_w: 1}}")
        second.write_text("gpus: {L4: {sms: 2}}")
        catalog = load_catalog([second], environ={"ATOLL_CATALOG": str(first)})
        assert (catalog.gpu("L4").sms, catalog.gpu("L4").tdp_w) == (2, 1)

    def test_no_variable(self) -> None:
        assert load_catalog(environ={}) is DEFAULT
        assert load_catalog(environ={"ATOLL_CATALOG": "  "}) is DEFAULT

    def test_a_variable_that_names_nothing_says_so(self) -> None:
        with pytest.raises(InputError, match="ATOLL_CATALOG names this file"):
            load_catalog(environ={"ATOLL_CATALOG": "nowhere.yaml"})

    def test_the_process_environment_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ATOLL_CATALOG", "nowhere.yaml")
        with pytest.raises(InputError, match=r"nowhere\.yaml"):
            load_catalog()


def test_a_worked_overlay(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        dedent(
            """\
            gpus:
              L40: {like: L40S, fp16_tflops: 181, fp8_tflops: 362, tdp_w: 300, source: NVIDIA L40 datasheet}
            nodes:
              L40:2: {interconnect: pcie4}
            models:
              llama-3.3-70b: {like: llama-3-70b, max_context: 131072}
            prices:
              - {cloud: lab, region: cellar, node: "L40:2", usd_per_hour: 0}
            links:
              in_region: {bandwidth: 100Gbit/s, latency: 20us}
            """
        )
    )
    catalog = apply_overlay(DEFAULT, path)
    cheapest = catalog.prices.cheapest("cellar", "L40:2")
    assert cheapest is not None
    assert cheapest.cost() == 0
    assert catalog.model("llama-3.3-70b@fp8").llm.max_context == 131072
    assert catalog.gpu("L40").facts["fp16_tflops"].source == "NVIDIA L40 datasheet"
