"""Executor types that no best answer needs: another does all they do, no slower, on no more slices.

Only types of services that share executors are compared, only on parts that somebody asks for, and on latency
only where a chain bounds it. The one that stays can stand in for the other in any answer, so nothing is lost,
whatever machines cost and however many there are. Executors that stand keep their columns: that is up to the
caller.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.solve.array_types import Floats
from atoll.solve.graph.graph_types import GraphProgram, PartKey

_PAIRS = 2_000
"""Types of a service up to which all are compared with all; beyond, only those on the same slices."""


def undominated(program: GraphProgram) -> tuple[int, ...]:
    """Return the types, by index, that are left: of equal ones the first."""
    asked: dict[frozenset[str], dict[PartKey, bool]] = {}
    groups_of = _group_services(program)
    for klass in program.classes:
        if klass.rate_per_s > 0.0:
            chained = {part for chain in klass.chains for part in (chain.first, chain.second)}
            of = asked.setdefault(groups_of[klass.service], {})
            for part in (part for route in klass.routes for part in route):
                of[*klass.key, part] = part in chained
    offered = {f"{m.gpu}:{size}" for m in program.machines if m.available > 0 for size in m.sizes}
    left: list[int] = []
    for services, keys in asked.items():
        types = [
            e
            for e, executor in enumerate(program.executors)
            if executor.service in services
            and any(key in executor.seconds for key in keys)
            and all(kind in offered for kind, _ in executor.uses)
        ]
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for e in types:
            uses = program.executors[e].uses if len(types) > _PAIRS else ()
            groups.setdefault(tuple(sorted(uses)), []).append(e)
        for group in groups.values():
            measures = _measure(program, group, keys)
            left += [e for e, stays in zip(group, _front(measures), strict=True) if stays]
    return tuple(sorted(left))


def _group_services(program: GraphProgram) -> dict[str, frozenset[str]]:
    """Return by service all that share executors with it, itself among them, if by way of others."""
    names = {klass.service for klass in program.classes}
    group = {name: frozenset((name,)) for name in names}
    for services in {executor.services for executor in program.executors if executor.guests}:
        joined = frozenset(other for name in services for other in group.get(name, (name,)))
        group |= dict.fromkeys(joined, joined)
    return group


def _measure(program: GraphProgram, types: list[int], keys: dict[PartKey, bool]) -> Floats:
    """Return by type all of which less is better: slices by kind, seconds, and latency in chains."""
    kinds = sorted({kind for e in types for kind, _ in program.executors[e].uses})
    place = {kind: i for i, kind in enumerate(kinds)}
    chained = [key for key, bound in keys.items() if bound]
    measures = np.full((len(types), len(kinds) + len(keys) + len(chained)), np.inf)
    measures[:, : len(kinds)] = 0.0
    for i, e in enumerate(types):
        executor = program.executors[e]
        for kind, count in executor.uses:
            measures[i, place[kind]] += count
        for k, key in enumerate(keys):
            measures[i, len(kinds) + k] = executor.seconds.get(key, np.inf)
        for k, key in enumerate(chained):
            if key in executor.seconds:
                late = executor.latency_s.get(key, 0.0)
                measures[i, len(kinds) + len(keys) + k] = late
    return measures


def _front(measures: Floats) -> NDArray[np.bool_]:
    """Return which rows no other one is as small as everywhere (of equal rows the first stays)."""
    stays = np.ones(len(measures), np.bool_)
    order = np.lexsort(
        (np.arange(len(measures)), np.where(np.isinf(measures), 1e300, measures).sum(1))
    )
    front = np.zeros((0, measures.shape[1]))
    # By rising sum, whoever rules out a row comes before it.
    for i in order:
        if len(front) and bool((front <= measures[i]).all(1).any()):
            stays[i] = False
        else:
            front = np.vstack([front, measures[i]])
    return stays
