"""How many kernels were compiled and graphs captured in this process: none may be once a node is ready."""

from __future__ import annotations

_counted = 0
_watching = False


def compiled() -> int:
    """Return how many there are so far."""
    return _counted


def note_compiled(*_: object, **__: object) -> None:
    """Count one more; takes whatever Triton tells its hooks."""
    global _counted  # noqa: PLW0603 - one count for the process, as Triton has one cache
    _counted += 1


def watch_triton() -> None:
    """Count what Triton makes ready from now on: compiled or read from disk, both keep a step waiting."""
    global _watching  # noqa: PLW0603 - as above
    if _watching:
        return
    from triton import knobs

    _watching = True
    knobs.runtime.jit_post_compile_hook = note_compiled
