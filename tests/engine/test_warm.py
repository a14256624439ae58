"""Nodes make themselves ready before they say that they are, and count what they compile later."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")

from atoll.engine.compile_count import compiled, note_compiled
from atoll.engine.model_stage import StageModel
from atoll.engine.node import NodeConfig, NodeProcess, read_progress
from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.models import LAYERS
from tests.engine.test_exact import ask, check
from tests.engine.thread_ranks import ranked_stage

pytestmark = pytest.mark.engine


def test_serving_on_cores_compiles_nothing_and_what_is_compiled_late_shows(
    tiny: Callable[[str], Any],
) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 2), NodeSetup(2, 4)])
    check(cluster, ask(cluster, [(4, 8, 9), (9, 8, 3)]), model)
    assert [core.stats().compiled_after_ready for core in cluster.nodes.values()] == [0, 0]
    note_compiled()
    assert [core.stats().compiled_after_ready for core in cluster.nodes.values()] == [1, 1]


def test_a_node_is_warm_before_it_is_ready(
    tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("zmq", reason="needs the extra 'engine'")
    asked = []

    def warm(_stage: StageModel, budget: int, most: int | None, progress: Any) -> None:
        asked.append((budget, most))
        note_compiled()
        for number in range(1, 34):
            progress(number, 33, f"step of {number} tokens")

    monkeypatch.setattr(StageModel, "warm", warm)
    config = NodeConfig(
        name="n", model=str(tiny("llama").folder), start=0, end=4, kv_blocks=8, max_sequences=20
    )
    before = compiled()
    with caplog.at_level(logging.INFO, logger="atoll.engine.node"):
        node = NodeProcess(config)
    node.mailbox.close()
    assert asked == [(512, 20)]
    # What was compiled before it was ready is none of the late ones.
    assert (compiled() - before, node.core.stats().compiled_after_ready) == (1, 0)
    assert "warming: 12 of 33 (step of 12 tokens)" in caplog.messages
    assert read_progress(caplog.messages) == "warming: 33 of 33 (step of 33 tokens)"


def test_how_far_a_node_is_stands_in_its_log() -> None:
    loading = "2026-11-18 04:00:00,000 INFO chat-0/n0: loading weights: 3 of 30 (model.norm)"
    assert read_progress([loading, "a library says something"]) == (
        "loading weights: 3 of 30 (model.norm)"
    )
    # A process that starts anew has said nothing yet.
    assert read_progress([loading, "INFO chat-0/n0: ready: layers [0, 4) at ipc://x"]) == ""
    assert read_progress([]) == ""


def test_all_ranks_are_warmed_alike(
    tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[tuple[int, int, int | None, bool]] = []

    def warm(stage: Any, budget: int, most: int | None, progress: Any) -> None:
        # Ranks that do not all come here at once would wait for each other.
        stage._ranks.sum(stage.cache.keys[0].new_ones(1))
        warmed.append((stage._ranks.rank, budget, most, progress is not None))

    monkeypatch.setattr(StageModel, "warm", warm)
    folder = tiny("llama").folder
    stage = ranked_stage(lambda ranks: StageModel(folder, 0, 4, blocks=8, ranks=ranks), 2)
    stage.warm(64, None, lambda *_: None)
    stage.logits(stage.cache.keys[0].new_zeros(1, stage.width))
    assert sorted(warmed) == [(0, 64, None, True), (1, 64, None, False)]
