"""Every benchmark is found by its short name, stands in the README, and is imported by its whole name."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks.report import ROOT

FOLDER = ROOT / "benchmarks"
README = (FOLDER / "README.md").read_text("utf-8")
ROW = re.compile(r"^\| ([\w/]+) \| ([a-z]\w+) \|", re.MULTILINE)
LISTED = {name: folder for folder, name in ROW.findall(README)}
CHECKS = ROOT / "tests" / "slow"
PARTS = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
MODULES = sorted(
    path
    for path in (*FOLDER.glob("*/*.py"), *CHECKS.glob("*/*.py"))
    if path.name != "__init__.py" and not path.name.startswith("test_")
)


@pytest.mark.parametrize("name", LISTED)
def test_a_name_of_the_readme_can_be_run(name: str) -> None:
    spec = importlib.util.find_spec(f"benchmarks.{name}")
    assert spec is not None
    folder = LISTED[name]
    assert spec.origin == str((ROOT if "/" in folder else FOLDER) / folder / f"{name}.py")
    assert 'if __name__ == "__main__":' in Path(spec.origin).read_text("utf-8")


def test_the_readme_has_all_that_can_be_run() -> None:
    runs = {path.stem for path in MODULES if "__main__" in path.read_text("utf-8")}
    started = set(re.findall(r"`(\w+)`", README.rpartition("\n\n")[2]))
    assert runs <= {*LISTED, *started}


def test_short_names_mean_one_module() -> None:
    names = [path.stem for path in (*MODULES, *FOLDER.glob("*.py")) if path.stem != "__init__"]
    assert sorted(names) == sorted({*names} - PARTS)


def test_make_runs_the_first_two_parts() -> None:
    found = re.search(r"for name in ([\w \\\n\t]+);", (ROOT / "Makefile").read_text("utf-8"))
    assert found is not None
    first = README.partition("\n## By hand\n")[0]
    assert set(found.group(1).replace("\\", " ").split()) == {n for _, n in ROW.findall(first)}


def test_code_imports_by_whole_names() -> None:
    """By its short name a module would be loaded a second time, with its own globals."""
    short = {path.stem for path in MODULES}
    for folder in ("benchmarks", "research", "tests", "tools", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text("utf-8")
            # Parsing takes long, and what is imported is named.
            for node in ast.walk(ast.parse(text if "benchmarks" in text else "")):
                if isinstance(node, ast.ImportFrom) and node.module:
                    first, _, rest = node.module.partition(".")
                    asked = {rest.partition(".")[0]} if rest else {n.name for n in node.names}
                    assert first != "benchmarks" or not asked & short, f"{path}:{node.lineno}"
