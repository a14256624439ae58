"""Pictures: in the terminal, as a PNG, or in one self-contained HTML page.

A picture is anything with the fields of `perf.curves.Picture`; matplotlib (extra `plots`) is imported only
to write files.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core.errors import MissingDependencyError
from atoll.core.files import atomic_write, check_target

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.perf.step_curves import Picture

_COLOURS = ("cyan", "magenta", "yellow", "green", "red", "blue")
_MARKS = "abcdef"
_TABLEAU = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_MAX_WIDTH = 64
"""Columns of a drawing, however wide the terminal is."""
_MIN_WIDTH = 8
_GUTTER = 13
"""Columns that plotille gives to the y axis, left of the drawing."""
_ARROW = 3
"""Columns that the arrow of the x axis sticks out, right of the drawing."""


def draw_picture(
    picture: Picture, *, columns: int = 120, height: int = 14, colours: bool = True
) -> str:
    """Return a picture as text for a terminal of so many columns.

    The drawing is 24 to 64 columns wide beside its axis, less where the terminal has fewer than 40.
    Without colours each curve is drawn with a letter of its own; colours are also left out where
    plotille would not print them.
    """
    import plotille

    colours = colours and _paint(0, "x", True) != "x"
    width = max(_MIN_WIDTH, min(_MAX_WIDTH, columns - _GUTTER - _ARROW))
    figure = plotille.Figure()
    figure.width, figure.height = width, height
    figure.with_colors = colours
    figure.x_label, figure.y_label = picture.x_label, picture.y_label
    xs = [_scale(x, picture.log_x) for curve in picture.curves for x in curve.x]
    ys = [_scale(y, picture.log_y) for curve in picture.curves for y in curve.y]
    if not xs:
        return textwrap.fill(f"{picture.title}: nothing to draw", max(columns, _MIN_WIDTH))
    low_y = min(ys) if picture.log_y else 0.0
    figure.set_x_limits(min_=min(xs), max_=_widen(min(xs), max(xs)))
    figure.set_y_limits(min_=low_y, max_=_widen(low_y, max(ys)))
    figure.x_ticks_fkt = lambda value, _: _format_tick(value, picture.log_x)
    figure.y_ticks_fkt = lambda value, _: f"{_format_tick(value, picture.log_y):>8}"
    for index, curve in enumerate(picture.curves):
        figure.plot(
            [_scale(x, picture.log_x) for x in curve.x],
            [_scale(y, picture.log_y) for y in curve.y],
            lc=_COLOURS[index % len(_COLOURS)] if colours else None,
            marker=None if colours else _MARKS[index % len(_MARKS)],
        )
    axes = f"{picture.y_label} against {picture.x_label}"
    title = textwrap.fill(f"{picture.title} ({axes})", max(columns, _MIN_WIDTH))
    rows = _fit_labels(figure.show().splitlines(), picture, width, columns)
    return "\n".join((title, *rows, *_draw_legend(picture, columns, colours)))


def draw_facts(title: str, facts: Mapping[str, str]) -> RenderableType:
    """Return a title and a line for each fact, for a terminal."""
    from rich.console import Group
    from rich.text import Text

    lines = "\n".join(f"  {name:14s} {value}" for name, value in facts.items())
    return Group(Text(title, style="bold"), Text(lines))


def draw_pictures(pictures: Sequence[Picture], *, height: int = 14) -> RenderableType:
    """Return pictures under one another for the terminal there is, in its colours."""
    from rich.text import Text

    from atoll.report.terminal import console

    out = console()
    colours = out.color_system is not None and not out.no_color
    body = "\n\n".join(
        draw_picture(picture, columns=out.width, height=height, colours=colours)
        for picture in pictures
    )
    # Cut, not folded: a terminal narrower than the axes still shows the shape.
    return Text.from_ansi(body, no_wrap=True, overflow="crop")


def _fit_labels(rows: Sequence[str], picture: Picture, width: int, columns: int) -> list[str]:
    """The drawing with its labels where there is room for them; the title names the axes anyway."""
    top, *body, axis, ticks = rows
    if not 0 < len(picture.y_label) <= _GUTTER - 5:
        top = "^".rjust(_GUTTER - 1)
    if not picture.x_label or len(axis) > columns:
        axis = axis[: _GUTTER + width + _ARROW]
    ticks = ticks.rstrip()
    while len(ticks) > columns and " " in ticks.strip():
        ticks = ticks.rpartition(" ")[0].rstrip()
    return [top, *body, axis, ticks]


def _draw_legend(picture: Picture, columns: int, colours: bool) -> list[str]:
    lines: list[str] = []
    used = 0
    for index, curve in enumerate(picture.curves):
        mark = "──" if colours else _MARKS[index % len(_MARKS)]
        size = len(mark) + 1 + len(curve.name)
        entry = f"{_paint(index, mark, colours)} {curve.name}"
        if lines and used + 3 + size <= columns:
            lines[-1] += f"   {entry}"
            used += 3 + size
        else:
            lines.append(entry)
            used = size
    return lines


def save(
    path: Path, pictures: Sequence[Picture], *, title: str, facts: Mapping[str, str] | None = None
) -> None:
    """Write pictures to a .png or .html file, chosen by its ending."""
    save_all((path,), pictures, title=title, facts=facts)


def save_all(
    paths: Iterable[Path],
    pictures: Sequence[Picture],
    *,
    title: str,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the same pictures to several files; all are checked and drawn before any is written."""
    targets = tuple(dict.fromkeys(paths))
    for path in targets:
        check_target(path, (".png", ".html"))
    drawn = {
        ending: _render_figure(pictures, "png", title)
        if ending == ".png"
        else _render_page(pictures, title, facts or {})
        for ending in {path.suffix.lower() for path in targets}
    }
    for path in targets:
        atomic_write(path, drawn[path.suffix.lower()])


def _render_figure(pictures: Sequence[Picture], kind: str, title: str | None) -> bytes:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "plots") from error
    columns = min(2, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    figure: Any = Figure(figsize=(6.4 * columns, 4.2 * rows), layout="constrained")
    for index, picture in enumerate(pictures):
        axes = figure.add_subplot(rows, columns, index + 1)
        for number, curve in enumerate(picture.curves):
            colour = _TABLEAU[number % len(_TABLEAU)]
            axes.plot(curve.x, curve.y, label=curve.name, color=colour, linewidth=1.8)
        axes.set_xscale("log" if picture.log_x else "linear")
        axes.set_yscale("log" if picture.log_y else "linear")
        axes.set_title(picture.title, fontsize=10, loc="left")
        axes.set_xlabel(picture.x_label)
        axes.set_ylabel(picture.y_label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(picture.curves) > 1:
            axes.legend(frameon=False)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    out = io.BytesIO()
    # Without a date or random ids the same input gives the same file.
    settings: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 120}
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "atoll"}):
        figure.savefig(out, format=kind, **settings)
    return out.getvalue()


def _render_page(pictures: Sequence[Picture], title: str, facts: Mapping[str, str]) -> str:
    from markupsafe import Markup

    from atoll.report.render import render_page

    svg = _render_figure(pictures, "svg", None).decode("utf-8")
    # matplotlib has escaped the words in it; its head is for files, not for pages.
    drawing = Markup(svg[svg.index("<svg") :])
    return render_page(
        "charts.html.j2", {"title": title, "facts": list(facts.items()), "drawing": drawing}
    )


def _scale(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _widen(low: float, high: float) -> float:
    return high if high > low else low + 1.0


def _format_tick(value: float, log: bool) -> str:
    number = 10**value if log else value
    if number == 0:
        return "0"
    if abs(number) >= 9_999.5:
        return f"{number / 1000:,.0f}k"
    return f"{number:,.0f}" if abs(number) >= 99.95 else f"{number:.3g}"


def _paint(index: int, text: str, colours: bool) -> str:
    if not colours:
        return text
    import plotille

    painted: str = plotille.color(text, fg=_COLOURS[index % len(_COLOURS)], mode="names")
    return painted
