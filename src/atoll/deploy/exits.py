"""What the end of a command says about why an instance did not come up."""

from __future__ import annotations

from atoll.deploy.door import FailureKind

_OUT_OF_MEMORY = ("out of memory", "outofmemory", "memoryerror", "cannot allocate memory")


def classify_exit(reason: str, last_line: str) -> FailureKind:
    """Return what a command that ended by itself failed of, by its code and its last word.

    Engines say that memory was short in words only, and the kernel's own killer by signal 9; all else that
    ends a command before it is ready is in what it was told.
    """
    words = last_line.lower()
    if reason == "ended by signal 9" or any(each in words for each in _OUT_OF_MEMORY):
        return "memory"
    return "settings"
