"""Things that show themselves: as HTML in a notebook, as tables in a terminal."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH = 120


class Shown:
    """Base of what the front door returns; subclasses say how they are drawn."""

    @abstractmethod
    def _draw(self, width: int) -> RenderableType:
        """Return the object for a terminal of so many columns."""

    @abstractmethod
    def _to_html(self) -> str:
        """Return the object as a piece of HTML."""

    def _repr_html_(self) -> str:
        return self._to_html()

    def __rich__(self) -> RenderableType:
        return self._draw(_WIDTH)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=_WIDTH, highlight=False, markup=False, emoji=False).print(
            self._draw(_WIDTH)
        )
        return text.getvalue().rstrip("\n")
