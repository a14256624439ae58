"""A placement on a fixed cluster as inline SVG: machines as boxes over the layers they hold, flow as lines.

From left to right runs the model. A box is as wide as its layers, its fill rises with how busy it is, its
colour is the GPU type's; lines are as thick as what flows.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.core.ids import parse_node_type
from atoll.plan.plan import SINK, SOURCE, Instance, Node
from atoll.report.layout_svg import colours
from atoll.solve.place.bottleneck import Bottleneck, Use

_WIDTH = 1000
_MOST_WIDTH = 3600
_LABEL = 58
"""Pixels that the label of a box needs."""
_END = 26
"""Width of source and sink."""
_GAP = 22
"""Pixels between boxes side by side, where the lines run."""
_BOX = 40
_ROW = 54
_TOP = 22
_THICKEST = 9.0
_STYLE = (
    "svg { background: #fff } text { font: 12px system-ui, sans-serif; text-anchor: middle; fill: #5d6675 } "
    ".node { fill: #fff } .small { font-size: 10px } .range { font-size: 11px } "
    ".line { stroke: #5d6675; stroke-opacity: .55; fill: none } .end { fill: #f4f6f9; stroke: #dfe3ea } "
    ".rule { stroke: #dfe3ea } .full { stroke: #a3261b; stroke-opacity: 1 } rect.full { stroke-width: 2.5 }"
)
"""How a file of its own is drawn; inside a report the page says."""


def gpu_colours(instance: Instance) -> dict[str, str]:
    """Return the colour of every GPU type of an instance."""
    return colours([parse_node_type(node.node_type).gpu for node in instance.nodes])


@dataclass(frozen=True)
class _Frame:
    """Where things are drawn: pixels per layer, and the row of every node."""

    scale: float
    layers: int
    rows: Mapping[str, int]

    @property
    def width(self) -> float:
        return 2 * (_END + _GAP) + self.scale * self.layers

    @property
    def height(self) -> float:
        return _TOP + _ROW * (max(self.rows.values()) + 1)

    def x(self, layer: float) -> float:
        """The middle of the gap before a layer."""
        return _END + _GAP + self.scale * layer

    def left(self, node: Node) -> float:
        return self.x(node.start) + _GAP / 2

    def right(self, node: Node) -> float:
        return self.x(node.end) - _GAP / 2

    def middle(self, node: Node) -> float:
        return _TOP + _ROW * self.rows[node.id] + _BOX / 2


def placement_drawing(instance: Instance, use: Mapping[str, Use], cut: Bottleneck | None) -> str:
    """Return the placement and flow of an instance as an SVG element; the bottleneck is outlined."""
    frame = _frame(instance)
    colour = gpu_colours(instance)
    full = {node.id for node in cut.nodes} if cut is not None else set()
    full_links = set(cut.links) if cut is not None else set()
    lines = _lines(instance, frame, full_links)
    boxes = [_box(node, use[node.id], frame, colour, node.id in full) for node in instance.nodes]
    said = html.escape(f"{instance.service}: {len(instance.nodes)} machines, {instance.describe()}")
    return (
        f'<svg class="flow" width="{frame.width:.0f}" height="{frame.height:.0f}" '
        f'viewBox="0 0 {frame.width:.0f} {frame.height:.0f}" role="img" aria-label="{said}">'
        f"{_ruler(frame)}{''.join(lines)}{_end(frame, 0.0, 'in')}"
        f"{_end(frame, frame.width - _END, 'out')}{''.join(boxes)}</svg>"
    )


def svg_file(instance: Instance, use: Mapping[str, Use], cut: Bottleneck | None) -> str:
    """Return the drawing of `placement_drawing` as the text of a file of its own."""
    drawn = placement_drawing(instance, use, cut)
    head, _, rest = drawn.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{_STYLE}</style>{rest}\n'


def _frame(instance: Instance) -> _Frame:
    layers = max(node.end for node in instance.nodes)
    least = min(node.layers for node in instance.nodes)
    room = _WIDTH - 2 * (_END + _GAP)
    most = (_MOST_WIDTH - 2 * (_END + _GAP)) / layers
    scale = min(max(room / layers, (_LABEL + _GAP) / least), max(most, room / layers))
    ends: list[int] = []
    rows: dict[str, int] = {}
    for node in sorted(instance.nodes, key=lambda n: (n.start, n.end, n.host or n.id)):
        row = next((r for r, end in enumerate(ends) if end <= node.start), len(ends))
        if row == len(ends):
            ends.append(0)
        ends[row], rows[node.id] = node.end, row
    return _Frame(scale, layers, rows)


def _ruler(frame: _Frame) -> str:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if s * frame.scale >= 36)
    marks = [
        f'<line class="rule" x1="{frame.x(k):.1f}" x2="{frame.x(k):.1f}" y1="14" y2="{frame.height:.0f}"/>'
        f'<text class="range" x="{frame.x(k):.1f}" y="10">{k}</text>'
        for k in range(0, frame.layers + 1, step)
    ]
    return "".join(marks)


def _end(frame: _Frame, x: float, name: str) -> str:
    height = frame.height - _TOP - (_ROW - _BOX)
    return (
        f'<rect class="end" x="{x:.1f}" y="{_TOP}" width="{_END}" height="{height:.1f}" rx="4"/>'
        f'<text class="range" x="{x + _END / 2:.1f}" y="{_TOP + height / 2 + 4:.1f}">{name}</text>'
    )


def _box(node: Node, use: Use, frame: _Frame, colour: Mapping[str, str], full: bool) -> str:
    x, width = frame.left(node), max(2.0, frame.right(node) - frame.left(node))
    y = frame.middle(node) - _BOX / 2
    gpu = parse_node_type(node.node_type)
    fill = colour[gpu.gpu]
    busy = _BOX * min(1.0, use.share)
    host = node.host or node.id
    said = (
        f"{host}: {node.node_type}, layers [{node.start}, {node.end}), "
        f"{use.tokens_per_s:,.0f} of {use.capacity:,.0f} tokens/s ({use.share:.0%})"
    )
    name = gpu.gpu if gpu.gpu_count == 1 else f"{gpu.gpu}x{gpu.gpu_count}"
    centre = x + width / 2
    label = (
        f'<text class="node" x="{centre:.1f}" y="{y + 17:.1f}">{html.escape(name)}</text>'
        f'<text class="node small" x="{centre:.1f}" y="{y + 31:.1f}">{node.layers}L {use.share:.0%}</text>'
        if width >= _LABEL - 14
        else ""
    )
    edge = ' class="full"' if full else ""
    return (
        f'<g><title>{html.escape(said)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{_BOX}" rx="4" fill="{fill}" fill-opacity="0.7"/><rect x="{x:.1f}" '
        f'y="{y + _BOX - busy:.1f}" width="{width:.1f}" height="{busy:.1f}" rx="4" fill="{fill}"/>'
        f'<rect{edge} x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BOX}" rx="4" fill="none"/>'
        f"{label}</g>"
    )


def _lines(instance: Instance, frame: _Frame, full: set[tuple[str, str]]) -> list[str]:
    nodes = {node.id: node for node in instance.nodes}
    hosts = {node.id: node.host or node.id for node in instance.nodes} | {
        SOURCE: SOURCE,
        SINK: SINK,
    }
    most = max((flow.per_s for flow in instance.flows), default=0.0) or 1.0
    drawn = []
    for flow in sorted(instance.flows, key=lambda f: (f.per_s, f.src, f.dst)):
        if flow.src == SOURCE:
            x2, y2 = frame.left(nodes[flow.dst]), frame.middle(nodes[flow.dst])
            x1, y1 = float(_END), y2
        elif flow.dst == SINK:
            x1, y1 = frame.right(nodes[flow.src]), frame.middle(nodes[flow.src])
            x2, y2 = frame.width - _END, y1
        else:
            before, after = nodes[flow.src], nodes[flow.dst]
            x1, y1 = frame.right(before), frame.middle(before)
            # With partial inference a request enters a box where its own layers begin.
            x2 = max(frame.left(after), frame.x(before.end) + _GAP / 2)
            y2 = frame.middle(after)
        bend = (x1 + x2) / 2
        width = max(0.8, _THICKEST * flow.per_s / most)
        kind = "line full" if (hosts[flow.src], hosts[flow.dst]) in full else "line"
        said = html.escape(f"{hosts[flow.src]} -> {hosts[flow.dst]}: {flow.per_s:,.3g} requests/s")
        drawn.append(
            f'<path class="{kind}" d="M{x1:.1f} {y1:.1f} C{bend:.1f} {y1:.1f} {bend:.1f} {y2:.1f} '
            f'{x2:.1f} {y2:.1f}" stroke-width="{width:.2f}"><title>{said}</title></path>'
        )
    return drawn
