"""Capacity: the most tokens per second a node can carry within a latency budget.

A node holds j layers of a role in a pipeline of S stages, each with budget b = SLO / S for its step
and the hand-over to the next stage. With a batch of B requests a step takes t(B) = h + j l(B) (+ the
output matrix) seconds and the hand-over u(B). Then

    X(B) = min( B / t(B),  N / (S (t(B) + u(B))) )      subject to  t(B) + u(B) <= b

requests per second: a busy node finishes B every t(B), and all requests in the pipeline, N at most,
keep their KV cache on it for the S (t + u) seconds of a round (Little's law). t(B)/B falls with B,
since every term of t is a norm of affine functions with non-negative intercepts, so the first limit
rises with B and the second falls: the best B is the largest the budget allows, or where the two
cross, S B (1 + u/t) = N. In a pipeline X is also at most what the link carries, bandwidth over the
activation bytes of a request. Throughput never rises with j and never falls with b, because t rises and N
falls with j, and the budget only cuts the choice of B. t is tabulated on a grid of B and linear
between its points, which keeps all of this exact.

A first token takes the engine some time beside steps (`EngineProfile.request_s`): of the budget of prefill an
S-th of that is gone.

Prompts longer than the T tokens that a step takes run in pieces, in pipelines one behind the other. Where
that goes for mean ones B = T / length < 1 of them is in a step, and 1 / B pieces pass S stages in
1 / B + S - 1 steps: t(B) counts (1 / B + S - 1) / S times. The longest prompt that must be in time is cut in
the same way (`PieceTimes`).

Queueing is not part of it unless a role `waits`: a node at its capacity is always busy, and arrivals that
come in bursts wait. With `waits`, capacity is what a node carries with half of all requests within the
promise, when they arrive at random (`perf.queueing`):

- A prompt that arrives waits for half a step in progress, and then shares its own step at every stage:
  (1 + 1 / 2S) t(B) + u <= b. How far a node is loaded follows from the wait that is left beside a prompt's
  own step, t(1) + (1 + 1 / 2S) K H(rho) / X + u <= b: it carries rho X.
- Engines take all prompts that wait into a step. In a pipeline with KV cache for no more than N of them, that
  are all there are, if a step takes so many: the other stages have nothing to do, X <= N / (S (t(N) + u)).
- Where tokens go round a pipeline, engines pace their batches: S of them at most are in flight
  (`routing.pacing`), and a token takes S t. Without that S + 1 arise by themselves.
- Half of all requests must find room in the KV cache: all that run fill it with what they have so far, or,
  where an engine does not admit by prompts alone (`EngineProfile.admits_by_prompts`), it books a prompt and
  the answer expected when a request comes, and uses `BOOKED_SHARE` of the cache at most.

Prefill counts prompt tokens/s with B prompts in a step; decode counts generated tokens/s.

A node of n GPUs holds n / TP copies of its layers side by side, each split over TP GPUs, with KV cache, batch
and share TP / n of the node's link of its own: it carries n / TP times what one copy does. Which TP is best
differs by entry: splitting costs all-reduces, and not splitting holds the weights n times. A maximum over
TPs never rises with j nor falls with b either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.link_table import Link
from atoll.catalog.nodes import Interconnect, NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError, UsageError
from atoll.core.ids import Phase
from atoll.engines.limits import BOOKED_SHARE
from atoll.engines.profile import EngineProfile
from atoll.engines.table import EngineChoice
from atoll.perf.batch import Batch
from atoll.perf.grid import Indices, last_below, value_at
from atoll.perf.memory_model import MemoryModel
from atoll.perf.operators import ACTIVATION_BYTES, Array
from atoll.perf.queueing import BUSIEST, places_taken, waits_by_load
from atoll.perf.step import Position, StepModel, StepParts, slowest_run, window_counts
from atoll.workload.lengths import LengthMix

_GRID_POINTS = 96
PositionArray = TypeVar("PositionArray")


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """One role to be placed: an llm's phase, its latency promise, and the lengths it will see.

    `slo_s` is the prefill latency (TTFT) or the decode latency per token (TPOT) of the whole model. With
    `together` the node runs the other phase, too, and keeps memory for the activations of both. With `waits`
    requests come at random, and a `share` of them must keep the promise, waiting included. A node has room
    for one request of `max_model_len` tokens, without which engines do not start, or carries nothing.
    """

    name: str
    spec: TransformerSpec
    phase: Phase
    slo_s: float
    lengths: LengthMix
    together: bool = False
    waits: bool = False
    share: float = 0.5
    max_model_len: int = 0

    def __post_init__(self) -> None:
        if self.phase not in (Phase.PREFILL, Phase.DECODE):
            raise UsageError(f"capacity is per phase, not {self.phase.value}", field="phase")
        if not 0.0 < self.slo_s < float("inf"):
            raise InputError(f"{self.slo_s!r} is not a latency above 0", field="slo_s")
        longest = self.lengths.input_mean + self.lengths.output_mean
        if longest > self.spec.max_context:
            raise InputError(
                f"a mean request of {longest:,.0f} tokens exceeds the model's {self.spec.max_context:,}",
                field="lengths",
                hint="use shorter lengths, or a model with a longer context",
            )
        if self.lengths.input_tail > self.spec.max_context:
            raise InputError(
                f"a prompt of {self.lengths.input_tail:,.0f} tokens exceeds the model's "
                f"{self.spec.max_context:,}",
                field="input_tail",
                hint="promise shorter prompts, or use a model with a longer context",
            )


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of one node. `throughput` is tokens/s, 0 if the promise cannot be kept."""

    throughput: float
    batch: float
    step_s: float
    transfer_s: float
    limit: str


@dataclass(frozen=True)
class CapacityTable:
    """Throughput in tokens/s of one role on one node type, by position, stage count and layers.

    `throughput[position, S - 1, j]`: j = 0..layers, S = 1..stages. For S = 1 the only position is
    WHOLE; for S >= 2 a stage is FIRST, MIDDLE or LAST. Entries are 0 where j layers do not fit or the
    budget cannot be kept. `tp` is, of the same shape, over how many GPUs each layer is split for that, and
    `provenance` where the times come from.
    """

    role: RoleLoad
    node: NodeType
    tp: NDArray[np.int64]
    throughput: Array
    provenance: str

    POSITIONS = (Position.FIRST, Position.MIDDLE, Position.LAST, Position.WHOLE)

    def at(self, layers: int, stages: int, position: Position | None = None) -> float:
        """Return tokens/s with `layers` layers in a pipeline of `stages`; the worst position if none."""
        if not 0 <= layers <= self.role.spec.layers:
            raise UsageError(
                f"{layers} layers of a model with {self.role.spec.layers}", field="layers"
            )
        if position is not None and (position is Position.WHOLE) != (stages == 1):
            raise UsageError(
                f"{position.value} is no position in a pipeline of {stages}", field="position"
            )
        rates = self.stage_row(stages)[:, layers]
        if position is None:
            return float(rates[-1] if stages == 1 else rates[:3].min())
        return float(rates[self.POSITIONS.index(position)])

    def stage_row(self, stages: int) -> Array:
        """Return the table of one stage count: (position, layers)."""
        if not 1 <= stages <= self.throughput.shape[1]:
            raise UsageError(
                f"{stages} stages; the table has 1 to {self.throughput.shape[1]}", field="stages"
            )
        return self.throughput[:, stages - 1, :]


class PerPosition(dict[Position, PositionArray], Generic[PositionArray]):
    """Arrays by position, worked out when they are first asked for: single nodes have one position only."""

    def __init__(self, make: Callable[[Position], PositionArray]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, position: Position) -> PositionArray:
        self[position] = found = self._make(position)
        return found


@lru_cache(maxsize=256)
def _geometric(largest: float) -> Array:
    """Batch sizes up to the largest one. The array is shared: do not write to it."""
    return np.geomspace(1.0, largest, _GRID_POINTS) if largest > 1.0 else np.array([largest])


class CapacityModel:
    """Capacities of one role on one node type at one tensor-parallel size, times computed once.

    Budgets are given with each question: the role's own promise is not looked at.
    """

    def __init__(self, role: RoleLoad, model: StepModel, *, link: Link | None = None) -> None:
        if model.spec is not role.spec and model.spec != role.spec:
            raise UsageError("the step model is of another transformer than the role")
        self._role = role
        self._model = model
        # What prompts have in common is computed once, and kept, by engines that look for it.
        shares = model.engine.prefix_caching
        self._lengths = role.lengths if shares else replace(role.lengths, prefix=None)
        self._own = self._lengths.computed
        runs = Phase.BOTH if role.together else role.phase
        self._memory = MemoryModel.of(
            model.spec, model.node, tp=model.tp, engine=model.engine, phase=runs
        )
        self._replicas = model.node.count // model.tp
        self._grid = self._batch_grid()
        # A grid that begins below 1 has only the piece of a request that a step takes (`_batch_grid`).
        self._pieces = max(1.0, 1.0 / float(self._grid[0]))
        parts = _regular(model.parts(self._batches(self._grid)), self._grid)
        self._fixed = PerPosition(lambda position: fixed_seconds(parts, position))
        self._counts = window_counts(model.spec, model.kinds)
        self._stack_s = slowest_run(self._counts, parts.layers)
        # Copies side by side have a share of the node's link each.
        self._link = link and link.share(model.tp, model.node.count)
        self._transfer_s = self._transfer(self._grid * self._tokens_per_request)
        self._places = PerPosition(self._requests)
        self._room = PerPosition(lambda position: self._taken(self._places[position]))
        self._tail_room = PerPosition(self._tail_fits)
        self._ends: dict[tuple[Position, ...], _Ends] = {}
        self._tail_pieces = PerPosition(
            lambda position: piece_times(model, self._counts, self._tail, self._most, position)
        )

    # What a batch of B requests is.

    @property
    def _tokens_per_request(self) -> float:
        """Tokens of a request that a step computes."""
        return self._own.input_mean if self._role.phase is Phase.PREFILL else 1.0

    @property
    def _units_per_request(self) -> float:
        """Tokens of a request that count as done with a step: of prompts also those that were found."""
        prefill = self._role.phase is Phase.PREFILL
        return self._lengths.input_mean if prefill else self._made

    @property
    def _made(self) -> float:
        """Tokens that a step makes of a sequence that decodes: more than one where guesses were right."""
        return 1.0 if self._role.phase is Phase.PREFILL else self._model.engine.made

    @property
    def _most(self) -> float:
        """Tokens, or sequences, that the engine puts into one step."""
        return self._model.largest_batch(self._role.phase)

    def _batch_grid(self) -> Array:
        """Batch sizes from one request to the engine's limit, denser where times bend.

        Only the limit where a request is more than that: steps then hold pieces of it.
        """
        return _geometric(self._most / self._tokens_per_request)

    def _batches(self, requests: Array) -> Batch[Array]:
        zero = np.zeros_like(requests)
        lengths = self._own
        if self._role.phase is Phase.DECODE:
            lengths = self._lengths
            return Batch(zero, zero, zero, requests, zero + lengths.decode_context)
        spread = lengths.input_mean_square / lengths.input_mean**2
        found = zero + self._lengths.found
        return Batch(requests * lengths.input_mean, requests, found, zero, zero, spread)

    @property
    def _wire_tokens_per_s(self) -> float:
        """Tokens/s whose activations one copy's share of the link carries."""
        if self._link is None:
            return np.inf
        return self._link.bandwidth_bytes_per_s / (self._model.spec.hidden * ACTIVATION_BYTES)

    def _transfer(self, rows: Array) -> Array:
        """Seconds to hand the activations of so many tokens to the next stage."""
        if self._link is None:
            return np.zeros_like(rows)
        row_bytes = self._model.spec.hidden * ACTIVATION_BYTES
        return rows * row_bytes / self._link.bandwidth_bytes_per_s + self._link.latency_s

    def _requests(self, position: Position) -> Array:
        """Requests whose KV cache fits beside j layers (a prompt's grows to its full length)."""
        lengths = self._own
        prefill = self._role.phase is Phase.PREFILL
        context = lengths.input_mean if prefill else lengths.decode_context
        held = self._memory.sequences_by_layers(context, position, self._lengths.resident)
        if not self._role.waits:
            return held
        return held * held_share(lengths, self._role.phase, self._model.engine)

    def _taken(self, places: Array) -> Array:
        """Requests that may be there at a time, on average."""
        if not self._role.waits:
            return places
        spread = held_spread(self._own, self._role.phase, self._model.engine)
        return places_taken(places, spread)

    def _more_steps(self, stages: Array) -> Array:
        """Steps that a request waits at a stage beside its own."""
        if not self._role.waits:
            return np.zeros_like(stages)
        # Half a step in progress, once in the whole pipeline: a share of it for each stage.
        return 0.5 / stages if self._role.phase is Phase.PREFILL else np.zeros_like(stages)

    def _left(self, stages: Array, budgets_s: Array) -> Array:
        """Seconds of the budgets that are left for steps and hand-overs; a step has all tokens it makes."""
        budgets_s = budgets_s * self._made
        engine = self._model.engine
        tokens = max(self._role.lengths.input_mean, self._tail)
        beside_s = engine.request_s + engine.tokenize_s * tokens
        return budgets_s - (beside_s if self._role.phase is Phase.PREFILL else 0.0) / stages

    def _own_steps(self, stages: Array) -> Array:
        """Steps that a request takes at a stage: one, or more where it runs in pieces."""
        return np.asarray((self._pieces - 1.0 + stages) / stages)

    @property
    def _tail(self) -> float:
        """Tokens of the longest prompt that must keep the promise; 0 where the mean one says it all."""
        lengths = self._role.lengths
        counts = self._role.phase is Phase.PREFILL and lengths.input_tail > lengths.input_mean
        return lengths.input_tail if counts else 0.0

    def _tail_fits(self, position: Position) -> NDArray[np.bool_]:
        """Whether the KV cache of the longest prompt or request fits alone, per number of layers."""
        longest = max(self._tail, float(self._role.max_model_len))
        if not longest:
            return np.ones(1, dtype=np.bool_)
        return np.asarray(self._memory.sequences_by_layers(longest, position) >= 1.0)

    # The search over B, for all stage counts and numbers of layers at once.

    def throughput(
        self, stages: Sequence[int], budgets_s: Sequence[float], position: Position
    ) -> Array:
        """Return tokens/s, (stage counts, layers + 1), for pipelines of `stages` with these budgets."""
        return np.asarray(self.throughputs(stages, budgets_s, [position])[0])

    def throughputs(
        self, stages: Sequence[int], budgets_s: Sequence[float], positions: Sequence[Position]
    ) -> Array:
        """Return tokens/s at several positions at once, (positions, stage counts, layers + 1)."""
        from atoll.perf.capacity_kernel import fill_rates

        depth = np.array(stages, dtype=np.float64)
        budgets = self._left(depth, np.array(budgets_s, dtype=np.float64))
        ends = self._ends_at(tuple(positions))
        own = self._own_steps(depth)
        passes = own + self._more_steps(depth)
        prefill = self._role.phase is Phase.PREFILL
        lengths, share = self._own, self._role.share
        # A hop carries one piece of it at a time.
        longest = np.minimum(self._tail, self._most) * np.ones(1)
        piped = depth > 1.0
        one_copy = np.empty((len(positions), len(depth), len(self._stack_s)))
        fill_rates(
            self._grid, self._stack_s, ends.fixed, self._transfer_s, ends.room, ends.fits, depth, budgets,
            passes, own if prefill else passes, depth * own, 1.0 + 0.5 / depth,
            np.where(piped, self._wire_tokens_per_s, np.inf),
            np.where(piped, self._transfer(longest), 0.0), ends.tail_all, ends.tail_longest,
            bool(self._role.waits and prefill),
            float(0.5 * lengths.input_mean_square / lengths.input_mean**2), float(share),
            BUSIEST, float(self._units_per_request), *waits_by_load(0.5),
            *waits_by_load(share), one_copy,
        )  # fmt: skip
        return one_copy * self._replicas

    def linked(self, link: Link | None) -> CapacityModel:
        """Return the same model with another link; all that does not depend on it is shared."""
        other = copy(self)
        other._link = link and link.share(self._model.tp, self._model.node.count)
        other._transfer_s = other._transfer(self._grid * self._tokens_per_request)
        return other

    def _ends_at(self, positions: tuple[Position, ...]) -> _Ends:
        """Return the parts that differ by position, stacked, computed once."""
        known = self._ends.get(positions)
        if known is None:
            width = len(self._stack_s)
            fits = [(self._places[p] >= 1.0) & self._tail_room[p] for p in positions]
            tails = [self._tail_pieces[p] for p in positions] if self._tail else []
            nothing = np.zeros((len(positions), 0))
            known = self._ends[positions] = _Ends(
                fixed=np.array([self._fixed[p] for p in positions]),
                room=np.array([self._room[p] for p in positions]),
                fits=np.array([np.broadcast_to(one, (width,)) for one in fits]),
                tail_all=np.array([one.all_s for one in tails]) if tails else nothing,
                tail_longest=np.array([one.longest_s for one in tails]) if tails else nothing,
            )
        return known

    def detail(self, layers: int, stages: int, budget_s: float, position: Position) -> Capacity:
        """Return the capacity with exactly `layers` layers and which limit binds."""
        depth = np.array([float(stages)])
        best = self._best(depth, self._left(depth, np.array([budget_s])), [position])
        tokens = float(self.throughput([stages], [budget_s], position)[0, layers])
        at = (0, 0, layers)
        largest = len(self._grid) - 1
        late, crowded = best.late[at], best.crowded[at]
        fits = np.broadcast_to(self._tail_room[position], self._places[position].shape)[layers]
        # Limits that leave nothing come first, then those that only cut the batch.
        if self._places[position][layers] < 1.0:
            limit = "memory: no room for the layers and one request's KV cache"
        elif not fits:
            limit = "memory: no room for the layers and the longest request's KV cache"
        elif not best.feasible[at]:
            limit = "latency: one request alone takes longer than the budget"
        elif stages > 1 and tokens >= self._wire_tokens_per_s * self._replicas * (1.0 - 1e-9):
            limit = "the link between stages"
        elif crowded < min(late, largest) or best.occupancy[at] < 1.0:
            limit = "KV memory"
        elif late < largest:
            limit = "latency budget"
        else:
            limit = "the engine's largest batch"
        batch = float(best.batch[at]) if tokens > 0.0 else 0.0
        return Capacity(tokens, batch, float(best.step_s[at]), float(best.transfer_s[at]), limit)

    def _best(self, stages: Array, budgets_s: Array, positions: Sequence[Position]) -> _Best:
        """Return the best batch per position, stage count and number of layers.

        Times are looked up at an index of the grid of batches for each of them, where a search asks.
        """
        size, width = len(self._grid), len(self._stack_s)
        # A single stage hands nothing over.
        hops = np.where(stages[:, None] > 1.0, self._transfer_s, 0.0).ravel()
        steps = np.stack([self._stack_s + self._fixed[position] for position in positions]).ravel()
        first_step = (np.arange(len(positions) * width) * size).reshape(len(positions), 1, width)
        first_hop = (np.arange(len(stages)) * size)[None, :, None]
        room = np.stack([self._room[position] for position in positions])[:, None, :]
        places = np.stack([self._places[position] for position in positions])[:, None, :]
        # A step with what is waited for before it.
        own = self._own_steps(stages)[None, :, None]
        passes = own + self._more_steps(stages)[None, :, None]
        budgets, depth = budgets_s[None, :, None], stages[None, :, None]
        shape = (len(positions), len(stages), width)

        def step(index: Indices) -> Array:
            return steps.take(first_step + index)

        def transfer(index: Indices) -> Array:
            return hops.take(first_hop + index)

        def lateness(index: Indices) -> Array:
            return step(index) * passes + transfer(index) - budgets

        def crowding(index: Indices) -> Array:
            busy = step(index)
            # No layers and no host time take no time: the entry for j = 0 is never used.
            with np.errstate(divide="ignore", invalid="ignore"):
                spell = (busy * passes + transfer(index)) / busy
                return spell * (self._grid.take(index) * depth) - room

        late, crowded = last_below(lateness, shape, size), last_below(crowding, shape, size)
        where = np.minimum(late, crowded)
        index = np.minimum(where.astype(np.int64), max(0, size - 2))
        share = where - index
        start = np.zeros(shape, dtype=np.int64)
        alone = step(start)
        # Prompts find half of the steps idle at the lowest load that `_load` knows.
        waited = own if self._role.phase is Phase.PREFILL else passes
        first = alone * waited + transfer(start)
        # With room for fewer requests than the pipeline has stages, some stages wait.
        with np.errstate(divide="ignore", invalid="ignore"):
            spell = self._grid[0] * depth * (alone * passes + transfer(start))
            waiting = np.minimum(1.0, room * alone / spell)
        in_time = (first <= budgets) & self._tail_in_time(stages, budgets_s, positions)
        fits = np.stack([np.broadcast_to(self._tail_room[p], (width,)) for p in positions])
        return _Best(
            batch=value_at(self._grid.take, index, share, size),
            step_s=value_at(step, index, share, size),
            transfer_s=value_at(transfer, index, share, size),
            occupancy=np.where(crowded > 0.0, 1.0, waiting),
            feasible=in_time & (places >= 1.0) & fits[:, None, :],
            first_s=first,
            late=late,
            crowded=crowded,
        )

    def _tail_in_time(
        self, stages: Array, budgets_s: Array, positions: Sequence[Position]
    ) -> NDArray[np.bool_]:
        """Whether the longest prompt that must keep the promise does so alone, per number of layers."""
        if not self._tail:
            return np.ones(1, dtype=np.bool_)
        longest = np.minimum(self._tail, self._most) * np.ones(1)
        transfer = np.where(stages > 1.0, self._transfer(longest), 0.0)
        depth = stages[:, None]
        steps = np.stack([self._tail_pieces[p].stage_seconds(depth) for p in positions])
        return np.asarray(steps + transfer[None, :, None] <= budgets_s[None, :, None])


@dataclass(frozen=True, slots=True)
class PieceTimes:
    """Seconds of one prompt at a stage, alone, by layers: all its pieces, and the longest of them."""

    all_s: Array
    longest_s: Array

    def stage_seconds(self, stages: Array) -> Array:
        """Return a stage's part, one of `stages`, of what the prompt takes through all of them.

        Pieces follow each other: the last leaves the last stage when all have passed one, and the longest
        all others.
        """
        return (self.all_s + (stages - 1.0) * self.longest_s) / stages


def piece_times(
    model: StepModel, counts: Array, tokens: float, max_tokens: float, position: Position
) -> PieceTimes:
    """Return the times of a prompt of `tokens`, cut into pieces of `max_tokens` and a rest.

    `counts` are the model's `window_counts`.
    """
    before = np.arange(max(1, math.ceil(tokens / max_tokens))) * max_tokens
    ones = np.ones_like(before)
    sizes = np.minimum(max_tokens, tokens - before)
    parts = model.parts(Batch(sizes, ones, before, 0.0 * ones, 0.0 * ones))
    steps = slowest_run(counts, parts.layers) + fixed_seconds(parts, position)
    return PieceTimes(steps.sum(axis=1), steps.max(axis=1))


@dataclass(frozen=True, slots=True)
class _Ends:
    """Per position: seconds by batch, requests that may be there, whether any fit, and the longest prompt."""

    fixed: Array
    room: Array
    fits: NDArray[np.bool_]
    tail_all: Array
    tail_longest: Array


@dataclass(frozen=True, slots=True)
class _Best:
    """Per position, stage count and number of layers: the best batch, and the index where a limit cuts it."""

    batch: Array
    step_s: Array
    transfer_s: Array
    occupancy: Array
    feasible: NDArray[np.bool_]
    first_s: Array
    late: Array
    crowded: Array


def held_share(lengths: LengthMix, phase: Phase, engine: EngineProfile) -> float:
    """Return how many requests run at a time, of those whose tokens so far would fill the KV cache.

    Engines that admit by prompts fill it. Others book a request with its answer when it comes, and use
    `BOOKED_SHARE` of the cache at most.
    """
    if engine.admits_by_prompts:
        return 1.0
    if phase is Phase.PREFILL:
        return BOOKED_SHARE
    return BOOKED_SHARE * lengths.decode_context / (lengths.input_mean + lengths.output_mean)


def held_spread(lengths: LengthMix, phase: Phase, engine: EngineProfile) -> float:
    """Return E[x^2] / E[x]^2 of the KV cache that requests hold or, with their mean answers, have booked.

    The answers of those that run are as long as they take (longer ones are met more often, log-normal with
    E[o^3] = (E[o^2] / E[o])^3) and at any point of them.
    """
    variance, mean = lengths.input_mean_square - lengths.input_mean**2, lengths.input_mean
    if phase is Phase.PREFILL:
        return 1.0 + variance / mean**2
    if not engine.admits_by_prompts:
        return 1.0 + variance / (mean + lengths.output_mean) ** 2
    longer = lengths.output_mean_square / lengths.output_mean**2
    met = lengths.output_mean * longer
    return 1.0 + (variance + met**2 * (longer / 3.0 - 0.25)) / lengths.decode_context**2


def _regular(parts: StepParts[Array], grid: Array) -> StepParts[Array]:
    """Make times rise with the batch and time per request fall, as any engine could arrange.

    A larger batch is never faster, and never slower than smaller batches run one after the other. The
    analytic times are like that already; tables have noise and steps.
    """

    def smooth(seconds: Array) -> Array:
        # In this order: the second step keeps times rising.
        per_request = np.minimum.accumulate(np.maximum.accumulate(seconds) / grid)
        return np.asarray(per_request * grid)

    host, stage_host = (
        smooth(np.broadcast_to(np.asarray(seconds, dtype=np.float64), grid.shape))
        for seconds in (parts.host, parts.stage_host)
    )
    layers = tuple(map(smooth, parts.layers))
    return StepParts(host, smooth(parts.embedding), layers, smooth(parts.head), stage_host)


def fixed_seconds(parts: StepParts[Array], position: Position) -> Array:
    """Return the part of a step that does not depend on the number of layers."""
    host = parts.host if position is Position.WHOLE else parts.stage_host
    total = np.zeros_like(parts.head) + host
    if position.embedding:
        total = total + parts.embedding
    if position.head:
        total = total + parts.head
    return total


def copy_node(node: NodeType, tp: int) -> NodeType:
    """Return the part of a node that holds one copy: `tp` of its GPUs, with what joins them if several."""
    return NodeType(node.gpu, tp, node.interconnect if tp > 1 else _ALONE)


def copy_of(node: NodeType, tp: int, engine: EngineChoice) -> tuple[NodeType, EngineChoice]:
    """Return the part of a node that holds one copy, and its engine: copies may share their experts."""
    copies = node.count // tp
    if not engine.limits.expert_parallel or copies == 1:
        return copy_node(node, tp), engine
    return NodeType(node.gpu, tp, node.interconnect), replace(engine, copies=copies)


_ALONE = Interconnect("none", None, name="none")


def table_of(
    role: RoleLoad, model: StepModel, stages: int, *, link: Link | None = None
) -> CapacityTable:
    """Return the capacity table of one role on one node type, with any backend, at the TP of `model`."""
    capacity_model = CapacityModel(role, model, link=link)
    shape = (len(CapacityTable.POSITIONS), stages, role.spec.layers + 1)
    throughput = np.zeros(shape)
    throughput[-1, 0] = capacity_model.throughput([1], [role.slo_s], Position.WHOLE)[0]
    many = range(2, stages + 1)
    if many:
        budgets = [role.slo_s / count for count in many]
        ends = CapacityTable.POSITIONS[:-1]
        throughput[:-1, 1:] = capacity_model.throughputs(many, budgets, ends)
    return CapacityTable(role, model.node, np.full(shape, model.tp), throughput, model.provenance)
