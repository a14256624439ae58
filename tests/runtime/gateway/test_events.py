"""Events: cut anywhere, they are the same events; the journal says what the client has."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.events import (
    DeliveredChoice,
    StreamJournal,
    TokenTally,
    UnfinishedEvent,
    event_of,
    payload,
    read_chunk,
    split_events,
)

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


@given(st.lists(st.text(max_size=6), max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_events_cut_anywhere_are_the_same(texts: list[str], cuts: list[int]) -> None:
    events = [f"data: {json.dumps({'t': t})}\n\n".encode() for t in texts]
    whole = b"".join(events)
    places = sorted({min(c, len(whole)) for c in cuts} | {0, len(whole)})
    found: list[bytes] = []
    carry = b""
    for begin, end in pairwise(places):
        more, carry = split_events(carry + whole[begin:end])
        found += more
    assert found == events
    assert carry == b""


@given(st.integers(0, 40))
def test_carriage_returns_cut_anywhere(cut: int) -> None:
    whole = b": ping\r\n\r\ndata: 1\r\ndata: 2\r\n\r\ndata: 3\r\n\r\n"
    one, carry = split_events(whole[:cut])
    two, carry = split_events(carry + whole[cut:])
    said = [payload(event) for event in one + two]
    assert [s for s in said if s is not None] == [b"1\n2", b"3"]
    assert carry == b""


@given(st.lists(st.integers(0, 60), max_size=12))
def test_an_unfinished_event_cut_anywhere_ends_where_it_ends(cuts: list[int]) -> None:
    whole = b": ping\r\n\r\ndata: 1\ndata: 2\n\ndata: 3\r\rdata: 4\r\n\r\n"
    places = sorted({min(c, len(whole)) for c in cuts} | {0, len(whole)})
    said: list[bytes | None] = []
    unfinished = UnfinishedEvent(b"")
    for begin, end in pairwise(places):
        ended = unfinished.add(whole[begin:end])
        if ended is not None:
            events, rest = split_events(ended)
            said += map(payload, events)
            unfinished = UnfinishedEvent(rest)
    assert [s for s in said if s is not None] == [b"1\n2", b"3", b"4"]
    assert len(unfinished) == 0


def test_payload() -> None:
    assert payload(b"data: x\n\n") == b"x"
    assert payload(b"data:x\n\n") == b"x"
    assert payload(b": comment\n\n") is None
    assert payload(b"event: e\nid: 1\ndata: a\ndata: b\n\n") == b"a\nb"
    assert read_chunk(b"[1]") is None
    assert read_chunk(b"{") is None
    assert read_chunk(b"[" * 100_000) is None


def test_journal_of_a_long_stream_keeps_text_not_bytes() -> None:
    journal = StreamJournal()
    for _ in range(20_000):
        journal.append(EVENT)
    assert sum(map(len, journal._raw)) <= 600_000
    answer = journal.read().answers[0]
    assert answer.text == "a" * 20_000
    assert answer.tokens == 20_000


def test_tokens_are_counted_by_the_best_that_is_known() -> None:
    def tokens(**choice: object) -> tuple[int, list[int] | None]:
        journal = StreamJournal()
        journal.append(event_of({"choices": [{"index": 0, "delta": {"content": "ab"}} | choice]}))
        answer = journal.read().answers[0]
        return answer.tokens, answer.token_ids

    assert tokens() == (1, None)
    assert tokens(token_ids=[5, 6]) == (2, [5, 6])
    assert tokens(logprobs={"content": [{}, {}, {}]}) == (3, None)
    assert tokens(logprobs={"tokens": ["a", "b"]}) == (2, None)
    assert tokens(delta={"content": ""}) == (0, [])


def test_malformed_chunks_do_no_harm() -> None:
    journal = StreamJournal()
    for raw in (
        b"data: 5\n\n",
        b'data: {"choices":5}\n\n',
        b'data: {"choices":[5,{"index":"x","delta":7}]}\n\n',
        b"data: {\n\n",
    ):
        journal.append(raw)
    assert journal.read().tokens == 0


CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 2),
        "text": st.sampled_from(["", "a", "\n\n"]),
        "delta": st.fixed_dictionaries(
            {},
            optional={
                "role": st.just("assistant"),
                "content": st.sampled_from(["", "a", None, "data: x"]),
                "reasoning_content": st.sampled_from(["", "b"]),
            },
        ),
        "token_ids": st.lists(st.integers(0, 9), max_size=3),
        "logprobs": st.none() | st.just({"content": [{}, {}]}),
        "finish_reason": st.none() | st.just("stop"),
    },
)


@given(st.lists(st.lists(st.lists(CHOICES, max_size=2), max_size=3), max_size=4))
def test_tokens_counted_piece_by_piece_are_those_of_the_journal(
    pieces: list[list[list[dict[str, object]]]],
) -> None:
    journal, tally = StreamJournal(), TokenTally()
    for piece in pieces:
        data = b"".join(event_of({"choices": choices}) for choices in piece)
        journal.append(data)
        assert tally.add(data) == tally.total
    assert tally.total == journal.read().tokens
    assert tally.add(b": a comment\n\ndata: [DONE]\n\ndata: nonsense\n\n") == tally.total


def test_tokens_are_those_that_the_engine_counts_up_to_the_last_text() -> None:
    def piece(text: str, said: int) -> dict[str, object]:
        return {"choices": [{"delta": {"content": text}}], "usage": {"completion_tokens": said}}

    journal, tally = StreamJournal(), TokenTally()
    # The fourth and the ninth token are the beginnings of characters whose ends have not come.
    for text, said, tokens in (
        ("", 0, 0),
        ("abc", 3, 3),
        ("", 4, 3),
        ("\u6c34d", 8, 8),
        ("", 9, 8),
    ):
        data = event_of(piece(text, said))
        journal.append(data)
        assert tally.add(data) == tokens == journal.read().tokens
    # An engine that says nothing goes on.
    data = event_of({"choices": [{"delta": {"content": "e"}}]})
    journal.append(data)
    assert tally.add(data) == 9 == journal.read().tokens


def test_a_journal_says_how_much_it_has_read() -> None:
    journal = StreamJournal()
    for _ in range(20_000):
        journal.append(EVENT)
    assert 0 < journal.folded <= 20_000 * len(EVENT)
    journal.read()
    assert journal.folded == 20_000 * len(EVENT)


def test_text_of_a_long_stream_is_put_together_when_it_is_asked_for() -> None:
    answer = DeliveredChoice()
    for _ in range(2000):
        answer.add({"delta": {"content": "x" * 1000}})
    (parts,) = answer._blocks.values()
    assert 10 < len(parts) < 50
    assert max(map(len, parts)) < 70_000
    assert len(answer.text) == 2_000_000
    answer.add({"delta": {"content": "yz"}})
    assert answer.text.endswith("xyz")
