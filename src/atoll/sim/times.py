"""From the performance model or measured curves to the coefficients that the event loop evaluates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from atoll.core.errors import InternalError
from atoll.engines.limits import MAX_GUESSES, HostTime
from atoll.engines.profile import LaunchTime
from atoll.perf.layers import LayerOps, ModelOps, layer_kinds
from atoll.perf.operators import AllReduce, Roofline
from atoll.perf.step import AnalyticStepModel
from atoll.plan.cluster import NodeProfile
from atoll.sim.sim_arrays import (
    CURVES,
    DENSE_MAX,
    LAYER_WIDTH,
    OPERATORS,
    Floats,
    Longs,
)

Curve = Sequence[tuple[float, float]]
_SMALL_BATCH = 8.0


class Times(NamedTuple):
    """Step times of all units, by row: coefficients (first those beside the layers, then one set for each
    kind of layer), how many layers of each kind lie below a layer, and curves. `fixed` holds, by (kind,
    row), how many kinds of layer there are, seconds per step and per token, and those per layer that
    prompts and sequences of a step share. `guess` has a row for each way to guess tokens.
    """

    coefficient: Floats
    fixed: dict[str, Floats]
    prefix: Longs
    curve: Floats
    guess: Floats


class TimesBuilder:
    """Collects the step times of units; equal ones share a row."""

    def __init__(self) -> None:
        self._models: list[AnalyticStepModel] = []
        self._curves: list[tuple[NodeProfile, float]] = []
        self._rows: dict[tuple[object, ...], int] = {}
        self._guesses: list[list[float]] = []

    def operators(self, model: AnalyticStepModel) -> tuple[int, int]:
        """Return (kind, row) of units whose steps take what the performance model says."""
        key = (id(model.spec), model.node.id, model.tp, model.engine)
        if key not in self._rows:
            self._rows[key] = len(self._models)
            self._models.append(model)
        return OPERATORS, self._rows[key]

    def guesses(self, model: AnalyticStepModel) -> int:
        """Return the row of how a model's tokens are guessed ahead, -1 where they are not."""
        guess, draft = model.engine.speculation, model.draft
        if guess is None:
            return -1
        row = [-1.0, 0.0, 0.0]
        if draft is not None:
            _, at = self.operators(draft)
            row = [float(at), float(len(draft.ops.kinds)), float(draft.spec.layers)]
        self._guesses.append(
            [*row, *guess.acceptance, *[0.0] * (MAX_GUESSES - len(guess.acceptance))]
        )
        return len(self._guesses) - 1

    def curves(self, profile: NodeProfile, token_s: float) -> tuple[int, int]:
        """Return (kind, row) of units with measured curves; `token_s` is the time to take in a token."""
        key = (id(profile), token_s)
        if key not in self._rows:
            self._rows[key] = len(self._curves)
            self._curves.append((profile, token_s))
        return CURVES, self._rows[key]

    def build(self) -> Times:
        """Return all rows as arrays."""
        kinds = max((len(m.ops.kinds) for m in self._models), default=1)
        deepest = max((m.spec.layers for m in self._models), default=0)
        count = max(1, len(self._models), len(self._curves))
        coefficient = np.zeros((count, kinds + 1, LAYER_WIDTH))
        prefix = np.zeros((count, deepest + 1, kinds), np.int64)
        kinds_of, step_s, token_s, shared_s = (np.zeros((2, count)) for _ in range(4))
        for i, model in enumerate(self._models):
            kinds_of[OPERATORS, i] = len(model.ops.kinds)
            outer = outer_row(model.ops, model.engine.host)
            coefficient[i, 0, : len(outer)] = outer
            for k, ops in enumerate(model.ops.layers):
                coefficient[i, k + 1] = layer_row(ops, model.engine.launch)
            layer_kind_names = layer_kinds(model.spec)
            for k, kind in enumerate(model.ops.kinds):
                below = np.cumsum([0, *(each == kind for each in layer_kind_names)])
                prefix[i, : len(below), k] = below
                # What a state is worth in tokens; the row of what lies beside the layers has room at its end.
                coefficient[i, 0, LAYER_WIDTH - 1 - k] = model.ops.layers[k].state_tokens
        pairs = [
            (profile.prefill_s_per_layer, _one_is_some(profile.decode_s_per_layer))
            for profile, _ in self._curves
        ]
        for i, (profile, per_token_s) in enumerate(self._curves):
            step_s[CURVES, i], token_s[CURVES, i] = profile.step_s, per_token_s
            shared_s[CURVES, i] = profile.shared_s_per_layer
        fixed = {"kinds": kinds_of, "step_s": step_s, "token_s": token_s, "shared_s": shared_s}
        guess = np.array(self._guesses or [[0.0]])
        return Times(coefficient, fixed, prefix, _pad(pairs, count), guess)


def layer_row(ops: LayerOps, launch: LaunchTime) -> Floats:
    """Return the coefficients of a layer: window, passes, products, attention, experts, sums, launches."""
    if len(ops.dense) > DENSE_MAX:
        raise InternalError(f"a layer with {len(ops.dense)} products")
    row = [-1.0 if ops.window is None else float(ops.window)]
    row += [ops.elementwise.row_s, ops.elementwise.t0_s, float(len(ops.dense))]
    for index in range(DENSE_MAX):
        row += _roofline(ops.dense[index]) if index < len(ops.dense) else [0.0] * 5
    a = ops.prefill
    row += [a.pair_s, a.token_s, a.key_s, a.serial_s, a.t0_s, a.p]
    d = ops.decode
    row += [d.key_s, d.query_s, d.pad, d.serial_s, d.t0_s, d.p]
    e = ops.experts
    if e is None:
        row += [0.0] * 9
    else:
        row += [1.0, e.experts, e.top_k, e.flop_s, e.expert_s, e.row_s, e.pad, e.t0_s, e.p]
    least = [
        launch.layer_s,
        launch.beyond_graphs_s(experts=e is not None),
        float(launch.graph_tokens),
    ]
    return np.array([*row, *_reduce(ops.all_reduce), *least])


def outer_row(ops: ModelOps, host: HostTime) -> Floats:
    """Return the coefficients of what a step takes beside its layers: host, embedding, output matrix."""
    row = [host.step_s, ops.embedding.row_s, ops.embedding.t0_s, *_reduce(ops.embedding_all_reduce)]
    return np.array([*row, *_roofline(ops.head), *_reduce(ops.gather), host.sequence_s])


def _roofline(op: Roofline) -> list[float]:
    return [op.flop_s, op.fixed_s, op.row_s, op.t0_s, op.p]


def _reduce(op: AllReduce | None) -> list[float]:
    return [0.0] * 4 if op is None else [1.0, op.row_s, op.alpha_s, op.p]


def _one_is_some(curve: Curve) -> Curve:
    """One sequence takes what the smallest batch measured does, if that is small, not a share of it."""
    above = [point for point in curve if point[0] > 0.0]
    if not above or not 1.0 < above[0][0] <= _SMALL_BATCH:
        return curve
    return [*(point for point in curve if point[0] <= 0.0), (1.0, above[0][1]), *above]


def _pad(pairs: Sequence[tuple[Curve, Curve]], count: int) -> Floats:
    """Curves for prompts and for decoding, x and seconds each, the last point repeated."""
    points = max((len(curve) for pair in pairs for curve in pair), default=1)
    padded = np.zeros((count, 4, points))
    for i, pair in enumerate(pairs):
        for k, curve in enumerate(pair):
            full = np.array([*curve, *[curve[-1]] * (points - len(curve))])
            padded[i, 2 * k], padded[i, 2 * k + 1] = full[:, 0], full[:, 1]
    return padded
