"""What the terminal shows while something long runs."""

from __future__ import annotations

import io
import sys

import pytest

from atoll.cli import progress as shown
from atoll.solve.solve_progress import Progress, describe_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that is set by hand."""
    now_s = [100.0]
    monkeypatch.setattr("atoll.cli.progress.time.monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (Progress("templates", "chat/llm/prefill", 0.25), "templates 25%: chat/llm/prefill"),
        (
            Progress("allocating", "best $8.89/h, gap 1%, bound $8.80/h"),
            "allocating: best $8.89/h, gap 1%, bound $8.80/h",
        ),
    ],
)
def test_progress_is_a_line(told: Progress, line: str) -> None:
    assert describe_progress(told) == line


def test_the_time_left_goes_on_while_nothing_is_told(clock: list[float]) -> None:
    line = shown.StatusLine("templates: chat", 300.0)
    assert str(line) == "templates: chat; 5 min left"
    clock[0] += 200.5
    assert str(line) == "templates: chat; 100 s left"
    clock[0] += 100.0
    assert str(line) == "templates: chat; time is up"
    assert str(shown.StatusLine("loading", None)) == "loading"


def test_a_terminal_shows_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with shown.show_progress("planning", 3030.0) as tell:
        tell(Progress("allocating", "best $8.89/h"))
    assert "allocating: best $8.89/h; 50 min left" in terminal.getvalue()


def test_a_file_gets_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with shown.show_progress("planning", 3030.0) as tell:
        tell(Progress("allocating", "best $8.89/h"))
    assert file.getvalue() == ""
