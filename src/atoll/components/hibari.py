"""Hibari: English text into speech, with the package `hibari` (hibari-tts), code and weights of its own.

Text becomes phonemes sentence by sentence, and each stretch of phonemes becomes sound by itself, with the
same noise each time: a sentence sounds the same wherever it stands, and equal texts give equal samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Self

import numpy as np

from atoll.components.base import BadInputError, BatchComponent, Inputs, Output, Setup
from atoll.components.onnx import need_package
from atoll.components.sound import Samples
from atoll.core.errors import InputError, UnknownNameError, shorten
from atoll.engine.engine_errors import WeightsError

RATE_HZ = 24_000
DEFAULT_VOICE = "heart"
MAX_CHARS = 4_096
MIN_SPEED = 0.25
MAX_SPEED = 4.0
"""Bounds that OpenAI has for the speed of speech."""
_MAX_PHONEMES = 400
"""Phonemes made into sound at once: 30 s or so. Memory grows with their number, and with slowness."""
_MAX_WORD = 32
"""The time to read a word grows with the cube of its length; longer ones are read in parts."""
_MAX_DIGITS = 15
"""Longer numbers are read digit by digit: the package knows no names for them."""
_SEED = 0
_NOTHING_S = 0.1
"""Where a text has nothing that can be said, as a lone dash, there is so much silence, in seconds."""
_LONG_NUMBER = re.compile(rf"\d{{{_MAX_DIGITS + 1},}}")
_LONG_WORD = re.compile(rf"\S{{{_MAX_WORD + 1},}}")
_BREAK = re.compile(r"[^\w\s](?=[^\W_])")


class Hibari(BatchComponent):
    """Text into speech: {"samples": float32 [n], "rate_hz": 24000}.

    Speeds above 2 or so are not reached: the model gives every sound some time. Options: voices, the names of
    those to load (["heart"]); others than this one are fetched from the hub. One core is enough, `threads` is
    not looked at: speech is made some forty times faster than it is spoken.
    """

    name = "hibari"
    max_batch = 1

    def __init__(self, voices: Mapping[str, Any]) -> None:
        self._voices = voices

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Load the voices and what reads their text."""
        package = need_package("hibari", cls.name)
        known = need_package("hibari.voices", cls.name).VOICES
        reader = need_package("hibari.g2p", cls.name).G2P
        names = setup.option("voices", [DEFAULT_VOICE])
        if not isinstance(names, list | tuple) or not names:
            raise InputError("must be a list of names of voices", field="voices")
        readers: dict[bool, Any] = {}
        voices: dict[str, Any] = {}
        for name in names:
            if name not in known:
                raise UnknownNameError("voice", str(name), known, field="voices")
            british = bool(known[name]["british"])
            if british not in readers:
                readers[british] = reader(british=british)
            try:
                voices[name] = package.Hibari(voice=name, threads=1, g2p=readers[british])
            except RuntimeError as error:  # how the package says that a voice cannot be fetched
                raise WeightsError(
                    f"the voice {name!r} cannot be fetched: {shorten(str(error), 160)}",
                    field="voices",
                    hint=f"check the network, or use {DEFAULT_VOICE!r}, which needs none",
                ) from error
        return cls(voices)

    @property
    def voices(self) -> tuple[str, ...]:
        """The voices that are loaded, by name."""
        return tuple(self._voices)

    def example(self) -> Inputs:
        """Return one word."""
        return {"text": "Hello.", "voice": next(iter(self._voices)), "speed": 1.0}

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output | BadInputError]:
        """Speak texts, one by one."""
        results: list[Output | BadInputError] = []
        for inputs in batch:
            try:
                text, voice, speed = self._read(inputs)
                samples = self._sound(self._phonemes(text, voice), voice, speed)
                results.append({"samples": samples, "rate_hz": RATE_HZ})
            except BadInputError as error:
                results.append(error)
        return results

    def _read(self, inputs: Inputs) -> tuple[str, str, float]:
        text = inputs.get("text")
        voice = inputs.get("voice", DEFAULT_VOICE)
        speed = inputs.get("speed", 1.0)
        if not isinstance(text, str) or not text.strip():
            raise BadInputError("there is no text to speak", "text")
        if len(text) > MAX_CHARS:
            raise BadInputError(
                f"the text has {len(text)} characters; at most {MAX_CHARS} are spoken at once",
                "text",
            )
        if not isinstance(voice, str) or voice not in self._voices:
            raise BadInputError(
                f"there is no voice {shorten(str(voice), 40)!r}; there are: {', '.join(self._voices)}",
                "voice",
            )
        number = isinstance(speed, int | float) and not isinstance(speed, bool)
        if not number or not isfinite(speed) or not MIN_SPEED <= speed <= MAX_SPEED:
            raise BadInputError(f"the speed must be a number in {MIN_SPEED}..{MAX_SPEED}", "speed")
        return text, voice, float(speed)

    def _phonemes(self, text: str, voice: str) -> list[str]:
        """Return the phonemes of a text, one string per sentence."""
        try:
            found: list[str] = self._voices[voice].phonemize(_readable(text))
        except Exception as error:  # the package promises nothing about texts that it cannot read
            raise BadInputError("the text cannot be read aloud", "text") from error
        return found

    def _sound(self, phonemes: Sequence[str], voice: str, speed: float) -> Samples:
        """Return the sound of phonemes."""
        max_phonemes = int(_MAX_PHONEMES * min(1.0, speed))
        parts = [
            self._voices[voice].from_phonemes(part, speed, _SEED)
            for sentence in phonemes
            for part in _cut_phonemes(sentence, max_phonemes)
        ]
        if not any(part.size for part in parts):
            return np.zeros(int(_NOTHING_S * RATE_HZ), np.float32)
        sound = np.concatenate(parts).astype(np.float32, copy=False)
        return np.clip(sound, -1.0, 1.0, out=sound)


def _readable(text: str) -> str:
    """Return the text with breaks in what would take long to read."""
    text = _LONG_NUMBER.sub(lambda found: " ".join(found[0]), text)
    return _LONG_WORD.sub(lambda found: " ".join(_cut_word(found[0])), text)


def _cut_word(word: str) -> Iterator[str]:
    """Cut a long word, after a sign within it where there is one, as in addresses."""
    while len(word) > _MAX_WORD:
        breaks = [found.end() for found in _BREAK.finditer(word, 0, _MAX_WORD + 1)]
        at = breaks[-1] if breaks and breaks[-1] <= _MAX_WORD else _MAX_WORD
        yield word[:at]
        word = word[at:]
    yield word


def _cut_phonemes(phonemes: str, max_phonemes: int) -> Iterator[str]:
    """Cut phonemes into parts of at most `max_phonemes`, between clauses or else between words."""
    while len(phonemes) > max_phonemes:
        at = max(phonemes.rfind(sign, 0, max_phonemes) for sign in (", ", "; ", ": ", "— ")) + 1
        if at < max_phonemes // 4:
            at = phonemes.rfind(" ", 0, max_phonemes)
        if at < max_phonemes // 4:
            at = max_phonemes
        yield phonemes[:at]
        phonemes = phonemes[at:].lstrip()
    if phonemes:
        yield phonemes
