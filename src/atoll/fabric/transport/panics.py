"""Failures inside the transport: contained, counted, and not shown to users.

A panic in one of its threads ends that thread's task and writes a backtrace to standard error; where Python
called it, it comes back as a `PanicException`, which is no `Exception`. It happens when hub and members stop
in the same moment. Nothing is lost by it but the link, which is closing anyway.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from types import TracebackType

import zenoh


class Contained:
    """`with CONTAINED:` goes on after an error or panic of the transport; anything else passes."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Say whether the error ends here."""
        return kind is not None and (
            issubclass(kind, zenoh.ZError) or kind.__name__ == "PanicException"
        )


CONTAINED = Contained()


@contextlib.contextmanager
def hushed() -> Iterator[list[str]]:
    """Keep panics off standard error for a while; their first lines are in the list afterwards.

    Whatever else was written meanwhile is written after all, a little later.
    """
    panics: list[str] = []
    sys.stderr.flush()
    try:
        real = os.dup(2)
    except OSError:  # there is no standard error
        yield panics
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield panics
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            held.seek(0)
            rest, found = split_panics(held.read().decode(errors="replace"))
            panics += found
            if rest:
                os.write(2, rest.encode())


def split_panics(text: str) -> tuple[str, list[str]]:
    """Return a text without the panics in it, and what each of them said first."""
    kept: list[str] = []
    panics: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.startswith("thread '") and " panicked at " in line:
            inside = True
            panics.append(line.strip())
            if kept and not kept[-1].strip():  # the empty line before it
                kept.pop()
        elif not inside:
            kept.append(line)
        elif line.startswith("note: "):
            inside = False
    return "".join(kept), panics
