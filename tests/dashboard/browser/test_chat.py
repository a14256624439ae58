"""A conversation in a real browser: it streams, stops, tells who answered, and stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.dashboard.browser.conftest import Site, Visit

pytestmark = pytest.mark.slow

_EVIL = "<img src=x onerror=alert(1)>"
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def _ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def _bodies(site: Site) -> list[Any]:
    """Return what models were asked, the newest last."""
    return [json.loads(r.body) for r in site.gateway.seen if r.path == b"/v1/chat/completions"]


def _play(page: Any, *pieces: str, status: int = 200, **headers: str) -> None:
    """Have the next answers be these events."""
    kind = "text/event-stream" if status == 200 else "application/json"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=status, body="".join(pieces), headers={"content-type": kind, **headers}
        ),
    )


def _piece(**delta: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': None}]})}\n\n"


def _error(code: str, message: str) -> str:
    return json.dumps(
        {"error": {"message": message, "type": "server_error", "code": code, "param": None}}
    )


def test_an_answer_streams_and_tells_who_gave_it(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-notebook")
    page = visitor.page
    visitor.go("/chat?model=qwen3-32b")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Most tokens of an answer").fill("99")
    _ask(page, "A story, please.")
    page.get_by_role("button", name="Answer again").wait_for()
    (body,) = _bodies(site)
    assert body["model"] == "qwen3-32b"
    assert body["temperature"] == 0.5
    assert body["max_tokens"] == 99
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    told = page.locator(".tellings").inner_text()
    assert "went on at gpu2 after gpu1 failed" in told
    assert "to first token" in told
    assert "tokens/s" in told
    assert "23 tokens of prompt" in told
    # The next turn brings the first along.
    _ask(page, "And then?")
    page.locator(".turn").nth(1).get_by_role("button", name="Answer again").wait_for()
    roles = [m["role"] for m in _bodies(site)[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


def test_an_answer_is_stopped_asked_again_and_changed(site: Site, visit: Visit) -> None:
    site.gateway.token_s = 0.2
    visitor = visit(site)
    page = visitor.page
    visitor.go("/chat")
    _ask(page, "first")
    page.locator(".markdown p").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    site.gateway.token_s = 0.001
    page.get_by_role("button", name="Answer again").click()
    page.get_by_text("The ship is safe.", exact=True).wait_for()
    page.get_by_role("button", name="Edit and resend").click()
    page.get_by_label("What you asked").fill("second")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Answer again").wait_for()
    assert [m["content"] for m in _bodies(site)[-1]["messages"]] == ["second"]
    assert page.locator(".turn").count() == 1
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0


def test_leaving_the_page_ends_the_stream_and_logging_out_forgets(site: Site, visit: Visit) -> None:
    site.gateway.token_s = 0.2
    visitor = visit(site, key="atoll-notebook")
    page = visitor.page
    visitor.go("/chat")
    _ask(page, "a secret")
    page.locator(".markdown p").wait_for()
    visitor.go("/models")
    visitor.go("/chat")
    page.get_by_text("Stopped.").wait_for()
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("API key").fill("atoll-notebook")
    page.get_by_role("button", name="Log in").click()
    page.wait_for_selector("#nav", state="attached")
    visitor.go("/chat")
    page.get_by_text("Say hello to").wait_for()
    assert "a secret" not in page.locator("main").inner_text()


def test_what_a_model_says_stays_text(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page
    visitor.go("/chat")
    node = json.dumps({"event": "node", "node": _EVIL, "backend": "b", "attempt": 1})
    _play(
        page,
        f": atoll {node}\n\n",
        _piece(reasoning_content=_EVIL),
        _piece(
            content=f"{_EVIL} **bold** [a](javascript:alert(1)) [b](https://site.example/x)\n\n"
        ),
        _piece(content=f"```{_EVIL}\n{_EVIL}\n```\n\n| {_EVIL} |\n|---|\n| {_EVIL} |\n"),
        "data: [DONE]\n\n",
    )
    _ask(page, _EVIL)
    page.get_by_role("button", name="Answer again").wait_for()
    assert page.locator("main img").count() == 0
    assert page.locator(".markdown strong").inner_text() == "bold"
    (link,) = page.locator(".markdown a").all()
    assert link.get_attribute("href") == "https://site.example/x"
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert "(https://site.example/x)" in page.locator(".markdown").inner_text()
    assert page.locator(".markdown pre").inner_text() == _EVIL
    assert page.locator(".path-node").inner_text() == _EVIL
    assert not page.locator(".think-text").is_visible()


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (429, "rate_limit_exceeded", "Too many requests"),
        (503, "overloaded", "No machine can answer now"),
        (403, "model_not_allowed", "You may not use"),
        (200, "stream_interrupted", "The answer broke off"),
    ],
)
def test_what_goes_wrong_is_said_with_a_way_on(
    site: Site, visit: Visit, status: int, code: str, words: str
) -> None:
    visitor = visit(site)
    visitor.expected.append(f"status of {status}")
    page = visitor.page
    visitor.go("/chat")
    told = _error(code, "so it is")
    if status == 200:
        _play(page, _piece(content="Half an ans"), f"data: {told}\n\n")
    else:
        _play(page, told, status=status)
    _ask(page, "hello")
    page.get_by_text(words).wait_for()
    assert "so it is" in page.locator(".chat-error").inner_text()
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("The ship is safe.", exact=True).wait_for()
    assert page.locator(".chat-error").count() == 0


def test_a_limit_that_names_a_time_counts_down(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.expected.append("status of 429")
    page = visitor.page
    visitor.go("/chat")
    _play(page, _error("rate_limit_exceeded", "enough"), status=429, **{"retry-after": "900"})
    _ask(page, "hello")
    again = page.get_by_role("button", name="Try again in")
    again.wait_for()
    assert again.is_disabled()


def test_pictures_go_along_only_where_the_model_takes_them(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page
    visitor.go("/chat")

    def takes(*kinds: str) -> None:
        def answer(route: Any) -> None:
            models = route.fetch().json()
            models["models"][0]["takes"] = list(kinds)
            route.fulfill(json={**models, "models": models["models"][:1]})

        page.route("**/atoll/v1/models", answer)
        visitor.go("/models")
        visitor.go("/chat")
        page.get_by_label("Message", exact=True).wait_for()

    takes("text")
    assert page.get_by_role("button", name="Attach").count() == 0
    takes("text", "image")
    page.get_by_role("button", name="Attach a picture").wait_for()
    page.evaluate(
        """async (data) => {
          const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
          const files = new DataTransfer();
          files.items.add(new File([bytes], "p.png", { type: "image/png" }));
          const what = { clipboardData: files, bubbles: true, cancelable: true };
          const paste = new ClipboardEvent("paste", what);
          document.querySelector("textarea[aria-label=Message]").dispatchEvent(paste);
        }""",
        _PIXEL,
    )
    page.get_by_text("1 \N{MULTIPLICATION SIGN} 1 px").wait_for()
    _ask(page, "What is this?")
    page.get_by_role("button", name="Answer again").wait_for()
    text, picture = _bodies(site)[-1]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_viewer_is_told_why_there_is_no_asking(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-finance")
    visitor.go("/chat")
    visitor.page.get_by_text("You can look, but not ask models").wait_for()
    assert visitor.page.get_by_label("Message", exact=True).is_disabled()


def test_an_answer_of_ten_thousand_tokens_is_shown_whole_and_followed(
    site: Site, visit: Visit
) -> None:
    visitor = visit(site)
    page = visitor.page
    visitor.go("/chat")
    part = "Some words of a long answer, *again* and again.\n\n- one\n- two\n\n```\ncode\n```\n\n"
    _play(page, *[_piece(content=part) for _ in range(500)], "data: [DONE]\n\n")
    _ask(page, "go on")
    page.get_by_role("button", name="Answer again").wait_for()
    assert page.locator(".markdown > p").count() == 500
    assert page.locator(".markdown > ul").count() == 500
    assert page.locator(".markdown > .code").count() == 500
    left = page.evaluate("document.documentElement.scrollHeight - scrollY - innerHeight")
    assert left < 2


def test_a_model_calls_a_tool_and_goes_on_with_its_result(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.go("/chat")
    page = visitor.page
    page.get_by_role("button", name="Insert an example").click()
    page.get_by_label("Message", exact=True).fill("How is the weather?")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_label("Arguments of get_weather").get_by_text('{"place": "Zurich"}').wait_for()
    page.get_by_label("Result of get_weather").fill("fog")
    page.get_by_role("button", name="Send results").click()
    page.get_by_role("button", name="Answer again").wait_for()
    sent = [s.body for s in site.gateway.seen if s.path == b"/v1/chat/completions"]
    messages = json.loads(sent[-1])["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"place": "Zurich"}'
    assert messages[2] == {"role": "tool", "tool_call_id": "call_7", "content": "fog"}


def test_tools_that_are_no_json_are_refused_where_they_are_written(
    site: Site, visit: Visit
) -> None:
    visitor = visit(site)
    visitor.go("/chat")
    visitor.page.get_by_label("Tools").fill("{")
    visitor.page.get_by_text("This is no JSON").wait_for()


def test_two_models_answer_side_by_side(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.go("/chat?model=qwen3-32b&other=llama-3.1-8b")
    page = visitor.page
    page.get_by_label("Message", exact=True).fill("Good evening.")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("button", name="Answer again").wait_for()
    answers = [
        page.get_by_role("article", name=f"Answer of {m}") for m in ("qwen3-32b", "llama-3.1-8b")
    ]
    boxes = [each.bounding_box() for each in answers]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert page.get_by_role("article", name="You").count() == 1
    asked = [
        json.loads(s.body)["model"] for s in site.gateway.seen if s.path == b"/v1/chat/completions"
    ]
    assert sorted(asked) == ["llama-3.1-8b", "qwen3-32b"]
