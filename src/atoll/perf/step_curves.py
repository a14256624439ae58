"""Curves of a model on a node, for people to look at: step time and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.catalog.link_table import Link
from atoll.perf.batch import Batch
from atoll.perf.capacity import RoleLoad, table_of
from atoll.perf.operators import Array
from atoll.perf.step import Position, StepModel, step_seconds


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One line of a chart: its name and its points."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """Some curves over the same axes; `log_x` and `log_y` ask for logarithmic axes."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[PlotLine, ...]
    log_x: bool = False
    log_y: bool = False


def layer_steps(layers: int, max_steps: int) -> tuple[int, ...]:
    """Return a few numbers of layers to draw: the most that fit (or all), a half and a quarter of it."""
    top = max(1, min(layers, max_steps))
    return tuple(dict.fromkeys((top, max(1, top // 2), max(1, top // 4))))


def prefill_steps(model: StepModel, layers: Sequence[int], longest: int) -> Picture:
    """Return prefill step time in ms against prompt tokens, for one prompt per step."""
    tokens = _powers(16, longest)
    zero = np.zeros_like(tokens)
    batch = Batch(tokens, zero + 1.0, zero, zero, zero)
    return Picture(
        "prefill: step time",
        "prompt tokens in the step",
        "ms",
        _by_layers(model, batch, tokens, layers),
        log_x=True,
        log_y=True,
    )


def decode_steps(
    model: StepModel, layers: Sequence[int], context: float, max_batch: int
) -> Picture:
    """Return decode step time in ms against the number of sequences, each over `context` tokens."""
    sequences = _powers(1, max_batch)
    zero = np.zeros_like(sequences)
    batch = Batch(zero, zero, zero, sequences, zero + context)
    return Picture(
        f"decode: step time, context {context:,.0f} tokens",
        "sequences in the batch",
        "ms",
        _by_layers(model, batch, sequences, layers),
        log_x=True,
    )


def throughput_by_layers(
    role: RoleLoad, model: StepModel, stages: Sequence[int], link: Link | None
) -> Picture:
    """Return tokens/s within the promise against layers held, for pipelines of some stage counts."""
    table = table_of(role, model, max(stages), link=link)
    curves = []
    for count in stages:
        position = Position.WHOLE if count == 1 else Position.MIDDLE
        row = table.stage_row(count)[table.POSITIONS.index(position)]
        held = np.flatnonzero(row > 0.0)
        name = f"{count} stage" + ("s" if count > 1 else "")
        curves.append(PlotLine(name, tuple(held.astype(float)), tuple(row[held])))
    return Picture(
        f"{role.phase.value}: throughput within {role.slo_s * 1e3:,.0f} ms for the whole pipeline",
        "layers on the node",
        "tokens/s",
        tuple(curve for curve in curves if curve.x),
        log_y=True,
    )


def _by_layers(
    model: StepModel, batch: Batch[Array], x: Array, layers: Sequence[int]
) -> tuple[PlotLine, ...]:
    curves = []
    for count in layers:
        seconds = step_seconds(model, batch, 0, count)
        curves.append(PlotLine(f"{count} layers", tuple(x), tuple(seconds * 1e3)))
    return tuple(curves)


def _powers(first: int, last: int) -> Array:
    count = max(2, round(np.log2(max(2.0, last / first)) * 2) + 1)
    return np.geomspace(first, last, count)
