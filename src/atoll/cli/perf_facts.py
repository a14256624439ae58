"""The facts above the drawings of `atoll perf show`: for programs, and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core.ids import Phase
from atoll.core.units import format_bytes, format_count, format_duration
from atoll.perf.batch import Batch

if TYPE_CHECKING:
    from atoll.perf.memory_model import MemoryModel
    from atoll.perf.step import StepModel


def host_times(steps: StepModel, context: float) -> dict[Phase, float]:
    """Return host seconds per step of each phase: of the smallest one, measured or assumed."""
    smallest = {Phase.PREFILL: Batch.prefill(1.0), Phase.DECODE: Batch.decode(1.0, context)}
    return {phase: float(steps.parts(batch).host) for phase, batch in smallest.items()}


def _host_words(steps: StepModel, hosts: dict[Phase, float]) -> str:
    host = steps.engine.host
    assumed = f"{format_duration(host.step_s)} per step"
    if host.sequence_s > 0.0:
        assumed += f" and {format_duration(host.sequence_s)} per sequence"
    words_by_phase = {
        phase: f"{format_duration(seconds)} per step (measured)"
        if steps.measures_host(phase)
        else f"{assumed} ({steps.engine.name}, assumed)"
        for phase, seconds in hosts.items()
    }
    if len(set(words_by_phase.values())) == 1:
        return next(iter(words_by_phase.values()))
    return "; ".join(f"{phase.value} {words}" for phase, words in words_by_phase.items())


def facts_of(
    steps: StepModel, memory: MemoryModel, hosts: dict[Phase, float]
) -> dict[str, float | str]:
    """Return what programs read: base units, named in the keys. `kv_tokens` is per copy, 0 if none fits.

    `host_s` is that of decode, which pays it for every token.
    """
    layers = steps.spec.layers
    return {
        "weight_bytes": steps.spec.weight_bytes,
        "layers": layers,
        "usable_bytes_per_gpu": memory.usable_bytes,
        "kv_tokens": memory.kv_tokens(0, layers),
        "tp": steps.tp,
        "copies": steps.node.count // steps.tp,
        "host_s": hosts[Phase.DECODE],
        "provenance": steps.provenance,
    }


def words_of(
    steps: StepModel, memory: MemoryModel, most: int, hosts: dict[Phase, float]
) -> dict[str, str]:
    """Return the same for people."""
    layers = steps.spec.layers
    whole = memory.free_bytes(0, layers)
    room = (
        f"{format_count(memory.kv_tokens(0, layers))} tokens beside the whole model"
        if whole > 0
        else f"the whole model does not fit; {most} of {layers} layers do"
    )
    copies = steps.node.count // steps.tp
    return {
        "weights": f"{format_bytes(steps.spec.weight_bytes)} in {layers} layers",
        "usable memory": f"{format_bytes(memory.usable_bytes)} per GPU for weights and KV cache",
        "KV cache": room,
        "parallelism": f"tensor parallel over {steps.tp}" + (f", {copies} copies" * (copies > 1)),
        "host time": _host_words(steps, hosts),
        "times": steps.provenance,
    }
