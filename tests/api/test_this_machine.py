"""`atoll init --here`: what the drivers of machines said, as captured, becomes a fleet file that loads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from atoll import Fleet
from atoll.api import this_machine
from atoll.api.this_machine import LocalGpu, LocalMachine, parse_system_profiler, write_fleet
from atoll.catalog.catalog import Catalog
from atoll.cli import main as cli
from atoll.core import machine as core_machine
from atoll.core.errors import InputError, UsageError
from atoll.fabric.registry.records import Gpu, Hardware
from atoll.plan.files.fleet_file import load_fleet
from atoll.plan.problem import Problem
from atoll.runtime.join import hardware

GIB = 1 << 30
Captured = pytest.CaptureFixture[str]

# system_profiler SPHardwareDataType SPDisplaysDataType -json, of a Mac Studio; ids left out.
MAC_STUDIO = json.dumps(
    {
        "SPDisplaysDataType": [
            {
                "_name": "Apple M2 Ultra",
                "spdisplays_mtlgpufamilysupport": "spdisplays_metal3",
                "spdisplays_ndrvs": [
                    {"_name": "Studio Display", "_spdisplays_pixels": "5120 x 2880"}
                ],
                "spdisplays_vendor": "sppci_vendor_Apple",
                "sppci_bus": "spdisplays_builtin",
                "sppci_cores": "76",
                "sppci_device_type": "spdisplays_gpu",
                "sppci_model": "Apple M2 Ultra",
            }
        ],
        "SPHardwareDataType": [
            {
                "_name": "hardware_overview",
                "activation_lock_status": "activation_lock_disabled",
                "boot_rom_version": "10151.101.3",
                "chip_type": "Apple M2 Ultra",
                "machine_model": "Mac14,14",
                "machine_name": "Mac Studio",
                "number_processors": "proc 24:16:8",
                "os_loader_version": "10151.101.3",
                "physical_memory": "192 GB",
            }
        ],
    }
)
# nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader,nounits
TWO_4090 = "NVIDIA GeForce RTX 4090, 24564, 550.54.14\nNVIDIA GeForce RTX 4090, 24564, 550.54.14\n"
SPARK = "NVIDIA GB10, [N/A], 580.95.05\n"
MIXED = "Tesla T4, 15360, 535.161.07\nQuadro P620, 2048, 535.161.07\n"


def mac(chip: str, memory: str, cores: str | None) -> str:
    display = {} if cores is None else {"sppci_cores": cores}
    return json.dumps(
        {
            "SPHardwareDataType": [{"chip_type": chip, "physical_memory": memory}],
            "SPDisplaysDataType": [display],
        }
    )


def load(tmp_path: Path, text: str) -> Problem:
    path = tmp_path / "fleet.yaml"
    path.write_text(text, encoding="utf-8")
    return load_fleet(path, environ={})


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Linux machine with 64 GiB whose NVML cannot be had."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atoll.api.this_machine.platform.system", lambda: "Linux")
    monkeypatch.setattr(hardware, "read_hardware", lambda _=None: Hardware(cpus=1))
    monkeypatch.setattr(core_machine, "memory_bytes", lambda: 64.0 * GIB)
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(
        core_machine, "find_gpus", lambda: (core_machine.parse_nvidia_smi(text), None)
    )


@pytest.mark.usefixtures("linux")
def test_the_fleet_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, TWO_4090)
    fleet = Fleet.here()
    assert [offer.node_type for offer in fleet.problem.offers] == ["RTX4090:2"]
    answer(monkeypatch, "NVIDIA Nobody Knows, 24564, 550.1\n")
    with pytest.raises(UsageError, match="does not know"):
        Fleet.here()


def test_nvidia_smi(linux: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    answer(monkeypatch, TWO_4090)
    assert cli.run(["init", "--here"]) == 0
    assert capsys.readouterr().err == "wrote fleet.yaml; next: atoll plan fleet.yaml\n"
    text = (linux / "fleet.yaml").read_text(encoding="utf-8")
    assert "2 x NVIDIA GeForce RTX 4090 (24.0 GiB each); 64 GiB RAM" in text
    assert "atoll plan fleet.yaml" in text
    problem = load_fleet("fleet.yaml", environ={})
    assert [(o.region, o.node_type, o.market) for o in problem.offers] == [
        ("here", "RTX4090:2", "owned")
    ]
    assert [(s.name, s.model) for s in problem.services] == [("chat", "qwen3-14b")]


def test_nvml_comes_first(linux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Hardware(gpus=(Gpu(type="H100", count=8, memory_bytes=81559 << 20),), cpus=1)
    monkeypatch.setattr(hardware, "read_hardware", lambda _=None: found)
    answer(monkeypatch, TWO_4090)
    assert cli.run(["init", "mine.yaml", "--here"]) == 0
    problem = load_fleet(linux / "mine.yaml", environ={})
    assert [o.node_type for o in problem.offers] == ["H100:8"]
    assert [s.model for s in problem.services] == ["qwen3-32b"]


def test_memory_that_the_driver_does_not_give_is_the_machines(
    linux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, SPARK)
    monkeypatch.setattr(core_machine, "memory_bytes", lambda: float(122570 << 20))
    assert cli.run(["init", "--here"]) == 0
    text = (linux / "fleet.yaml").read_text(encoding="utf-8")
    assert "catalog:" not in text
    assert "# GB10: unified memory: CPU and GPU share it" in text
    assert [o.node_type for o in load_fleet("fleet.yaml", environ={}).offers] == ["GB10:1"]


def test_a_gpu_that_nobody_knows_leaves_a_place_to_fill_in(
    linux: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    answer(monkeypatch, MIXED)
    assert cli.run(["init", "--here"]) == 0
    assert "the catalog does not know Quadro-P620: write its bandwidth over FILL-IN" in (
        capsys.readouterr().err
    )
    path = linux / "fleet.yaml"
    with pytest.raises(InputError, match=r"catalog.gpus.Quadro-P620.bandwidth: cannot read"):
        load_fleet(path, environ={})
    path.write_text(path.read_text("utf-8").replace("FILL-IN", "80GB/s"), encoding="utf-8")
    assert {o.node_type for o in load_fleet(path, environ={}).offers} == {"T4:1", "Quadro-P620:1"}


def test_no_gpu_is_said_with_what_to_do(
    linux: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(core_machine, "find_gpus", lambda: ((), "nvidia-smi not found"))
    assert cli.run(["init", "--here"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: no GPU was found on this machine (nvidia-smi not found")
    assert "write them under pool.owned" in err
    assert list(linux.iterdir()) == []


def test_a_file_is_not_replaced_unasked_and_not_for_nothing(
    linux: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (linux / "fleet.yaml").write_text("mine", encoding="utf-8")
    monkeypatch.setattr(
        this_machine, "read_machine", lambda: pytest.fail("asked before it is allowed")
    )
    assert cli.run(["init", "--here"]) == 2
    assert "fleet.yaml exists already" in capsys.readouterr().err
    assert cli.run(["init", "--here", "--example", "quickstart"]) == 2
    assert "give --here or --example, not both" in capsys.readouterr().err


class TestMac:
    def test_a_mac_studio(self, tmp_path: Path) -> None:
        machine = parse_system_profiler(MAC_STUDIO)
        assert machine == LocalMachine(
            (LocalGpu("Apple M2 Ultra", 1, 144 * GIB, 76),), 192 * GIB, "system_profiler"
        )
        text = write_fleet(machine, Catalog.default()).text
        assert "catalog:" not in text
        assert "llama.cpp" in text
        problem = load(tmp_path, text)
        assert [o.node_type for o in problem.offers] == ["M2-Ultra-192:1"]

    @pytest.mark.parametrize(
        ("chip", "memory", "cores", "name", "expected"),
        [
            ("Apple M2 Max", "32 GB", "30", "M2-Max-32", (21845 << 20, 13.6 * 30 / 38, 400e9)),
            ("Apple M3 Max", "36 GB", "30", "M3-Max-36", (27 * GIB, 14.2 * 30 / 40, 300e9)),
            ("Apple M4 Max", "128 GB", "40", "M4-Max-128", (96 * GIB, 18.4, 546e9)),
            ("Apple M4 Max", "36 GB", "32", "M4-Max-36", (27 * GIB, 18.4 * 32 / 40, 410e9)),
            ("Apple M3 Ultra", "256 GB", "60", "M3-Ultra-256", (192 * GIB, 28.4 * 0.75, 819e9)),
        ],
    )
    def test_smaller_ones(
        self, tmp_path: Path, chip: str, memory: str, cores: str, name: str,
        expected: tuple[float, float, float],
    ) -> None:  # fmt: skip
        text = write_fleet(parse_system_profiler(mac(chip, memory, cores)), Catalog.default()).text
        problem = load(tmp_path, text)
        assert [offer.node_type for offer in problem.offers] == [f"{name}:1"]
        # Only fewer cores than the size usually has are a difference to write down.
        assert ("catalog:" in text) == (name in ("M2-Max-32", "M3-Ultra-256"))
        gpu = problem.catalog().gpu(name)
        assert gpu.memory_bytes == pytest.approx(expected[0], rel=1e-3)
        assert gpu.fp16_tflops == pytest.approx(expected[1], rel=5e-3)
        assert gpu.bandwidth_bytes_per_s == expected[2]

    def test_a_chip_that_is_not_in_the_catalog(self) -> None:
        text = write_fleet(
            parse_system_profiler(mac("Apple M1", "8 GB", "8")), Catalog.default()
        ).text
        assert "Apple-M1:\n      like: M2-Max-32 " in text
        assert "bandwidth: FILL-IN" in text

    @pytest.mark.parametrize(
        "text",
        ["", "{}", "[]", '{"SPHardwareDataType": []}', '{"SPHardwareDataType": [{"cpu": 1}]}'],
    )
    def test_what_names_no_chip(self, text: str) -> None:
        with pytest.raises(UsageError, match="names no Apple chip"):
            parse_system_profiler(text)

    @pytest.mark.parametrize("memory", ["", "a lot", "16 MB", "x GB"])
    def test_memory_in_another_form(self, memory: str) -> None:
        with pytest.raises(UsageError, match="system_profiler gives the memory as"):
            parse_system_profiler(mac("Apple M2 Max", memory, None))

    def test_the_command_is_asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[list[str]] = []

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            asked.append(command)
            return subprocess.CompletedProcess(command, 0, MAC_STUDIO, "")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("atoll.api.this_machine.platform.system", lambda: "Darwin")
        monkeypatch.setattr("atoll.api.this_machine.shutil.which", lambda name: f"/usr/sbin/{name}")
        monkeypatch.setattr("atoll.api.this_machine.subprocess.run", run)
        assert cli.run(["init", "--here"]) == 0
        parts = ["SPHardwareDataType", "SPDisplaysDataType", "-json"]
        assert asked == [["/usr/sbin/system_profiler", *parts]]
        assert '"M2-Ultra-192:1": 1' in (tmp_path / "fleet.yaml").read_text(encoding="utf-8")


def test_no_line_of_the_file_is_long(tmp_path: Path) -> None:
    machine = LocalMachine(
        (LocalGpu("Apple M2 Ultra", 1, 144 * GIB, 76), LocalGpu("MI300X", 8, 196592 << 20)),
        None,
        "a test",
    )
    text = write_fleet(machine, Catalog.default()).text
    assert max(map(len, text.splitlines())) <= 110
    assert len(load(tmp_path, text).offers) == 2
