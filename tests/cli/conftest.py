"""What tests of several verbs share: commands, templates computed once, and figures that nobody draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from atoll.api.fleet import Fleet
from tests.cli import commands
from tests.cli.commands import Atoll, Captured, Run


@pytest.fixture
def run(capsys: Captured) -> Run:
    return partial(commands.run, capsys)


@pytest.fixture
def atoll(capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Atoll:
    """Runs in an empty folder, with no wishes about colours."""
    for name in ("ATOLL_CATALOG", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return partial(commands.call, capsys)


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache of templates for all that plan the same small fleets; its files are named by their content."""
    return str(tmp_path_factory.mktemp("templates"))


@pytest.fixture
def planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, templates: str) -> Path:
    """An empty current folder to plan in, with that cache."""
    monkeypatch.delenv("ATOLL_CATALOG", raising=False)
    monkeypatch.setenv("ATOLL_CACHE", templates)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def plan_of(templates: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """The plan, as JSON, of a fleet file of that name and text for its capacity; each is made once."""

    @cache
    def make(name: str, text: str) -> str:
        path = tmp_path_factory.mktemp("fleet") / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ATOLL_CACHE", templates)
            return Fleet.load(path).plan(capacity_only=True).to_json()

    return make


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of pictures hold a placeholder: how curves are drawn is tested with `report.charts`."""

    def sketch(_pictures: object, kind: str, _title: str | None) -> bytes:
        return b"\x89PNG" if kind == "png" else b"<svg></svg>"

    monkeypatch.setattr("atoll.report.charts._render_figure", sketch)
