"""A placement on a fixed cluster, drawn: machines as boxes over the layers they hold, flow as lines.

From left to right runs the model. A box is as wide as its layers, its fill rises with how busy it is, its
colour is the GPU type's; lines are as thick as what flows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from atoll.core.ids import parse_node_type
from atoll.plan.plan import SINK, SOURCE, Instance, Node, format_gpus
from atoll.report.plan.layout_svg import PlacedText, choose_colours
from atoll.report.render import render_svg
from atoll.solve.place.bottleneck import Bottleneck, Use

_WIDTH = 1000
_MAX_WIDTH = 3600
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


@dataclass(frozen=True)
class MachineBox:
    """A machine over the layers it holds, filled up to `busy`; without a label where it is too narrow."""

    x: float
    y: float
    width: float
    height: float
    busy: float
    fill: str
    full: bool
    label: str
    note: str
    title: str


@dataclass(frozen=True)
class FlowLine:
    """Flow from one machine to the next, as a curve between two points."""

    x1: float
    y1: float
    x2: float
    y2: float
    width: float
    full: bool
    title: str

    @property
    def bend(self) -> float:
        """Where the curve turns."""
        return (self.x1 + self.x2) / 2


@dataclass(frozen=True)
class FlowEnd:
    """Where requests come in or go out."""

    x: float
    y: float
    width: float
    height: float
    label: str


@dataclass(frozen=True)
class PlacementDrawing:
    """Everything in the drawing of a placement, placed."""

    width: float
    height: float
    title: str
    ruler: tuple[PlacedText, ...]
    lines: tuple[FlowLine, ...]
    ends: tuple[FlowEnd, ...]
    boxes: tuple[MachineBox, ...]


def colour_gpus(instance: Instance) -> dict[str, str]:
    """Return the colour of every GPU type of an instance."""
    return choose_colours(parse_node_type(node.node_type).gpu for node in instance.nodes)


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


def draw_placement(
    instance: Instance, use: Mapping[str, Use], cut: Bottleneck | None
) -> PlacementDrawing:
    """Return the placement and flow of an instance as a drawing; the bottleneck is outlined."""
    frame = _make_frame(instance)
    colours = colour_gpus(instance)
    full = {node.id for node in cut.nodes} if cut is not None else set()
    full_links = set(cut.links) if cut is not None else set()
    height = frame.height - _TOP - (_ROW - _BOX)
    return PlacementDrawing(
        width=frame.width,
        height=frame.height,
        title=f"{instance.service}: {len(instance.nodes)} machines, {instance.describe()}",
        ruler=tuple(_draw_ruler(frame)),
        lines=tuple(_draw_lines(instance, frame, full_links)),
        ends=(
            FlowEnd(0.0, _TOP, _END, height, "in"),
            FlowEnd(frame.width - _END, _TOP, _END, height, "out"),
        ),
        boxes=tuple(
            _draw_box(node, use[node.id], frame, colours, node.id in full)
            for node in instance.nodes
        ),
    )


def render_placement_svg(instance: Instance, use: Mapping[str, Use], cut: Bottleneck | None) -> str:
    """Return the drawing of `draw_placement` as the text of an SVG file."""
    return render_svg("placement.svg.j2", {"drawing": draw_placement(instance, use, cut)})


def _make_frame(instance: Instance) -> _Frame:
    layers = max(node.end for node in instance.nodes)
    fewest = min(node.layers for node in instance.nodes)
    room = _WIDTH - 2 * (_END + _GAP)
    max_scale = (_MAX_WIDTH - 2 * (_END + _GAP)) / layers
    scale = min(max(room / layers, (_LABEL + _GAP) / fewest), max(max_scale, room / layers))
    ends: list[int] = []
    rows: dict[str, int] = {}
    for node in sorted(instance.nodes, key=lambda n: (n.start, n.end, n.host or n.id)):
        row = next((r for r, end in enumerate(ends) if end <= node.start), len(ends))
        if row == len(ends):
            ends.append(0)
        ends[row], rows[node.id] = node.end, row
    return _Frame(scale, layers, rows)


def _draw_ruler(frame: _Frame) -> Iterator[PlacedText]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if s * frame.scale >= 36)
    for layer in range(0, frame.layers + 1, step):
        yield PlacedText(frame.x(layer), 10, f"{layer}")


def _draw_box(
    node: Node, use: Use, frame: _Frame, colours: Mapping[str, str], full: bool
) -> MachineBox:
    left = frame.left(node)
    width = max(2.0, frame.right(node) - left)
    gpu = parse_node_type(node.node_type)
    name = gpu.gpu if node.gpus == 1 else f"{gpu.gpu}x{node.gpus}"
    return MachineBox(
        x=left,
        y=frame.middle(node) - _BOX / 2,
        width=width,
        height=_BOX,
        busy=_BOX * min(1.0, use.share),
        fill=colours[gpu.gpu],
        full=full,
        label=name if width >= _LABEL - 14 else "",
        note=f"{node.layers}L {use.share:.0%}",
        title=(
            f"{node.host or node.id}: {_describe_part(node)}, layers [{node.start}, {node.end}), "
            f"{use.tokens_per_s:,.0f} of {use.capacity:,.0f} tokens/s ({use.share:.0%})"
        ),
    )


def _describe_part(node: Node) -> str:
    """The machine's type, and which of its GPUs where it is cut."""
    if node.gpu_ids is None:
        return node.node_type
    return f"GPUs {format_gpus(node.gpu_ids)} of {node.node_type}"


def _draw_lines(
    instance: Instance, frame: _Frame, full: set[tuple[str, str]]
) -> Iterator[FlowLine]:
    nodes = {node.id: node for node in instance.nodes}
    hosts = {node.id: node.host or node.id for node in instance.nodes} | {
        SOURCE: SOURCE,
        SINK: SINK,
    }
    largest = max((flow.per_s for flow in instance.flows), default=0.0) or 1.0
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
        src, dst = hosts[flow.src], hosts[flow.dst]
        yield FlowLine(
            x1,
            y1,
            x2,
            y2,
            width=max(0.8, _THICKEST * flow.per_s / largest),
            full=(src, dst) in full,
            title=f"{src} -> {dst}: {flow.per_s:,.3g} requests/s",
        )
