"""Serving templates: for every small multiset of nodes the throughput-optimal layout of a role.

The search is exact (see `kernel` for the argument) and returns, per role, the throughput of
every single node and of every multiset of at most `max_nodes` nodes and `memory_limit` bytes, and which of
them are worth offering to an allocator: a multiset is dropped if its nodes carry at least as much as several
smaller instances, or with a node left idle. Both hold for any prices, availability and demand, since the
replacement uses no node that the original does not.

Layouts are not stored: `TemplateLibrary.layout` finds the one of a given multiset again.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import UsageError

if TYPE_CHECKING:
    from atoll.solve.templates.kernel import Ints, Small

MOST_NODES = 8
_LARGEST = 2**31 - 1
_CHUNK = 1024

Progress = Callable[[int, int], None]
Solve = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, end) on data-parallel nodes; `rates` is what each node carries there, per second."""

    start: int
    end: int
    nodes: tuple[str, ...]
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        """What the stage carries, per second."""
        return sum(self.rates)


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages in order, first to last, and the throughput of the slowest, per second."""

    stages: tuple[Stage, ...]
    throughput: float


@dataclass(frozen=True)
class RoleTables:
    """Capacities of one role: `rates[S - 1, p, c, j]` per second, p = first, middle, last.

    A single stage is the whole model and stands at p = 0.
    `memory_bytes` is per node type; multisets above `memory_limit` bytes are not considered.
    """

    name: str
    node_types: tuple[str, ...]
    rates: NDArray[np.float64]
    memory_bytes: tuple[float, ...]
    memory_limit: float

    def __post_init__(self) -> None:
        stages, positions, types, _ = self.rates.shape
        if positions != 3 or types != len(self.node_types) or stages < 1:
            raise UsageError(f"capacity table of shape {self.rates.shape} for {types} node types")

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return int(self.rates.shape[3]) - 1

    @cached_property
    def steady(self) -> NDArray[np.float64]:
        """Capacities as the search needs them: fewer layers never carry less, an end stage never more."""
        rates = self.rates.copy()
        rates[..., 1:] = np.minimum.accumulate(rates[..., 1:], axis=-1)
        rates[1:, 0] = np.minimum(rates[1:, 0], rates[1:, 1])
        rates[1:, 2] = np.minimum(rates[1:, 2], rates[1:, 1])
        return np.ascontiguousarray(rates)

    @cached_property
    def top(self) -> float:
        """More than any template carries: t L <= sum over nodes of max j T(j), for every layout."""
        held = np.arange(self.layers + 1)
        work = float((self.steady[1:] * held).max(initial=0.0))
        alone = float(self.steady[0, 0, :, -1].max(initial=0.0)) * self.layers
        return MOST_NODES * max(work, alone) / self.layers

    @cached_property
    def scale(self) -> float:
        """Integer units per unit of flow: as fine as fits when the nodes of an instance add up."""
        top = self.top * MOST_NODES
        return 1.0 if top <= 0.0 else _LARGEST / top * 0.999

    @cached_property
    def units(self) -> Small:
        """Capacities as integers, rounded down, for the search to compare.

        What is above `top` is cut to it, which changes no layout's slowest stage and leaves finer units.
        """
        return np.floor(np.minimum(self.steady, self.top) * self.scale).astype(np.int32)


@dataclass(frozen=True)
class TemplateLibrary:
    """Templates of one role: node counts, throughput per second, best first by no particular order.

    `counts[i, c]` nodes of type c in template i. Only useful templates are kept; `multisets` says how many
    were solved.
    """

    tables: RoleTables
    counts: NDArray[np.int8]
    throughput: NDArray[np.float64]
    multisets: int
    max_nodes: int

    def __len__(self) -> int:
        return len(self.throughput)

    def layout(self, index: int) -> Layout:
        """Return the optimal layout of template `index`."""
        return best_layout(self.tables, self.counts[index])

    def layout_of(self, counts: NDArray[np.integer]) -> Layout:
        """Return the optimal layout of a node multiset, a template or not."""
        return best_layout(self.tables, counts)


@dataclass(frozen=True)
class _Patterns:
    """Distinct groups and partitions of a tuple of `size` nodes, per pattern of equal neighbours."""

    subset_span: Ints
    subsets: Small
    partition_span: Ints
    partitions: Small


@cache
def patterns(size: int, stages: int) -> _Patterns:
    """Return the groups and partitions of `size` nodes into 2..`stages` groups, for every pattern."""
    count = 1 << max(0, size - 1)
    subset_span = np.zeros((count, 2), np.int64)
    partition_span = np.zeros((count, MOST_NODES + 1, 2), np.int64)
    subsets: list[int] = []
    partitions: list[tuple[int, ...]] = []
    blocks = _set_partitions(size)
    for pattern in range(count):
        lowest = [_lowest(mask, pattern, size) for mask in range(1 << size)]
        groups = sorted({lowest[mask] for mask in range(1, 1 << size)})
        subset_span[pattern] = len(subsets), len(subsets) + len(groups)
        subsets += groups
        for number in range(2, min(size, stages) + 1):
            splits = sorted(
                {tuple(sorted(lowest[mask] for mask in b)) for b in blocks if len(b) == number}
            )
            partition_span[pattern, number] = len(partitions), len(partitions) + len(splits)
            partitions += splits
    table = np.zeros((max(1, len(partitions)), MOST_NODES), np.int32)
    for row, masks in enumerate(partitions):
        table[row, : len(masks)] = masks
    return _Patterns(subset_span, np.array(subsets, np.int32), partition_span, table)


def _set_partitions(size: int) -> list[tuple[int, ...]]:
    """All partitions of `size` labelled things, as tuples of bit masks."""
    partitions: list[tuple[int, ...]] = [()]
    for i in range(size):
        bit = 1 << i
        grown = []
        for blocks in partitions:
            grown += [(*blocks[:k], blocks[k] | bit, *blocks[k + 1 :]) for k in range(len(blocks))]
            grown.append((*blocks, bit))
        partitions = grown
    return partitions


def _lowest(mask: int, pattern: int, size: int) -> int:
    """The same group taking the first of equal neighbours."""
    out, start = 0, 0
    while start < size:
        end = start
        while end + 1 < size and pattern >> end & 1:
            end += 1
        taken = sum(mask >> i & 1 for i in range(start, end + 1))
        out |= ((1 << taken) - 1) << start
        start = end + 1
    return out


@cache
def _binomial(types: int) -> Ints:
    rows = types + MOST_NODES + 1
    table = [[math.comb(n, k) for k in range(MOST_NODES + 2)] for n in range(rows)]
    return np.array(table, np.int64)


def multiset_count(types: int, max_nodes: int) -> int:
    """Return how many multisets of 1..max_nodes nodes there are over `types` node types."""
    return sum(math.comb(types + n - 1, n) for n in range(1, max_nodes + 1))


def _cores() -> int:
    """How many processors this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def _in_chunks(work: Callable[[int, int], None], total: int) -> Iterator[int]:
    """Do `work(begin, end)` for all of 0..total, chunk by chunk on all cores; yield how much is done.

    Compiled code runs without the GIL, so threads will do.
    """
    cuts = [*range(0, total, _CHUNK), total]
    if len(cuts) <= 2:
        work(0, total)
        yield total
        return
    # The first one alone: it may have to compile, and the others would wait for that.
    work(0, cuts[1])
    with ThreadPoolExecutor(_cores()) as pool:
        for done, _ in zip(cuts[2:], pool.map(work, cuts[1:-1], cuts[2:]), strict=True):
            yield done


def generate(
    tables: RoleTables, max_nodes: int, *, progress: Progress | None = None
) -> TemplateLibrary:
    """Return all useful templates of a role with at most `max_nodes` nodes (8 at most).

    `progress(done, total)` is called as multisets are solved.
    """
    from atoll.solve.templates import kernel

    if not 1 <= max_nodes <= MOST_NODES:
        raise UsageError(
            f"{max_nodes} nodes per instance", hint="1 to 8", field="max_nodes_per_instance"
        )
    types, layers = len(tables.node_types), tables.layers
    units = tables.units
    # Whole bytes, so that sums are exact and do not depend on their order.
    memory = np.array([round(value) for value in tables.memory_bytes], np.int64)
    sizes = [math.comb(types + n - 1, n) for n in range(1, max_nodes + 1)]
    offsets = np.array([0, 0, *itertools.accumulate(sizes)], np.int64)
    total = int(offsets[-1])
    # The best of every multiset is needed for larger ones only.
    values = np.zeros(int(offsets[-2]) if max_nodes > 1 else 1, np.int32)
    most_stages = min(max_nodes, units.shape[0], layers)
    arguments = (
        units, tables.steady, _reach(units), memory, int(tables.memory_limit),
    )  # fmt: skip
    found = _Found(tables, max_nodes)
    for size in range(1, max_nodes + 1):
        pattern = patterns(size, most_stages)
        last = size == max_nodes
        out = np.zeros(sizes[-1], np.int32) if last else values[offsets[size] : offsets[size + 1]]
        throughput = np.zeros(len(out))
        solve = partial(
            kernel.solve_range, *arguments, size, layers, most_stages, _binomial(types), values, offsets,
            pattern.subset_span, pattern.subsets, pattern.partition_span, pattern.partitions,
        )  # fmt: skip

        def solve_chunk(
            begin: int,
            end: int,
            solve: Solve = solve,
            out: Small = out,
            throughput: NDArray[np.float64] = throughput,
        ) -> None:
            solve(begin, *kernel.Scratch.of(layers), out[begin:end], throughput[begin:end])

        for solved in _in_chunks(solve_chunk, len(out)):
            if progress is not None:
                progress(int(offsets[size]) + solved, total)
        found.add(size, throughput)
    return found.library()


@dataclass
class _Found:
    """Templates found so far, size by size."""

    tables: RoleTables
    max_nodes: int
    multisets: int = 0
    counts: list[NDArray[np.int8]] = field(default_factory=list)
    throughput: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, size: int, throughput: NDArray[np.float64]) -> None:
        """Take the throughputs of all multisets of one size."""
        ranks = np.flatnonzero(throughput > 0.0)
        self.counts.append(_counts_of(ranks, size, len(self.tables.node_types)))
        self.throughput.append(throughput[ranks])
        self.multisets += int(np.count_nonzero(throughput >= 0.0))

    def library(self) -> TemplateLibrary:
        """Return the library of what was found."""
        counts, throughput = np.concatenate(self.counts), np.concatenate(self.throughput)
        return TemplateLibrary(self.tables, counts, throughput, self.multisets, self.max_nodes)


def _reach(units: Small) -> Ints:
    """Return max over j' >= j of j' T(j'), per stage count, node type and j."""
    held = np.arange(units.shape[3], dtype=np.int64)
    work = units.max(axis=1).astype(np.int64) * held
    return np.ascontiguousarray(np.maximum.accumulate(work[..., ::-1], axis=-1)[..., ::-1])


def _counts_of(ranks: NDArray[np.int64], size: int, types: int) -> NDArray[np.int8]:
    """Node counts of multisets given by rank, all at once."""
    binomial = _binomial(types)
    counts = np.zeros((len(ranks), types), np.int8)
    rest = ranks.astype(np.int64)
    row = np.arange(len(ranks))
    for place in range(size - 1, -1, -1):
        column = binomial[: types + place, place + 1]
        value = np.searchsorted(column, rest, side="right") - 1
        rest = rest - column[value]
        np.add.at(counts, (row, value - place), 1)
    return counts


def best_layout(tables: RoleTables, counts: Sequence[int] | NDArray[np.integer]) -> Layout:
    """Return the throughput-optimal layout of one node multiset, given as counts per node type.

    A layout with throughput 0 has no stages: the nodes cannot keep the promise.
    """
    from atoll.solve.templates import kernel

    nodes = [c for c, count in enumerate(counts) for _ in range(int(count))]
    size = len(nodes)
    if not 1 <= size <= MOST_NODES:
        raise UsageError(f"a template of {size} nodes", hint="1 to 8 nodes")
    units, types = tables.units, len(tables.node_types)
    most = min(size, units.shape[0], tables.layers)
    pattern = patterns(size, most)
    rank = sum(math.comb(c + place, place + 1) for place, c in enumerate(nodes))
    scratch = kernel.Scratch.of(tables.layers)
    throughput = np.zeros(1)
    stages = kernel.solve_range(
        units, tables.steady, _reach(units), np.zeros(types, np.int64), 0, size, tables.layers, most,
        _binomial(types), np.zeros(0, np.int32), np.zeros(1, np.int64), pattern.subset_span,
        pattern.subsets, pattern.partition_span, pattern.partitions, rank, *scratch,
        np.zeros(1, np.int32), throughput,
    )  # fmt: skip
    out = []
    start = 0
    for mask, held, position in kernel.read_layout(scratch, stages):
        group = [nodes[i] for i in range(size) if mask >> i & 1]
        rates = tuple(float(tables.steady[stages - 1, position, c, held]) for c in group)
        out.append(Stage(start, start + held, tuple(tables.node_types[c] for c in group), rates))
        start += held
    return Layout(tuple(out), float(throughput[0]))
