"""Serving templates: for every small multiset of nodes the throughput-optimal layout of a role.

The search is exact (see `template_kernel` for the argument) and returns, per role, the throughput of
every single node and of every multiset of at most `max_nodes` nodes and `memory_limit` bytes, and which of
them are worth offering to an allocator: a multiset is dropped if its nodes carry at least as much as several
smaller instances, or with a node left idle. Both hold for any prices, availability and demand, since the
replacement uses no node that the original does not.

With more than about 20 kinds of nodes not all sets of six are searched: an instance then has at most so many
different kinds that `MAX_MULTISETS` are left, and never fewer than three (`search_limits`). What is searched
is exact still, for all subsets of a set are searched with it. What is left out hardly pays, since a fourth
kind only fills what rounding to whole layers leaves: over 20 kinds, where all can be searched, sets of up to
three kinds cover demands at 0.01 % above the optimum on average and at 0.8 % at worst, where prices are such
that many kinds cost about the same (`benchmarks.templates` measures it).

Layouts are not stored: `TemplateLibrary.layout` finds the one of a given multiset again.

Where engines decide what can be planned, the templates of a role come from several searches, one for each
engine and the layouts that it runs (`EngineTables`); of a multiset, the engine that carries most is taken,
or one that is preferred and carries almost as much (`merge`).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import UsageError

if TYPE_CHECKING:
    from atoll.perf.layers import Split
    from atoll.solve.array_types import Ints, Small

# The kernel's groups are masks over at most so many nodes.
MAX_NODES = 8
MAX_MULTISETS = 300_000
"""More sets of nodes than this are not searched for a role, as long as they may be of `MIN_KINDS` kinds."""
MIN_KINDS = 3
PREFERENCE = 0.01
"""An engine that is preferred runs a set of nodes where it carries at most this share less than another."""
# All multisets are ranked, searched or not: with more of them, sets have fewer nodes.
_MAX_RANKS = 60_000_000
# Units of capacity have 32 bits.
_LARGEST = 2**31 - 1
_CHUNK = 1024
_MAX_CHUNKS = 256

Progress = Callable[[int, int], None]
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, end) on data-parallel nodes; `rates` is what each node carries there, per second."""

    start: int
    end: int
    nodes: tuple[str, ...]
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Throughput of the stage, per second."""
        return sum(self.rates)


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages in order, first to last, and the throughput of the slowest, per second.

    `engine` runs it, None where layouts are free; `tp` as in `EngineSearch`.
    """

    stages: tuple[Stage, ...]
    throughput: float
    engine: str | None = None
    tp: Split = None


@dataclass(frozen=True)
class RoleTables:
    """Capacities of one role: `rates[S - 1, p, c, j]` per second, p = first, middle, last.

    A single stage is the whole model and stands at p = 0.
    `memory_bytes` is per node type; multisets above `memory_limit` bytes are not considered. In `rows` every
    stage is one node.
    """

    name: str
    node_types: tuple[str, ...]
    rates: NDArray[np.float64]
    memory_bytes: tuple[float, ...]
    memory_limit: float
    rows: bool = False

    def __post_init__(self) -> None:
        stages, positions, types, _ = self.rates.shape
        if positions != 3 or types != len(self.node_types) or stages < 1:
            raise UsageError(f"capacity table of shape {self.rates.shape} for {types} node types")

    def scaled(self, share: float) -> RoleTables:
        """Return a share of all capacities."""
        return replace(self, rates=self.rates * share)

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
        return MAX_NODES * max(work, alone) / self.layers

    @cached_property
    def scale(self) -> float:
        """Integer units per unit of flow: as fine as fits when the nodes of an instance add up.

        A whole number where above 1, so that rates that are whole numbers add up exactly.
        """
        top = self.top * MAX_NODES
        # The margin keeps rounding of floats below the largest integer.
        scale = 1.0 if top <= 0.0 else _LARGEST / top * 0.999
        return float(math.floor(scale)) if scale > 1.0 else scale

    @cached_property
    def reach(self) -> Ints:
        """The most j' T(j') of j or more layers, per stage count, node type and j."""
        return _reach(self.units)

    @cached_property
    def units(self) -> Small:
        """Capacities as integers, rounded down, for the search to compare.

        What is above `top` is cut to it, which changes no layout's slowest stage and leaves finer units.
        """
        return np.floor(np.minimum(self.steady, self.top) * self.scale).astype(np.int32)


@dataclass(frozen=True, slots=True)
class EngineSearch:
    """Layouts to search: those of an engine over some kinds of nodes.

    `columns` are these kinds among those of the role. `engine` None leaves layouts free; `tp` GPUs of each
    node split a layer ("all" that it has; None: as is best on each); in `rows` every stage is one node.
    Instances have at most `max_nodes` nodes.
    """

    engine: str | None
    columns: tuple[int, ...]
    tp: Split = None
    rows: bool = False
    max_nodes: int = MAX_NODES


@dataclass(frozen=True)
class EngineTables:
    """Capacities of a role for a search, on its kinds of nodes."""

    search: EngineSearch
    tables: RoleTables

    def layout(self, counts: NDArray[np.integer]) -> Layout | None:
        """Return the best layout of a multiset of the role's kinds; None if it is not searched here."""
        search = self.search
        own = counts[list(search.columns)]
        if own.sum() != counts.sum() or own.sum() > search.max_nodes:
            return None
        return replace(best_layout(self.tables, own), engine=search.engine, tp=search.tp)


@dataclass(frozen=True)
class TemplateLibrary:
    """Templates of one role: node counts and throughput per second, in no particular order.

    `counts[i, c]` nodes of type c in template i. Only useful templates are kept; `multisets` says how many
    were solved, of at most `max_nodes` nodes of at most `max_kinds` kinds. Template i was made from
    `made_from[origin[i]]`; `tables` are the largest capacities of all of these.
    """

    tables: RoleTables
    counts: NDArray[np.int8]
    throughput: NDArray[np.float64]
    multisets: int
    max_nodes: int
    max_kinds: int
    made_from: tuple[EngineTables, ...] = ()
    origin: NDArray[np.int8] | None = None

    def __len__(self) -> int:
        return len(self.throughput)

    def scaled(self, share: float) -> TemplateLibrary:
        """Return the templates with a share of all capacities."""
        made_from = tuple(
            replace(made, tables=made.tables.scaled(share)) for made in self.made_from
        )
        return replace(
            self,
            tables=self.tables.scaled(share),
            throughput=self.throughput * share,
            made_from=made_from,
        )

    def layout(self, index: int) -> Layout:
        """Return the optimal layout of template `index`."""
        if self.origin is None:
            return best_layout(self.tables, self.counts[index])
        found = self.made_from[int(self.origin[index])].layout(self.counts[index])
        assert found is not None
        return found

    def layout_of(self, counts: NDArray[np.integer]) -> Layout:
        """Return the optimal layout of a node multiset, a template or not."""
        if self.origin is None:
            return best_layout(self.tables, counts)
        best = Layout((), 0.0)
        for found in self._layouts(counts):
            if found.throughput > best.throughput * (1.0 + PREFERENCE):
                best = found
        return best

    def rivals(self, index: int) -> tuple[Layout, ...]:
        """Return the best layout of template `index` on every engine but its own."""
        if self.origin is None:
            return ()
        own = self.made_from[int(self.origin[index])].search.engine
        best: dict[str | None, Layout] = {}
        for found in self._layouts(self.counts[index]):
            held = best.get(found.engine)
            if found.throughput > (0.0 if held is None else held.throughput):
                best[found.engine] = found
        return tuple(one for engine, one in best.items() if engine != own)

    def run_by(self, engines: Mapping[int, str | None]) -> TemplateLibrary:
        """Return the templates with the engines of some of them, by index, taken as said."""
        if not engines or self.origin is None:
            return self
        throughput, origin = self.throughput.copy(), self.origin.copy()
        for index, engine in engines.items():
            throughput[index] = 0.0
            for number, made in enumerate(self.made_from):
                found = made.layout(self.counts[index]) if made.search.engine == engine else None
                if found is not None and found.throughput > throughput[index]:
                    throughput[index], origin[index] = found.throughput, number
        return replace(self, throughput=throughput, origin=origin)

    def _layouts(self, counts: NDArray[np.integer]) -> Iterator[Layout]:
        """Yield the best layout of a node multiset in each of the searches that cover it."""
        for made in self.made_from:
            found = made.layout(counts)
            if found is not None:
                yield found


def merge(
    node_types: tuple[str, ...], parts: Sequence[tuple[EngineTables, TemplateLibrary]]
) -> TemplateLibrary:
    """Return the templates of a role with several engines, the preferred first: each set of nodes once.

    A set of nodes is run by the first engine that carries as much as any, within `PREFERENCE`.
    """
    nothing = np.zeros((0, len(node_types)), np.int8)
    spread = [np.zeros((len(library), len(node_types)), np.int8) for _, library in parts]
    for counts, (made, library) in zip(spread, parts, strict=True):
        counts[:, list(made.search.columns)] = library.counts
    sets, where = np.unique(np.concatenate([nothing, *spread]), axis=0, return_inverse=True)
    best, origin = np.zeros(len(sets)), np.zeros(len(sets), np.int8)
    begin = 0
    for number, (_, library) in enumerate(parts):
        own = where.reshape(-1)[begin : begin + len(library)]
        begin += len(library)
        better = library.throughput > best[own] * (1.0 + PREFERENCE)
        best[own[better]], origin[own[better]] = library.throughput[better], number
    return TemplateLibrary(
        _merge_tables(node_types, [made for made, _ in parts]),
        sets,
        best,
        sum(library.multisets for _, library in parts),
        max((library.max_nodes for _, library in parts), default=0),
        max((library.max_kinds for _, library in parts), default=0),
        tuple(made for made, _ in parts),
        origin,
    )


def _merge_tables(node_types: tuple[str, ...], parts: Sequence[EngineTables]) -> RoleTables:
    """Return the largest capacity that any engine has on each kind; a bound, which nobody may reach."""
    if not parts:
        return RoleTables(
            "", node_types, np.zeros((1, 3, len(node_types), 2)), (0.0,) * len(node_types), 0.0
        )
    one = parts[0].tables
    stages = max(len(made.tables.rates) for made in parts)
    rates = np.zeros((stages, 3, len(node_types), one.layers + 1))
    memory = [0.0] * len(node_types)
    for made in parts:
        own = list(made.search.columns)
        held = rates[: len(made.tables.rates), :, own]
        rates[: len(made.tables.rates), :, own] = np.maximum(held, made.tables.rates)
        for column, size in zip(own, made.tables.memory_bytes, strict=True):
            memory[column] = size
    return RoleTables(one.name, node_types, rates, tuple(memory), one.memory_limit)


@dataclass(frozen=True)
class _Patterns:
    """Distinct groups and partitions of a tuple of `size` nodes, per pattern of equal neighbours."""

    subset_span: Ints
    subsets: Small
    partition_span: Ints
    partitions: Small


@cache
def patterns(size: int, stages: int, only: int | None = None, *, rows: bool = False) -> _Patterns:
    """Return the groups and partitions of `size` nodes into 2..`stages` groups, for all patterns or one.

    In `rows` every group is one node.
    """
    count = 1 << max(0, size - 1)
    subset_span = np.zeros((count, 2), np.int64)
    partition_span = np.zeros((count, MAX_NODES + 1, 2), np.int64)
    subsets: list[int] = []
    partitions: list[tuple[int, ...]] = []
    blocks = [tuple(1 << i for i in range(size))] if rows else _set_partitions(size)
    for pattern in range(count) if only is None else (only,):
        # Of masks that differ in which of equal nodes they take, the lowest stands for all.
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
    table = np.zeros((max(1, len(partitions)), MAX_NODES), np.int32)
    for row, masks in enumerate(partitions):
        table[row, : len(masks)] = masks
    return _Patterns(subset_span, np.array(subsets, np.int32), partition_span, table)


@cache
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
    rows = types + MAX_NODES + 1
    table = [[math.comb(n, k) for k in range(MAX_NODES + 2)] for n in range(rows)]
    return np.array(table, np.int64)


def multiset_count(types: int, max_nodes: int, max_kinds: int = MAX_NODES) -> int:
    """Return how many multisets of 1..max_nodes nodes of at most `max_kinds` of `types` kinds there are."""
    return sum(
        math.comb(types, kinds) * math.comb(max_nodes, kinds)
        for kinds in range(1, min(max_nodes, max_kinds) + 1)
    )


def search_limits(types: int, max_nodes: int) -> tuple[int, int]:
    """Return the most nodes, and the most different kinds, of the sets that are searched.

    All there are, or where those are too many the most kinds, from three on, that leave `MAX_MULTISETS`.
    """
    nodes = max_nodes
    while nodes > 1 and multiset_count(types, nodes) > _MAX_RANKS:
        nodes -= 1
    kinds = nodes
    while kinds > MIN_KINDS and multiset_count(types, nodes, kinds) > MAX_MULTISETS:
        kinds -= 1
    return nodes, kinds


def _cores() -> int:
    """How many processors this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def _in_chunks(work: Callable[[int, int], Part], total: int) -> Iterator[tuple[int, Part]]:
    """Do `work(begin, end)` for all of 0..total, chunk by chunk on all cores; yield (end, result) in order.

    Compiled code runs without the GIL, so threads will do. What is not asked for any more is not done.
    """
    step = max(_CHUNK, -(-total // _MAX_CHUNKS))
    cuts = [*range(0, total, step), total]
    if len(cuts) == 1:
        return
    # The first one alone: it may have to compile, and the others would wait for that.
    yield cuts[1], work(0, cuts[1])
    if len(cuts) == 2:
        return
    with ThreadPoolExecutor(_cores()) as pool:
        results = pool.map(work, cuts[1:-1], cuts[2:])
        try:
            yield from zip(cuts[2:], results, strict=True)
        finally:
            # Also where the caller stops asking: chunks that were not begun are dropped.
            pool.shutdown(cancel_futures=True)


def generate(
    tables: RoleTables,
    max_nodes: int,
    *,
    progress: Progress | None = None,
    until: Callable[[], bool] | None = None,
) -> TemplateLibrary:
    """Return all useful templates of a role with at most `max_nodes` nodes (8 at most).

    `progress(done, total)` is called as multisets are solved. Once `until()` holds, the sizes that were
    finished are what is returned, single nodes always; `max_nodes` of the library says how far it got.
    """
    if not 1 <= max_nodes <= MAX_NODES:
        raise UsageError(
            f"{max_nodes} nodes per instance", hint="1 to 8", field="max_nodes_per_instance"
        )
    search = _Search(tables, *search_limits(len(tables.node_types), max_nodes))
    for size in range(1, search.max_nodes + 1):
        if not search.solve(size, progress, until if size > 1 else None):
            break
    return search.library()


def equal_nodes(tables: RoleTables, max_nodes: int) -> NDArray[np.float64]:
    """Return what 1..`max_nodes` nodes carry as one instance, for tables of one kind; 0 where that is no use.

    The same as `generate`, sooner.
    """
    from atoll.solve.templates import template_kernel as kernel

    nodes, kinds = search_limits(1, max_nodes)
    throughput = np.zeros(nodes)
    if not tables.rates.any():
        return throughput
    layers, units = tables.layers, tables.units
    stages = min(nodes, units.shape[0], layers)
    memory = np.array([round(tables.memory_bytes[0])], np.int64)
    offsets = np.array([0, *range(nodes + 1)], np.int64)
    values, scratch = np.zeros(nodes, np.int32), kernel.Scratch.of(layers)
    for size in range(1, nodes + 1):
        # All are alike: there is one set of each size, and one pattern of neighbours.
        pattern = patterns(size, stages, (1 << (size - 1)) - 1, rows=tables.rows)
        kernel.solve_range(
            units, tables.steady, tables.reach, memory, int(tables.memory_limit), size, kinds, layers,
            stages, _binomial(1), values, offsets, pattern.subset_span, pattern.subsets,
            pattern.partition_span, pattern.partitions, 0, *scratch, values[size - 1 : size],
            throughput[size - 1 : size],
        )  # fmt: skip
    return np.maximum(throughput, 0.0)


class _Search:
    """All multisets of a role, size by size: each size needs what the smaller ones carry."""

    def __init__(self, tables: RoleTables, max_nodes: int, max_kinds: int) -> None:
        self.tables, self.max_nodes, self.max_kinds = tables, max_nodes, max_kinds
        types = len(tables.node_types)
        sizes = [math.comb(types + n - 1, n) for n in range(1, max_nodes + 1)]
        self._offsets = np.array([0, 0, *itertools.accumulate(sizes)], np.int64)
        # What a multiset carries in any way is needed for larger ones only.
        self._values = np.zeros(max(1, int(self._offsets[-2])), np.int32)
        self._stages = min(max_nodes, tables.units.shape[0], tables.layers)
        self._reach = tables.reach
        # Whole bytes, so that sums are exact and do not depend on their order.
        self._memory = np.array([round(value) for value in tables.memory_bytes], np.int64)
        self._solved = 0
        self._multisets = 0
        self._counts: list[NDArray[np.int8]] = []
        self._throughput: list[NDArray[np.float64]] = []

    def solve(self, size: int, progress: Progress | None, until: Callable[[], bool] | None) -> bool:
        """Solve all multisets of one size; False if time was up before."""
        from atoll.solve.templates import template_kernel as kernel

        tables, offsets = self.tables, self._offsets
        types, layers = len(tables.node_types), tables.layers
        pattern = patterns(size, self._stages, rows=tables.rows)
        number = int(offsets[size + 1] - offsets[size])
        values = self._values[offsets[size] : offsets[size + 1]] if size < self.max_nodes else None
        solve_range = partial(
            kernel.solve_range, tables.units, tables.steady, self._reach, self._memory,
            int(tables.memory_limit), size, self.max_kinds, layers, self._stages, _binomial(types),
            self._values, offsets, pattern.subset_span, pattern.subsets, pattern.partition_span,
            pattern.partitions,
        )  # fmt: skip

        def solve_chunk(begin: int, end: int) -> tuple[int, Ints, NDArray[np.float64]]:
            out = np.zeros(end - begin, np.int32) if values is None else values[begin:end]
            throughput = np.zeros(end - begin)
            solve_range(begin, *kernel.Scratch.of(layers), out, throughput)
            useful = np.flatnonzero(throughput > 0.0)
            return int(np.count_nonzero(throughput >= 0.0)), begin + useful, throughput[useful]

        multisets, ranks, rates = 0, [np.zeros(0, np.int64)], [np.zeros(0)]
        for done, (solved, useful, throughput) in _in_chunks(solve_chunk, number):
            # A size that is not finished is dropped: larger ones need all of its values.
            if until is not None and until():
                return False
            multisets += solved
            ranks.append(useful)
            rates.append(throughput)
            if progress is not None:
                progress(int(offsets[size]) + done, int(offsets[-1]))
        self._solved = size
        self._multisets += multisets
        self._counts.append(_counts_of(np.concatenate(ranks), size, types))
        self._throughput.append(np.concatenate(rates))
        return True

    def library(self) -> TemplateLibrary:
        """Return what was found."""
        counts, throughput = np.concatenate(self._counts), np.concatenate(self._throughput)
        return TemplateLibrary(
            self.tables, counts, throughput, self._multisets, self._solved, self.max_kinds
        )


def _reach(units: Small) -> Ints:
    """Return max over j' >= j of j' T(j'), per stage count, node type and j."""
    held = np.arange(units.shape[3], dtype=np.int64)
    # At the best position: the bound must hold wherever a node stands.
    work = units.max(axis=1).astype(np.int64) * held
    return np.ascontiguousarray(np.maximum.accumulate(work[..., ::-1], axis=-1)[..., ::-1])


def _counts_of(ranks: NDArray[np.int64], size: int, types: int) -> NDArray[np.int8]:
    """Node counts of multisets given by rank, all at once."""
    binomial = _binomial(types)
    counts = np.zeros((len(ranks), types), np.int8)
    rest = ranks.astype(np.int64)
    row = np.arange(len(ranks))
    # As `unrank` does it, for all ranks at once.
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
    from atoll.solve.templates import template_kernel as kernel

    nodes = [c for c, count in enumerate(counts) for _ in range(int(count))]
    size = len(nodes)
    if not 1 <= size <= MAX_NODES:
        raise UsageError(f"a template of {size} nodes", hint="1 to 8 nodes")
    units, types = tables.units, len(tables.node_types)
    max_stages = min(size, units.shape[0], tables.layers)
    alike = sum(1 << i for i in range(size - 1) if nodes[i] == nodes[i + 1])
    pattern = patterns(size, max_stages, alike, rows=tables.rows)
    if tables.rows and size > 1:
        # Nodes side by side are several instances.
        units = units.copy()
        units[0] = 0
    rank = sum(math.comb(c + place, place + 1) for place, c in enumerate(nodes))
    scratch = kernel.Scratch.of(tables.layers)
    throughput = np.zeros(1)
    # Neither memory nor kinds are limited here: the set was chosen already.
    stages = kernel.solve_range(
        units, tables.steady, tables.reach, np.zeros(types, np.int64), 0, size, size, tables.layers,
        max_stages, _binomial(types), np.zeros(0, np.int32), np.zeros(1, np.int64), pattern.subset_span,
        pattern.subsets, pattern.partition_span, pattern.partitions, rank, *scratch,
        np.zeros(1, np.int32), throughput,
    )  # fmt: skip
    out: list[Stage] = []
    start = 0
    for mask, held, position in kernel.read_layout(scratch, stages):
        group = [nodes[i] for i in range(size) if mask >> i & 1]
        rates = tuple(float(tables.steady[stages - 1, position, c, held]) for c in group)
        out.append(Stage(start, start + held, tuple(tables.node_types[c] for c in group), rates))
        start += held
    return Layout(tuple(out), float(throughput[0]))
