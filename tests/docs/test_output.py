"""Outputs and figures on the pages are what commands print; the tool that holds them can be trusted."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from atoll.core.errors import AtollError
from atoll.engine.weights.sources import DEFAULT_MODEL, resolve
from tools.docs_output import (
    Block,
    StaleOutputError,
    list_blocks,
    list_missing,
    list_pages,
    render_page,
    split_commands,
)
from tools.docs_terminal import ROOT, mask, open_terminal


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def page_blocks(*kinds: str) -> list[tuple[Path, Block]]:
    return [
        (page, block)
        for page in list_pages()
        for block in list_blocks(page.read_text("utf-8"))
        if block.kind in kinds
    ]


def test_shown_output_says_where_it_comes_from() -> None:
    """A block with a command and what it prints is run by the tool, or says when it was recorded."""
    unmarked = [
        (named(page), next(split_commands(block.body))[0])
        for page in list_pages()
        for block in list_blocks(page.read_text("utf-8"))
        if block.shows_output and block.kind not in {"output", "session", "shown"}
    ]
    assert not unmarked, unmarked


def test_recorded_sessions_say_when_and_name_files_that_are_there() -> None:
    for page, block in page_blocks("shown"):
        assert re.search(r"recorded on \d{4}-\d\d-\d\d with \S", block.mark), page
        for name in re.findall(r"\b(?:tests|benchmarks|examples)/[\w/.]+", block.mark):
            assert (ROOT / name.rstrip(".")).exists(), f"{page}: {name}"


FAST = sorted(
    {page for page, block in page_blocks("output") if not block.slow}
    | {page for page in list_pages() if re.search(r"<!-- (?:figure: |\{)", page.read_text("utf-8"))}
)
SLOW = sorted({page for page, block in page_blocks("output", "session") if block.slow})


@pytest.mark.parametrize("page", FAST, ids=named)
def test_shown_output_is_what_the_command_prints(page: Path) -> None:
    """Stale? `python tools/docs_output.py --write PAGE` writes it anew."""
    text = page.read_text("utf-8")
    assert render_page(text, slow=False) == text


@pytest.mark.slow
@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize("page", SLOW, ids=named)
def test_shown_output_of_slow_commands_is_what_they_print(page: Path) -> None:
    text = page.read_text("utf-8")
    if missing := list_missing(text):
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    if "smollm2" in text.lower():
        pytest.importorskip("torch", reason="needs the extra 'engine'")
        try:
            resolve(DEFAULT_MODEL)
        except AtollError as error:
            pytest.skip(f"the model cannot be fetched: {error}")
    assert render_page(text, slow=True) == text


def test_a_terminal_remembers_and_starts_at_home() -> None:
    with open_terminal() as terminal:
        assert terminal.run("NAME='two words'; mkdir inside; ls") == "examples\ninside"
        assert terminal.run('echo "$NAME"; echo "$PWD/x" >&2') == "two words\n~/x"


@pytest.mark.slow  # it waits for other pages that have servers
@pytest.mark.xdist_group("docs")
def test_a_server_runs_until_the_page_ends() -> None:
    with open_terminal() as terminal:
        terminal.run("mkdir bin; mkfifo fifo; PATH=$PWD/bin:$PATH")
        terminal.run("printf '#!/bin/sh\necho watching x; read line < fifo' > bin/atoll")
        terminal.run("chmod +x bin/atoll")
        assert terminal.run("atoll hub") == "watching x"
        server = int(terminal.run("kill -0 $LAST_SERVER && echo $LAST_SERVER"))
    with pytest.raises(ProcessLookupError):
        os.killpg(server, 0)


SHOWN = "key abc123def456 (alice): made 2026-11-17 in 3.2s\n"


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        (SHOWN, True),
        ("key zzz999yyy888 (alice): made 2027-01-02 in 1.317min\n", True),
        ("key abc123def456 (bob): made 2026-11-17 in 3.2s\n", False),
        ("key abc123def456 (alice): kept 2026-11-17 in 3.2s\n", False),
    ],
)
def test_only_what_varies_may_differ(printed: str, same: bool) -> None:
    assert (mask(printed) == mask(SHOWN)) is same


def test_a_session_is_written_anew_only_where_something_else_differs() -> None:
    page = "<!-- run: DAY=2027-01-02 -->\n<!-- session -->\n```\n$ echo on $DAY: {}\non 2026-11-17: {}\n```\n"
    assert render_page(page.format("a", "a"), slow=True) == page.format("a", "a")
    assert "on 2027-01-02: b\n" in render_page(page.format("b", "a"), slow=True)
    assert render_page(page.format("b", "a"), slow=False) == page.format("b", "a")


def test_what_only_a_first_plan_prints_is_not_shown() -> None:
    page = "<!-- session -->\n```\n$ echo a; echo 'note: compiling took 1.2min, once'\n{}```\n"
    assert render_page(page.format("b\n"), slow=True) == page.format("a\n")


def test_a_command_goes_on_over_lines() -> None:
    body = "$ echo 'one\ntwo'\none\ntwo\n$ echo \\\n  three\nthree\n"
    assert list(split_commands(body)) == [
        ("$ echo 'one\ntwo'\n", "one\ntwo\n"),
        ("$ echo \\\n  three\n", "three\n"),
    ]


def test_figures_in_prose_are_those_of_the_blocks() -> None:
    page = "It has {} <!-- figure: (\\d+) GPUs --> of them.\n```\n12 GPUs\n```\n"
    assert render_page(page.format(11), slow=False) == page.format(12)
    with pytest.raises(StaleOutputError, match="no block"):
        render_page("7 <!-- figure: (\\d+) CPUs -->\n", slow=False)


def test_figures_in_prose_are_those_of_the_benchmarks() -> None:
    assert render_page("0 <!-- figure: planner_truth {budget_broken} -->\n", slow=False) == (
        "0 <!-- figure: planner_truth {budget_broken} -->\n"
    )
