"""The batch an engine works with at a given load, and how busy that keeps it.

Requests come at random and are answered as they come: how many are in a step follows from how many there
are. With N of them there on average (Little's law: N = rate x step), as many as a Poisson number with that
mean, an engine works a share 1 - exp(-N) of the time and has B = N / (1 - exp(-N)) in each of its steps. N
is found on a grid, linear between its points. Where both phases run together, B / out prompts come with
every step (`perf.mixed_capacity`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.perf.batch import Batch
from atoll.perf.operators import Array
from atoll.perf.step import StepModel, step_seconds
from atoll.workload.lengths import LengthMix

_POINTS = 96
_MIN_REQUESTS = 1e-3
"""Fewer requests at a time than this are taken to be alone."""


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Steps of one copy of a node's layers: their rate, kinds of steps by share, and the share of time busy.

    `sequences` is how many requests are in a step on average, of all that it decodes or prefills.
    """

    steps_per_s: float
    steps: tuple[tuple[float, Batch[float]], ...]
    busy: float
    sequences: float


def operating_point(
    model: StepModel, phase: Phase, lengths: LengthMix, start: int, end: int, requests_per_s: float
) -> OperatingPoint:
    """Return how a copy of layers [start, end) works that so many requests/s pass through in a phase.

    More than it can take keeps it busy all the time with the largest batch there is.
    """
    if requests_per_s < 0.0:
        raise UsageError(f"{requests_per_s:g} requests/s", field="requests_per_s")
    if requests_per_s == 0.0:
        return OperatingPoint(0.0, (), 0.0, 0.0)
    max_batch = largest_batch(model, phase, lengths)
    alone = min(1.0, max_batch)
    there = np.geomspace(_MIN_REQUESTS * alone, max_batch, _POINTS)
    share = -np.expm1(-there / alone)
    batch = np.minimum(there / share, max_batch)
    seconds = _mean_seconds(model, phase, lengths, start, end, batch)
    # Units that a step finishes of a request: all of it, or its tokens of a step.
    units = 1.0 if phase is Phase.PREFILL else lengths.output_mean / model.engine.made
    rates = np.maximum.accumulate(share * batch / seconds)
    rate = requests_per_s * units
    if rate >= rates[-1]:
        sequences, step_s, busy = float(batch[-1]), float(seconds[-1]), 1.0
        steps_per_s = 1.0 / step_s
    else:
        sequences = float(np.interp(rate, rates, batch))
        steps_per_s = rate / sequences
        busy = min(1.0, steps_per_s * float(np.interp(sequences, batch, seconds)))
    steps = _steps(phase, lengths, sequences, model.engine.made)
    return OperatingPoint(steps_per_s, steps, busy, sequences)


def largest_batch(model: StepModel, phase: Phase, lengths: LengthMix) -> float:
    """Return the most requests that a step of a phase may have: less than one where they run in pieces."""
    if phase is Phase.PREFILL:
        return model.largest_batch(Phase.PREFILL) / lengths.input_mean
    if phase is Phase.DECODE:
        return model.largest_batch(Phase.DECODE)
    if phase is Phase.BOTH:
        prompts = model.engine.made * lengths.input_mean / lengths.output_mean
        room = model.engine.mixed_tokens / (model.engine.rows + prompts)
        return max(1.0, min(room, float(model.engine.max_sequences)))
    raise UsageError(f"steps of the phase {phase} are not modelled", field="phase")


def _mean_seconds(
    model: StepModel, phase: Phase, lengths: LengthMix, start: int, end: int, batch: Array
) -> Array:
    zero = np.zeros_like(batch)
    context = zero + lengths.decode_context
    if phase is Phase.DECODE:
        return step_seconds(model, Batch(zero, zero, zero, batch, context), start, end)
    spread = _spread(lengths)
    if phase is Phase.PREFILL:
        rows = batch * lengths.input_mean
        return step_seconds(model, Batch(rows, batch, zero, zero, zero, spread), start, end)
    ended = batch * model.engine.made / lengths.output_mean
    with_prompts = np.minimum(1.0, ended)
    prompts = np.maximum(1.0, ended)
    rows = prompts * lengths.input_mean
    plain = step_seconds(model, Batch(zero, zero, zero, batch, context), start, end)
    mixed = step_seconds(model, Batch(rows, prompts, zero, batch, context, spread), start, end)
    return np.asarray((1.0 - with_prompts) * plain + with_prompts * mixed)


def _steps(
    phase: Phase, lengths: LengthMix, sequences: float, made: float
) -> tuple[tuple[float, Batch[float]], ...]:
    spread, context = _spread(lengths), lengths.decode_context
    if phase is Phase.DECODE:
        return ((1.0, Batch.decode(sequences, context)),)
    if phase is Phase.PREFILL:
        rows = sequences * lengths.input_mean
        return ((1.0, Batch.prefill(rows, sequences, length_spread=spread)),)
    ended = sequences * made / lengths.output_mean
    share, prompts = min(1.0, ended), max(1.0, ended)
    mixed = Batch(prompts * lengths.input_mean, prompts, 0.0, sequences, context, spread)
    plain = ((1.0 - share, Batch.decode(sequences, context)),) if share < 1.0 else ()
    return (*plain, (share, mixed))


def _spread(lengths: LengthMix) -> float:
    return lengths.input_mean_square / lengths.input_mean**2
