"""From whole numbers of executors, slices and machines to an answer: exact flows, and nothing idle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from atoll.plan.plan import OfferKey
from atoll.solve.array_types import Floats, Ints
from atoll.solve.graph.executor_master import Counter, Master
from atoll.solve.graph.graph_types import ClassKey, GraphAnswer, PartFlow, PlacedExecutors
from atoll.solve.graph.program_table import Table

_ZERO = 1e-12
"""Shares of a class's demand below this are rounding."""
_WHOLE = 1e-9


@dataclass
class Whole:
    """Whole numbers of a solution: machines by offer, new slices, kept executors, new executors by unit."""

    machines: Ints
    slices: Ints
    kept: Ints
    units: dict[int, int]


@dataclass(frozen=True)
class Routed:
    """Flows of a solution in shares of demand: by share column, entry and z."""

    shares: Floats
    entries: Floats
    z: Floats


def whole_of(master: Master, values: Floats) -> Whole:
    """Return the whole numbers nearest to a solution's."""
    number = np.rint(values).astype(np.int64)
    inside = master.inside
    count = number[master.unit_column[inside]]
    return Whole(
        number[master.machine_columns],
        number[master.slice_columns],
        number[master.kept_columns],
        {int(j): int(n) for j, n in zip(inside, count, strict=True) if n > 0},
    )


def values_of(master: Master, whole: Whole, routed: Routed) -> Floats:
    """Return the columns of a master program for a solution whose units are all in it."""
    values = np.zeros(master.lp.columns)
    values[master.share_columns] = routed.shares
    values[master.entry_columns] = routed.entries
    values[master.machine_columns] = whole.machines
    values[master.slice_columns] = whole.slices
    values[master.kept_columns] = whole.kept
    for j, count in whole.units.items():
        values[master.unit_column[j]] = count
    used = np.flatnonzero(routed.z > 0.0)
    values[master.z_column[used]] = routed.z[used]
    return values


def route(
    table: Table, whole: Whole, weights: Floats | None, min_share: float, cap: float, work: Counter
) -> Routed | None:
    """Return the flows with the largest weighed share, then the least work; None where there are none.

    A linear program with the whole numbers fixed. Shares of classes are from `min_share` to `cap`.
    """
    master = Master(table, weights=weights, cap=cap, work=work)
    used = np.array(sorted({*whole.units, *(k.unit for k in table.kept)}), np.int64)
    master.add_units(used)
    for columns, number in (
        (master.machine_columns, whole.machines),
        (master.slice_columns, whole.slices),
        (master.kept_columns, whole.kept),
        (master.unit_column[used], np.array([whole.units.get(int(j), 0) for j in used])),
    ):
        master.lp.set_bounds(columns, number.astype(np.float64), number.astype(np.float64))
    master.bound_shares(min_share, cap)
    master.seek_share()
    # Without integer columns this is the linear program, at the tolerance of integer solves.
    result = master.lp.solve_mip(time_limit_s=math.inf, gap=0.0)
    work.charge(result.iterations)
    if result.values is None or result.status != "optimal":
        return None
    values = result.values
    shares = values[master.share_columns]
    # Second, with the shares held but for a hair: the flows that take the least work.
    master.lp.set_bounds(
        master.share_columns, np.maximum(min_share, shares * (1.0 - 1e-10)), np.minimum(cap, shares)
    )
    inside = np.flatnonzero(master.z_column >= 0)
    # All costs together are at most 1.
    total = max(1.0, float(table.z_load[inside].sum()))
    master.lp.set_costs(master.z_column[inside], table.z_load[inside] / total)
    again = master.lp.solve_mip(time_limit_s=math.inf, gap=0.0)
    work.charge(again.iterations)
    # Where that fails, the flows found first are as valid.
    if again.values is not None and again.status == "optimal":
        values = again.values
    z = np.zeros(len(table.z_unit))
    z[inside] = values[master.z_column[inside]]
    return _clean(table, values[master.share_columns], values[master.entry_columns], z)


def _clean(table: Table, shares: Floats, entries: Floats, z: Floats) -> Routed:
    """Make the flows of every class add up to its share, and those of a need to its entries, exactly."""
    entries = np.where(entries > _ZERO, entries, 0.0)
    z = np.where(z > _ZERO, z, 0.0)
    for i, t in enumerate(table.classes):
        mine = [k for k, entry in enumerate(table.entries) if entry.klass == t]
        share = shares[0] if len(shares) != len(table.classes) else shares[i]
        total = float(entries[mine].sum())
        if total > 0.0:
            entries[mine] *= float(share) / total
    demand = np.zeros(len(table.needs))
    for k, entry in enumerate(table.entries):
        demand[list(entry.needs)] += entries[k]
    supply = np.bincount(table.z_need, z, len(table.needs))
    factor = np.divide(demand, supply, out=np.zeros(len(demand)), where=supply > 0.0)
    return Routed(shares, entries, z * factor[table.z_need])


def trim(table: Table, whole: Whole, routed: Routed) -> Whole:
    """Drop new executors and machines that nothing needs.

    With a limit on the share of spot everything counts: there nothing is dropped but whole machines.
    """
    units, slices = dict(whole.units), whole.slices.copy()
    if table.program.spot_share is None:
        load = np.bincount(table.z_unit, routed.z * table.z_load, table.units)
        kept = _kept_of(table, whole)
        for j in sorted(units):
            # Rounding of a whole load must not ask for one more.
            needed = math.ceil(float(load[j]) - _WHOLE) - kept.get(j, 0)
            units[j] = min(units[j], max(0, needed))
        units = {j: n for j, n in units.items() if n}
        _drop_slices(table, units, slices)
    gpus = _gpus_in_use(table, whole.kept, slices)
    per = np.array([m.gpus for m in table.program.machines], np.int64)
    return Whole(np.minimum(whole.machines, -(-gpus // per)), slices, whole.kept, units)


def _kept_of(table: Table, whole: Whole) -> dict[int, int]:
    kept: dict[int, int] = {}
    for item, count in zip(table.kept, whole.kept, strict=True):
        kept[item.unit] = kept.get(item.unit, 0) + int(count)
    return kept


def _drop_slices(table: Table, units: dict[int, int], slices: Ints) -> None:
    """Take slices that no executor uses off the dearest offers."""
    used = np.zeros(len(table.cells), np.int64)
    for j, count in units.items():
        for k in range(table.use_start[j], table.use_start[j + 1]):
            used[table.use_cell[k]] += count * int(table.use_count[k])
    machines = table.program.machines
    dearest = sorted(
        range(len(table.slices)),
        key=lambda i: (
            -machines[table.slices[i][1]].usd_per_hour / machines[table.slices[i][1]].gpus,
            i,
        ),
    )
    for i in dearest:
        cell = table.slices[i][0]
        have = sum(int(slices[k]) for k, item in enumerate(table.slices) if item[0] == cell)
        slices[i] -= min(int(slices[i]), max(0, have - int(used[cell])))


def _gpus_in_use(table: Table, kept: Ints, slices: Ints) -> Ints:
    gpus = np.zeros(len(table.program.machines), np.int64)
    for (_, o, size), count in zip(table.slices, slices, strict=True):
        gpus[o] += size * int(count)
    for item, count in zip(table.kept, kept, strict=True):
        for o, number in item.gpus:
            gpus[o] += number * int(count)
    return gpus


def costs(table: Table, whole: Whole) -> tuple[float, float]:
    """Return the rent and what starting costs, in USD/h."""
    machines = table.program.machines
    # Exact sums do not depend on the order of offers.
    rent = math.fsum(m.usd_per_hour * int(n) for m, n in zip(machines, whole.machines, strict=True))
    start = math.fsum(
        machines[o].usd_per_hour * size / machines[o].gpus * int(count)
        for (_, o, size), count in zip(table.slices, whole.slices, strict=True)
    )
    return rent, table.program.init_penalty * start


def place(table: Table, whole: Whole) -> tuple[PlacedExecutors, ...]:
    """Return executors by type and region, with their slices: cheaper offers to earlier types."""
    machines = table.program.machines
    stock: dict[int, list[list[int]]] = {}
    for (cell, o, _), count in zip(table.slices, whole.slices, strict=True):
        if count:
            stock.setdefault(cell, []).append([o, int(count)])
    taken: dict[int, dict[tuple[OfferKey, str], int]] = {}
    number: dict[int, list[int]] = {}
    for item, count in zip(table.kept, whole.kept, strict=True):
        if not count:
            continue
        standing = table.program.standing[item.standing]
        executor = table.program.executors[standing.executor]
        kinds = [kind for kind, n in executor.uses for _ in range(n)]
        into = taken.setdefault(item.unit, {})
        for key, kind in zip(standing.offers, kinds, strict=True):
            into[key, kind] = into.get((key, kind), 0) + int(count)
        have = number.setdefault(item.unit, [0, 0])
        have[0] += int(count)
        have[1] += int(count)
    for j in sorted(whole.units):
        number.setdefault(j, [0, 0])[0] += whole.units[j]
        into = taken.setdefault(j, {})
        for k in range(table.use_start[j], table.use_start[j + 1]):
            cell = int(table.use_cell[k])
            left = whole.units[j] * int(table.use_count[k])
            for pile in stock.get(cell, []):
                some = min(left, pile[1])
                pile[1] -= some
                left -= some
                if some:
                    name = (machines[pile[0]].key, table.cells[cell][1])
                    into[name] = into.get(name, 0) + some
    return tuple(
        PlacedExecutors(
            int(table.unit_type[j]),
            table.regions[table.unit_region[j]],
            number[j][0],
            number[j][1],
            tuple((key, kind, n) for (key, kind), n in sorted(taken[j].items())),
        )
        for j in sorted(number)
    )


def list_flows(
    table: Table, routed: Routed
) -> tuple[
    tuple[PartFlow, ...],
    dict[tuple[str, str, int, str], float],
    dict[tuple[str, str, int, str, int, str], float],
]:
    """Return flows, routes, and the flows of single routes of classes with chains, in requests/s."""
    program = table.program
    classes = program.classes
    owners = {entry.commodity: entry for entry in table.entries}
    chained = {need for chain in table.chains for need in (chain.first, chain.second)}
    apart = {table.needs[d][0] for d in chained}
    flows: dict[tuple[str, str, str, int, str], float] = {}
    split: dict[tuple[str, str, int, str, int, str], float] = {}
    for i in np.flatnonzero(routed.z > 0.0):
        g, part, r = table.needs[table.z_need[i]]
        entry = owners[g]
        klass = classes[entry.klass]
        e = int(table.unit_type[table.z_unit[i]])
        rate = float(routed.z[i]) * klass.rate_per_s * table.scale
        key = (*klass.key, part, e, table.regions[r])
        flows[key] = flows.get(key, 0.0) + rate
        if g in apart:
            split[(*klass.key, entry.route, part, e, table.regions[r])] = rate
    routes = {
        (*classes[entry.klass].key, entry.route, table.regions[entry.region]): float(share)
        * classes[entry.klass].rate_per_s
        * table.scale
        for entry, share in zip(table.entries, routed.entries, strict=True)
        if share > 0.0
    }
    return tuple(PartFlow(*key, rate) for key, rate in sorted(flows.items())), routes, split


def served(table: Table, routed: Routed) -> dict[ClassKey, float]:
    """Return by class the share of its demand that is served; all of it where nobody asks."""
    shares: dict[ClassKey, float] = {klass.key: 1.0 for klass in table.program.classes}
    for i, t in enumerate(table.classes):
        one = routed.shares[0] if len(routed.shares) != len(table.classes) else routed.shares[i]
        shares[table.program.classes[t].key] = float(one) * table.scale
    return shares


def nothing(table: Table, reasons: tuple[str, ...], work: Counter, *, late: bool) -> GraphAnswer:
    """Return that there is no answer, and why."""
    return GraphAnswer(
        "infeasible",
        (),
        {},
        (),
        {},
        {klass.key: 0.0 for klass in table.program.classes},
        0.0,
        0.0,
        math.inf if table.program.goal == "cost" else 0.0,
        math.inf if table.program.goal == "cost" else 0.0,
        work.nodes,
        work.iterations,
        late,
        reasons,
        0.0,
        0.0,
    )
