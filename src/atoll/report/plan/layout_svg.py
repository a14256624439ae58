"""Instances on rented nodes, drawn: stages from left to right, their nodes stacked, coloured by GPU type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from atoll.core.ids import parse_node_type
from atoll.plan.plan import Instance, Node

WIDTH = 720
_GAP = 16
_NODE = 24
_SPACE = 4
_LABEL = 18
_MIN_STAGE_WIDTH = 62
"""Pixels a stage needs for the name of a node, however few layers it holds."""
_LETTER = 7.0
"""Pixels a letter takes, about."""

_COLOURS = (
    "#3567a8", "#a84f27", "#33784c", "#7450a0", "#86671d", "#23727e", "#a33c66", "#5c6470",
    "#52702a", "#86523a",
)  # fmt: skip


@dataclass(frozen=True)
class NodeBox:
    """A node of a stage; positions in pixels."""

    x: float
    y: int
    width: float
    height: int
    fill: str
    spot: bool
    label: str
    title: str


@dataclass(frozen=True)
class PlacedText:
    """Words at a place in a drawing."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class StageArrow:
    """The way from one stage to the next."""

    x: float
    y: float
    length: int


@dataclass(frozen=True)
class LayoutDrawing:
    """Everything in the drawing of an instance, placed."""

    width: int
    height: int
    title: str
    boxes: tuple[NodeBox, ...]
    ranges: tuple[PlacedText, ...]
    arrows: tuple[StageArrow, ...]


def choose_colours(gpus: Iterable[str]) -> dict[str, str]:
    """Return a colour for every GPU type, the same for the same set; white is readable on each."""
    return {gpu: _COLOURS[i % len(_COLOURS)] for i, gpu in enumerate(sorted(set(gpus)))}


def divide_width(layers: list[int], room: float) -> list[float]:
    """Divide a width by layers, giving narrow stages what their label needs at the others' cost."""
    min_width = min(_MIN_STAGE_WIDTH, room / len(layers))
    narrow = [False] * len(layers)
    while True:
        left = room - min_width * sum(narrow)
        total = sum(n for n, small in zip(layers, narrow, strict=True) if not small)
        widths = [
            min_width if small else left * n / total
            for n, small in zip(layers, narrow, strict=True)
        ]
        below = [width < min_width - 1e-9 for width in widths]
        if not any(below):
            return widths
        narrow = [a or b for a, b in zip(narrow, below, strict=True)]
        if all(narrow):
            return [room / len(layers)] * len(layers)


def draw_layout(instance: Instance, colours: Mapping[str, str]) -> LayoutDrawing:
    """Return the stages and nodes of an instance as a drawing."""
    stages = instance.layout()
    room = WIDTH - _GAP * (len(stages) - 1)
    widths = divide_width([stage.end - stage.start for stage in stages], room)
    starts = [0.0, *accumulate(width + _GAP for width in widths)][: len(stages)]
    tallest = max(len(stage.nodes) for stage in stages)
    placed = list(zip(stages, starts, widths, strict=True))
    return LayoutDrawing(
        width=WIDTH,
        height=tallest * (_NODE + _SPACE) + _LABEL,
        title=f"{instance.role} in {instance.region}: {instance.describe()}",
        boxes=tuple(
            _draw_node(node, x, row * (_NODE + _SPACE), width, colours)
            for stage, x, width in placed
            for row, node in enumerate(stage.nodes)
        ),
        ranges=tuple(
            PlacedText(
                x + width / 2,
                len(stage.nodes) * (_NODE + _SPACE) + 10,
                f"[{stage.start}, {stage.end})",
            )
            for stage, x, width in placed
        ),
        arrows=tuple(StageArrow(x - _GAP + 3, _NODE / 2, _GAP - 6) for x in starts[1:]),
    )


def _draw_node(node: Node, x: float, y: int, width: float, colours: Mapping[str, str]) -> NodeBox:
    spot = node.market == "spot"
    cut = node.gpu_ids is not None
    label = f"{node.gpus}/{node.node_type}" if cut else node.node_type
    side = node.gpus // node.tp
    copies = f"tensor parallel {node.tp}" + (f", {side} copies" if side > 1 else "")
    market = f"{label} spot" if spot else label
    # How its GPUs split layers stands in the box where there is room; it is in the title in any case.
    names = (f"{market}, TP {node.tp}" if node.tp > 1 else market, market)
    return NodeBox(
        x=x,
        y=y,
        width=width,
        height=_NODE,
        fill=colours[parse_node_type(node.node_type).gpu],
        spot=spot,
        label=next((name for name in names if _LETTER * len(name) <= width), label),
        title=f"{node.describe()}, {node.market}, {node.layers} layers, {copies}",
    )
