"""Progress on stderr while something long runs; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.report.terminal import console

if TYPE_CHECKING:
    from atoll.solve.progress import OnProgress, Progress

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


@contextmanager
def live_line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line that changes while something runs."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.text import Text

    out = console(stderr=True)
    with out.status(Text(text), spinner="dots") as status:
        yield lambda line: status.update(Text(line))


@contextmanager
def show_progress(first: str) -> Iterator[OnProgress]:
    """Show what planning tells of itself: its stage, how much of it is done, the best so far."""
    with live_line(first) as say:

        def tell(progress: Progress) -> None:
            share = "" if progress.share is None else f" {progress.share:.0%}"
            say(f"{progress.stage}{share}: {progress.text}")

        yield tell
