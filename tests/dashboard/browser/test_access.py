"""Without eyes, a mouse or a wide screen: what axe finds, what a keyboard reaches, what fits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboard.browser.conftest import Site, Visit
from tests.dashboard.browser.test_smoke import PAGES

pytestmark = pytest.mark.slow


def _serious(page: Any) -> list[str]:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed"
    )
    found = axe.Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['target']} {node.get('failureSummary', '')[:160]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_nothing_serious(site: Site, visit: Visit, width: int, dark: bool) -> None:
    visitor = visit(site, width=width, dark=dark)
    visitor.expected.append("Applying inline style")  # Axe tries out what it finds.
    for name in PAGES:
        visitor.go(f"/{name}")
        assert _serious(visitor.page) == [], name


def test_axe_finds_nothing_serious_before_logging_in(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.expected.append("Applying inline style")
    visitor.page.get_by_role("button", name="Log out").click()
    visitor.page.get_by_label("API key").wait_for()
    assert _serious(visitor.page) == []


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_is_wider_than_the_screen(site: Site, visit: Visit, width: int) -> None:
    visitor = visit(site, width=width)
    for name in PAGES:
        visitor.go(f"/{name}")
        wide = visitor.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name} is {wide} px wide"


def test_a_keyboard_reaches_pages_and_what_is_on_them(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page
    page.get_by_role("region", name="Alarms").wait_for()
    # Back to the top, as when the address was typed: a page has the focus once it is shown.
    page.evaluate(
        """() => {
          const top = document.createElement("div");
          top.tabIndex = -1;
          document.body.prepend(top);
          top.focus();
        }"""
    )
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the page"
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.textContent.trim()"))
        if seen[-1] == "Models":
            break
    assert "Models" in seen
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.title.startsWith('Models')")
    page.get_by_label("Filter (press / to come here)").wait_for()
    # What has the focus is seen.
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


def test_the_menu_of_a_narrow_screen_opens_and_closes(site: Site, visit: Visit) -> None:
    page = visit(site, width=360).page
    menu = page.get_by_role("button", name="Pages")
    assert not page.get_by_role("link", name="Machines").is_visible()
    menu.click()
    assert menu.get_attribute("aria-expanded") == "true"
    page.get_by_role("link", name="Machines").click()
    page.wait_for_function("() => document.title.startsWith('Machines')")
    assert menu.get_attribute("aria-expanded") == "false"
