from __future__ import annotations

import csv
import pickle
from collections import Counter
from pathlib import Path

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.gpus import GpuType, default_gpus
from atoll.catalog.name_lookup import fold
from atoll.catalog.nodes import AllReduceCost, Interconnect, NodeType
from atoll.catalog.overlay import apply_overlay
from atoll.catalog.relatives import find_relatives
from atoll.catalog.resources import data_yaml, section
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.files import parse_yaml
from atoll.engines.engine import platform_of
from atoll.perf.batch import Batch
from atoll.perf.constants import OpClass, Tag, default_constants
from atoll.perf.step import analytic, step_seconds

REFERENCE = Path(__file__).resolve().parents[3] / "shared/data/reference/gpu_specs.csv"
REPORTED_MIB = {
    "H100": 81559,
    "H200": 143771,
    "B200": 183359,
    "GH200": 97871,
    "A100-80": 81920,
    "A100-40": 40960,
    "L40S": 46068,
    "L4": 23034,
    "A10G": 23028,
    "T4": 15360,
    "V100-16": 16160,
    "V100-32": 32510,
    "RTX3090": 24576,
    "RTX4090": 24564,
    "A6000": 49140,
    "A40": 46068,
    "RTX3060": 12288,
    "RTX4060": 8188,
    "RTX4060Ti-16": 16380,
    "RTX4070Ti": 12282,
    "RTX4080": 16376,
    "RTX5080": 16303,
    "RTX5090": 32607,
    "RTXPRO6000": 97887,
    "L20": 46068,
    "H20": 97871,
    "B300": 275040,
    "GB200": 189471,
    "H100-PCIe": 81559,
    "H100-NVL": 95830,
    "A100-80-PCIe": 81920,
    "A100-40-PCIe": 40960,
    "A30": 24576,
    "A10": 23028,
    "L40": 46068,
    "MI300X": 192 * 1024 - 16,
    "MI325X": 256 * 1024 - 16,
    "MI250": 64 * 1024 - 16,
    "GB10": 122570,
    # Three quarters of the memory sold, two thirds of 32 GB.
    "M2-Max-96": 96 * 768,
    "M2-Max-64": 64 * 768,
    "M2-Max-32": 21845,
    "M2-Ultra-192": 192 * 768,
    "M2-Ultra-128": 128 * 768,
    "M2-Ultra-64": 64 * 768,
    "M3-Max-128": 128 * 768,
    "M3-Max-96": 96 * 768,
    "M3-Max-64": 64 * 768,
    "M3-Max-48": 48 * 768,
    "M3-Max-36": 36 * 768,
    "M3-Ultra-512": 512 * 768,
    "M3-Ultra-256": 256 * 768,
    "M3-Ultra-96": 96 * 768,
    "M4-Max-128": 128 * 768,
    "M4-Max-64": 64 * 768,
    "M4-Max-48": 48 * 768,
    "M4-Max-36": 36 * 768,
}
"""Memory of every GPU that ships, as drivers report it: a second look at what the catalog says."""
NAMES = list(REPORTED_MIB)
APPLE = {name for name in NAMES if name.startswith("M") and not name.startswith("MI")}


def test_which_gpus_ship() -> None:
    assert list(default_gpus()) == NAMES


def test_what_stands_in_for_a_gpu_is_measured_more_than_it() -> None:
    fitted = set(default_constants().names())
    for name, gpu in default_gpus().items():
        assert (gpu.like is None) == (name in fitted)
        if gpu.like is not None:
            assert gpu.like in fitted
            proxy = default_constants().for_gpu(gpu).op(OpClass.GEMM)
            lent = default_constants().gpu(gpu.like).op(OpClass.GEMM)
            assert (proxy.tag, proxy.e_b) == (Tag.PROXY, lent.e_b)
            assert proxy.e_f == pytest.approx(lent.e_f * gpu.compute_share)


def test_a_smaller_share_of_the_peak_is_said() -> None:
    mi300x = default_constants().for_gpu(default_gpus()["MI300X"]).op(OpClass.GEMM)
    assert mi300x.source == "H100, compute share x 0.65"


def test_unified_memory_and_engines_are_noted() -> None:
    for name in (*APPLE, "GB10"):
        note = default_gpus()[name].note
        assert note is not None
        assert note.startswith("unified memory")
    for name in APPLE:
        assert "llama.cpp" in (default_gpus()[name].note or "")


# Tokens per second of LLaMA 7B in 16 bits, prompts of 512 tokens and one sequence: the table of Apple silicon
# that llama.cpp publishes (discussion 4167), for the largest GPU of each chip.
LLAMA_CPP = {
    "M2-Max-96": (755.67, 24.65),
    "M2-Ultra-192": (1401.85, 41.02),
    "M3-Max-128": (779.17, 25.09),
    "M3-Ultra-512": (1538.34, 39.78),
    "M4-Max-128": (922.83, 31.64),
}


@pytest.mark.parametrize("name", sorted(LLAMA_CPP))
def test_the_time_model_of_macs_is_near_what_llama_cpp_publishes(name: str) -> None:
    llama = TransformerSpec(32, 4096, 32, 32, 128, 11008, 32000, 4096)
    step = analytic(llama, Catalog.default().node(f"{name}:1"), engine="none")
    prompt, token = LLAMA_CPP[name]
    assert 512 / step_seconds(step, Batch.prefill(512), 0, 32) == pytest.approx(prompt, rel=0.15)
    assert 1 / step_seconds(step, Batch.decode(1, 64), 0, 32) == pytest.approx(token, rel=0.15)


def test_the_numbers_of_the_coral_table() -> None:
    expected = {
        "H100": (989, 3350),
        "A100-80": (312, 2039),
        "L40S": (362, 864),
        "L4": (121, 300),
        "A10G": (70, 600),
    }
    for name, (tflops, bandwidth_gbs) in expected.items():
        gpu = Catalog.default().gpu(name)
        assert gpu.fp16_tflops == tflops
        assert gpu.bandwidth_bytes_per_s == bandwidth_gbs * 1e9


def test_memory_is_what_the_driver_reports() -> None:
    for name, gpu in default_gpus().items():
        assert gpu.memory_bytes == REPORTED_MIB[name] * 2**20


def test_fp8_only_where_the_hardware_has_it() -> None:
    with_fp8 = {name for name, gpu in default_gpus().items() if gpu.fp8_tflops is not None}
    older = {"A100-80", "A100-40", "A10G", "T4", "V100-16", "V100-32", "RTX3090", "A6000"}
    older |= {"A100-80-PCIe", "A100-40-PCIe", "A30", "A10", "A40", "RTX3060", "MI250"}
    assert with_fp8 == set(NAMES) - older - APPLE
    assert default_gpus()["A100-80"].fp8_flops is None
    assert default_gpus()["H100"].fp8_flops == 1979e12
    assert {n for n, gpu in default_gpus().items() if not gpu.bf16} == {
        "T4",
        "V100-16",
        "V100-32",
    }


def test_every_value_has_a_source_and_a_confidence() -> None:
    for gpu in default_gpus().values():
        for key in (
            "fp16_tflops",
            "memory_bytes",
            "bandwidth_bytes_per_s",
            "tdp_w",
            "sms",
            "l2_bytes",
        ):
            fact = gpu.facts[key]
            assert fact.value == getattr(gpu, key)
            assert len(fact.source) > 5
            assert fact.confidence in ("high", "medium", "low")


def test_against_the_reference_file() -> None:
    if not REFERENCE.exists():
        pytest.skip("needs ../shared/data/reference/gpu_specs.csv beside the repository")
    rows = list(csv.DictReader(REFERENCE.read_text().splitlines()))
    assert len(rows) == 14
    for row in rows:
        gpu = Catalog.default().gpu(row["gpu"])
        assert gpu.fp16_tflops == float(row["fp16_dense_tflops"])
        fp8 = row["fp8_dense_tflops"]
        assert gpu.fp8_tflops == (float(fp8) if fp8 else None)
        assert gpu.bf16 == (row["bf16"] == "yes")
        # Sold by the GB, which makers round down from what the driver finds.
        assert 1.0 <= gpu.memory_bytes / (float(row["mem_gb"]) * 1e9) < 1.08
        assert gpu.bandwidth_bytes_per_s == float(row["mem_bw_gbs"]) * 1e9
        assert gpu.tdp_w == float(row["tdp_w"])
        assert gpu.compute_capability.replace(".", "") == row["sm"]
        assert gpu.architecture == row["arch"]
        assert gpu.pcie_bytes_per_s == float(row["pcie_gbs_per_dir"]) * 1e9
        both_ways = float(row["nvlink_gbs_per_gpu_bidir"])
        assert (gpu.nvlink_bytes_per_s or 0) * 2 == both_ways * 1e9


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100", "H100"),
        ("H100-SXM5", "H100"),
        ("A100", "A100-80"),
        ("a100-40gb", "A100-40"),
        ("rtx 3090", "RTX3090"),
        ("RTX-A6000", "A6000"),
        ("V100", "V100-16"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("GH200-96GB", "GH200"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("rtx pro 6000", "RTXPRO6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000"),
        ("DGX Spark", "GB10"),
        ("Apple M3 Ultra", "M3-Ultra-512"),
        ("M2-Max", "M2-Max-96"),
        ("m3 max", "M3-Max-128"),
        ("Apple M4 Max 64GB", "M4-Max-64"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("rtx 4060 ti 16gb", "RTX4060Ti-16"),
        ("NVIDIA A40", "A40"),
        ("AMD Instinct MI250X/MI250", "MI250"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_people_use(spelling: str, name: str) -> None:
    assert Catalog.default().gpu(spelling).name == name


def test_unknown_gpu_suggests() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown gpu 'H10'; did you mean H100"):
        Catalog.default().gpu("H10")


@pytest.mark.parametrize(
    ("name", "called"), [("Arc B580", "Arc-B580"), ("W7900", "W7900"), ("a/b", "MY-GPU")]
)
def test_an_unknown_gpu_shows_the_overlay_that_adds_it(name: str, called: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Catalog.default().gpu(name)
    line = str(caught.value)
    assert "\n" not in line
    overlay = line[line.index("'gpus:") + 1 : line.rindex("'")]
    figures = "like: L40S, memory: 48.3GB, bandwidth: 864GB/s, fp16_tflops: 362"
    assert overlay == f"gpus: {{{called}: {{{figures}}}}}"
    data = parse_yaml(overlay, path="overlay").data
    assert isinstance(data, dict)
    assert apply_overlay(Catalog.default(), data).gpu(called).like == "L40S"


@pytest.mark.parametrize(
    ("name", "nearest", "memory"),
    [
        ("RTX3070", "RTX3060, RTX4060", "8.59GB"),
        ("NVIDIA GeForce RTX 3080", "RTX3060, A10G", "10.7GB"),
        ("RTX5070 Ti", "RTX5080, RTX5090", "17.2GB"),
        ("RTX4060Ti", "RTX4060, RTX4070Ti", "8.59GB"),
        ("V100-PCIE", "V100-16, V100-32", "16.9GB"),
        ("V100S-32GB", "V100-32, V100-16", "34.4GB"),
        ("A100-PCIE-64GB", "A100-80, A100-80-PCIe", "68.7GB"),
        ("P100", "V100-16, V100-32", "17.2GB"),
        ("Apple M1 Max", "M2-Max-64, M2-Ultra-64", "51.5GB"),
        ("M2-Max-24", "M2-Max-32, M3-Max-36", "19.3GB"),
        ("MI210", "MI250, MI300X", "68.7GB"),
    ],
)
def test_an_unknown_gpu_offers_the_nearest_by_memory_and_generation(
    name: str, nearest: str, memory: str
) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Catalog.default().gpu(name)
    line = str(caught.value)
    assert f"nearest to it: {nearest}; known: " in line
    first = Catalog.default().gpu(nearest.split(",", maxsplit=1)[0])
    assert f"like: {first.name}, memory: {memory}, bandwidth: " in line


def test_parts_that_are_only_hinted_at_are_not_in_the_catalog() -> None:
    known = {fold(name) for gpu in default_gpus().values() for name in (gpu.name, *gpu.aliases)}
    unlisted = section(data_yaml("gpus.yaml"), "unlisted")
    assert not known & {fold(name) for name in unlisted}
    for name in unlisted:
        assert find_relatives(name, default_gpus()).gpus, name


def test_engines_can_tell_the_platform_of_every_gpu() -> None:
    platforms = {name: platform_of(gpu) for name, gpu in default_gpus().items()}
    assert platforms["V100-32"] == ("cuda", 7.0)
    assert platforms["RTX5080"] == ("cuda", 12.0)
    assert (platforms["MI250"], platforms["MI300X"]) == (("rocm", 9.0), ("rocm", 9.4))
    assert {name for name, (platform, _) in platforms.items() if platform == "metal"} == APPLE


def test_the_overlay_is_shown_for_a_node_and_in_a_file() -> None:
    with pytest.raises(UnknownNameError, match="bandwidth: 864GB/s"):
        Catalog.default().node("W7900:2")
    with pytest.raises(InputError, match=r"prices.0.node: unknown gpu.*like: L40S"):
        apply_overlay(
            Catalog.default(),
            {"prices": [{"cloud": "a", "region": "b", "node": "W7900:2", "usd_per_hour": 1}]},
        )


class TestNodes:
    def test_default_node_types(self) -> None:
        nodes = Catalog.default().nodes
        # Four sizes but for one tray of GB200, small GeForce cards and what comes alone.
        small = ("RTX3060", "RTX4060", "RTX4060Ti-16", "RTX4070Ti", "RTX4080", "RTX5080")
        fewer = dict.fromkeys(("GB200", *small), 3)
        fewer |= dict.fromkeys(("GH200", "GB10", *APPLE), 1)
        assert Counter(node.gpu.name for node in nodes.values()) == {
            name: fewer.get(name, 4) for name in NAMES
        }
        for node in nodes.values():
            if node.count > 1:
                assert node.interconnect.allreduce_for(node.count).bus_bandwidth_bytes_per_s > 1e9

    def test_a_node_is_its_gpus_together(self) -> None:
        node = Catalog.default().node("l40s:2")
        assert node.id == "L40S:2"
        assert node.memory_bytes == 2 * 46068 * 2**20
        assert node.bandwidth_bytes_per_s == 2 * 864e9
        assert node.fp16_tflops == 724
        assert node.fp8_tflops == 1466
        assert node.tdp_w == 700
        assert node.interconnect.kind == "pcie"
        assert Catalog.default().node("A100:2").fp8_tflops is None

    def test_one_gpu_is_joined_by_nothing(self) -> None:
        node = Catalog.default().node("H100")
        assert (node.id, node.interconnect.kind) == ("H100:1", "none")
        with pytest.raises(InputError, match="no all-reduce among 2 GPUs is known"):
            node.interconnect.allreduce_for(2)

    def test_a_count_nobody_lists_uses_the_next_larger_group(self) -> None:
        node = Catalog.default().node("L40S:3")
        assert node.interconnect.allreduce_for(3) == node.interconnect.allreduce[4]
        assert node.interconnect.allreduce_for(12) == node.interconnect.allreduce[8]

    @pytest.mark.parametrize("name", ["L40S:99", "GH200:2", "H10:2"])
    def test_unknown_nodes(self, name: str) -> None:
        with pytest.raises(UnknownNameError):
            Catalog.default().node(name)

    @pytest.mark.parametrize("name", ["L40S:0", "L40S:x", ":2", ""])
    def test_malformed_nodes(self, name: str) -> None:
        with pytest.raises(InputError):
            Catalog.default().node(name)

    def test_allreduce_time(self) -> None:
        cost = AllReduceCost(alpha_us=10.0, bus_bandwidth_bytes_per_s=100e9)
        assert cost.time_s(0, 8) == pytest.approx(10e-6)
        assert cost.time_s(100e6, 2) == pytest.approx(10e-6 + 1e-3)
        assert cost.time_s(100e6, 8) == pytest.approx(10e-6 + 1.75e-3)

    def test_hashable_and_picklable(self) -> None:
        nodes = Catalog.default().nodes
        assert len(set(nodes.values())) == len(nodes)
        assert pickle.loads(pickle.dumps(nodes)) == nodes

    def test_a_plain_dict_may_be_given(self) -> None:
        joint = Interconnect("pcie", 4, {2: AllReduceCost(5.0, 20e9)})
        gpu: GpuType = Catalog.default().gpu("L4")
        node = NodeType(gpu, 2, joint)
        assert node == NodeType(gpu, 2, Interconnect("pcie", 4, {2: AllReduceCost(5.0, 20e9)}))
        assert hash(node) == hash(NodeType(gpu, 2, joint))
