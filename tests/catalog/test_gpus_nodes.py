from __future__ import annotations

import csv
import pickle
from pathlib import Path

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.gpus import GpuType, default_gpus
from atoll.catalog.nodes import AllReduceCost, Interconnect, NodeType
from atoll.core.errors import InputError, UnknownNameError

REFERENCE = Path(__file__).resolve().parents[3] / "shared/data/reference/gpu_specs.csv"
NAMES = [
    "H100",
    "H200",
    "B200",
    "GH200",
    "A100-80",
    "A100-40",
    "L40S",
    "L4",
    "A10G",
    "T4",
    "V100-16",
    "RTX3090",
    "RTX4090",
    "A6000",
]


def test_the_fourteen() -> None:
    assert list(default_gpus()) == NAMES


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
    reported_mib = {
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
        "RTX3090": 24576,
        "RTX4090": 24564,
        "A6000": 49140,
    }
    for name, gpu in default_gpus().items():
        assert gpu.memory_bytes == reported_mib[name] * 2**20


def test_fp8_only_where_the_hardware_has_it() -> None:
    with_fp8 = {name for name, gpu in default_gpus().items() if gpu.fp8_tflops is not None}
    assert with_fp8 == {"H100", "H200", "B200", "GH200", "L40S", "L4", "RTX4090"}
    assert default_gpus()["A100-80"].fp8_flops is None
    assert default_gpus()["H100"].fp8_flops == 1979e12
    assert {n for n, gpu in default_gpus().items() if not gpu.bf16} == {"T4", "V100-16"}


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
    ],
)
def test_names_people_use(spelling: str, name: str) -> None:
    assert Catalog.default().gpu(spelling).name == name


def test_unknown_gpu_suggests() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown gpu 'H10'; did you mean H100"):
        Catalog.default().gpu("H10")


class TestNodes:
    def test_default_node_types(self) -> None:
        nodes = Catalog.default().nodes
        assert len(nodes) == 13 * 4 + 1
        assert "GH200:2" not in nodes
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
