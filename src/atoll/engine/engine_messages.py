"""Messages between nodes and schedulers.

Rare messages carry a JSON body checked by its type; the messages of every step carry plain integer
tables, one row per sequence, so that a step costs the same for one sequence as for two hundred.
A sequence is known by a random 63-bit number. Its `epoch` counts how often it was started anew;
whatever arrives for an older epoch is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from atoll.core.frozen import Frozen
from atoll.core.request_parameters import SamplingParams

Table = NDArray[np.int64]

FINISH_CODES: tuple[str | None, ...] = (None, "stop", "length")


class Hop(Frozen):
    """One node of a route and the layers [start, end) the request runs there."""

    node: str
    endpoint: str
    start: int = Field(ge=0)
    end: int = Field(ge=1)


class PipelineRoute(Frozen):
    """The nodes a request goes through; with `decode`, prompt and answer go through different ones."""

    prefill: tuple[Hop, ...] = Field(min_length=1)
    decode: tuple[Hop, ...] | None = None

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Every hop, those of the prompt first."""
        return self.prefill + (self.decode or ())


class ReadOrder(Frozen):
    """Requests about the prompt itself, besides its answer.

    pool: one vector of its hidden states after the last norm (of the first or last position, or their mean),
    and no answer. scores: the natural log probabilities of its tokens, each after those before it, with so
    many likelier ones beside it.
    """

    pool: Literal["first", "last", "mean"] | None = None
    scores: int | None = Field(default=None, ge=0, le=20)

    @property
    def whole(self) -> bool:
        """Whether every position must be run, whatever is known of the beginning."""
        return self.scores is not None or self.pool in ("first", "mean")


class OpenBody(Frozen):
    """Everything a node must know of a sequence before its rows come.

    `hit` is how many leading positions every node so far holds already; with `agree` the first hop
    waits to hear from the last how many that are in the end. `kv_to` names decode hops
    that want this sequence's KV; `expects_kv` tells a decode hop to wait for it. `waited_s` is for how long
    the request had been with the scheduler: clocks of machines differ.
    """

    seq: int
    epoch: int
    hop: int = 0
    route: tuple[Hop, ...] = Field(min_length=1)
    prompt_length: int = Field(ge=1)
    max_length: int = Field(ge=1)
    arrival: int = 0
    waited_s: float = 0.0
    reply_to: str
    sampling: SamplingParams = SamplingParams()
    eos: tuple[int, ...] = ()
    hit: int = 0
    agree: bool = False
    kv_to: tuple[Hop, ...] = ()
    expects_kv: bool = False
    read: ReadOrder | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """Start a sequence on a node; `tokens` are the prompt and what was generated so far.

    Where the prompt holds vectors, tokens are their marks (`atoll.engine.embeds`), and the first hop that
    runs them is given `embeds`, float32 [marks, width].
    """

    kind: ClassVar[int] = 1
    body: OpenBody
    tokens: Table
    embeds: NDArray[np.float32] | None = None


class Opened(Frozen):
    """Every hop of the route is ready; all hold the first `hit` positions.

    To the first hop, and to the scheduler where it waits for this or some positions are held.
    """

    kind: ClassVar[int] = 2
    seq: int
    epoch: int
    hit: int


class StepReport(NamedTuple):
    """Report of a node on its decode steps to those before it on a route; a row of a `reports` table.

    node: who (`pacing.node_key`). place: the cores or GPU it runs on (`pacing.place_key`). rows: decodes
    it has run so far. sequences and nanoseconds: of its latest step with decodes (0: there were others too).
    """

    node: int
    place: int
    rows: int
    sequences: int
    nanoseconds: int


REPORT_COLUMNS = len(StepReport._fields)
MAX_REPORTS = 64
"""Reports that a message may carry: one for each hop passed, and for those of other routes on the way."""


def _no_reports() -> Table:
    return np.empty((0, REPORT_COLUMNS), np.int64)


@dataclass(frozen=True, slots=True)
class Activations:
    """Hidden states for the next hop; rows lie in the order of the table.

    Columns: seq, epoch, hop, position, count, sample (0 or 1), token (of a single row, else -1).
    `reports` holds a `StepReport` of each node passed.
    """

    kind: ClassVar[int] = 3
    columns: ClassVar[int] = 7
    table: Table
    hidden: Any
    reports: Table = field(default_factory=_no_reports)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens for the first hop. Columns: seq, epoch, position, token.

    `reports` holds a `StepReport` of each node passed.
    """

    kind: ClassVar[int] = 4
    columns: ClassVar[int] = 4
    table: Table
    reports: Table = field(default_factory=_no_reports)


class SampledBody(Frozen):
    """By row that asked for them: tokens and their natural log probabilities, likeliest first."""

    top: dict[int, list[tuple[int, float]]] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens for the scheduler. Columns: seq, epoch, position, token, finish code.

    `logprobs` holds the natural log probability of each token, NaN where nobody asked.
    """

    kind: ClassVar[int] = 5
    columns: ClassVar[int] = 5
    table: Table
    logprobs: NDArray[np.float32]
    body: SampledBody = field(default_factory=SampledBody)


@dataclass(frozen=True, slots=True)
class Release:
    """Forget sequences up to an epoch and free their blocks. Columns: seq, epoch."""

    kind: ClassVar[int] = 6
    columns: ClassVar[int] = 2
    table: Table


class Evicted(Frozen):
    """The node `node` dropped a sequence because it needed the room."""

    kind: ClassVar[int] = 7
    seq: int
    epoch: int
    node: str


class Failed(Frozen):
    """A sequence cannot go on at all; `message` says why.

    `refused`: it lies in what was asked, and would be the same on any other node.
    """

    kind: ClassVar[int] = 8
    seq: int
    epoch: int
    node: str
    message: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """KV of positions from `position` on, layers [first, last), for a hop of a decode route.

    Columns of the one-row table: seq, epoch, hop, first, last, position. `data` is
    [layers, 2, positions, kv heads, head size].
    """

    kind: ClassVar[int] = 9
    columns: ClassVar[int] = 6
    table: Table
    data: Any


class SchedulerHello(Frozen):
    """A scheduler at `reply_to` wants to hear from this node.

    `owner` is a name that only one scheduler has at a time, `incarnation` a number of this one: what another
    one at this endpoint or with this name left behind is void.
    """

    kind: ClassVar[int] = 10
    reply_to: str
    owner: str = ""
    incarnation: int = 0


class NodeStats(Frozen):
    """How a node is doing. Counts are of blocks, sequences, tokens and steps since its start.

    `compiled_after_ready` are kernels compiled and graphs captured since it was ready, by its first rank:
    steps waited for them. None should be.
    """

    name: str
    endpoint: str
    incarnation: int
    start: int
    end: int
    block_size: int
    blocks: int
    blocks_used: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_lookups: int = 0
    busy_s: float = 0.0
    compiled_after_ready: int = 0


class Heartbeat(Frozen):
    """A sign of life with figures."""

    kind: ClassVar[int] = 11
    stats: NodeStats


class Stop(Frozen):
    """End the node once nothing runs there (drain) or at once."""

    kind: ClassVar[int] = 12
    drain: bool = True


@dataclass(frozen=True, slots=True)
class Pooled:
    """Prompts as vectors, for the scheduler. Columns: seq, epoch. `vectors` is [rows, width]."""

    kind: ClassVar[int] = 13
    columns: ClassVar[int] = 2
    table: Table
    vectors: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scored:
    """Natural log probabilities of tokens of a prompt, from a position on, for the scheduler.

    Columns of the one-row table: seq, epoch, position. `top_tokens` and `top_logprobs` are [tokens,
    alternatives], likeliest first.
    """

    kind: ClassVar[int] = 14
    columns: ClassVar[int] = 3
    table: Table
    logprobs: NDArray[np.float32]
    top_tokens: Table
    top_logprobs: NDArray[np.float32]


Message = (
    Open
    | Opened
    | Activations
    | Tokens
    | Sampled
    | Release
    | Evicted
    | Failed
    | KvTransfer
    | SchedulerHello
    | Heartbeat
    | Stop
    | Pooled
    | Scored
)


def table_of(rows: Sequence[tuple[int, ...]], columns: int) -> Table:
    """Make an integer table of the rows, which may be none."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), columns)
