"""What the next backend is asked, and what the client sees of its answer."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.events import Delivered, choices_of
from atoll.runtime.gateway.resume import (
    Continuation,
    DivergedError,
    ReplayFilter,
    Resumption,
    resume,
)
from atoll.runtime.openai import ApiError, ChatRequest, Generation, Message, read_request

CHAT = "/v1/chat/completions"
Json = dict[str, Any]


def chunk(index: int = 0, *, finish: str | None = None, **delta: Any) -> Json:
    return {
        "id": "b",
        "created": 2,
        "model": "m",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish}],
    }


def delivered(*chunks: Json) -> Delivered:
    found = Delivered()
    for one in chunks:
        found.add(one | {"id": "a", "created": 1})
    return found


SAID = delivered(chunk(role="assistant", content=""), chunk(content="Hel"), chunk(content="lo"))


def plan(kind: str, said: Delivered = SAID, path: str = CHAT, **fields: Any) -> Resumption | None:
    body: Json = {"model": "m", "stream": True, "temperature": 0}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "x"}]
    raw = json.dumps(body | fields).encode()
    request = read_request(path, raw)
    assert isinstance(request, Generation)
    return resume(request, raw, said, kind)


def asked(kind: str, **fields: Any) -> Json:
    found = plan(kind, **fields)
    assert found is not None
    assert isinstance(found.rewriter, Continuation)
    body: Json = json.loads(found.body)
    return body


def replays(kind: str, said: Delivered = SAID, **fields: Any) -> bool:
    found = plan(kind, said, **fields)
    return found is not None and isinstance(found.rewriter, ReplayFilter)


def test_atoll_gets_the_state_and_the_limits_as_they_were() -> None:
    body = asked("atoll", max_tokens=10)
    assert body["atoll"] == {"resume": {"text": "Hello", "tokens": 2}}
    assert body["max_tokens"] == 10
    assert [m["role"] for m in body["messages"]] == ["user"]


def test_atoll_gets_token_ids_where_all_are_known() -> None:
    said = delivered(chunk(content="a"))
    said.answers[0].token_ids = [7]
    found = plan("atoll", said, atoll={"x": 1})
    assert found is not None
    assert json.loads(found.body)["atoll"] == {
        "x": 1,
        "resume": {"text": "a", "tokens": 1, "token_ids": [7]},
    }


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_others_get_the_text_as_the_begun_answer(kind: str) -> None:
    body = asked(kind, max_tokens=10, min_tokens=1)
    assert body["messages"][-1] == {"role": "assistant", "content": "Hello"}
    assert (body["max_tokens"], body["min_tokens"]) == (8, 0)
    assert ("continue_final_message" in body) == (kind != "llamacpp")


def test_completions_get_a_longer_prompt() -> None:
    said = delivered({"choices": [{"index": 0, "text": " upon", "finish_reason": None}]})
    body = asked("vllm", said=said, path="/v1/completions", prompt="Once")
    assert body["prompt"] == "Once upon"
    assert body["max_tokens"] == 15
    assert "max_tokens" not in asked("llamacpp", said=said, path="/v1/completions", prompt="Once")


def test_a_prompt_of_vectors_gets_no_text_added() -> None:
    said = delivered({"choices": [{"index": 0, "text": " upon", "finish_reason": None}]})
    bodies: list[Json] = [{}, {"prompt": ""}]
    for body in bodies:
        assert replays("vllm", said, path="/v1/completions", prompt_embeds="AAAA", **body)


def test_a_prompt_is_needed_where_there_are_no_vectors() -> None:
    bodies: list[Json] = [{}, {"prompt_embeds": ""}]
    for body in bodies:
        with pytest.raises(ApiError, match="missing required field `prompt`"):
            plan("vllm", path="/v1/completions", **body)
    with pytest.raises(ApiError, match="the prompt is empty") as refused:
        plan("vllm", path="/v1/completions", prompt=[])
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"presence_penalty": 1.0},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
    ],
)
def test_what_text_does_not_tell_is_replayed_or_not_at_all(fields: Json) -> None:
    assert replays("vllm", **fields)
    assert replays("vllm", **fields, temperature=1.0, seed=3)
    if "presence_penalty" not in fields:
        assert plan("vllm", **fields, temperature=1.0) is None


CALL = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}


def test_reasoning_and_tool_calls_are_replayed() -> None:
    thought = delivered(chunk(reasoning_content="hm"))
    assert replays("vllm", thought)
    assert replays("atoll", thought)
    assert replays("vllm", delivered(chunk(tool_calls=[CALL])))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 4}])
def test_atoll_goes_on_in_the_middle_of_a_call(sampling: Json) -> None:
    """It needs no second try that comes out the same, so any sampling will do."""
    first = chunk(tool_calls=[CALL])
    second = chunk(tool_calls=[{"index": 1, "id": "d", "function": {"name": "g", "arguments": ""}}])
    for one, ids in ((first, [5, 6]), (second, [7])):
        one["choices"][0]["token_ids"] = ids
    body = asked("atoll", said=delivered(chunk(content=""), first, second), **sampling)
    calls = [{"name": "f", "arguments": "{"}, {"name": "g", "arguments": ""}]
    state = {"text": "", "tokens": 3, "token_ids": [5, 6, 7], "calls": calls}
    assert body["atoll"] == {"resume": state}


def test_calls_that_another_gateway_passed_on_are_not_forgotten() -> None:
    more = {"index": 0, "function": {"arguments": "}"}}
    begun = {"index": 1, "id": "d", "function": {"name": "g", "arguments": ""}}
    said = delivered(chunk(tool_calls=[more, begun]))
    before = {"text": "", "tokens": 1, "calls": [{"name": "f", "arguments": "{"}]}
    body = asked("atoll", said=said, atoll={"resume": before})
    assert body["atoll"]["resume"]["calls"] == [
        {"name": "f", "arguments": "{}"},
        {"name": "g", "arguments": ""},
    ]


def test_atoll_goes_on_with_a_forced_form() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert asked("atoll", response_format=form, temperature=1)["atoll"]["resume"]["text"] == "Hello"


def test_remote_endpoints_are_replayed() -> None:
    assert replays("openai")
    assert plan("openai", temperature=0.7) is None
    greeted = delivered(chunk(role="assistant", content=""))
    assert replays("openai", greeted, temperature=0.7)


def test_chunks_of_the_next_backend_belong_to_the_same_stream() -> None:
    rewriter = Continuation(SAID, whole=False)
    assert rewriter.chunk(chunk(role="assistant", content="")) is None
    new = rewriter.chunk(chunk(role="assistant", content=" you") | {"system_fingerprint": "z"})
    assert new == chunk(content=" you") | {"id": "a", "created": 1}
    usage = {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17}
    last = rewriter.chunk({"id": "b", "choices": [], "usage": usage})
    assert last is not None
    assert last["usage"] == {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}


pieces = st.lists(st.text("ab\u00e9", min_size=1, max_size=3), max_size=8)


@given(st.text("ab\u00e9", max_size=12), st.integers(0, 12), st.data())
def test_replay_sends_exactly_what_is_missing(text: str, known: int, data: st.DataObject) -> None:
    """However both backends cut the text into chunks."""
    known = min(known, len(text))
    rewriter = ReplayFilter(delivered(*([chunk(content=text[:known])] if known else [])))
    sent, at = "", 0
    while at < len(text):
        size = data.draw(st.integers(1, len(text) - at))
        new = rewriter.chunk(chunk(content=text[at : at + size]))
        sent += "".join(c["delta"].get("content", "") for c in choices_of(new or {}))
        at += size
    assert sent == text[known:]
    last = rewriter.chunk(chunk(finish="stop"))
    assert last is not None
    assert last["choices"][0]["finish_reason"] == "stop"


def tokens(choice: Json, numbers: range, text: str, *, legacy: bool) -> Json:
    """Return a chunk that brings some tokens, and a piece of text that need not be theirs."""
    names = [f"t{n}" for n in numbers]
    logprobs: Json = {"content": [{"token": name} for name in names]}
    if legacy:
        logprobs = {"tokens": names, "token_logprobs": [-0.1] * len(names), "text_offset": None}
    piece: Json = {"text": text} if legacy else {"delta": {"content": text}}
    return {"choices": [choice | piece | {"logprobs": logprobs, "token_ids": list(numbers)}]}


@given(
    st.integers(0, 12),
    st.lists(st.integers(1, 12), max_size=4),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
    st.booleans(),
)
def test_replay_repeats_no_token(
    known: int, cuts: list[int], lengths: list[int], legacy: bool
) -> None:
    texts = ["ab" * length for length in lengths]
    first = [tokens({"index": 1}, range(n, n + 1), texts[n], legacy=legacy) for n in range(known)]
    said = delivered(*first)
    rewriter = ReplayFilter(said)
    edges = sorted({0, *cuts, 12})
    for start, end in pairwise(edges):
        repeated = tokens({"index": 1}, range(start, end), "".join(texts[start:end]), legacy=legacy)
        new = rewriter.chunk(repeated)
        if new is not None:
            said.add(new)
    (answer,) = said.answers.values()
    assert answer.text == "".join(texts)
    assert answer.token_ids == list(range(12))
    assert set(answer.listed.values()) == {12}


def test_replay_brings_no_ids_of_text_that_came_without() -> None:
    rewriter = ReplayFilter(SAID)
    assert rewriter.chunk(tokens({"index": 0}, range(2), "Hello", legacy=False)) is None
    new = rewriter.chunk(tokens({"index": 0}, range(2, 3), "!", legacy=False))
    assert new is not None
    assert choices_of(new)[0]["token_ids"] == [2]


def test_replay_notices_another_answer() -> None:
    with pytest.raises(DivergedError):
        ReplayFilter(SAID).chunk(chunk(content="Help"))
    shorter = ReplayFilter(SAID)
    shorter.chunk(chunk(content="Hel"))
    with pytest.raises(DivergedError):
        shorter.chunk(chunk(finish="stop"))


def test_replay_of_tool_calls_keeps_the_first_id() -> None:
    def call(arguments: str, **more: Any) -> Json:
        function = {"arguments": arguments} | ({"name": "f"} if more else {})
        return chunk(tool_calls=[{"index": 0, "function": function} | more])

    rewriter = ReplayFilter(delivered(call("", id="one", type="function"), call('{"a":')))
    assert rewriter.chunk(call("", id="two", type="function")) is None
    new = rewriter.chunk(call('{"a":1}'))
    assert new is not None
    (sent,) = new["choices"][0]["delta"]["tool_calls"]
    assert sent == {"index": 0, "function": {"arguments": "1}"}}
    another = rewriter.chunk(
        chunk(tool_calls=[{"index": 1, "id": "x", "function": {"name": "g", "arguments": ""}}])
    )
    assert another is not None
    assert another["choices"][0]["delta"]["tool_calls"][0]["id"] == "x"


def test_replay_of_several_answers() -> None:
    rewriter = ReplayFilter(
        delivered(chunk(0, content="aa"), chunk(1, content="b"), chunk(1, finish="stop"))
    )
    assert rewriter.chunk(chunk(1, content="bcd")) is None
    new = rewriter.chunk(chunk(0, content="aaa"))
    assert new is not None
    assert new["choices"][0]["delta"] == {"content": "a"}


@pytest.mark.parametrize(
    ("before", "state"),
    [
        ({"text": "Oh. ", "tokens": 2, "token_ids": [1, 2]}, ("Oh. Hello", 4)),
        ({"text": "Oh. ", "tokens": 2}, ("Oh. Hello", 4)),
        ({"text": 5, "tokens": "x", "token_ids": 3}, ("Hello", 2)),
        ("nonsense", ("Hello", 2)),
    ],
)
def test_a_stream_that_another_gateway_moved_here_moves_on(
    before: object, state: tuple[str, int]
) -> None:
    body = json.dumps({"model": "m", "messages": [], "atoll": {"resume": before, "x": 1}}).encode()
    said = delivered(chunk(content="Hel"), chunk(content="lo"))
    request = ChatRequest(model="m", messages=[Message("user", "a")])
    found = resume(request, body, said, "atoll")
    assert found is not None
    extension = json.loads(found.body)["atoll"]
    assert extension["x"] == 1
    assert (extension["resume"]["text"], extension["resume"]["tokens"]) == state
    assert "token_ids" not in extension["resume"]


@pytest.mark.parametrize("kind", ["atoll", "vllm", "openai"])
@pytest.mark.parametrize("audio", [{"id": "a"}, {"transcript": "I"}, {"data": "AAAA"}])
def test_what_was_spoken_does_not_go_on_elsewhere(kind: str, audio: Json) -> None:
    said = Delivered()
    said.add({"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    assert plan(kind, said) is not None
    said.add({"id": "c", "choices": [{"index": 0, "delta": {"audio": audio}}]})
    assert plan(kind, said) is None
    assert said.audio_chars == len(audio.get("data", ""))
    # Its text comes as a transcript and nowhere else: that is what is counted where it breaks off.
    assert said.tokens == ("transcript" in audio)


def spoken(**audio: str) -> Json:
    return {"id": "c", "choices": [{"index": 0, "delta": {"audio": {"id": "first"} | audio}}]}


def pcm(*samples: int) -> str:
    return base64.b64encode(bytes(samples)).decode()


def test_a_graph_server_speaks_again_and_what_the_client_has_is_left_out() -> None:
    said = Delivered()
    said.add(spoken(transcript="One two"))
    said.add(spoken(data=pcm(1, 2, 3, 4)))
    said.add(spoken(data=pcm(5, 6)))
    found = plan("tasks", said)
    assert found is not None
    shown = []
    # In other pieces, under another id: text and sound are what counts.
    for audio in (
        {"transcript": "One "},
        {"transcript": "two three"},
        {"data": pcm(1, 2)},
        {"data": pcm(3, 4, 5, 6, 7, 8)},
        {"data": pcm(9)},
    ):
        new = found.rewriter.chunk(spoken(**audio) | {"id": "other"})
        if new is not None:
            assert new["id"] == "c"
            shown.append(new["choices"][0]["delta"]["audio"])
    assert shown == [
        {"id": "first", "transcript": " three"},
        {"id": "first", "data": pcm(7, 8)},
        {"id": "first", "data": pcm(9)},
    ]
    last = {"index": 0, "delta": {"audio": {"id": "x", "expires_at": 1}}, "finish_reason": "stop"}
    new = found.rewriter.chunk({"id": "other", "choices": [last]})
    assert new is not None
    assert new["choices"][0]["delta"]["audio"] == {"id": "first", "expires_at": 1}


@pytest.mark.parametrize("again", [[pcm(1, 9)], [pcm(1)]])
def test_speech_that_comes_out_different_or_shorter_is_no_repetition(again: list[str]) -> None:
    said = Delivered()
    said.add(spoken(data=pcm(1, 2)))
    found = plan("tasks", said)
    assert found is not None
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    events = [*(spoken(data=data) for data in again), end]
    with pytest.raises(DivergedError):
        list(map(found.rewriter.chunk, events))


def test_a_graph_server_repeats_what_it_can_and_is_not_handed_text() -> None:
    assert replays("tasks", seed=1)
    assert plan("tasks", temperature=1) is None


def test_an_old_call_goes_on_where_it_broke_off() -> None:
    """Functions as they were before tools: one call, without an id."""

    def called(**call: str) -> Json:
        return chunk(function_call=call)

    found = delivered(called(name="look", arguments=""), called(arguments='{"a"'))
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "temperature": 0,
            "functions": [{"name": "look"}],
            "function_call": "auto",
        }
    ).encode()
    request = read_request(CHAT, body)
    assert isinstance(request, ChatRequest)
    by_tokens = resume(request, body, found, "atoll")
    assert by_tokens is not None
    state = json.loads(by_tokens.body)["atoll"]["resume"]
    assert state["calls"] == [{"name": "look", "arguments": '{"a"'}]
    again = resume(request, body, found, "openai")
    assert again is not None
    assert again.rewriter.chunk(called(name="look", arguments='{"a')) is None
    new = again.rewriter.chunk(called(arguments='":1}'))
    assert new is not None
    assert new["choices"][0]["delta"] == {"function_call": {"arguments": ":1}"}}


def test_tokens_of_a_prompt_are_named_once() -> None:
    def named() -> Json:
        choice = {"index": 0, "text": "ab", "prompt_token_ids": [7, 8], "finish_reason": None}
        return {"prompt_token_ids": [7, 8], "choices": [choice]}

    assert ReplayFilter(delivered(named())).chunk(named()) is None
