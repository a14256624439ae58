"""Write what commands print into README and docs, and say which pages are stale.

    python tools/docs_output.py                      # check every page; exit code 1 if one is stale
    python tools/docs_output.py --write README.md    # run the page's commands and write what they print

A page is one session: its marked blocks run in order, in a folder of their own that has `examples/`. A
comment above a block says what the block is:

    <!-- output -->                   its lines "$ atoll ..." are run, what follows each is what it prints
    <!-- output head=6 tail=2 -->     the same, first six lines (`skip=3`: after three) and last two
    <!-- output keep=times -->        the same, only lines in which that word stands
    <!-- output slow -->              the same; checked by `make test-full` only
    <!-- file: fleet.yaml -->         the block is written to that file before the first command
    <!-- {key:.1f} s -->              ends a row of a table, behind the name of a benchmark: the cells before
                                      have its figures and their date, as `benchmarks.record` kept them
    <!-- shown: REASON -->            recorded elsewhere (a cluster, a server); the reason names what tests it
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
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 110
"""Width of the terminal that pages show."""
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<lang>\w*)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_PROMPT = "$ "
_FIGURES = ROOT / "benchmarks" / "results" / "figures.json"
_FIGURE_ROW = re.compile(
    r"^\| (?P<what>[^|]*) \|[^|]*\|[^|]*\| (?P<name>\w+) <!-- (?P<form>[^|]*) --> \|$", re.MULTILINE
)


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
        """`output`, `file`, `shown`, or nothing for a block without a mark."""
        return self.mark.partition(" ")[0].rstrip(":")

    @property
    def slow(self) -> bool:
        """Whether only `make test-full` runs it."""
        return self.kind == "output" and "slow" in self.mark.split()

    def shorten(self, printed: str) -> str:
        """Return what the block shows of an output, with dots where lines were left out."""
        options = dict(re.findall(r"\b(skip|head|tail|keep)=(\S+)", self.mark))
        lines = printed.splitlines(keepends=True)
        if "keep" in options:
            return "".join(line for line in lines if options["keep"] in line)
        lines = lines[int(options.get("skip", 0)) :]
        head, tail = int(options.get("head", len(lines))), int(options.get("tail", 0))
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
        Block(found.start("body"), found["body"], found["lang"], found["mark"] or "")
        for found in _BLOCK.finditer(text)
    ]


def split_commands(body: str) -> Iterator[tuple[str, str]]:
    """Yield every command of a block, as written with its prompt, and the lines below it."""
    command, printed = "", ""
    for line in body.splitlines(keepends=True):
        continued = command.endswith("\\\n") and not printed
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


def run_command(command: str) -> str:
    """Run one `atoll` command in this process and return what it prints, errors included."""
    from atoll.cli import main as cli

    words = shlex.split(command.removeprefix(_PROMPT).replace("\\\n", " "), comments=True)
    if words[0] != "atoll":
        raise StaleOutputError(f"only atoll commands are run, not {words[0]!r}")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        cli.run(words[1:])
    lines = said.getvalue().strip("\n").splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _write_figure(row: re.Match[str]) -> str:
    """Return a row of a table with the figures of its benchmark and the date they were measured."""
    kept = json.loads(_FIGURES.read_text("utf-8")).get(row["name"])
    shown = "not recorded" if kept is None else row["form"].format(**kept["figures"])
    date = "-" if kept is None else kept["measured"]
    return f"| {row['what']} | {shown} | {date} | {row['name']} <!-- {row['form']} --> |"


def render_page(text: str, *, slow: bool) -> str:
    """Return a page with what its commands print today; slow blocks stay as they are unless asked for."""
    text = _FIGURE_ROW.sub(_write_figure, text)
    blocks = list_blocks(text)
    if not any(block.kind == "output" and (slow or not block.slow) for block in blocks):
        return text
    parts, end = [], 0
    with _session():
        for block in blocks:
            if block.kind == "file":
                path = Path(block.mark.partition(":")[2].strip())
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.body, "utf-8")
        for block in blocks:
            if block.kind != "output" or (block.slow and not slow):
                continue
            shown = "".join(
                command + block.shorten(run_command(command))
                for command, _ in split_commands(block.body)
            )
            parts += [text[end : block.start], shown]
            end = block.start + len(block.body)
    return "".join([*parts, text[end:]])


@contextlib.contextmanager
def _session() -> Iterator[None]:
    """An empty current folder with the examples, and a terminal of the usual width without colours."""
    plain = {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        patch.dict(os.environ, plain),
    ):
        os.environ.pop("ATOLL_CATALOG", None)
        Path("examples").symlink_to(ROOT / "examples")
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, help="by default README.md and all of docs")
    parser.add_argument("--write", action="store_true", help="write the pages instead of checking")
    parser.add_argument("--fast", action="store_true", help="leave out blocks marked slow")
    options = parser.parse_args()
    stale = []
    for page in [path.resolve() for path in options.pages] or list_pages():
        text = page.read_text("utf-8")
        rendered = render_page(text, slow=not options.fast)
        if rendered == text:
            continue
        stale.append(page)
        print(f"{'wrote' if options.write else 'stale:'} {page.relative_to(ROOT)}", flush=True)
        if options.write:
            page.write_text(rendered, "utf-8")
    return int(bool(stale) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
