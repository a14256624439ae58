"""The table in the docs is the one that a run of the probes has made."""

from __future__ import annotations

from typing import Any

import pytest

from tests.real.table import BEGIN, END, PAGE, draw_table, put_table, read_noted

NOTED: dict[str, Any] = {
    "engines": {"atoll": {"version": "1"}, "sglang": {"not_run": "no GPU"}},
    "features": {
        "a": {"atoll": {"word": "yes"}},
        "b": {"atoll": {"word": "no", "why": "400: never"}},
        "c": {"atoll": {"word": "no", "why": "400: never"}},
    },
}


def test_the_page_has_the_table_of_the_last_run() -> None:
    page = PAGE.read_text("utf-8")
    expected = put_table(page, draw_table(read_noted()))
    assert page == expected, "write it anew: python -m tests.real.table"


def test_reasons_are_told_once_and_what_was_not_run_is_said() -> None:
    assert draw_table(NOTED).splitlines() == [
        "| | Atoll 1 | SGLang |",
        "|---|---|---|",
        "| a | yes | not run |",
        "| b | no (1) | not run |",
        "| c | no (1) | not run |",
        "",
        "1. 400: never",
        "",
        "SGLang was not run: no GPU.",
    ]


def test_a_page_without_marks_is_refused() -> None:
    assert put_table(f"x{BEGIN}old{END}y", "new\n") == f"x{BEGIN}\nnew\n{END}y"
    with pytest.raises(ValueError, match="has no"):
        put_table("x", "new\n")
