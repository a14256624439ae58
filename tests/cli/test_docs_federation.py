"""What the pages on federation and keys say can be typed, and their tables are what ships."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from atoll.cli import main as cli
from atoll.cli.join import JoinSettings
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings
from atoll.runtime.pool.policy import HEADERS
from tests.cli.commands import run
from tests.cli.test_docs import block, rows, text

ROOT = Path(__file__).resolve().parents[2]
GUIDE = "guides/federation.md"
PAGES = (
    GUIDE,
    "guides/joining.md",
    "guides/operating.md",
    "guides/gateway.md",
    "guides/keys.md",
    "reference/federation.md",
    "reference/gateway.md",
)
VERBS = {"fabric", "hub", "join", "nodes", "assign", "gateway", "keys", "usage"}


def typed(page: str) -> list[str]:
    """The lines of a page's blocks that call `atoll` with a verb of these pages."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    plain = [found.replace("\\\n", " ") for language, found in fenced if not language]
    lines = [line.strip() for found in plain for line in found.splitlines()]
    named = [line.removeprefix("$ ").removeprefix("exec ") for line in lines]
    return [line for line in named if line.startswith("atoll ") and line.split()[1] in VERBS]


def commands() -> list[str]:
    pages = [text(name) for name in PAGES] + [(ROOT / "README.md").read_text(encoding="utf-8")]
    return sorted({line for page in pages for line in typed(page)})


def parsed(line: str) -> Any:
    """Read a command line as the program would, without running it; click raises if it cannot."""
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    (verb,) = (verb for verb in cli.VERBS if verb.name == words[0])
    command, args = cli.load(verb), words[1:]
    while hasattr(command, "commands"):
        name, *args = args
        command = command.commands[name]
    return command.make_context(words[0], list(args))


@pytest.mark.parametrize("line", commands())
def test_every_command_on_the_pages_can_be_typed(line: str) -> None:
    parsed(line)


@pytest.mark.parametrize(
    "wrong", ["atoll nodes --gpus A100", "atoll fabric issue", "atoll hub a b"]
)
def test_a_command_that_cannot_be_typed_is_found(wrong: str) -> None:
    # Click's errors are typer's own copy of it in some versions, so the class is not named.
    with pytest.raises(Exception, match=r"[Nn]o such option|[Mm]issing|unexpected"):
        parsed(wrong)


def test_a_fabric_is_made_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = typed(text(GUIDE)) + typed(text("guides/operating.md"))
    lines = [line for line in told if line.startswith("atoll fabric")]
    wanted = ("init", "issue", "list", "revoke")
    said = {
        line: run(capsys, *shlex.split(line)[1:]) for line in lines if line.split()[2] in wanted
    }
    page = text(GUIDE)
    (listed,) = (out for line, out in said.items() if line == "atoll fabric list")
    for name in re.findall(r"^  (\S+) .*days left", listed, re.MULTILINE):
        assert re.search(rf"^  {name} .*days left", page, re.MULTILINE), name
    files = {
        name.strip("`") for cell in rows(page, "File in `fabric/`") for name in cell.split(", ")
    }
    assert files - {"..."} <= {path.name for path in (tmp_path / "fabric").iterdir()}
    assert "revoked" in run(capsys, "fabric", "list")


def test_the_file_of_options_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(block(text("guides/joining.md"), "yaml"), encoding="utf-8")
    options = JoinSettings.read({"config": tmp_path / "node.yaml"})
    assert options.accept == "allow:ETHZ,EPFL"
    assert options.command


def test_times_are_those_of_the_settings() -> None:
    shown = rows(text("reference/federation.md"), "Setting")
    assert len(shown) > 5
    for name, (seconds, _) in shown.items():
        holders = [s for s in (FabricSettings(), TunnelSettings()) if hasattr(s, name.strip("`"))]
        assert [getattr(s, name.strip("`")) for s in holders] == [float(seconds)], name


def test_the_headers_of_policies_are_all_there() -> None:
    shown = {
        re.findall(r"`([\w-]+):", cell)[0] for cell in rows(text("reference/gateway.md"), "Header")
    }
    assert shown == {header.decode() for header in HEADERS}
