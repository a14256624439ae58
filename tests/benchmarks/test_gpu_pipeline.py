"""The model that `benchmarks.gpu_pipeline` serves, how it finds nodes to kill, and a run of it on cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.ids import Phase
from atoll.runtime.http.listen_address import free_ports
from benchmarks.hardware.gpu_fleet import GpuFleet
from benchmarks.hardware.gpu_pipeline import KILLS, LAYOUTS, Setup, find_nodes
from benchmarks.hardware.recall_model import RecallModel
from benchmarks.report import ROOT

MADE = RecallModel(layers=6, firsts=16, each=8)


def test_an_answer_takes_a_bit_of_every_layer_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, bits = MADE.prompt(3, 20), MADE.bits()
    assert prompt[0] < MADE.firsts <= min(prompt[1:])
    said = MADE.answer(prompt, 4 * MADE.layers)
    turns = [(word - MADE.firsts) // MADE.each // 2 for word in said]
    begun = turns[0]
    assert turns == [(begun + at) % MADE.layers for at in range(len(said))]
    # Of whichever layer the KV cache is another's, the answer is another one.
    for layer in range(MADE.layers):
        others = bits.copy()
        others[layer, prompt[0]] ^= 1
        monkeypatch.setattr(RecallModel, "bits", lambda _, others=others: others)
        other = MADE.answer(prompt, 4 * MADE.layers)
        assert [a == b for a, b in zip(said, other, strict=True)].index(False) == turns.index(layer)


def test_a_lost_or_doubled_token_shows() -> None:
    for seed in range(50):
        prompt = MADE.prompt(seed, 5)
        first, *rest = MADE.answer(prompt, 12)
        assert MADE.answer([*prompt, first], 11) == rest
        # Words of two turns have nothing in common, so neither fits the other's place.
        assert MADE.answer([*prompt, *rest[:1]], 11) != rest
        assert len({MADE.successor(first, bit) for bit in (0, 1)}) == 2


@pytest.mark.parametrize("device", LAYOUTS)
def test_layouts_hold_all_layers_apart_and_differ(device: str) -> None:
    layouts = LAYOUTS[device]
    assert {one.phase for one in layouts} == {Phase.PREFILL, Phase.DECODE}
    # Whoever decodes may die: another goes on.
    assert sum(one.phase is Phase.DECODE for one in layouts) == 2
    for one in layouts:
        assert [layer for start, end in one.layers for layer in range(start, end)] == [*range(28)]
    sizes = [end - start for one in layouts for start, end in one.layers if len(one.layers) > 1]
    assert len(set(sizes)) > 1


def test_nodes_that_are_ready_and_alive_are_found(tmp_path: Path) -> None:
    fleet = GpuFleet(tmp_path, "pipeline", "pipeline", "chat")
    home = tmp_path / "atoll" / "local" / "f-pipeline" / "i-chat-decode-0-x"
    home.mkdir(parents=True)
    (home / "order.json").write_text("{}")
    words = [sys.executable, "-c", "print(flush=True); input()", "atoll.engine.node"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        # Before it runs, it is not yet called so.
        process.stdout.readline()
        for name, pid in {
            "chat-decode-0-x/n0": process.pid,
            "chat-decode-0-x/n1": os.getpid(),
            "another/n0": process.pid,
        }.items():
            path = tmp_path / "run-1" / f"{name.replace('/', '.')}.ready"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"name": name, "pid": pid}))
        assert find_nodes(fleet, tmp_path) == {"chat-decode-0-x/n0": process.pid}
        process.kill()
    assert find_nodes(fleet, tmp_path) == {}


@pytest.mark.slow
def test_killed_nodes_on_cores_cost_nobody_an_error_or_a_word(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'engine'")
    (port,) = free_ports(1)

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_pipeline", *words],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout

    run("plan", str(tmp_path), "--device", "cpu", "--port", str(port))
    found = json.loads(run("serve", str(tmp_path)).splitlines()[-1])
    seen = {name: found[name] for name in ("kills", "errors", "mismatches", "wrong", "stages")}
    assert seen == {
        "kills": KILLS,
        "errors": 0,
        "mismatches": 0,
        "wrong": 0,
        "stages": Setup("cpu").nodes,
    }
    assert found["requests"] >= 12
