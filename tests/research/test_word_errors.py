"""What was said and what was heard, word by word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.speech.word_errors import word_errors, words_of


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("Hello, World!", "hello world"),
        ("Don't; it\u2019s well-known.", "dont its well known"),
        ("Mr. Brown & Dr. Smith", "mister brown and doctor smith"),
        ("0 7 13 20 42 99", "zero seven thirteen twenty forty two ninety nine"),
        ("100 1,250 3,000,001", "one hundred one thousand two hundred fifty three million one"),
        ("in 1998 and 1905", "in nineteen ninety eight and nineteen oh five"),
        ("1900, 2024, 2007", "nineteen hundred twenty twenty four two thousand seven"),
        ("the 1st, 3rd, 12th, 20th and 21st", "the first third twelfth twentieth and twenty first"),
        ("3.14 and 50%", "three point one four and fifty percent"),
        ("$1, $9.99", "one dollar nine dollars and ninety nine cents"),
        ("$1,000.00 and $2.5", "one thousand dollars and two dollars five"),
        ("at 7:30, 8:00 and 9:05", "at seven thirty eight and nine oh five"),
        ("007 7up", "zero zero seven 7up"),
        ("...", ""),
        ("\u00e9t\u00e9 \u4f60\u597d", "\u00e9t\u00e9 \u4f60\u597d"),
    ],
)
def test_words_are_written_as_they_are_spoken(text: str, spoken: str) -> None:
    assert words_of(text) == spoken.split()


@pytest.mark.parametrize(
    ("said", "heard", "errors", "words"),
    [
        ("one two three", "One, 2, three.", 0, 3),
        ("a b c d", "a x c d", 1, 4),
        ("a b c d", "a c d", 1, 4),
        ("a b", "a x y b", 2, 2),
        ("a b c", "b c a", 2, 3),
        ("", "a b", 2, 0),
        ("a b", "", 2, 2),
        ("call at seven thirty", "Call at 7:30.", 0, 4),
    ],
)
def test_errors_are_the_fewest_changes(said: str, heard: str, errors: int, words: int) -> None:
    assert word_errors(said, heard) == (errors, words)


texts = st.lists(st.sampled_from("abcd"), max_size=8).map(" ".join)


@given(texts, texts, texts)
def test_errors_are_a_distance(one: str, other: str, third: str) -> None:
    errors, words = word_errors(one, other)
    assert words == len(one.split())
    assert (errors == 0) == (one == other)
    assert errors == word_errors(other, one)[0]
    assert errors <= word_errors(one, third)[0] + word_errors(third, other)[0]
    assert abs(words - len(other.split())) <= errors <= max(words, len(other.split()))


@given(
    st.text(
        alphabet="aZ \n09.,:$%&'-_\u00e9\u00df\u0130\u2019\u00b2\u0663\u4f60\U0001f600", max_size=60
    )
)
def test_any_text_has_words(text: str) -> None:
    words = words_of(text)
    assert all(word and not word.isspace() for word in words)
    assert word_errors(text, text) == (0, len(words))


@given(st.text(alphabet="ab 19.,:$%'", max_size=30))
def test_words_spoken_stay_as_they_are(text: str) -> None:
    once = words_of(text)
    assert words_of(" ".join(once)) == once
