"""What the pages name is there: files, modules, names in examples, and every page in the site's menu."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.cli.test_docs import DOCS, anchors, blocks

ROOT = DOCS.parent
PAGES = sorted(DOCS.rglob("*.md")) + [
    ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
]
BEFORE = "\n## 0.1.0 "
"""Of the changelog only the newest version names what there is; older ones name what was."""


MEASURED_ONCE = DOCS / "measurements.md"
"""Names scripts as they stood in the commit that it names."""


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition(BEFORE)[0]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def resolves(dotted: str) -> bool:
    """Return whether a dotted name is a module, or something in one."""
    module, _, name = dotted.rpartition(".")
    try:
        if find_spec(dotted) is not None:
            return True
    except ModuleNotFoundError:
        pass
    try:
        if find_spec(module) is None:
            return False
    except ModuleNotFoundError:
        return False
    return hasattr(import_module(module), name)


@pytest.mark.parametrize(
    "dotted", ["atoll.plan.solvers", "atoll.solve.registry.solved", "atoll.x.y"]
)
def test_a_name_that_is_not_there_is_found(dotted: str) -> None:
    assert not resolves(dotted)


def test_modules_are_there() -> None:
    gone = [
        (named(page), dotted)
        for page in PAGES
        for dotted in sorted(
            {
                *re.findall(r"`(atoll(?:\.(?!sbatch)\w+)+)`", read(page)),
                *re.findall(r"^::: (\S+)$", read(page), re.MULTILINE),
            }
        )
        if not resolves(dotted)
    ]
    assert not gone, gone


def test_files_are_there() -> None:
    """Paths are those of the checkout, or of the package."""
    pattern = r"`([\w.-]+/[\w./-]+\.(?:py|md|yaml|yml|csv|svg|sbatch|json))`"
    gone = [
        (named(page), name)
        for page in PAGES
        for name in sorted(set(re.findall(pattern, read(page))))
        # Others are what a reader makes.
        if not name.startswith(("fabric/", "my-model/")) and "NAME" not in name
        if page != MEASURED_ONCE or not name.endswith(".py")
        if not any(place.exists() for place in (ROOT / name, ROOT / "src/atoll" / name))
    ]
    assert not gone, gone


def imported(example: str) -> list[str]:
    """The names that a piece of Python imports from Atoll."""
    if "await" in example or "async " in example:
        return []  # a piece of a coroutine
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("atoll")
        for alias in node.names
    ]


def test_examples_import_what_there_is() -> None:
    gone = [
        (named(page), name)
        for page in PAGES
        for example in blocks(read(page), "python")
        for name in imported(example)
        if not resolves(name)
    ]
    assert not gone, gone


def leads_somewhere(page: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    there = page.parent / file if file else page
    return there.exists() and (not anchor or anchor in anchors(there.read_text("utf-8")))


def test_links_lead_somewhere() -> None:
    lost = [
        (named(page), target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", read(page))
        if not target.startswith("http") and not leads_somewhere(page, target)
    ]
    assert not lost, lost


def test_every_page_is_in_the_menu() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    listed: set[str] = set()
    entries = list(site["nav"])
    while entries:
        for below in entries.pop().values():
            if isinstance(below, str):
                listed.add(below)
            else:
                entries += below
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_nothing_is_loaded_from_elsewhere() -> None:
    """Fonts and scripts of others would tell them who reads; drawings are files of our own."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert site["theme"]["font"] is False
    for page in DOCS.rglob("*.md"):
        text = page.read_text("utf-8")
        assert not re.search(r"!\[[^]]*\]\(https?:|<script|```mermaid", text), page.name
