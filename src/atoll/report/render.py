"""HTML and SVG out of the jinja2 templates in `pages/`.

Python gathers plain data, a template says how it looks, and jinja2 escapes every value: no name out of a
file can become markup. A page is one file that needs nothing else; a fragment is the same content for a
notebook's cell, with what is long folded away and styles that touch nothing outside it. The same data give
the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from atoll.core.units import format_share

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.table import Table

Item = TypeVar("Item")


@dataclass(frozen=True)
class Grid:
    """A table as plain data; columns named in `right` are right-aligned and None shows as "-"."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        items: Iterable[Item],
        cells: Mapping[str, Callable[[Item], object]],
        right: Sequence[str] = (),
    ) -> Grid:
        """Return a row for each item; `cells` says by column what stands there."""
        rows = [tuple(cell(item) for cell in cells.values()) for item in items]
        return cls(tuple(cells), rows, right)

    def draw(self, title: str | None = None, caption: str | None = None) -> Table:
        """Return the table for a terminal."""
        from atoll.report.terminal import table

        return table(self.columns, self.rows, title=title, caption=caption, right=self.right)


@dataclass(frozen=True)
class AxisTick:
    """A line of a drawing's grid: where it is, in pixels, and what is written at it."""

    at: float
    label: str


@dataclass(frozen=True)
class Bar:
    """One line of a bar chart: a name, what is said of it, and a length in per cent of the longest."""

    name: str
    label: str
    percent: float


def scale_bars(lines: Sequence[tuple[str, float, str]]) -> list[Bar]:
    """Return names, values and labels as bars as long as the values; the largest fills the width."""
    largest = max((value for _, value, _ in lines), default=0.0) or 1.0
    return [Bar(name, label, 100.0 * value / largest) for name, value, label in lines]


def render_page(template: str, data: Mapping[str, object]) -> str:
    """Return a template as a whole HTML page; `data` has its `title` and what else the template names."""
    return _render(template, {**data, "layout": "page.html.j2", "whole": True})


def render_fragment(template: str, data: Mapping[str, object]) -> str:
    """Return a template as one HTML element to show inside another page, such as a notebook."""
    return _render(template, {**data, "layout": "fragment.html.j2", "whole": False})


def render_svg(template: str, data: Mapping[str, object]) -> str:
    """Return a template as the text of an SVG element or file."""
    return _render(template, data)


def format_pixels(length: float) -> str:
    """Write a length in a drawing: one decimal is finer than a screen, and no file holds more."""
    return f"{length:.1f}"


def _render(template: str, data: Mapping[str, object]) -> str:
    return str(_environment().get_template(template).render(data))


@cache
def _environment() -> Environment:
    # Only who writes HTML pays for jinja2.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("atoll.report", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["px"] = format_pixels
    environment.filters["share"] = format_share
    return environment
