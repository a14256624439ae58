"""What `atoll templates` shows: the best templates of each phase, their prices, the spectrum they span."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from atoll.core.ids import Phase
from atoll.perf.curves import Picture, PlotLine
from atoll.report.charts import draw
from atoll.report.plan_tables import rate, wrap_layout
from atoll.report.terminal import console, table
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
    """What there is of one phase. Gaps are the widest step between throughputs, over the largest."""

    phase: Phase
    multisets: int
    templates: int
    homogeneous: int
    widest_gap: float | None
    widest_gap_homogeneous: float | None
    best: tuple[Best, ...]
    best_homogeneous: Best | None
    spectrum: Picture | None


def phase_templates(
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
    own = spectrum.price_templates(library.counts, library.throughput, kinds, places, prices)
    same = own.only(spectrum.is_homogeneous(library))
    order = own.best_first()
    if uses is not None:
        columns = [kinds.index(kind) for kind in uses]
        order = order[(own.counts[order][:, columns] > 0).any(axis=1)]
    first = same.best_first()[:1]
    there, alone = (len(own.throughput) > 0), (len(same.throughput) > 0)
    largest = float(own.throughput.max()) if there else 1.0
    return PhaseTemplates(
        phase=phase,
        multisets=library.multisets,
        templates=len(library),
        homogeneous=len(same.throughput),
        widest_gap=spectrum.widest_gap(own.throughput, largest) if there else None,
        widest_gap_homogeneous=spectrum.widest_gap(same.throughput, largest) if alone else None,
        best=tuple(_best(library, own, int(i), places) for i in order[:top]),
        best_homogeneous=_best(library, same, int(first[0]), places) if len(first) else None,
        spectrum=_spectrum(phase, own, same, largest) if there else None,
    )


def _best(
    library: TemplateLibrary, own: PricedTemplates, index: int, places: Sequence[str]
) -> Best:
    counts = own.counts[index]
    usd = float(own.usd[index])
    sold = usd < float("inf")
    value = float(own.value[index])
    return Best(
        nodes={
            kind: int(n) for kind, n in zip(library.tables.node_types, counts, strict=True) if n
        },
        layout=_layout(library.layout_of(counts)),
        throughput_per_s=float(own.throughput[index]),
        usd_per_hour=usd if sold else None,
        region=places[int(own.region[index])] if sold else None,
        per_s_per_usd=value if sold else None,
    )


def _layout(layout: Layout) -> str:
    stages = []
    for stage in layout.stages:
        named = (
            f"{f'{n}x ' if n > 1 else ''}{kind}" for kind, n in sorted(Counter(stage.nodes).items())
        )
        stages.append(f"[{stage.start}, {stage.end}) {' + '.join(named)}")
    return " | ".join(stages)


def _spectrum(phase: Phase, own: PricedTemplates, same: PricedTemplates, largest: float) -> Picture:
    curves = []
    for name, part in (("one node type", same), ("all", own)):
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


def _count_templates(own: PhaseTemplates) -> str:
    said = f"{own.templates:,} useful of {own.multisets:,} node sets"
    if own.widest_gap is None or own.widest_gap_homogeneous is None:
        return said
    return (
        f"{said}; widest gap between throughputs {own.widest_gap:.1%} of the largest "
        f"(sets of one type: {own.widest_gap_homogeneous:.1%})"
    )


def _verdict(own: PhaseTemplates) -> str | None:
    """The best template against the best of one node type; both over all node types asked for."""
    first, same = next(iter(own.best), None), own.best_homogeneous
    if first is None or same is None or not first.per_s_per_usd or not same.per_s_per_usd:
        return None
    more = first.per_s_per_usd / same.per_s_per_usd - 1.0
    if more < 0.0005:
        return f"best per dollar: {same.layout}"
    return (
        f"best per dollar: {first.layout}, {more:.1%} more than the best of one type, {same.layout}"
    )


def facts(found: Sequence[PhaseTemplates]) -> dict[str, str]:
    """Return a sentence about each phase."""
    return {
        str(own.phase): "; ".join(filter(None, (_count_templates(own), _verdict(own))))
        for own in found
    }


def draw_templates(
    title: str, found: Sequence[PhaseTemplates], uses: Sequence[str] | None
) -> RenderableType:
    """Return all of it for a terminal."""
    out = console()
    colours = out.color_system is not None and not out.no_color
    parts: list[RenderableType] = [Text(title, style="bold")]
    for own in found:
        parts.append(Text(f"\n{own.phase}: {_count_templates(own)}"))
        if not own.best:
            what = "no template" if uses is None else f"no useful template with {', '.join(uses)}"
            parts.append(Text(f"  {what}"))
            continue
        parts.append(_list_templates(own, out.width))
        said = _verdict(own) if uses is None else None
        if said is not None:
            parts.append(Text(said))
        if own.spectrum is not None:
            picture = draw(own.spectrum, columns=out.width, colours=colours, height=10)
            parts += [Text(""), Text.from_ansi(picture, no_wrap=True, overflow="crop")]
    return Group(*parts)


def _list_templates(own: PhaseTemplates, width: int) -> RenderableType:
    unit = "req/s per $" if own.phase is Phase.BOTH else "tok/s per $"
    cells = [
        (
            best.layout,
            rate(best.throughput_per_s),
            None if best.usd_per_hour is None else f"{best.usd_per_hour:,.2f}",
            None if best.per_s_per_usd is None else f"{best.per_s_per_usd:,.4g}",
            best.region,
        )
        for best in own.best
    ]
    columns = ("layers", "carries", "$/h", unit, "cheapest in")
    taken = sum(
        max(len(columns[i]), *(len(str(line[i] or "-")) for line in cells)) + 2 for i in range(1, 5)
    )
    room = max(18, width - taken - 3)
    lines = [(wrap_layout(line[0], room), *line[1:]) for line in cells]
    listed = table(columns, lines, right=columns[1:4])
    listed.padding, listed.pad_edge = (0, 1, 0, 0), False
    for column in listed.columns[1:]:
        column.no_wrap = True
    return listed
