"""Models in a real browser: the filter stays in the address, snippets can be run as they are."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from tests.dashboard import fake_data
from tests.dashboard.browser.conftest import Site, Visit

pytestmark = pytest.mark.slow


def test_the_filter_is_in_the_address(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page
    visitor.go("/models")
    page.keyboard.press("/")
    page.keyboard.type("basel 1xl4")
    page.get_by_text("1 of 4 models").wait_for()
    page.get_by_label("Provider").select_option("University of Basel")
    assert "q=basel+1xl4" in page.url
    assert "provider=University+of+Basel" in page.url
    page.reload()
    page.get_by_text("1 of 4 models").wait_for()
    assert page.get_by_label("Filter (press / to come here)").input_value() == "basel 1xl4"
    assert page.locator("section.model h2").all_inner_texts()[0].startswith("llama-3.1-8b")
    page.get_by_role("button", name="Clear").click()
    page.get_by_text("4 models", exact=True).wait_for()
    assert page.url.endswith("/models")


def test_a_snippet_has_the_address_and_no_secret(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-notebook")
    page = visitor.page
    visitor.go("/models?q=qwen3-32b")
    model = page.get_by_role("region", name="qwen3-32b", exact=True)
    model.get_by_text("Use it from your code").click()
    curl = model.locator("pre").inner_text()
    words = shlex.split(curl.replace("\\\n", " "))
    assert words[1] == f"{site.gateway.url}/v1/chat/completions"
    assert "Authorization: Bearer $ATOLL_API_KEY" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == "qwen3-32b"
    model.get_by_role("tab", name="Python").click()
    code = model.locator("pre").inner_text()
    compile(code, "snippet", "exec")
    assert f'base_url="{site.gateway.url}/v1"' in code
    for text in (curl, code, page.content()):
        assert "atoll-notebook" not in text
        assert site.gateway.token not in text


def test_an_offer_leads_to_its_machine(site: Site, visit: Visit) -> None:
    visitor = visit(site, width=360)
    page = visitor.page
    visitor.go("/models?q=gpu4")
    page.get_by_role("link", name="gpu4").click()
    page.wait_for_function("() => document.querySelector('.machine[open]')")
    opened = page.locator(".machine[open]")
    assert "University of Basel" in opened.inner_text()
    assert opened.count() == 1
    box = opened.locator("summary").bounding_box()
    assert box is not None
    assert 0 <= box["y"] <= 900
    assert re.search(r"/machines\?id=basel%2Fgpu4$", page.url)


def test_a_stand_in_is_told_where_one_asks(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page

    def answer(route: Any) -> None:
        told = site_models(site)
        told["models"][0]["stand_in"] = "SmolLM2-135M"
        route.fulfill(json=told)

    page.route("**/atoll/v1/models", answer)
    visitor.go("/models")
    page.get_by_text("Other weights stand in for this model").wait_for()
    visitor.go("/chat?model=qwen3-32b")
    page.get_by_text("other weights answer for this model").wait_for()
    assert "SmolLM2-135M" in page.locator(".chat-about").inner_text()


def site_models(site: Site) -> dict[str, list[dict[str, object]]]:
    return {"models": fake_data.make_models(site.gateway.machines)}
