"""Executors of an any-to-any model are killed under load, and nobody notices (the benchmark, but smaller).

Gateway, graph server, supervisor and executors are those that serve; the voice is a real one, other
components are small, so that they are back soon.
"""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

pytest.importorskip("hibari", reason="needs the extra 'components'")

from atoll.core.listener import Listener
from atoll.runtime.graph_server.graph_config import GraphService
from atoll.runtime.local.serving import fetch_components
from atoll.runtime.task_fleet.deployment import PlacedExecutor, TaskDeployment
from atoll.runtime.task_fleet.parts import TASKS
from benchmarks.any_to_any.task_clients import KINDS
from tests.e2e.small_parts import HERE
from tests.slow.tasks.tasks_chaos import MODEL, chaos, make_orders

KILLS = 10
WORD_S = 0.05


def small_deployment() -> TaskDeployment:
    """Return two executors of each kind."""
    ear, scribe, eye = (f"{HERE}:Small{name}" for name in ("Ear", "Scribe", "Eye"))
    mind = f"{HERE}:SmallMind"
    service = GraphService(
        name=MODEL,
        tasks={name: TASKS[name] for name in ("chat", "transcriptions", "speech")},
        options={"hear_encoder": ear, "hear_decoder": scribe, "see": eye, "think": mind},
    )
    kinds: dict[str, dict[str, dict[str, float]]] = {
        "ears": {ear: {}, scribe: {}, eye: {}},
        "mind": {mind: {"word_s": WORD_S}},
        "mouth": {"hibari": {}},
    }
    executors = tuple(
        PlacedExecutor(id=f"{kind}-{copy}", components=components, threads=1)
        for kind, components in kinds.items()
        for copy in range(2)
    )
    return TaskDeployment((service,), executors)


@pytest.mark.slow
def test_ten_kills_change_no_answer_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    tasks = small_deployment()
    fetch_components(tasks, Listener())
    seen = asyncio.run(chaos(tasks, make_orders, kills=KILLS, seed=1, clients=3))
    assert seen.notes == []
    assert (seen.errors, seen.wrong_answers, seen.leaked_handles, seen.orphans) == (0, 0, 0, 0)
    assert seen.kills.total() == KILLS
    assert len(seen.kills) > 2
    assert all(seen.requests[kind] for kind in KINDS)
