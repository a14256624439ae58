"""A light client of OpenAI-compatible servers: streams answers and notes when tokens come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.core.rng import stream

if TYPE_CHECKING:
    from atoll.workload.requests import Requests

_TOKENS = (1000, 40_000)


class Latency(NamedTuple):
    """Seconds to the first token, and per further token."""

    ttft_s: float
    tpot_s: float


class StreamedAnswer(NamedTuple):
    """When a request was sent, and when pieces of its answer came, on one clock; its tokens and text."""

    sent_s: float
    came_s: tuple[float, ...]
    tokens: int
    text: str = ""

    @property
    def latency(self) -> Latency:
        """What its client saw."""
        each_s = (self.came_s[-1] - self.came_s[0]) / max(1, self.tokens - 1)
        return Latency(self.came_s[0] - self.sent_s, each_s)


def draw_prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt that no other seed begins with."""
    return [int(token) for token in stream(seed, "prompt").integers(*_TOKENS, size=tokens)]


def _pieces(line: bytes) -> Iterator[dict[str, Any]]:
    if line.startswith(b"data: {"):
        yield from json.loads(line[6:]).get("choices", ())


async def stream_answer(
    url: str, model: str, seed: int, prompt: int, output: int, *, begin: Sequence[int] = ()
) -> StreamedAnswer:
    """Stream one answer of exactly so many tokens to a prompt of so many, that has this beginning."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    asked = {
        "model": model,
        "prompt": [*begin, *draw_prompt(seed, prompt - len(begin))],
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    begun_s = time.monotonic()
    reader, writer = await asyncio.open_connection(host, int(port))
    came_s: list[float] = []
    said: list[str] = []
    made = 0
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = (await reader.readline()).split(b" ")[1:2]
        if status != [b"200"]:
            raise SystemExit(f"{url} answered with {b''.join(status).decode() or 'nothing'}")
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                break
            pieces = [piece["text"] for piece in _pieces(line) if piece.get("text") is not None]
            if pieces:
                came_s.append(time.monotonic())
                said += pieces
            if b'"completion_tokens"' in line:
                usage = json.loads(line[6:]).get("usage") or {}
                made = usage.get("completion_tokens", made)
    finally:
        writer.close()  # whoever is no longer waited for is told so
    if made != output or not came_s:
        raise SystemExit(f"{url} gave {made} of {output} tokens")
    return StreamedAnswer(begun_s, tuple(came_s), output, "".join(said))


async def replay(url: str, model: str, requests: Requests, seed: int) -> list[Latency]:
    """Send every request when it is due; returns their latencies in order."""
    begun_s = time.monotonic()

    async def later(i: int) -> Latency:
        due_s = begun_s + float(requests.arrival_s[i])
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        found = await stream_answer(
            url, model, seed * 1000 + i, int(requests.input[i]), int(requests.output[i])
        )
        return found.latency

    return list(await asyncio.gather(*(later(i) for i in range(len(requests)))))
