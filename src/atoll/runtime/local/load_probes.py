"""A short load of our own on a server that runs: what its clients see alone and so many at a time.

Alone, prompts of several lengths: first tokens and steps without anything else. Then closed loops: so many
clients, each asking again as soon as it has its answer. Answers of a client differ in length, and its first
one does not count: those who begin together would stay together. No two prompts are alike from the first word
on, so that no cache knows them. Nothing else may use the server meanwhile.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace

from atoll.core.errors import InputError
from atoll.core.rng import stream
from atoll.perf.server_fit import ServerLoad

_ALONE_TOKENS = 16
_MIN_ANSWER = 32
_SPREAD = (0.5, 1.5)
"""Lengths of answers of a closed loop, over their mean."""
_PROBE_WORDS = 64
_GROWTH = 32.0
"""Clients that make a step twice as long as it is for one, for what is said of the time it will take."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An answer: when it was asked for and each of its tokens came; `prompt_tokens` by the server."""

    sent_s: float
    came_s: Sequence[float]
    prompt_tokens: int

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.came_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Seconds per further token."""
        return (self.came_s[-1] - self.came_s[0]) / max(1, len(self.came_s) - 1)


AskWords = Callable[[str, int], Coroutine[None, None, ProbeAnswer]]
"""Ask for an answer of exactly so many tokens to a prompt."""
Say = Callable[[float, str], None]
"""Takes the share that is done and what is being done."""


@dataclass(frozen=True, slots=True)
class LoadProbes:
    """Which loads to make: prompts alone, `repeats` times each, and closed loops of clients.

    Clients of a loop send prompts of `prompt` tokens and get answers of `answer` in the mean, `rounds` each
    that count.
    """

    prompts: tuple[int, ...] = (128, 512, 2048)
    clients: tuple[int, ...] = (4, 16, 64)
    prompt: int = 512
    answer: int = 256
    repeats: int = 5
    rounds: int = 3

    def seconds(self, alone: Sequence[ServerLoad]) -> float:
        """Return about how long loops take on a server that shows these times to clients alone."""
        near = min(alone, key=lambda one: abs(one.input_tokens - self.prompt))
        # A client waits for its tokens and, once each, for the prompts of all; its first answer comes first.
        own_s = near.ttft_s + self.answer * (near.tpot_s or 0.0)
        return sum(
            (self.rounds + 1.5) * (own_s * (1.0 + count / _GROWTH) + count * near.ttft_s)
            for count in self.clients
        )

    def within(self, alone: Sequence[ServerLoad], left_s: float) -> LoadProbes:
        """Return probes that take no longer: shorter answers, then fewer clients; InputError if none fit."""
        found = self
        while found.seconds(alone) > left_s:
            if found.answer > _MIN_ANSWER:
                found = replace(found, answer=max(_MIN_ANSWER, found.answer // 2))
            elif len(found.clients) > 1:
                found = replace(found, clients=found.clients[:-1])
            else:
                raise InputError(
                    f"{found.clients[0]} clients take about {found.seconds(alone):.0f} s, and"
                    f" {max(0.0, left_s):.0f} s are left",
                    field="--deadline",
                    hint="give more time, or fewer --clients",
                )
        return found


@dataclass(slots=True)
class Words:
    """Prompts of about so many tokens, each unlike any other; `per_token` words make a token."""

    seed: int = 0
    per_token: float = 1.0
    _made: int = field(default=0, init=False)

    def prompt(self, tokens: float) -> str:
        """Return a prompt that nobody has seen before."""
        self._made += 1
        luck = stream(self.seed, "prompt", str(self._made))
        count = max(1, round(tokens * self.per_token))
        words = WORDS.split()
        return " ".join(words[at] for at in luck.integers(len(words), size=count))


WORDS = (
    "time year people way day man thing woman life child world school state family student group country"
    " problem hand part place case week company system program question work night point home water room"
    " mother area money story fact month lot right study book eye job word business issue side kind head"
    " house service friend father power hour game line end member law car city name team minute idea body"
)


async def measure_alone(
    ask: AskWords, words: Words, probes: LoadProbes, say: Say
) -> list[ServerLoad]:
    """Return what a client sees that is alone, by length of prompt."""
    # Warm-up: shapes compile at their first use, and what the server counts says how long words are.
    first = await ask(words.prompt(_PROBE_WORDS), _ALONE_TOKENS)
    words.per_token *= _PROBE_WORDS / max(1, first.prompt_tokens)
    for tokens in probes.prompts:
        await ask(words.prompt(tokens), _ALONE_TOKENS)
    found = []
    for at, tokens in enumerate(probes.prompts):
        say(at / len(probes.prompts), f"prompts of {tokens:,} tokens alone")
        answers = [await ask(words.prompt(tokens), _ALONE_TOKENS) for _ in range(probes.repeats)]
        found.append(_load(1.0, answers, statistics.median))
    return found


async def measure_loops(
    ask: AskWords, words: Words, probes: LoadProbes, say: Say
) -> AsyncIterator[ServerLoad]:
    """Yield what clients see, by how many of them there are at a time."""
    for at, count in enumerate(probes.clients):
        say(at / len(probes.clients), f"{count} clients at a time")
        answers = await _loop(ask, words, probes, count)
        yield _load(float(count), answers, statistics.fmean)


async def _loop(ask: AskWords, words: Words, probes: LoadProbes, count: int) -> list[ProbeAnswer]:
    """Run a closed loop; returns answers that began and ended while all clients were at work."""
    lengths = stream(words.seed, "answers", str(count))
    low, high = (max(2, round(edge * probes.answer)) for edge in _SPREAD)
    counted: list[ProbeAnswer] = []
    unready = set(range(count))

    async def client(number: int) -> None:
        while len(counted) < count * probes.rounds:
            counts = not unready
            answer = await ask(words.prompt(probes.prompt), int(lengths.integers(low, high + 1)))
            unready.discard(number)
            if counts and len(counted) < count * probes.rounds:
                counted.append(answer)

    async with asyncio.TaskGroup() as clients:
        for number in range(count):
            clients.create_task(client(number))
    return counted


def _load(
    clients: float, answers: Sequence[ProbeAnswer], mean: Callable[[Sequence[float]], float]
) -> ServerLoad:
    return ServerLoad(
        clients,
        statistics.fmean(one.prompt_tokens for one in answers),
        statistics.fmean(len(one.came_s) for one in answers),
        mean([one.ttft_s for one in answers]),
        mean([one.tpot_s for one in answers]),
        varied=True,
    )
