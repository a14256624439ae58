"""Flow placement as integer programs: the paper's, node by node, and one over equal nodes.

The paper's (Helix, tables 5 and 6). Node i holds layers [s_i, e_i), e_i = s_i + sum_j j b_i(j):

    sum_j b_i(j) = 1,   e_i <= L                                        one range
    sum_u f(u,i) = sum_v f(i,v) <= sum_j b_i(j) T_i(j)                  conservation, throughput
    s_i <= L (1 - d(source,i)),   L d(i,sink) <= e_i                    source and sink
    L d(i,k) <= L + s_k - e_i,    L d(i,k) <= L - s_k + e_i             e_i = s_k, or with partial inference
    s_k - e_i <= (L+1) (1 - c1),  e_k - e_i >= 1 - (L+1) (1 - c2),  2 d(i,k) <= c1 + c2
    f(u,v) <= S(u,v) d(u,v);      maximise sum_i f(source,i)

Over equal nodes, where no link can bind: n(k,s,j) of the N_k nodes with rates T_k hold layers [s, s + j).
They carry g(k,s,j) <= n(k,s,j) T_k(j), and at every layer what ends there goes on there. With partial
inference the flow is the least over layers of the summed rates of the nodes that hold it: a path of nodes
outside a cut is missing exactly if some layer is held by nodes of the cut only.

Flows are in units of `Program.unit` tokens/s, rates and links no larger than the bound given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.bound.cuts import network, rates
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement

Term = tuple[int, float]

ITERATIONS = 2_000_000
"""Simplex iterations of a proof: a minute or two."""
Status = Literal["optimal", "infeasible", "stopped"]


@dataclass
class Program:
    """A maximisation in the making: columns and rows with their limits. Whole columns are never negative.

    Rows with continuous columns (flows, in `unit` tokens/s) give these coefficients of 1 or -1.
    """

    unit: float
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    row_low: list[float] = field(default_factory=list)
    row_high: list[float] = field(default_factory=list)
    goal: list[int] = field(default_factory=list)
    """Columns whose sum is maximised."""

    @property
    def columns(self) -> int:
        """Number of columns."""
        return len(self.low)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_low)

    def integer(self, low: float, high: float) -> int:
        """Add a whole column; return its index."""
        return self._column(low, high, whole=True)

    def flow(self, high: float) -> int:
        """Add a flow of at most `high` tokens/s; return its index."""
        return self._column(0.0, high / self.unit, whole=False)

    def add(self, terms: Iterable[Term], low: float, high: float) -> None:
        """Add the row low <= sum of terms <= high."""
        for column, value in terms:
            self.row.append(self.rows)
            self.column.append(column)
            self.value.append(value)
        self.row_low.append(low)
        self.row_high.append(high)

    def limit(self, low: float, high: float) -> None:
        """Limit the objective, in tokens/s."""
        self.add([(column, 1.0) for column in self.goal], low / self.unit, high / self.unit)

    def cost(self) -> Floats:
        """Return the objective as coefficients to minimise."""
        cost = np.zeros(self.columns)
        cost[self.goal] = -1.0
        return cost

    def _column(self, low: float, high: float, *, whole: bool) -> int:
        self.low.append(low)
        self.high.append(high)
        self.whole.append(whole)
        return len(self.low) - 1


class PlacementModel(Protocol):
    """A program, and how its columns read as a placement and back."""

    @property
    def program(self) -> Program:
        """The mixed-integer program to be solved."""

    def placement(self, values: Floats) -> Placement:
        """Read a placement from values of the columns."""

    def hint(self, placement: Placement, flows: Flows) -> Floats:
        """Return values of the columns for a placement and its flow."""


@dataclass(frozen=True)
class PaperModel:
    """The paper's program. `held[i][j - 1]` is b_i(j); -1 as an end stands for source or sink."""

    program: Program
    size: int
    start: dict[int, int]
    held: dict[int, list[int]]
    flow: dict[tuple[int, int], int]
    valid: dict[tuple[int, int], int]
    ahead: dict[tuple[int, int], tuple[int, int]]

    def placement(self, values: Floats) -> Placement:
        """Read a placement; every node holds some layers, also one nothing flows through."""
        start, end = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)
        for i, column in self.start.items():
            start[i] = round(float(values[column]))
            end[i] = start[i] + 1 + int(np.argmax(values[self.held[i]]))
        return Placement(start, end)

    def hint(self, placement: Placement, flows: Flows) -> Floats:
        """Return values for a placement; unused nodes hold layer 0."""
        values = np.zeros(self.program.columns)
        for i, column in self.start.items():
            used = int(placement.end[i] - placement.start[i])
            values[column] = float(placement.start[i]) if used else 0.0
            values[self.held[i][max(used, 1) - 1]] = 1.0
        for (u, v), column in self.flow.items():
            amount = flows.enter[v] if u < 0 else flows.leave[u] if v < 0 else flows.edge[u, v]
            if amount > 0.0:
                values[column] = amount / self.program.unit
                values[self.valid[u, v]] = 1.0
                values[list(self.ahead.get((u, v), ()))] = 1.0
        return values


def paper_model(instance: FlowInstance, high: float) -> PaperModel:
    """Return the paper's program for flows of at most `high` tokens/s."""
    layers = instance.layers
    program = Program(high)
    model = PaperModel(program, instance.size, {}, {}, {}, {}, {})
    node_rates, net = np.minimum(rates(instance), high), network(instance)
    nodes = [i for i in range(instance.size) if instance.max_layers[i] > 0]
    for i in nodes:
        max_layers = min(int(instance.max_layers[i]), layers)
        model.start[i] = program.integer(0, layers - 1)
        model.held[i] = [program.integer(0, 1) for _ in range(max_layers)]
        program.add([(b, 1.0) for b in model.held[i]], 1.0, 1.0)
        program.add(_end(model, i), 0.0, layers)
    edges = [((-1, i), net.enter[i]) for i in nodes] + [((i, -1), net.leave[i]) for i in nodes]
    edges += [((i, k), net.link[i, k]) for i in nodes for k in nodes]
    for edge, speed in edges:
        if speed > 0.0:
            # No link counts for more than the bound: tighter coefficients make the relaxation tighter.
            carried = min(float(speed), high)
            model.flow[edge] = program.flow(carried)
            model.valid[edge] = program.integer(0, 1)
            # A link carries something only where it is valid.
            slow = [(model.flow[edge], 1.0), (model.valid[edge], -carried / high)]
            program.add(slow, -np.inf, 0.0)
    for i in nodes:
        into = [column for (_, v), column in model.flow.items() if v == i]
        out = [column for (u, _), column in model.flow.items() if u == i]
        program.add([*_terms(into, 1.0), *_terms(out, -1.0)], 0.0, 0.0)
        rate = [(b, -node_rates[i, j] / high) for j, b in enumerate(model.held[i], start=1)]
        program.add([*_terms(into, 1.0), *rate], -np.inf, 0.0)
    for edge in model.valid:
        _add_validity(model, edge, layers, partial=instance.partial)
    program.goal += [column for (u, _), column in model.flow.items() if u < 0]
    return model


def _terms(columns: Iterable[int], value: float) -> list[Term]:
    return [(column, value) for column in columns]


def _end(model: PaperModel, node: int, sign: float = 1.0) -> list[Term]:
    """e_i as terms."""
    held = [(b, sign * j) for j, b in enumerate(model.held[node], start=1)]
    return [(model.start[node], sign), *held]


def _add_validity(model: PaperModel, edge: tuple[int, int], layers: int, *, partial: bool) -> None:
    """Rows that let a link be used only where the ranges at its ends fit."""
    u, v = edge
    program, d = model.program, model.valid[edge]
    if u < 0:
        program.add([(model.start[v], 1.0), (d, layers)], -np.inf, layers)
    elif v < 0:
        program.add([*_end(model, u), (d, -layers)], 0.0, np.inf)
    elif not partial:
        apart = [(model.start[v], 1.0), *_end(model, u, -1.0)]
        program.add([*apart, (d, -layers)], -layers, np.inf)
        program.add([*apart, (d, layers)], -np.inf, layers)
    else:
        first, second = program.integer(0, 1), program.integer(0, 1)
        model.ahead[edge] = (first, second)
        apart = [(model.start[v], 1.0), *_end(model, u, -1.0)]
        program.add([*apart, (first, layers + 1)], -np.inf, layers + 1)
        further = [*_end(model, v), *_end(model, u, -1.0)]
        program.add([*further, (second, -(layers + 1))], -layers, np.inf)
        program.add([(d, 2.0), (first, -1.0), (second, -1.0)], -np.inf, 0.0)


@dataclass(frozen=True)
class EqualModel:
    """The program over equal nodes: columns n(k, s, j), and g(k, s, j) or, with partial inference, F."""

    program: Program
    group: Ints
    number: dict[tuple[int, int, int], int]
    carried: dict[tuple[int, int, int], int]

    def placement(self, values: Floats) -> Placement:
        """Give the ranges of each kind to its nodes, in order."""
        size = len(self.group)
        start, end = np.zeros(size, np.int64), np.zeros(size, np.int64)
        free = [list(np.flatnonzero(self.group == k)[::-1]) for k in range(self.group.max() + 1)]
        for (k, s, j), column in self.number.items():
            for _ in range(round(float(values[column]))):
                node = free[k].pop()
                start[node], end[node] = s, s + j
        return Placement(start, end)

    def hint(self, placement: Placement, flows: Flows) -> Floats:
        """Return values for a placement."""
        values = np.zeros(self.program.columns)
        through = flows.leave + flows.edge.sum(axis=1)
        for i, k in enumerate(self.group):
            key = (int(k), int(placement.start[i]), int(placement.end[i] - placement.start[i]))
            if key in self.number:
                values[self.number[key]] += 1.0
                if self.carried:
                    values[self.carried[key]] += through[i] / self.program.unit
        if not self.carried:
            values[self.program.goal] = flows.value / self.program.unit
        return values


def equal_model(instance: FlowInstance, high: float) -> EqualModel:
    """Return the program over equal nodes for flows of at most `high` tokens/s; links must not bind."""
    layers = instance.layers
    tables, group = np.unique(np.minimum(rates(instance), high), axis=0, return_inverse=True)
    count = np.bincount(group)
    program = Program(high)
    model = EqualModel(program, np.asarray(group, np.int64), {}, {})
    # A kind that carries nothing with j layers needs no column for it.
    for k, j in np.argwhere(tables > 0.0):
        for s in range(layers - int(j) + 1):
            model.number[int(k), s, int(j)] = program.integer(0, float(count[k]))
    for k in range(len(tables)):
        columns = [column for key, column in model.number.items() if key[0] == k]
        program.add(_terms(columns, 1.0), 0.0, float(count[k]))
    if instance.partial:
        _hold_everywhere(model, tables, layers, high)
    else:
        _conserve_flow(model, tables, layers, high)
    return model


def _hold_everywhere(model: EqualModel, tables: Floats, layers: int, high: float) -> None:
    program = model.program
    flow = program.flow(high)
    program.goal.append(flow)
    rows: list[list[Term]] = [[(flow, 1.0)] for _ in range(layers)]
    for (k, s, j), column in model.number.items():
        for layer in range(s, s + j):
            rows[layer].append((column, -float(tables[k, j]) / high))
    for row in rows:
        program.add(row, -np.inf, 0.0)


def _conserve_flow(model: EqualModel, tables: Floats, layers: int, high: float) -> None:
    program = model.program
    rows: list[list[Term]] = [[] for _ in range(layers + 1)]
    for (k, s, j), column in model.number.items():
        rate = float(tables[k, j])
        carried = model.carried[k, s, j] = program.flow(min(high, rate * program.high[column]))
        program.add([(carried, 1.0), (column, -rate / high)], -np.inf, 0.0)
        rows[s].append((carried, -1.0))
        rows[s + j].append((carried, 1.0))
    # Layer 0 is fed by the source and the last ends at the sink: only the boundaries between must balance.
    for row in rows[1:layers]:
        program.add(row, 0.0, 0.0)
    program.goal += [column for column, _ in rows[0]]


def prune_links(instance: FlowInstance, degree: int, *, ends: bool = False) -> FlowInstance:
    """Keep the `degree` fastest links of every node, a link staying if either end keeps it.

    With `ends` the source and the sink too keep only so many, as in the published instances. Ties go to the
    node listed first. What is pruned may carry less than the whole.
    """

    def fastest(speed: Floats) -> NDArray[np.bool_]:
        kept = np.zeros(len(speed), bool)
        kept[np.argsort(-speed, kind="stable")[:degree]] = True
        return kept

    # A link counts with the faster of its two directions.
    both = np.maximum(instance.link, instance.link.T)
    kept = np.array([fastest(row) for row in both])
    enter, leave = instance.enter, instance.leave
    if ends:
        enter, leave = np.where(fastest(enter), enter, 0.0), np.where(fastest(leave), leave, 0.0)
    link = np.where(kept | kept.T, instance.link, 0.0)
    # Pruned links differ from node to node, so no two nodes count as equal.
    kind = np.arange(instance.size)
    return replace(instance, kind=kind, link=link, enter=enter, leave=leave)


@dataclass(frozen=True)
class EngineOutcome:
    """Result of an engine: values of the columns (None: none found) and the bound, tokens/s.

    `iterations` are those of the simplex method; `timed_out` says that the clock ended it, not its work.
    """

    status: Status
    values: Floats | None
    bound: float
    nodes: int
    iterations: int = 0
    timed_out: bool = False


@dataclass(frozen=True)
class MipEngine:
    """A solver of integer programs: `solve(program, seconds, hint)`; the clock is a safety net.

    One that `takes_start` begins at the hint; the others are only asked for something better.
    """

    solve: Callable[[Program, float, Floats | None], EngineOutcome]
    takes_start: bool = True


def highs(
    program: Program, seconds: float, hint: Floats | None, iterations: int = ITERATIONS
) -> EngineOutcome:
    """Solve with HiGHS, from `hint`, in at most about so many simplex iterations."""
    from atoll.solve.lp import LinearProgram, Sparse

    engine = LinearProgram()
    none = np.zeros(0, np.int64)
    low, high = np.array(program.low), np.array(program.high)
    engine.add_columns(
        program.cost(), low, high, Sparse.of(none, none, np.zeros(0), program.columns)
    )
    entries = Sparse.of(
        np.array(program.row),
        np.array(program.column),
        np.array(program.value),
        program.rows,
    )
    engine.add_rows(np.array(program.row_low), np.array(program.row_high), entries)
    engine.set_integer(np.flatnonzero(program.whole))
    solved = engine.solve_mip(
        time_limit_s=seconds, gap=0.0, start=hint, iteration_limit=max(0, iterations)
    )
    return EngineOutcome(
        solved.status,
        solved.values,
        -solved.bound * program.unit,
        solved.nodes,
        solved.iterations,
        solved.timed_out,
    )


HIGHS = MipEngine(highs)
