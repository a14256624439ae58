"""Executors as a simulator sees them: times of batches, and step models of parts that make tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.catalog.models import ModelSpec
from atoll.catalog.nodes import NodeType
from atoll.engines.table import EngineChoice
from atoll.perf.components.batches import ENGINE_HOST, Host
from atoll.perf.components.executor import Key, check_parts, executor_work
from atoll.perf.components.measured import MeasuredRates
from atoll.perf.components.sites import ALONE, Company, open_site
from atoll.perf.constants import ConstantTable
from atoll.perf.step import AnalyticStepModel
from atoll.workload.classes import RequestClass
from atoll.workload.lengths import LengthMix


@dataclass(frozen=True, slots=True)
class PartSteps:
    """Requests of one class at one part of one copy of an executor.

    A part that works on whole requests: a batch of n takes `fixed_s` + the sum of `item_s` of its requests,
    `rounds` times (steps of denoising), and holds `max_batch` requests at most. A part that makes tokens has
    `model` instead, the lengths that it sees, and `kv_tokens` of room in this copy.
    """

    fixed_s: float = 0.0
    item_s: float = 0.0
    max_batch: int = 1
    rounds: int = 1
    model: AnalyticStepModel | None = None
    lengths: LengthMix | None = None
    kv_tokens: int = 0


@dataclass(frozen=True)
class ExecutorSteps:
    """An executor as a simulator runs it: `copies` side by side, each with these parts, by (class, part).

    Every step takes `slowed` times as long as its part says.
    """

    parts: tuple[str, ...]
    node: NodeType
    tp: int
    copies: int
    steps: Mapping[Key, PartSteps] = field(hash=False)
    provenance: str = ""
    slowed: float = 1.0


def executor_steps(
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
) -> ExecutorSteps | None:
    """Return what an executor of `parts` on `node` is to a simulator; None where it does not fit.

    Measured rates take the place of predictions at parts that work on whole requests: as batches of one.
    """
    check_parts(model, parts)
    work = executor_work(
        model,
        parts,
        node,
        classes,
        tp=tp,
        engine=engine,
        constants=constants,
        measured=measured,
        host=host,
        company=company,
    )
    if work is None:
        return None
    site = open_site(
        model, parts, node, classes, work.tp, engine, constants, measured, host, company
    )
    assert site is not None
    copies = node.count // work.tp
    found: dict[Key, PartSteps] = {}
    for klass in classes:
        for part in site.parts:
            if part not in site.needs[klass.name]:
                continue
            if part in site.models:
                found[klass.name, part] = PartSteps(
                    max_batch=site.models[part].engine.max_sequences,
                    model=site.models[part],
                    lengths=site.lengths(klass, part),
                    kv_tokens=site.space.kv_tokens[part] // copies,
                )
                continue
            times = site.batches[klass.name, part]
            found[klass.name, part] = PartSteps(
                fixed_s=times.fixed_s,
                item_s=times.item_s,
                max_batch=site.most(times),
                rounds=times.rounds,
            )
    return ExecutorSteps(site.parts, node, work.tp, copies, found, work.provenance, work.slowed)
