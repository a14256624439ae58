"""Sound: what is refused, what resampling keeps and removes, where long sounds are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.components.base import BadInputError
from atoll.components.sound import Samples, cut_at_quiet, read_sound, resample


def tone(hz: float, rate_hz: int, seconds: float = 0.5) -> Samples:
    return np.cos(2 * np.pi * hz * np.arange(int(seconds * rate_hz)) / rate_hz).astype(np.float32)


def sound(samples: Any, rate_hz: Any = 16_000) -> dict[str, Any]:
    return {"samples": samples, "rate_hz": rate_hz}


GOOD = np.zeros(1600, np.float32)


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        (None, "audio", "samples"),
        ({"samples": GOOD}, "audio", "rate_hz"),
        (sound(GOOD, "16000"), "audio.rate_hz", "whole number"),
        (sound(GOOD, True), "audio.rate_hz", "whole number"),
        (sound(GOOD, 16_000.0), "audio.rate_hz", "whole number"),
        (sound(GOOD, 7_999), "audio.rate_hz", "8000 to 192000"),
        (sound(GOOD, 10**12), "audio.rate_hz", "8000 to 192000"),
        (sound(GOOD, -16_000), "audio.rate_hz", "8000 to 192000"),
        (sound([0.0, 0.1]), "audio.samples", "float32, not list"),
        (sound(GOOD.astype(np.float64)), "audio.samples", "float32, not float64"),
        (sound(GOOD.astype(np.int16)), "audio.samples", "float32, not int16"),
        (sound(GOOD.reshape(-1, 2)), "audio.samples", "mono"),
        (sound(GOOD[:0]), "audio.samples", "empty"),
        (sound(np.float32(0.0)), "audio.samples", "float32"),
        (sound(np.full(9, np.nan, np.float32)), "audio.samples", "finite"),
        (sound(np.array([0, np.inf], np.float32)), "audio.samples", "finite"),
        (sound(np.array([0, 32767], np.float32)), "audio.samples", "fractions of full scale"),
        (sound(np.zeros(32_001, np.float32)), "audio.samples", "at most 2 s"),
    ],
)
def test_what_is_no_sound_is_refused(value: object, param: str, says: str) -> None:
    with pytest.raises(BadInputError, match=says) as caught:
        read_sound(value, max_s=2.0)
    assert caught.value.param == param


def test_the_longest_sound_is_taken_as_it_is() -> None:
    samples = np.linspace(-1, 1, 32_000, dtype=np.float32)
    samples.flags.writeable = False
    taken, rate_hz = read_sound(sound(samples, np.int64(16_000)), max_s=2.0)
    assert taken is samples
    assert (rate_hz, type(rate_hz)) == (16_000, int)


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 44_117])
@pytest.mark.parametrize("hz", [0, 100, 1_000, 3_200])
def test_resampling_keeps_what_both_rates_carry(rate_hz: int, hz: int) -> None:
    got = resample(tone(hz, rate_hz), rate_hz, 16_000)
    wanted = tone(hz, 16_000, 0.6)[: got.size]
    inner = slice(200, -200)  # at the ends, half of the filter sees nothing
    assert np.abs(got - wanted)[inner].max() < 1e-3


def test_resampling_removes_what_the_new_rate_cannot_carry() -> None:
    for hz in (8_500, 10_000, 15_000):
        assert np.abs(resample(tone(hz, 48_000), 48_000, 16_000)[200:-200]).max() < 1e-3


@given(
    size=st.integers(1, 20_000),
    rate_hz=st.sampled_from([8_000, 16_000, 22_050, 44_100, 48_000, 96_000]),
    wanted_hz=st.sampled_from([8_000, 16_000, 24_000, 48_000]),
)
def test_resampling_keeps_the_length_in_time(size: int, rate_hz: int, wanted_hz: int) -> None:
    got = resample(np.ones(size, np.float32), rate_hz, wanted_hz)
    assert got.size == -(-size * wanted_hz // rate_hz)
    assert got.dtype == np.float32
    assert np.isfinite(got).all()


def test_resampling_in_blocks_cannot_be_seen() -> None:
    """A sound longer than a block begins as a shorter one does."""
    noise = np.random.default_rng(3).normal(size=60_000).astype(np.float32)
    long, short = resample(noise, 44_100, 16_000), resample(noise[:30_000], 44_100, 16_000)
    np.testing.assert_array_equal(long[:10_000], short[:10_000])


@given(
    size=st.integers(1, 50_000),
    max_s=st.floats(0.05, 3.0),
    quiet=st.lists(st.integers(0, 50_000), max_size=5),
    seed=st.integers(0, 10),
)
def test_pieces_are_the_whole_again(size: int, max_s: float, quiet: list[int], seed: int) -> None:
    samples = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    for start in quiet:
        samples[start : start + 2_000] = 0
    pieces = cut_at_quiet(samples, 8_000, max_s)
    np.testing.assert_array_equal(np.concatenate(pieces), samples)
    assert max(piece.size for piece in pieces) <= max_s * 8_000
    if len(pieces) > 1:
        assert min(piece.size for piece in pieces) >= min(1.0, max_s / 4) * 8_000 - 1


def test_cuts_are_where_it_is_quiet() -> None:
    samples = np.random.default_rng(1).normal(size=16_000 * 25).astype(np.float32)
    for second in (8, 17):
        samples[second * 16_000 : second * 16_000 + 4_800] *= 0.01
    pieces = cut_at_quiet(samples, 16_000, 10.0)
    cuts = np.cumsum([piece.size for piece in pieces])[:-1] / 16_000
    assert len(cuts) == 2
    assert 8.0 < cuts[0] < 8.3
    assert 17.0 < cuts[1] < 17.3


def test_a_short_sound_is_one_piece() -> None:
    (piece,) = cut_at_quiet(GOOD, 16_000, 30.0)
    assert piece is GOOD
    with pytest.raises(BadInputError, match="too short"):
        cut_at_quiet(GOOD, 16_000, 0.0)
