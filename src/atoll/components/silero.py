"""Silero's voice activity model: where in a sound somebody speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.component_weights import SILERO
from atoll.components.onnx import NeuralNetwork, OnnxModel
from atoll.components.sound import Samples, read_sound, resample
from atoll.core.errors import InputError

RATE_HZ = 16_000
FRAME = 512
"""Samples that are judged together: 32 ms."""
MAX_S = 3_600.0
"""The longest sound that is taken, in seconds."""
_CONTEXT = 64
"""Samples before a frame that the model looks at with it."""
_BLOCK = 512
"""Frames per call of the model: bounds its memory. The cut cannot be seen in the result."""
_STATE = (1, 1, 128)


@dataclass(frozen=True, slots=True)
class VoiceRules:
    """Thresholds of speech detection. Times are in seconds, the others probabilities.

    Speech begins at a frame that is speech with probability `begin` and ends where frames have fallen below
    `end` for `silence_s`. What is shorter than `speech_s` is none. Segments get `margin_s` more at both ends.
    """

    begin: float = 0.5
    end: float = 0.35
    speech_s: float = 0.25
    silence_s: float = 0.1
    margin_s: float = 0.03

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        for field in fields(self):
            value = getattr(self, field.name)
            limit = 10.0 if field.name.endswith("_s") else 1.0
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value <= limit
            ):
                raise InputError(
                    f"must be a number in 0..{limit:g}, not {value!r}", field=field.name
                )
        if self.end > self.begin:
            raise InputError(f"must not be above begin ({self.begin}), not {self.end}", field="end")


def speech_segments(
    probabilities: NDArray[np.float32], frame_s: float, rules: VoiceRules, total_s: float
) -> list[tuple[float, float]]:
    """Return where speech begins and ends, in seconds, from the probability of each frame.

    Between two segments that are close the margins share the gap.
    """
    found: list[tuple[float, float]] = []
    begun: int | None = None
    quiet: int | None = None
    for number, probability in enumerate(probabilities.tolist()):
        # Two thresholds: a frame between them neither begins speech nor ends it.
        if begun is None:
            begun = number if probability >= rules.begin else None
        elif probability >= rules.begin:
            quiet = None
        elif probability < rules.end:
            quiet = number if quiet is None else quiet
            if (number + 1 - quiet) * frame_s >= rules.silence_s:
                found.append((begun * frame_s, quiet * frame_s))
                begun = quiet = None
    # The sound ends while somebody speaks.
    if begun is not None:
        found.append((begun * frame_s, total_s))
    spoken = [(start, min(end, total_s)) for start, end in found if end - start >= rules.speech_s]
    return _with_margins(spoken, rules.margin_s, total_s)


def _with_margins(
    spoken: Sequence[tuple[float, float]], margin_s: float, total_s: float
) -> list[tuple[float, float]]:
    result = []
    for number, (start, end) in enumerate(spoken):
        # Half of the gap at most, so that segments do not overlap.
        before = (start + spoken[number - 1][1]) / 2 if number else 0.0
        after = (end + spoken[number + 1][0]) / 2 if number + 1 < len(spoken) else total_s
        result.append((max(start - margin_s, before), min(end + margin_s, after)))
    return result


class SileroVad(BatchComponent):
    """Sound into where speech is: {"segments": [[start_s, end_s], ...], "speech_s": float}.

    Options: those of `VoiceRules`, by name.
    """

    name = "silero-vad"
    max_batch = 1

    def __init__(self, model: OnnxModel, rules: VoiceRules) -> None:
        self._model = model
        self._rules = rules

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Fetch and load the model (1 MB)."""
        known = {field.name for field in fields(VoiceRules)}
        given: dict[str, Any] = {
            name: value for name, value in (setup.options or {}).items() if name in known
        }
        rules = VoiceRules(**given)
        path = SILERO.file("silero_vad_16k_sequence.onnx")
        return cls(OnnxModel(path, threads=setup.threads, needed_for=cls.name), rules)

    def example(self) -> Inputs:
        """Return half a second of silence."""
        return {"audio": {"samples": np.zeros(RATE_HZ // 2, np.float32), "rate_hz": RATE_HZ}}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Look through sounds, one by one."""
        results: list[Output | BadInputError] = []
        for inputs in batch:
            try:
                heard, rate_hz = read_sound(inputs.get("audio"), max_s=MAX_S)
            except BadInputError as error:
                results.append(error)
                continue
            probabilities = self.probabilities(resample(heard, rate_hz, RATE_HZ))
            segments = speech_segments(
                probabilities, FRAME / RATE_HZ, self._rules, heard.size / rate_hz
            )
            results.append(
                {
                    "segments": [[round(start, 3), round(end, 3)] for start, end in segments],
                    "speech_s": round(sum((end - start for start, end in segments), 0.0), 3),
                }
            )
        return results

    def probabilities(self, samples: Samples) -> NDArray[np.float32]:
        """Return the probability of speech in each 32 ms of a sound at 16 kHz; the last are filled up."""
        padded = np.zeros(-(-samples.size // FRAME) * FRAME, np.float32)
        padded[: samples.size] = samples
        return self.listen().feed(padded)

    def listen(self) -> VoiceStream:
        """Begin to hear a sound that comes in pieces."""
        return VoiceStream(self._model)


class VoiceStream:
    """A sound at 16 kHz in pieces, with what the model remembers from one to the next."""

    def __init__(self, model: NeuralNetwork) -> None:
        self._model = model
        self._hidden = self._cell = np.zeros(_STATE, np.float32)
        # Silence stands before the first frame, which has no context.
        self._context = np.zeros(_CONTEXT, np.float32)

    def feed(self, samples: Samples) -> NDArray[np.float32]:
        """Return the probability of speech in each frame of the next piece, which are whole frames."""
        padded = np.concatenate([self._context, samples])
        self._context = padded[padded.size - _CONTEXT :]
        windows = np.lib.stride_tricks.sliding_window_view(padded, _CONTEXT + FRAME)[::FRAME]
        found: list[NDArray[np.float32]] = []
        # The state goes from block to block, so the result is that of a single call.
        for start in range(0, samples.size // FRAME, _BLOCK):
            block = np.ascontiguousarray(windows[start : start + _BLOCK])
            values, self._hidden, self._cell = self._model.run(
                {"input": block, "h": self._hidden, "c": self._cell}, ["speech_probs", "hn", "cn"]
            )
            found.append(values)
        return np.concatenate(found)
