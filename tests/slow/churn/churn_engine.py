"""An engine for fabrics whose nodes die: what it says is known beforehand, token by token.

The answer to the prompt `SEED|` is a word for every position, a function of seed and position alone. So any
node can go on with any answer, and a client knows at once if a token is missing, doubled or out of place.
A prompt that already holds words (a continuation, as vLLM and SGLang take it) is checked word by word before
it is gone on with. A step of the engine gives a token to at most `width` of its streams, those that have
waited longest, so that a node has a fixed number of tokens a second and throughput follows the nodes.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

MODEL = "churn"
PROMPT_TOKENS = 10


class Answering(Protocol):
    """The part of the tunnel's `Incoming` that an engine uses."""

    path: bytes
    body: bytes
    on_cancel: Callable[[], None] | None

    def head(self, status: int, content_type: bytes, retry_after: bytes = b"") -> None: ...

    def send(self, data: bytes) -> None: ...

    def end(self) -> None: ...


def word(seed: int, position: int) -> str:
    """Return the token at a position of an answer."""
    return f" {zlib.crc32(b'%d:%d' % (seed, position)):08x}"


def prompt(seed: int) -> str:
    """Return what to ask for the answer of a seed."""
    return f"{seed}|"


class WrongPrefixError(Exception):
    """An answer that is to be gone on with is not one of this engine's."""


class Answer:
    """A stream and how far it is."""

    def __init__(self, body: dict[str, Any]) -> None:
        text, _, said = str(body["prompt"]).partition("|")
        resumed = (body.get("atoll") or {}).get("resume") or {}
        self.seed = int(text)
        self.before = _position(self.seed, said or str(resumed.get("text", "")))
        self.whole = bool(resumed)
        """Whether tokens said before count as part of this answer."""
        left = int(body["max_tokens"]) - (self.before if self.whole else 0)
        self.position = self.before
        self.end = self.before + left
        if resumed and resumed["tokens"] != self.before:
            raise WrongPrefixError(f"{resumed['tokens']} tokens said, {self.before} there")

    def event(self) -> bytes:
        """Return the next token, with the end of the answer if it is the last."""
        last = self.position + 1 >= self.end
        choice = {
            "index": 0,
            "text": word(self.seed, self.position),
            "logprobs": None,
            "finish_reason": "length" if last else None,
        }
        self.position += 1
        data = _event(choices=[choice])
        return data + self._ending() if last else data

    @property
    def done(self) -> bool:
        """Whether all was said."""
        return self.position >= self.end

    def _ending(self) -> bytes:
        given = 0 if self.whole else self.before
        said = self.position - given
        usage = {
            "prompt_tokens": PROMPT_TOKENS + given,
            "completion_tokens": said,
            "total_tokens": PROMPT_TOKENS + given + said,
        }
        return _event(choices=[], usage=usage) + b"data: [DONE]\n\n"


def _position(seed: int, said: str) -> int:
    """Return how many words were said; they must be the right ones."""
    size = len(word(0, 0))
    count, rest = divmod(len(said), size)
    if rest or any(said[at * size : (at + 1) * size] != word(seed, at) for at in range(count)):
        raise WrongPrefixError("not what was said so far")
    return count


def _event(**fields: object) -> bytes:
    data = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL} | fields
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


class Engine:
    """Answers requests a step at a time; `step` is called by whoever has the clock."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._streams: deque[tuple[Answering, Answer]] = deque()

    def handle(self, incoming: Answering) -> None:
        """Take a request."""
        if incoming.path != b"/v1/completions":
            _respond(incoming, 404, {"error": {"message": "not here", "type": "not_found"}})
            return
        try:
            answer = Answer(json.loads(incoming.body))
        except (KeyError, ValueError, WrongPrefixError) as error:
            # A status that is never tried elsewhere: the client is to see it.
            message = f"{type(error).__name__}: {error}"
            _respond(incoming, 400, {"error": {"message": message, "type": "wrong"}})
            return
        entry = (incoming, answer)
        incoming.on_cancel = lambda: self._forget(entry)
        incoming.head(200, b"text/event-stream")
        self._streams.append(entry)

    def _forget(self, entry: tuple[Answering, Answer]) -> None:
        if entry in self._streams:
            self._streams.remove(entry)

    def step(self) -> None:
        """Give a token to those streams that have waited longest."""
        for _ in range(min(self._width, len(self._streams))):
            incoming, answer = self._streams.popleft()
            incoming.send(answer.event())
            if answer.done:
                incoming.end()
            else:
                self._streams.append((incoming, answer))

    async def run(self, step_s: float) -> None:
        """Step for ever, on time: a late step does not delay those after it."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + step_s, loop.time() - step_s)
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            self.step()


def _respond(incoming: Answering, status: int, data: object) -> None:
    incoming.head(status, b"application/json")
    incoming.send(json.dumps(data).encode())
    incoming.end()
