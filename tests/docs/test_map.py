"""The map tells the truth: packages and pages are what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tools.docs_terminal import ROOT

PACKAGES = sorted(path.parent.name for path in (ROOT / "src/atoll").glob("*/__init__.py"))
README = (ROOT / "README.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text("utf-8")


def test_the_map_has_every_package_and_none_that_is_gone() -> None:
    tree = README[README.index("src/atoll/\n") :]
    assert set(re.findall(r"^  (\w+)/ ", tree[: tree.index("```")], re.MULTILINE)) == set(PACKAGES)
    table = ARCHITECTURE[ARCHITECTURE.index("| Package in `src/atoll`") :].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(PACKAGES)


PAGES_OF_PACKAGES = sorted(
    path for path in (ROOT / "src/atoll").rglob("__init__.py") if "migrations" not in path.parts
)


def test_packages_name_modules_that_are_there() -> None:
    gone = []
    for page in PAGES_OF_PACKAGES:
        lines = (ast.get_docstring(ast.parse(page.read_text("utf-8"))) or "").splitlines()
        there = {path.stem for path in page.parent.glob("*.py")}
        there |= {path.name for path in page.parent.iterdir() if path.is_dir()}
        for line in lines:
            listed = re.match(r"^ {4}([a-z_0-9]+(?:, [a-z_0-9]+)*) {2,}\S", line)
            if listed is not None and not set(listed[1].split(", ")) <= there:
                gone.append((str(page.relative_to(ROOT)), line))
    assert not gone, gone


CODE = ("src", "tests", "benchmarks", "research", "tools", "examples")


def test_pages_about_the_inside_name_files_that_are_there() -> None:
    files = [f"/{path.relative_to(ROOT)}" for name in CODE for path in (ROOT / name).rglob("*.py")]
    gone = [
        (page.name, name)
        for page in sorted((ROOT / "docs/internals").glob("*.md"))
        for name in sorted(set(re.findall(r"`([\w/]+\.py)`", page.read_text("utf-8"))))
        if not any(file.endswith(f"/{name}") for file in files)
    ]
    assert not gone, gone


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
