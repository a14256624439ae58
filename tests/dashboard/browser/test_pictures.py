"""Pictures of every page: light, dark and narrow. `make screenshots` keeps them in docs/img."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.dashboard.browser.conftest import Site, Visit, Visitor
from tests.dashboard.browser.test_smoke import PAGES

pytestmark = pytest.mark.slow
FOLDER = "ATOLL_SCREENSHOTS"
_DARK = ("overview", "machines")
_NARROW = ("overview", "chat")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    named = os.environ.get(FOLDER)
    return Path(named) if named else tmp_path


def _settle(visitor: Visitor, name: str) -> None:
    """Bring a page into the state that says most about it."""
    page = visitor.page
    visitor.go(f"/{name}")
    if name == "chat":
        page.get_by_role("textbox", name="Message").fill("Tell me of a lighthouse.")
        page.get_by_role("button", name="Send", exact=True).click()
        page.get_by_text("to first token").wait_for()
        page.get_by_role("button", name="Send", exact=True).wait_for(timeout=60_000)
    if name == "whatif":
        page.locator(".verdict").wait_for()
        dial = page.get_by_role("slider", name="Demand of chat")
        old = page.locator(".verdict").inner_text()
        dial.focus()
        for _ in range(15):
            page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "old => document.querySelector('.verdict').innerText !== old", arg=old
        )
    if name == "traces":
        page.get_by_role("button", name="Simulate").click()
        page.get_by_role("link", name="The whole report").wait_for()
    page.wait_for_timeout(1200)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")


def _take(visitor: Visitor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    visitor.page.screenshot(path=path)
    assert path.stat().st_size > 10_000


def test_light(site: Site, visit: Visit, folder: Path) -> None:
    visitor = visit(site, height=860)
    for name in PAGES:
        _settle(visitor, name)
        _take(visitor, folder / f"dashboard-{name}.png")


def test_dark(site: Site, visit: Visit, folder: Path) -> None:
    visitor = visit(site, height=860, dark=True)
    for name in _DARK:
        _settle(visitor, name)
        _take(visitor, folder / f"dashboard-{name}-dark.png")


def test_narrow(site: Site, visit: Visit, folder: Path) -> None:
    visitor = visit(site, width=360, height=780)
    for name in _NARROW:
        _settle(visitor, name)
        _take(visitor, folder / f"dashboard-{name}-narrow.png")
