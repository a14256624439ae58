"""Boxes around lines of text, out of a map of how likely text is at every pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TEXT = 0.3
"""Pixels this likely to be text are taken for text."""
_SURE = 0.5
"""Areas are taken for lines if their pixels are this likely on average."""
_GROWTH = 1.6
"""The network marks the core of a line; its box grows by this times its area over its circumference."""
# Pixels of the shorter side: smaller areas are not taken for lines.
_MIN_SIDE = 3


@dataclass(frozen=True, slots=True)
class TextBox:
    """An upright box, in shares of the picture or in pixels; right and lower edges are outside."""

    left: float
    top: float
    right: float
    bottom: float

    def scaled_to(self, width: int, height: int) -> TextBox:
        """Return a box in pixels of a picture, at least one of each side, out of one in shares."""
        left, top = int(self.left * width), int(self.top * height)
        right, bottom = round(self.right * width), round(self.bottom * height)
        return TextBox(left, top, max(left + 1, right), max(top + 1, bottom))

    def crop(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return what it holds of a picture, for a box in pixels."""
        return picture[int(self.top) : int(self.bottom), int(self.left) : int(self.right)]

    def corners(self) -> list[int]:
        """Return left, top, right and bottom in pixels."""
        return [int(self.left), int(self.top), int(self.right), int(self.bottom)]


def find_boxes(likely: NDArray[np.floating[Any]], max_boxes: int) -> list[TextBox]:
    """Return boxes of a map [height, width] of likelihoods, in shares of it: the surest `max_boxes`."""
    height, width = likely.shape
    found: list[tuple[float, TextBox]] = []
    for left, top, right, bottom, score in areas(likely, _TEXT):
        wide, high = right - left, bottom - top
        if min(wide, high) < _MIN_SIDE or score < _SURE:
            continue
        growth = _GROWTH * wide * high / (2 * (wide + high))
        box = TextBox(
            max(0.0, (left - growth) / width),
            max(0.0, (top - growth) / height),
            min(1.0, (right + growth) / width),
            min(1.0, (bottom + growth) / height),
        )
        found.append((score, box))
    found.sort(key=lambda scored: -scored[0])
    return [box for _, box in found[:max_boxes]]


def areas(
    likely: NDArray[np.floating[Any]], threshold: float
) -> list[tuple[int, int, int, int, float]]:
    """Return left, top, right, bottom and mean of every area that hangs together above `threshold`.

    Pixels hang together by their sides and corners. Works on runs of pixels, of which a map of text has
    few: each is joined with those of the line above that it touches.
    """
    height, width = likely.shape
    # A column of zeros on both sides: every run of pixels has a beginning and an end.
    edged = np.zeros((height, width + 2), np.int8)
    edged[:, 1:-1] = likely > threshold
    change = np.diff(edged, axis=1)
    lines, starts = np.nonzero(change == 1)
    ends = np.nonzero(change == -1)[1]
    # Running sums of each line: the weight of a run is a difference of two.
    sums = np.zeros((height, width + 1))
    np.cumsum(likely, axis=1, out=sums[:, 1:])
    weights = sums[lines, ends] - sums[lines, starts]
    roots = _join(lines.tolist(), starts.tolist(), ends.tolist())
    names, area = np.unique(np.asarray(roots, np.int64), return_inverse=True)
    count = len(names)
    left, top = np.full(count, width), np.full(count, height)
    right, bottom = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.minimum.at(left, area, starts)
    np.minimum.at(top, area, lines)
    np.maximum.at(right, area, ends)
    np.maximum.at(bottom, area, lines + 1)
    pixels = np.bincount(area, ends - starts, count)
    mean = np.bincount(area, weights, count) / np.maximum(pixels, 1)
    edges = zip(left.tolist(), top.tolist(), right.tolist(), bottom.tolist(), strict=True)
    return [(*edge, score) for edge, score in zip(edges, mean.tolist(), strict=True)]


def _join(lines: list[int], starts: list[int], ends: list[int]) -> list[int]:
    """Return for every run, in order of lines, the first run of the area it belongs to."""
    parent = list(range(len(lines)))

    def root(run: int) -> int:
        while parent[run] != run:
            # Halve the way to the root while walking it: later walks are short.
            parent[run] = parent[parent[run]]
            run = parent[run]
        return run

    # Runs come in order of lines, so this only ever moves forward.
    above = 0
    for run, line in enumerate(lines):
        # The first run of the line above that ends at or after the pixel left of this one.
        while lines[above] < line - 1 or (lines[above] == line - 1 and ends[above] < starts[run]):
            above += 1
        touched = above
        while lines[touched] == line - 1 and starts[touched] <= ends[run]:
            one, other = root(touched), root(run)
            # The smaller number is the root: an area is named by its first run.
            parent[max(one, other)] = min(one, other)
            touched += 1
    return [root(run) for run in range(len(lines))]


def reading_order(boxes: Sequence[TextBox]) -> list[list[TextBox]]:
    """Return rows from top to bottom, each from left to right; a box whose middle is in a row is of it."""
    rows: list[list[TextBox]] = []
    # By their middles: a box then belongs to the row that was begun last, or begins one.
    for box in sorted(boxes, key=lambda box: (box.top + box.bottom, box.left)):
        middle = (box.top + box.bottom) / 2
        first = rows[-1][0] if rows else None
        if first is not None and first.top <= middle < first.bottom:
            rows[-1].append(box)
        else:
            rows.append([box])
    return [sorted(row, key=lambda box: (box.left, box.top)) for row in rows]
