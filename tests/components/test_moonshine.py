"""Moonshine with its real weights: what it hears, the same each time; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs the extra 'components'")

from atoll.components.base import BadInputError, Setup
from atoll.components.moonshine import (
    MAX_S,
    MoonshineDecoder,
    MoonshineEncoder,
    TokenPieces,
    frames_of,
)
from atoll.components.sound import Samples, cut_at_quiet, resample
from atoll.core.errors import InputError
from atoll.engine.engine_errors import WeightsError
from research.speech.word_errors import word_errors
from tests.components.loading import ask, loaded, recording

BECKETT = "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better."
TWO_CITIES = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of light, "
    "it was the season of darkness, it was the spring of hope, it was the winter of despair, we had "
    "everything before us, we had nothing before us, we were all going direct to heaven, we were all going "
    "direct the other way. In short, the period was so far like the present period, that some of its "
    "noisiest authorities insisted on its being received, for good or for evil, in the superlative degree of "
    "comparison only."
)


def sound(samples: Samples, rate_hz: int) -> dict[str, Any]:
    return {"audio": {"samples": samples, "rate_hz": rate_hz}}


def hear(samples: Samples, rate_hz: int) -> str:
    (states,) = ask(MoonshineEncoder, sound(samples, rate_hz))
    (heard,) = ask(MoonshineDecoder, states)
    text: str = heard["text"]
    return text


def test_a_recording_is_heard_word_for_word_and_the_same_each_time() -> None:
    samples, rate_hz = recording("beckett.wav")
    samples = samples[: 4 * rate_hz]
    samples.flags.writeable = False
    (alone,) = ask(MoonshineEncoder, sound(samples, rate_hz))
    assert alone["samples"] == samples.size
    assert alone["states"].shape == (frames_of(samples.size), 288)
    assert alone["states"].dtype == np.float32
    alone["states"].flags.writeable = False
    (heard,) = ask(MoonshineDecoder, alone)
    assert word_errors("Ever tried. Ever failed. No matter.", heard["text"])[0] == 0
    assert 0 < heard["tokens"] <= 26

    half = sound(samples[: 2 * rate_hz], rate_hz)
    other, again = ask(MoonshineEncoder, half, sound(samples, rate_hz))
    assert again["states"].tobytes() == alone["states"].tobytes()
    assert ask(MoonshineDecoder, other, again)[1] == heard


@pytest.mark.slow
def test_the_whole_recording_is_heard_at_any_rate() -> None:
    samples, rate_hz = recording("beckett.wav")
    assert word_errors(BECKETT, hear(samples, rate_hz))[0] == 0
    assert word_errors(BECKETT, hear(resample(samples, rate_hz, 44_100), 44_100))[0] == 0


@pytest.mark.slow
def test_a_long_recording_is_heard_in_pieces() -> None:
    samples, rate_hz = recording("two_cities.wav")
    pieces = cut_at_quiet(samples, rate_hz, 20.0)
    assert len(pieces) == 3
    errors, words = word_errors(TWO_CITIES, " ".join(hear(piece, rate_hz) for piece in pieces))
    assert errors / words <= 0.05


def test_examples_can_be_run() -> None:
    (states,) = ask(MoonshineEncoder, loaded(MoonshineEncoder).example())
    assert states["states"].shape == (frames_of(8_000), 288)
    (heard,) = ask(MoonshineDecoder, loaded(MoonshineDecoder).example())
    assert isinstance(heard["text"], str)


@pytest.mark.parametrize("size", [1, 100, 1_000, 7_999, 8_000, 8_001])
def test_the_shortest_sounds_are_filled_up(size: int) -> None:
    (states,) = ask(MoonshineEncoder, sound(np.zeros(size, np.float32), 16_000))
    assert states["samples"] == max(size, 8_000)
    assert states["states"].shape[0] == frames_of(states["samples"])


def test_a_bad_sound_does_not_spoil_a_good_one() -> None:
    good = sound(np.zeros(8_000, np.float32), 16_000)
    bad = sound(np.full(8_000, np.nan, np.float32), 16_000)
    long = sound(np.zeros(int(MAX_S * 8_000) + 1, np.float32), 8_000)
    none, first, too_long, missing = ask(MoonshineEncoder, bad, good, long, {})
    assert isinstance(none, BadInputError)
    assert none.param == "audio.samples"
    assert first["samples"] == 8_000
    assert isinstance(too_long, BadInputError)
    assert "at most 64 s" in too_long.message
    assert isinstance(missing, BadInputError)
    assert missing.param == "audio"


STATES = np.zeros((frames_of(8_000), 288), np.float32)


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        ({}, "samples"),
        ({"states": STATES, "samples": "8000"}, "samples"),
        ({"states": STATES, "samples": True}, "samples"),
        ({"states": STATES, "samples": 10**9}, "samples"),
        ({"states": STATES, "samples": 7_999}, "samples"),
        ({"states": STATES, "samples": 16_000}, "states"),
        ({"states": STATES.tolist(), "samples": 8_000}, "states"),
        ({"states": STATES.astype(np.float16), "samples": 8_000}, "states"),
        ({"states": STATES[:, :100], "samples": 8_000}, "states"),
        ({"states": STATES[None], "samples": 8_000}, "states"),
        ({"states": STATES + np.nan, "samples": 8_000}, "states"),
    ],
)
def test_what_are_no_states_is_refused(inputs: dict[str, Any], param: str) -> None:
    (error,) = ask(MoonshineDecoder, inputs)
    assert isinstance(error, BadInputError)
    assert error.param == param


@pytest.mark.slow
def test_a_text_has_no_more_tokens_than_can_be_said() -> None:
    """States of nothing make the model talk without end."""
    loaded(MoonshineDecoder)
    chatty = MoonshineDecoder.load(Setup(options={"tokens_per_s": 20}))
    (heard,) = chatty.run([chatty.example()])
    assert isinstance(heard, dict)
    assert heard["tokens"] == 10
    with pytest.raises(InputError, match=r"1\.\.50"):
        MoonshineDecoder.load(Setup(options={"tokens_per_s": 1_000}))


def vocabulary(path: Path, *, tokens: int = 32_768) -> Path:
    parts = [b"<unk>", b"<s>", b"</s>", *(bytes([number]) for number in range(256))]
    parts += ["\u2581hello".encode(), "\u2581world".encode(), b"!", b"x" * 300]
    parts += [b"<<ST_%d>>" % number for number in range(tokens - len(parts))]
    data = bytearray()
    for part in parts:
        if len(part) < 128:
            data.append(len(part))
        else:
            data += bytes([len(part) % 128 + 128, len(part) // 128])
        data += part
    path.write_bytes(data)
    return path


def test_the_vocabulary_is_read(tmp_path: Path) -> None:
    pieces = TokenPieces.read(vocabulary(tmp_path / "v.bin"))
    assert pieces.text([1, 259, 260, 261, 300, 2]) == "hello world!"
    assert pieces.text([262]) == "x" * 300
    assert pieces.text([3 + byte for byte in "\u00e9<".encode()]) == "\u00e9<"
    assert pieces.text([259, 3 + 0xC3]) == "hello\ufffd"
    assert pieces.text([]) == ""


def test_a_broken_vocabulary_is_refused(tmp_path: Path) -> None:
    path = vocabulary(tmp_path / "v.bin", tokens=300)
    with pytest.raises(WeightsError, match="300 tokens"):
        TokenPieces.read(path)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(WeightsError, match="within a token"):
        TokenPieces.read(path)
    path.write_bytes(b"\x80")
    with pytest.raises(WeightsError, match="within a length"):
        TokenPieces.read(path)
