"""What a request used: tokens, seconds heard and spoken, pixels seen and drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.tasks.invocation import InvocationRecord
from atoll.tasks.values import Handle, Value

USAGE_HEADER = "x-atoll-usage"


@dataclass(slots=True)
class UsageCount:
    """audio_s: seconds of sound heard, speech_s: spoken. image_pixels: seen and drawn. characters: to speak.

    Tokens of pictures that are part of a prompt are in `prompt_tokens`, and in `image_tokens` on their own.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0
    audio_s: float = 0.0
    speech_s: float = 0.0
    image_pixels: int = 0
    characters: int = 0

    def add_records(self, records: Iterable[InvocationRecord]) -> None:
        """Count the tokens that components report of what they did."""
        for record in records:
            outcome = record.outcome
            if not isinstance(outcome, dict):
                continue
            prompt = outcome.get("prompt_tokens")
            completion = outcome.get("completion_tokens")
            self.prompt_tokens += prompt if isinstance(prompt, int) else 0
            self.completion_tokens += completion if isinstance(completion, int) else 0
            if isinstance(prompt, int):
                self.image_tokens += _embedded(record.invocation.inputs.get("messages"))

    def media(self) -> dict[str, Any]:
        """Return what is not counted in tokens, under Atoll's names."""
        shown: dict[str, Any] = {}
        if self.audio_s:
            shown["audio_seconds"] = round(self.audio_s, 3)
        if self.speech_s:
            shown["speech_seconds"] = round(self.speech_s, 3)
        if self.image_pixels:
            shown["image_pixels"] = self.image_pixels
        return shown

    def chat(self) -> dict[str, Any]:
        """Return it as chat completions have it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "text_tokens": self.prompt_tokens - self.image_tokens,
                "image_tokens": self.image_tokens,
                "audio_tokens": 0,
                "cached_tokens": 0,
            },
            "completion_tokens_details": {
                "text_tokens": self.completion_tokens,
                "audio_tokens": 0,
                "reasoning_tokens": 0,
            },
            **self.media(),
        }

    def header(self) -> str:
        """Return what is known of it now, for the header `x-atoll-usage`; what is not known is not there."""
        counts = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "characters": self.characters,
        }
        shown = {name: count for name, count in counts.items() if count} | self.media()
        return msgspec.json.encode(shown).decode()


def _embedded(value: Value) -> int:
    """Return how many vectors stand in the messages of a chat instead of tokens."""
    if isinstance(value, list):
        return sum(_embedded(part) for part in value)
    if isinstance(value, dict):
        found = value.get("embeds")
        if isinstance(found, Handle):
            return found.shape[0] if found.shape else 0
        return _embedded(value.get("content"))
    return 0
