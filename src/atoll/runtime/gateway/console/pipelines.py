"""Pipelines: machines that each hold a part of a model's layers, in the order of the layers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.runtime.gateway.console.machines import ShownMachine


class ShownStage(msgspec.Struct, frozen=True):
    """A machine of a pipeline with its layers [start, end)."""

    machine: str
    layers: tuple[int, int]


class ShownPipeline(msgspec.Struct, frozen=True):
    """The machines that hold one instance of a model, and how many layers they have together."""

    model: str
    instance: str
    layers: int
    stages: tuple[ShownStage, ...]


def find_pipelines(machines: Iterable[ShownMachine]) -> tuple[ShownPipeline, ...]:
    """Return the pipelines over machines that say which layers they hold; an instance is one of its fleet."""
    found: dict[tuple[str, str, str], list[ShownStage]] = {}
    for machine in machines:
        for service in machine.services:
            if service.layers is not None and machine.instance is not None:
                key = (machine.fleet or "", machine.instance, service.model)
                found.setdefault(key, []).append(ShownStage(machine.id, service.layers))
    return tuple(
        ShownPipeline(
            model,
            instance,
            max(stage.layers[1] for stage in stages),
            tuple(sorted(stages, key=lambda stage: (stage.layers, stage.machine))),
        )
        for (_, instance, model), stages in found.items()
    )
