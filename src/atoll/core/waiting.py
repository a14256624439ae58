"""Telling whoever waits what for: long work says what it begins, and the command line shows it.

Nothing here prints. Who wants to know listens:

    with listening(print):
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []


def say(what: str) -> None:
    """Tell all who listen what is about to take a while."""
    for listener in _listeners:
        listener(what)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Have a function called with whatever takes a while meanwhile."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
