"""Names that try to be more than names: every page shows them as text, and within the screen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboard.browser.conftest import Site, Visit
from tests.dashboard.browser.test_smoke import PAGES

pytestmark = pytest.mark.slow

_NAMES = {
    "image": "<img src=x onerror=alert(1)>",
    "script": '"><script>alert(1)</script>',
    "address": "javascript:alert(1)",
    "long": "n" * 120,
    "rtl": "\u05e9\u05dc\u05d5\u05dd \u202e\u0639\u0642\u062f\u0629",
}
_GATEWAY = ("qwen3-32b", "gpu1", "ETH", "eu-west-1", "notebook", "ada@lab.example", "chat-1")
_PLANNER = (
    "lab",
    "chat",
    "qwen3-32b",
    "azure-conv",
    "L40S",
    "aws/us-east-2",
    "chat-2",
    "changes nothing",
)
_WORDS = ("backend cloud/gpu5 does not answer: connection refused", "connection refused")
_WIDTH = 360


def _made_of_it(page: Any) -> list[str]:
    """Return elements that no page of ours has."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll(`main img, main script, main iframe, dialog img,
           dialog script, [onerror], [onload], a[href^='javascript:' i]`)].map((e) => e.outerHTML)"""
    )
    return found


def _look_into(page: Any, name: str) -> None:
    """Open what a page keeps folded."""
    if name == "machines":
        for summary in page.locator(".machine summary").all():
            summary.click()
    if name == "models":
        for summary in page.locator("details.how summary").all():
            summary.click()
    if name == "chat":
        page.get_by_label("Message", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Answer again").wait_for()
    if name == "whatif":
        page.locator(".verdict").wait_for()
        for summary in page.locator(".sides summary").all():
            summary.click()
    if name == "traces":
        page.get_by_role("button", name="Simulate").click()
        page.get_by_role("link", name="The whole report").wait_for()


@pytest.mark.parametrize("kind", _NAMES)
def test_names_stay_text(site: Site, visit: Visit, kind: str) -> None:
    evil = _NAMES[kind]
    site.gateway.renames = dict.fromkeys((*_GATEWAY, *_WORDS), evil)
    site.planner.renames = dict.fromkeys(_PLANNER, evil)
    # A fleet's name is in paths, where what turns text around is refused.
    site.planner.renames["lab"] = evil.replace("\u202e", "")
    visitor = visit(site, width=_WIDTH)
    page = visitor.page
    for name in PAGES:
        visitor.go(f"/{name}")
        _look_into(page, name)
        assert _made_of_it(page) == [], name
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= _WIDTH, f"{name} is {wide} px wide"
        assert page.locator(".state.failed").count() == 0, name
        text = page.locator("main").evaluate("e => e.textContent")
        # Of a fleet there is the name alone.
        assert evil in text or site.planner.renames["lab"] in text, name
    visitor.check()


def test_a_key_is_made_with_such_a_name(site: Site, visit: Visit) -> None:
    visitor = visit(site, width=_WIDTH)
    page = visitor.page
    visitor.go("/keys")
    for evil in _NAMES.values():
        page.get_by_role("button", name="Make a key").click()
        page.get_by_role("dialog").get_by_label("Name").fill(evil)
        page.get_by_role("dialog").get_by_label("Owner").fill(evil)
        page.get_by_role("dialog").get_by_label("Models").fill(evil)
        page.get_by_role("button", name="Make it").click()
        page.get_by_role("button", name="I have kept it").click()
        page.get_by_role("dialog").wait_for(state="detached")
    for edit in page.get_by_role("button", name="Edit").all()[-2:]:
        edit.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= _WIDTH
        page.get_by_role("button", name="Cancel").click()
    assert _made_of_it(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= _WIDTH
