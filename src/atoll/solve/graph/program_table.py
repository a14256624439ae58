"""A program as arrays: what may run where, which needs it serves, and what a second of it is worth.

Rates are counted in shares of a class's demand, so `load` of (unit, need) is how many executors of the unit
would run the part for all requests of the class. A *unit* is an executor type in a region, a *need* a part
of a commodity in a region. A *commodity* is requests of a class that are not told apart: all routes without a
chain together, every route with chains by itself (slow executors of one route must not borrow fast ones of
another).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InputError
from atoll.solve.array_types import Floats, Ints
from atoll.solve.graph.graph_types import ClassDemand, ExecutorType, GraphProgram

_MIN_LOAD = 1e-6
"""An executor runs a part for at most a million times the demand: the engine sees no smaller numbers."""


@dataclass(frozen=True, slots=True)
class NeedEntry:
    """Requests of a class that go one route in a region: a column x."""

    klass: int
    route: int
    commodity: int
    region: int
    needs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nested:
    """A chain of a commodity in a region, by the needs of its two parts."""

    first: int
    second: int
    budget_s: float


@dataclass(frozen=True, slots=True)
class Kept:
    """Executors that stand: the unit, how many, and the GPUs they hold by offer."""

    standing: int
    unit: int
    count: int
    gpus: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The arrays. `z_*` has one entry for each pair of a unit and a need that it can serve, by unit.

    `z_start[j] : z_start[j + 1]` are those of unit j; `use_*` likewise has the cells that it takes slices of.
    `slices` are (cell, offer, GPUs); `max_executors[j]` bounds those of a unit; `load` is at
    `scale` times the demand.
    """

    program: GraphProgram
    regions: tuple[str, ...]
    classes: tuple[int, ...]
    missing: tuple[str, ...]
    entries: tuple[NeedEntry, ...]
    needs: tuple[tuple[int, str, int], ...]
    chains: tuple[Nested, ...]
    cells: tuple[tuple[int, str, int], ...]
    slices: tuple[tuple[int, int, int], ...]
    kept: tuple[Kept, ...]
    unit_type: Ints
    unit_region: Ints
    max_executors: Floats
    fresh: NDArray[np.bool_]
    use_start: Ints
    use_cell: Ints
    use_count: Floats
    z_start: Ints
    z_unit: Ints
    z_need: Ints
    z_load: Floats
    z_latency: Floats
    scale: float = 1.0

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self.unit_type)

    def at_scale(self, scale: float) -> Table:
        """Return the table for `scale` times the demand."""
        load = np.maximum(_MIN_LOAD, self.z_load * (scale / self.scale))
        return replace(self, z_load=load, scale=scale)

    def slice_prices(self, cell: Floats) -> Floats:
        """Return what the slices of one executor of each unit cost at these prices of slices."""
        owner = np.repeat(np.arange(self.units), np.diff(self.use_start))
        total = np.bincount(owner, self.use_count * cell[self.use_cell], self.units)
        return total.astype(np.float64)

    def best_ratio(self, worth: Floats) -> Floats:
        """Return the most that one executor of each unit earns at these worths of entries z."""
        best = np.zeros(self.units)
        np.maximum.at(best, self.z_unit, worth / self.z_load)
        return best


def make_table(program: GraphProgram, keep: Iterable[int] | None = None) -> Table:
    """Return the arrays of a program, with new executors of the types `keep` alone (None: of all).

    Left out are classes without requests, routes that nothing can run, types on kinds that nobody offers and
    parts that nobody asks for.
    """
    check(program)
    allowed = set(range(len(program.executors)) if keep is None else keep)
    standing = {s.executor for s in program.standing if s.count > 0}
    regions = tuple(dict.fromkeys(m.region for m in program.machines))
    cells, slices = _list_cells(program, regions)
    cell_of = {(r, kind): c for c, (r, kind, _) in enumerate(cells)}
    classes = tuple(t for t, klass in enumerate(program.classes) if klass.rate_per_s > 0.0)
    able = _list_able(program, regions, cell_of, allowed | standing)
    entries, needs, chains, missing = _list_entries(program, regions, classes, able)
    rows = _list_units(program, regions, cell_of, entries, needs, allowed | standing)
    units, uses, z = rows
    unit_of = {pair: j for j, pair in enumerate(units)}
    kept = tuple(_list_kept(program, regions, unit_of))
    room = _room(program, cells, slices)
    owner = np.array([j for j, _, _ in uses], np.int64)
    use_cell = np.array([c for _, c, _ in uses], np.int64)
    use_count = np.array([float(n) for _, _, n in uses])
    max_executors = np.full(len(units), np.inf)
    # The tolerance keeps whole quotients whole before they are rounded down.
    np.minimum.at(max_executors, owner, np.floor(room[use_cell] / use_count + 1e-9))
    z_unit = np.array([row[0] for row in z], np.int64)
    return Table(
        program=program,
        regions=regions,
        classes=classes,
        missing=missing,
        entries=entries,
        needs=needs,
        chains=chains,
        cells=cells,
        slices=slices,
        kept=kept,
        unit_type=np.array([e for e, _ in units], np.int64),
        unit_region=np.array([r for _, r in units], np.int64),
        max_executors=max_executors,
        fresh=np.array([e in allowed for e, _ in units], np.bool_),
        # Uses and entries are listed unit by unit, so bisection finds where each begins.
        use_start=np.searchsorted(owner, np.arange(len(units) + 1)),
        use_cell=use_cell,
        use_count=use_count,
        z_start=np.searchsorted(z_unit, np.arange(len(units) + 1)),
        z_unit=z_unit,
        z_need=np.array([row[1] for row in z], np.int64),
        z_load=np.maximum(_MIN_LOAD, np.array([row[2] for row in z], np.float64)),
        z_latency=np.array([row[3] for row in z], np.float64),
    )


def check(program: GraphProgram) -> None:
    """Refuse what has no meaning: negative seconds, chains in an odd circle, offers named twice."""
    for e, executor in enumerate(program.executors):
        for key, value in executor.seconds.items():
            if not 0.0 <= value < math.inf:
                raise InputError(f"{value} seconds for {key}", field=f"executors[{e}].seconds")
    for klass in program.classes:
        if not 0.0 <= klass.rate_per_s < math.inf:
            raise InputError(
                f"{klass.rate_per_s} requests/s", field=f"classes.{'/'.join(klass.key)}.rate_per_s"
            )
        for route in klass.routes:
            colour_parts(klass, route)
    keys = [m.key for m in program.machines]
    if len(set(keys)) < len(keys):
        raise InputError("an offer stands there twice", field="machines", hint="add their numbers")
    if len({klass.key for klass in program.classes}) < len(program.classes):
        raise InputError("a class stands there twice", field="classes", hint="add their rates")


def route_chains(klass: ClassDemand, route: tuple[str, ...]) -> tuple[tuple[str, str, float], ...]:
    """Return the chains (first, second, budget in s) between parts of a route."""
    return tuple(
        (c.first, c.second, c.budget_s)
        for c in klass.chains
        if c.first in route and c.second in route
    )


def colour_parts(klass: ClassDemand, route: tuple[str, ...]) -> dict[str, bool]:
    """Return by part whether requests at its slow executors are matched first; parts of chains only.

    The two parts of a chain differ: the slowest of one go with the fastest of the other. So chains must not
    close an odd circle.
    """
    colour: dict[str, bool] = {}
    chains = route_chains(klass, route)
    todo = [part for chain in chains for part in chain[:2]]
    for root in todo:
        if root in colour:
            continue
        colour[root] = True
        stack = [root]
        while stack:
            part = stack.pop()
            for first, second, _ in chains:
                if part not in (first, second):
                    continue
                other = second if part == first else first
                if other not in colour:
                    colour[other] = not colour[part]
                    stack.append(other)
                elif colour[other] == colour[part]:
                    raise InputError(
                        f"latency bounds of {', '.join(sorted(colour))} close an odd circle",
                        field=f"classes.{'/'.join(klass.key)}.chains",
                        hint="bound pairs of parts that follow each other",
                    )
    return colour


def _list_cells(
    program: GraphProgram, regions: tuple[str, ...]
) -> tuple[tuple[tuple[int, str, int], ...], tuple[tuple[int, int, int], ...]]:
    """Return cells (region, kind, GPUs) on offer, and which offers they may be taken of."""
    cells: dict[tuple[int, str, int], int] = {}
    slices = []
    for o, offer in enumerate(program.machines):
        for size in sorted(set(offer.sizes)):
            if offer.available > 0 and size <= offer.gpus:
                cell = (regions.index(offer.region), f"{offer.gpu}:{size}", size)
                slices.append((cells.setdefault(cell, len(cells)), o, size))
    return tuple(cells), tuple(sorted(slices))


def _room(
    program: GraphProgram,
    cells: tuple[tuple[int, str, int], ...],
    slices: tuple[tuple[int, int, int], ...],
) -> Floats:
    """Return the most slices of each cell."""
    room = np.zeros(len(cells))
    for cell, o, size in slices:
        offer = program.machines[o]
        room[cell] += offer.available * (offer.gpus // size)
    return room


def _fits(
    executor: ExecutorType, region: int, cell_of: dict[tuple[int, str], int]
) -> dict[int, int] | None:
    """Return the slices by cell that one executor takes, None where nobody offers them."""
    used: dict[int, int] = {}
    for kind, count in executor.uses:
        cell = cell_of.get((region, kind))
        if cell is None:
            return None
        if count:
            used[cell] = used.get(cell, 0) + count
    return used


def _list_able(
    program: GraphProgram,
    regions: tuple[str, ...],
    cell_of: dict[tuple[int, str], int],
    types: set[int],
) -> set[tuple[str, str, str, int]]:
    """Return (service, class, part, region) that some executor can run."""
    able = set()
    for e in types:
        executor = program.executors[e]
        for r in range(len(regions)):
            if _fits(executor, r, cell_of) is not None:
                able |= {(*key, r) for key in executor.seconds}
    return able


def _list_entries(
    program: GraphProgram,
    regions: tuple[str, ...],
    classes: tuple[int, ...],
    able: set[tuple[str, str, str, int]],
) -> tuple[
    tuple[NeedEntry, ...], tuple[tuple[int, str, int], ...], tuple[Nested, ...], tuple[str, ...]
]:
    """Return entries, needs (commodity, part, region), chains, and why classes cannot be served."""
    entries: list[NeedEntry] = []
    needs: dict[tuple[int, str, int], int] = {}
    chains: list[Nested] = []
    missing: list[str] = []
    commodity = 0
    for t in classes:
        klass = program.classes[t]
        before = len(entries)
        free: int | None = None
        for w, route in enumerate(klass.routes):
            bounds = route_chains(klass, route)
            # Routes without bounds on latency share their flows; each with bounds has flows of its own.
            if bounds or free is None:
                g = commodity
                commodity += 1
                free = free if bounds else g
            else:
                g = free
            for r in range(len(regions)):
                if not all((*klass.key, part, r) in able for part in route):
                    continue
                # A part is needed once, however often the route names it.
                index = [
                    needs.setdefault((g, part, r), len(needs)) for part in dict.fromkeys(route)
                ]
                entries.append(NeedEntry(t, w, g, r, tuple(index)))
                chains += [Nested(needs[g, a, r], needs[g, b, r], s) for a, b, s in bounds]
        if len(entries) == before:
            missing.append(_why_missing(klass, regions, able))
    return tuple(entries), tuple(needs), tuple(chains), tuple(missing)


def _why_missing(
    klass: ClassDemand, regions: tuple[str, ...], able: set[tuple[str, str, str, int]]
) -> str:
    name = "/".join(klass.key)
    parts = dict.fromkeys(part for route in klass.routes for part in route)
    lost = [
        part
        for part in parts
        if not any((*klass.key, part, r) in able for r in range(len(regions)))
    ]
    if lost:
        return f"{name}: nothing on offer runs {', '.join(lost)}"
    return f"{name}: no region has executors for all parts of one route"


def _list_units(
    program: GraphProgram,
    regions: tuple[str, ...],
    cell_of: dict[tuple[int, str], int],
    entries: tuple[NeedEntry, ...],
    needs: tuple[tuple[int, str, int], ...],
    types: set[int],
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]], list[tuple[int, int, float, float]]]:
    """Return units (type, region), uses (unit, cell, count) and z (unit, need, load, latency in s)."""
    class_of = {entry.commodity: entry.klass for entry in entries}
    asked: dict[tuple[str, str, str, int], list[tuple[int, float]]] = {}
    for d, (g, part, r) in enumerate(needs):
        klass = program.classes[class_of[g]]
        asked.setdefault((*klass.key, part, r), []).append((d, klass.rate_per_s))
    units: list[tuple[int, int]] = []
    uses: list[tuple[int, int, int]] = []
    z: list[tuple[int, int, float, float]] = []
    for e, executor in enumerate(program.executors):
        if e not in types:
            continue
        for r in range(len(regions)):
            used = _fits(executor, r, cell_of)
            # Not on offer there, or it takes no slices at all.
            if not used:
                continue
            j, before = len(units), len(z)
            for key, seconds in executor.seconds.items():
                late = float(executor.latency_s.get(key, 0.0))
                for d, rate in asked.get((*key, r), ()):
                    z.append((j, d, rate * seconds, late))
            # Where nobody asks for what it runs there is no unit, and the next one gets the number.
            if len(z) > before:
                units.append((e, r))
                uses += [(j, cell, count) for cell, count in sorted(used.items())]
    return units, uses, z


def _list_kept(
    program: GraphProgram, regions: tuple[str, ...], unit_of: dict[tuple[int, int], int]
) -> Iterable[Kept]:
    offer_of = {offer.key: o for o, offer in enumerate(program.machines)}
    for s, standing in enumerate(program.standing):
        # On machines that are no longer on offer nothing can stay.
        if standing.count <= 0 or not all(key in offer_of for key in standing.offers):
            continue
        executor = program.executors[standing.executor]
        sizes = [int(kind.rsplit(":", 1)[1]) for kind, n in executor.uses for _ in range(n)]
        if len(sizes) != len(standing.offers):
            raise InputError(
                f"{len(standing.offers)} offers for {len(sizes)} slices",
                field=f"standing[{s}].offers",
                hint="name one offer for each slice, in the order of uses",
            )
        region = regions.index(standing.offers[0][0])
        unit = unit_of.get((standing.executor, region))
        # Nobody asks for what it runs.
        if unit is None:
            continue
        gpus: dict[int, int] = {}
        for key, size in zip(standing.offers, sizes, strict=True):
            gpus[offer_of[key]] = gpus.get(offer_of[key], 0) + size
        yield Kept(s, unit, standing.count, tuple(sorted(gpus.items())))


def weigh_shares(program: GraphProgram, classes: Sequence[int]) -> Floats:
    """Return the weights of the shares of classes, which add up to 1: priorities, of services if `alike`."""
    # A service counts once, however many classes it has.
    each = Counter(program.classes[t].service for t in classes)
    weights = np.array(
        [
            max(0.0, program.classes[t].priority)
            / (each[program.classes[t].service] if program.alike else 1)
            for t in classes
        ]
    )
    # Priorities may all be 0.
    return weights / max(float(weights.sum()), 1e-12)


def tied_shares(program: GraphProgram, classes: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of places in `classes` of those that have the same share, none unless `alike`."""
    if not program.alike:
        return []
    first: dict[str, int] = {}
    for i, t in enumerate(classes):
        first.setdefault(program.classes[t].service, i)
    services = [program.classes[t].service for t in classes]
    return [(first[name], i) for i, name in enumerate(services) if first[name] != i]
