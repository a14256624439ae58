"""Fitting a server that was measured from outside: what explains the times that its clients saw.

Factors of arithmetic, memory, launches and the times of the host are moved until predictions agree with what
clients saw, alone and many at a time. Few measurements do not tell all factors: each is held to what is
predicted without any measurement, as loosely as that may be off, and the sum of squares over what both may
be off is least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.measured_servers import MeasuredServer
from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError, UsageError
from atoll.core.units import format_duration
from atoll.engines.limits import EngineLimits, HostTime
from atoll.engines.profile import EngineProfile
from atoll.engines.table import EngineChoice
from atoll.perf.batch import Batch
from atoll.perf.calibration import spread
from atoll.perf.constants import FIRST_TOKEN_ERROR, SERVER_ERROR, default_constants
from atoll.perf.layers import op_classes_of
from atoll.perf.step import StepModel, analytic, check_tp, step_seconds

MAX_FACTOR = 8.0
"""The most by which a server may be slower or faster than predicted: beyond, it is another one."""
_MIN_ERROR = 0.05
_MIN_FIRST_TOKEN_ERROR = 0.1
"""Least errors that are stated of a server: hosts differ, and so do hours."""
_ALONE = 1.5
"""Clients below which one does not meet others."""
_ALONE_OFF, _VARIED_OFF, _IN_STEP_OFF = (0.04, 0.02), (0.08, 0.03), (0.5, 0.08)
"""How far times to the first token and per further one are from what formulas say of them, as relative
deviations: of a client alone, of clients with answers of all lengths, and of those that go in step."""
_SAYS = 0.3
"""Times that are further off than this say nothing of an error that is left."""
_KERNELS_OFF = 0.1
"""How far arithmetic and memory of a server are at least from what single operators showed."""
FIRST_TOKEN, PER_TOKEN = "first token", "per token"
_HOST_S = 10e-3
"""Seconds that a host may take more than expected, however short steps are."""
_NOT_LIKE = math.log(1.5)
"""Beyond this median, predictions with the best of factors are off by too much."""
_TURNS = 60
_STEP = 1e-4
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What clients of a server saw on average with so many requests running at a time; times in seconds.

    `tpot_s` is None where answers were too short to tell it. Of C requests, each makes a token in a step of D
    seconds; while one makes its o tokens, each of the others computes a prompt once, which takes E longer
    than a step without it. A prompt that comes waits for the rest of the step that runs, M / 2T of steps of T
    seconds with mean square M, for one more where the next step is prepared already, and for its own:

        TPOT = D + (C - 1) / o * E
        TTFT = request + tokenize * prompt + stream * (C - 1) + M / 2T + T + its own steps

    That is what the simulator says, too, within 2 and 8 per cent, of clients whose answers differ in length
    (`varied`). Others go in step with each other: their prompts come together and wait for each other.
    """

    clients: float
    input_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float | None
    varied: bool = False

    def __post_init__(self) -> None:
        for name in ("clients", "input_tokens", "output_tokens", "ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0.0):
                raise InputError(f"{value!r} is no positive number", field=name)

    @property
    def text(self) -> str:
        """What was measured."""
        clients = f"{self.clients:.3g} clients" if self.clients >= _ALONE else "1 client"
        return f"{clients}, {self.input_tokens:,.0f}x{self.output_tokens:,.0f}"

    @property
    def off(self) -> tuple[float, float]:
        """How far both times are from what formulas say, as relative standard deviations."""
        alone = self.clients < _ALONE
        return _ALONE_OFF if alone else _VARIED_OFF if self.varied else _IN_STEP_OFF

    def predict(self, model: StepModel) -> tuple[float, float]:
        """Return the seconds to the first token and per further one."""
        others = max(0.0, self.clients - 1.0)
        context = self.input_tokens + self.output_tokens / 2.0
        layers = model.spec.layers
        plain = step_seconds(model, Batch.decode(self.clients, context), 0, layers)
        beside = step_seconds(model, Batch.decode(others, context), 0, layers) if others else 0.0
        own = _prompt_steps(model, self.input_tokens, others, context)
        tpot = plain + others / self.output_tokens * (sum(own) - beside * len(own))
        share = min(1.0, others * len(own) / self.output_tokens)
        mean = (1.0 - share) * plain + share * sum(own) / len(own)
        square = (1.0 - share) * plain**2 + share * sum(each**2 for each in own) / len(own)
        wait = min(1.0, others) * _wait(model, mean, square)
        return _front(model, self.input_tokens, others) + wait + sum(own), tpot


def _prompt_steps(
    model: StepModel, prompt: float, others: float, context: float
) -> tuple[float, ...]:
    """Seconds of the steps that compute a prompt beside others that decode."""
    engine, layers = model.engine, model.spec.layers
    room = max(1.0, engine.mixed_tokens - others)
    found: list[float] = []
    done = 0.0
    while done < prompt:
        piece = min(room, prompt - done)
        mixed = Batch(piece, 1.0, done, others, context if others else 0.0)
        found.append(step_seconds(model, mixed, 0, layers))
        done += piece
    return tuple(found)


def _wait(model: StepModel, mean_s: float, mean_square: float) -> float:
    """Seconds that a prompt waits for steps that run, by their mean and mean square."""
    return mean_square / (2.0 * mean_s) + (mean_s if model.engine.schedules_ahead else 0.0)


def _front(model: StepModel, prompt: float, others: float) -> float:
    """Seconds that a request takes beside steps."""
    engine = model.engine
    return engine.request_s + engine.tokenize_s * prompt + engine.stream_s * others


class Judged(NamedTuple):
    """A time that was measured, in seconds, and as predicted without the profile and with it."""

    what: str
    of: str
    seen_s: float
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class ServerFit:
    """A server as what was seen shows it, and how near predictions come to that."""

    server: MeasuredServer
    judged: tuple[Judged, ...]


@dataclass(frozen=True, slots=True)
class _Moved:
    """A field of `MeasuredServer` that the fit may move in log space, from at least `floor` by about `off`.

    None: by what the GPU's constants may be off.
    """

    name: str
    off: float | None
    floor: float


_FREE = (
    _Moved("compute", None, 1.0),
    _Moved("memory", None, 1.0),
    _Moved("launch", 0.5, 1.0),
    _Moved("step_s", 1.0, 20e-6),
    _Moved("sequence_s", 1.0, 1e-6),
    _Moved("request_s", 1.0, 1e-3),
    _Moved("tokenize_s", 0.7, 0.5e-6),
    _Moved("stream_s", 1.0, 10e-6),
)


def fit_server(
    loads: Sequence[ServerLoad],
    spec: TransformerSpec,
    node: NodeType,
    *,
    tp: int | None,
    engine: str,
    model: str,
    date: str,
    limits: EngineLimits | None = None,
) -> ServerFit:
    """Return the server that explains what was seen of a model on a node."""
    if node.gpu.shares > 1:
        raise UsageError(
            "a server on a share of a GPU says nothing of others",
            hint=f"measure it on a whole {node.gpu.whole.name}",
        )
    name, _, version = engine.partition("@")
    size = check_tp(node, tp, spec)
    bare = replace(node, gpu=replace(node.gpu, servers=()))
    limits = (limits or EngineLimits()).model_copy(update={"version": version or None})
    usual = EngineChoice(name, limits).on(bare.gpu)
    start = _start(usual, spec, bare, size, model, date)
    names = [(load.text, of) for load in loads for of in (FIRST_TOKEN, PER_TOKEN)]
    seconds = np.array([(load.ttft_s, load.tpot_s or math.nan) for load in loads]).ravel()
    told = ~np.isnan(seconds)
    known = np.log(seconds[told])
    sure = np.array([load.off for load in loads]).ravel()[told]

    def logs(server: MeasuredServer | None) -> Values:
        gpu = replace(bare.gpu, servers=() if server is None else (server,))
        steps = analytic(spec, replace(bare, gpu=gpu), tp=size, engine=usual)
        times = [seconds for load in loads for seconds in load.predict(steps)]
        return np.asarray(np.log(times)[told])

    gpu = bare.gpu.whole
    constants = default_constants().for_gpu(gpu)
    errors = [constants.op(op).error for op in op_classes_of(spec, gpu)]
    kernels_off = max(_KERNELS_OFF, *errors)
    loose = np.array([kernels_off if free.off is None else free.off for free in _FREE])

    def off(moved: Values) -> Values:
        expected = moved / loose
        return np.concatenate([(logs(_move(start, moved)) - known) / sure, expected])

    server = _move(start, _least_squares(off, np.zeros(len(_FREE))))
    before, after = logs(None), logs(server)
    factors = (server.compute, server.memory, 1.0 / server.compute, 1.0 / server.memory)
    slower = np.exp(known) / (np.exp(before) + _HOST_S)
    if (
        max(*factors, float(np.median(slower))) > MAX_FACTOR
        or float(np.median(np.abs(after - known))) > _NOT_LIKE
    ):
        seen_s, expected_s = (float(np.median(np.exp(some))) for some in (known, before))
        raise InputError(
            f"the server takes {format_duration(seen_s)} (median of what was seen) where"
            f" {format_duration(expected_s)} are predicted, and no factors and times of a host explain it",
            hint="check the model, the node and the engine that are named",
        )
    judged = tuple(
        Judged(*names[at], *map(float, np.exp([known[i], before[i], after[i]])))
        for i, at in enumerate(np.flatnonzero(told))
    )
    server = replace(
        server,
        error=max(_MIN_ERROR, _spread(judged, PER_TOKEN)),
        # What clients in step see of first tokens says nothing of those in service.
        first_token_error=max(
            _MIN_FIRST_TOKEN_ERROR,
            _spread(
                [one for one, off in zip(judged, sure, strict=True) if off < _SAYS], FIRST_TOKEN
            ),
        ),
    )
    return ServerFit(server, judged)


def _spread(judged: Sequence[Judged], of: str) -> float:
    """How far predictions are from the times of one kind, as a relative standard deviation."""
    own = [each for each in judged if each.of == of]
    if not own:
        return FIRST_TOKEN_ERROR if of == FIRST_TOKEN else SERVER_ERROR
    return spread(*(np.array([getattr(each, at) for each in own]) for at in ("after_s", "seen_s")))


def _start(
    usual: EngineProfile, spec: TransformerSpec, node: NodeType, tp: int, model: str, date: str
) -> MeasuredServer:
    """The server as it is predicted without any measurement."""
    host: HostTime = usual.host
    return MeasuredServer(
        model=model,
        spec=spec,
        gpu=node.gpu.name,
        tp=tp,
        engine=usual.name,
        version=usual.version,
        date=date,
        compute=1.0,
        memory=1.0,
        launch=1.0,
        step_s=host.step_s,
        sequence_s=host.sequence_s,
        request_s=usual.request_s,
        tokenize_s=usual.tokenize_s,
        stream_s=usual.stream_s,
        error=_MIN_ERROR,
        first_token_error=_MIN_FIRST_TOKEN_ERROR,
    )


def _move(start: MeasuredServer, moved: Values) -> MeasuredServer:
    values = {
        free.name: max(getattr(start, free.name), free.floor) * math.exp(float(by))
        for free, by in zip(_FREE, moved, strict=True)
    }
    return replace(start, **values)


def _least_squares(off: Callable[[Values], Values], at: Values) -> Values:
    """Return where the sum of squares is least, by damped steps (Levenberg and Marquardt) from `at`."""
    damping, residual = 1e-2, off(at)
    for _ in range(_TURNS):
        slopes = np.stack(
            [(off(at + _STEP * unit) - residual) / _STEP for unit in np.eye(len(at))], axis=1
        )
        normal, downhill = slopes.T @ slopes, slopes.T @ residual
        change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -downhill)
        tried = off(at + np.clip(change, -1.0, 1.0))
        if tried @ tried < residual @ residual:
            gained = 1.0 - float(tried @ tried) / float(residual @ residual)
            at, residual, damping = at + np.clip(change, -1.0, 1.0), tried, damping / 5.0
            if gained < 1e-7:
                break
        elif damping > 1e6:
            break
        else:
            damping *= 5.0
    return at
