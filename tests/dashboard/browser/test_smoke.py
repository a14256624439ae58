"""Every page opens in a real browser, without an error in its console and without asking a stranger."""

from __future__ import annotations

from tests.dashboard.browser.conftest import Site, Visit

PAGES = ("overview", "models", "chat", "machines", "plan", "whatif", "keys", "traces")


def test_every_page_opens(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    for name in PAGES:
        visitor.go(f"/{name}")
        assert visitor.page.locator("main h1").count() == 1
        assert visitor.page.locator("main .state.failed").count() == 0, name
        assert visitor.page.locator("main").inner_text().strip()
        assert "undefined" not in visitor.page.locator("main").inner_text(), name
        assert "NaN" not in visitor.page.locator("main").inner_text(), name
