"""The inner loop of template generation: the best layout of every node multiset, exactly (numba).

Notation. A role has L layers; T[S-1, p, c, j] is the integer capacity of node type c holding j layers
in a pipeline of S stages at position p (0 first, 1 middle, 2 last; for S = 1 only p = 0, the whole
model). It never rises with j, and T at 0 and 2 is never above T at 1. A layout of a multiset is a
partition into S groups (data-parallel nodes inside a stage) and layer counts j_1 + ... + j_S = L; its
throughput is the least of F_U(j) = sum over c in U of T[c, j] over its stages.

For a threshold t a group can hold J_U(t) = max{j : F_U(j) > t} layers, found by bisection. A partition
beats t iff every J >= 1 and, with the best choice of which group is first and which last, the J add up
to L or more. So one question per partition decides whether it can improve on the incumbent.

A multiset matters only if it carries more than its nodes do as several smaller instances, or with some idle.
Let G(M) be the best that the nodes of M carry in any way: as one instance, or split in two, G(A) + G(M - A).
The incumbent of M starts at its best split: what does not beat that is no template, and G(M) is known. Most
multisets are settled so without a look at their partitions, by a bound on all of them (`out_of_reach`).

Multisets are sorted tuples c_1 <= ... <= c_n, ranked by the combinatorial number system; a group is a
bit mask over positions of the tuple. Where neighbours are equal, masks that differ only in which of
them they take are the same group: each pattern of equal neighbours has its own list of distinct masks
and partitions (see `generate.patterns`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.core.compiling import entry, part
from atoll.solve.array_types import Floats, Ints, Small

# A group is a bit mask over so many positions; scratch tables have an entry for each of the 2**8.
MAX_NODES = 8
COMPILED_AS = "the search for templates"
# Subsets of one half of the positions.
_ROWS = 16
# Rows of `Scratch.counts`: what one search needs beside its arguments.
_NODES, _HELD, _WHERE, _MIDDLE, _FIRST, _LAST, _CAN_HOLD, _CAN_START, _CAN_END, _ASKED = range(10)


class Scratch(NamedTuple):
    """Memory that a call works in, made outside: allocating is slow to compile."""

    counts: Ints
    masks: Small
    left: Small
    right: Small

    @classmethod
    def of(cls, layers: int) -> Scratch:
        """Return memory for models of so many layers."""
        return cls(
            np.zeros((_ASKED + 1, 1 << MAX_NODES), np.int64),
            np.zeros(MAX_NODES, np.int32),
            np.zeros((_ROWS, layers + 1), np.int32),
            np.zeros((_ROWS, layers + 1), np.int32),
        )


@part
def unrank(rank: int, size: int, types: int, binomial: Ints, nodes: Ints) -> None:
    """Write the sorted tuple of this rank into `nodes`."""
    rest = rank
    # The last place first: each takes the largest value whose binomial still fits.
    for place in range(size - 1, -1, -1):
        value = types + place - 1
        while binomial[value, place + 1] > rest:
            value -= 1
        rest -= binomial[value, place + 1]
        nodes[place] = value - place


@part
def advance(nodes: Ints, size: int) -> None:
    """Step to the tuple of the next rank."""
    i = 0
    # Equal neighbours stand as high as they can: they start again, and the next one rises.
    while i < size - 1 and nodes[i] == nodes[i + 1]:
        nodes[i] = 0
        i += 1
    nodes[i] += 1


@part
def group_layers(table: Small, nodes: Ints, mask: int, threshold: int, layers: int) -> int:
    """Return the most layers a group can hold with throughput above `threshold` (0: none)."""
    # `low` layers are above the threshold (0 always counts so), `high` are not.
    low, high = 0, layers + 1
    while high - low > 1:
        middle = (low + high) >> 1
        total = 0
        bits = mask
        i = 0
        while bits:
            if bits & 1:
                total += table[nodes[i], middle]
            bits >>= 1
            i += 1
        if total > threshold:
            low = middle
        else:
            high = middle
    return low


@part
def group_rate(table: Small, nodes: Ints, mask: int, held: int) -> int:
    """Return the throughput of a group that holds so many layers."""
    total = 0
    bits = mask
    i = 0
    while bits:
        if bits & 1:
            total += table[nodes[i], held]
        bits >>= 1
        i += 1
    return total


@part
def place_ends(
    tables: Small,
    nodes: Ints,
    masks: Small,
    stages: int,
    threshold: int,
    layers: int,
    counts: Ints,
) -> bool:
    """Say whether a partition beats `threshold`; if so fill layers and position of each group.

    Every group is taken as a middle stage first; then the pair of groups that loses fewest layers by
    being first and last is chosen.
    """
    held, where, middle = counts[_HELD], counts[_WHERE], counts[_MIDDLE]
    total = 0
    # A group holds most as a middle stage: what fails so fails at the ends too.
    for s in range(stages):
        middle[s] = group_layers(tables[1], nodes, masks[s], threshold, layers)
        if middle[s] == 0:
            return False
        total += middle[s]
    if total < layers:
        return False
    first, last = counts[_FIRST], counts[_LAST]
    for s in range(stages):
        first[s] = group_layers(tables[0], nodes, masks[s], threshold, layers)
        last[s] = group_layers(tables[2], nodes, masks[s], threshold, layers)
    best, best_f, best_l = -1, 0, 0
    for f in range(stages):
        if first[f] == 0:
            continue
        for end in range(stages):
            if end == f or last[end] == 0:
                continue
            sum_held = total - middle[f] - middle[end] + first[f] + last[end]
            if sum_held > best:
                best, best_f, best_l = sum_held, f, end
    if best < layers:
        return False
    for s in range(stages):
        held[s], where[s] = middle[s], 1
    held[best_f], where[best_f] = first[best_f], 0
    held[best_l], where[best_l] = last[best_l], 2
    return True


@part
def ends_fit(
    tables: Small,
    nodes: Ints,
    masks: Small,
    stages: int,
    threshold: int,
    layers: int,
    total: int,
    counts: Ints,
) -> bool:
    """Say whether some choice of first and last group leaves room for all layers.

    `total` is what the groups hold as middle stages; what they hold at the ends is worked
    out when first asked for and remembered (-1: not yet).
    """
    can_hold, can_start, can_end = counts[_CAN_HOLD], counts[_CAN_START], counts[_CAN_END]
    best = -1
    for f in range(stages):
        mask = masks[f]
        if can_start[mask] < 0:
            can_start[mask] = group_layers(tables[0], nodes, mask, threshold, layers)
        # As the first stage it loses too much already, whichever is last.
        if can_start[mask] == 0 or total - can_hold[mask] + can_start[mask] < layers:
            continue
        for end in range(stages):
            other = masks[end]
            if end == f:
                continue
            if can_end[other] < 0:
                can_end[other] = group_layers(tables[2], nodes, other, threshold, layers)
            if can_end[other] > 0:
                lost = can_hold[mask] - can_start[mask] + can_hold[other] - can_end[other]
                best = max(best, total - lost)
    return best >= layers


@part
def raise_partition(
    tables: Small,
    nodes: Ints,
    masks: Small,
    stages: int,
    threshold: int,
    layers: int,
    counts: Ints,
) -> int:
    """Return the best throughput of a partition if above `threshold`, else `threshold`.

    Each round's layer counts are a layout whose slowest stage is above the threshold; that becomes the
    next threshold, until nothing is above it.
    """
    current = threshold
    held, where = counts[_HELD], counts[_WHERE]
    while place_ends(tables, nodes, masks, stages, current, layers, counts):
        slowest = 1 << 60
        for s in range(stages):
            rate = group_rate(tables[where[s]], nodes, masks[s], held[s])
            slowest = min(slowest, rate)
        # Above the threshold before: every round rises, so the loop ends.
        current = slowest
    return current


@part
def stage_rate(rates: Floats, nodes: Ints, mask: int, held: int) -> float:
    """Return the exact throughput of a group that holds so many layers."""
    total = 0.0
    bits = mask
    i = 0
    while bits:
        if bits & 1:
            total += rates[nodes[i], held]
        bits >>= 1
        i += 1
    return total


@part
def lay_out(
    tables: Small,
    rates: Floats,
    nodes: Ints,
    masks: Small,
    stages: int,
    best: int,
    layers: int,
    counts: Ints,
) -> float:
    """Give every group of the best partition its layers and position; return the exact throughput.

    Every group gets as many layers as it can hold at `best`; what is too much is taken where that helps
    most, from the slowest stage each time.
    """
    held, where = counts[_HELD], counts[_WHERE]
    if stages == 1:
        held[0], where[0] = layers, 0
        return stage_rate(rates[0], nodes, masks[0], layers)
    # Tables are whole numbers: above `best` - 1 means at least `best`.
    place_ends(tables, nodes, masks, stages, best - 1, layers, counts)
    surplus = -layers
    for s in range(stages):
        surplus += held[s]
    while True:
        slowest, at, can_give = 1e300, 0, -1
        min_rate = 1e300
        for s in range(stages):
            rate = stage_rate(rates[where[s]], nodes, masks[s], held[s])
            min_rate = min(min_rate, rate)
            # Every stage keeps a layer.
            if held[s] > 1 and rate < slowest:
                slowest, at, can_give = rate, s, s
        if surplus == 0 or can_give < 0:
            return min_rate
        held[at] -= 1
        surplus -= 1


@part
def fill_rows(table: Small, nodes: Ints, begin: int, end: int, rows: Small) -> None:
    """Write the summed capacities of every subset of positions begin..end-1 into `rows`, by mask."""
    layers = table.shape[1]
    # By rising masks, so that the row without the lowest bit is there.
    for mask in range(1, 1 << (end - begin)):
        bit = 0
        while not mask >> bit & 1:
            bit += 1
        rest = mask & (mask - 1)
        own = table[nodes[begin + bit]]
        if rest == 0:
            for j in range(layers):
                rows[mask, j] = own[j]
        else:
            for j in range(layers):
                rows[mask, j] = rows[rest, j] + own[j]


@part
def row_layers(left: Small, right: Small, threshold: int, layers: int) -> int:
    """Return the most layers two parts of a group hold together above `threshold`.

    Rates fall with the number of layers, so this counts those above: a straight loop that the compiler
    turns into vector instructions, faster than a bisection that guesses wrong at every step.
    """
    limit = np.int32(threshold)
    count = 0
    for j in range(1, layers + 1):
        if np.int32(left[j] + right[j]) > limit:
            count += 1
    return count


@part
def out_of_reach(
    table: Small, reach: Ints, nodes: Ints, size: int, threshold: int, layers: int
) -> bool:
    """Say whether no layout can exceed `threshold`, whatever the partition.

    A stage above t has sum over its nodes of min(T_c(j), t) >= t; times j and summed over stages,
    sum over nodes of max_j j min(T_c(j), t) >= t L. `reach[c, j]` is max over j' >= j of j' T_c(j').
    """
    total = 0
    for i in range(size):
        own = table[nodes[i]]
        # The most layers at which the node alone is above the threshold.
        low, high = 0, layers + 1
        while high - low > 1:
            middle = (low + high) >> 1
            if own[middle] > threshold:
                low = middle
            else:
                high = middle
        # Up to there min(T, t) is t, and j t is largest at the end; beyond, `reach` knows the best.
        best = threshold * low
        if low < layers:
            best = max(best, reach[nodes[i], low + 1])
        total += best
    return total < threshold * layers


@part
def pattern_of(nodes: Ints, size: int) -> int:
    """Return the bits that say which neighbours are equal."""
    bits = 0
    for i in range(size - 1):
        if nodes[i] == nodes[i + 1]:
            bits |= 1 << i
    return bits


@part
def count_kinds(pattern: int, size: int) -> int:
    """Return how many different kinds a multiset has."""
    kinds = size
    bits = pattern
    while bits:
        kinds -= bits & 1
        bits >>= 1
    return kinds


@part
def solve(  # noqa: C901 - one search
    tables: Small,
    reach: Ints,
    size: int,
    pattern: int,
    start: int,
    layers: int,
    max_stages: int,
    subset_span: Ints,
    subsets: Small,
    partition_span: Ints,
    partitions: Small,
    counts: Ints,
    best_masks: Small,
    left: Small,
    right: Small,
) -> tuple[int, int]:
    """Return (throughput, stages) of the best layout of one multiset; (start, 0) if none is above `start`.

    `reach[S-1, c, j]` is max over j' >= j of j' T[c, j'], at the best position. The masks of the best
    partition are written to `best_masks`. The multiset and the rest of the scratch memory is in `counts`,
    `left` and `right` (see `Scratch`); row 0 of the last two is zero.
    """
    best, best_stages = start, 0
    nodes = counts[_NODES]
    can_hold, can_start, can_end = counts[_CAN_HOLD], counts[_CAN_START], counts[_CAN_END]
    asked = counts[_ASKED]
    rate = 0
    # All nodes as one stage first: it raises the threshold for every partition.
    for i in range(size):
        rate += tables[0, 0, nodes[i], layers]
    if rate > best:
        best, best_stages = rate, 1
        best_masks[0] = (1 << size) - 1
    # A group is a subset of each half: two small tables of sums serve all of them.
    half = (size + 1) >> 1
    low = (1 << half) - 1
    for stages in range(2, min(size, max_stages) + 1):
        own = tables[stages - 1]
        if out_of_reach(own[1], reach[stages - 1], nodes, size, best, layers):
            continue
        fill_rows(own[1], nodes, 0, half, left)
        fill_rows(own[1], nodes, half, size, right)
        # Layers of every distinct group, as a middle stage. Thresholds rise as the search goes on, so that
        # what was found for an earlier one is never too little: it is asked for again where it decides.
        for q in range(subset_span[pattern, 0], subset_span[pattern, 1]):
            mask = subsets[q]
            can_hold[mask] = row_layers(left[mask & low], right[mask >> half], best, layers)
            can_start[mask] = -1
            can_end[mask] = -1
            asked[mask] = best
        for p in range(partition_span[pattern, stages, 0], partition_span[pattern, stages, 1]):
            # With counts that may be old first: those are never too small, so what fails here fails.
            total = 0
            for s in range(stages):
                more = can_hold[partitions[p, s]]
                if more == 0:
                    total = -1
                    break
                total += more
            if total < layers:
                continue
            # Then with counts for the threshold of now, up to the first that rules it out.
            for s in range(stages):
                mask = partitions[p, s]
                if asked[mask] != best:
                    total -= can_hold[mask]
                    can_hold[mask] = row_layers(left[mask & low], right[mask >> half], best, layers)
                    total += can_hold[mask]
                    can_start[mask] = -1
                    can_end[mask] = -1
                    asked[mask] = best
                    if can_hold[mask] == 0:
                        total = -1
                    if total < layers:
                        break
            if total < layers or not ends_fit(
                own, nodes, partitions[p], stages, best, layers, total, counts
            ):
                continue
            found = raise_partition(own, nodes, partitions[p], stages, best, layers, counts)
            if found > best:
                best, best_stages = found, stages
                for s in range(stages):
                    best_masks[s] = partitions[p, s]
    return best, best_stages


@part
def split_best(
    nodes: Ints,
    size: int,
    binomial: Ints,
    values: Small,
    offsets: Ints,
    subsets: Small,
    begin: int,
    end: int,
) -> int:
    """Return the best sum over two smaller multisets with the same nodes in total.

    `subsets[begin:end]` are the distinct groups that may be one of the two. One of the two has the
    first node, or an equal one in its place, so only groups with it are looked at.
    """
    best = 0
    full = (1 << size) - 1
    for q in range(begin, end):
        mask = np.int64(subsets[q])
        if mask == full or not mask & 1:
            continue
        here, there = 0, 0
        few, more = 0, 0
        # Both ranks in one pass: the tuple is sorted, and so is either part of it.
        for i in range(size):
            if mask >> i & 1:
                here += binomial[nodes[i] + few, few + 1]
                few += 1
            else:
                there += binomial[nodes[i] + more, more + 1]
                more += 1
        best = max(best, int(values[offsets[few] + here]) + int(values[offsets[more] + there]))
    return best


@entry(
    "(int32[:, :, :, ::1], float64[:, :, :, ::1], int64[:, :, ::1], int64[::1], int64, int64, int64,"
    " int64, int64, int64[:, ::1], int32[::1], int64[::1], int64[:, ::1], int32[::1], int64[:, :, ::1],"
    " int32[:, ::1], int64, int64[:, ::1], int32[::1], int32[:, ::1], int32[:, ::1], int32[::1],"
    " float64[::1])"
)
def solve_range(
    tables: Small,
    rates: Floats,
    reach: Ints,
    memory: Ints,
    memory_limit: int,
    size: int,
    max_kinds: int,
    layers: int,
    max_stages: int,
    binomial: Ints,
    values: Small,
    offsets: Ints,
    subset_span: Ints,
    subsets: Small,
    partition_span: Ints,
    partitions: Small,
    begin: int,
    counts: Ints,
    masks: Small,
    left: Small,
    right: Small,
    out: Small,
    throughput: Floats,
) -> int:
    """Solve the multisets of `size` nodes from rank `begin` on.

    `out` gets G of each, the best that its nodes carry in any way, and `throughput` what they carry as
    one instance where that is more than in any other way, else 0; -1 where they have too much memory,
    which a single node never has, or are of too many kinds. `values` holds G of all smaller multisets, size
    by size from `offsets` (empty: nothing is known, and every multiset is laid out); the rest is scratch
    memory. Returns the stages of the last one's layout; `masks` holds its groups and `counts` their layers
    and positions.
    """
    nodes = counts[_NODES]
    unrank(begin, size, tables.shape[2], binomial, nodes)
    stages = 0
    for rank in range(begin, begin + len(out)):
        used = 0
        for i in range(size):
            used += memory[nodes[i]]
        pattern = pattern_of(nodes, size)
        if size > 1 and (used > memory_limit or count_kinds(pattern, size) > max_kinds):
            # No larger multiset gains by splitting into this one.
            out[rank - begin] = 0
            throughput[rank - begin] = -1.0
        else:
            start = 0
            if size > 1 and len(values) > 0:
                start = split_best(
                    nodes, size, binomial, values, offsets,
                    subsets, subset_span[pattern, 0], subset_span[pattern, 1],
                )  # fmt: skip
            best, stages = solve(
                tables, reach, size, pattern, start, layers, max_stages,
                subset_span, subsets, partition_span, partitions, counts, masks, left, right,
            )  # fmt: skip
            out[rank - begin] = best
            throughput[rank - begin] = 0.0
            if stages > 0:
                throughput[rank - begin] = lay_out(
                    tables[stages - 1],
                    rates[stages - 1],
                    nodes,
                    masks,
                    stages,
                    best,
                    layers,
                    counts,
                )
        advance(nodes, size)
    return stages


def read_layout(scratch: Scratch, stages: int) -> list[tuple[int, int, int]]:
    """Return (group, layers, position) per stage, first to last, of the last layout found in `scratch`."""
    held, where = scratch.counts[_HELD], scratch.counts[_WHERE]
    found = [(int(scratch.masks[s]), int(held[s]), int(where[s])) for s in range(stages)]
    # The sort is stable: middle stages stay in order.
    return sorted(found, key=lambda stage: stage[2])
