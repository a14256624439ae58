"""OpenAI's own clients against the gateway."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import openai
import pytest

from tests.runtime.gateway.engine import ScriptedEngine, expected
from tests.runtime.gateway.harness import CHAT, COMPLETIONS, QUICK, Bench, chat, running


def url_of(bench: Bench) -> str:
    return f"http://127.0.0.1:{bench.port}/v1"


async def test_sync() -> None:
    answer = expected(CHAT, chat("hi"))
    short = expected(COMPLETIONS, {"prompt": "Once", "max_tokens": 8})

    def ask(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as sdk:
            assert [m.id for m in sdk.models.list()] == ["m"]
            assert sdk.models.retrieve("m").id == "m"
            whole = sdk.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                temperature=0,
                logprobs=True,
            )
            assert whole.choices[0].message.content == answer.text
            assert whole.choices[0].finish_reason == answer.reason
            assert whole.usage is not None
            assert whole.usage.model_dump(include=set(answer.usage)) == answer.usage
            assert whole.choices[0].logprobs is not None
            assert whole.choices[0].logprobs.content is not None
            assert "".join(p.token for p in whole.choices[0].logprobs.content) == answer.text
            with sdk.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                temperature=0,
                stream=True,
                logprobs=True,
            ) as stream:
                chunks = list(stream)
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.text
            assert all(c.usage is None for c in chunks)
            assert chunks[-1].choices[0].finish_reason == answer.reason
            assert chunks[1].choices[0].logprobs is not None
            with sdk.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                temperature=0,
                stream=True,
                extra_headers={"x-atoll-events": "1"},
            ) as told:
                assert "".join(c.choices[0].delta.content or "" for c in told) == answer.text
            text = sdk.completions.create(model="m", prompt="Once", max_tokens=8, temperature=0)
            assert text.choices[0].text == short.text

    async with running([ScriptedEngine()]) as bench:
        await asyncio.to_thread(ask, url_of(bench))


async def test_errors_have_types_the_client_knows() -> None:
    engine = ScriptedEngine()
    message = [{"role": "user", "content": "hi"}]
    soon = replace(QUICK, retry_s=0.2)
    async with (
        running([engine], deadlines=soon) as bench,
        openai.AsyncOpenAI(base_url=url_of(bench), api_key="x", max_retries=0) as sdk,
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.chat.completions.create(model="none", messages=message)
        assert missing.value.code == "model_not_found"
        assert missing.value.param == "model"
        with pytest.raises(openai.BadRequestError) as bad:
            await sdk.chat.completions.create(model="m", messages=message, n=-1)
        assert bad.value.param == "n"
        with pytest.raises(openai.BadRequestError) as tools:
            await sdk.chat.completions.create(model="m", messages=message, tools="hammer")
        assert tools.value.param == "tools"
        assert tools.value.type == "invalid_request_error"
        await engine.stop()
        with pytest.raises(openai.InternalServerError) as gone:
            await sdk.chat.completions.create(model="m", messages=message)
        assert gone.value.status_code in (502, 503)


async def test_async() -> None:
    async def ask(sdk: openai.AsyncOpenAI, text: str) -> str:
        said = ""
        stream = await sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], temperature=0, stream=True
        )
        async for chunk in stream:
            said += chunk.choices[0].delta.content or ""
        return said

    asked = [f"q{i}" for i in range(8)]
    answers = [expected(CHAT, chat(q)).text for q in asked]
    async with (
        running([ScriptedEngine()]) as bench,
        openai.AsyncOpenAI(base_url=url_of(bench), api_key="x", max_retries=0) as sdk,
    ):
        assert await asyncio.gather(*(ask(sdk, q) for q in asked)) == answers
