"""Which tests can see a change: those that import what changed, the nearest first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.changed import read_imports, select_tests
from tools.structure import Names

NAMES: dict[str, Names] = {
    "src/atoll/catalog/__init__.py": [],
    "src/atoll/catalog/gpus.py": [],
    "src/atoll/core/units.py": [],
    "src/atoll/plan/cost.py": [("atoll.core", "units"), ("atoll.catalog.gpus", "Gpu")],
    "src/atoll/cli/plan.py": [("atoll.plan.cost", "total")],
    "tests/cli/test_plan.py": [],
    "tests/conftest.py": [],
    "tests/core/test_units.py": [("atoll.core.units", "parse")],
    "tests/plan/builders.py": [("atoll.plan", "cost")],
    "tests/plan/conftest.py": [],
    "tests/plan/test_cost.py": [("tests.plan.builders", "make")],
    "tests/plan/test_near.py": [("atoll.plan.cost", "total")],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for file in NAMES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "tests/core/test_units.py").write_text('PAGE = "docs/units.md"')
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("src/atoll/core/units.py", ["core/test_units", "plan/test_near", "plan/test_cost"]),
        ("src/atoll/plan/cost.py", ["plan/test_near", "plan/test_cost"]),
        # A table of verbs leads to commands.
        ("src/atoll/cli/plan.py", ["cli/test_plan"]),
        # Facts beside the code that reads them.
        ("src/atoll/catalog/data/gpus.yaml", ["plan/test_near", "plan/test_cost"]),
        ("docs/units.md", ["core/test_units"]),
        ("tests/plan/conftest.py", ["plan/test_cost", "plan/test_near"]),
        ("tests/plan/builders.py", ["plan/test_cost"]),
        ("src/atoll/gone.py", []),
        (
            "pyproject.toml",
            ["cli/test_plan", "core/test_units", "plan/test_cost", "plan/test_near"],
        ),
    ],
)
def test_tests_that_import_what_changed(root: Path, changed: str, expected: list[str]) -> None:
    assert select_tests({changed}, NAMES, root) == [f"tests/{each}.py" for each in expected]


def test_files_are_parsed_again_when_they_change(tmp_path: Path) -> None:
    file, cache = tmp_path / "tests/test_a.py", tmp_path / "kept.json"
    file.parent.mkdir()
    for text, names in (
        ("import a", [("a", "")]),
        ("from b.c import d, e", [("b.c", "d"), ("b.c", "e")]),
    ):
        file.write_text(text)
        assert read_imports(tmp_path, cache) == {"tests/test_a.py": names}
        assert read_imports(tmp_path, cache) == {"tests/test_a.py": names}
