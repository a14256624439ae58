"""How long instances take to start: engines as measured, weights, machines; what a fleet file says wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.control.decision.control_view import ControlPolicy
from atoll.engines.profile import StartTime
from atoll.engines.vllm import Vllm
from atoll.plan.files.read import read_problem
from atoll.plan.plan import Instance
from atoll.plan.problem import Problem
from atoll.plan.startup import READ_BYTES_PER_S, RENTED_S, StartupTimes
from tests.runtime.local.test_placing import instance

FLEET = """
services:
  chat: {model: MODEL, ttft: 2s, tpot: 100ms, rate: 1/s, lengths: 1024x256}
pool:
  owned: {here: {"H200:1": 2}}
settings: {SETTINGS}
"""


def fleet(tmp_path: Path, model: str = "llama-3.1-8b", settings: str = "") -> Problem:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET.replace("MODEL", model).replace("SETTINGS", settings))
    return read_problem(path)


def run_by(engine: str | None, market: str = "owned") -> Instance:
    made = instance([(0, 32)])
    nodes = tuple(node.model_copy(update={"market": market}) for node in made.nodes)
    return made.model_copy(update={"engine": engine, "nodes": nodes})


def test_engines_differ_and_weights_are_read(tmp_path: Path) -> None:
    problem = fleet(tmp_path)
    times = StartupTimes(problem)
    weights_s = problem.catalog().model("llama-3.1-8b").llm.weight_bytes / READ_BYTES_PER_S
    assert weights_s == pytest.approx(16.06, abs=0.01)
    assert times.of(run_by("vllm")) == pytest.approx(75.0 + weights_s)
    assert times.of(run_by(None)) == times.of(run_by("vllm"))
    assert times.of(run_by("atoll")) == pytest.approx(26.0 + weights_s)
    half = instance([(0, 16), (16, 32)]).model_copy(update={"engine": "vllm"})
    rented = any(node.market != "owned" for node in half.nodes)
    own_s = 123.0 + RENTED_S if rented else 75.0
    assert times.of(half) == pytest.approx(own_s + weights_s / 2)


def test_rented_machines_come_up_first_and_have_nothing_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = StartupTimes(fleet(tmp_path))
    owned_s, rented_s = times.of(run_by("vllm")), times.of(run_by("vllm", "spot"))
    assert rented_s - owned_s == pytest.approx(RENTED_S + 123.0 - 75.0)
    monkeypatch.setattr(Vllm, "start", StartTime(123.0, "a test"))
    assert times.of(run_by("vllm")) == pytest.approx(owned_s + 48.0)
    assert times.of(run_by("vllm", "on-demand")) == pytest.approx(rented_s)


def test_the_longest_is_of_any_service_and_a_fleet_file_wins(tmp_path: Path) -> None:
    small, large = fleet(tmp_path), fleet(tmp_path, model="qwen3-32b")
    assert StartupTimes(large).longest_s > StartupTimes(small).longest_s + 40.0
    spot = small.offers[0].model_copy(update={"market": "spot", "usd_per_hour": 1.0})
    rented_s = StartupTimes(small.replace(offers=(*small.offers, spot))).longest_s
    sglang_s = StartupTimes(small).longest_s  # nobody measured it with anything kept
    assert rented_s == pytest.approx(sglang_s + RENTED_S)
    only = fleet(tmp_path, settings="engines: [atoll]")
    assert StartupTimes(only).longest_s < 50.0
    said = fleet(tmp_path, settings="startup: 90s")
    assert StartupTimes(said).longest_s == StartupTimes(said).of(run_by("vllm", "spot")) == 90.0
    assert said.content_hash() != small.content_hash()
    assert "startup" not in small.settings.to_json()
    assert ControlPolicy.for_problem(said).startup_s == pytest.approx(112.5)
    assert ControlPolicy.for_problem(said, epoch_s=60.0).epoch_s == 60.0
