"""Logging in and out in a real browser, and what ends a session."""

from __future__ import annotations

import pytest

from tests.dashboard.browser.conftest import Site, Visit

pytestmark = pytest.mark.slow


def test_logging_out(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-notebook")
    page = visitor.page
    other = page.context.new_page()
    other.goto(f"{site.url}/models")
    other.wait_for_selector("#nav", state="attached")
    page.get_by_role("button", name="Log out").click()
    page.get_by_text("You are logged out.").wait_for()
    # Other pages of the same browser hear of it.
    other.get_by_text("You are logged out.").wait_for()
    page.reload()
    page.get_by_label("API key").wait_for()
    assert page.locator(".notice").count() == 0


def test_the_first_visit_is_quiet(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page.context.browser.new_context().new_page()  # type: ignore[union-attr]
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text))
    page.goto(f"{site.url}/machines")
    page.get_by_label("API key").wait_for()
    assert page.locator(".notice").count() == 0
    assert "nobody" not in page.locator("main").inner_text()
    assert faults == []
    page.context.close()


def test_a_wrong_key_is_refused_with_a_sentence(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.expected.append("status of 401")
    page = visitor.page
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("API key").fill("atoll-wrong")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("This key is not good.").wait_for()
    page.get_by_label("API key").fill("atoll-root")
    page.keyboard.press("Enter")
    page.wait_for_selector("#nav", state="attached")


def test_a_key_that_is_revoked_elsewhere_ends_the_session(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-notebook")
    visitor.expected.append("status of 401")
    page = visitor.page
    visitor.go("/models")
    site.gateway.keys[0]["state"] = "revoked"
    page.evaluate("import('/static/js/app.js').then((app) => app.go('/keys'))")
    page.get_by_text("The key was revoked or has expired.").wait_for()
    page.get_by_label("API key").wait_for()
    assert page.locator("#nav").count() == 0


def test_a_link_is_used_once(site: Site, visit: Visit) -> None:
    link = site.link()
    first = visit(site)
    first.page.goto("about:blank")
    first.page.goto(link)
    first.page.wait_for_selector("#nav", state="attached")
    assert "token" not in first.page.url
    second = visit(site)
    second.expected.append("status of 401")
    second.page.get_by_role("button", name="Log out").click()
    second.page.get_by_label("API key").wait_for()
    second.page.goto("about:blank")
    second.page.goto(link)
    second.page.get_by_text("That link was used already or is too old.").wait_for()
    assert "token" not in second.page.url


def test_colours_stay_after_a_reload(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page
    light = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.get_by_role("button", name="Dark colours").click()
    dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert dark != light
    page.reload()
    page.get_by_role("button", name="Light colours").wait_for()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == dark
    page.get_by_role("button", name="Light colours").click()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == light


def test_a_planner_that_starts_is_waited_for(site: Site, visit: Visit) -> None:
    site.hold_planner(True)
    page = visit(site).page
    page.evaluate("import('/static/js/app.js').then((app) => app.go('/plan'))")
    page.get_by_text("The planner is starting…").wait_for()
    site.hold_planner(False)
    page.get_by_label("Fleet").wait_for()
    assert page.locator(".state.failed").count() == 0
