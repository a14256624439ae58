r"""Write what commands print into README and docs, and say which pages are stale.

    python tools/docs_output.py                      # check every page; exit code 1 if one is stale
    python tools/docs_output.py --write README.md    # run the page's commands and write what they print

A page is one session: its marked blocks run in order, in a folder of their own that has `examples/`. A
comment above a block says what the block is:

    <!-- output -->                   its lines "$ atoll ..." are run, what follows each is what it prints
    <!-- output head=6 tail=2 -->     the same, first six lines (`skip=3`: after three) and last two
    <!-- output keep=times -->        the same, only lines in which that is found; `cut=90` cuts long ones,
                                      `columns=140` is the width of the terminal
    <!-- output slow -->              the same; checked by `make test-full` only
    <!-- session -->                  the same with a shell, where servers run until the page ends and what
                                      varies is masked (tools/docs_terminal.py); always slow
    <!-- session needs=xllamacpp -->  slow blocks of the page are left out where that package is missing
    <!-- run: COMMAND -->             stands alone: run there in the session, not shown
    <!-- after: docs/x.md -->         stands alone: the session of that page comes first
    <!-- file: fleet.yaml -->         the block is written to that file before the first command
    <!-- {key:.1f} s -->              ends a row of a table, behind the name of a benchmark: the cells before
                                      have its figures, when and of which code they were measured, as
                                      `python -m benchmarks --keep` kept them, and what `--quick` said since
    <!-- shown: REASON -->            recorded elsewhere (a cluster, a GPU): when, where, and what tests it
    9.0 <!-- figure: NAME {key} -->   in prose: the word before is a figure that a benchmark recorded
    12 <!-- figure: (\d+) GPUs -->    in prose: the word before is what the group finds in the page's blocks
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

if not __package__:  # run as a program: its folder is on the path, but not the repository
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from atoll.core.version import __version__
from tools.docs_terminal import COLUMNS, ROOT, Terminal, mask, open_terminal

_BLOCK = re.compile(
    r"^<!-- (?P<alone>(?:run|after): .*?) -->$"
    r"|(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<lang>\w*)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_RUN = {"output", "session", "run", "after"}
_PROMPT = "$ "
_FIGURES = ROOT / "benchmarks" / "results" / "figures.json"
_FIGURE_ROW = re.compile(
    r"^\| (?P<what>[^|]*) \|[^|]*\|[^|]*\| (?P<name>\w+) <!-- (?P<form>[^|]*) --> \|$", re.MULTILINE
)

_ONCE = "note: compiling took"
"""A line that only the first plan of a machine prints."""
_FIGURE = re.compile(r"(?P<shown>\S+) <!-- figure: (?P<form>[^\n]*?) -->")


class StaleOutputError(Exception):
    """A command on a page failed, or its mark cannot be read."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page: where its body stands, and what the comment above says of it."""

    start: int
    body: str
    language: str
    mark: str

    @property
    def kind(self) -> str:
        """`output`, `session`, `file`, `shown`, ..., or nothing for a block without a mark."""
        return self.mark.partition(" ")[0].rstrip(":")

    @property
    def slow(self) -> bool:
        """Whether only `make test-full` runs it."""
        return self.kind in _RUN - {"output"} or "slow" in self.mark.split()

    @property
    def argument(self) -> str:
        """What follows the colon of a mark."""
        return self.mark.partition(":")[2].strip()

    def option(self, name: str, default: int) -> int:
        """Return a number that the mark names."""
        found = re.search(rf"\b{name}=(\d+)", self.mark)
        return int(found[1]) if found else default

    def shorten(self, printed: str) -> str:
        """Return what the block shows of an output, with dots where lines were left out."""
        keep = re.search(r"\bkeep=(\S+)", self.mark)
        cut = self.option("cut", sys.maxsize)
        lines = [
            line if len(line) <= cut else f"{line[:cut]}...\n"
            for line in printed.splitlines(keepends=True)
        ]
        if keep is not None:
            return "".join(line for line in lines if re.search(keep[1], line))
        lines = lines[self.option("skip", 0) :]
        head, tail = self.option("head", len(lines)), self.option("tail", 0)
        if len(lines) <= head + tail + 1:
            return "".join(lines)
        shown = "".join(lines[:head]).strip("\n")
        return "".join([f"{shown}\n" if shown else "", "...\n", *lines[len(lines) - tail :]])

    @property
    def shows_output(self) -> bool:
        """Whether a command stands in the block with something under it that it may have printed."""
        commands = list(split_commands(self.body))
        return any(printed.strip() for _, printed in commands)


def list_pages() -> list[Path]:
    """Return README and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def list_blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [
        Block(found.start(), "", "", found["alone"])
        if found["alone"]
        else Block(found.start("body"), found["body"], found["lang"], found["mark"] or "")
        for found in _BLOCK.finditer(text)
    ]


def split_commands(body: str) -> Iterator[tuple[str, str]]:
    """Yield every command of a block, as written with its prompt, and the lines below it."""
    command, printed = "", ""
    for line in body.splitlines(keepends=True):
        continued = not printed and _goes_on(command)
        if line.startswith(_PROMPT) and not continued:
            if command:
                yield command, printed
            command, printed = line, ""
        elif continued:
            command += line
        elif command:
            printed += line
    if command:
        yield command, printed


def _goes_on(command: str) -> bool:
    """Whether a command needs another line: it ends with a backslash, or inside of quotes."""
    if command.endswith("\\\n"):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def run_command(command: str, columns: int = COLUMNS) -> str:
    """Run one `atoll` command in this process and return what it prints, errors included."""
    from atoll.cli import main as cli

    words = shlex.split(command.replace("\\\n", " "), comments=True)
    if words[0] != "atoll":
        raise StaleOutputError(f"only atoll commands are run, not {words[0]!r}")
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        patch.dict(os.environ, {"COLUMNS": str(columns)}),
    ):
        cli.run(words[1:])
    return said.getvalue()


def _show(block: Block, terminal: Terminal) -> str:
    """Run the commands of a block; return it with what they print, as it was where only what varies does."""
    columns = block.option("columns", COLUMNS)
    run = run_command if block.kind == "output" else terminal.run
    shown = ""
    for command, _ in split_commands(block.body):
        lines = run(command.removeprefix(_PROMPT), columns).strip("\n").splitlines()
        kept = (f"{line.rstrip()}\n" for line in lines if not line.startswith(_ONCE))
        shown += command + block.shorten("".join(kept))
    if block.kind == "session" and mask(shown) == mask(block.body):
        return block.body
    return shown


def _read_figures() -> dict[str, dict[str, Any]]:
    """Return what `python -m benchmarks --keep` kept of each benchmark."""
    kept: dict[str, dict[str, Any]] = json.loads(_FIGURES.read_text("utf-8"))
    return kept


def _write_row(row: re.Match[str]) -> str:
    """Return a row of a table with the figures of its benchmark, and when and how they were measured."""
    kept = _read_figures().get(row["name"])
    shown, when = "not recorded", "-"
    if kept is not None:
        shown, when = row["form"].format(**kept["figures"]), _say_when(kept, row["name"])
        quick = kept.get("quick")
        if quick is not None and quick["measured"] >= kept["measured"]:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # it measured less
                less = row["form"].format(**quick["figures"])
                when += f"; {_say_when(quick, row['name'])}: {less}"
    return f"| {row['what']} | {shown} | {when} | {row['name']} <!-- {row['form']} --> |"


def _say_when(kept: dict[str, Any], name: str) -> str:
    """Return the day, version, commit and options of a run, and whether it is of older code."""
    command = f"benchmarks.{name}"
    commit = f" ({kept['commit']})" if kept.get("commit") else ""
    source, when = str(kept["source"]), f"{kept['measured']}, {kept['version']}{commit}"
    if not source.startswith(command) or kept["version"] != __version__:
        return f"{when}; not measured again since"
    return when + source[len(command) :]


def _write_figures(text: str) -> str:
    """Return a page with the figures in its prose as benchmarks recorded them, or as its blocks show them."""
    blocks = "".join(block.body for block in list_blocks(text))

    def write(found: re.Match[str]) -> str:
        name, _, form = found["form"].partition(" ")
        if form.startswith("{"):
            figure = form.format(**_read_figures()[name]["figures"])
        elif shown := re.search(found["form"], blocks):
            figure = shown[1]
        else:
            raise StaleOutputError(f"no block of the page has {found['form']!r}")
        return f"{figure} <!-- figure: {found['form']} -->"

    return _FIGURE.sub(write, text)


def render_page(text: str, *, slow: bool) -> str:
    """Return a page with what its commands print today; slow blocks stay as they are unless asked for."""
    text = _FIGURE_ROW.sub(_write_row, text)
    if any(block.kind in _RUN and (slow or not block.slow) for block in list_blocks(text)):
        with open_terminal() as terminal:
            text = _run_blocks(text, terminal, slow=slow)
    return _write_figures(text)


def _run_blocks(text: str, terminal: Terminal, *, slow: bool) -> str:
    """Run a page in a terminal and return it with what its commands print."""
    blocks = list_blocks(text)
    for block in blocks:
        if block.kind == "file":
            path = Path(block.argument)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, "utf-8")
    parts, end = [], 0
    for block in blocks:
        if block.kind not in _RUN or (block.slow and not slow):
            continue
        if block.kind == "after":
            _run_blocks((ROOT / block.argument).read_text("utf-8"), terminal, slow=True)
        elif block.kind == "run":
            terminal.run(block.argument)
        else:
            parts += [text[end : block.start], _show(block, terminal)]
            end = block.start + len(block.body)
    return "".join([*parts, text[end:]])


def list_missing(text: str) -> set[str]:
    """Return the packages that the sessions of a page need and that are not installed."""
    found = set[str]()
    for block in list_blocks(text):
        if block.kind == "after":
            found |= list_missing((ROOT / block.argument).read_text("utf-8"))
        elif block.kind == "session":
            found |= set(re.findall(r"\bneeds=(\w+)", block.mark))
    return {name for name in found if find_spec(name) is None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="by default README.md and all of docs")
    parser.add_argument("--write", action="store_true", help="write the pages instead of checking")
    parser.add_argument("--fast", action="store_true", help="leave out blocks marked slow")
    options = parser.parse_args()
    stale = []
    for page in [path.resolve() for path in options.pages] or list_pages():
        text = page.read_text("utf-8")
        missing = set() if options.fast else list_missing(text)
        if missing:
            print(f"left out: slow blocks of {page.relative_to(ROOT)}: no {', '.join(missing)}")
        rendered = render_page(text, slow=not options.fast and not missing)
        if rendered == text:
            continue
        stale.append(page)
        print(f"{'wrote' if options.write else 'stale:'} {page.relative_to(ROOT)}", flush=True)
        if options.write:
            page.write_text(rendered, "utf-8")
    return int(bool(stale) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
