from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from atoll import __version__
from atoll.cli import doctor
from atoll.cli.main import run
from atoll.core import machine

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# Extras for people who work on Atoll; the doctor is for those who use it.
DEVELOPERS = {"dev", "docs", "notebook"}


def package_name(requirement: str) -> str:
    for stop in "<>=!~[; ":
        requirement = requirement.partition(stop)[0]
    return requirement.lower()


def test_tables_agree_with_the_project_file() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert sorted(doctor.REQUIRED) == sorted(map(package_name, project["dependencies"]))
    declared = {
        name: sorted(map(package_name, requirements))
        for name, requirements in project["optional-dependencies"].items()
        if name not in DEVELOPERS
    }
    assert {extra.name: sorted(extra.packages) for extra in doctor.EXTRAS} == declared


def test_version_agrees_with_the_project_file() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert __version__ == project["version"]


@pytest.fixture(autouse=True)
def no_gpu_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own GPUs must not decide what these tests see."""
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_a_sound_installation_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["gpus"] == []
    assert {package["name"] for package in report["required"]} == set(doctor.REQUIRED)
    assert report["memory_bytes"] > 2**20
    assert report["cpu_count"] >= 1


def test_missing_extras_show_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    for extra in doctor.EXTRAS:
        assert f"pip install 'atoll[{extra.name}]'" in out


def test_a_complete_extra_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0"}
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    half = doctor.extra_state(doctor.Extra("e", ("torch", "gguf"), "x"))
    whole = doctor.extra_state(doctor.Extra("e", ("torch",), "x"))
    assert (half.installed, whole.installed) == (False, True)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_broken_requirement_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setitem(doctor.REQUIRED, "left-pad", "left_pad_is_not_there")
    assert run(["doctor", *(["--json"] if as_json else [])]) == 1
    captured = capsys.readouterr()
    assert "error: left-pad: is not installed" in captured.err
    if as_json:
        assert len(json.loads(captured.out)["problems"]) == 1


def test_old_pythons_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_PYTHON", (99, 0))
    assert "too old" in doctor.examine().problems[0]


def test_nvidia_smi_lines() -> None:
    text = "NVIDIA H200, 143771, 570.1\nNVIDIA, odd name, [N/A], 570.1\n\nnonsense\n"
    assert machine.parse_nvidia_smi(text) == (
        machine.DetectedGpu("NVIDIA H200", 143771 * 2**20, "570.1"),
        machine.DetectedGpu("NVIDIA, odd name", None, "570.1"),
    )


def fake_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!{sys.executable}\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(script))


def test_gpus_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_smi(monkeypatch, tmp_path, "print('NVIDIA L4, 23034, 550.90')")
    gpus, note = machine.find_gpus()
    assert gpus == (machine.DetectedGpu("NVIDIA L4", 23034 * 2**20, "550.90"),)
    assert note is None


def test_a_failing_driver_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_smi(monkeypatch, tmp_path, "import sys; sys.exit('no\\ndevices')")
    assert machine.find_gpus() == ((), "nvidia-smi failed with code 1: no devices")


def test_a_hanging_driver_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: object, timeout: float, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(shutil, "which", lambda name: "nvidia-smi")
    monkeypatch.setattr(subprocess, "run", hang)
    assert machine.find_gpus(timeout_s=3) == ((), "nvidia-smi did not answer within 3 s")
