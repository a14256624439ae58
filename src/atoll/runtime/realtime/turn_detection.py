"""When somebody begins and ends to speak, from sound as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.components.silero import FRAME
from atoll.components.silero import RATE_HZ as EAR_HZ
from atoll.components.sound import Samples, resample
from atoll.runtime.realtime.realtime_events import RATE_HZ, ServerVad

FRAME_MS = 1000 * FRAME // EAR_HZ
BLOCK = FRAME * RATE_HZ // EAR_HZ
"""Samples of a frame as clients send them."""
_BEGINNING_MS = 96
"""Speech that is shorter begins no turn: a click is none."""


class Ear(Protocol):
    """Hears frames one after the other (`atoll.components.silero.VoiceStream`)."""

    def feed(self, samples: Samples) -> NDArray[np.float32]:
        """Return the probability of speech of each frame."""
        ...


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """Somebody began, or ended, at a time of the sound, in milliseconds from its start."""

    kind: Literal["started", "stopped"]
    at_ms: int


class TurnDetector:
    """Finds turns in probabilities of speech: two thresholds, and times that a state has to last."""

    def __init__(self) -> None:
        self.speaking = False
        self._now_ms = 0
        self._since_ms: int | None = None
        """Since when it has been other than it is taken to be."""

    def feed(self, probabilities: NDArray[np.float32], rules: ServerVad) -> list[TurnEvent]:
        """Take the next frames and return what became of it."""
        found: list[TurnEvent] = []
        # Between the two thresholds a frame neither begins speech nor ends it.
        low = max(0.05, rules.threshold - 0.15)
        for probability in probabilities.tolist():
            other = probability < low if self.speaking else probability >= rules.threshold
            back = probability >= rules.threshold if self.speaking else probability < low
            if back:
                self._since_ms = None
            elif other and self._since_ms is None:
                self._since_ms = self._now_ms
            self._now_ms += FRAME_MS
            needed = rules.silence_duration_ms if self.speaking else _BEGINNING_MS
            if self._since_ms is not None and self._now_ms - self._since_ms >= needed:
                kind: Literal["started", "stopped"] = "stopped" if self.speaking else "started"
                found.append(TurnEvent(kind, self._since_ms))
                self.speaking = not self.speaking
                self._since_ms = None
        return found


class TurnListener:
    """Sound of a client, at 24 kHz as it comes, into turns."""

    def __init__(self, ear: Ear) -> None:
        self._ear = ear
        self.detector = TurnDetector()
        self._rest = np.zeros(BLOCK, np.float32)
        """The block before the next one, which the filter looks back to, and what has come behind it."""

    def hear(self, samples: Samples, rules: ServerVad) -> list[TurnEvent]:
        """Take more sound; the last two blocks wait for what comes behind them."""
        self._rest = np.concatenate([self._rest, samples])
        blocks = self._rest.size // BLOCK - 2
        if blocks < 1:
            return []
        # Resampled with a block before and one behind, so that blocks join without a seam.
        heard = resample(self._rest[: (blocks + 2) * BLOCK], RATE_HZ, EAR_HZ)
        self._rest = self._rest[blocks * BLOCK :].copy()
        return self.detector.feed(self._ear.feed(heard[FRAME : (blocks + 1) * FRAME]), rules)
