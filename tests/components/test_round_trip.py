"""Hibari speaks and Moonshine hears: an end-to-end test without a person."""

from __future__ import annotations

import pytest

pytest.importorskip("hibari", reason="needs the extra 'components'")

from atoll.components.hibari import Hibari
from atoll.components.moonshine import MoonshineDecoder, MoonshineEncoder
from research.speech.word_errors import word_errors
from tests.components.loading import ask

SENTENCES = (
    "The weather is fine today.",
    "Please call me back at seven thirty in the morning.",
    "She bought four apples and 23 oranges at the market.",
    "Every model runs on a machine of its own.",
    "A small boat crossed the quiet lake before sunrise.",
    "How many people live in this city?",
    "The train to London leaves from platform nine.",
    "Thank you very much for your help, Doctor Brown.",
)


def error_rate(sentences: tuple[str, ...]) -> float:
    errors = words = 0
    for sentence in sentences:
        (spoken,) = ask(Hibari, {"text": sentence})
        (states,) = ask(MoonshineEncoder, {"audio": spoken})
        (heard,) = ask(MoonshineDecoder, states)
        wrong, said = word_errors(sentence, heard["text"])
        errors, words = errors + wrong, words + said
    return errors / words


def test_what_is_said_is_heard() -> None:
    assert error_rate(SENTENCES[:2]) <= 0.1


@pytest.mark.slow
def test_all_that_is_said_is_heard() -> None:
    assert error_rate(SENTENCES) <= 0.1
