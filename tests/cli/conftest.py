"""What tests of several verbs share: templates computed once, and figures that nobody draws."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache of templates for all that plan the same small fleets; its files are named by their content."""
    return str(tmp_path_factory.mktemp("templates"))


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of pictures hold a placeholder: how curves are drawn is tested with `report.charts`."""

    def sketch(_pictures: object, kind: str, _title: str | None) -> bytes:
        return b"\x89PNG" if kind == "png" else b"<svg></svg>"

    monkeypatch.setattr("atoll.report.charts._render_figure", sketch)
