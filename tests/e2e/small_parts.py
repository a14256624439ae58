"""Components that start in a moment, for executors that are killed: what they give tells what came in."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from atoll.components.base import BatchComponent, Done, Inputs, Output, Setup, StreamComponent

HERE = "tests.e2e.small_parts"
WIDTH = 576
_WORDS = ("sea", "tide", "ship", "wind", "sand", "gull", "wave", "reef")
_LENGTH = 24


def _sum(array: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


class SmallPart(BatchComponent):
    """A component without weights."""

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Return it."""
        del setup
        return cls()

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output]:
        """Run each alone."""
        return [self.one(inputs) for inputs in batch]

    def one(self, inputs: Inputs) -> Output:
        """Run one."""
        raise NotImplementedError


class SmallEar(SmallPart):
    """Sound into states, which are too large to travel with their handle."""

    name: ClassVar[str] = "small-ear"

    def example(self) -> Inputs:
        """Return silence."""
        return {"audio": {"samples": np.zeros(16, np.float32), "rate_hz": 24_000}}

    def one(self, inputs: Inputs) -> Output:
        """Return states and how many samples they stand for."""
        samples = inputs["audio"]["samples"]
        return {"states": np.resize(samples, (64, 288)).astype(np.float32), "samples": len(samples)}


class SmallScribe(SmallPart):
    """States into text."""

    name: ClassVar[str] = "small-scribe"

    def example(self) -> Inputs:
        """Return states of nothing."""
        return {"states": np.zeros((2, 288), np.float32), "samples": 2}

    def one(self, inputs: Inputs) -> Output:
        """Return a text that no other states have."""
        return {"text": f"I heard {_sum(inputs['states'])}.", "tokens": 3}


class SmallEye(SmallPart):
    """A picture into vectors."""

    name: ClassVar[str] = "small-eye"

    def example(self) -> Inputs:
        """Return a black picture."""
        return {"image": np.zeros((8, 8, 3), np.uint8)}

    def one(self, inputs: Inputs) -> Output:
        """Return vectors that no other picture has."""
        return {"embeds": np.full((8, WIDTH), _sum(inputs["image"]) % 9973, dtype=np.float32)}


class SmallMind(StreamComponent):
    """Messages into words, each after `word_s` seconds; which words depends on all of the messages."""

    name: ClassVar[str] = "small-mind"

    def __init__(self, word_s: float) -> None:
        self._word_s = word_s

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Return it."""
        return cls(float(setup.option("word_s", 0.0)))

    def example(self) -> Inputs:
        """Return a greeting."""
        return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    async def stream(self, inputs: Inputs) -> AsyncIterator[Output | Done]:
        """Yield words from where `resume` says, three to a sentence."""
        total = 0
        for message in inputs["messages"]:
            content = message["content"]
            parts: list[Any] = [content] if isinstance(content, str) else content
            for part in parts:
                held = part if isinstance(part, str) else part.get("text")
                if held is None:
                    held = part["embeds"]["embeds"]
                data = held.encode() if isinstance(held, str) else np.asarray(held).tobytes()
                total = zlib.crc32(data, total)
        most = min(inputs.get("max_tokens") or _LENGTH, _LENGTH)
        words = [
            _WORDS[(total >> n) % len(_WORDS)] + (". " if n % 3 == 2 else " ") for n in range(most)
        ]
        for number in range(len((inputs.get("resume") or {"token_ids": ()})["token_ids"]), most):
            await asyncio.sleep(self._word_s)
            yield {"text": words[number], "token_ids": [number]}
        yield Done(
            {
                "text": "".join(words),
                "finish_reason": "length",
                "prompt_tokens": 5,
                "completion_tokens": most,
            }
        )
