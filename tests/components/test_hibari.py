"""Hibari with its real voice: the same sound for the same text, within bounds whatever the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("hibari", reason="needs the extra 'components'")

from atoll.components.base import BadInputError, Setup
from atoll.components.hibari import Hibari, _cut_phonemes, _readable
from atoll.components.sound import Samples
from atoll.core.errors import InputError, UnknownNameError
from tests.components.loading import ask, loaded


def say(text: str, **more: Any) -> Samples:
    (spoken,) = ask(Hibari, {"text": text, **more})
    assert spoken["rate_hz"] == 24_000
    samples: Samples = spoken["samples"]
    assert samples.dtype == np.float32
    assert np.abs(samples).max() <= 1.0
    return samples


def test_a_text_sounds_the_same_alone_and_in_a_batch() -> None:
    alone = say("Good morning.")
    assert 0.5 < alone.size / 24_000 < 3
    assert np.abs(alone).max() > 0.05
    batch = ask(Hibari, {"text": "Go."}, {"text": "Good morning.", "voice": "heart"})
    assert batch[1]["samples"].tobytes() == alone.tobytes()


def test_a_sentence_sounds_the_same_wherever_it_stands() -> None:
    both = say("Good morning. Come in!")
    np.testing.assert_array_equal(both, np.concatenate([say("Good morning."), say("Come in!")]))


def test_speed() -> None:
    slow, usual, fast = (say("Good morning.", speed=speed).size for speed in (0.5, 1, 1.5))
    assert 1.8 < slow / usual < 2.2
    assert 0.5 < fast / usual < 0.8


@pytest.mark.parametrize(
    ("inputs", "param", "says"),
    [
        ({}, "text", "no text"),
        ({"text": None}, "text", "no text"),
        ({"text": b"Hello"}, "text", "no text"),
        ({"text": " \n\t"}, "text", "no text"),
        ({"text": "a" * 4_097}, "text", "at most 4096"),
        ({"text": "Hi", "voice": "alloy"}, "voice", "there are: heart"),
        ({"text": "Hi", "voice": ""}, "voice", "there are: heart"),
        ({"text": "Hi", "speed": 0.2}, "speed", "0.25..4.0"),
        ({"text": "Hi", "speed": 4.1}, "speed", "0.25..4.0"),
        ({"text": "Hi", "speed": float("nan")}, "speed", "0.25..4.0"),
        ({"text": "Hi", "speed": "1"}, "speed", "0.25..4.0"),
        ({"text": "Hi", "speed": True}, "speed", "0.25..4.0"),
    ],
)
def test_what_cannot_be_spoken_is_refused(inputs: dict[str, Any], param: str, says: str) -> None:
    error, good = ask(Hibari, inputs, {"text": "Hi."})
    assert isinstance(error, BadInputError)
    assert error.param == param
    assert says in error.message
    assert good["samples"].size


def test_a_voice_that_is_no_name_is_refused() -> None:
    for voice in (["heart"], {"id": "heart"}, None, 3):
        (error,) = ask(Hibari, {"text": "Hi.", "voice": voice})
        assert isinstance(error, BadInputError)
        assert error.param == "voice"


def test_voices_are_chosen_when_loading() -> None:
    assert loaded(Hibari).voices == ("heart",)
    with pytest.raises(UnknownNameError, match="voice"):
        Hibari.load(Setup(options={"voices": ["nobody"]}))
    with pytest.raises(InputError, match="list"):
        Hibari.load(Setup(options={"voices": "heart"}))


@pytest.mark.parametrize("text", ["\U0001f600", "\u4f60\u597d", "\x00\x01"])
def test_what_has_no_sound_is_a_short_silence(text: str) -> None:
    samples = say(text)
    assert samples.size == 2_400
    assert not samples.any()


@pytest.mark.parametrize(
    "text", ["1-2-" * 15, "9" * 60, "1," * 30, "$" * 60, "/" * 60, "a@b." * 15]
)
def test_texts_that_no_person_writes_are_read_all_the_same(text: str) -> None:
    """Without breaks, some of these take the package minutes when they are longer, others make it fail."""
    assert say(text).size


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["1-2-" * 1_000, "9" * 4_000, "word " * 800, "(" * 4_000, "x1" * 2_000]
)
def test_the_longest_texts_are_read(text: str) -> None:
    assert loaded(Hibari)._phonemes(text, "heart")


@given(st.text(alphabet="ab1-/.$@ \n\u00e9", max_size=300))
def test_breaks_are_put_in_and_nothing_else_changes(text: str) -> None:
    readable = _readable(text)
    assert max(map(len, readable.split()), default=0) <= 32
    assert readable.replace(" ", "") == text.replace(" ", "")
    assert readable == text or any(len(word) > 15 for word in text.split())


@given(st.text(alphabet="abc, ;", max_size=200), st.integers(4, 60))
def test_phonemes_are_cut_between_words(phonemes: str, most: int) -> None:
    parts = list(_cut_phonemes(phonemes, most))
    assert all(0 < len(part) <= most for part in parts)
    assert "".join(parts).replace(" ", "") == phonemes.replace(" ", "")
