"""Moonshine tiny for English: speech into states, and states into text, as two components.

Both models are quantised by the range of their whole input, so a batch of several would change each: they
run one by one. The model was trained on sounds of up to 30 s; longer ones work less well and cost more per
second; `atoll.components.sound.cut_at_quiet` cuts them. In silence it hears words that nobody said: ask a
voice detector first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.component_weights import MOONSHINE
from atoll.components.onnx import OnnxModel
from atoll.components.sound import Samples, read_sound, resample
from atoll.core.errors import InputError
from atoll.engine.engine_errors import WeightsError

RATE_HZ = 16_000
"""Sample rate that the encoder takes, in Hz."""
MAX_S = 64.0
"""The longest sound that is taken, in seconds."""
WIDTH = 288
"""Numbers in one state of the encoder."""
TOKENS_PER_S = 6.5
"""The most tokens for a second of sound: beyond what anybody says, the model repeats itself."""
_MIN_SAMPLES = RATE_HZ // 2
"""Shorter sounds are filled up with silence: there is little in them, and too little makes no state."""
_MIN_TOKENS = 8
_HEADS = 8
_HEAD_WIDTH = 36
_START = 1
_END = 2
"""Tokens that begin and end a text."""
_BYTES = range(3, 259)
"""Tokens for single bytes, of which texts outside the vocabulary are made."""
_TOKENS = 32_768


def frames_of(samples: int) -> int:
    """Return how many states the encoder gives for so many samples: three convolutions, without padding."""
    frames = samples
    # Width and step of each convolution.
    for width, step in ((127, 64), (7, 3), (3, 2)):
        frames = (frames - width) // step + 1
    return frames


class MoonshineEncoder(BatchComponent):
    """Sound into states: {"states": float32 [t, 288], "samples": of 16 kHz}; t is about 41 a second."""

    name = "moonshine-encoder"
    max_batch = 1

    def __init__(self, model: OnnxModel) -> None:
        self._model = model

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Fetch and load the encoder (13 MB)."""
        path = MOONSHINE.file("encoder_model.ort")
        # Working memory grows with the square of the length: what a long sound took is given back.
        return cls(OnnxModel(path, threads=setup.threads, keep_memory=False, needed_for=cls.name))

    def example(self) -> Inputs:
        """Return half a second of silence."""
        return {"audio": {"samples": np.zeros(_MIN_SAMPLES, np.float32), "rate_hz": RATE_HZ}}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Encode sounds, one by one."""
        return [_answer(self._encode, inputs) for inputs in batch]

    def _encode(self, inputs: Inputs) -> Output:
        heard, rate_hz = read_sound(inputs.get("audio"), max_s=MAX_S)
        samples: Samples = resample(heard, rate_hz, RATE_HZ)
        # Fill up what is too short to give a state.
        if samples.size < _MIN_SAMPLES:
            samples = np.pad(samples, (0, _MIN_SAMPLES - samples.size))
        whole = np.ones((1, samples.size), np.int64)
        (states,) = self._model.run({"input_values": samples[None], "attention_mask": whole})
        return {"states": states[0], "samples": int(samples.size)}


class MoonshineDecoder(BatchComponent):
    """States into text, the likeliest token at each step: {"text": str, "tokens": int}.

    Options: tokens_per_s, the most tokens for a second of sound (6.5).
    """

    name = "moonshine-decoder"
    max_batch = 1

    def __init__(
        self, model: OnnxModel, pieces: TokenPieces, *, tokens_per_s: float = TOKENS_PER_S
    ) -> None:
        self._model = model
        self._pieces = pieces
        self._tokens_per_s = tokens_per_s
        self._own = [name for name in model.outputs if ".decoder." in name]
        self._heard = [name for name in model.outputs if ".encoder." in name]

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Fetch and load the decoder (30 MB) and its vocabulary."""
        tokens_per_s = setup.option("tokens_per_s", TOKENS_PER_S)
        if not isinstance(tokens_per_s, int | float) or not 1 <= tokens_per_s <= 50:
            raise InputError(
                f"must be a number in 1..50, not {tokens_per_s!r}", field="tokens_per_s"
            )
        files = MOONSHINE.fetch()
        return cls(
            OnnxModel(
                files["decoder_model_merged.ort"], threads=setup.threads, needed_for=cls.name
            ),
            TokenPieces.read(files["tokenizer.bin"]),
            tokens_per_s=tokens_per_s,
        )

    def example(self) -> Inputs:
        """Return states as of half a second of nothing."""
        states = np.zeros((frames_of(_MIN_SAMPLES), WIDTH), np.float32)
        return {"states": states, "samples": _MIN_SAMPLES}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Decode states, one by one."""
        return [_answer(self._decode, inputs) for inputs in batch]

    def _decode(self, inputs: Inputs) -> Output:
        states, samples = _read_states(inputs)
        max_tokens = max(_MIN_TOKENS, ceil(self._tokens_per_s * samples / RATE_HZ))
        tokens = self._tokens(states, samples, max_tokens)
        return {"text": self._pieces.text(tokens), "tokens": len(tokens)}

    def _tokens(self, states: NDArray[np.float32], samples: int, max_tokens: int) -> list[int]:
        """Return the tokens up to the end of the text, `max_tokens` at most.

        The first step makes keys and values of what was heard, which later steps get again; theirs are empty.
        """
        empty = np.zeros((1, _HEADS, 0, _HEAD_WIDTH), np.float32)
        feeds: dict[str, Any] = {name: empty for name in self._model.inputs if "past" in name}
        feeds["encoder_hidden_states"] = states[None]
        feeds["encoder_attention_mask"] = np.ones((1, samples), np.int64)
        feeds["use_cache_branch"] = np.array([False])
        kept = [*self._own, *self._heard]
        tokens: list[int] = []
        # One token at a time; the end comes early where the text does.
        for _ in range(max_tokens):
            feeds["input_ids"] = np.array([tokens[-1:] or [_START]], np.int64)
            logits, *present = self._model.run(feeds, ["logits", *kept])
            token = int(logits[0, -1].argmax())
            if token == _END:
                break
            tokens.append(token)
            for name, value in zip(kept, present, strict=True):
                feeds[name.replace("present", "past_key_values")] = value
            feeds["use_cache_branch"] = np.array([True])
            # Keys and values of what was heard stay as they are after the first step.
            kept = self._own
        return tokens


class TokenPieces:
    """The bytes of each token of the vocabulary."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = [self._readable(number, piece) for number, piece in enumerate(pieces)]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a vocabulary: for each token the length of its bytes, then these.

        Lengths below 128 take one byte; longer ones two, the low seven bits first, with the high bit set.
        """
        data = path.read_bytes()
        pieces: list[bytes] = []
        at = 0
        while at < len(data):
            length = data[at]
            at += 1
            if length >= 128:
                if at == len(data):
                    raise WeightsError("the vocabulary ends within a length", path=path.name)
                length += 128 * (data[at] - 1)
                at += 1
            if at + length > len(data):
                raise WeightsError("the vocabulary ends within a token", path=path.name)
            pieces.append(data[at : at + length])
            at += length
        if len(pieces) != _TOKENS:
            raise WeightsError(
                f"the vocabulary has {len(pieces)} tokens, not {_TOKENS}", path=path.name
            )
        return cls(pieces)

    @staticmethod
    def _readable(number: int, piece: bytes) -> bytes:
        """Return what a token adds to a text: marks, as the end of a text, add nothing."""
        if number in _BYTES:
            return piece
        if number < _BYTES.start or piece.startswith(b"<<ST_"):
            return b""
        return piece.replace("\u2581".encode(), b" ")

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are no text are shown as such."""
        return b"".join(self._pieces[token] for token in tokens).decode(errors="replace").strip()


def _answer(run: Callable[[Inputs], Output], inputs: Inputs) -> Output | BadInputError:
    try:
        return run(inputs)
    except BadInputError as error:
        return error


def _read_states(inputs: Inputs) -> tuple[NDArray[np.float32], int]:
    states, samples = inputs.get("states"), inputs.get("samples")
    if isinstance(samples, bool) or not isinstance(samples, int):
        raise BadInputError("samples must be a whole number, as the encoder gives it", "samples")
    if not _MIN_SAMPLES <= samples <= MAX_S * RATE_HZ:
        raise BadInputError(
            f"samples must be {_MIN_SAMPLES} to {MAX_S * RATE_HZ:.0f}, not {samples}", "samples"
        )
    if not isinstance(states, np.ndarray) or states.dtype != np.float32:
        kind = states.dtype if isinstance(states, np.ndarray) else type(states).__name__
        raise BadInputError(f"states must be an array of float32, not {kind}", "states")
    wanted = (frames_of(samples), WIDTH)
    if states.shape != wanted:
        raise BadInputError(
            f"states of {samples} samples have the shape {list(wanted)}, not {list(states.shape)}",
            "states",
        )
    if not np.isfinite(states).all():
        raise BadInputError("states must be finite", "states")
    return states, samples
