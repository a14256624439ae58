"""The answer of a backend: events without an end, and errors in the middle."""

from __future__ import annotations

import pytest

from atoll.runtime.gateway import answer as module
from atoll.runtime.gateway.answer import Answer, BrokenStreamError
from atoll.runtime.gateway.events import split_events

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
    with pytest.raises(BrokenStreamError, match="more than"):
        for _ in range(64 * _MIB // len(_PIECE)):
            list(answer.read(_PIECE, wants_usage=False))


def test_a_mistake_of_the_client_in_mid_stream_is_told_apart() -> None:
    answer = streaming()
    said = b'data: {"error":{"type":"invalid_request_error","message":"no such tool"}}\n\n'
    with pytest.raises(BrokenStreamError) as caught:
        list(answer.read(said, wants_usage=False))
    assert caught.value.fault is not None
    assert caught.value.fault.status == 400
