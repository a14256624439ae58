"""Steps of the local search over placements: which nodes move where (numba).

A step is a few rows (node, start, end). Ranges that meet nothing carry nothing, so most steps put a
node between boundaries that exist: where another node starts or ends. Equal nodes are never swapped.
"""

from __future__ import annotations

from atoll.core.compiling import lean_part
from atoll.solve.array_types import Ints
from atoll.solve.random_words import Words, below


@lean_part
def _put(change: Ints, row: int, node: int, start: int, end: int) -> None:
    change[row, 0] = node
    change[row, 1] = start
    change[row, 2] = end


@lean_part
def _between(
    random: Words, start: Ints, end: Ints, max_layers: Ints, layers: int, change: Ints
) -> int:
    """Move a node to the range of another, or after or before it, up to a boundary if one is in reach."""
    n = start.shape[0]
    i = below(random, n)
    k = below(random, n)
    if i == k or end[k] <= start[k]:
        return 0
    how = below(random, 4)
    limit = max_layers[i]
    if how == 0:
        s, e = start[k], min(end[k], start[k] + limit)
    elif how == 1:
        s, e = max(start[k], end[k] - limit), end[k]
    elif how == 2:
        s = end[k]
        if s >= layers:
            s = 0
        e = min(layers, s + 1 + below(random, limit))
        other = below(random, n)
        if end[other] > s and end[other] - s <= limit and below(random, 4):
            e = end[other]
        elif start[other] > s and start[other] - s <= limit and below(random, 4):
            e = start[other]
    else:
        e = start[k]
        if e <= 0:
            e = layers
        s = max(0, e - 1 - below(random, limit))
        other = below(random, n)
        if start[other] < e and e - start[other] <= limit and below(random, 4):
            s = start[other]
        elif 0 < end[other] < e and e - end[other] <= limit and below(random, 4):
            s = end[other]
    if e <= s or (s == start[i] and e == end[i]):
        return 0
    _put(change, 0, i, s, e)
    return 1


@lean_part
def _resize(
    random: Words, start: Ints, end: Ints, max_layers: Ints, layers: int, change: Ints
) -> int:
    """Move one end of a range by a layer or two, or slide the range."""
    i = below(random, start.shape[0])
    s, e = start[i], end[i]
    if e <= s:
        return 0
    by = 1 + below(random, 2)
    if below(random, 2):
        by = -by
    how = below(random, 3)
    if how != 1:
        s += by
    if how != 0:
        e += by
    if s < 0 or e > layers or e <= s or e - s > max_layers[i]:
        return 0
    _put(change, 0, i, s, e)
    return 1


@lean_part
def _swap(random: Words, start: Ints, end: Ints, max_layers: Ints, kind: Ints, change: Ints) -> int:
    """Exchange the ranges of two unequal nodes; one that is too long is cut at an end."""
    n = start.shape[0]
    i = below(random, n)
    k = below(random, n)
    # Equal nodes or equal ranges: the swap changes nothing.
    if kind[i] == kind[k] or (start[i] == start[k] and end[i] == end[k]):
        return 0
    s, e = start[k], end[k]
    if e - s > max_layers[i]:
        # Which end is cut is drawn, so that both neighbours of the range have a chance to keep their
        # boundary.
        if below(random, 2):
            e = s + max_layers[i]
        else:
            s = e - max_layers[i]
    _put(change, 0, i, s, e)
    s, e = start[i], end[i]
    if e - s > max_layers[k]:
        if below(random, 2):
            e = s + max_layers[k]
        else:
            s = e - max_layers[k]
    _put(change, 1, k, s, e)
    return 2


@lean_part
def _shift(
    random: Words, start: Ints, end: Ints, max_layers: Ints, layers: int, change: Ints
) -> int:
    """Move a boundary by a layer or two, with all nodes that touch it or only one on each side."""
    n = start.shape[0]
    pick = below(random, n)
    x = start[pick] if below(random, 2) else end[pick]
    # The ends of the model are no boundaries between nodes and cannot move.
    if x <= 0 or x >= layers:
        return 0
    by = 1 + below(random, 2)
    if below(random, 2):
        by = -by
    everyone = below(random, 2) == 0
    count = 0
    left = right = False
    # A random first node: with one node on each side it would else always be the one listed first.
    first = below(random, n)
    for step in range(n):
        i = first + step
        if i >= n:
            i -= n
        s, e = start[i], end[i]
        if e <= s:
            continue
        if s == x and (everyone or not right):
            right = True
            s += by
        elif e == x and (everyone or not left):
            left = True
            e += by
        else:
            continue
        # The whole step is dropped when one node does not fit, as a boundary with a gap carries nothing.
        if s < 0 or e > layers or e <= s or e - s > max_layers[i]:
            return 0
        _put(change, count, i, s, e)
        count += 1
    return count


@lean_part
def _recut(
    random: Words, start: Ints, end: Ints, max_layers: Ints, layers: int, change: Ints
) -> int:
    """Take two nodes and lay them one after the other, or both on the same range, from one boundary."""
    n = start.shape[0]
    i = below(random, n)
    k = below(random, n)
    if i == k or end[i] <= start[i]:
        return 0
    s = start[i]
    if below(random, 2):
        e = min(layers, s + 1 + below(random, min(max_layers[i], max_layers[k])))
        _put(change, 0, i, s, e)
        _put(change, 1, k, s, e)
        return 2
    # The far end is an end of some node, so the two together meet what comes after them.
    other = below(random, n)
    e = end[other]
    total = max_layers[i] + max_layers[k]
    if e - s < 2 or e - s > total:
        return 0
    # Each of the two keeps at least a layer and at most what its memory holds.
    low, high = max(1, e - s - max_layers[k]), min(max_layers[i], e - s - 1)
    middle = s + low + below(random, high - low + 1)
    _put(change, 0, i, s, middle)
    _put(change, 1, k, middle, e)
    return 2


@lean_part
def _carry(random: Words, start: Ints, end: Ints, change: Ints) -> int:
    """Take a node out and put it in after or before another; those between close the gap and make room."""
    n = start.shape[0]
    i = below(random, n)
    k = below(random, n)
    held = end[i] - start[i]
    if held <= 0 or end[k] <= start[k]:
        return 0
    if start[k] >= end[i]:
        low, high, by = end[i], end[k], -held
        _put(change, 0, i, end[k] - held, end[k])
    elif end[k] <= start[i]:
        low, high, by = start[k], start[i], held
        _put(change, 0, i, start[k], start[k] + held)
    else:
        return 0
    count = 1
    for other in range(n):
        # Only ranges that lie wholly between the two places move; what straddles an end stays.
        if start[other] >= low and end[other] <= high and end[other] > start[other]:
            _put(change, count, other, start[other] + by, end[other] + by)
            count += 1
    return count


@lean_part
def propose(
    random: Words,
    start: Ints,
    end: Ints,
    max_layers: Ints,
    kind: Ints,
    layers: int,
    idle: int,
    change: Ints,
) -> int:
    """Write a random step into `change` and return its number of rows; 0 where none came of it.

    One step in `idle` takes a node out of use (0: never); a node that is out comes back by any step that
    moves it next to another.
    """
    if idle and below(random, idle) == 0:
        i = below(random, start.shape[0])
        _put(change, 0, i, 0, 0)
        return 1 if end[i] > start[i] else 0
    # Most steps move a node to a boundary; those that move many nodes at once are dear and come seldom.
    dice = below(random, 100)
    count: int
    if dice < 45:
        count = _between(random, start, end, max_layers, layers, change)
    elif dice < 60:
        count = _resize(random, start, end, max_layers, layers, change)
    elif dice < 75:
        count = _swap(random, start, end, max_layers, kind, change)
    elif dice < 88:
        count = _shift(random, start, end, max_layers, layers, change)
    elif dice < 94:
        count = _carry(random, start, end, change)
    else:
        count = _recut(random, start, end, max_layers, layers, change)
    return count
