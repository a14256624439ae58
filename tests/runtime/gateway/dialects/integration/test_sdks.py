"""The clients of OpenAI and Anthropic against the gateway."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import openai
import pydantic
import pytest

from tests.runtime.gateway.dialects.script import ScriptedAnswer, ScriptedCall, ScriptedTalker
from tests.runtime.gateway.engine import Fault
from tests.runtime.gateway.harness import Bench, running

CALL = ScriptedAnswer(
    reasoning=["let", " me see"],
    calls=[ScriptedCall(), ScriptedCall("look", ('{"what":', '"sky"}'), "call_2")],
    reason="tool_calls",
)
TALK = ScriptedAnswer(text=["It", " is", " blue", "."])
FORMED = ScriptedAnswer(text=['{"colour"', ':"blue"', "}"])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"what": {"type": "string"}},
    "required": ["what"],
    "additionalProperties": False,
}


class SeaColour(pydantic.BaseModel):
    colour: str


def failing_over(*answers: ScriptedAnswer) -> AbstractAsyncContextManager[Bench]:
    """Run a gateway over two engines, of which the first dies in the middle of its first answer."""
    return running(
        [
            ScriptedTalker(answers=list(answers), faults=[Fault("die", 4)]),
            ScriptedTalker(answers=list(answers)),
        ]
    )


def openai_client(bench: Bench) -> openai.AsyncOpenAI:
    url = f"http://127.0.0.1:{bench.port}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0)


async def test_responses_with_tools() -> None:
    tool: Any = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    async with failing_over(CALL, TALK) as bench:
        async with openai_client(bench) as sdk:
            items: list[Any] = [{"role": "user", "content": "What colour is the sea?"}]
            async with sdk.responses.stream(
                model="m", input=items, tools=[tool], temperature=0
            ) as stream:
                kinds = [event.type async for event in stream]
                first = await stream.get_final_response()
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            calls = [item for item in first.output if item.type == "function_call"]
            assert [call.arguments for call in calls] == ['{"what":"sea"}', '{"what":"sky"}']
            assert first.output[0].type == "reasoning"
            items += [item.model_dump(exclude_none=True) for item in first.output]
            items += [
                {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
                for call in calls
            ]
            second = await sdk.responses.create(model="m", input=items, tools=[tool])
            assert second.output_text == "It is blue."
            assert second.usage is not None
            assert second.usage.total_tokens == 18
        told = max((seen.body["messages"] for e in bench.engines for seen in e.seen), key=len)
        assert [message["role"] for message in told] == ["user", "assistant", "tool", "tool"]


async def test_responses_that_are_parsed() -> None:
    async def story(bench: Bench) -> None:
        async with openai_client(bench) as sdk:
            parsed = await sdk.responses.parse(model="m", input="hi", text_format=SeaColour)
            assert parsed.output_parsed == SeaColour(colour="blue")
            form = bench.engines[0].seen[-1].body["response_format"]
            assert form["json_schema"]["schema"]["required"] == ["colour"]
            async with sdk.responses.stream(model="m", input="hi", text_format=SeaColour) as stream:
                async for _ in stream:
                    pass
                assert (await stream.get_final_response()).output_parsed == SeaColour(colour="blue")

    async with running([ScriptedTalker(answers=[FORMED])]) as bench:
        await story(bench)


async def test_errors_of_responses() -> None:
    async with failing_over(TALK) as bench, openai_client(bench) as sdk:
        with pytest.raises(openai.BadRequestError, match="send all items") as refused:
            await sdk.responses.create(model="m", input="hi", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.create(model="none", input="hi")


async def test_messages_with_tools() -> None:
    anthropic = pytest.importorskip("anthropic", reason="needs the `dev` extra: anthropic")
    tool: Any = {"name": "look", "description": "d", "input_schema": SCHEMA}
    async with failing_over(CALL, TALK) as bench:
        url = f"http://127.0.0.1:{bench.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as sdk:
            turns: list[Any] = [{"role": "user", "content": "What colour is the sea?"}]
            about: Any = {"model": "m", "max_tokens": 100, "tools": [tool]}
            async with sdk.messages.stream(
                messages=turns, extra_body={"temperature": 0}, **about
            ) as stream:
                kinds = [event.type async for event in stream]
                first = await stream.get_final_message()
            assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
            assert first.stop_reason == "tool_use"
            assert [block.input for block in first.content] == [{"what": "sea"}, {"what": "sky"}]
            assert first.usage.output_tokens == 7
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "blue"}
                for block in first.content
            ]
            turns += [
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": results},
            ]
            second = await sdk.messages.create(messages=turns, **about)
            assert second.content[0].text == "It is blue."
            assert (second.stop_reason, second.usage.input_tokens) == ("end_turn", 7)
            assert second._request_id is not None
            with pytest.raises(anthropic.NotFoundError):
                await sdk.messages.create(messages=turns, **(about | {"model": "none"}))
            listed = await sdk.models.list()
            assert [model.id for model in listed.data] == ["m"]
            assert (await sdk.models.retrieve("m")).display_name == "m"
            with pytest.raises(anthropic.NotFoundError):
                await sdk.models.retrieve("none")
            search: Any = {"type": "web_search_20250305", "name": "web_search"}
            with pytest.raises(anthropic.BadRequestError, match="web_search"):
                await sdk.messages.create(messages=turns, **(about | {"tools": [search]}))
