"""Times of an engine's steps, seen from outside: gaps between tokens while so many requests decode.

A batch decodes; the median gap of its tokens is a step without prompts. Then prompts come, one at a time: the
largest gap around each is a step that has one, if it fits into a step.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import NamedTuple

from benchmarks.simulation.streaming import StreamedAnswer, stream_answer

BATCHES = (1, 4, 8, 16, 32, 64, 96)
MIXED_BATCHES = (1, 16)
PROMPTS = (32, 128, 256, 448, 640, 1024, 1536, 1920)
CONTEXT = 640
_ANSWER = 400
_EACH = 5
_SETTLE_S = 0.3


class StepTime(NamedTuple):
    """Milliseconds of a step: sequences that decode over about `context` tokens, and one prompt's tokens."""

    sequences: int
    context: int
    prompt: int
    ms: float


async def measure_steps(url: str, service: str) -> list[StepTime]:
    """Return the times of steps of all sizes, of a server that nobody else asks."""
    found = []
    seed = 40_000_000
    for batch in BATCHES:
        seed += 1000
        async with _decoding(url, service, seed, batch) as streams:
            pass
        found.append(StepTime(batch, CONTEXT + _ANSWER // 2, 0, _median_gap_ms(await streams)))
    for batch in MIXED_BATCHES:
        for prompt in PROMPTS:
            seed += 1000
            async with _decoding(url, service, seed, batch) as streams:
                sent_s = [
                    await _one_prompt(url, service, seed + 500 + i, prompt) for i in range(_EACH)
                ]
            gaps = [_gap_ms(await streams, begun_s, ended_s) for begun_s, ended_s in sent_s]
            found.append(StepTime(batch, CONTEXT + _ANSWER // 2, prompt, statistics.median(gaps)))
    return found


@asynccontextmanager
async def _decoding(
    url: str, service: str, seed: int, batch: int
) -> AsyncIterator[asyncio.Future[list[StreamedAnswer]]]:
    """Let a batch decode; its answers are whole after the block."""
    asked = (stream_answer(url, service, seed + i, CONTEXT, _ANSWER) for i in range(batch))
    streams = asyncio.gather(*asked)
    # All prompts are computed by then, else their steps would count.
    await asyncio.sleep(_SETTLE_S + 0.02 * batch)
    yield streams
    await streams


async def _one_prompt(url: str, service: str, seed: int, prompt: int) -> tuple[float, float]:
    answer = await stream_answer(url, service, seed, prompt, 1)
    await asyncio.sleep(0.05)
    return answer.sent_s, answer.came_s[-1]


def _median_gap_ms(streams: list[StreamedAnswer]) -> float:
    # From the moment when the last prompt was through to the first end.
    begun_s = max(answer.came_s[0] for answer in streams)
    ended_s = min(answer.came_s[-1] for answer in streams)
    gaps = [
        later - before
        for answer in streams
        for before, later in pairwise(answer.came_s)
        if before >= begun_s and later <= ended_s
    ]
    return 1e3 * statistics.median(gaps)


def _gap_ms(streams: list[StreamedAnswer], begun_s: float, ended_s: float) -> float:
    """Return the largest gap that a stream saw around a prompt."""
    return 1e3 * max(
        later - before
        for before, later in pairwise(streams[0].came_s)
        if later > begun_s and before < ended_s
    )
