"""Somebody's server as a component: what it is asked, how its streams are read, how they go on."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from atoll.components.base import BadInputError, Done, Setup
from atoll.components.component_registry import find_component
from atoll.core.errors import UsageError
from atoll.runtime.executor import openai_chat
from atoll.runtime.executor.openai_chat import OpenAiChat, ServerAnswerError
from atoll.runtime.http.http_client import FetchError, StatusError

USER = {"role": "user", "content": "Hello"}
URL = "http://127.0.0.1:1/v1"
ROWS = np.ones((2, 32), np.float32)
SEEN = {"role": "user", "content": [{"type": "embeds", "embeds": ROWS}]}


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish} | more]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


class LineServer:
    """Answers every question with the same lines, and keeps what it was asked."""

    def __init__(self, *chunks: dict[str, Any] | Exception, done: bool = True) -> None:
        self.chunks = chunks
        self.done = done
        self.asked: list[dict[str, Any]] = []
        self.closed = 0

    async def stream_lines(
        self, url: str, *, body: Any, timeout_s: float, api_key: str | None
    ) -> AsyncGenerator[bytes, None]:
        self.asked.append({"url": url, "api_key": api_key} | json.loads(json.dumps(body)))
        try:
            for each in self.chunks:
                if isinstance(each, Exception):
                    raise each
                yield b"data: " + json.dumps(each).encode() + b"\r"
                yield b""
                yield b": still there"
            if self.done:
                yield b"data: [DONE]"
        finally:
            self.closed += 1


HELLO = (
    chunk("", role="assistant"),
    chunk("He"),
    chunk("llo"),
    chunk(finish="stop"),
    usage(7, 3),
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> LineServer:
    found = LineServer(*HELLO)
    monkeypatch.setattr(openai_chat, "stream_lines", found.stream_lines)
    return found


def ask(component: OpenAiChat, **inputs: Any) -> tuple[list[Any], Any]:
    async def go() -> list[Any]:
        return [piece async for piece in component.stream({"messages": [USER]} | inputs)]

    *pieces, done = asyncio.run(go())
    assert isinstance(done, Done)
    return pieces, done.value


WHOLE = {"text": "Hello", "finish_reason": "stop", "prompt_tokens": 7, "completion_tokens": 3}


def test_text_is_streamed_and_summed_up(server: LineServer) -> None:
    component = OpenAiChat(URL + "/", "m", api_key="secret")
    pieces, whole = ask(component, max_tokens=5, stop="x", seed=3, presence_penalty=0.5)
    assert pieces == [{"text": "He", "token_ids": []}, {"text": "llo", "token_ids": []}]
    assert whole == WHOLE
    assert server.asked == [
        {
            "url": f"{URL}/chat/completions",
            "api_key": "secret",
            "model": "m",
            "messages": [USER],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "temperature": 1.0,
            "top_p": 1.0,
            "stop": ["x"],
            "seed": 3,
            "presence_penalty": 0.5,
        }
    ]


def test_tokens_are_handed_on_where_the_server_says_them(server: LineServer) -> None:
    server.chunks = (chunk("He", token_ids=[4, 5]), chunk("", "length", token_ids=[6]))
    pieces, whole = ask(OpenAiChat(URL, "m"))
    assert pieces == [{"text": "He", "token_ids": [4, 5]}, {"text": "", "token_ids": [6]}]
    assert (whole["completion_tokens"], whole["finish_reason"]) == (3, "length")


def test_a_server_that_reads_text_only_is_sent_no_vectors(server: LineServer) -> None:
    with pytest.raises(BadInputError, match="reads text only"):
        ask(OpenAiChat(URL, "m"), messages=[SEEN])
    assert server.asked == []


@pytest.mark.parametrize(
    "chunks",
    [
        (chunk("He"),),
        (chunk("He"), {"error": {"message": "out of room"}}),
        (chunk("He"), FetchError("gone")),
        (StatusError(URL, 500, b"oh"),),
        (StatusError(URL, 404, b'{"error": {"message": "no such model"}}'),),
        ([1],),
        ({"choices": [7]},),
    ],
)
def test_what_breaks_off_is_no_fault_of_the_client(server: LineServer, chunks: Any) -> None:
    server.chunks = chunks
    with pytest.raises((ServerAnswerError, FetchError)):
        ask(OpenAiChat(URL, "m"))
    assert server.closed == 1


@pytest.mark.parametrize(
    ("answer", "message", "param"),
    [
        (b'{"error": {"message": "too hot", "param": "temperature"}}', "too hot", "temperature"),
        (b'{"error": "too hot"}', "too hot", None),
        (b"nonsense", "status 400: nonsense", None),
        (b'{"error": {"param": 5}}', "status 400", None),
    ],
)
def test_a_refusal_is_the_clients_fault(
    server: LineServer, answer: bytes, message: str, param: str | None
) -> None:
    server.chunks = (StatusError(URL, 400, answer),)
    with pytest.raises(BadInputError, match=message) as caught:
        ask(OpenAiChat(URL, "m"))
    assert caught.value.param == param


def test_leaving_early_ends_the_question(server: LineServer) -> None:
    async def go() -> None:
        stream: Any = OpenAiChat(URL, "m").stream({"messages": [USER]})
        assert await anext(stream) == {"text": "He", "token_ids": []}
        await stream.aclose()

    asyncio.run(go())
    assert server.closed == 1


def test_another_server_is_asked_again_and_the_known_part_left_out(server: LineServer) -> None:
    component = OpenAiChat(URL, "m")
    so_far = {"text": "Hel", "token_ids": []}
    pieces, whole = ask(component, resume=so_far, temperature=0)
    assert pieces == [{"text": "lo", "token_ids": []}]
    assert whole == WHOLE
    assert server.asked[0]["messages"] == [USER]
    with pytest.raises(ServerAnswerError, match="otherwise"):
        ask(component, resume={"text": "Hi"}, seed=5)
    with pytest.raises(ServerAnswerError, match="broke off"):
        ask(component, resume={"text": "Hello, you"}, seed=5)
    with pytest.raises(ServerAnswerError, match="at random"):
        ask(component, resume=so_far)


def test_atoll_is_told_the_tokens_and_sent_vectors_as_they_are(server: LineServer) -> None:
    server.chunks = (chunk("llo", "stop", token_ids=[3]), usage(7, 3))
    component = OpenAiChat(URL, "m", embeds="atoll")
    resume = {"text": "He", "token_ids": [1, 2]}
    pieces, whole = ask(component, messages=[SEEN], resume=resume)
    assert pieces == [{"text": "llo", "token_ids": [3]}]
    assert whole == WHOLE
    (asked,) = server.asked
    assert asked["atoll"] == {"resume": resume}
    (part,) = asked["messages"][0]["content"]
    assert part["type"] == "embeds"
    assert part["embeds"]["shape"] == [2, 32]
    assert base64.b64decode(part["embeds"]["data"]) == ROWS.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "file:///etc/passwd"}, "no url"),
        ({"url": None}, "no url"),
        ({"model": ""}, "no model"),
        ({"embeds": "other"}, "unknown form"),
        ({"embeds": "vllm"}, "vllm-chat"),
        ({"api_key_env": "ATOLL_TEST_NO_SUCH_KEY"}, "has no ATOLL_TEST_NO_SUCH_KEY"),
        ({"api_key": "secret"}, "unknown option 'api_key'"),
    ],
)
def test_options_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OpenAiChat.load(Setup(options={"url": URL, "model": "m"} | change))


def test_the_key_is_read_from_the_environment(
    server: LineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_TEST_KEY", "secret")
    options = {"url": URL, "model": "m", "api_key_env": "ATOLL_TEST_KEY"}
    component = OpenAiChat.load(Setup(options=options))
    assert find_component("openai-chat") is OpenAiChat
    ask(component, **component.example())
    assert server.asked[0]["api_key"] == "secret"
