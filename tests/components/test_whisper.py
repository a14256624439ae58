"""Whisper's encoder and decoder apart: together what the whole model hears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra 'engine'")

import torch

from atoll.components.base import BadInputError, Setup
from atoll.components.whisper import WhisperDecoder, WhisperEncoder
from atoll.core.errors import AtollError
from tests.components.asking import ask
from tests.components.checkpoints import write_whisper

pytestmark = pytest.mark.engine


def sound(seconds: float, rate_hz: int = 16_000) -> dict[str, Any]:
    noise = np.random.default_rng(int(seconds)).uniform(-0.5, 0.5, int(seconds * rate_hz))
    return {"audio": {"samples": noise.astype(np.float32), "rate_hz": rate_hz}}


# It warns about its own defaults while it generates.
@pytest.mark.filterwarnings("ignore")
def test_two_parts_hear_what_the_whole_model_hears(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, WhisperFeatureExtractor

    model = write_whisper(tmp_path)
    setup = Setup(options={"model": str(tmp_path)})
    encoder, decoder = WhisperEncoder.load(setup), WhisperDecoder.load(setup)
    sounds = [sound(1), sound(2.5), sound(3)]
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path)
    features = extractor(
        [each["audio"]["samples"] for each in sounds], sampling_rate=16_000, return_tensors="pt"
    ).input_features
    with torch.inference_mode():
        states = model.model.encoder(features).last_hidden_state.numpy()
        written = model.generate(features, do_sample=False).tolist()
    *heard, silent, long = ask(encoder, *sounds, {}, sound(31))
    assert (silent.param, long.param) == ("audio", "audio.samples")
    assert [each["samples"] for each in heard] == [16_000, 40_000, 48_000]
    assert all(np.array_equal(a["states"], b) for a, b in zip(heard, states, strict=True))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    *texts, bad = ask(decoder, *heard, {"states": np.zeros((2, 16), np.float32)})
    assert isinstance(bad, BadInputError)
    expected = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in written]
    assert [each["text"] for each in texts] == expected
    assert len({tuple(tokens) for tokens in written}) > 1
    # A sound at another rate is heard at the model's.
    (other,) = ask(encoder, sound(1, 48_000))
    assert other["samples"] == 16_000
    for part in (encoder, decoder):
        assert not isinstance(ask(part, part.example())[0], BadInputError)


def test_a_tower_of_pictures_is_no_ear(tmp_path: Path) -> None:
    write_whisper(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(AtollError, match="model_type 'qwen2_5_vl' is not known here"):
        WhisperEncoder.load(Setup(options={"model": str(tmp_path)}))
