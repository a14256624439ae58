"""Voice activity: the rules by themselves, and the real model on speech, silence and noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnxruntime", reason="needs the extra 'components'")

from atoll.components.base import BadInputError, Setup
from atoll.components.hibari import Hibari
from atoll.components.silero import SileroVad, VoiceRules, speech_segments
from atoll.components.sound import Samples, resample
from atoll.core.errors import InputError
from tests.components.loading import ask, loaded, recording

PLAIN = VoiceRules(speech_s=0.2, silence_s=0.2, margin_s=0.0)


def segments(*frames: float, rules: VoiceRules = PLAIN) -> list[tuple[float, float]]:
    """Find speech in frames of 0.1 s."""
    found = speech_segments(np.array(frames, np.float32), 0.1, rules, len(frames) * 0.1)
    return [(round(start, 3), round(end, 3)) for start, end in found]


def test_speech_begins_high_and_ends_low() -> None:
    assert segments(0, 0.4, 0.6, 0.4, 0.4, 0.4, 0.1, 0.1, 0.4) == [(0.2, 0.6)]


def test_short_pauses_are_bridged_and_short_noises_dropped() -> None:
    assert segments(1, 1, 0, 1, 1, 0, 0, 0) == [(0.0, 0.5)]
    assert segments(0, 1, 0, 0, 0, 1, 1, 0, 0) == [(0.5, 0.7)]


def test_speech_may_last_to_the_end() -> None:
    assert segments(0, 0, 1, 1) == [(0.2, 0.4)]
    assert segments(0, 0, 1, 1, 0) == [(0.2, 0.5)]
    assert segments() == []


def test_margins_share_what_is_between() -> None:
    rules = VoiceRules(speech_s=0.2, silence_s=0.2, margin_s=0.3)
    assert segments(0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, rules=rules) == [(0.0, 0.4), (0.4, 1.0)]


@given(st.lists(st.floats(0, 1, width=32), max_size=60), st.floats(0, 0.3), st.floats(0, 0.3))
def test_segments_are_in_order_and_inside(
    frames: list[float], speech: float, margin: float
) -> None:
    rules = VoiceRules(speech_s=speech, margin_s=margin)
    total_s = len(frames) * 0.032
    found = speech_segments(np.array(frames, np.float32), 0.032, rules, total_s)
    edges = [edge for segment in found for edge in segment]
    assert edges == sorted(edges)
    assert all(0 <= edge <= total_s for edge in edges)
    assert bool(found) <= (max(frames, default=0) >= rules.begin)


@pytest.mark.parametrize(
    "options",
    [{"begin": 1.5}, {"begin": 0.3}, {"speech_s": -1}, {"silence_s": "1"}, {"end": True}],
)
def test_rules_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        SileroVad.load(Setup(options=options))


def listen(samples: Samples, rate_hz: int) -> dict[str, Any]:
    audio = {"samples": samples, "rate_hz": rate_hz}
    (found,) = ask(SileroVad, {"audio": audio})
    assert isinstance(found, dict)
    return found


def test_speech_between_silence_is_found() -> None:
    (spoken,) = ask(Hibari, {"text": "The weather is fine today."})
    speech = spoken["samples"]
    silence = np.zeros(24_000, np.float32)
    found = listen(np.concatenate([silence, speech, silence]), 24_000)
    first, last = 1.0 + np.flatnonzero(np.abs(speech) > 0.01)[[0, -1]] / 24_000
    assert found["segments"][0][0] == pytest.approx(first, abs=0.1)
    assert found["segments"][-1][1] == pytest.approx(
        last, abs=0.2
    )  # speech fades, and frames are long
    lengths = [end - start for start, end in found["segments"]]
    assert found["speech_s"] == pytest.approx(sum(lengths), abs=0.01)
    assert found["speech_s"] > 0.7 * (last - first)


def test_sentences_of_a_recording_are_found_at_any_rate() -> None:
    samples, rate_hz = recording("beckett.wav")
    here = listen(samples, rate_hz)
    assert len(here["segments"]) == 6
    assert listen(samples, rate_hz) == here
    there = listen(resample(samples, rate_hz, 48_000), 48_000)
    np.testing.assert_allclose(there["segments"], here["segments"], atol=0.07)


@pytest.mark.parametrize("loudness", [0.0, 0.001, 0.1])
def test_silence_and_noise_are_no_speech(loudness: float) -> None:
    noise = np.random.default_rng(5).normal(size=32_000) * loudness
    assert listen(noise.astype(np.float32), 16_000) == {"segments": [], "speech_s": 0.0}


def test_blocks_cannot_be_seen() -> None:
    """The model is asked for 16 s at once; a sound longer than that is judged as in one go."""
    samples, _ = recording("beckett.wav")
    twice = np.concatenate([samples, samples])
    vad = loaded(SileroVad)
    whole = vad.probabilities(twice)
    assert whole.size == -(-twice.size // 512) > 512
    np.testing.assert_array_equal(whole[:300], vad.probabilities(twice[: 300 * 512]))


def test_bad_sounds_are_refused_and_the_example_is_not() -> None:
    vad = loaded(SileroVad)
    stereo = {"audio": {"samples": np.zeros((100, 2), np.float32), "rate_hz": 16_000}}
    single = {"audio": {"samples": np.zeros(1, np.float32), "rate_hz": 8_000}}
    error, found, tiny = ask(SileroVad, stereo, vad.example(), single)
    assert isinstance(error, BadInputError)
    assert error.param == "audio.samples"
    assert found == tiny == {"segments": [], "speech_s": 0.0}
