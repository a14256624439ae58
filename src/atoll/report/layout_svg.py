"""Drawings of instances as inline SVG: stages left to right, their nodes stacked, coloured by GPU type."""

from __future__ import annotations

import html
from collections.abc import Mapping
from itertools import accumulate

from atoll.core.ids import parse_node_type
from atoll.plan.plan import Instance, Node

WIDTH = 720
_GAP = 16
_NODE = 24
_SPACE = 4
_LABEL = 18
_LEAST = 62
"""Pixels a stage needs for the name of a node, however few layers it holds."""

_COLOURS = (
    "#3567a8", "#a84f27", "#33784c", "#7450a0", "#86671d", "#23727e", "#a33c66", "#5c6470",
    "#52702a", "#86523a",
)  # fmt: skip


def colours(gpus: list[str]) -> dict[str, str]:
    """Return a colour for every GPU type, the same for the same list; white is readable on each."""
    return {gpu: _COLOURS[i % len(_COLOURS)] for i, gpu in enumerate(sorted(set(gpus)))}


def stage_widths(layers: list[int], room: float) -> list[float]:
    """Divide a width by layers, giving narrow stages what their label needs at the others' cost."""
    least = min(_LEAST, room / len(layers))
    narrow = [False] * len(layers)
    while True:
        left = room - least * sum(narrow)
        total = sum(n for n, small in zip(layers, narrow, strict=True) if not small)
        widths = [
            least if small else left * n / total for n, small in zip(layers, narrow, strict=True)
        ]
        below = [width < least - 1e-9 for width in widths]
        if not any(below):
            return widths
        narrow = [a or b for a, b in zip(narrow, below, strict=True)]
        if all(narrow):
            return [room / len(layers)] * len(layers)


def draw_instance(instance: Instance, colour: Mapping[str, str]) -> str:
    """Return an instance as an SVG element."""
    stages = instance.layout()
    room = WIDTH - _GAP * (len(stages) - 1)
    widths = stage_widths([stage.end - stage.start for stage in stages], room)
    starts = [0.0, *accumulate(width + _GAP for width in widths)]
    tallest = max(len(stage.nodes) for stage in stages)
    height = tallest * (_NODE + _SPACE) + _LABEL
    parts = []
    for i, (stage, x, width) in enumerate(zip(stages, starts, widths, strict=False)):
        for k, node in enumerate(stage.nodes):
            parts.append(_node(node, x, k * (_NODE + _SPACE), width, colour))
        middle = x + width / 2
        y = len(stage.nodes) * (_NODE + _SPACE) + 10
        parts.append(
            f'<text class="range" x="{middle:.1f}" y="{y}">[{stage.start}, {stage.end})</text>'
        )
        if i:
            parts.append(_arrow(x - _GAP))
    title = html.escape(f"{instance.role} in {instance.region}: {instance.describe()}")
    return (
        f'<svg class="layout" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">'
        f"{''.join(parts)}</svg>"
    )


def _node(node: Node, x: float, y: int, width: float, colour: Mapping[str, str]) -> str:
    fill = colour[parse_node_type(node.node_type).gpu]
    spot = node.market == "spot"
    edge = ' class="spot"' if spot else ""
    said = f"{node.node_type}, {node.market}, {node.layers} layers, tensor parallel {node.tp}"
    name = f"{node.node_type} spot" if spot and width > 90 else node.node_type
    return (
        f'<g><title>{html.escape(said)}</title><rect{edge} x="{x:.1f}" y="{y}" '
        f'width="{width:.1f}" height="{_NODE}" rx="4" fill="{fill}"/>'
        f'<text class="node" x="{x + width / 2:.1f}" y="{y + 16}">{html.escape(name)}</text></g>'
    )


def _arrow(x: float) -> str:
    y = _NODE / 2
    return f'<path class="arrow" d="M{x + 3:.1f} {y} h{_GAP - 6} m-4 -3 l4 3 l-4 3" fill="none"/>'
