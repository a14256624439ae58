"""The answer of a backend: events without an end, and errors in the middle."""

from __future__ import annotations

import json

import pytest

from atoll.runtime.gateway import backend_answer as module
from atoll.runtime.gateway.backend_answer import Answer, BrokenStreamError
from atoll.runtime.gateway.events import split_events
from atoll.runtime.openai import ApiError, answer_usage, read_request, usage_of

_PIECE = b"x" * 4096
_MIB = 2**20


def streaming() -> Answer:
    answer = Answer()
    answer.begin(200, b"text/event-stream", b"")
    return answer


def test_an_event_in_many_pieces_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def counted(data: bytes) -> tuple[list[bytes], bytes]:
        nonlocal read
        read += len(data)
        return split_events(data)

    monkeypatch.setattr(module, "split_events", counted)
    answer = streaming()
    text = 4 * _MIB // len(_PIECE)
    assert not list(answer.read(b'data: {"choices":[],"x":"', wants_usage=False))
    for _ in range(text):
        assert not list(answer.read(_PIECE, wants_usage=False))
    (event,) = answer.read(b'"}\n\n', wants_usage=False)
    assert len(event) > 4 * _MIB
    assert read < 2 * len(event)
    assert answer.unfinished is None


def test_an_event_without_an_end_is_given_up() -> None:
    answer = streaming()
    for _ in range(32 * _MIB // len(_PIECE)):
        list(answer.read(_PIECE, wants_usage=False))
    with pytest.raises(BrokenStreamError, match="more than"):
        list(answer.read(_PIECE, wants_usage=False))


def test_a_mistake_of_the_client_in_mid_stream_is_told_apart() -> None:
    answer = streaming()
    said = b'data: {"error":{"type":"invalid_request_error","message":"no such tool"}}\n\n'
    with pytest.raises(BrokenStreamError) as caught:
        list(answer.read(said, wants_usage=False))
    assert caught.value.fault is not None
    assert caught.value.fault.status == 400


def test_a_usage_that_cannot_be_is_brought_into_bounds() -> None:
    said: dict[str, object] = {
        "prompt_tokens": -5,
        "completion_tokens": 10**18,
        "speech_seconds": -1.0,
    }
    for usage in (answer_usage(json.dumps({"usage": said}).encode()), usage_of(said)):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (0, 2**40)
        assert (usage.total_tokens, usage.speech_seconds) == (0, 0.0)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"<html>", b'{"x":' + b"[" * 100_000])
def test_what_is_no_object_is_no_answer(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        answer_usage(body)


def test_an_answer_whose_usage_makes_no_sense_is_one() -> None:
    assert answer_usage(b'{"choices":[],"usage":5}') is None
    assert answer_usage(b'{"choices":[]}') is None


def test_a_body_of_many_texts_is_not_read() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}],"stop":['
    with pytest.raises(ApiError, match="too many parts"):
        read_request("/v1/chat/completions", body + b'"a",' * 600_000 + b'"a"]}')
    # Quotes in a text are none around one.
    text = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b'\\"' * 1_100_000)
    assert read_request("/v1/chat/completions", text).model == "m"
