"""What pages are made of keeps to the rules that the content security policy relies on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atoll.dashboard.static import FOLDER
from tests.dashboard.browser.test_smoke import PAGES

SCRIPTS = sorted(FOLDER.rglob("*.js"))
STYLES = sorted(FOLDER.rglob("*.css"))
_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setTimeout\(\s*[\"'`]"
    r"|DOMParser|createContextualFragment|setAttribute\(\s*[\"']style"
)
_IMPORT = re.compile(r"(?:from|import)\s*\(?\s*[\"'](\.{1,2}/[^\"'$`]+)[\"']")
_FOREIGN = re.compile(
    r"(?:fetch\(|import\s*\(?|from|url\(|src[:=]|new (?:EventSource|WebSocket|Worker)\()\s*[\"'`]?"
    r"(?:\w+:)?//"
)


def test_there_are_pages() -> None:
    assert len(SCRIPTS) > 15
    assert (FOLDER / "index.html").is_file()


def test_every_page_of_the_menu_has_a_script_and_a_style() -> None:
    for kind in ("js", "css"):
        assert {path.stem for path in (FOLDER / kind / "pages").glob(f"*.{kind}")} == set(PAGES)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_text_is_never_made_markup(path: Path) -> None:
    assert _MARKUP.findall(path.read_text()) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_what_is_imported_is_there(path: Path) -> None:
    for named in _IMPORT.findall(path.read_text()):
        assert (path.parent / named).resolve().is_file(), named


@pytest.mark.parametrize(
    "path", [*SCRIPTS, *STYLES], ids=lambda path: str(path.relative_to(FOLDER))
)
def test_nothing_is_fetched_from_elsewhere(path: Path) -> None:
    found = [line.strip()[:120] for line in path.read_text().splitlines() if _FOREIGN.search(line)]
    assert found == []


def test_the_first_page_has_no_script_or_style_of_its_own() -> None:
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert "<style" not in page
    assert re.findall(r"\son\w+=|\sstyle=", page) == []


def test_all_of_it_is_small() -> None:
    """What a first visit loads at most, not compressed: nobody adds megabytes unnoticed."""
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 600_000
