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
    ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
]
BEFORE = "\n## 0.1.0 "
"""Of the changelog only the newest version names what there is; older ones name what was."""


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


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_modules_are_there(page: Path) -> None:
    for dotted in set(re.findall(r"`(atoll(?:\.(?!sbatch)\w+)+)`", read(page))):
        assert resolves(dotted), dotted
    for dotted in re.findall(r"^::: (\S+)$", read(page), re.MULTILINE):
        assert resolves(dotted), dotted


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_are_there(page: Path) -> None:
    """Paths are those of the checkout, or of the package."""
    for name in set(
        re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md|yaml|yml|csv|svg|sbatch|json))`", read(page))
    ):
        if name.startswith(("fabric/", "my-model/")) or "NAME" in name:
            continue  # what a reader makes
        places = (ROOT / name, ROOT / "src/atoll" / name)
        assert any(place.exists() for place in places), name


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_examples_import_what_there_is(page: Path) -> None:
    for example in blocks(read(page), "python"):
        if "await" in example or "async " in example:
            continue  # a piece of a coroutine
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("atoll"):
                for alias in node.names:
                    assert resolves(f"{node.module}.{alias.name}"), alias.name


@pytest.mark.parametrize("page", [page for page in PAGES if DOCS not in page.parents], ids=named)
def test_links_of_root_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        there = ROOT / file if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text("utf-8")), target


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
