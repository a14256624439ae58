"""The overview in a real browser: alarms, promises in words, and what to do where nothing is served."""

from __future__ import annotations

import pytest

from atoll.dashboard.static import FOLDER
from tests.dashboard.browser.conftest import Site, Visit
from tests.dashboard.browser.test_smoke import PAGES

pytestmark = pytest.mark.slow


def test_alarms_say_what_to_do(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-finance")
    page = visitor.page
    visitor.go("/overview")
    alarms = page.get_by_role("region", name="Alarms")
    alarms.wait_for()
    told = alarms.inner_text()
    assert "2 alarms" in told
    assert "backend cloud/gpu5 does not answer" in told
    assert told.index("problem") < told.index("warning")
    assert alarms.locator("code").inner_text() == "DELETE /atoll/v1/backends/cloud/gpu5"
    assert alarms.get_by_role("button", name="Copy").count() == 1


def test_promises_are_told_in_words(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page
    visitor.go("/overview")
    rows = page.get_by_role("table", name="Models with their promises").get_by_role("row")
    assert "kept" in rows.nth(1).inner_text()
    assert "broken" in rows.nth(2).inner_text()  # 98.2 % of 99 %.
    assert "first token in 500 ms" in rows.nth(2).inner_text()
    figures = page.locator(".figures").inner_text()
    assert "below: llama-3.1-8b" in figures
    assert "/h" in figures
    assert "5 of 6 machines up" in page.locator(".headline").inner_text()


def test_what_is_rare_is_told_by_the_minute(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    often = visitor.page.evaluate(
        "import('/static/js/lib/format.js').then(({ often }) =>"
        " [0, 3.2, 0.1, 1 / 60, 0.05, 2 / 3600, 1e-5, null].map(often))"
    )
    assert often == [
        "0/s",
        "3.2/s",
        "0.1/s",
        "1 a minute",
        "3 a minute",
        "2 an hour",
        "less than 1 an hour",
        "\N{EN DASH}",
    ]


@pytest.mark.parametrize("width", [1280, 360])
def test_every_page_of_a_fresh_install_says_what_to_do(
    bare_site: Site, visit: Visit, width: int
) -> None:
    visitor = visit(bare_site, width=width)
    page = visitor.page
    failed: list[str] = []
    page.on("response", lambda r: failed.append(r.url) if r.status >= 400 else None)
    for name in PAGES:
        visitor.go(f"/{name}")
        script = (FOLDER / "js" / "pages" / f"{name}.js").read_text()
        if "fleetChoice(" in script:
            page.get_by_label("Fleet", exact=True).wait_for()
        elif "withPlanner(" in script:
            page.locator("main .card").first.wait_for()
        else:
            words = "Nothing is served yet" if name == "overview" else "No gateway runs here"
            page.get_by_text(words).wait_for()
            page.get_by_text("atoll serve examples/demo-local.yaml").wait_for()
        assert page.locator(".state.failed").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert failed == []


def test_a_gateway_that_comes_is_found_by_every_page(bare_site: Site, visit: Visit) -> None:
    visitors = {name: visit(bare_site) for name in ("overview", "models", "chat", "keys")}
    for name, visitor in visitors.items():
        visitor.go(f"/{name}")
        visitor.page.get_by_text("atoll serve examples/demo-local.yaml").wait_for()
    bare_site.find_gateway()
    visitors["overview"].page.get_by_role("region", name="Alarms").wait_for()
    visitors["models"].page.get_by_text("Base URL").wait_for()
    visitors["chat"].page.get_by_label("Message", exact=True).wait_for()
    visitors["keys"].page.get_by_role("button", name="Make a key").wait_for()


def test_a_gateway_that_does_not_answer_is_told_without_asking_it(site: Site, visit: Visit) -> None:
    site.stop_gateway()
    visitor = visit(site)
    for name in ("overview", "models", "chat", "machines", "keys"):
        visitor.go(f"/{name}")
        visitor.page.get_by_role("region", name="The gateway does not answer").wait_for()
        visitor.page.get_by_text("atoll status").wait_for()
