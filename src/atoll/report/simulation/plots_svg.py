"""Plots of a simulation: distributions, lines over time, a map of how busy nodes were.

Everything is placed here, in pixels; `pages/drawings.html.j2` makes SVG of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atoll.core.units import format_duration
from atoll.report.plan.layout_svg import PlacedText

Values = NDArray[np.float64]
COLOURS = ("#3567a8", "#c2571a", "#2c8a4b", "#8a4fa3", "#b03a48", "#6b6b2a", "#2a8c93", "#7a5230")
_WIDTH = 490
_HEIGHT = 240
"""Pixels of a plot; the next four are its margins."""
_LEFT = 56
_BOTTOM = 34
_TOP = 14
_RIGHT = 30
_MAX_TICKS = 7
_TIMES_S = (
    0.001, 0.01, 0.1, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0,
    7200.0, 14_400.0, 21_600.0, 43_200.0, 86_400.0, 172_800.0, 604_800.0,
)  # fmt: skip
"""Steps of an axis of time."""
_POINTS = 160
_CELLS = 100
_MAP_WIDTH = 1000
"""Pixels of the map of busy nodes."""
_ROW = 14
"""Pixels of one node's row in it."""
_LETTER = 6.8
"""Pixels a letter of a small label takes, about."""


@dataclass(frozen=True)
class PlotCurve:
    """A line through points, in SVG's own notation."""

    points: str
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class LinePlot:
    """Lines with axes, placed in pixels; `names` has the colour of each line that is named beside it."""

    title: str
    lines: Sequence[PlotCurve]
    ticks_x: Sequence[PlacedText]
    ticks_y: Sequence[PlacedText]
    names: Mapping[str, str] = field(default_factory=dict)
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _WIDTH - _RIGHT


@dataclass(frozen=True)
class HeatRow:
    """A name, and how dark each of its cells is, from 0 to 1."""

    name: str
    y: int
    cells: Sequence[float]


@dataclass(frozen=True)
class HeatMap:
    """Rows of cells, the darker the more; sizes in pixels."""

    title: str
    rows: Sequence[HeatRow]
    left: int
    width: int
    height: int
    cell: float
    tall: int
    fill: str
    ticks: Sequence[PlacedText] = ()


def choose_colour(index: int) -> str:
    """Return the colour of the line of that number."""
    return COLOURS[index % len(COLOURS)]


def plot_distributions(
    title: str, groups: Sequence[Values], promised: Sequence[float | None]
) -> LinePlot | None:
    """Plot the share of values up to each, on a logarithmic axis, with the promises as dashed lines.

    None where there is no value above zero.
    """
    known = [values[np.isfinite(values) & (values > 0.0)] for values in groups]
    some = [values for values in known if len(values)]
    if not some:
        return None
    low = math.log10(min(float(np.min(values)) for values in some))
    high = math.log10(max(float(np.max(values)) for values in some))
    for value in promised:
        if value is not None:
            low, high = min(low, math.log10(value)), max(high, math.log10(value))
    high = max(high, low + 0.1)
    shares = np.linspace(0.0, 100.0, _POINTS)
    lines = []
    for i, values in enumerate(known):
        colour = choose_colour(i)
        if len(values):
            marks = np.log10(np.percentile(values, shares))
            xs = [_x(float(mark), low, high) for mark in marks]
            ys = [_y(float(share), 100.0) for share in shares]
            lines.append(PlotCurve(_join(xs, ys), colour))
        limit = promised[i] if i < len(promised) else None
        if limit is not None:
            x = _x(math.log10(limit), low, high)
            upright = _join([x, x], [_y(0.0, 100.0), _y(100.0, 100.0)])
            lines.append(PlotCurve(upright, colour, dashed=True))
    return LinePlot(
        title,
        lines,
        [_tick_x(_x(step, low, high), _name_tick(10**step)) for step in _log_steps(low, high)],
        [_tick_y(_y(part, 100.0), f"{part:.0f}%") for part in (0.0, 25.0, 50.0, 75.0, 100.0)],
    )


def plot_over_time(
    title: str, times_s: Values, end_s: float, lines: Mapping[str, Values]
) -> LinePlot:
    """Plot values at times from 0 to `end_s` seconds; each line is named, with a colour of its own."""
    largest = max((float(line.max(initial=0.0)) for line in lines.values()), default=0.0)
    step = _round_step(largest / 4)
    high = step * max(1, math.ceil(largest / step - 1e-9))
    xs = [_x(float(time), 0.0, end_s) for time in times_s]
    colours = {name: choose_colour(i) for i, name in enumerate(lines)}
    return LinePlot(
        title,
        [
            PlotCurve(_join(xs, [_y(float(value), high) for value in line]), colours[name])
            for name, line in lines.items()
        ],
        [_tick_x(_x(time, 0.0, end_s), format_duration(time)) for time in _time_steps(end_s)],
        [
            _tick_y(_y(step * k, high), _round_number(step * k))
            for k in range(round(high / step) + 1)
        ],
        colours,
    )


def map_heat(title: str, names: Sequence[str], shares: Values, bin_s: float) -> HeatMap:
    """Draw shares of 0 to 1, (times, rows), as rows of cells from left to right; long ones are averaged.

    A time is `bin_s` seconds long; below the rows stands how much of it has gone by.
    """
    times, rows = shares.shape
    step = max(1, math.ceil(times / _CELLS))
    edges = range(0, times, step)
    left = 12 + round(_LETTER * max(map(len, names), default=0))
    cell = (_MAP_WIDTH - left - _RIGHT) / max(1, len(edges))
    second = cell / (step * bin_s) if bin_s > 0 else 0.0
    return HeatMap(
        title=title,
        rows=[
            HeatRow(
                name,
                row * _ROW,
                [float(shares[first : first + step, row].mean()) for first in edges],
            )
            for row, name in enumerate(names)
        ],
        left=left,
        width=_MAP_WIDTH,
        height=rows * _ROW + 20,
        cell=cell,
        tall=_ROW - 1,
        fill=COLOURS[0],
        ticks=[
            PlacedText(left + second * time, rows * _ROW + 14, format_duration(time))
            for time in _time_steps(times * bin_s)
        ],
    )


def _x(value: float, low: float, high: float) -> float:
    return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, high: float) -> float:
    return _HEIGHT - _BOTTOM - value / high * (_HEIGHT - _BOTTOM - _TOP)


def _join(xs: Sequence[float], ys: Sequence[float]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))


def _tick_x(x: float, text: str) -> PlacedText:
    return PlacedText(x, _HEIGHT - _BOTTOM, text)


def _tick_y(y: float, text: str) -> PlacedText:
    return PlacedText(_LEFT, y, text)


def _log_steps(low: float, high: float) -> list[float]:
    """Where to mark a logarithmic axis: at 1, 2, 5, 10, ... or, where those are many, fewer."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        marks = [decade + math.log10(digit) for decade in decades for digit in digits]
        steps = [mark for mark in marks if low - 1e-9 <= mark <= high + 1e-9]
        if 2 <= len(steps) <= _MAX_TICKS:
            return steps
    return [low, high]


def _name_tick(seconds: float) -> str:
    """A time on a logarithmic axis: round numbers of seconds are not round in minutes."""
    return f"{seconds:,.0f}s" if seconds >= 9.95 else format_duration(float(f"{seconds:.2g}"))


def _time_steps(end_s: float) -> Iterator[float]:
    """Round times from 0 on, not more than an axis has room for."""
    step = next((step for step in _TIMES_S if end_s / step < _MAX_TICKS), end_s)
    yield from (step * k for k in range(math.floor(end_s / step + 1e-9) + 1))


def _round_step(value: float) -> float:
    """The next of 1, 2, 2.5, 5, 10, ... that is not below a value; 1 for nothing."""
    if value <= 0:
        return 1.0
    decade = 10.0 ** math.floor(math.log10(value))
    return next(
        decade * digit for digit in (1, 2, 2.5, 5, 10) if decade * digit >= value * 0.999999
    )


def _round_number(value: float) -> str:
    """A number on an axis, short enough for the room beside it."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 10 * size:
            return (
                f"{value / size:,.0f}{unit}" if value >= 100 * size else f"{value / size:.3g}{unit}"
            )
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
