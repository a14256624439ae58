"""How many batches each unit where pipelines start may have under way: `routing.pacing` for a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.routing.pacing import PacedNode, batches_in_flight
from atoll.routing.route_tables import RouteTables
from atoll.sim.graphs import Lower
from atoll.sim.sim_arrays import Floats, Longs, Records

SEQUENCES = 512
"""Sequences up to which the number of batches is worked out; with more it stays."""
BATCHES = 32
"""The most batches under way from one unit."""
GRID = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0])
_MIN_BATCH_SHARE = 0.05
"""The share of a batch below which a unit beside the way does not count."""


def pace_table(
    lower: Lower, unit: Records, curves: Sequence[Floats], grid: Floats
) -> tuple[Longs, Longs]:
    """Return batches by row and sequences, and the row of each unit (0: it is not paced).

    Units where ways of different lengths start are not: a batch would be out until its last part is back.
    `curves[u]` has the seconds of the decode steps of unit u by the sequences of `grid`.
    """
    rows: dict[tuple[int, ...], int] = {}
    tables: list[Longs] = [np.zeros(SEQUENCES + 1, np.int64)]
    paced = np.zeros(len(unit), np.int64)
    asked = np.arange(SEQUENCES + 1, dtype=np.float64)
    base, edge_base = 0, 0
    for table in lower.tables:
        min_hops, max_hops = _hops(table)
        latency = lower.edges["latency_s"][edge_base : edge_base + table.edges]
        for v in range(1, table.vertices - 1):
            u = base + v - 1
            if unit["start"][u] > 0 or unit["solo"][u] or min_hops[v] != max_hops[v]:
                continue
            nodes, hops_s = _passed(table, v, base, curves, grid, latency)
            if len(nodes) < 2:
                continue
            best = batches_in_flight(nodes, asked, hops_s)
            key = tuple(best.tolist())
            if key not in rows:
                rows[key] = len(tables)
                tables.append(best)
            paced[u] = rows[key]
        base += table.vertices - 2
        edge_base += table.edges
    return np.stack(tables), paced


def _hops(table: RouteTables) -> tuple[Longs, Longs]:
    """How many hops the shortest and the longest way from each vertex to the sink has."""
    min_hops = np.zeros(table.vertices, np.int64)
    max_hops = np.zeros(table.vertices, np.int64)
    for v in table.sweep:
        edges = slice(int(table.first[v]), int(table.first[v + 1]))
        next_ones = table.target[edges][table.weight[edges] > 0.0]
        if len(next_ones):
            min_hops[v] = 1 + min_hops[next_ones].min()
            max_hops[v] = 1 + max_hops[next_ones].max()
    return min_hops, max_hops


def _passed(
    table: RouteTables,
    begin: int,
    base: int,
    curves: Sequence[Floats],
    grid: Floats,
    latency: Floats,
) -> tuple[list[PacedNode], float]:
    """The units that batches from a vertex pass, and the latency of the way most of them take."""
    total = np.bincount(table.target, weights=table.weight, minlength=table.vertices)
    share = np.zeros(table.vertices)
    share[begin] = 1.0
    for v in table.sweep[::-1]:
        edges = slice(int(table.first[v]), int(table.first[v + 1]))
        out = table.weight[edges]
        if share[v] > 0.0 and out.sum() > 0.0:
            np.add.at(share, table.target[edges], share[v] * out / out.sum())
    way, hops_s, v = [begin], 0.0, begin
    while v != table.vertices - 1:
        first = int(table.first[v])
        out = table.weight[first : int(table.first[v + 1])]
        if not len(out):
            break
        edge = first + int(np.argmax(out))
        hops_s += float(latency[edge])
        v = int(table.target[edge])
        way.append(v)
    # From the sink, which is the coordinator, back to where it begins.
    for edge in range(int(table.first[0]), int(table.first[1])):
        if table.target[edge] == begin:
            hops_s += float(latency[edge])
    own = total[begin]
    nodes = []
    for v in map(int, np.flatnonzero(share[:-1] > _MIN_BATCH_SHARE)):
        on_way = v in way
        turns = max(1.0, total[v] / (own * share[v])) if own > 0.0 else 1.0
        part = np.interp(grid * share[v], grid, curves[base + v - 1])
        nodes.append(PacedNode(grid, part, turns, bool(on_way)))
    return nodes, hops_s
