"""Settings of a simulation; everything that is not in the plan, the problem or the workload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from atoll.core.errors import InputError
from atoll.engines.limits import BOOKED_SHARE
from atoll.engines.table import find_engine
from atoll.perf.constants import ConstantTable
from atoll.plan.plan import Plan
from atoll.plan.problem import Router
from atoll.routing.decisions import BY_ARRIVAL, BY_LENGTH, BY_SLACK, PROMPT_ORDER

Batching = Literal["engine", "best-effort"]
Feed = Literal["open", "closed", "watermark"]
Pacing = Literal["paced", "free"]
Admission = Literal["prompts", "booked"]
Order = Literal["arrival", "slack", "shortest"]
ORDERS: Mapping[Order, int] = {"arrival": BY_ARRIVAL, "slack": BY_SLACK, "shortest": BY_LENGTH}


@dataclass(frozen=True, slots=True)
class Failure:
    """A machine is gone at `time_s`, for good or until `back_s`; from `drained_s` on it gets nothing new.

    Named by `host` (a node of a cluster), or by `instance` and the id of a `node` in it (None: all).
    """

    time_s: float
    instance: str | None = None
    node: str | None = None
    host: str | None = None
    back_s: float | None = None
    drained_s: float | None = None

    def __post_init__(self) -> None:
        if (self.host is None) == (self.instance is None):
            raise InputError("a failure names a host or an instance", field="failures")
        if not 0.0 <= self.time_s < math.inf:
            raise InputError(f"{self.time_s!r} is not a time in seconds", field="failures")
        if self.back_s is not None and self.back_s <= self.time_s:
            raise InputError(
                "a machine comes back after it failed",
                field="failures",
                hint="give the later time second, as in 60s-300s",
            )


@dataclass(frozen=True, slots=True)
class Epoch:
    """From `time_s` on another plan counts; what both plans have goes on (`plan.plan_diff`)."""

    time_s: float
    plan: Plan


@dataclass(frozen=True, slots=True)
class SimComponent:
    """Servers of an encoder or generator: `servers` of them, each takes up to `batch` items at a time.

    A batch of n items takes fixed_s + n * item_s seconds.
    """

    name: str
    servers: int
    item_s: float
    fixed_s: float = 0.0
    batch: int = 1

    def __post_init__(self) -> None:
        if self.servers < 1 or self.batch < 1:
            raise InputError("servers and batch are at least 1", field=f"components.{self.name}")
        if self.item_s < 0.0 or self.fixed_s < 0.0 or self.item_s + self.fixed_s <= 0.0:
            raise InputError("an item takes some time", field=f"components.{self.name}")


Step = tuple[str, ...]
"""Components that work on a request side by side; LLM stands for the llm."""
LLM = "llm"


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How to simulate.

    `policy` chooses instances and pipelines (see `routing.policies`). With `router` "plain" ways through an
    instance are chosen hop by hop by the plan's flows alone (`decisions.min_charged`), as a runtime does
    that does not look ahead: what ends before a full node found no way. With `batching` "engine" a step takes
    all running sequences and prompts up to `token_budget` tokens (None: 2,048, or the engine's own limit
    where only prompts run), cut to fit, and with `pacing` "paced" pipelines have as many batches of tokens
    under way as is best (`routing.pacing`), "free" as many as arise; "best-effort" takes whole prompts and
    all that waits, as Helix does. `max_sequences` run at a time (None: the engine's own limit).

    `admission` "prompts": instances take what comes and start requests while prompts fit; where the KV cache
    is full the youngest gives way, is first in the queue and is computed again, as in vLLM. "booked":
    requests wait for room for their answers too. `high_water` is the share of KV cache that may be booked,
    a request counting with its prompt and `output_ratio` times the mean answer, or, with `known_outputs`, its
    own.
    None is "prompts" for vLLM and SGLang with `batching` "engine", and "booked" otherwise.

    `order` is that in which prompts wait (`routing.decisions.urgency`); None is that of the engine.
    `prefix_caching`: blocks of prompts that the workload says are equal are computed once, for as long as
    they lie in the cache (None: as the engine is started).
    `turns`: shares of a GPU take turns (`gpu_turns`), at full speed while neighbours rest; else all are
    busy all the time, as plans reckon.
    `single_messages`: tokens of a step travel one by one, not together. `first_token`: the prompt pass yields
    a token. `handover_s` is the time a unit needs to take in a token's activations (curves only).

    `feed`: "open" follows the arrival times; "closed" keeps `concurrency` requests in flight; "watermark"
    starts with `concurrency` and lets a request in whenever a prompt or a request ends and at most
    `feed_mark` of the fullest layer's KV cache is booked; one that finds no way is turned away. Both feed
    `feed_delay_s` later.

    `until_s` stops the clock, `from_s` is where measuring windows start. `startup_s` is the time from
    renting an instance to its first request. `coordinator_s` is the way from the coordinator to a node, and
    back, where no cluster says it (None: the link inside a region). `components` and `classes` describe
    what requests need beside the llm: per class its steps in order. `constants` are those of the performance
    model (None: the ones that ship).
    """

    seed: int = 0
    policy: str = "iwrr"
    router: Router = "atoll"
    batching: Batching = "engine"
    token_budget: int | None = None
    max_sequences: int | None = None
    admission: Admission | None = None
    order: Order | None = None
    prefix_caching: bool | None = None
    pacing: Pacing = "paced"
    turns: bool = True
    high_water: float = BOOKED_SHARE
    output_ratio: float = 1.0
    known_outputs: bool = False
    single_messages: bool = False
    first_token: bool = True
    handover_s: float = 0.0
    feed: Feed = "open"
    concurrency: int = 20
    feed_delay_s: float = 0.1
    feed_mark: float = 0.8
    until_s: float = math.inf
    from_s: float = 0.0
    startup_s: float = 0.0
    coordinator_s: float | None = None
    bins: int = 200
    failures: tuple[Failure, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    components: tuple[SimComponent, ...] = ()
    classes: dict[str, tuple[Step, ...]] = field(default_factory=dict)
    constants: ConstantTable | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.high_water <= 1.0:
            raise InputError(f"{self.high_water!r} is no share of 0 to 1", field="high_water")
        if self.token_budget is not None and self.token_budget < 1:
            raise InputError("a step has at least one token", field="token_budget")
        if self.max_sequences is not None and self.max_sequences < 1:
            raise InputError("at least one sequence runs", field="max_sequences")
        if self.bins < 1 or self.concurrency < 1:
            raise InputError("bins and concurrency are at least 1", field="bins")
        if not self.until_s > 0.0:
            raise InputError(
                "the simulation ends before it begins",
                field="until",
                hint="give it some time, as in 10min",
            )

    def admits_by_prompts(self, engine: str) -> bool:
        """Return whether instances of an engine admit requests by their prompts alone."""
        if self.admission is not None:
            return self.admission == "prompts"
        defaults = find_engine(engine).defaults
        by_prompts = defaults is not None and defaults.admits_by_prompts
        return by_prompts and self.batching == "engine" and self.feed != "watermark"

    def order_of(self, engine: str) -> Order:
        """Return the order in which prompts wait on instances of an engine."""
        if self.order is not None:
            return self.order
        if find_engine(engine).orders_by_promise:
            return next(name for name, code in ORDERS.items() if code == PROMPT_ORDER)
        return "arrival"
