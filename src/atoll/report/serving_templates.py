"""Serving templates for people: the best of each phase, their prices, the spectrum they span."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from atoll.core.ids import Phase
from atoll.core.units import format_share, format_throughput, format_usd
from atoll.perf.step_curves import Picture, PlotLine
from atoll.report.charts import draw_pictures
from atoll.report.plan.rented_tables import wrap_layout
from atoll.report.terminal import console, table, tighten
from atoll.solve.templates import spectrum
from atoll.solve.templates.generate import Layout, TemplateLibrary
from atoll.solve.templates.spectrum import PricedTemplates


@dataclass(frozen=True)
class Best:
    """One template: its nodes, layout, throughput per second, and price where it is cheapest."""

    nodes: dict[str, int]
    layout: str
    throughput_per_s: float
    usd_per_hour: float | None
    region: str | None
    per_s_per_usd: float | None


@dataclass(frozen=True)
class PhaseTemplates:
    """Templates of one phase. Gaps are the widest step between throughputs, over the largest."""

    phase: Phase
    multisets: int
    templates: int
    homogeneous: int
    widest_gap: float | None
    widest_gap_homogeneous: float | None
    best: tuple[Best, ...]
    best_homogeneous: Best | None
    spectrum: Picture | None


def choose_best(
    library: TemplateLibrary,
    phase: Phase,
    places: Sequence[str],
    prices: Mapping[tuple[str, str], float],
    uses: Sequence[str] | None,
    top: int,
) -> PhaseTemplates:
    """Return the best templates of a phase, `top` of them at most, with their prices and spectrum.

    `prices` are in USD per hour by (place, node type). `uses` names node types of which a template listed
    must have one; the spectrum is of all.
    """
    kinds = library.tables.node_types
    priced = spectrum.price_templates(library.counts, library.throughput, kinds, places, prices)
    same = priced.only(spectrum.is_homogeneous(library))
    order = priced.best_first()
    if uses is not None:
        columns = [kinds.index(kind) for kind in uses]
        order = order[(priced.counts[order][:, columns] > 0).any(axis=1)]
    first = same.best_first()[:1]
    there, alone = (len(priced.throughput) > 0), (len(same.throughput) > 0)
    largest = float(priced.throughput.max()) if there else 1.0
    return PhaseTemplates(
        phase=phase,
        multisets=library.multisets,
        templates=len(library),
        homogeneous=len(same.throughput),
        widest_gap=spectrum.widest_gap(priced.throughput, largest) if there else None,
        widest_gap_homogeneous=spectrum.widest_gap(same.throughput, largest) if alone else None,
        best=tuple(_describe_best(library, priced, int(i), places) for i in order[:top]),
        best_homogeneous=_describe_best(library, same, int(first[0]), places)
        if len(first)
        else None,
        spectrum=_plot_spectrum(phase, priced, same, largest) if there else None,
    )


def _describe_best(
    library: TemplateLibrary, priced: PricedTemplates, index: int, places: Sequence[str]
) -> Best:
    counts = priced.counts[index]
    usd = float(priced.usd[index])
    sold = usd < float("inf")
    value = float(priced.value[index])
    return Best(
        nodes={
            kind: int(n) for kind, n in zip(library.tables.node_types, counts, strict=True) if n
        },
        layout=_write_layout(library.layout_of(counts)),
        throughput_per_s=float(priced.throughput[index]),
        usd_per_hour=usd if sold else None,
        region=places[int(priced.region[index])] if sold else None,
        per_s_per_usd=value if sold else None,
    )


def _write_layout(layout: Layout) -> str:
    stages = []
    for stage in layout.stages:
        named = (
            f"{f'{n}x ' if n > 1 else ''}{kind}" for kind, n in sorted(Counter(stage.nodes).items())
        )
        stages.append(f"[{stage.start}, {stage.end}) {' + '.join(named)}")
    return " | ".join(stages)


def _plot_spectrum(
    phase: Phase, priced: PricedTemplates, same: PricedTemplates, largest: float
) -> Picture:
    curves = []
    for name, part in (("one node type", same), ("all", priced)):
        if len(part.throughput):
            x, y = spectrum.distribution(part.throughput, largest)
            # A step function: what is reached stays until the next throughput.
            xs = (0.0, *(float(v) for v in x.repeat(2)), 1.0)
            ys = (0.0, 0.0, *(float(v) for v in y.repeat(2)))
            curves.append(PlotLine(f"{name} ({len(part.throughput):,})", xs, ys))
    return Picture(
        f"{phase}: throughputs within reach",
        "throughput / largest",
        "share",
        tuple(curves),
    )


def _count_templates(phase: PhaseTemplates) -> str:
    count = f"{phase.templates:,} useful of {phase.multisets:,} node sets"
    if phase.widest_gap is None or phase.widest_gap_homogeneous is None:
        return count
    return (
        f"{count}; widest gap between throughputs {format_share(phase.widest_gap)} of the largest "
        f"(sets of one type: {format_share(phase.widest_gap_homogeneous)})"
    )


def _judge_best(phase: PhaseTemplates) -> str | None:
    """The best template against the best of one node type; both over all node types asked for."""
    first, same = next(iter(phase.best), None), phase.best_homogeneous
    if first is None or same is None or not first.per_s_per_usd or not same.per_s_per_usd:
        return None
    more = first.per_s_per_usd / same.per_s_per_usd - 1.0
    if more < 0.0005:
        return f"best per dollar: {same.layout}"
    return (
        f"best per dollar: {first.layout}, {format_share(more)} more than the best of one type, "
        f"{same.layout}"
    )


def describe_phases(phases: Sequence[PhaseTemplates]) -> dict[str, str]:
    """Return a sentence about each phase."""
    return {
        str(phase.phase): "; ".join(filter(None, (_count_templates(phase), _judge_best(phase))))
        for phase in phases
    }


def draw_templates(
    title: str, phases: Sequence[PhaseTemplates], uses: Sequence[str] | None
) -> RenderableType:
    """Return the best templates of each phase and their spectrum for a terminal."""
    width = console().width
    parts: list[RenderableType] = [Text(title, style="bold")]
    for phase in phases:
        parts.append(Text(f"\n{phase.phase}: {_count_templates(phase)}"))
        if not phase.best:
            what = "no template" if uses is None else f"no useful template with {', '.join(uses)}"
            parts.append(Text(f"  {what}"))
            continue
        parts.append(_list_templates(phase, width))
        verdict = _judge_best(phase) if uses is None else None
        if verdict is not None:
            parts.append(Text(verdict))
        if phase.spectrum is not None:
            parts += [Text(""), draw_pictures([phase.spectrum], height=10)]
    return Group(*parts)


def _list_templates(phase: PhaseTemplates, width: int) -> RenderableType:
    unit = "req/s per $" if phase.phase is Phase.BOTH else "tok/s per $"
    cells = [
        (
            best.layout,
            format_throughput(best.throughput_per_s),
            None if best.usd_per_hour is None else format_usd(best.usd_per_hour, sign=False),
            None if best.per_s_per_usd is None else f"{best.per_s_per_usd:,.4g}",
            best.region,
        )
        for best in phase.best
    ]
    columns = ("layers", "carries", "$/h", unit, "cheapest in")
    taken = sum(
        max(len(columns[i]), *(len(str(line[i] or "-")) for line in cells)) + 2 for i in range(1, 5)
    )
    room = max(18, width - taken - 3)
    lines = [(wrap_layout(line[0], room), *line[1:]) for line in cells]
    listed = table(columns, lines, right=columns[1:4])
    tighten(listed)
    for column in listed.columns[1:]:
        column.no_wrap = True
    return listed
