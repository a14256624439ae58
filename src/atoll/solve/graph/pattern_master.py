"""The linear program of machines by pattern: flows of each pattern's block, needs and limits of all.

Rows shared by patterns are those of the program without topology, with the slices of machines inside the
patterns. See `boxes` for the rows of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from atoll.solve.array_types import Floats
from atoll.solve.graph.boxes import LaidMachine, MachineBlock, Pattern, RouteKey, make_block
from atoll.solve.graph.graph_types import GraphAnswer, GraphProgram, Machines, PartFlow
from atoll.solve.graph.program_table import route_chains, tied_shares, weigh_shares
from atoll.solve.lp import LinearProgram, Sparse

_SAME_S = 1e-9
_SLACK = 1e-8
_ZERO = 1e-11


def slice_sizes(program: GraphProgram, e: int) -> list[int]:
    """Return the GPUs of the slices of an executor type."""
    return [int(kind.rsplit(":", 1)[1]) for kind, n in program.executors[e].uses for _ in range(n)]


@dataclass(frozen=True, slots=True)
class OpenMachine:
    """A machine whose executors are open: columns for whether it is taken, and for how many of each type."""

    offer: int
    types: tuple[int, ...]
    taken: int
    numbers: tuple[int, ...]
    order: int

    def pattern(self, values: Floats) -> Pattern | None:
        """Return what stands on it in a solution, None where it is not taken."""
        if values[self.taken] < 0.5:
            return None
        counts = (
            (e, round(values[column])) for e, column in zip(self.types, self.numbers, strict=True)
        )
        return Pattern(self.offer, tuple(sorted((e, n) for e, n in counts if n)))


@dataclass(frozen=True, slots=True)
class _BlockRows:
    """Flows of machines with given executor types, and their rows."""

    flows: MachineBlock
    capacity: dict[int, int]
    pairs: dict[tuple[str, int, tuple[str, str]], int]
    nic: tuple[int, ...]
    """Out and in, and between groups of GPUs; none where nothing has a limit."""


class PatternMaster:
    """The linear program of patterns; see the module and `boxes` for its rows and columns."""

    def __init__(self, program: GraphProgram, scale: float) -> None:
        self.program = program
        self.scale = scale
        self.lp = LinearProgram(0)
        self.patterns: list[Pattern] = []
        self.blocks: list[MachineBlock] = []
        self.count_columns: list[int] = []
        self.z_columns: list[list[int]] = []
        self.k_columns: list[list[int]] = []
        self.classes = [t for t, klass in enumerate(program.classes) if klass.rate_per_s > 0.0]
        self.weights = self._weights()
        prices = [m.usd_per_hour for m in program.machines if m.usd_per_hour > 0.0]
        self.money = max(prices, default=1.0)
        self._rows: list[tuple[float, float]] = []
        self._chain_rows: dict[tuple[RouteKey, int], list[tuple[float, int]]] = {}
        self._make_rows()
        self._make_columns()

    def _weights(self) -> Floats:
        if self.program.goal == "cost" and self.program.shortage == "priority":
            return weigh_shares(self.program, self.classes)
        return np.ones(1)

    # ---------------------------------------------------------------- building

    def _row(self, lower: float, upper: float) -> int:
        self._rows.append((lower, upper))
        return len(self._rows) - 1

    def _make_rows(self) -> None:
        program = self.program
        regions = list(dict.fromkeys(m.region for m in program.machines))
        self.class_row = {t: self._row(0.0, 0.0) for t in self.classes}
        self.routes: dict[RouteKey, int] = {}
        self.need_row: dict[tuple[RouteKey, str], int] = {}
        for t in self.classes:
            for w, route in enumerate(program.classes[t].routes):
                for region in regions:
                    key = (t, w, region)
                    self.routes[key] = len(self.routes)
                    for part in dict.fromkeys(route):
                        self.need_row[key, part] = self._row(0.0, 0.0)
                    self._make_chain_rows(key)
        self.offer_row = [self._row(-float(m.available), math.inf) for m in program.machines]
        budget, max_machines = program.budget_usd_per_hour, program.max_machines
        self.limits: dict[str, int] = {}
        if budget is not None:
            self.limits["budget"] = self._row(-budget / self.money, math.inf)
        if max_machines is not None:
            self.limits["machines"] = self._row(-float(max_machines), math.inf)
        if program.spot_share is not None:
            self.limits["spot"] = self._row(0.0, math.inf)
        self.start_row: dict[tuple[int, int], int] = {}
        if program.init_penalty > 0.0:
            for e, executor in enumerate(program.executors):
                for o, machine in enumerate(program.machines):
                    if executor.uses and executor.uses[0][0].rsplit(":", 1)[0] == machine.gpu:
                        self.start_row[e, o] = self._row(0.0, math.inf)
        self.level_row = self._row(-math.inf, math.inf)
        tied = tied_shares(program, self.classes) if len(self.weights) > 1 else []
        self.tied_row = {pair: self._row(0.0, 0.0) for pair in tied}
        lower = np.array([low for low, _ in self._rows])
        self.lp.add_rows(
            lower, np.array([up for _, up in self._rows]), make_entries([], len(lower))
        )

    def _make_chain_rows(self, key: RouteKey) -> None:
        klass = self.program.classes[key[0]]
        for c, (first, _, _) in enumerate(route_chains(klass, klass.routes[key[1]])):
            late = {
                float(executor.latency_s.get((*klass.key, first), 0.0))
                for executor in self.program.executors
                if (*klass.key, first) in executor.seconds
            }
            self._chain_rows[key, c] = [(v, self._row(0.0, math.inf)) for v in sorted(late)]

    def _column(
        self, entries: list[tuple[int, float]], upper: float = math.inf, cost: float = 0.0
    ) -> int:
        return self.lp.add_columns(
            np.array([cost]),
            np.zeros(1),
            np.array([upper]),
            make_entries([(0, row, value) for row, value in entries], 1),
        )

    def _make_columns(self) -> None:
        number = len(self.weights)
        self.share_columns = []
        for i in range(number):
            mine = self.classes if number == 1 else [self.classes[i]]
            entries = [(self.class_row[t], -1.0) for t in mine]
            entries.append((self.level_row, float(self.weights[i])))
            for (first, second), row in self.tied_row.items():
                if i in (first, second):
                    entries.append((row, 1.0 if i == first else -1.0))
            self.share_columns.append(self._column(entries, 1.0))
        self.route_columns = {}
        for key in self.routes:
            parts = dict.fromkeys(self.program.classes[key[0]].routes[key[1]])
            entries = [(self.class_row[key[0]], 1.0)]
            entries += [(self.need_row[key, part], -1.0) for part in parts]
            self.route_columns[key] = self._column(entries)
        self.new_columns = {at: self._column([(row, 1.0)]) for at, row in self.start_row.items()}
        self.kept_columns: list[int] = []
        offers = {machine.key: o for o, machine in enumerate(self.program.machines)}
        for standing in self.program.standing:
            at = (standing.executor, offers.get(standing.offers[0], -1))
            if at in self.start_row and len(standing.offers) == 1:
                column = self._column([(self.start_row[at], 1.0)], float(standing.count))
                self.kept_columns.append(column)

    def add_pattern(self, pattern: Pattern) -> None:
        """Take a pattern in: the number of its machines, and their flows."""
        machine = self.program.machines[pattern.offer]
        counts = dict(pattern.executors)
        block = self._make_flows(machine, list(counts))
        entries = self.price_entries(pattern.offer, counts)
        entries += [(block.capacity[e], float(n)) for e, n in counts.items()]
        entries += [(row, 1.0) for row in block.nic]
        self.count_columns.append(self._column(entries, float(machine.available)))
        z, k = self._add_flows(block)
        self.z_columns.append(z)
        self.k_columns.append(k)
        self.patterns.append(pattern)
        self.blocks.append(block.flows)

    def add_machine(self, offer: int, types: list[int], before: OpenMachine | None) -> OpenMachine:
        """Take in one machine that any executors of these types may stand on.

        `before` is another of the offer, which is taken first.
        """
        machine = self.program.machines[offer]
        block = self._make_flows(machine, types)
        room, order = self.lp.rows, self.lp.rows + 1
        self.lp.add_rows(np.zeros(2), np.full(2, math.inf), make_entries([], 2))
        base = dict(self.price_entries(offer, {}))
        entries = [*base.items(), (room, float(machine.gpus))]
        entries += [(row, 1.0) for row in block.nic]
        # Machines are alike: the next one is taken only if this one is.
        if before is not None:
            entries += [(before.order, -1.0)]
        taken = self._column([*entries, (order, 1.0)], 1.0, self.machine_cost(offer))
        numbers = []
        for e in types:
            size = slice_sizes(self.program, e)[0]
            extra = {
                row: value - base.get(row, 0.0) for row, value in self.price_entries(offer, {e: 1})
            }
            entries = [(row, value) for row, value in extra.items() if value]
            entries += [(block.capacity[e], 1.0), (room, -float(size))]
            numbers.append(self._column(entries, float(machine.gpus // size)))
        self._add_flows(block)
        return OpenMachine(offer, tuple(types), taken, tuple(numbers), order)

    def _make_flows(self, machine: Machines, types: list[int]) -> _BlockRows:
        """Add the rows of machines with these executor types."""
        block = make_block(self.program, self.routes, machine, types, self.scale)
        base = self.lp.rows
        capacity = {e: base + i for i, e in enumerate(types)}
        pairs: dict[tuple[str, int, tuple[str, str]], int] = {}
        for flow in block.k:
            for side, i in (("first", flow.first), ("second", flow.second)):
                pairs.setdefault((side, i, flow.edge), base + len(types) + len(pairs))
        at = base + len(types) + len(pairs)
        nic = tuple(range(at, at + (3 if block.inner else 2 if block.out else 0)))
        number = len(types) + len(pairs) + len(nic)
        self.lp.add_rows(np.zeros(number), np.full(number, math.inf), make_entries([], number))
        return _BlockRows(block, capacity, pairs, nic)

    def _add_flows(self, rows: _BlockRows) -> tuple[list[int], list[int]]:
        """Add the flows of a block; return their columns z and k."""
        block = rows.flows
        by_flow: dict[int, list[int]] = {}
        for (_, at, _), row in rows.pairs.items():
            by_flow.setdefault(at, []).append(row)
        z_columns, k_columns = [], []
        for i, z in enumerate(block.z):
            entries = [(self.need_row[z.route, z.part], 1.0), (rows.capacity[z.executor], -z.load)]
            entries += self.chain_entries(z.route, z.part, z.latency_s)
            entries += [(row, 1.0) for row in by_flow.get(i, ())]
            for row, taken in zip(rows.nic, (block.out, block.into), strict=False):
                entries.append((row, -taken.get(("z", i), 0.0)))
            z_columns.append(self._column(entries))
        for i, flow in enumerate(block.k):
            entries = [
                (rows.pairs["first", flow.first, flow.edge], -1.0),
                (rows.pairs["second", flow.second, flow.edge], -1.0),
            ]
            for row, taken in zip(rows.nic, (block.out, block.into), strict=False):
                entries.append((row, -taken["k", i]))
            if i in block.inner:
                entries.append((rows.nic[2], -block.inner[i]))
            entries += self.pair_entries(block, i)
            k_columns.append(self._column(entries))
        return z_columns, k_columns

    def price_entries(self, offer: int, counts: dict[int, int]) -> list[tuple[int, float]]:
        """Return the entries of one machine with these executors in the rows that patterns share."""
        machine = self.program.machines[offer]
        entries = [(self.offer_row[offer], -1.0)]
        if "budget" in self.limits:
            entries.append((self.limits["budget"], -machine.usd_per_hour / self.money))
        if "machines" in self.limits:
            entries.append((self.limits["machines"], -1.0))
        gpus = sum(slice_sizes(self.program, e)[0] * n for e, n in counts.items())
        if "spot" in self.limits and self.program.spot_share is not None:
            room = gpus * (self.program.spot_share - float(machine.spot))
            entries.append((self.limits["spot"], room))
        entries += [
            (self.start_row[e, offer], -float(n))
            for e, n in counts.items()
            if (e, offer) in self.start_row
        ]
        return entries

    def chain_entries(self, route: RouteKey, part: str, late: float) -> list[tuple[int, float]]:
        """Return the entries of a flow with that latency (s) in the nested rows of chains."""
        entries: dict[int, float] = {}
        klass = self.program.classes[route[0]]
        for c, (first, second, budget) in enumerate(route_chains(klass, klass.routes[route[1]])):
            if part not in (first, second):
                continue
            for v, row in self._chain_rows[route, c]:
                if part == first and late >= v:
                    entries[row] = entries.get(row, 0.0) - 1.0
                if part == second and late <= budget - v + _SAME_S:
                    entries[row] = entries.get(row, 0.0) + 1.0
        return list(entries.items())

    def pair_entries(self, block: MachineBlock, index: int) -> list[tuple[int, float]]:
        """Return what a hand-over inside takes out of the nested rows of a chain between the two parts."""
        flow = block.k[index]
        one, two = block.z[flow.first], block.z[flow.second]
        klass = self.program.classes[one.route[0]]
        entries: dict[int, float] = {}
        for c, (first, second, budget) in enumerate(
            route_chains(klass, klass.routes[one.route[1]])
        ):
            if {first, second} != set(flow.edge):
                continue
            early, late = (one, two) if one.part == first else (two, one)
            for v, row in self._chain_rows[one.route, c]:
                value = float(early.latency_s >= v)
                value -= float(late.latency_s <= budget - v + _SAME_S)
                if value:
                    entries[row] = entries.get(row, 0.0) + value
        return list(entries.items())

    # ---------------------------------------------------------------- goals

    def seek_share(self) -> None:
        """Maximise the weighed share."""
        self._set_costs(-1.0, 0.0, 0.0)
        self.lp.set_row_bounds(np.array([self.level_row]), -math.inf, math.inf)

    def seek_cost(self, level: float) -> None:
        """Minimise money at a weighed share of `level` or more."""
        self._set_costs(0.0, 1.0, 0.0)
        self.lp.set_row_bounds(np.array([self.level_row]), level, math.inf)

    def min_traffic(self, level: float) -> Floats | None:
        """Return flows at a share of `level` with the least traffic, the numbers of machines being fixed."""
        self._set_costs(0.0, 0.0, 1.0)
        self.lp.set_row_bounds(np.array([self.level_row]), level * (1.0 - _SLACK), math.inf)
        result = self.lp.solve_mip(time_limit_s=math.inf, gap=0.0)
        return result.values if result.status == "optimal" else None

    def machine_cost(self, offer: int) -> float:
        """Return the rent of a machine in the program's money."""
        return self.program.machines[offer].usd_per_hour / self.money

    def _set_costs(self, share: float, money: float, traffic: float) -> None:
        cost = np.zeros(self.lp.columns)
        cost[self.share_columns] = share * self.weights
        for pattern, column in zip(self.patterns, self.count_columns, strict=True):
            cost[column] = money * self.machine_cost(pattern.offer)
        for (e, o), column in self.new_columns.items():
            part = slice_sizes(self.program, e)[0] / self.program.machines[o].gpus
            cost[column] = money * self.program.init_penalty * part * self.machine_cost(o)
        for block, z, k in zip(self.blocks, self.z_columns, self.k_columns, strict=True):
            columns = {"z": z, "k": k}
            for (which, i), amount in block.out.items():
                cost[columns[which][i]] = traffic * amount
        self.lp.set_costs(np.arange(len(cost)), cost)

    # ---------------------------------------------------------------- answers

    def answer(self, values: Floats, base: GraphAnswer) -> GraphAnswer:
        """Return `base` with the flows, routes and shares of a solution."""
        program = self.program
        flows: dict[tuple[str, str, str, int, str], float] = {}
        split: dict[tuple[str, str, int, str, int, str], float] = {}
        for block, columns in zip(self.blocks, self.z_columns, strict=True):
            for z, column in zip(block.z, columns, strict=True):
                t, w, region = z.route
                klass = program.classes[t]
                rate = float(values[column]) * klass.rate_per_s * self.scale
                if values[column] <= _ZERO:
                    continue
                key = (*klass.key, z.part, z.executor, region)
                flows[key] = flows.get(key, 0.0) + rate
                if route_chains(klass, klass.routes[w]):
                    at = (*klass.key, w, z.part, z.executor, region)
                    split[at] = split.get(at, 0.0) + rate
        routes = {
            (*program.classes[t].key, w, region): float(values[column])
            * program.classes[t].rate_per_s
            * self.scale
            for (t, w, region), column in self.route_columns.items()
            if values[column] > _ZERO
        }
        served = {klass.key: 1.0 for klass in program.classes}
        for i, t in enumerate(self.classes):
            column = self.share_columns[i if len(self.share_columns) > 1 else 0]
            served[program.classes[t].key] = float(values[column]) * self.scale
        return replace(
            base,
            flows=tuple(PartFlow(*key, rate) for key, rate in sorted(flows.items())),
            routes=routes,
            split=split,
            served=served,
        )

    def boxes(self, values: Floats, laid: list[list[LaidMachine]]) -> tuple[LaidMachine, ...]:
        """Return machines with their traffic; `laid` has those of each pattern."""
        found = []
        for i, boxes in enumerate(laid):
            block = self.blocks[i]
            nic = self.program.machines[self.patterns[i].offer].nic_bytes_per_s
            columns = {"z": self.z_columns[i], "k": self.k_columns[i]}
            out, into = (
                sum(
                    max(0.0, values[columns[which][at]]) * amount
                    for (which, at), amount in side.items()
                )
                for side in (block.out, block.into)
            )
            each = nic / max(1, len(boxes)) if block.out else 0.0
            flows = []
            for z, column in zip(block.z, self.z_columns[i], strict=True):
                if values[column] > _ZERO and boxes:
                    klass = self.program.classes[z.route[0]]
                    rate = float(values[column]) * klass.rate_per_s * self.scale / len(boxes)
                    flows.append(((*klass.key, z.route[1], z.part, z.executor), rate))
            inside = []
            for k, column in zip(block.k, self.k_columns[i], strict=True):
                if values[column] > _ZERO and boxes:
                    one, two = block.z[k.first], block.z[k.second]
                    klass = self.program.classes[one.route[0]]
                    rate = float(values[column]) * klass.rate_per_s * self.scale / len(boxes)
                    ends = (one.part, one.executor), (two.part, two.executor)
                    inside.append(((*klass.key, one.route[1], *ends), rate))
            found += [
                replace(
                    box,
                    inside=tuple(sorted(inside)),
                    bytes_out_per_s=max(0.0, float(out)) * each,
                    bytes_in_per_s=max(0.0, float(into)) * each,
                    flows=tuple(sorted(flows)),
                )
                for box in boxes
            ]
        return tuple(sorted(found, key=lambda box: (box.offer, box.slot)))


def make_entries(pairs: list[tuple[int, int, float]], number: int) -> Sparse:
    """Return (vector, index, value) as sparse vectors."""
    return Sparse.of(
        np.array([p[0] for p in pairs], np.int64),
        np.array([p[1] for p in pairs], np.int64),
        np.array([p[2] for p in pairs], np.float64),
        number,
    )
