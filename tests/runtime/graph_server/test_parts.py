"""Small parts of the graph server: tasks by name, traces in memory."""

from __future__ import annotations

import pytest

from atoll.core.errors import InputError
from atoll.runtime.graph_server.graph_services import components_of, load_task
from atoll.runtime.graph_server.request_traces import RequestTrace, TraceKeeper
from tests.runtime.graph_server.toys import HERE


@pytest.mark.parametrize(
    "where", ["json", "no.such.module:Task", f"{HERE}:NoSuchTask", f"{HERE}:ToyVoice", "json:loads"]
)
def test_only_tasks_are_loaded(where: str) -> None:
    with pytest.raises(InputError, match="module:Class"):
        load_task(where, {}, "chat")


def test_components_of_a_task_follow_its_options() -> None:
    task = load_task(f"{HERE}:ToyAssistant", {"sees": False, "chat": "other-chat"}, "chat")
    assert components_of(task) == {"toy-encoder", "toy-decoder", "other-chat", "toy-voice"}


def test_only_the_last_traces_are_kept() -> None:
    keeper = TraceKeeper(kept=3)
    for number in (1, 2, 3, 2, 4):
        keeper.add(RequestTrace(f"r-{number}", "chat", "m"))
    assert keeper.ids() == ["r-4", "r-2", "r-3"]
    assert keeper.get("r-1") is None


def test_a_trace_does_not_grow_without_end() -> None:
    trace = RequestTrace("r", "chat", "m")
    for number in range(1200):
        trace.begin("speak", number, None, 0)
    shown = trace.shown()
    assert len(shown["invocations"]) == 1000
    assert shown["invocations_left_out"] == 200
