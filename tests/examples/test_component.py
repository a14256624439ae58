"""The component in the documentation is the one in the examples, and it runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from atoll.components.base import BatchComponent, Setup
from atoll.components.component_registry import COMPONENTS, find_component
from atoll.core.errors import UnknownNameError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "components"
PAGE = (ROOT / "docs" / "components.md").read_text()


def test_the_example_is_found_by_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    component = find_component("average_colour:AverageColour").load(Setup())
    assert component.name == "average-colour"
    assert isinstance(component, BatchComponent)
    assert component.run([component.example()]) == [{"colour": [128, 128, 128]}]
    with pytest.raises(UnknownNameError):
        find_component("average_colour:Setup")


def test_the_test_of_the_example_passes() -> None:
    tests = runpy.run_path(str(FOLDER / "test_average_colour.py"))
    tests["test_the_average_colour"]()


@pytest.mark.parametrize("name", ["average_colour.py", "test_average_colour.py"])
def test_the_page_shows_the_files_as_they_are(name: str) -> None:
    assert (FOLDER / name).read_text() in PAGE


def test_the_page_lists_every_component() -> None:
    listed = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")}
    assert set(COMPONENTS) <= listed
