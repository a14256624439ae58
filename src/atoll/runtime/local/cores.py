"""Which cores the node processes of this machine get, so that they do not fight over them."""

from __future__ import annotations

import os
from collections.abc import Mapping


def usable_cores() -> tuple[int, ...]:
    """Return the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def assign_cores(work: Mapping[str, float], cores: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the cores of each process, given how much work each has.

    With at least as many cores as processes, each gets cores of its own, in proportion to its work.
    With fewer, each gets one core, and every core about the same work: the largest process goes first,
    to the core with the least.
    """
    order = sorted(work, key=lambda name: (-work[name], name))
    if not cores or not order:
        return dict.fromkeys(order, ())
    assigned: dict[str, tuple[int, ...]] = {}
    if len(order) > len(cores):
        load = dict.fromkeys(cores, 0.0)
        for name in order:
            core = min(cores, key=lambda c: (load[c], c))
            load[core] += work[name]
            assigned[name] = (core,)
        return assigned
    counts = dict.fromkeys(order, 1)
    for _ in range(len(cores) - len(order)):
        counts[max(order, key=lambda name: work[name] / counts[name])] += 1
    at = 0
    for name in order:
        assigned[name] = tuple(cores[at : at + counts[name]])
        at += counts[name]
    return assigned
