"""Sentences: where they are cut, and that nothing is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.tasks.cutting import SentenceCutter, sentences
from tests.seeds import examples

quick = examples(50)
# Made of what decides: stops, closers, words that look like ends, spaces.
_WORDS = [
    "Dr.",
    "e.g.",
    "3.14",
    "1.",
    ".",
    "!",
    "?",
    "...",
    '"',
    ")",
    "ok",
    "Yes",
    ",",
    "x.y",
    "I",
    "J.",
    ";",
]
_OTHERS = [" ", "  ", "\n", "\n\n", "a" * 30, "\u3002", "\uff01", "\u300d", "\u2026", "\u201d"]
texts = st.lists(
    st.sampled_from([*_WORDS, *_OTHERS]) | st.text(max_size=5), min_size=10, max_size=40
).map("".join)


def cut(pieces: list[str], most: int = 300) -> list[str]:
    cutter = SentenceCutter(most)
    found = [part for piece in pieces for part in cutter.feed(piece)]
    return [str(part) for part in [*found, *cutter.finish()]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Pi is 3.14 or so. Yes.", ["Pi is 3.14 or so.", "Yes."]),
        ("Dr. Smith met J. Doe, e.g. today. Good.", ["Dr. Smith met J. Doe, e.g. today.", "Good."]),
        ('He said "Stop!" Then he left.', ['He said "Stop!"', "Then he left."]),
        ("1. Stir well.\n2. Eat.", ["1. Stir well.", "2. Eat."]),
        ("So it was I. Really.", ["So it was I.", "Really."]),
        ("no stop at all", ["no stop at all"]),
        ("one line\nanother line", ["one line", "another line"]),
        ("\u4f60\u597d\u3002\u518d\u89c1\u3002", ["\u4f60\u597d\u3002", "\u518d\u89c1\u3002"]),
        ("  \n ", []),
        ("Well... yes.", ["Well...", "yes."]),
        ("See example.com for more. Bye.", ["See example.com for more.", "Bye."]),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert cut([text]) == expected
    assert cut(list(text)) == expected


def test_a_sentence_is_given_as_soon_as_it_is_certain() -> None:
    cutter = SentenceCutter()
    assert cutter.feed("Hello there") == []
    assert cutter.feed(".") == []  # it might be 3.14
    assert cutter.feed(" How") == ["Hello there."]
    assert cutter.finish() == ["How"]


def test_long_sentences_are_cut_at_commas_then_between_words_then_anywhere() -> None:
    assert cut(["one two, three four five six"], 20) == ["one two, three four", "five six"]
    assert cut(["one two three four, five six"], 20) == ["one two three four,", "five six"]
    assert cut(["a" * 25], 10) == ["a" * 10, "a" * 10, "a" * 5]


@quick
@given(texts, st.integers(1, 40))
def test_no_character_is_lost_or_moved(text: str, most: int) -> None:
    rest = text
    for piece in cut([text], most):
        assert piece
        assert piece == piece.strip()
        assert len(piece) <= most
        rest = rest.lstrip()
        assert rest.startswith(piece)
        rest = rest[len(piece) :]
    assert not rest.strip()


@quick
@given(texts, st.integers(1, 40), st.lists(st.integers(0, 100), max_size=8))
def test_how_the_text_came_does_not_matter(text: str, most: int, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert cut(pieces, most) == cut([text], most)


def test_bad_inputs() -> None:
    with pytest.raises(InputError, match="most"):
        sentences(0)
    with pytest.raises(InputError, match="only texts have sentences, not dict"):
        sentences()().feed({})
