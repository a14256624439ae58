"""The way of a request, and logs, in a real browser."""

from __future__ import annotations

from tests.dashboard.browser.conftest import Site, Visit


def test_a_request_is_shown_as_a_waterfall_from_its_id(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.go("/requests")
    page = visitor.page
    page.get_by_label("Request", exact=True).fill("req-3")
    page.get_by_role("button", name="Show").click()
    way = page.get_by_role("region", name="The way of the request")
    way.wait_for()
    assert [row.split()[0] for row in way.locator("tbody th").all_inner_texts()] == [
        *("Gateway", "Waiting", "Prefill", "Decode", "First", "Tokens", "Executor")
    ]
    # Bars begin where their steps do.
    begins = way.locator(".span-bar").evaluate_all(
        "bars => bars.map((bar) => Math.round(bar.getBoundingClientRect().left))"
    )
    assert begins[0] == begins[1] < begins[2] < begins[3] < begins[5] < begins[6]
    assert "id=req-3" in page.url


def test_a_request_that_is_not_kept_says_so(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.expected.append("404")
    visitor.go("/requests?id=nobody")
    visitor.page.get_by_text("It is not kept").wait_for()


def test_a_request_of_the_list_is_opened(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.go("/requests")
    visitor.page.get_by_role("link", name="req-1").click()
    visitor.page.get_by_role("region", name="Request req-1").wait_for()


def test_a_log_is_followed_and_searched(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.go("/logs")
    page = visitor.page
    log = page.get_by_role("log", name="Log")
    log.get_by_text("chat-1 is ready").wait_for()
    assert log.locator(".warn").inner_text().strip() == "WARNING: the cache is cold"
    page.get_by_label("Find").fill("ready")
    assert log.inner_text().strip() == "chat-1 is ready"
    page.get_by_label("Of", exact=True).select_option("gateway")
    log.get_by_text("gateway is ready").wait_for()
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("paused").wait_for()


def test_logs_are_for_operators(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-notebook")
    visitor.go("/logs")
    visitor.page.get_by_text("Logs are for operators").wait_for()
