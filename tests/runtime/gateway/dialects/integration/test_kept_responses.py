"""Conversations that go on from a response: who may, for how long, at which gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.runtime.gateway.dialects.kept_responses import KeptResponses, ResponsesSettings
from atoll.runtime.openai import ApiError
from tests.runtime.gateway.engine import ScriptedEngine
from tests.runtime.gateway.harness import Bench, Reply, running

RESPONSES = "/v1/responses"


async def ask(bench: Bench, text: object, **more: object) -> dict[str, Any]:
    body = {"model": "m", "input": text, "max_output_tokens": 6, "temperature": 0} | more
    reply = await bench.post(RESPONSES, body)
    assert reply.status == 200, reply.body
    if not more.get("stream"):
        return dict(reply.json)
    last = reply.body.decode().rpartition("data: ")[2]
    return dict(json.loads(last)["response"])


def told(bench: Bench) -> list[tuple[str, str]]:
    """What the engine was told last, as roles and texts."""
    messages = bench.engines[0].seen[-1].body["messages"]
    return [(m["role"], m["content"]) for m in messages]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def code(reply: Reply) -> tuple[int, str, str]:
    error = reply.json["error"]
    return reply.status, error["code"], error["param"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_a_response(stream: bool) -> None:
    async with running([ScriptedEngine()]) as bench:
        one = await ask(bench, "first", stream=stream)
        assert one["store"] is True
        two = await ask(bench, "second", previous_response_id=one["id"], stream=stream)
        assert two["previous_response_id"] == one["id"]
        expected = [("user", "first"), ("assistant", text_of(one)), ("user", "second")]
        assert told(bench) == expected
        items = [{"role": "user", "content": "third"}]
        await ask(bench, items, previous_response_id=two["id"], instructions="short")
        assert told(bench) == [
            ("system", "short"),
            *expected,
            ("assistant", text_of(two)),
            ("user", "third"),
        ]
        # Instructions are of one request; and from any response two conversations may go on.
        await ask(bench, "other", previous_response_id=one["id"])
        assert told(bench) == [*expected[:2], ("user", "other")]


async def test_what_was_not_kept_is_not_found() -> None:
    off = {"keep_s": 0.0}
    async with running([ScriptedEngine()]) as bench:
        one = await ask(bench, "first", store=False)
        assert one["store"] is False
        for previous in (one["id"], "resp_1", "../../etc/passwd", "resp_" + "0" * 48):
            body = {"model": "m", "input": "x", "previous_response_id": previous}
            reply = await bench.post(RESPONSES, body)
            assert code(reply) == (
                400,
                "previous_response_not_found",
                "previous_response_id",
            )
    async with running([ScriptedEngine()], responses=ResponsesSettings(**off)) as bench:
        one = await ask(bench, "first")
        assert one["store"] is False
        body = {"model": "m", "input": "x", "previous_response_id": one["id"]}
        assert (await bench.post(RESPONSES, body)).status == 400


async def test_gateways_with_one_folder_share_conversations(tmp_path: Path) -> None:
    shared = ResponsesSettings(folder=str(tmp_path / "kept"))
    async with (
        running([ScriptedEngine()], responses=shared) as first,
        running([ScriptedEngine()], responses=shared) as second,
    ):
        one = await ask(first, "first")
        await ask(second, "second", previous_response_id=one["id"])
        assert told(second)[0] == ("user", "first")
    for file in (tmp_path / "kept").iterdir():
        assert file.stat().st_mode & 0o77 == 0


def test_they_are_of_a_key_and_for_a_time_and_bounded(tmp_path: Path) -> None:
    now_s = 1000.0
    settings = ResponsesSettings(keep_s=60, kept_bytes=800, folder=str(tmp_path / "f"))
    kept = KeptResponses(settings, lambda: now_s)
    mine, other = kept.of("me"), kept.of("other")
    assert mine is not None
    assert other is not None
    name = "resp_" + "a" * 48
    mine.keep(name, ["x"])
    assert mine.items(name) == b'["x"]'
    with pytest.raises(ApiError):
        other.items(name)
    now_s += 61
    with pytest.raises(ApiError):
        mine.items(name)
    # Without a folder the oldest make room, and what is too large is not kept.
    small = KeptResponses(ResponsesSettings(keep_s=60, kept_bytes=800), lambda: now_s)
    owned = small.of(None)
    assert owned is not None
    names = [f"resp_{number:048x}" for number in range(20)]
    for each in names:
        owned.keep(each, ["y" * 80])
    assert owned.items(names[-1])
    with pytest.raises(ApiError):
        owned.items(names[0])
    owned.keep(names[0], ["y" * 200])
    with pytest.raises(ApiError):
        owned.items(names[0])
