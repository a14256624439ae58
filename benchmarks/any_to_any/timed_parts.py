"""Parts of an any-to-any model that wait as long as a device would compute, and compute next to nothing.

Each process is a device: its parts take turns on it, in order. Eyes, ears and voice take so many seconds for
what they get, one after the other; the mind writes all its answers at once, a token each per step, and reads
new prompts in the same step. Options say how many times as long a device takes to compute, and to read the
weights, which is what a step takes. So what a fleet of them does is measured without GPUs, and alike however
busy the machine is: routing, batches, queues and hand-overs are those that serve.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from atoll.components.base import BatchComponent, Done, Inputs, Output, Setup, StreamComponent

HERE = "benchmarks.any_to_any.timed_parts"
IMAGE_S = 0.5
"""For a picture."""
AUDIO_S = 0.25
"""For a second of sound."""
SPEECH_S = 0.1
"""For a second of speech."""
STEP_S = 0.1
"""For a token of every answer."""
PROMPT_S = 0.004
"""For a token of a prompt."""
RATE_HZ = 24_000
WORD_SPOKEN_S = 0.25
PROMPT_TOKENS = 40
IMAGE_TOKENS = 49
_WIDTH = 576
_WORDS = ("sea ", "tide ", "ship. ")
WORDS_PER_SENTENCE = len(_WORDS)


class _Device:
    """What takes turns: whoever comes first goes first."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._next = self._now = 0

    def work(self, seconds: float) -> None:
        """Have the device for so many seconds."""
        with self._turn:
            mine = self._next
            self._next += 1
            self._turn.wait_for(lambda: self._now == mine)
        time.sleep(seconds)
        with self._turn:
            self._now += 1
            self._turn.notify_all()


_DEVICE = _Device()


class TimedPart(BatchComponent):
    """A part that takes what it gets one by one."""

    max_batch: ClassVar[int] = 1

    def __init__(self, *, compute: float = 1.0) -> None:
        self._compute = compute

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Return it."""
        return cls(compute=float(setup.option("compute", 1.0)))

    def run(self, batch: Sequence[Inputs]) -> Sequence[Output]:
        """Wait for each, and give what it makes."""
        found = []
        for inputs in batch:
            seconds, output = self.one(inputs)
            _DEVICE.work(self._compute * seconds)
            found.append(output)
        return found

    def one(self, inputs: Inputs) -> tuple[float, Output]:
        """Return how long it takes, and what comes of it."""
        raise NotImplementedError


class TimedEye(TimedPart):
    """A picture into vectors."""

    name: ClassVar[str] = "timed-eye"

    def example(self) -> Inputs:
        """Return a black picture."""
        return {"image": np.zeros((8, 8, 3), np.uint8)}

    def one(self, inputs: Inputs) -> tuple[float, Output]:
        """Return vectors."""
        del inputs
        return IMAGE_S, {"embeds": np.ones((IMAGE_TOKENS, _WIDTH), np.float32)}


class TimedEar(TimedPart):
    """Sound into states."""

    name: ClassVar[str] = "timed-ear"

    def example(self) -> Inputs:
        """Return a moment of silence."""
        return {"audio": {"samples": np.zeros(16, np.float32), "rate_hz": RATE_HZ}}

    def one(self, inputs: Inputs) -> tuple[float, Output]:
        """Return states and how many samples they stand for."""
        audio = inputs["audio"]
        seconds = len(audio["samples"]) / audio["rate_hz"]
        states = np.ones((64, 288), np.float32)
        return AUDIO_S * seconds, {"states": states, "samples": len(audio["samples"])}


class TimedScribe(TimedPart):
    """States into text, in no time: its device's time is the ear's."""

    name: ClassVar[str] = "timed-scribe"

    def example(self) -> Inputs:
        """Return states of nothing."""
        return {"states": np.zeros((2, 288), np.float32), "samples": 2}

    def one(self, inputs: Inputs) -> tuple[float, Output]:
        """Return a text."""
        del inputs
        return 0.0, {"text": "I heard you.", "tokens": 4}


class TimedVoice(TimedPart):
    """Text into silence of the length of its words."""

    name: ClassVar[str] = "timed-voice"

    def example(self) -> Inputs:
        """Return a word."""
        return {"text": "Yes."}

    def one(self, inputs: Inputs) -> tuple[float, Output]:
        """Return samples."""
        seconds = WORD_SPOKEN_S * len(inputs["text"].split())
        samples = np.zeros(int(seconds * RATE_HZ), np.float32)
        return SPEECH_S * seconds, {"samples": samples, "rate_hz": RATE_HZ}


@dataclass(slots=True, eq=False)
class _Answer:
    prompt_tokens: int
    left: int
    tokens: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    read: bool = False


class TimedMind(StreamComponent):
    """Messages into words, those of all requests in one batch; three to a sentence."""

    name: ClassVar[str] = "timed-mind"

    def __init__(self, *, compute: float = 1.0, memory: float = 1.0) -> None:
        self._step_s, self._prompt_s = memory * STEP_S, compute * PROMPT_S
        self._answers: list[_Answer] = []
        self._loop: asyncio.Task[None] | None = None

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Return it."""
        return cls(
            compute=float(setup.option("compute", 1.0)),
            memory=float(setup.option("memory", 1.0)),
        )

    def example(self) -> Inputs:
        """Return a greeting."""
        return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    async def stream(self, inputs: Inputs) -> AsyncIterator[Output | Done]:
        """Yield words as steps give them."""
        wanted = int(inputs.get("max_tokens") or 24)
        answer = _Answer(prompt_tokens(inputs["messages"]), wanted)
        self._answers.append(answer)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._step_on())
        words = [_WORDS[n % len(_WORDS)] for n in range(wanted)]
        try:
            for number, word in enumerate(words):
                await answer.tokens.get()
                yield {"text": word, "token_ids": [number]}
        finally:
            if answer in self._answers:
                self._answers.remove(answer)
        yield Done(
            {
                "text": "".join(words),
                "finish_reason": "length",
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": wanted,
            }
        )

    async def _step_on(self) -> None:
        """Take steps as long as there are answers."""
        while self._answers:
            batch = list(self._answers)
            new = sum(answer.prompt_tokens for answer in batch if not answer.read)
            seconds = self._step_s + self._prompt_s * new
            await asyncio.to_thread(_DEVICE.work, seconds)
            for answer in batch:
                answer.read = True
                answer.left -= 1
                answer.tokens.put_nowait(None)
                if answer.left <= 0 and answer in self._answers:
                    self._answers.remove(answer)


def prompt_tokens(messages: Sequence[dict[str, Any]]) -> int:
    """Return the tokens that messages are: so many of text, and those of their pictures."""
    parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
    pictures = sum(1 for part in parts if part["type"] == "embeds")
    return PROMPT_TOKENS + IMAGE_TOKENS * pictures
