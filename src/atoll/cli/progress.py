"""Progress on stderr while something long runs; nothing where stderr is no terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.report.terminal import console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.solve.solve_progress import OnProgress

Step = Callable[[float, str], None]
"""Takes how much is done, and what is being done."""


@contextmanager
def bar(title: str, total: float) -> Iterator[Step]:
    """Draw a bar while something of a known size runs."""
    if not sys.stderr.isatty():
        yield lambda _done, _what: None
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    with Bars(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total, what="")
        yield lambda done, what: bars.update(
            task, completed=done, what=what, total=max(total, done)
        )


class StatusLine:
    """A line of progress with the time left, which goes on counting while nothing is told."""

    def __init__(self, text: str, deadline_s: float | None) -> None:
        self.text = text
        self._end = None if deadline_s is None else time.monotonic() + deadline_s

    def __str__(self) -> str:
        return self.text if self._end is None else f"{self.text}; {self._left(self._end)}"

    def _left(self, end: float) -> str:
        left = math.ceil(end - time.monotonic())
        if left <= 0:
            return "time is up"
        return f"{left} s left" if left < 120 else f"{left // 60} min left"

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        # One line, however narrow the terminal: a spinner redraws what it has drawn.
        return Text(str(self), no_wrap=True, overflow="ellipsis")


@contextmanager
def live_line(text: str, deadline_s: float | None = None) -> Iterator[Callable[[str], None]]:
    """Show a line that changes while something runs, with how much time is left of a deadline."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    line = StatusLine(text, deadline_s)
    with console(stderr=True).status(line, spinner="dots"):

        def say(text: str) -> None:
            line.text = text

        yield say


@contextmanager
def show_progress(first: str, deadline_s: float | None = None) -> Iterator[OnProgress]:
    """Show what planning tells of itself: its stage, how much of it is done, the best plan so far.

    The best plan comes with what is proven and the gap; with a deadline the time left is shown, too.
    """
    from atoll.solve.solve_progress import describe_progress

    with live_line(first, deadline_s) as say:
        yield lambda progress: say(describe_progress(progress))
