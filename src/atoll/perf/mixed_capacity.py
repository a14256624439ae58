"""Capacity of nodes that run both phases: steps that decode, some of them with prompts beside.

Let B sequences decode in every step of a node. Each makes `out` tokens, so B / out prompts come per step
(with guesses that make g tokens of a step B g / out, and T / g stands for T in what is promised per token):
a share q = min(1, B / out) of all steps has prompts in it, p = max(1, B / out) of them. With t(B, n) the
time of a step with n prompts,

    T(B) = (1 - q) t(B, 0) + q t(B, p),    M(B) = (1 - q) t(B, 0)^2 + q t(B, p)^2

are the mean step and its mean square, and the node carries R = B / (out T(B)) requests/s. A step takes at
most the engine's `mixed_tokens`; with that many, prompts pass at one per s(B) seconds, and rho = R s is how
much of that is used. A request keeps its promise, in each of S stages with hand-over u, if

    T (1 + V / (o t(B, 0))) + W + u <= TPOT / S       W = M / 2T where S > 1 (the step in progress), else 0
    t(B, p) + M / 2T + K s H(rho) + u <= (TTFT - a) / S

(`perf.queueing` for K and H; a prompt longer than a step goes on in the next ones). V is the work of prompts
that came while a request waited for its own, r x (1 + r K / (1 - r)) with x = (t(B, p) - t(B, 0)) / p for
each and r = 1 - t(B, 0) / T: they are done before it gets on, which matters to short answers, and o is the
length of a median one. a is what the engine takes beside steps (`EngineProfile.request_s`, and `stream_s` for
each of the B S sequences that run) and, for a single node that prepares a step when the one before it begins,
that step T where any runs.

From both follows how long a request stays; as many as are there at a time (Little's law) must find room for
prompt and answer as the engine books them. Everything on the left rises with B and with the number of layers,
and R rises with B, so the best B is the largest; it is searched on a grid and is linear between its points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atoll.catalog.link_table import Link
from atoll.core.ids import Phase
from atoll.perf.batch import Batch
from atoll.perf.capacity import (
    PerPosition,
    RoleLoad,
    fixed_seconds,
    held_share,
    held_spread,
    piece_times,
)
from atoll.perf.grid import Indices
from atoll.perf.memory_model import MemoryModel
from atoll.perf.operators import ACTIVATION_BYTES, Array
from atoll.perf.queueing import longest_wait, places_taken
from atoll.perf.step import Position, StepModel, slowest_run, window_counts
from atoll.workload.lengths import LengthMix

_GRID_POINTS = 48
_MIN_SEQUENCES = 1.0 / 16.0
_LIMITS = ("promise per token", "KV memory", "promise of the first token")


class MixedCapacityModel:
    """Capacity of one copy of a node's layers with both phases, in requests/s.

    Without `waits` requests are there when there is room for them: the whole KV cache is in use, and none
    queues.
    """

    def __init__(
        self,
        prompts: RoleLoad,
        answers: RoleLoad,
        model: StepModel,
        *,
        link: Link | None = None,
        waits: bool = True,
    ) -> None:
        self._prompts, self._answers, self._model = prompts, answers, model
        self._waits = waits
        self._link = link
        # What prompts have in common is computed once, and kept, by engines that look for it.
        shares = model.engine.prefix_caching and not model.engine.slots
        self._lengths = prompts.lengths if shares else replace(prompts.lengths, prefix=None)
        self._own = lengths = self._lengths.computed
        resident = self._lengths.resident
        memory = MemoryModel.of(
            model.spec, model.node, tp=model.tp, engine=model.engine, phase=Phase.BOTH
        )
        context = lengths.decode_context
        booked = held_share(lengths, Phase.BOTH, model.engine)
        self._places = PerPosition(
            lambda position: memory.sequences_by_layers(context, position, resident) * booked
        )
        mean = prompts.lengths.input_mean
        self._tail = lengths.input_tail if lengths.input_tail > mean else 0.0
        longest = max(1.0, self._tail, float(prompts.max_model_len))
        self._held_spread = held_spread(lengths, Phase.BOTH, model.engine)
        if model.engine.slots:
            # All of one size, whatever a request needs of it.
            self._held_spread = 1.0
            self._places = PerPosition(
                lambda position: np.minimum(
                    np.floor(memory.sequences_by_layers(longest, position)),
                    model.engine.max_sequences,
                )
            )
        self._longest_fits = PerPosition(
            lambda position: memory.sequences_by_layers(longest, position) >= 1.0
        )
        max_tokens = float(model.engine.mixed_tokens)
        # Every sequence in a step brings its share of a prompt along.
        self._made, rows = model.engine.made, float(model.engine.rows)
        prompts_each = self._made * lengths.input_mean / lengths.output_mean
        max_sequences = max_tokens / (rows + prompts_each)
        max_sequences = max(
            2.0 * _MIN_SEQUENCES, min(max_sequences, float(model.engine.max_sequences))
        )
        self._grid = np.geomspace(_MIN_SEQUENCES, max_sequences, _GRID_POINTS)
        running = np.maximum(self._grid, 1.0)
        per_step = self._grid * self._made / lengths.output_mean
        self._share = np.minimum(per_step, 1.0)
        ranks = model.engine.spread(model.spec, model.node.count, model.tp)
        if ranks is not None:
            # Copies that share experts go in step: each waits for the prompts of any.
            self._share = 1.0 - (1.0 - self._share) ** ranks
        left = np.maximum(max_tokens - running * rows, 1.0)
        self._full = np.maximum(1.0, left / lengths.input_mean)
        self._pieces = np.maximum(1.0, lengths.input_mean / left)
        self._counts = window_counts(model.spec, model.kinds)
        self._plain = self._times(running, np.zeros_like(running))
        self._prompts_in_step = np.maximum(per_step, 1.0)
        self._mixed = self._times(running, self._prompts_in_step)
        self._packed = self._times(running, self._full)
        # The longest prompt that must keep the promise, alone.
        self._tail_pieces = PerPosition(
            lambda position: piece_times(model, self._counts, self._tail, max_tokens, position)
        )
        self._tail_hop_s = self._hop_s(min(self._tail, max_tokens))

    def _times(self, running: Array, prompts: Array) -> PerPosition[Array]:
        """Seconds of steps by position: (layers + 1, batches)."""
        lengths, zero = self._own, np.zeros_like(running)
        spread = lengths.input_mean_square / lengths.input_mean**2
        rows = prompts * lengths.input_mean
        context, found = zero + self._lengths.decode_context, zero + self._lengths.found
        parts = self._model.parts(Batch(rows, prompts, found, running, context, spread))
        layers = slowest_run(self._counts, parts.layers)

        def at(position: Position) -> Array:
            total = layers + fixed_seconds(parts, position)
            # Tables have noise: a larger batch is never faster, nor are more layers.
            total = np.maximum.accumulate(total, axis=1)
            return np.asarray(np.maximum.accumulate(total, axis=0))

        return PerPosition(at)

    def throughputs(self, stages: Sequence[int], positions: Sequence[Position]) -> Array:
        """Return requests/s, (positions, stage counts, layers + 1), promises split evenly over stages."""
        lengths = self._prompts.lengths
        depth = np.array(stages, dtype=np.float64)[:, None, None]
        # No layers and no host time take no time: the entry for j = 0 is never used.
        with np.errstate(divide="ignore", invalid="ignore"):
            rates = np.stack([self._rates(depth, position) for position in positions])
        rates[:, :, 0] = 0.0
        if self._link is not None:
            row_bytes = self._model.spec.hidden * ACTIVATION_BYTES
            tokens = self._own.input_mean + lengths.output_mean
            wire = self._link.bandwidth_bytes_per_s / (row_bytes * tokens)
            rates = np.minimum(rates, np.where(depth[:, :, 0] > 1.0, wire, np.inf))
        # Rounding must not break what holds exactly: a node with more layers carries no more.
        rates[:, :, 1:] = np.minimum.accumulate(rates[:, :, 1:], axis=2)
        return rates

    def limit(self) -> str:
        """Return what bounds the requests/s of a single node with all layers."""
        depth, position = np.ones((1, 1, 1)), Position.WHOLE
        with np.errstate(divide="ignore", invalid="ignore"):
            found = float(self._rates(depth, position)[0, -1])
            rate, *pressures = self._pressures(depth, position)
        if self._places[position][-1] < 1.0:
            return "memory: no room for one request"
        if found <= 0.0:
            return "promise: one request alone takes longer"
        at = [float(np.interp(found, rate[-1], pressure[0, -1])) for pressure in pressures]
        max_batch = max(at)
        if max_batch < 1.0 - 1e-3:
            return "the engine's largest batch"
        return _LIMITS[at.index(max_batch)]

    def _rates(self, depth: Array, position: Position) -> Array:
        """Requests/s at a position: (stage counts, layers + 1)."""
        rate, per_token, room, first = self._pressures(depth, position)
        # By how much each limit is passed, in units of it: the first to rise above 0 binds.
        passed = np.maximum(np.maximum(per_token, room), first) - 1.0
        passed[:, 0] = -1.0
        fits = (self._places[position] >= 1.0) & self._longest_fits[position]
        if self._tail:
            count = depth[..., 0]
            hop_tail = np.where(count > 1.0, self._tail_hop_s, 0.0)
            step_s = self._tail_pieces[position].stage_seconds(count)
            left_s = self._prompts.slo_s - self._model.engine.request_s
            in_time = (step_s + hop_tail) * count <= left_s
            fits = fits & in_time
        return np.where(fits, _largest(passed, rate), 0.0)

    def _pressures(self, depth: Array, position: Position) -> tuple[Array, Array, Array, Array]:
        """Requests/s by batch, and what they need in units of each limit (`_LIMITS`)."""
        lengths = self._own
        plain, mixed = self._plain[position], self._mixed[position]
        share = self._share
        mean = (1.0 - share) * plain + share * mixed
        residual = 0.5 * ((1.0 - share) * plain**2 + share * mixed**2) / mean
        rate = self._grid * self._made / (lengths.output_mean * mean)
        # A step more for every further piece of a prompt.
        more = (self._pieces - 1.0) * plain
        turn = self._packed[position] / self._full + more
        once = 0.5 * lengths.input_mean_square / lengths.input_mean**2
        queue = np.zeros_like(turn)
        if self._waits:
            with np.errstate(invalid="ignore"):
                queue = once * turn * longest_wait(rate * turn, depth, self._prompts.share)
        first = mixed + more + residual
        hop_first = np.where(depth > 1.0, self._hop_s(lengths.input_mean), 0.0)
        hop = np.where(depth > 1.0, self._hop_s(1.0), 0.0)
        each = (mixed - plain) / self._prompts_in_step
        with np.errstate(divide="ignore", invalid="ignore"):
            used = 1.0 - plain / mean
            backlog = used * each * (1.0 + used * once * mean / plain)
            steps = _median(lengths) / self._made
            paced = mean * (1.0 + backlog / (steps * plain)) / self._made
        token_s = (paced + np.where(depth > 1.0, residual, 0.0) + hop) * depth
        prompt_s = (first + hop_first) * depth
        # Before it gets KV cache: so `stay` is without it.
        engine = self._model.engine
        prepared = np.where(depth > 1.0, 0.0, mean * np.minimum(self._grid, 1.0))
        tokens_s = engine.tokenize_s * self._lengths.input_mean
        front_s = engine.request_s + tokens_s + engine.stream_s * self._grid * depth
        before_s = front_s + (prepared if engine.schedules_ahead else 0.0)
        stay = rate * (lengths.output_mean * token_s + prompt_s)
        taken = self._places[position]
        if self._waits:
            taken = places_taken(taken, self._held_spread)
        with np.errstate(divide="ignore", invalid="ignore"):
            return (
                # Steps that outgrow CUDA graphs take longer at once: fewer sequences may carry more.
                np.maximum.accumulate(rate, axis=-1),
                token_s / self._answers.slo_s,
                stay / taken[:, None],
                (prompt_s + queue * depth + before_s) / self._prompts.slo_s,
            )

    def _hop_s(self, tokens: float) -> float:
        if self._link is None:
            return 0.0
        row_bytes = self._model.spec.hidden * ACTIVATION_BYTES
        return tokens * row_bytes / self._link.bandwidth_bytes_per_s + self._link.latency_s


def _largest(passed: Array, rate: Array) -> Array:
    """Return the rate, rising along the last axis, where `passed` rises above 0; 0 where it always is."""
    passed = np.maximum.accumulate(np.nan_to_num(passed, nan=np.inf), axis=-1)
    last = passed.shape[-1] - 1
    below = np.count_nonzero(passed <= 0.0, axis=-1)
    left = np.clip(below - 1, 0, last - 1)
    at = np.broadcast_to(rate, passed.shape)

    def pick(values: Array, index: Indices) -> Array:
        return np.take_along_axis(values, index[..., None], axis=-1)[..., 0]

    low, high = pick(passed, left), pick(passed, left + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(high > low, -low / (high - low), 1.0)
    share = np.clip(np.nan_to_num(share), 0.0, 1.0)
    found = pick(at, left) * (1.0 - share) + pick(at, left + 1) * share
    return np.where(below == 0, 0.0, np.where(below > last, pick(at, left + 1), found))


def _median(lengths: LengthMix) -> float:
    """The median answer in tokens, lengths taken as log-normal."""
    return max(1.0, lengths.output_mean**2 / math.sqrt(lengths.output_mean_square))
