"""A stream that breaks off anywhere, however often, is one stream to who reads it."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.graph_server.recovery import StreamProgress
from atoll.tasks.values import Value
from tests.seeds import examples

TOKENS = [7, 3, 9, 4, 1, 8, 2]
quick = examples(50)


def chat(inputs: dict[str, Value]) -> Iterator[Value]:
    """Give a token at a time, after those that it resumes with."""
    resume = inputs.get("resume")
    done = len(resume["token_ids"]) if isinstance(resume, dict) else 0  # type: ignore[arg-type]
    if isinstance(resume, dict):
        assert resume["text"] == "".join(f"{t} " for t in TOKENS[:done])
    for token in TOKENS[done:]:
        yield {"text": f"{token} ", "token_ids": [token]}


def speech(inputs: dict[str, Value]) -> Iterator[Value]:
    """Give pieces that say nothing of how they could be resumed."""
    assert "resume" not in inputs
    for token in TOKENS:
        yield {"samples": token}


def read(source: object, breaks: list[int], inputs: dict[str, Value]) -> list[Value]:
    """Read a stream that breaks after so many pieces each time."""
    progress = StreamProgress(inputs)
    given_pieces: list[Value] = []
    for after in [*breaks, len(TOKENS) + 1]:
        pieces = source(progress.begin())  # type: ignore[operator]
        for number, piece in enumerate(pieces):
            if number == after:
                break
            if progress.is_news(piece):
                given_pieces.append(piece)
        else:
            return given_pieces
    raise AssertionError("the last run has no break")


@quick
@given(st.lists(st.integers(0, 6), max_size=6))
def test_resumed_streams_are_whole(breaks: list[int]) -> None:
    assert read(chat, breaks, {"messages": []}) == list(chat({}))


@quick
@given(st.lists(st.integers(0, 6), max_size=6))
def test_streams_that_run_again_are_whole(breaks: list[int]) -> None:
    assert read(speech, breaks, {"text": "x"}) == list(speech({}))


def test_what_a_client_had_already_is_the_beginning() -> None:
    inputs: dict[str, Value] = {"resume": {"token_ids": [7, 3], "text": "7 3 "}}
    assert read(chat, [2, 1], inputs) == list(chat({}))[2:]
