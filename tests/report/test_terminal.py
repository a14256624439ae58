from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from atoll.core.frozen import Frozen
from atoll.core.ids import NodeTypeId
from atoll.report.terminal import emit, jsonable, note, table, to_json


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    tags: tuple[str, ...] = ()


class Model(Frozen):
    name: str


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Point(1.5, ("a",)), {"x": 1.5, "tags": ["a"]}),
        ({Colour.RED: Path("a/b")}, {"red": "a/b"}),
        ({1: None, 2: False}, {"1": None, "2": False}),
        (NodeTypeId("L4", 2), {"gpu": "L4", "gpu_count": 2}),
        ({"b", "a"}, ["a", "b"]),
        ([float("nan"), float("inf"), 2.0], [None, None, 2.0]),
        (Model(name="m"), {"name": "m"}),
        (np.array([1, 2]), [1, 2]),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (range(3), [0, 1, 2]),
    ],
)
def test_values_become_json(value: object, expected: object) -> None:
    assert jsonable(value) == expected
    assert json.loads(to_json(value)) == expected


def test_what_json_cannot_hold_is_an_error() -> None:
    with pytest.raises(TypeError, match="object"):
        jsonable(object())
    with pytest.raises(TypeError, match="bytes"):
        jsonable(b"x")


def test_emit_json_is_json_whatever_else_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"a": [1, "ü"]}, True, "a picture")
    assert json.loads(capsys.readouterr().out) == {"a": [1, "ü"]}


def test_emit_draws_what_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"a": 1}, False, lambda: "a picture")
    assert capsys.readouterr().out == "a picture\n"


def test_emit_makes_tables_of_records(capsys: pytest.CaptureFixture[str]) -> None:
    emit([{"gpu": "L4", "n": 1}, {"gpu": "H100", "extra": {"k": [1]}}], False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["gpu", "n", "extra"]
    assert lines[2:] == [["L4", "1", "-"], ["H100", "-", '{"k":', "[1]}"]]


def test_emit_lists_the_fields_of_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Point(1.5), False)
    assert ["x", "1.5"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_emit_of_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    emit([], False)
    assert capsys.readouterr().out == "(nothing)\n"


def test_cells_are_not_markup_and_rows_are_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "[red]" + "x" * 120
    emit(None, False, table(("a", "b"), [(wide, None)], right=("b",)))
    assert wide in capsys.readouterr().out


@pytest.mark.parametrize("words", ["[b]x[/b]", "[/b]", ":gem:", "a [link=file:///x]y"])
def test_no_text_is_markup(capsys: pytest.CaptureFixture[str], words: str) -> None:
    emit(None, False, words)
    emit(None, False, table((words,), [(words,)], title=words, caption=words))
    emit([{words: words}], False)
    assert capsys.readouterr().out.count(words) == 7


def test_a_note_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    note("wrote [b]" + "x" * 500 + "\n\x1b[31m\udcff.yaml")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "wrote [b]" + "x" * 500 + " \\x1b[31m\\udcff.yaml\n"
