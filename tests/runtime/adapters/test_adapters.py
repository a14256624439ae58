"""Commands and refusals of the engines' adapters, fleets' files, and what `serve` is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.cli.serving import sources
from atoll.core.errors import InputError, UnknownNameError
from atoll.plan.cluster import NodeProfile
from atoll.runtime.adapters.base import MachineShare, RunDirectory, ServedModel
from atoll.runtime.adapters.llamacpp import gguf_file
from atoll.runtime.adapters.remote import remote_endpoint
from atoll.runtime.adapters.sglang import sglang_endpoint
from atoll.runtime.adapters.vllm import vllm_command
from atoll.runtime.local.fleet import LivenessTracker
from atoll.runtime.local.profile import RangeTable, profile_of
from atoll.runtime.local.state import FleetState, list_running_fleets, new_home, write_state
from tests.runtime.local.test_placing import instance

SERVED = ServedModel("hf://org/name", ("chat",))


def test_vllm_gets_uneven_layers(tmp_path: Path) -> None:
    command = vllm_command(instance([(0, 20), (20, 32)]), SERVED, 9000, RunDirectory(tmp_path))
    assert command.environment == {"VLLM_PP_LAYER_PARTITION": "20,12"}
    text = " ".join(command.arguments)
    assert text.startswith("vllm serve org/name --host 127.0.0.1 --port 9000")
    assert "--pipeline-parallel-size 2" in text


def test_vllm_on_one_node_has_no_pipeline(tmp_path: Path) -> None:
    command = vllm_command(instance([(0, 32)]), SERVED, 9000, RunDirectory(tmp_path))
    assert "--pipeline-parallel-size" not in command.arguments
    assert command.environment == {}


@pytest.mark.parametrize(
    ("held", "why"),
    [([(0, 16), (16, 32), (16, 32)], "several nodes in a stage"), ([(0, 20), (16, 32)], "overlap")],
)
def test_vllm_refuses_what_it_cannot_run(
    held: list[tuple[int, int]], why: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=why):
        vllm_command(instance(held), SERVED, 9000, RunDirectory(tmp_path))


def test_sglang_is_for_one_node(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="SGLang runs on one"):
        sglang_endpoint(
            instance([(0, 1), (1, 2)]), SERVED, 9000, RunDirectory(tmp_path), MachineShare()
        )


def test_llamacpp_needs_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a GGUF file"):
        gguf_file(str(tmp_path))


def test_a_remote_key_is_kept_from_view() -> None:
    endpoint = remote_endpoint("far", "https://example.org/v1", ("m",), api_key="secret")
    assert endpoint.processes == ()
    assert endpoint.backend.url == "https://example.org"


def test_sockets_must_be_short(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too long for a socket"):
        RunDirectory(tmp_path / ("x" * 100)).inbox("a/n0")


def test_sources_for_all_and_for_one() -> None:
    assert sources([], ["a", "b"], "d") == {"a": "d", "b": "d"}
    assert sources(["hf://o/n", "b=/m"], ["a", "b"], "d") == {"a": "hf://o/n", "b": "/m"}
    with pytest.raises(UnknownNameError):
        sources(["c=/m"], ["a", "b"], "d")


def test_silence_counts_only_while_the_instance_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("atoll.runtime.local.fleet.time.monotonic", lambda: now_s)
    liveness = LivenessTracker()
    assert liveness.silent_s("n") == 0.0
    liveness.heard([("n", True)])
    now_s = 102.0
    liveness.heard([("n", False)])
    assert liveness.silent_s("n") == 2.0
    now_s = 150.0
    assert liveness.silent_s("n") == 2.0
    liveness.heard([("n", False)])
    assert liveness.silent_s("n") == 0.0


def test_fleets_that_died_are_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name, pid in (("mine", os.getpid()), ("dead", 2**22 + 1)):
        folder = new_home()
        write_state(FleetState(name=name, pid=pid, url="u", started_s=1, folder=str(folder)))
    assert [fleet.name for fleet in list_running_fleets()] == ["mine"]
    assert len(list((tmp_path / "atoll").iterdir())) == 1


def test_a_profile_takes_what_was_measured() -> None:
    full = RangeTable(start=0, end=10, prefill_s=((1, 0.012), (64, 0.102)), decode_s=((1, 0.012),))
    half = RangeTable(start=5, end=10, prefill_s=((1, 0.007), (64, 0.052)), decode_s=((1, 0.007),))
    made: NodeProfile = profile_of(full, half, tuple(float(10 - i) for i in range(10)))
    assert made.step_s == pytest.approx(0.002)
    for points, measured in (
        (made.prefill_s_per_layer, full.prefill_s),
        (made.decode_s_per_layer, full.decode_s),
    ):
        for (_, per_layer), (_, seconds) in zip(points, measured, strict=True):
            assert made.step_s + 10 * per_layer == pytest.approx(seconds)
