"""The map tells the truth: packages and pages are what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.docs_terminal import ROOT

PACKAGES = sorted(path.parent.name for path in (ROOT / "src/atoll").glob("*/__init__.py"))
README = (ROOT / "README.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text("utf-8")
MAX_README_WORDS = 1200
MAX_README_LINES = 130


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_on_the_map_with_a_sentence(package: str) -> None:
    assert re.search(rf"^  {package}/ +\w.{{15,}}$", README, re.MULTILINE), "README's tree"
    assert re.search(rf"^\| `{package}` \| .{{20,}} \|$", ARCHITECTURE, re.MULTILINE)


def test_the_map_has_no_package_that_is_gone() -> None:
    tree = README[README.index("src/atoll/\n") :]
    assert set(re.findall(r"^  (\w+)/ ", tree[: tree.index("```")], re.MULTILINE)) == set(PACKAGES)
    table = ARCHITECTURE[ARCHITECTURE.index("| Package in `src/atoll`") :].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(PACKAGES)


PAGES_OF_PACKAGES = sorted(
    path for path in (ROOT / "src/atoll").rglob("__init__.py") if "migrations" not in path.parts
)


@pytest.mark.parametrize("page", PAGES_OF_PACKAGES, ids=named)
def test_a_package_says_what_it_is_and_names_modules_that_are_there(page: Path) -> None:
    lines = (ast.get_docstring(ast.parse(page.read_text("utf-8"))) or "").splitlines()
    assert len(lines) >= 4
    there = {path.stem for path in page.parent.glob("*.py")}
    there |= {path.name for path in page.parent.iterdir() if path.is_dir()}
    for line in lines:
        listed = re.match(r"^ {4}([a-z_0-9]+(?:, [a-z_0-9]+)*) {2,}\S", line)
        assert listed is None or set(listed[1].split(", ")) <= there, line


INTERNALS = sorted((ROOT / "docs/internals").glob("*.md"))
CODE = ("src", "tests", "benchmarks", "research", "tools", "examples")
FILES = [str(path.relative_to(ROOT)) for name in CODE for path in (ROOT / name).rglob("*.py")]


@pytest.mark.parametrize("page", INTERNALS, ids=named)
def test_a_page_about_the_inside_names_files_that_are_there(page: Path) -> None:
    for name in set(re.findall(r"`([\w/]+\.py)`", page.read_text("utf-8"))):
        assert any(file.endswith(f"/{name}") or file == name for file in FILES), name


FOLDERS = {"control": ("decision", "operation"), "virtual": ("virtual",)}


@pytest.mark.parametrize("page", FOLDERS)
def test_a_table_of_files_names_those_of_its_folder(page: str) -> None:
    text = (ROOT / f"docs/internals/{page}.md").read_text("utf-8")
    tables = re.findall(r"^\| (?:File|In `\w+/`) \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    for folder, table in zip(FOLDERS[page], tables, strict=True):
        there = {path.name for path in (ROOT / "src/atoll/control" / folder).glob("*.py")}
        assert set(re.findall(r"`(\w+\.py)`", table)) <= there


def test_the_readme_can_be_read_at_one_go() -> None:
    assert len(README.split()) <= MAX_README_WORDS
    assert len(README.splitlines()) <= MAX_README_LINES


def test_the_glossary_is_short() -> None:
    glossary = ARCHITECTURE[ARCHITECTURE.index("## Glossary") :].partition("\n## ")[0]
    words = re.findall(r"^\| \*\*(.+?)\*\*", glossary, re.MULTILINE)
    assert 20 <= len(words) <= 40
    assert len(set(words)) == len(words)


def test_every_page_can_be_reached_from_the_home_page() -> None:
    docs = ROOT / "docs"
    reached, left = set[Path](), [docs / "index.md"]
    while left:
        page = left.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = re.findall(r"\]\((?!http)([^)#\s]+\.md)[^)]*\)", page.read_text("utf-8"))
        left += [(page.parent / target).resolve() for target in targets]
    assert set(docs.rglob("*.md")) <= reached
