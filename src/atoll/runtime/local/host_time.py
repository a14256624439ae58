"""Host time of a server that runs: how long its steps take beyond what its kernels should.

A server that speaks OpenAI's API is asked for short and for longer answers, by so many clients at a time.
What a longer answer takes more, over the tokens it has more, is the time of a step with so many sequences;
prompts, connections and queues cancel out. Less what the performance model says of the kernels, it is a + b n
for n sequences, fitted by least squares with neither below 0.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import InputError
from atoll.engines.limits import HostTime
from atoll.perf.batch import Batch
from atoll.perf.step import StepModel, step_seconds

SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
_SHORT_TOKENS = 16
_LONG_TOKENS = 144
"""Lengths of two answers: the difference of their times is that of the steps between."""
_PROMPT_TOKENS = 24.0
_ANSWER_S = 600.0
Ask = Callable[[str, int], None]
"""Ask for an answer of exactly so many tokens to a prompt, and wait for it."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Seconds of a step with so many sequences, and of its kernels by the performance model."""

    sequences: int
    step_s: float
    kernels_s: float


def measure_steps(
    ask: Ask,
    steps: StepModel,
    sequences: Sequence[int] = SEQUENCES,
    *,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] | None = None,
) -> tuple[MeasuredStep, ...]:
    """Time steps of a server with these numbers of sequences; of several times the shortest counts."""
    tell = progress or (lambda _text: None)
    measured = []
    for count in sequences:
        tell(f"{count} clients")
        with ThreadPoolExecutor(count) as clients:
            _time_answers(clients, ask, count, _SHORT_TOKENS, 0, clock)
            short_s, long_s = (
                min(
                    _time_answers(clients, ask, count, tokens, i, clock)
                    for i in range(1, repeats + 1)
                )
                for tokens in (_SHORT_TOKENS, _LONG_TOKENS)
            )
        step_s = max(0.0, (long_s - short_s) / (_LONG_TOKENS - _SHORT_TOKENS))
        batch = Batch.decode(count, _PROMPT_TOKENS + 0.5 * (_SHORT_TOKENS + _LONG_TOKENS))
        kernels_s = step_seconds(steps, batch, 0, steps.spec.layers, host=False)
        measured.append(MeasuredStep(count, step_s, kernels_s))
    return tuple(measured)


def _time_answers(
    clients: ThreadPoolExecutor,
    ask: Ask,
    count: int,
    tokens: int,
    round_: int,
    clock: Callable[[], float],
) -> float:
    """Seconds until so many clients at a time have their answers."""
    # Different from the first word on, so that no prompt is known already.
    prompts = [f"{round_} {i} {tokens}: tell a long story." for i in range(count)]
    began_s = clock()
    list(clients.map(ask, prompts, [tokens] * count))
    return clock() - began_s


def fit_host(measured: Sequence[MeasuredStep]) -> HostTime:
    """Return the host time that explains best what steps take beyond their kernels."""
    if len({step.sequences for step in measured}) < 2:
        raise InputError("at least two numbers of sequences are needed", field="sequences")
    n = np.array([step.sequences for step in measured], dtype=np.float64)
    rest = np.array([step.step_s - step.kernels_s for step in measured])
    slope = float(np.cov(n, rest, bias=True)[0, 1] / np.var(n))
    fixed = float(np.mean(rest) - slope * np.mean(n))
    if slope < 0.0:
        slope, fixed = 0.0, float(np.mean(rest))
    elif fixed < 0.0:
        slope, fixed = float(rest @ n / (n @ n)), 0.0
    return HostTime(step_s=max(0.0, fixed), sequence_s=max(0.0, slope))


def completions(url: str, model: str) -> Ask:
    """Return how to ask the server at `url` for completions by a model; what is wrong is an InputError."""
    target = f"{url.rstrip('/')}/v1/completions"
    if not target.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is no address", field="--server", hint="write http://HOST:PORT")

    def ask(prompt: str, tokens: int) -> None:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        # Without it answers may end early, and time would say nothing.
        body |= {"ignore_eos": True, "min_tokens": tokens}
        data = json.dumps(body).encode()
        request = urllib.request.Request(target, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                made = json.load(answer)["usage"]["completion_tokens"]
        except urllib.error.HTTPError as error:
            said = error.read(200).decode(errors="replace")
            raise InputError(f"{target} answers {error.code}: {said}", field="--server") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{target} gives no completion: {error}",
                field="--server",
                hint="start the server, and name its model with --model",
            ) from error
        if made != tokens:
            raise InputError(
                f"an answer of {made} tokens where {tokens} were asked for",
                field="--server",
                hint="use a server that knows ignore_eos, as vLLM and SGLang do",
            )

    return ask
