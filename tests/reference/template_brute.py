"""The best layout by trying every partition, order and cut: what the search is tested against."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from atoll.solve.templates.generate import RoleTables


def brute_force(tables: RoleTables, nodes: Sequence[int]) -> float:
    """Return the best throughput of a small multiset of node types (indices)."""
    rates, layers = tables.steady, tables.layers
    best = sum(float(rates[0, 0, c, layers]) for c in nodes)
    for groups in set_partitions(list(nodes)):
        stages = len(groups)
        if not 2 <= stages <= min(rates.shape[0], layers):
            continue
        table = rates[stages - 1]
        for order in itertools.permutations(groups):
            for cut in itertools.combinations(range(1, layers), stages - 1):
                edges = (0, *cut, layers)
                slowest = min(
                    sum(
                        float(table[_position(k, stages), c, edges[k + 1] - edges[k]])
                        for c in group
                    )
                    for k, group in enumerate(order)
                )
                best = max(best, slowest)
    return best


def _position(stage: int, stages: int) -> int:
    return 0 if stage == 0 else 2 if stage == stages - 1 else 1


def set_partitions(things: list[int]) -> Iterator[list[list[int]]]:
    """Yield every way to divide things into non-empty groups."""
    if not things:
        yield []
        return
    head, *rest = things
    for groups in set_partitions(rest):
        yield [[head], *groups]
        for i in range(len(groups)):
            yield [*groups[:i], [head, *groups[i]], *groups[i + 1 :]]
