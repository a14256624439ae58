"""Requests/s that executors of an any-to-any service carry, whatever the mix of its classes.

A request of class k takes s seconds of an executor for each part that it needs there, and an executor has a
second a second. With the share a of each class and its requests sent over the executors in the best way, the
most that can be carried is

    maximise    c
    subject to  c a[k] <= sum of x[e, k, p] over e and the parts p that do a component,  for each of k's
                sum of s[e, k, p] x[e, k, p] over k and p <= n[e],  for each kind of executors e

where an llm is done whole or in both of its phases. Which way data goes between executors is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from atoll.plan.plan import Instance, PartWork

_ENDS = (".prefill", ".decode")


class ClassNeed(NamedTuple):
    """A class by its share of requests, with the components that each of them needs."""

    klass: str
    share: float
    components: tuple[str, ...]


class ExecutorKind(NamedTuple):
    """Executors that are alike.

    `per_s` is what each passes of any one part where it is not known what requests take (`work`).
    """

    parts: tuple[str, ...]
    work: tuple[PartWork, ...]
    per_s: float


def kind_of(instance: Instance, service: str) -> ExecutorKind:
    """Return what an executor is alike others in, as one of its services sees it.

    Of one that is shared it has the part of the time that its requests are planned to take, so that they take
    as much longer of what there is for them.
    """
    part = instance.part_of(service)
    work = tuple(
        PartWork(klass, name, seconds / part if part < 1.0 else seconds)
        for klass, name, seconds in instance.work_of(service)
        if part > 0.0
    )
    per_s = 0.0 if work else instance.carries(service)
    return ExecutorKind(instance.parts, work, per_s)


def max_requests(needs: Sequence[ClassNeed], stand: Mapping[ExecutorKind, int]) -> float:
    """Return the requests/s of all classes together that so many executors of each kind carry."""
    return best_flows(needs, stand).per_s


class BestFlows(NamedTuple):
    """The most requests/s, and how many of each class each kind of executors then does of each part."""

    per_s: float
    flows: tuple[tuple[ExecutorKind, str, str, float], ...] = ()


def best_flows(needs: Sequence[ClassNeed], stand: Mapping[ExecutorKind, int]) -> BestFlows:
    """Return what so many executors of each kind carry, and who does what then."""
    standing = sorted((kind, count) for kind, count in stand.items() if count > 0)
    return _solve(tuple(need for need in needs if need.share > 0.0), tuple(standing))


@lru_cache(maxsize=4096)
def _solve(needs: tuple[ClassNeed, ...], stand: tuple[tuple[ExecutorKind, int], ...]) -> BestFlows:
    import numpy as np

    # Columns are c, then x; entries of rows as (row, column, value).
    entries: list[tuple[int, int, float]] = []
    full: dict[tuple[int, str], int] = {}
    capacity: list[float] = []
    done: dict[tuple[str, str], list[int]] = {}
    columns, meant = 1, list[tuple[ExecutorKind, str, str]]()
    for at, (kind, count) in enumerate(stand):
        for klass, part, seconds in _list_seconds(kind, needs):
            # One row for the executor, or where seconds are not known one for each of its parts.
            row = full.setdefault((at, "" if kind.work else part), len(full))
            if row == len(capacity):
                capacity.append(count * (1.0 if kind.work else kind.per_s))
            entries.append((row, columns, seconds))
            done.setdefault((klass, part), []).append(columns)
            meant.append((kind, klass, part))
            columns += 1
    rows = len(capacity)
    for klass, share, components in needs:
        for component in components:
            apart = [component + end for end in _ENDS]
            phases = any((klass, part) in done for part in apart)
            for parts in [[component, part] for part in apart] if phases else [[component]]:
                doing = [at for part in parts for at in done.get((klass, part), ())]
                if not doing:
                    return BestFlows(0.0)
                entries.append((rows, 0, share))
                entries += [(rows, at, -1.0) for at in doing]
                rows += 1
    if not needs or not entries:
        return BestFlows(0.0)
    from atoll.solve.lp import INFINITY, LinearProgram, Sparse

    index = np.array([(row, column) for row, column, _ in entries], np.int64)
    values = np.array([value for _, _, value in entries])
    program = LinearProgram()
    cost = np.zeros(columns)
    cost[0] = -1.0
    nothing = Sparse.of(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), columns)
    program.add_columns(cost, np.zeros(columns), np.full(columns, INFINITY), nothing)
    upper = np.array([*capacity, *[0.0] * (rows - len(capacity))])
    program.add_rows(
        np.full(rows, -INFINITY), upper, Sparse.of(index[:, 0], index[:, 1], values, rows)
    )
    found = program.solve()
    done_per_s = found.values[1:].tolist()
    flows = ((*what, rate) for what, rate in zip(meant, done_per_s, strict=True) if rate > 0.0)
    return BestFlows(max(0.0, -found.objective), tuple(flows))


def _list_seconds(kind: ExecutorKind, needs: Iterable[ClassNeed]) -> list[PartWork]:
    """Return what classes that are asked for take of an executor, by part."""
    if kind.work:
        asked = {need.klass for need in needs}
        return [one for one in kind.work if one.klass in asked]
    # Passed are so many requests/s, whatever they take.
    return [
        PartWork(need.klass, part, 1.0)
        for need in needs
        for part in kind.parts
        if part.partition(".")[0] in need.components
    ]
