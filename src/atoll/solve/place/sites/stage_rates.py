"""What a machine carries as a stage of a pipeline, in tokens/s, for every goal.

A pipeline has S stages. Within a promise a node of it with j layers carries R(j, S, W)
(`cluster_capacities`), W being what the fastest links of the place take from S nodes: no pipeline there has
quicker ones, and R never rises with S or W, so these tables bound every placement, too. For the largest flow
it carries T(j) whatever S is. For a flow that lasts, pipelines have a round trip of W seconds, of which a
node has an S-th, and its KV cache must hold the requests that are in flight for so long; these tables are an
estimate and no bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.perf.step import Position
from atoll.plan.cluster_capacities import Wires, message_seconds
from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.flow_instance import FlowInstance
from atoll.solve.place.latency import MAX_STAGES, promise_of
from atoll.solve.place.place_service import FlowEffort
from atoll.solve.place.sites.stock import Stock, pick_rows
from atoll.solve.place.sustained.residence import Site

_TRIPS = 16
"""Round trips that are tried for flows that last."""
_TRIP_STEP = 1.25
"""Factor from one of them to the next."""
_STEP_ROUNDS = 60
"""Rounds in which step and batch, which depend on each other, are found."""
_LONGEST_S = 1e4
"""A step that takes longer never ends: nothing with it lasts."""
_WAITS = 1.5
"""Steps that a token finds for which it waits at a node, roughly: prompts go in front of it."""
_LOADS = np.geomspace(1e-4, 1.0, 48)
"""Loads at which steps are tabulated, as shares of the most prompts that a node has time for."""


@dataclass(frozen=True)
class StageTable:
    """Tokens/s of a machine (its slices together) by way and layers, in a pipeline of so many stages."""

    stages: int
    first: Floats
    middle: Floats
    last: Floats

    def at(self, stage: int) -> Floats:
        """Return the rates of the stage of this number."""
        return (self.first, self.middle, self.last)[place_in(stage, self.stages)]


def place_in(stage: int, stages: int) -> int:
    """Return where a stage stands: 0 for the first of several, 2 for the last or only one, else 1."""
    return 2 if stage == stages - 1 else min(stage, 1)


@dataclass(frozen=True)
class Place:
    """Machines that may form pipelines together: ways of a stock to use them, with a table for each depth.

    `entry[o]` is the entry of way o and `pieces[o]` its slices in a machine, as in the stock.
    """

    ways: Ints
    entry: Ints
    pieces: Ints
    tables: tuple[StageTable, ...]


def place_of(stock: Stock, entries: Ints, effort: FlowEffort) -> Place:
    """Return the place that some entries of a stock make, for the goal of an effort."""
    ways = np.flatnonzero(np.isin(stock.entry, entries))
    rows, pieces = stock.row[ways], stock.pieces[ways]
    if effort.promise:
        tables = _promised_tables(stock, entries, rows)
    elif effort.goal == "sustained":
        tables = _lasting_tables(stock, entries, rows)
    else:
        tables = _flow_tables(stock.sample, rows)
    place = Place(ways, stock.entry[ways], pieces, tuple(tables))
    return _change(place, lambda rate: rate * pieces[:, None]) if (pieces > 1).any() else place


def pick_ways(place: Place, kept: NDArray[np.bool_]) -> Place:
    """Return a place with some of its ways only."""
    picked = _change(place, lambda rate: rate[kept])
    return replace(
        picked, ways=place.ways[kept], entry=place.entry[kept], pieces=place.pieces[kept]
    )


def cap_rates(place: Place, flow: float) -> Place:
    """Return a place whose nodes carry no more than a flow in tokens/s; the place itself where none does."""
    most = flow * place.pieces[:, None]
    if not any((r > most).any() for t in place.tables for r in (t.first, t.middle, t.last)):
        return place
    return _change(place, lambda rate: np.minimum(rate, most))


def _change(place: Place, change: Callable[[Floats], Floats]) -> Place:
    """Return a place with changed rates; tables that share theirs go on doing so."""
    known: dict[int, Floats] = {}
    for table in place.tables:
        for rate in (table.first, table.middle, table.last):
            if id(rate) not in known:
                known[id(rate)] = change(rate)
    tables = (
        StageTable(t.stages, known[id(t.first)], known[id(t.middle)], known[id(t.last)])
        for t in place.tables
    )
    return replace(place, tables=tuple(tables))


def _flow_tables(sample: FlowInstance, rows: Ints) -> list[StageTable]:
    table = _within_layers(sample, rows, sample.rate[rows])
    return [StageTable(s, table, table, table) for s in range(1, sample.layers + 1)]


def _within_layers(sample: FlowInstance, rows: Ints, rate: Floats) -> Floats:
    """Return rates for 0 to all layers, 0 beyond what nodes hold.

    With partial inference a node that holds more may run so few layers: the best of these counts.
    """
    table = np.zeros((len(rows), sample.layers + 1))
    width = min(rate.shape[1], sample.layers + 1)
    table[:, :width] = rate[:, :width]
    table[:, 0] = 0.0
    table[np.arange(sample.layers + 1)[None, :] > sample.max_layers[rows][:, None]] = 0.0
    if sample.partial:
        table[:, 1:] = np.maximum.accumulate(table[:, :0:-1], axis=1)[:, ::-1]
    return table


@dataclass(frozen=True)
class _FastestLinks:
    """The fastest links of a place: seconds for each token, and to the first byte."""

    enter: tuple[float, float]
    between: tuple[float, float]
    leave: tuple[float, float]


def _fastest(stock: Stock, entries: Ints) -> _FastestLinks:
    sample, rows = stock.sample, pick_rows(stock, entries)
    pairs = np.ix_(rows, rows)

    def best(speed: Floats, wait_s: Floats) -> tuple[float, float]:
        usable = speed > 0.0
        if not usable.any():
            return np.inf, np.inf
        return float(1.0 / speed[usable].max()), float(wait_s[usable].min())

    return _FastestLinks(
        best(sample.enter[rows], sample.enter_s[rows]),
        best(sample.link[pairs], sample.latency[pairs]),
        best(sample.leave[rows], sample.leave_s[rows]),
    )


def _promised_tables(stock: Stock, entries: Ints, rows: Ints) -> list[StageTable]:
    sample = stock.sample
    promise = promise_of(sample)
    service = promise.service
    tokens = service.lengths.input_mean + service.lengths.output_mean
    links = _fastest(stock, entries)
    tables = []
    for stages in range(1, min(MAX_STAGES, sample.layers) + 1):
        total = [0.0, 0.0]
        hops = ((links.enter, 1, False), (links.between, stages - 1, False), (links.leave, 1, True))
        for (per_token, wait_s), times, last in hops:
            if times:
                seconds = message_seconds(
                    service,
                    requests_per_s=0.0,
                    stages=stages,
                    seconds_per_token=per_token,
                    latency_s=wait_s,
                    last=last,
                )
                total = [total[0] + times * seconds[0], total[1] + times * seconds[1]]
        # The links alone take longer than the promise.
        if total[0] >= service.ttft_s or total[1] >= service.tpot_s:
            break
        wires: Wires = (total[0], total[1])
        where = (
            (Position.WHOLE,) * 3
            if stages == 1
            else (Position.FIRST, Position.MIDDLE, Position.LAST)
        )
        first, middle, last_ = (
            _within_layers(
                sample,
                rows,
                np.array([promise.nodes[i].rates(stages, at, wires)[0] for i in rows]) * tokens,
            )
            for at in where
        )
        tables.append(StageTable(stages, first, middle, last_))
    return tables


def _lasting_tables(stock: Stock, entries: Ints, rows: Ints) -> list[StageTable]:
    """Return tables for pipelines of several round trips, each of any number of stages."""
    from atoll.solve.place.sustained.sustained import site_of

    sample = stock.sample
    site = site_of(sample)
    links = _fastest(stock, entries)
    load, hop_s = _hops(site, rows)
    per_request = site.prompt + site.answer
    held = np.minimum(np.arange(sample.layers + 1), site.kv.shape[1] - 1)
    room = _within_layers(sample, rows, site.kv[rows][:, held]) / site.held
    most = _within_layers(sample, rows, sample.rate[rows]) / per_request
    outside_s = sum(wait_s + per_token for per_token, wait_s in (links.enter, links.leave))
    hop_wire_s = links.between[1] + links.between[0]
    tables = []
    # All layers at the best pace of any node.
    pace_s = np.where(
        hop_s > 0.0, hop_s / np.maximum(np.arange(hop_s.shape[1]), 1)[None, :, None], np.inf
    )
    shortest_s = float(pace_s.min(initial=np.inf)) * sample.layers
    if not np.isfinite(shortest_s):
        return []
    for number in range(_TRIPS):
        trip_s = shortest_s * _TRIP_STEP**number
        # Little's law: what the KV cache holds, over the seconds that a request stays.
        held_rate = room / ((site.answer + 1.0) * trip_s)
        for stages in range(1, min(MAX_STAGES, sample.layers) + 1):
            each_s = (trip_s - outside_s - (stages - 1) * hop_wire_s) / stages
            if not each_s > 0.0:
                break
            # The largest load at which a node's step is short enough.
            able = (hop_s <= each_s) & (hop_s > 0.0)
            quick = (able * load).max(axis=2)
            rate = np.minimum(np.minimum(quick, held_rate), most) * per_request
            rate = np.where(rate > 0.0, rate, 0.0)
            if rate.max(initial=0.0) > 0.0:
                tables.append(StageTable(stages, rate, rate, rate))
    return tables


def _hops(site: Site, rows: Ints) -> tuple[Floats, Floats]:
    """Return requests/s and about how long a token is at a node with them, by way, layers and load."""
    shape = (len(rows), site.layers + 1, len(_LOADS))
    load, hop_s = np.zeros(shape), np.zeros(shape)
    for o, row in enumerate(rows.tolist()):
        for j in range(1, min(site.layers, site.kv.shape[1] - 1) + 1):
            rate = _LOADS / (j * float(site.prompt_s[row]))
            free_s, met_s = step_seconds(site, row, j, rate)
            kept = np.isfinite(met_s)
            load[o, j, kept] = rate[kept]
            # What it waits for, and its own step.
            hop_s[o, j, kept] = free_s[kept] + _WAITS * met_s[kept]
    return load, hop_s


def step_seconds(site: Site, row: int, layers: int, rate: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of a step without prompts, and of one that a token finds, at each requests/s.

    As `residence.step_of` does for one rate; infinite where a node cannot keep up.
    """
    curve, prompt_s = site.decode_s[row], layers * float(site.prompt_s[row])
    slope = float(curve[-1] - curve[-2])
    busy = rate * prompt_s
    tokens = rate * site.answer
    free_s = np.full(len(rate), float(site.step_s[row]) + layers * float(curve[1]))
    met_s = free_s.copy()
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(_STEP_ROUNDS):
            batch = 1.0 + tokens * met_s
            each = np.interp(batch, np.arange(len(curve)), curve)
            each += np.maximum(batch - (len(curve) - 1), 0.0) * slope
            free_s = float(site.step_s[row]) + layers * each
            met_s = free_s / (1.0 - busy) + site.spread * prompt_s * busy / (1.0 - busy * busy)
            met_s = np.where((busy < 1.0) & (met_s < _LONGEST_S), met_s, np.inf)
            free_s = np.where(np.isfinite(met_s), free_s, np.inf)
    return free_s, met_s
