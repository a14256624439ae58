"""Streams of dialects: cut anywhere they are the same, and they add up to the whole answer."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.dialects import DIALECTS
from atoll.runtime.gateway.dialects.dialect import Translation
from tests.runtime.gateway.dialects.reading import Json, events_of, read_message, read_response
from tests.runtime.gateway.dialects.script import USAGE, ScriptedAnswer, ScriptedCall

SEED = "5eed"
RESPONSES: Json = {"model": "m", "input": "hi", "stream": True}
MESSAGES: Json = {
    "model": "m",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "thinking": {"type": "enabled", "budget_tokens": 4},
    "stop_sequences": ["END"],
}


def translation(path: str, **more: object) -> Translation:
    body = (RESPONSES if path == "/v1/responses" else MESSAGES) | more
    return DIALECTS[path.encode()].translate(json.dumps(body).encode(), SEED)


def translate(path: str, *pieces: bytes, **more: object) -> bytes:
    stream = translation(path, **more).stream()
    assert stream is not None
    return b"".join(map(stream.feed, pieces)) + stream.end()


def whole(path: str, answer: ScriptedAnswer, **more: object) -> Json:
    found: Json = json.loads(translation(path, **more).answer(json.dumps(answer.whole()).encode()))
    return found


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


CUTS = st.lists(st.integers(0, 40), max_size=4)
TEXTS = st.lists(st.text(max_size=5), max_size=4)


@st.composite
def calls(draw: st.DrawFn) -> list[ScriptedCall]:
    found = []
    for number in range(draw(st.integers(0, 3))):
        inputs = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=6), max_size=2))
        pieces = pieces_of(json.dumps(inputs), draw(CUTS))
        found.append(ScriptedCall(draw(st.sampled_from(["look", "go"])), pieces, f"call_{number}"))
    return found


@st.composite
def answers(draw: st.DrawFn) -> ScriptedAnswer:
    called = draw(calls())
    return ScriptedAnswer(
        draw(TEXTS),
        draw(TEXTS),
        draw(st.just([]) | TEXTS),
        called,
        "tool_calls" if called else draw(st.sampled_from(["stop", "length", "content_filter"])),
        draw(st.sampled_from([None, "END", "other"])),
        mixed=draw(st.booleans()),
    )


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@given(answer=answers(), cuts=st.lists(st.integers(0, 4000), max_size=12))
def test_cut_anywhere_they_are_the_same(path: str, answer: ScriptedAnswer, cuts: list[int]) -> None:
    stream = b"".join(answer.events())
    places = sorted({min(c, len(stream)) for c in cuts} | {0, len(stream)})
    pieces = [stream[a:b] for a, b in pairwise(places)]
    at_once = translate(path, stream)
    assert translate(path, *pieces) == at_once
    assert translate(path, *answer.events()) == at_once


@given(answer=answers())
def test_a_stream_adds_up_to_the_whole_answer(answer: ScriptedAnswer) -> None:
    stream = b"".join(answer.events())
    assert read_response(translate("/v1/responses", stream)) == whole("/v1/responses", answer)
    assert read_message(translate("/v1/messages", stream)) == whole("/v1/messages", answer)


@given(answer=answers(), kept=st.integers(0, 30))
def test_what_breaks_off_says_so_and_closes_all_it_opened(
    answer: ScriptedAnswer, kept: int
) -> None:
    events = answer.events()[:-3][:kept]
    error = {
        "message": "the stream broke off: x",
        "type": "server_error",
        "code": "stream_interrupted",
    }
    for last in (b"", b"data: " + json.dumps({"error": error}).encode() + b"\n\n"):
        response = read_response(translate("/v1/responses", *events, last))
        assert response["status"] == "failed"
        assert response["error"]["message"].startswith("the stream broke off")
        message = events_of(translate("/v1/messages", *events, last))
        assert message[-1]["type"] == "error"
        assert message[-1]["error"]["type"] == "api_error"
        opened = [e["index"] for e in message if e["type"] == "content_block_start"]
        assert opened == [e["index"] for e in message if e["type"] == "content_block_stop"]


@given(st.binary(max_size=60), st.booleans())
def test_whatever_comes_there_is_an_end(noise: bytes, inside: bool) -> None:
    data = b"data: " + noise + b"\n\n" if inside else noise
    assert events_of(translate("/v1/responses", data))[-1]["type"].startswith("response.")
    assert events_of(translate("/v1/messages", data))[-1]["type"] in ("error", "message_stop")


ODD: list[Json] = [
    {"choices": None},
    {"choices": [1, {"index": "a", "delta": 3}, {"delta": {"content": 4, "tool_calls": 5}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [None, {"index": None}, {"function": 1}]}}]},
    {"choices": [{"index": 1, "delta": {"content": "of another answer"}}]},
    {"usage": {"prompt_tokens": 10**30, "completion_tokens": True}, "created": 1e300},
    {"model": 3, "created": "x", "usage": {"prompt_tokens": "many", "prompt_tokens_details": 1}},
]


def test_chunks_that_make_no_sense_are_passed_over() -> None:
    odd = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in ODD]
    answer = ScriptedAnswer(text=["a", "b"])
    response = read_response(translate("/v1/responses", b": ping\n\n", *odd, *answer.events()))
    assert response["output"][-1]["content"][0]["text"] == "ab"
    assert response["usage"]["input_tokens"] == 11
    message = read_message(translate("/v1/messages", *odd, *answer.events()))
    assert message["content"][-1]["text"] == "ab"


def test_arguments_of_a_call_that_was_over_are_an_error_not_lost() -> None:
    answer = ScriptedAnswer(calls=[ScriptedCall(), ScriptedCall(call_id="call_2")])
    more = {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    late = json.dumps({"choices": [{"index": 0, "delta": more}]}).encode()
    events = [*answer.events()[:-3], b"data: " + late + b"\n\n"]
    assert read_response(translate("/v1/responses", *events))["status"] == "failed"
    assert "error" in read_message(translate("/v1/messages", *events))


def test_a_name_in_pieces_is_whole_when_the_call_begins() -> None:
    def chunk(call: Json) -> bytes:
        data = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0} | call]}}]}
        return b"data: " + json.dumps(data).encode() + b"\n\n"

    events = [
        chunk({"id": "call_9", "function": {"name": "lo"}}),
        chunk({"function": {"name": "ok"}}),
        chunk({"function": {"arguments": "{}"}}),
        b"data: [DONE]\n\n",
    ]
    (block,) = read_message(translate("/v1/messages", *events))["content"]
    assert (block["name"], block["id"], block["input"]) == ("look", "call_9", {})
    (item,) = read_response(translate("/v1/responses", *events))["output"]
    assert (item["name"], item["call_id"], item["arguments"]) == ("look", "call_9", "{}")


def test_the_first_event_of_a_call_comes_with_its_first_argument() -> None:
    """Nothing is kept back to the end: a client sees calls while they are written."""
    answer = ScriptedAnswer(
        calls=[ScriptedCall(), ScriptedCall(call_id="call_2")], reason="tool_calls"
    )
    stream = translation("/v1/messages").stream()
    assert stream is not None
    seen = [[event["type"] for event in events_of(stream.feed(e))] for e in answer.events()]
    assert seen[:7] == [
        # What the prompt took is not known yet.
        [],
        ["message_start"],
        ["content_block_start", "content_block_delta"],
        ["content_block_delta"],
        [],
        ["content_block_stop", "content_block_start", "content_block_delta"],
        ["content_block_delta"],
    ]


@pytest.mark.parametrize(
    ("answer", "stop_reason", "sequence"),
    [
        (ScriptedAnswer(text=["a"]), "end_turn", None),
        (ScriptedAnswer(text=["a"], stop="END"), "stop_sequence", "END"),
        (ScriptedAnswer(text=["a"], stop="</s>"), "end_turn", None),
        (ScriptedAnswer(text=["a"], reason="length"), "max_tokens", None),
        (ScriptedAnswer(calls=[ScriptedCall()], reason="tool_calls"), "tool_use", None),
        (ScriptedAnswer(calls=[ScriptedCall()]), "tool_use", None),
        (ScriptedAnswer(calls=[ScriptedCall()], reason="length"), "max_tokens", None),
        (ScriptedAnswer(refusal=["no"]), "refusal", None),
        (ScriptedAnswer(text=["a"], reason="content_filter"), "refusal", None),
        (ScriptedAnswer(), "end_turn", None),
    ],
)
def test_why_a_message_stopped(
    answer: ScriptedAnswer, stop_reason: str, sequence: str | None
) -> None:
    for message in (
        whole("/v1/messages", answer),
        read_message(translate("/v1/messages", *answer.events())),
    ):
        assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, sequence)
        assert message["usage"] == {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 7,
        }


@pytest.mark.parametrize(
    ("answer", "status", "details", "last"),
    [
        (ScriptedAnswer(text=["a"]), "completed", None, "completed"),
        (
            ScriptedAnswer(text=["a"], reason="length"),
            "incomplete",
            {"reason": "max_output_tokens"},
            "incomplete",
        ),
        (
            ScriptedAnswer(refusal=["no"], reason="content_filter"),
            "incomplete",
            {"reason": "content_filter"},
            "incomplete",
        ),
        (
            ScriptedAnswer(calls=[ScriptedCall()], reason="tool_calls"),
            "completed",
            None,
            "completed",
        ),
    ],
)
def test_how_a_response_ended(
    answer: ScriptedAnswer, status: str, details: Json | None, last: str
) -> None:
    for response in (
        whole("/v1/responses", answer),
        read_response(translate("/v1/responses", *answer.events())),
    ):
        assert (response["status"], response["incomplete_details"]) == (status, details)
        assert response["output"][-1]["status"] == last
        assert response["store"] is False
        assert response["usage"] == {
            "input_tokens": USAGE["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": USAGE["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": 18,
        }


def test_reasoning_is_shown_to_those_who_asked_for_it() -> None:
    answer = ScriptedAnswer(reasoning=["hm", "m"], text=["a"])
    for more, kinds in (
        ({}, ["thinking", "text"]),
        ({"thinking": {"type": "adaptive"}}, ["thinking", "text"]),
        ({"thinking": {"type": "disabled"}}, ["text"]),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, ["text"]),
        ({"thinking": None}, ["text"]),
    ):
        for message in (
            whole("/v1/messages", answer, **more),
            read_message(translate("/v1/messages", *answer.events(), **more)),
        ):
            assert [block["type"] for block in message["content"]] == kinds
    response = whole("/v1/responses", answer)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "hmm"}]


def test_arguments_that_are_no_json_are_kept() -> None:
    answer = ScriptedAnswer(calls=[ScriptedCall(pieces=['{"a": '])], reason="length")
    (block,) = whole("/v1/messages", answer)["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": '}
