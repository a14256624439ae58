"""Machines of a plan with executors inside, drawn: who runs which parts where, and what goes between them.

Equal machines are drawn once, with their number. Columns go by what comes first in a model (encoders, then
the llm, then what speaks or draws); inside a machine, equal executors are one box with a square for each GPU.
Arrows are requests/s from one box to another, with bytes/s where they leave a machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.catalog.catalog import Catalog
from atoll.catalog.models import ModelSpec
from atoll.core.units import format_price, format_throughput, pluralize
from atoll.perf.components.class_loads import component_of
from atoll.plan.executor_use import (
    ExecutorPlanUse,
    ExecutorUse,
    MachineKey,
    PairFlow,
    machine_key,
    pair_flows,
)
from atoll.plan.plan import Instance, Node, Plan
from atoll.plan.problem import Problem
from atoll.report.plan.layout_svg import PlacedText, choose_colours
from atoll.report.render import render_svg

MAX_ARROWS = 60
"""Arrows drawn, the largest first."""
# Sizes in pixels: of a machine and what is around it, then of the boxes in it.
_WIDTH = 252
_GAP = 176  # between columns
_BETWEEN = 26  # between machines of a column
_EDGE = 14  # around the whole drawing
_HEAD = 42  # title of a machine
_ROW = 52
_SPACE = 8  # between boxes
_IN = 10  # around boxes
_CHIP = 8
_STEP = 11  # from one GPU to the next
_MAX_CHIPS = 16
_BULGE = 70
_LABEL = (6.2, 14.0)
"""Pixels of a letter of a label, and of its line."""
_LETTERS = 33
_PLACES = (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74, 0.18, 0.82, 0.12, 0.88, 0.06, 0.94)
"""Where on its arrow a label may stand, the best first."""


@dataclass(frozen=True)
class Chip:
    """A GPU of a box; positions in pixels."""

    x: float
    y: float


@dataclass(frozen=True)
class WorkBox:
    """Equal executors on a machine, or what a plain model has of it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    label: str
    note: str
    title: str
    chips: tuple[Chip, ...]


@dataclass(frozen=True)
class DrawnMachine:
    """A machine, or several that hold the same."""

    x: float
    y: float
    width: float
    height: float
    label: str
    note: str
    spot: bool
    idle: PlacedText | None
    boxes: tuple[WorkBox, ...]


@dataclass(frozen=True)
class FlowArrow:
    """Requests that go from one box to another."""

    path: str
    head: str
    width: float
    colour: str
    label: PlacedText
    title: str


@dataclass(frozen=True)
class MachinesDrawing:
    """Everything in the drawing, placed; `left_out` counts arrows that are too small to be drawn."""

    width: float
    height: float
    title: str
    machines: tuple[DrawnMachine, ...]
    arrows: tuple[FlowArrow, ...]
    colours: Mapping[str, str]
    left_out: int = 0


@dataclass(frozen=True)
class _Work:
    """Equal pieces of work on one machine: whose, what, on how many GPUs each, and the executors."""

    service: str
    label: str
    gpus: int
    members: tuple[str, ...]
    executors: bool

    @property
    def alike(self) -> tuple[str, str, int, int]:
        return (self.service, self.label, self.gpus, len(self.members))


@dataclass(frozen=True)
class _Pattern:
    """Machines that hold the same: their type, and by machine the works in the same order."""

    place: tuple[str, str, str]
    machines: tuple[tuple[_Work, ...], ...]
    gpus: int

    @property
    def works(self) -> tuple[_Work, ...]:
        """The works of one machine, with the members of all."""
        return tuple(
            replace(same[0], members=tuple(name for work in same for name in work.members))
            for same in zip(*self.machines, strict=True)
        )


def draw_machines(
    plan: Plan, problem: Problem, catalog: Catalog, use: ExecutorPlanUse
) -> MachinesDrawing:
    """Return the machines of a plan, what runs on them, and what goes between executors, as a drawing."""
    colours = choose_colours(service.name for service in problem.services)
    uses = {one.id: one for one in use.executors}
    patterns = _patterns(plan)
    columns = _columns(patterns, _depths(problem, catalog, use))
    boxes: list[DrawnMachine] = []
    box_of: dict[str, tuple[int, WorkBox]] = {}
    tall = 0.0
    for at, column in enumerate(columns):
        x, y = _EDGE + at * (_WIDTH + _GAP), float(_EDGE)
        for pattern in column:
            machine = _draw_machine(pattern, x, y, problem, uses, colours)
            boxes.append(machine)
            for work, box in zip(pattern.works, machine.boxes, strict=True):
                box_of |= {name: (at, box) for name in work.members if work.executors}
            y += machine.height + _BETWEEN
        tall = max(tall, y - _BETWEEN + _EDGE)
    flows = pair_flows(plan, problem, catalog)
    arrows, left_out = _draw_arrows(flows, box_of, colours, boxes)
    right = [machine.x + machine.width for machine in boxes]
    right += [arrow.label.x + _half(arrow.label.text) for arrow in arrows]
    return MachinesDrawing(
        width=max(right, default=_WIDTH) + _EDGE,
        height=max(tall, 2.0 * _EDGE),
        title=f"Machines of {plan.problem_name}, what runs on them, and what goes between executors",
        machines=tuple(boxes),
        arrows=arrows,
        colours=colours,
        left_out=left_out,
    )


def render_machines_svg(drawing: MachinesDrawing) -> str:
    """Return the drawing as the text of an SVG file."""
    return render_svg("machines.svg.j2", {"drawing": drawing})


# What is on which machine


def _patterns(plan: Plan) -> list[_Pattern]:
    """Fold equal machines, in the order of their place and of what they hold."""
    held: defaultdict[MachineKey, list[tuple[Instance, Node]]] = defaultdict(list)
    for instance in plan.instances:
        for node in instance.nodes:
            held[machine_key(instance, node)].append((instance, node))
    folded: dict[object, list[tuple[_Work, ...]]] = {}
    sizes: dict[object, int] = {}
    for machine, slices in sorted(held.items()):
        works = _works(slices)
        key = (machine[:3], tuple(work.alike for work in works))
        folded.setdefault(key, []).append(works)
        sizes[key] = slices[0][1].machine_gpus
    return [
        _Pattern(key[0], tuple(machines), sizes[key])  # type: ignore[index]
        for key, machines in sorted(folded.items(), key=lambda item: repr(item[0]))
    ]


def _works(slices: Sequence[tuple[Instance, Node]]) -> tuple[_Work, ...]:
    groups: defaultdict[tuple[str, str, int, bool], list[str]] = defaultdict(list)
    for instance, node in slices:
        executor = bool(instance.executor_parts)
        label = (
            instance.holds(node) if executor else f"{instance.phase}, layers {instance.holds(node)}"
        )
        if instance.guests:
            label += f", shared with {' and '.join(instance.services[1:])}"
        groups[instance.service, label, node.gpus, executor].append(instance.id)
    return tuple(
        _Work(service, label, gpus, tuple(names), executor)
        for (service, label, gpus, executor), names in sorted(groups.items())
    )


def _depths(problem: Problem, catalog: Catalog, use: ExecutorPlanUse) -> dict[str, float]:
    """How far into its model the part is that keeps each executor busiest, 0 for those that come first."""
    levels = {
        service.name: _levels(catalog.model(service.model)) for service in problem.graph_services
    }
    found = {}
    for one in use.executors:
        known = levels.get(one.service, {})
        parts = [part for part in one.parts if component_of(part) in known]
        if parts:
            busiest = max(parts, key=lambda part: (one.busy_by_part.get(part, 0.0), part))
            found[one.id] = float(known[component_of(busiest)])
    return found


def _levels(model: ModelSpec) -> dict[str, int]:
    levels: dict[str, int] = {}
    for component in model.graph.topological_order():
        before = [levels[c.name] for c in model.graph.predecessors(component.name)]
        levels[component.name] = 1 + max(before, default=-1)
    return levels


def _columns(patterns: Sequence[_Pattern], depths: Mapping[str, float]) -> list[list[_Pattern]]:
    """Machines in columns by what they mostly do; those of plain models alone where there is room."""
    by_depth: defaultdict[int, list[_Pattern]] = defaultdict(list)
    plain: list[_Pattern] = []
    for pattern in patterns:
        known = [depths[name] for work in pattern.works for name in work.members if name in depths]
        if known:
            by_depth[round(sum(known) / len(known))].append(pattern)
        else:
            plain.append(pattern)
    # Services in the same order in all columns: fewer arrows cross.
    columns = [sorted(by_depth[depth], key=_services) for depth in sorted(by_depth)] or [[]]
    for pattern in plain:
        min(columns, key=lambda column: sum(map(_height, column))).append(pattern)
    return columns


def _services(pattern: _Pattern) -> list[str]:
    return sorted({work.service for work in pattern.works})


def _height(pattern: _Pattern) -> float:
    rows = len(pattern.works)
    used = sum(work.gpus * len(work.members) for work in pattern.machines[0])
    idle = 18.0 if used < pattern.gpus else 0.0
    return _HEAD + rows * (_ROW + _SPACE) + idle + 4.0


# Boxes


def _draw_machine(
    pattern: _Pattern,
    x: float,
    y: float,
    problem: Problem,
    uses: Mapping[str, ExecutorUse],
    colours: Mapping[str, str],
) -> DrawnMachine:
    region, node_type, market = pattern.place
    number = len(pattern.machines)
    offer = next((o for o in problem.offers if o.key == pattern.place), None)
    price = None if offer is None else format_price(offer.usd_per_hour)
    said = [region, *([] if price is None else [f"{price}{' each' if number > 1 else ''}"])]
    boxes = tuple(
        _draw_work(work, x + _IN, y + _HEAD + at * (_ROW + _SPACE), number, uses, colours)
        for at, work in enumerate(pattern.works)
    )
    used = sum(work.gpus * len(work.members) for work in pattern.machines[0])
    height = _height(pattern)
    idle = None
    if used < pattern.gpus:
        text = f"{pluralize(pattern.gpus - used, 'GPU')} idle"
        idle = PlacedText(x + _WIDTH / 2, y + height - 8, text)
    name = node_type if market == "on-demand" else f"{node_type} {market}"
    return DrawnMachine(
        x=x,
        y=y,
        width=_WIDTH,
        height=height,
        label=f"{number}x {name}" if number > 1 else name,
        note=", ".join(said),
        spot=market == "spot",
        idle=idle,
        boxes=boxes,
    )


def _draw_work(
    work: _Work,
    x: float,
    y: float,
    machines: int,
    uses: Mapping[str, ExecutorUse],
    colours: Mapping[str, str],
) -> WorkBox:
    known = [uses[name] for name in work.members if name in uses]
    each = len(work.members) // machines
    label = f"{each}x {work.label}" if each > 1 else work.label
    busy = [one.busy for one in known if one.busy is not None]
    said = [work.service]
    if busy:
        said.append(f"{sum(busy) / len(busy):.0%} busy")
    if known:
        said.append(format_throughput(sum(one.requests_per_s for one in known)))
    title = f"{work.service}: {label}, {pluralize(work.gpus, 'GPU')} each"
    for part in known[0].parts if known and len(known[0].parts) > 1 else ():
        share = sum(one.busy_by_part.get(part, 0.0) for one in known) / len(known)
        title += f"; {part} {share:.0%}"
    return WorkBox(
        x=x,
        y=y,
        width=_WIDTH - 2 * _IN,
        height=_ROW,
        fill=colours.get(work.service, "#5c6470"),
        label=_shorten(label, _LETTERS),
        note=_shorten(", ".join(said), _LETTERS + 5),
        title=f"{title} ({', '.join(work.members)})",
        chips=_chips(x + 8, y + _ROW - _CHIP - 5, each, work.gpus),
    )


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _chips(x: float, y: float, executors: int, gpus: int) -> tuple[Chip, ...]:
    """A square for each GPU, with a gap after those of one executor."""
    return tuple(
        Chip(x + number * _STEP + (number // gpus) * 5, y)
        for number in range(min(executors * gpus, _MAX_CHIPS))
    )


# Arrows


@dataclass
class _Edge:
    service: str
    src: tuple[int, WorkBox]
    dst: tuple[int, WorkBox]
    requests_per_s: float = 0.0
    bytes_per_s: float = 0.0
    between: bool = False

    @property
    def sides(self) -> tuple[int, int]:
        """From which side it leaves and on which it enters: 1 is the right, -1 the left."""
        ahead = self.dst[0] - self.src[0]
        return (1, -1) if ahead > 0 else (-1, 1) if ahead < 0 else (1, 1)


def _draw_arrows(
    flows: Iterable[PairFlow],
    box_of: Mapping[str, tuple[int, WorkBox]],
    colours: Mapping[str, str],
    machines: Sequence[DrawnMachine],
) -> tuple[tuple[FlowArrow, ...], int]:
    edges: dict[tuple[int, int], _Edge] = {}
    for flow in flows:
        src, dst = box_of[flow.src], box_of[flow.dst]
        key = (id(src[1]), id(dst[1]))
        if key not in edges:
            edges[key] = _Edge(flow.service, src, dst)
        edge = edges[key]
        edge.requests_per_s += flow.requests_per_s
        if flow.between_machines:
            edge.bytes_per_s += flow.bytes_per_s
            edge.between = True
    order = sorted(
        edges.values(),
        key=lambda e: (-e.requests_per_s, e.src[1].x, e.src[1].y, e.dst[1].x, e.dst[1].y),
    )
    shown = order[:MAX_ARROWS]
    ports = _ports(shown)
    largest = max((edge.requests_per_s for edge in shown), default=1.0) or 1.0
    placed: list[tuple[float, float, float, float]] = [
        (m.x + m.width / 2, m.y + m.height / 2, m.width / 2, m.height) for m in machines
    ]
    arrows = []
    for number, edge in enumerate(shown):
        width = 1.2 + 3.0 * edge.requests_per_s / largest
        arrows.append(_draw_arrow(edge, ports[number], width, colours, placed))
    return tuple(arrows), len(order) - len(shown)


def _ports(edges: Sequence[_Edge]) -> list[tuple[float, float]]:
    """Where each arrow leaves and enters: those of one side of a box spread over it, by where they go."""
    sides: defaultdict[tuple[int, int], list[tuple[float, int, int]]] = defaultdict(list)
    for number, edge in enumerate(edges):
        ends = (edge.src[1], edge.dst[1])
        for end, side in enumerate(edge.sides):
            sides[id(ends[end]), side].append((ends[1 - end].y, number, end))
    heights: dict[tuple[int, int], float] = {}
    for meeting in sides.values():
        for at, (_, number, end) in enumerate(sorted(meeting)):
            box = (edges[number].src[1], edges[number].dst[1])[end]
            heights[number, end] = box.y + box.height * (at + 1) / (len(meeting) + 1)
    return [(heights[number, 0], heights[number, 1]) for number in range(len(edges))]


def _draw_arrow(
    edge: _Edge,
    port: tuple[float, float],
    width: float,
    colours: Mapping[str, str],
    placed: list[tuple[float, float, float, float]],
) -> FlowArrow:
    out, into = edge.sides
    (y1, y2), (a, b) = port, (edge.src[1], edge.dst[1])
    x1 = a.x + (a.width if out > 0 else 0.0)
    tip = b.x + (b.width if into > 0 else 0.0)
    x2 = tip + into * 7  # the head fills the rest
    reach = _BULGE if out == into else max(60.0, abs(x2 - x1) * 0.45)
    points = ((x1, y1), (x1 + out * reach, y1), (x2 + into * reach, y2), (x2, y2))
    start, *bend = (f"{x:.1f} {y:.1f}" for x, y in points)
    rate = format_throughput(edge.requests_per_s)
    text = f"{rate}, {_bandwidth(edge.bytes_per_s)}" if edge.between else rate
    x, y = _place_label(points, text, placed)
    return FlowArrow(
        path=f"M{start} C{' '.join(bend)}",
        head=f"M{tip:.1f} {y2:.1f} l{into * 8} -4.5 v9 z",
        width=width,
        colour=colours.get(edge.service, "#5c6470"),
        label=PlacedText(x, y, text),
        title=f"{edge.service}: {a.label} to {b.label}, {text}",
    )


def _bandwidth(bytes_per_s: float) -> str:
    """Bytes/s to three digits: "36 MB/s", "4.36 kB/s"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}/s"
    return f"{bytes_per_s:.3g} B/s"


def _place_label(
    points: Sequence[tuple[float, float]],
    text: str,
    placed: list[tuple[float, float, float, float]],
) -> tuple[float, float]:
    """The first place on a curve, or beside it, where a label covers nothing else; else its middle."""
    half, tall = _half(text), _LABEL[1]
    curve = [_on_curve(points, t) for t in _PLACES]
    spots = [(x, y + beside) for beside in (0.0, tall, -tall, 2 * tall) for x, y in curve]
    free = (
        spot
        for spot in spots
        if not any(
            abs(spot[0] - x) < half + w and abs(spot[1] - y) < (tall + h) / 2
            for x, y, w, h in placed
        )
    )
    x, y = next(free, spots[0])
    placed.append((x, y, half, tall))
    return x, y


def _half(text: str) -> float:
    """Half the width of a label."""
    return len(text) * _LABEL[0] / 2


def _on_curve(points: Iterable[tuple[float, float]], t: float) -> tuple[float, float]:
    """The point of a cubic Bezier curve at `t` of its way."""
    weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
    held = list(points)
    return (
        sum(w * x for w, (x, _) in zip(weights, held, strict=True)),
        sum(w * y for w, (_, y) in zip(weights, held, strict=True)),
    )
