"""Every page opens in a real browser, without an error in its console and without asking a stranger."""

from __future__ import annotations

import re

from atoll.dashboard.static import FOLDER
from tests.dashboard.browser.conftest import Site, Visit

PAGES = tuple(
    re.findall(r'^  \["(\w+)", ".+"\],$', (FOLDER / "js" / "app.js").read_text(), re.MULTILINE)
)
"""Ids of all pages, in the order of the menu."""


def test_every_page_opens(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    for name in PAGES:
        visitor.go(f"/{name}")
        assert visitor.page.locator("main h1").count() == 1
        assert visitor.page.locator("main .state.failed").count() == 0, name
        assert visitor.page.locator("main").inner_text().strip()
        assert "undefined" not in visitor.page.locator("main").inner_text(), name
        assert "NaN" not in visitor.page.locator("main").inner_text(), name
