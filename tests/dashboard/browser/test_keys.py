"""Keys and usage in a real browser: made, shown once, used, revoked, refused; and who sees what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browser.conftest import Site, Visit

pytestmark = pytest.mark.slow


def _row(page: Any, name: str) -> Any:
    return page.get_by_role("row").filter(has=page.get_by_text(name, exact=True))


def _log_in(page: Any, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()


def test_a_key_is_made_used_and_revoked(site: Site, visit: Visit) -> None:
    admin = visit(site, key="atoll-root")
    page = admin.page
    admin.go("/keys")
    page.get_by_role("button", name="Make a key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Make it").click()
    assert dialog.get_by_label("Name").evaluate("field => !field.validity.valid")
    dialog.get_by_label("Name").fill("thesis")
    dialog.get_by_label("Owner").fill("mia@lab.example")
    dialog.get_by_label("Tokens a day").fill("lots")
    dialog.get_by_role("button", name="Make it").click()
    dialog.get_by_text("A number like 500, 100k or 1M").wait_for()
    dialog.get_by_label("Tokens a day").fill("100k")
    dialog.get_by_role("button", name="Make it").click()
    page.get_by_text("Copy it now: it is shown this once.").wait_for()
    key = page.get_by_role("dialog").locator("pre").first.inner_text().strip()
    assert key in site.gateway.secrets
    made = next(one for one in site.gateway.keys if one["name"] == "thesis")
    assert made["tokens_per_day"] == 100_000
    # It is left by its button only, and then gone from the page.
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").is_visible()
    page.get_by_role("button", name="I have kept it").click()
    _row(page, "thesis").wait_for()
    assert key not in page.content()

    mia = visit(site, key=key)
    assert key not in mia.page.content()
    mia.go("/chat?model=qwen3-32b")
    mia.page.get_by_label("Message", exact=True).fill("Hello")
    mia.page.keyboard.press("Enter")
    mia.page.get_by_role("button", name="Answer again").wait_for()
    (asked,) = [r for r in site.gateway.seen if r.path == b"/v1/chat/completions"]
    assert asked.headers[b"authorization"] == f"Bearer {key}".encode()

    _row(page, "thesis").get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Keep it").click()
    assert made["state"] == "active"
    _row(page, "thesis").get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    _row(page, "thesis").wait_for(state="detached")
    assert made["state"] == "revoked"

    mia.expected.append("status of 401")
    mia.page.get_by_label("Message", exact=True).fill("And now?")
    mia.page.keyboard.press("Enter")
    mia.page.get_by_text("The key was revoked or has expired.").wait_for()
    _log_in(mia.page, key)
    mia.page.get_by_text("This key is not good.").wait_for()


def test_a_member_sees_own_keys_only(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-notebook")
    page = visitor.page
    visitor.go("/keys")
    _row(page, "notebook").wait_for()
    _row(page, "pipeline").wait_for()
    assert "kurt@lab.example" not in page.locator("main").inner_text()
    assert page.get_by_role("button", name="Make a key").count() == 0
    assert page.get_by_role("button", name="Edit").count() == 0
    _row(page, "pipeline").get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    _row(page, "pipeline").wait_for(state="detached")
    assert site.gateway.keys[1]["state"] == "revoked"


def test_a_viewer_changes_nothing(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-finance")
    page = visitor.page
    visitor.go("/keys")
    _row(page, "grading").wait_for()
    page.get_by_text("you see all keys and change none").wait_for()
    for name in ("Make a key", "Edit", "Revoke"):
        assert page.get_by_role("button", name=name).count() == 0


def test_usage_is_downloaded(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-finance")
    page = visitor.page
    visitor.go("/keys?tab=usage")
    page.get_by_role("table", name="Usage by model").wait_for()
    assert "$" in page.locator(".figures").inner_text()
    page.get_by_label("Stacked").select_option("key")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download CSV").click()
    assert download.value.suggested_filename.endswith(".csv")
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("day,key,requests")
    assert len(lines) > 30


def test_a_gateway_without_keys_says_how_to_have_them(site: Site, visit: Visit) -> None:
    site.gateway.accounts = site.gateway.keys_needed = False
    visitor = visit(site)
    visitor.go("/keys")
    visitor.page.get_by_text("This gateway has no keys").wait_for()
