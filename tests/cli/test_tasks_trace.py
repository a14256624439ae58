"""Where the time of a request went."""

from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from atoll.cli import tasks_trace
from atoll.cli.tasks_trace import draw_bar, draw_trace
from atoll.core.errors import InputError

TRACE: dict[str, Any] = {
    "id": "req-1",
    "endpoint": "chat",
    "model": "assistant",
    "class": "audio -> audio",
    "path": "llm=mind-0",
    "status": 200,
    "rounds": 1,
    "intake_s": 0.001,
    "first_s": 0.2,
    "took_s": 1.0,
    "invocations": [
        {
            "component": "smollm2",
            "invocation": 1,
            "piece": None,
            "executor": "mind-0",
            "started_s": 0.1,
            "took_s": 0.5,
            "waited_s": 0.01,
            "ran_s": 0.4,
            "batch": 2,
            "input_bytes": 10,
            "output_bytes": 20,
            "attempts": 2,
            "troubles": ["mind-1 was lost"],
        },
        {
            "component": "hibari",
            "invocation": 2,
            "piece": 0,
            "executor": "mouth-0",
            "started_s": 0.6,
            "took_s": None,
            "waited_s": 0.0,
            "ran_s": 0.0,
            "batch": 0,
            "input_bytes": 0,
            "output_bytes": 0,
            "attempts": 1,
            "troubles": [],
        },
    ],
    "invocations_left_out": 0,
}


def _text(trace: dict[str, Any]) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(draw_trace(trace))
    return console.export_text()


def test_a_trace_shows_executors_times_and_troubles() -> None:
    text = _text(TRACE)
    assert "smollm2" in text
    assert "mind-0" in text
    assert "400.0" in text
    assert "hibari #0" in text
    assert "mind-1 was lost" in text
    assert "first piece after 0.200 s" in text


@given(
    started_s=st.floats(0, 100),
    took_s=st.one_of(st.none(), st.floats(0, 100)),
    whole_s=st.floats(0, 100),
)
def test_a_bar_is_as_wide_as_all_others_and_never_empty(
    started_s: float, took_s: float | None, whole_s: float
) -> None:
    bar = draw_bar(min(started_s, whole_s), took_s, whole_s)
    if whole_s > 0:
        assert len(bar) == 40
        assert "█" in bar
        assert "█ █" not in bar


def test_an_unknown_request_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(url: str, path: str) -> None:
        return None

    monkeypatch.setattr(tasks_trace, "_get", nothing)
    with pytest.raises(InputError, match="no trace of 'req-9'"):
        tasks_trace.trace("req-9", "http://127.0.0.1:1")
    with pytest.raises(InputError, match="no request yet"):
        tasks_trace.trace(None, "http://127.0.0.1:1")
