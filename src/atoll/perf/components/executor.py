"""Capacity of an executor of some parts on a slice of a machine: its seconds per class and part.

Seconds of parts add up (`solve.graph`), so each is worked out as if the executor did nothing else,
with the memory that all of its parts leave. Parts that make tokens (llm, talker) use the capacity models:
with both phases together `MixedCapacityModel`, apart `CapacityModel`. Parts that work on whole requests run
the largest batch whose time stays within their share of the promise:

    first text   encoders and prefill share the time to it in proportion to what each takes alone
    speech       talker and vocoder share the time until a listener would run dry, speech - ahead
    image        text encoder, denoiser and decoder share the time until the image

Without a promise the engine's limit and memory bound a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from atoll.catalog.models import ModelSpec
from atoll.catalog.nodes import NodeType
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.ids import Phase
from atoll.engines.table import EngineChoice
from atoll.perf.components.batches import ENGINE_HOST, BatchTime, Host
from atoll.perf.components.makers import token_rate
from atoll.perf.components.measured import MeasuredRates
from atoll.perf.components.sites import (
    ALONE,
    Company,
    ExecutorSite,
    decode_seconds,
    open_site,
    prompt_seconds,
    tp_choices,
)
from atoll.perf.constants import ConstantTable
from atoll.workload.classes import RequestClass

Key = tuple[str, str]
"""Class and part."""


@dataclass(frozen=True)
class ExecutorWork:
    """An executor of some parts on a slice of a machine: what a request takes of it, by (class, part).

    `seconds` are executor time per request; a pair is absent where the class does not need the part or its
    promise cannot be kept. `latency_s` is how long a request is there when nothing else is. `kv_tokens` is
    room for tokens of the llm, in all copies. `limits` says what bounds the batch, `provenance` what the
    figures rest on. `slowed` is by how much longer its parts take together than was worked out, in `seconds`
    already: 1 where nothing was measured of the whole executor.
    """

    parts: tuple[str, ...]
    node: NodeType
    tp: int
    seconds: Mapping[Key, float] = field(hash=False)
    latency_s: Mapping[Key, float] = field(hash=False)
    weight_bytes: float
    kv_tokens: int
    limits: Mapping[Key, str] = field(hash=False)
    provenance: str
    slowed: float = 1.0


def executor_work(
    model: ModelSpec,
    parts: Sequence[str],
    node: NodeType,
    classes: Sequence[RequestClass],
    *,
    tp: int | None = None,
    engine: str | EngineChoice = "vllm",
    constants: ConstantTable | None = None,
    measured: MeasuredRates | None = None,
    host: Host = ENGINE_HOST,
    company: Company = ALONE,
) -> ExecutorWork | None:
    """Return what an executor of `parts` on `node` carries; None where it does not fit.

    A node of n GPUs with tp below n holds n / tp copies side by side. Without `tp` the best is taken: the one
    that keeps most promises, then takes the least time for the mix of classes, then splits most. `host` is
    what preparing media takes beside the GPU, `company` who else's requests it takes.
    """
    check_parts(model, parts)
    best: tuple[tuple[int, float], ExecutorWork] | None = None
    for size in tp_choices(model, parts, node, tp):
        site = open_site(
            model, parts, node, classes, size, engine, constants, measured, host, company
        )
        if site is None:
            continue
        work = _work(site, classes)
        shares = {klass.name: klass.share for klass in classes}
        spent = sum(shares[name] * seconds for (name, _), seconds in work.seconds.items())
        rank = (len(work.seconds), -spent)
        if best is None or rank >= best[0]:
            best = (rank, work)
    return None if best is None else best[1]


def check_parts(model: ModelSpec, parts: Sequence[str]) -> None:
    """Refuse parts that a model does not have, and none at all."""
    if not parts:
        raise UsageError("an executor runs at least one part", field="parts")
    known = model.graph.parts()
    for part in parts:
        if part not in known:
            raise UnknownNameError("part", part, known, field="parts")


def _work(site: ExecutorSite, classes: Sequence[RequestClass]) -> ExecutorWork:
    seconds: dict[Key, float] = {}
    latency: dict[Key, float] = {}
    limits: dict[Key, str] = {}
    grounds: dict[str, None] = {}
    copies = site.node.count // site.tp
    for klass in classes:
        for part in site.parts:
            if part not in site.needs[klass.name]:
                continue
            key = (klass.name, part)
            found = _predict(site, klass, part)
            grounds[site.grounds(part)] = None
            latency[key], limits[key] = found.latency_s, found.limit
            if found.seconds > 0.0:
                seconds[key] = found.seconds / copies
    slowed = _slowed(site, classes, seconds)
    if slowed != 1.0:
        seconds = {key: slowed * value for key, value in seconds.items()}
        grounds["the whole executor was measured"] = None
    return ExecutorWork(
        parts=site.parts,
        node=site.node,
        tp=site.tp,
        seconds=seconds,
        latency_s=latency,
        weight_bytes=site.space.weight_bytes,
        kv_tokens=site.llm_tokens,
        limits=limits,
        provenance="; ".join(grounds),
        slowed=slowed,
    )


def _slowed(
    site: ExecutorSite, classes: Sequence[RequestClass], seconds: Mapping[Key, float]
) -> float:
    """By how much parts of one executor slow each other down: measured over worked-out seconds.

    Of a mean request of the service's mix (alpha in appendix C of Cornserve).
    """
    known = None
    if site.measured is not None:
        known = site.measured.executor_seconds(site.parts, site.node)
    shares = {klass.name: klass.share for klass in classes}
    mean = sum(shares[name] * value for (name, _), value in seconds.items())
    return known / mean if known is not None and mean > 0.0 else 1.0


@dataclass(frozen=True, slots=True)
class _Predicted:
    """Seconds of one copy for a request, 0 where the promise cannot be kept."""

    seconds: float
    latency_s: float
    limit: str


def _predict(site: ExecutorSite, klass: RequestClass, part: str) -> _Predicted:
    budget = site.budget(klass, part)
    known = site.measured_seconds(klass, part)
    if part in site.models:
        alone = time_alone(site, klass, part)
        if known is not None:
            return _Predicted(known, alone, "measured")
        rate = token_rate(site, klass, part, budget)
        seconds = 1.0 / rate.requests_per_s if rate.requests_per_s > 0.0 else 0.0
        return _Predicted(seconds, alone, rate.limit)
    times = site.batches[klass.name, part]
    found = batched(times, budget, site.promise(klass, part), site.most(times))
    return found if known is None else replace(found, limit="measured")


def batched(times: BatchTime, budget_s: float, promise_s: float, max_items: int) -> _Predicted:
    """Return seconds per request in the largest batch that `budget_s` allows, a share of the promise.

    A request that alone takes longer than its share still runs, by itself, as long as the promise is kept.
    """
    alone = times.alone_s
    if alone > promise_s:
        return _Predicted(0.0, alone, "promise: one request alone takes longer")
    within = times.largest_within(budget_s)
    batch = max(1, min(within, max_items))
    if batch == max_items:
        limit = "memory" if max_items < times.max_batch else "the engine's largest batch"
    else:
        limit = "promise"
    return _Predicted(times.seconds(batch) / batch, alone, limit)


def time_alone(site: ExecutorSite, klass: RequestClass, part: str) -> float:
    """Return how long a request is at a part that makes tokens while nothing else is there.

    For an llm that is until its first token, for its decode phase nothing, for a talker until all codes are
    made.
    """
    model = site.models[part]
    lengths = site.lengths(klass, part)
    phase = site.phase(part)
    if phase is Phase.DECODE:
        return 0.0
    max_tokens = model.engine.max_tokens if phase is Phase.PREFILL else model.engine.mixed_tokens
    first = prompt_seconds(model, lengths.input_mean, float(max_tokens))
    if part not in site.talkers:
        return first
    return first + lengths.output_mean * decode_seconds(model, lengths.decode_context)
