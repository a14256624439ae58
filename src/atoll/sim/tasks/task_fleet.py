"""Input of a simulation: executors with their parts, classes of requests, and the paths they take.

Free of plans, models and GPUs: seconds, tokens and bytes. A request of a class takes one of the class's
paths. A path names the parts that run and, step by step, which executor runs them; what feeds what is said
by the edges of the class of which both ends are on the path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from atoll.core.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from atoll.perf.step import AnalyticStepModel

Emits = Literal["", "text", "audio", "image"]
PhaseName = Literal["both", "prefill", "decode"]
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount per request: `fixed`, and so much per token of its text, in and out."""

    fixed: float = 0.0
    per_input: float = 0.0
    per_output: float = 0.0

    def __post_init__(self) -> None:
        if not all(0.0 <= x < math.inf for x in (self.fixed, self.per_input, self.per_output)):
            raise InputError("an amount is not negative", field="amount")

    def mean(self, input_tokens: float, output_tokens: float) -> float:
        """Return it for a request with so many tokens of text."""
        return self.fixed + self.per_input * input_tokens + self.per_output * output_tokens


INPUT = Amount(per_input=1.0)
"""As many tokens as the request brings."""
OUTPUT = Amount(per_output=1.0)
"""As many tokens as the request wants."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """Measured seconds of steps: points (prompt tokens, seconds) and (sequences, seconds).

    Linear in between, constant before the first point, on with the last slope after the last. A step takes
    `step_s` more; one with prompts and sequences `shared_s` less than the sum of both.
    """

    prefill: Points
    decode: Points
    step_s: float = 0.0
    shared_s: float = 0.0

    def __post_init__(self) -> None:
        for name, points in (("prefill", self.prefill), ("decode", self.decode)):
            if not points or any(y <= 0.0 for _, y in points):
                raise InputError("a curve has points of some seconds", field=f"step.{name}")
            if any(b[0] <= a[0] for a, b in pairwise(points)):
                raise InputError("points of a curve go up", field=f"step.{name}")


@dataclass(frozen=True, slots=True)
class _ItemPart:
    """A part that works on batches of up to `max_batch` items: `fixed_s` + the sum of their seconds.

    `item_s` is by class. With `emits` its items are what the request wants: "audio" in pieces, "image" whole.
    """

    item_s: Mapping[str, float] = field(hash=False)
    fixed_s: float = 0.0
    max_batch: int = 1
    emits: Emits = ""

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise InputError("a batch has an item at least", field="max_batch")
        if self.fixed_s < 0.0 or any(
            s < 0.0 or self.fixed_s + s <= 0.0 for s in self.item_s.values()
        ):
            raise InputError("an item takes some time", field="item_s")


class BatchPart(_ItemPart):
    """An encoder or the like: a batch is done as a whole."""

    __slots__ = ()


class DiffusionPart(_ItemPart):
    """Denoising: images join a batch between steps, and leave after as many steps as their class says."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TokenPart:
    """A part that makes token after token: continuous batching over a KV cache of `kv_tokens` tokens.

    A step has one token of every running sequence and prompts, cut to fit, up to `max_tokens` in all. With
    `phase` "prefill" it computes prompts and their first token, and keeps their KV cache until it is where it
    is wanted; with "decode" it makes the tokens after the first.

    A sequence is let in when its prompt and its whole answer fit (`admission` "booked": what planned
    capacities assume), or when its prompt and a token do ("prompts", as vLLM): then, where the cache is
    full, the youngest gives way, is first in the queue, and what it had is computed again.
    """

    step: AnalyticStepModel | StepTable
    kv_tokens: int
    max_sequences: int = 256
    max_tokens: int = 2048
    phase: PhaseName = "both"
    emits: Emits = "text"
    admission: Literal["booked", "prompts"] = "booked"

    def __post_init__(self) -> None:
        if self.kv_tokens < 2 or self.max_sequences < 1 or self.max_tokens < 1:
            raise InputError("a token part has room for a sequence", field="token part")


PartModel = BatchPart | DiffusionPart | TokenPart


@dataclass(frozen=True, slots=True)
class Box:
    """A machine: its interface sends and receives `nic_bytes_per_s` each, one message after the other.

    Executors of one box hand over at `inner_bytes_per_s`, without a queue; those of one group of its GPUs
    at once.
    """

    name: str
    nic_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    inner_bytes_per_s: float = math.inf
    inner_latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.nic_bytes_per_s > 0.0 and self.inner_bytes_per_s > 0.0):
            raise InputError("an interface carries something", field=f"boxes.{self.name}")
        if not (0.0 <= self.latency_s < math.inf and 0.0 <= self.inner_latency_s < math.inf):
            raise InputError("latencies are seconds, 0 or more", field=f"boxes.{self.name}")


@dataclass(frozen=True, slots=True)
class BoxLink:
    """Link from one machine to another: one message after the other, beside those at both interfaces."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0.0 < self.bytes_per_s < math.inf and 0.0 <= self.latency_s < math.inf):
            raise InputError("a link carries something, after 0 seconds or more", field="links")


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """One device (or tensor-parallel group): runs one step of one of its parts at a time, in turn.

    `group` is that of the box's GPUs which it stands in, None where it has one of its own. `guests` has the
    parts as they are to classes of other services that share it: only seconds of items differ. Every step
    takes `slowed` times as long as its part says.
    """

    name: str
    box: str
    service: str
    parts: Mapping[str, PartModel] = field(hash=False)
    group: int | None = None
    guests: Mapping[str, Mapping[str, PartModel]] = field(default_factory=dict, hash=False)
    slowed: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.slowed < math.inf:
            raise InputError(f"steps take {self.slowed!r} times as long", field=self.name)

    def part(self, service: str, name: str) -> PartModel | None:
        """Return a part as it is to a service, None where it does not run it for that."""
        own = self.parts if service == self.service else self.guests.get(service, {})
        return own.get(name)


@dataclass(frozen=True, slots=True)
class PartEdge:
    """Part `src` feeds part `dst` with so many `bytes` of a request.

    `dst` begins when `src` is done; where `streamed`, when the first `chunk_tokens` tokens of `src` are
    there. A batch part that is fed by chunks of tokens has one item for each, streamed or not.
    """

    src: str
    dst: str
    bytes: Amount = Amount()
    chunk_tokens: int = 0
    streamed: bool = False

    def __post_init__(self) -> None:
        if self.streamed and self.chunk_tokens < 1:
            raise InputError(
                f"{self.src} -> {self.dst} is streamed in chunks of nothing",
                field="edges",
                hint="give chunk_tokens",
            )


@dataclass(frozen=True, slots=True)
class PartNeed:
    """Work that a request of a class asks of a part.

    `items` of a batch or diffusion part (a mean; what lies between whole numbers is drawn), `steps` of
    denoising each; `prompt` and `answer` tokens of a token part. The first token of an answer comes with the
    prompt: "decode" makes the others.
    """

    items: float = 1.0
    steps: int = 1
    prompt: Amount = INPUT
    answer: Amount = OUTPUT

    def __post_init__(self) -> None:
        if not 0.0 <= self.items < math.inf or self.steps < 1:
            raise InputError("items are 0 or more, steps 1 or more", field="needs")


@dataclass(frozen=True, slots=True)
class Promises:
    """Seconds that are promised, None where nothing is; see `workload.classes.RequestClass`."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    ahead_s: float | None = None
    image_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """Requests that ask the same of the same parts.

    Text lengths are lognormal with these means and CVs (standard deviation over mean). `speech` are the
    seconds of sound that a request wants.
    """

    service: str
    name: str
    rate_per_s: float
    needs: Mapping[str, PartNeed] = field(hash=False)
    edges: tuple[PartEdge, ...] = ()
    promises: Promises = Promises()
    input_tokens: float = 300.0
    output_tokens: float = 150.0
    input_cv: float = 0.0
    output_cv: float = 0.0
    speech: Amount = Amount()

    def __post_init__(self) -> None:
        if not 0.0 < self.rate_per_s < math.inf:
            raise InputError(f"{self.rate_per_s!r} is no rate", field=f"classes.{self.name}")
        if min(self.input_tokens, self.output_tokens) < 1.0:
            raise InputError("texts have a token at least", field=f"classes.{self.name}")
        if min(self.input_cv, self.output_cv) < 0.0:
            raise InputError("a CV is not negative", field=f"classes.{self.name}")

    @property
    def key(self) -> tuple[str, str]:
        """Service and class."""
        return (self.service, self.name)


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Parts that one executor runs, and who it may be: (executor, weight)."""

    parts: tuple[str, ...]
    executors: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PathSpec:
    """A way through the parts: `share` of the requests of a class (any unit) take it."""

    service: str
    klass: str
    share: float
    steps: tuple[StepSpec, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """All parts of it."""
        return tuple(part for step in self.steps for part in step.parts)


@dataclass(frozen=True)
class TaskFleet:
    """Everything that is simulated. Fleets that cannot run are refused here.

    `links` has, by sender and receiver, what joins two boxes where that is not their interfaces alone.
    """

    executors: tuple[ExecutorSpec, ...]
    classes: tuple[ClassSpec, ...]
    paths: tuple[PathSpec, ...]
    boxes: tuple[Box, ...] = (Box("box"),)
    links: Mapping[tuple[str, str], BoxLink] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        boxes = _unique("boxes", [box.name for box in self.boxes])
        _unique("executors", [executor.name for executor in self.executors])
        _unique("classes", [" ".join(klass.key) for klass in self.classes])
        for executor in self.executors:
            if executor.box not in boxes:
                raise UnknownNameError("box", executor.box, boxes, field=executor.name)
        if not self.classes or not self.executors:
            raise InputError("there is nothing to simulate", field="fleet")
        self._check_kinds()
        by_name = {executor.name: executor for executor in self.executors}
        for path in self.paths:
            self._check_path(path, by_name)
        for klass in self.classes:
            if sum(p.share for p in self.paths_of(klass)) <= 0.0:
                raise InputError(
                    f"no path for class '{klass.name}' of {klass.service}",
                    field="paths",
                    hint="give it one with a share above 0",
                )
            self._check_edges(klass)

    def paths_of(self, klass: ClassSpec) -> tuple[PathSpec, ...]:
        """Return the paths of a class."""
        return tuple(p for p in self.paths if (p.service, p.klass) == klass.key)

    def scaled(self, factor: float) -> TaskFleet:
        """Return the same fleet with so many times as many requests of every class."""
        classes = tuple(replace(k, rate_per_s=k.rate_per_s * factor) for k in self.classes)
        return replace(self, classes=classes)

    def part_type(self, service: str, part: str) -> type[PartModel]:
        """Return what kind of part it is."""
        for executor in self.executors:
            if (model := executor.part(service, part)) is not None:
                return type(model)
        raise InputError(f"no executor of {service} runs {part}", field="executors")

    def candidates(self, klass: ClassSpec, part: str) -> tuple[ExecutorSpec, ...]:
        """Return the executors that can run a part for a class."""
        return tuple(e for e in self.executors if _runs(e, klass, part))

    def _check_kinds(self) -> None:
        kinds: dict[tuple[str, str], type[PartModel]] = {}
        for executor in self.executors:
            if not executor.parts:
                raise InputError("an executor runs something", field=executor.name)
            for service, parts in ((executor.service, executor.parts), *executor.guests.items()):
                for name, model in parts.items():
                    if kinds.setdefault((service, name), type(model)) is not type(model):
                        raise InputError(
                            f"{name} is another kind of part on {executor.name} than elsewhere",
                            field="executors",
                        )
                    if name not in executor.parts:
                        raise InputError(
                            f"{executor.name} runs {name} for {service} alone",
                            field="executors",
                            hint="list it under its parts",
                        )

    def _check_path(self, path: PathSpec, executors: Mapping[str, ExecutorSpec]) -> None:
        klass = next((k for k in self.classes if k.key == (path.service, path.klass)), None)
        if klass is None:
            raise UnknownNameError(
                "class", path.klass, [k.name for k in self.classes], field="paths"
            )
        _unique(f"paths of '{path.klass}'", path.parts)
        if not path.parts or not 0.0 <= path.share < math.inf:
            raise InputError("a path has parts and a share", field=f"paths of '{path.klass}'")
        for step in path.steps:
            if not sum(w for _, w in step.executors) > 0.0 or any(w < 0 for _, w in step.executors):
                raise InputError(
                    f"{'+'.join(step.parts)} is sent to nobody", field=f"paths of '{path.klass}'"
                )
            for name, _ in step.executors:
                if name not in executors:
                    raise UnknownNameError("executor", name, executors, field="paths")
                for part in step.parts:
                    if part not in klass.needs:
                        raise InputError(
                            f"class '{klass.name}' does not say what it needs of {part}",
                            field="classes",
                        )
                    if not _runs(executors[name], klass, part):
                        raise InputError(
                            f"{name} does not run {part} for class '{klass.name}'", field="paths"
                        )

    def _check_edges(self, klass: ClassSpec) -> None:
        for edge in klass.edges:
            for end in (edge.src, edge.dst):
                if end not in klass.needs:
                    raise UnknownNameError("part", end, klass.needs, field="edges")
            if not edge.chunk_tokens:
                continue
            for executor in self.candidates(klass, edge.src):
                model = executor.parts[edge.src]
                if not isinstance(model, TokenPart) or model.phase == "prefill":
                    raise InputError(f"{edge.src} makes no tokens to cut", field="edges")
            if edge.streamed and self.part_type(klass.service, edge.dst) is DiffusionPart:
                raise InputError(f"{edge.dst} cannot begin with a piece", field="edges")
        # An llm's phases are one part or two, but not in one path.
        for path in self.paths_of(klass):
            used = [e for e in klass.edges if {e.src, e.dst} <= set(path.parts)]
            _unique(f"streams of '{klass.name}' from", [e.src for e in used if e.streamed])
            _unique(f"chunks of '{klass.name}' for", [e.dst for e in used if e.chunk_tokens])
        left = dict.fromkeys(klass.needs)
        while left:
            free = [p for p in left if not any(e.dst == p and e.src in left for e in klass.edges)]
            if not free:
                raise InputError(
                    f"the parts of class '{klass.name}' feed each other", field="edges"
                )
            for part in free:
                del left[part]


def _runs(executor: ExecutorSpec, klass: ClassSpec, part: str) -> bool:
    model = executor.part(klass.service, part)
    if model is None:
        return False
    return isinstance(model, TokenPart) or klass.name in model.item_s


def _unique(what: str, names: list[str] | tuple[str, ...]) -> list[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"'{name}' appears twice", field=what)
        seen.add(name)
    return list(names)
