"""The page on tasks: its example is a task, and draws as the page shows."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from atoll.cli import main as cli
from atoll.cli.tasks import LIBRARY
from atoll.tasks.flow import find_flow
from atoll.tasks.mapping import READ_AHEAD
from atoll.tasks.recording import MAX_ENTRIES
from atoll.tasks.sketch import MAX_WAYS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_the_example_draws_as_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
    shown = re.search(
        r"^\$ atoll tasks show narrator:Narrator\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )
    assert shown is not None
    (tmp_path / "narrator.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "narrator", raising=False)
    assert cli.run(["tasks", "show", "narrator:Narrator"]) == 0
    assert capsys.readouterr().out == shown[1]
    sys.modules.pop("narrator")


def test_the_library_is_listed_whole() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", PAGE, re.MULTILINE))
    assert rows.keys() == LIBRARY.keys()
    for name, where in LIBRARY.items():
        module, _, attribute = where.partition(":")
        flow = find_flow(getattr(import_module(module), attribute)())
        components = rows[name].split(";")[0].split(", ")
        assert {step.component for step in flow.steps} == set(components)


def test_limits_are_as_said() -> None:
    assert f"(up to {MAX_WAYS})" in PAGE
    assert f"at most {READ_AHEAD} at a time" in PAGE
    assert f"at most {MAX_ENTRIES:,} invocations" in PAGE
