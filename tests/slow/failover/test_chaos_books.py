"""What the check of kills counts: it must not overlook anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.slow.answers import AnswerReader, BrokenAnswerError
from tests.slow.failover.chaos import UNREAD, ledger_diff
from tests.slow.failover.chaos_clients import Seen, Sending


def sending(seen: int, *, cut: bool = False, sent: bool = True, moved: int = 0) -> Sending:
    return Sending("r", 0, "greedy", 0.0, seen, cut, moved, sent)


@pytest.mark.parametrize(
    ("made", "rows", "wrong"),
    [
        (sending(5), [5], 0),
        (sending(5), [6], 1),
        (sending(5), [4], 1),
        (sending(5), [], 1),
        (sending(5), [5, 5], 1),
        # Two gateways worked on it, of which each wrote down its part.
        (sending(5, moved=1), [3, 2], 0),
        (sending(5, moved=1), [3, 3], 1),
        (sending(5, moved=1), [2, 2, 1], 1),
        (sending(0, sent=False), [], 0),
        (sending(0, sent=False), [3], 1),
        (sending(5, cut=True), [5], 0),
        (sending(5, cut=True), [5 + UNREAD], 0),
        (sending(5, cut=True), [6 + UNREAD], 1),
        # What a client has, the ledger must have.
        (sending(5, cut=True), [4], 1),
        (sending(5, cut=True), [], 1),
        (sending(0, cut=True), [], 0),
    ],
)
def test_the_ledger_is_held_against_each_client(made: Sending, rows: list[int], wrong: int) -> None:
    ledger = [{"request_id": "r", "completion_tokens": count} for count in rows]
    assert ledger_diff(Seen(sendings=[made]), ledger)[0] == wrong


def test_a_row_for_a_request_that_nobody_made_is_wrong() -> None:
    assert ledger_diff(Seen(), [{"request_id": "x", "completion_tokens": 1}])[0] == 1


def event(choice: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def test_a_reader_takes_text_and_calls_however_they_are_cut() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ":1}"}}
    stream = b"".join(
        [
            event({"delta": {"content": "x"}, "token_ids": [1], "finish_reason": None}),
            event({"delta": {"tool_calls": [call]}, "token_ids": [2, 3], "finish_reason": None}),
            event(
                {"delta": {"tool_calls": [rest]}, "token_ids": [4], "finish_reason": "tool_calls"}
            ),
            b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\ndata: [DONE]\n\n',
        ]
    )
    for size in (1, 7, len(stream)):
        reader = AnswerReader()
        for at in range(0, len(stream), size):
            reader.feed(stream[at : at + size])
        (choice,) = reader.choices.values()
        assert (choice.text, choice.calls) == ("x", {0: ["f", '{"a":1}']})
        assert (choice.token_ids, choice.finish) == ([1, 2, 3, 4], ["tool_calls"])
        assert (reader.done, reader.usage) == (True, [(0, 4)])


@pytest.mark.parametrize(
    "again",
    [
        {"token_ids": [1]},
        {"logprobs": {"tokens": ["x"], "token_logprobs": [-1.0]}},
        {"text": "x"},
        {"index": 1, "text": ""},
        {"finish_reason": "length"},
    ],
)
def test_what_comes_twice_is_seen(again: dict[str, Any]) -> None:
    """Ids, log-probabilities, text, indices, reasons: each of them once, as in the answer in peace."""
    choice = {"index": 0, "text": "x", "token_ids": [1], "finish_reason": "length"}
    more = {"index": 0, "text": "", "finish_reason": None} | again
    once, twice = AnswerReader(), AnswerReader()
    for reader in (once, twice):
        reader.feed(event(choice, id="a"))
    twice.feed(event(more, id="a"))
    assert once.answer != twice.answer
    # So is another name of the stream, and a second usage.
    for odd in ({"id": "b"}, {"id": "a", "usage": {"completion_tokens": 1}}):
        other = AnswerReader()
        other.feed(event(choice, id="a") + event({"text": "", "finish_reason": None}, **odd))
        assert other.answer != once.answer


def test_events_come_in_their_order() -> None:
    reader = AnswerReader()
    reader.feed(b"id: s-1\n" + event({"text": "x", "finish_reason": None}))
    for wrong in (b"s-1", b"s-3", b"t-2"):
        with pytest.raises(BrokenAnswerError):
            reader.feed(b"id: " + wrong + b"\n" + event({"text": "y", "finish_reason": None}))


def test_an_error_in_a_stream_is_an_error() -> None:
    with pytest.raises(BrokenAnswerError):
        AnswerReader().feed(b'data: {"error": {"message": "no"}}\n\n')


@pytest.mark.parametrize(
    ("tokens", "finish", "done"), [(2, "length", True), (1, "stop", True), (1, "length", False)]
)
def test_half_an_answer_is_no_answer(tokens: int, finish: str, done: bool) -> None:
    reader = AnswerReader()
    reader.feed(event({"index": 0, "text": "x", "token_ids": [1], "finish_reason": finish}))
    reader.feed(b"data: [DONE]\n\n" if done else b"")
    with pytest.raises(BrokenAnswerError):
        reader.check_end(tokens)
