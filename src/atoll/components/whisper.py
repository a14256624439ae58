"""Speech written down by Whisper: its encoder and its decoder, by transformers, which may run apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.sound import read_sound, resample
from atoll.components.transformers_parts import ModelPart, load_part

_MAX_S = 30.0
"""Sound that one pass hears; tasks are given longer ones in pieces."""


class WhisperEncoder(BatchComponent):
    """audio: a sound of at most 30 s -> {"states": float32 [positions, width], "samples": at 16 kHz}."""

    name: ClassVar[str] = "whisper-encoder"
    max_batch: ClassVar[int] = 8

    def __init__(self, part: ModelPart, extractor: Any) -> None:
        self._part = part
        self._extractor = extractor

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Read the encoder of a checkpoint, and how it wants its sounds."""
        part = load_part(setup, cls.name, "audio", tower=True)
        from transformers import WhisperFeatureExtractor

        return cls(
            part, WhisperFeatureExtractor.from_pretrained(part.folder, local_files_only=True)
        )

    def example(self) -> Inputs:
        """Return a tenth of a second of silence."""
        return {"audio": {"samples": np.zeros(1600, np.float32), "rate_hz": 16_000}}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Hear sounds together; each is silence up to 30 s, as the model was taught."""
        import torch

        rate_hz = self._extractor.sampling_rate
        outputs: list[Output | BadInputError] = []
        sounds: dict[int, np.ndarray[Any, Any]] = {}
        for place, inputs in enumerate(batch):
            try:
                samples, given_hz = read_sound(inputs.get("audio"), max_s=_MAX_S)
                sounds[place] = resample(samples, given_hz, rate_hz)
                outputs.append(None)
            except BadInputError as error:
                outputs.append(error)
        if not sounds:
            return outputs
        features = self._extractor(
            list(sounds.values()), sampling_rate=rate_hz, return_tensors="pt"
        )["input_features"]
        with torch.inference_mode():
            part = self._part
            heard = part.model.model.encoder(features.to(part.device, part.model.dtype))
            states = heard.last_hidden_state.float().cpu().numpy()
        for (place, samples), rows in zip(sounds.items(), states, strict=True):
            outputs[place] = {"states": np.array(rows), "samples": len(samples)}
        return outputs


class WhisperDecoder(BatchComponent):
    """states: float32 [positions, width] -> {"text", "tokens"}, the likeliest at every step.

    Options beside those of `load_part`: language ("en"), as the model's generation has it; heard if unsaid.
    """

    name: ClassVar[str] = "whisper-decoder"
    max_batch: ClassVar[int] = 8

    def __init__(self, part: ModelPart, tokenizer: Any, language: str | None) -> None:
        self._part = part
        self._tokenizer = tokenizer
        self._language = language

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Read the decoder of a checkpoint, and its tokens."""
        part = load_part(setup, cls.name, "audio", tower=False, options=("language",))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(part.folder, local_files_only=True)
        return cls(part, tokenizer, setup.option("language"))

    def example(self) -> Inputs:
        """Return states of nothing."""
        config = self._part.model.config
        shape = (config.max_source_positions, config.d_model)
        return {"states": np.zeros(shape, np.float32), "samples": 0}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Write down what was heard, together."""
        import torch
        from transformers.modeling_outputs import BaseModelOutput

        wrong = [self._wrong(inputs.get("states")) for inputs in batch]
        outputs: list[Output | BadInputError] = list(wrong)
        good = [place for place, error in enumerate(wrong) if error is None]
        if not good:
            return outputs
        part = self._part
        states = torch.from_numpy(np.stack([batch[place]["states"] for place in good]))
        heard = BaseModelOutput(last_hidden_state=states.to(part.device, part.model.dtype))
        # What is likeliest: temperatures and their fallbacks would make an answer depend on the others.
        options = {} if self._language is None else {"language": self._language}
        with torch.inference_mode():
            written = part.model.generate(encoder_outputs=heard, do_sample=False, **options)
        for place, tokens in zip(good, written.tolist(), strict=True):
            ids = [token for token in tokens if token != part.model.generation_config.pad_token_id]
            text = self._tokenizer.decode(ids, skip_special_tokens=True).strip()
            outputs[place] = {"text": text, "tokens": len(ids)}
        return outputs

    def _wrong(self, states: object) -> BadInputError | None:
        config = self._part.model.config
        shape = (config.max_source_positions, config.d_model)
        if isinstance(states, np.ndarray) and states.shape == shape and states.dtype == np.float32:
            return None
        return BadInputError(f"states have to be float32 {list(shape)}", "states")
