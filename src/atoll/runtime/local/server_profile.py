"""How fast a server that runs takes its steps, seen from outside: a profile for planner and simulator.

A server that speaks OpenAI's API streams answers to probes, and nothing else may use it meanwhile:

- n clients with equal prompts, all of them decoding: a step of n sequences is the mean gap between tokens.
- One client with a prompt of T tokens: the first token comes after what a request takes beside its steps,
  and the step of the prompt. Beside is what a prompt of one token takes more than a step of one sequence,
  since both run one row through the same layers.
- A prompt while sequences decode: their longest gap is the step of both, less than the sum of the two since
  weights are read once.

Probes take turns, so that what else the machine does meets all of them alike, and means are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from atoll.core.errors import InputError
from atoll.core.rng import stream
from atoll.plan.cluster import NodeProfile
from atoll.runtime.http.http_client import FetchError, stream_lines
from atoll.runtime.local.layer_profile import RangeTable, profile_of
from atoll.runtime.local.load_probes import AskWords, ProbeAnswer

_VOCABULARY = (1000, 30_000)
_ANSWER_S = 600.0
"""A server that says nothing for so long is given up."""
Arrivals = list[float]
"""When each token came, by the clock of the probe; the first entry is when the request was sent."""
AskTokens = Callable[[int, int], Coroutine[None, None, Arrivals]]
"""Ask for so many tokens to a fresh prompt of so many tokens."""


@dataclass(frozen=True, slots=True)
class ServerProbes:
    """Which probes to make, and how often: prompt tokens, sequences, and prompts beside sequences.

    `context` is the prompt of those that decode; they get `answer` tokens.
    """

    prompts: Sequence[int] = (64, 128, 256, 512)
    sequences: Sequence[int] = (1, 2, 4, 8)
    mixed: Sequence[tuple[int, int]] = ((128, 4),)
    context: int = 96
    answer: int = 24
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class ServerTable:
    """Steps of a server with all layers, and seconds that a request takes beside them."""

    steps: RangeTable
    beside_s: float

    def profile(self, kv_tokens: float) -> NodeProfile:
        """Return the profile of a machine that holds the whole model, with room for so many tokens.

        What a step takes beside its layers cannot be told apart from outside.
        """
        room = tuple(kv_tokens * self.steps.layers / held for held in _held(self.steps.layers))
        return profile_of(self.steps, None, room)


def _held(layers: int) -> range:
    return range(1, layers + 1)


async def measure_server(
    ask: AskTokens, layers: int, probes: ServerProbes, *, warm_up: bool = True
) -> ServerTable:
    """Probe a server of a model with so many layers; with `warm_up` a turn before all does not count."""
    first_s: dict[int, list[float]] = {size: [] for size in (1, *probes.prompts)}
    decode_s: dict[int, list[float]] = {number: [] for number in {1, *probes.sequences}}
    mixed_s: dict[tuple[int, int], list[float]] = {kind: [] for kind in probes.mixed}
    for turn in range(0 if warm_up else 1, probes.repeats + 1):
        for size, found in first_s.items():
            sent_s, came_s = await ask(size, 1)
            found += [came_s - sent_s] if turn else []
        for number, found in decode_s.items():
            took_s = await _decode_step(ask, number, probes)
            found += [took_s] if turn else []
        for (size, number), found in mixed_s.items():
            took_s = await _mixed_step(ask, size, number, probes)
            found += [took_s] if turn else []
    one_s = statistics.fmean(decode_s[1])
    beside_s = max(0.0, statistics.fmean(first_s[1]) - one_s)
    steps = RangeTable(
        start=0,
        end=layers,
        prefill_s=tuple(
            (size, max(one_s, statistics.fmean(first_s[size]) - beside_s))
            for size in sorted(probes.prompts)
        ),
        decode_s=tuple((n, statistics.fmean(decode_s[n])) for n in sorted(decode_s)),
        mixed_s=tuple((*kind, statistics.fmean(some)) for kind, some in mixed_s.items()),
    )
    return ServerTable(steps, beside_s)


async def _decode_step(ask: AskTokens, number: int, probes: ServerProbes) -> float:
    """Mean seconds between tokens while so many sequences decode."""
    answers = await asyncio.gather(*(ask(probes.context, probes.answer) for _ in range(number)))
    return mean_gap(answers)


def mean_gap(answers: Sequence[Arrivals]) -> float:
    """Return the mean gap between tokens in the time in which all of several answers come."""
    from_s = max(times[1] for times in answers)
    until_s = min(times[-1] for times in answers)
    counts = [sum(from_s <= at_s <= until_s for at_s in times[1:]) for times in answers]
    if until_s <= from_s or min(counts) < 2:
        raise InputError(
            f"{len(answers)} answers never ran at the same time",
            field="--server",
            hint="stop what else uses the server, or let it run more sequences at a time",
        )
    return (until_s - from_s) / (statistics.fmean(counts) - 1.0)


async def _mixed_step(ask: AskTokens, size: int, number: int, probes: ServerProbes) -> float:
    """Seconds of a step of a prompt beside so many sequences: the longest gap of theirs in the middle."""
    running = [asyncio.create_task(ask(probes.context, 2 * probes.answer)) for _ in range(number)]
    # By then all of them decode, and none is done.
    await ask(1, 1 + probes.answer // 2)
    asked = await ask(size, 1)
    answers = await asyncio.gather(*running)
    gaps = [max(b - a for a, b in pairwise(times[1:]) if b > asked[0]) for times in answers]
    return statistics.median(gaps)


def count_tokens(piece: dict[str, Any], before: int) -> int:
    """Return how many tokens have come with a piece of a stream: as it says, or one more if it has any."""
    if not piece.get("choices"):
        return before
    said = (piece.get("usage") or {}).get("completion_tokens")
    return max(before, said) if isinstance(said, int) else before + 1


def completions_client(url: str, model: str, seed: int = 0) -> AskTokens:
    """Return how to ask the server at `url`; what is wrong with it is an InputError."""
    check_address(url)
    numbers = iter(range(seed, 1 << 62))

    async def ask(prompt: int, tokens: int) -> Arrivals:
        drawn = stream(next(numbers), "probe").integers(*_VOCABULARY, size=prompt).tolist()
        times, _ = await _stream_tokens(url, model, drawn, tokens)
        return times

    return ask


def words_client(url: str, model: str) -> AskWords:
    """Return how to ask the server at `url` in words, which it has to tokenise."""
    check_address(url)

    async def ask(prompt: str, tokens: int) -> ProbeAnswer:
        times, counted = await _stream_tokens(url, model, prompt, tokens)
        if not counted:
            raise InputError(
                f"{url} does not say how many tokens a prompt has",
                field="--server",
                hint="use a server that knows stream_options.include_usage",
            )
        return ProbeAnswer(times[0], times[1:], counted)

    return ask


def check_address(url: str) -> None:
    """Raise InputError unless it is the address of a server, as http://HOST:PORT."""
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    if not url.startswith("http://") or not host or not port.isdecimal():
        raise InputError(f"{url!r} is no address", field="--server", hint="write http://HOST:PORT")


async def _stream_tokens(
    url: str, model: str, prompt: str | list[int], tokens: int
) -> tuple[Arrivals, int]:
    """Return when each of so many tokens came, and how many tokens the server says that the prompt has."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        # Several tokens may come in one piece; servers that know this say how many.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    times, counted = [time.monotonic()], 0
    lines = stream_lines(f"{url.rstrip('/')}/v1/completions", body=body, timeout_s=_ANSWER_S)
    try:
        async with contextlib.aclosing(lines):
            async for line in lines:
                if line.startswith(b"data: {"):
                    piece = json.loads(line[6:])
                    count = count_tokens(piece, len(times) - 1)
                    times += [time.monotonic()] * (count - len(times) + 1)
                    said = (piece.get("usage") or {}).get("prompt_tokens")
                    counted = said if isinstance(said, int) else counted
    except (FetchError, ValueError) as error:
        raise InputError(f"{url} gives no answer: {error}", field="--server") from error
    if len(times) - 1 < tokens:
        raise InputError(
            f"{len(times) - 1} tokens came one by one where {tokens} were asked for",
            field="--server",
            hint="use a server that knows ignore_eos and streams every token",
        )
    return times[: tokens + 1], counted
