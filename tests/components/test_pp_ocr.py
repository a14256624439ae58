"""Reading pictures: boxes and texts out of what networks say, and rendered words read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("PIL", reason="needs the extra 'components'")

from PIL import Image, ImageDraw, ImageFont

from atoll.components.base import BadInputError, Setup
from atoll.components.pp_ocr import PpOcr, decode_ctc
from atoll.components.text_boxes import TextBox, areas, find_boxes, reading_order
from atoll.core.errors import AtollError
from tests.components.asking import ask


def flooded(marked: NDArray[np.bool_]) -> set[frozenset[tuple[int, int]]]:
    """Areas by the plainest way there is: from every pixel to its neighbours."""
    left = {(int(y), int(x)) for y, x in np.argwhere(marked)}
    found = set()
    while left:
        area, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            area.add((y, x))
            near = {(y + a, x + b) for a in (-1, 0, 1) for b in (-1, 0, 1)} & left
            left -= near
            edge += near
        found.add(frozenset(area))
    return found


@given(
    st.integers(1, 12).flatmap(
        lambda width: st.lists(
            st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=12
        )
    )
)
def test_areas_are_those_of_a_flood(rows: list[list[bool]]) -> None:
    marked = np.array(rows)
    likely = np.where(marked, 0.5 + np.arange(marked.size).reshape(marked.shape) / 1000, 0.1)
    wanted = sorted(
        (
            min(x for _, x in area),
            min(y for y, _ in area),
            max(x for _, x in area) + 1,
            max(y for y, _ in area) + 1,
            pytest.approx(np.mean([likely[at] for at in area])),
        )
        for area in flooded(marked)
    )
    found = sorted(areas(likely, 0.3))
    assert [area[:4] for area in found] == [area[:4] for area in wanted]
    # Two areas may share all their edges; their means are then compared as a set.
    for ours, theirs in zip(found, wanted, strict=True):
        twins = [area[4] for area in wanted if area[:4] == theirs[:4]]
        assert any(ours[4] == mean for mean in twins)


def test_boxes_grow_and_stay_inside() -> None:
    likely = np.zeros((100, 200), np.float32)
    likely[40:50, 50:150] = 0.9
    likely[0:10, 0:100] = 0.8
    likely[80:90, 10:60] = 0.4  # not sure enough
    likely[70:72, 100:180] = 0.9  # too thin
    first, second = find_boxes(likely, 10)
    grown = 1.6 * 100 * 10 / 220
    assert first.left * 200 == pytest.approx(50 - grown)
    assert first.bottom * 100 == pytest.approx(50 + grown)
    assert (second.left, second.top) == (0, 0)
    assert find_boxes(likely, 1) == [first], "the surest is kept"
    assert first.scaled_to(2000, 100).corners() == [427, 32, 1573, 57]
    assert TextBox(0.9, 0.9, 0.9, 0.9).scaled_to(5, 5).corners() == [4, 4, 5, 5]
    assert find_boxes(np.zeros((32, 32)), 10) == []


def test_lines_are_read_as_people_read() -> None:
    title, left, right = TextBox(0, 0, 100, 20), TextBox(0, 31, 40, 49), TextBox(60, 29, 99, 50)
    below = TextBox(0, 60, 90, 80)
    assert reading_order([below, right, title, left]) == [[title], [left, right], [below]]
    assert reading_order([]) == []


def test_repeated_steps_are_one_character() -> None:
    characters = ["", "a", "b", " "]
    steps = [0, 1, 1, 0, 1, 2, 2, 3, 0, 2]
    chances = np.full((len(steps), 4), 0.05, np.float32)
    chances[np.arange(len(steps)), steps] = [0.9, 0.5, 0.9, 0.9, 0.7, 0.9, 0.1, 0.9, 0.9, 1.0]
    text, score = decode_ctc(chances, characters)
    assert text == "aab b"
    assert score == pytest.approx((0.5 + 0.7 + 0.9 + 0.9 + 1.0) / 5)
    assert decode_ctc(chances[:1], characters) == ("", 0.0)


class Finder:
    """Finds two lines in every picture, the second in two parts."""

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[Any]:
        _, _, height, width = inputs["x"].shape
        assert height % 32 == width % 32 == 0
        assert max(height, width) <= 640
        likely = np.zeros((1, 1, height, width), np.float32)
        for top, left, right in ((0.2, 0.1, 0.9), (0.6, 0.1, 0.4), (0.6, 0.6, 0.9)):
            there = slice(int(top * height), int(top * height) + 8)
            likely[..., there, int(left * width) : int(right * width)] = 0.9
        return [likely]


class Reader:
    """Reads "x" in dark lines and nothing in bright ones."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[Any]:
        self.shapes.append(inputs["x"].shape)
        dark = inputs["x"].min(axis=(1, 2, 3)) < -0.9
        chances = np.zeros((len(dark), 3, 3), np.float32)
        chances[:, :, 0] = 0.5
        chances[dark, 1, 1] = 0.8
        return [chances]


def test_boxes_are_cropped_read_and_put_together() -> None:
    reader = Reader()
    ocr = PpOcr(Finder(), reader, ["", "x", " "])
    picture = np.zeros((900, 1800, 3), np.uint8)
    picture[:, 1000:] = 255
    (output,) = ask(ocr, {"image": picture})
    assert output["text"] == "x\nx", "the part on white says nothing"
    assert [line["score"] for line in output["lines"]] == pytest.approx([0.8, 0.8])
    first, second = (line["box"] for line in output["lines"])
    assert first[0] < 200 < 1500 < first[2]
    assert second[1] > first[3]
    assert all(shape[1:3] == (3, 48) and shape[3] % 64 == 0 for shape in reader.shapes)


@pytest.mark.parametrize(
    "picture",
    [
        None,
        "picture",
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((0, 4, 3), np.uint8),
    ],
)
def test_what_is_no_picture(picture: object) -> None:
    ocr = PpOcr(Finder(), Reader(), ["", "x", " "])
    bad, good = ask(ocr, *[{"image": picture}, ocr.example()])
    assert isinstance(bad, BadInputError)
    assert bad.param == "image"
    assert good["text"] == ""


def page(lines: list[str], size: int) -> NDArray[np.uint8]:
    image = Image.new("RGB", (480, 2 * size * max(1, len(lines))), "white")
    for number, line in enumerate(lines):
        font = ImageFont.load_default(size)
        ImageDraw.Draw(image).text((12, size // 2 + 2 * size * number), line, "black", font)
    return np.asarray(image)


@pytest.mark.slow
def test_rendered_words_are_read_back() -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'components'")
    try:
        ocr = PpOcr.load(Setup())
    except AtollError as error:
        pytest.skip(f"the model cannot be fetched: {error}")
    lines = ["The quick brown fox", "jumps over 12345 dogs."]
    both, alone, empty = ask(ocr, *[{"image": page(text, 32)} for text in (lines, lines[:1], [])])
    assert both["text"] == "\n".join(lines)
    assert alone["text"] == lines[0]
    assert empty == {"text": "", "lines": []}
    assert min(line["score"] for line in both["lines"]) > 0.9
    left, top, right, bottom = both["lines"][0]["box"]
    assert 0 <= left < 30
    assert right > 250
    assert top < 30 < bottom < 70
