"""A simulation as one HTML page that needs nothing else: distributions, heat map, timeline, tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.core.units import format_duration
from atoll.plan.problem import Problem
from atoll.report.plan_page import cards, document, escaped, html_table, service_table
from atoll.report.sim_tables import (
    NODE_COLUMNS,
    SERVICE_COLUMNS,
    headline,
    node_row,
    percent,
    seconds,
    service_rows,
)
from atoll.sim.result import SimReport

Values = NDArray[np.float64]
_COLOURS = ("#3567a8", "#c2571a", "#2c8a4b", "#8a4fa3", "#b03a48", "#6b6b2a", "#2a8c93", "#7a5230")
_WIDTH, _HEIGHT = 460, 240
_LEFT, _BOTTOM, _TOP, _RIGHT = 56, 34, 14, 12
_POINTS = 160
_CELLS = 100


def page(found: SimReport, problem: Problem) -> str:
    """Return the report of a run as HTML text; the same run gives the same bytes."""
    title = f"Simulation of {found.plan_name}"
    return document(
        title,
        [
            f"<h1>{escaped(title)}</h1>",
            f'<p class="dim">{escaped(headline(found))}</p>',
            _cards(found),
            f"<h2>Promises</h2>{html_table(SERVICE_COLUMNS, service_rows(found, problem))}",
            _distributions(found, problem),
            _timeline(found),
            _heat_map(found),
            f"<h2>Nodes</h2>{html_table(NODE_COLUMNS, map(node_row, found.nodes), NODE_COLUMNS[4:])}",
            _instances(found),
            _links(found),
            service_table(problem),
        ],
    )


def _cards(found: SimReport) -> str:
    facts = [
        ("kept their promises", percent(found.attainment)),
        ("requests finished", f"{found.finished:,}"),
        ("tokens/s", f"{found.tokens_per_s:,.0f}"),
        ("simulated", format_duration(found.clock_s)),
    ]
    if found.usd > 0:
        facts.append(("cost", f"${found.usd_per_hour:,.2f}/h"))
    if found.usd_per_million_tokens:
        facts.append(("per million tokens", f"${found.usd_per_million_tokens:,.2f}"))
    if found.retries:
        facts.append(("started over", f"{found.retries:,}"))
    return cards(facts)


# Plots


def _x(value: float, low: float, high: float) -> float:
    return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, high: float) -> float:
    return _HEIGHT - _BOTTOM - value / high * (_HEIGHT - _BOTTOM - _TOP)


def _frame(
    title: str,
    inner: str,
    ticks_x: Sequence[tuple[float, str]],
    ticks_y: Sequence[tuple[float, str]],
) -> str:
    """A plot with axes; ticks are positions and what they say."""
    base, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    rules = "".join(
        f'<line class="rule" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 24}" y="{y + 4:.1f}" class="range">{escaped(said)}</text>'
        for y, said in ticks_y
    )
    marks = "".join(
        f'<text x="{x:.1f}" y="{base + 16}" class="range">{escaped(said)}</text>'
        for x, said in ticks_x
    )
    return (
        f'<figure style="margin:0"><figcaption class="dim">{escaped(title)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" style="max-width:100%;height:auto">'
        f"{rules}{marks}{inner}</svg></figure>"
    )


def _line(xs: Sequence[float], ys: Sequence[float], colour: str, *, dashed: bool = False) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'


def _legend(names: Sequence[str]) -> str:
    spans = "".join(
        f'<span><i style="background:{_COLOURS[i % len(_COLOURS)]}"></i>{escaped(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<p class="legend">{spans}</p>'


def _cdf(title: str, groups: Sequence[Values], promised: Sequence[float | None]) -> str:
    """Distributions on a logarithmic axis, with the promises as dashed lines."""
    known = [values[np.isfinite(values) & (values > 0.0)] for values in groups]
    some = [values for values in known if len(values)]
    if not some:
        return ""
    ends = [float(np.min(values)) for values in some], [float(np.max(values)) for values in some]
    low, high = math.log10(min(ends[0])), math.log10(max(ends[1]))
    for value in promised:
        if value is not None:
            low, high = min(low, math.log10(value)), max(high, math.log10(value))
    high = max(high, low + 0.1)
    shares = np.linspace(0.0, 100.0, _POINTS)
    inner = ""
    for i, values in enumerate(known):
        colour = _COLOURS[i % len(_COLOURS)]
        if len(values):
            marks = np.log10(np.percentile(values, shares))
            xs = [_x(float(mark), low, high) for mark in marks]
            inner += _line(xs, [_y(float(share), 100.0) for share in shares], colour)
        limit = promised[i]
        if limit is not None:
            x = _x(math.log10(limit), low, high)
            inner += _line([x, x], [_y(0.0, 100.0), _y(100.0, 100.0)], colour, dashed=True)
    steps = [low + (high - low) * k / 4 for k in range(5)]
    ticks_x = [(_x(step, low, high), seconds(float(f"{10**step:.2g}"))) for step in steps]
    ticks_y = [(_y(share, 100.0), f"{share:.0f}%") for share in (0.0, 25.0, 50.0, 75.0, 100.0)]
    return _frame(title, inner, ticks_x, ticks_y)


def _distributions(found: SimReport, problem: Problem) -> str:
    q = found.requests
    services = range(len(found.services))
    promises = [problem.service(own.name) for own in found.services]
    none: list[float | None] = [None for _ in services]
    plots = [
        _cdf("time to first token", _split(q.ttft_s, q.service), [p.ttft_s for p in promises]),
        _cdf("time per token, mean", _split(q.tpot_s, q.service), [p.tpot_s for p in promises]),
        _cdf("largest gap between tokens", _split(q.largest_gap_s, q.service), none),
        _cdf("whole request", _split(q.e2e_s, q.service), none),
    ]
    drawn = "".join(plots)
    return (
        "<h2>Latencies</h2>"
        '<p class="dim">Share of requests that took at most so long; promises are dashed.</p>'
        f"{_legend([own.name for own in found.services])}"
        f'<div style="display:flex;flex-wrap:wrap;gap:1rem">{drawn}</div>'
    )


def _split(values: Values, service: NDArray[np.int16]) -> list[Values]:
    count = int(service.max(initial=0)) + 1
    return [values[service == at] for at in range(count)]


def _timeline(found: SimReport) -> str:
    series = found.series
    bins = len(series.waiting)
    middle = np.arange(bins, dtype=np.float64) * series.bin_s + 0.5 * series.bin_s
    end = bins * series.bin_s
    arrived = series.arrived.sum(axis=1) / series.bin_s
    finished = series.finished.sum(axis=1) / series.bin_s
    plots = [
        _over_time("requests/s: arrived, finished", middle, end, [arrived, finished]),
        _over_time("tokens/s", middle, end, [series.tokens.sum(axis=1) / series.bin_s]),
        _over_time(
            "requests in flight, and waiting for a place",
            middle,
            end,
            [series.flying.astype(np.float64), series.waiting.astype(np.float64)],
        ),
    ]
    return (
        "<h2>Over time</h2>"
        f'<div style="display:flex;flex-wrap:wrap;gap:1rem">{"".join(plots)}</div>'
    )


def _over_time(title: str, times: Values, end: float, lines: Sequence[Values]) -> str:
    high = max((float(line.max(initial=0.0)) for line in lines), default=0.0) or 1.0
    xs = [_x(float(time), 0.0, end) for time in times]
    inner = "".join(
        _line(xs, [_y(float(v), high) for v in line], _COLOURS[i % len(_COLOURS)])
        for i, line in enumerate(lines)
    )
    ticks_x = [(_x(end * k / 4, 0.0, end), format_duration(round(end * k / 4))) for k in range(5)]
    ticks_y = [(_y(high * k / 4, high), f"{high * k / 4:,.3g}") for k in range(5)]
    return _frame(title, inner, ticks_x, ticks_y)


def _heat_map(found: SimReport) -> str:
    """How busy each unit was over time: a row a unit, dark is busy."""
    busy = found.series.busy
    bins, units = busy.shape
    step = max(1, math.ceil(bins / _CELLS))
    edges = range(0, bins, step)
    wide = (_WIDTH * 2 - 180) / max(1, len(edges))
    tall = 14
    rows = ""
    for u in range(units):
        node = found.nodes[u]
        name = f"{node.node}{f'.{node.group}' if node.group else ''} {node.node_type}"
        y = u * tall
        rows += f'<text x="174" y="{y + 11}" style="text-anchor:end" class="range">{escaped(name)}</text>'
        for k, first in enumerate(edges):
            value = float(busy[first : first + step, u].mean())
            rows += (
                f'<rect x="{180 + k * wide:.1f}" y="{y}" width="{wide + 0.3:.1f}" height="{tall - 1}" '
                f'fill="#3567a8" fill-opacity="{value:.2f}"/>'
            )
    size = f"0 0 {_WIDTH * 2} {units * tall + 4}"
    return (
        '<h2>How busy nodes are</h2><p class="dim">A row for each, time from left to right; dark is busy.</p>'
        f'<div class="wide"><svg viewBox="{size}" width="{_WIDTH * 2}" style="max-width:100%;height:auto">'
        f"{rows}</svg></div>"
    )


def _instances(found: SimReport) -> str:
    columns = ("instance", "phase", "region", "rented", "ready", "gone", "tokens", "cost")
    lines = [
        (
            own.instance,
            own.phase,
            own.region,
            seconds(own.rented_s),
            seconds(own.ready_s),
            seconds(own.gone_s),
            f"{own.tokens:,}",
            f"${own.usd:,.2f}",
        )
        for own in found.instances
    ]
    return f"<h2>Instances</h2>{html_table(columns, lines, columns[3:])}"


def _links(found: SimReport) -> str:
    if not found.link_busy:
        return ""
    lines = [(name, percent(share)) for name, share in found.link_busy.items()]
    return f"<h2>Busiest links</h2>{html_table(('link', 'sending'), lines, ('sending',))}"
