"""OpenAI's own client against the gateway, as a process."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.runtime.gateway.engine import expected
from tests.runtime.gateway.harness import CHAT, COMPLETIONS, chat
from tests.runtime.gateway.integration.conftest import Fleet


@pytest.fixture
def sdk_fleet(fleet: Fleet) -> Fleet:
    fleet.add_engine(step_ms=0)
    fleet.start()
    return fleet


def test_sync(sdk_fleet: Fleet) -> None:
    with openai.OpenAI(base_url=f"{sdk_fleet.url}/v1", api_key="x", max_retries=0) as sdk:
        assert [m.id for m in sdk.models.list()] == ["m"]
        assert sdk.models.retrieve("m").id == "m"
        answer = expected(CHAT, chat("hi"))
        whole = sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], temperature=0, logprobs=True
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
        with sdk.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            temperature=0,
            stream=True,
            extra_headers={"x-atoll-events": "1"},
        ) as told:
            assert "".join(c.choices[0].delta.content or "" for c in told) == answer.text
        assert chunks[-1].choices[0].finish_reason == answer.reason
        assert chunks[1].choices[0].logprobs is not None
        text = sdk.completions.create(model="m", prompt="Once", max_tokens=8, temperature=0)
        assert (
            text.choices[0].text == expected(COMPLETIONS, {"prompt": "Once", "max_tokens": 8}).text
        )


def test_errors_have_types_the_client_knows(sdk_fleet: Fleet) -> None:
    message = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"{sdk_fleet.url}/v1", api_key="x", max_retries=0) as sdk:
        with pytest.raises(openai.NotFoundError) as missing:
            sdk.chat.completions.create(model="none", messages=message)
        assert missing.value.code == "model_not_found"
        assert missing.value.param == "model"
        with pytest.raises(openai.BadRequestError) as bad:
            sdk.chat.completions.create(model="m", messages=message, n=-1)
        assert bad.value.param == "n"
        with pytest.raises(openai.BadRequestError) as tools:
            sdk.chat.completions.create(model="m", messages=message, tools="hammer")
        assert tools.value.param == "tools"
        assert tools.value.type == "invalid_request_error"
        sdk_fleet.engines[0].kill()
        sdk_fleet.engines[0].wait()
        with pytest.raises(openai.InternalServerError) as gone:
            sdk.chat.completions.create(model="m", messages=message)
        assert gone.value.status_code in (502, 503)


def test_async(sdk_fleet: Fleet) -> None:
    async def ask(sdk: openai.AsyncOpenAI, text: str) -> str:
        said = ""
        stream = await sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], temperature=0, stream=True
        )
        async for chunk in stream:
            said += chunk.choices[0].delta.content or ""
        return said

    async def go() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{sdk_fleet.url}/v1", api_key="x", max_retries=0
        ) as sdk:
            return await asyncio.gather(*(ask(sdk, f"q{i}") for i in range(20)))

    assert asyncio.run(go()) == [expected(CHAT, chat(f"q{i}")).text for i in range(20)]
