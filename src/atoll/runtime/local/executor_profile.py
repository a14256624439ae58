"""Throughput of executors, measured at one mix of classes, as seconds by class and part (Cornserve, app. C).

    classes:    {image+text: {share: 0.5, parts: [vision, llm]}, text: {share: 0.5, parts: [llm]}}
    executors:  {eyes: {parts: [vision], throughput: 8}, both: {parts: [vision, llm], throughput: 2}, ...}

`throughput` is requests/s of one replica, counted over the whole mix. Every part must have been measured
alone on each kind of GPU where it was measured together with others; `on` says which, where it is not the
same for all. `perf.components.measured` has the algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from atoll.core.errors import InputError
from atoll.core.files import read_json_object
from atoll.core.frozen import Frozen
from atoll.core.quantities import Rate
from atoll.perf.components.measured import MeasuredRate, rates_from_profile

Name = Annotated[str, Field(min_length=1, max_length=80)]
Parts = Annotated[tuple[Name, ...], Field(min_length=1)]


class ProfiledClass(Frozen):
    """A class of requests in the mix: its share of them, and the parts that it uses."""

    share: float = Field(gt=0, le=1)
    parts: Parts


class ProfiledExecutor(Frozen):
    """An executor of some parts: requests/s of one replica, and the GPU or node type it ran on."""

    parts: Parts
    throughput: Annotated[Rate, Field(gt=0, le=1e9)]
    on: Name | None = None


class ExecutorProfile(Frozen):
    """Measurements: the mix, and the throughput of executors at it."""

    classes: dict[Name, ProfiledClass] = Field(min_length=1)
    executors: dict[Name, ProfiledExecutor] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class PartSeconds:
    """Seconds of one replica of an executor that a request of a class takes at a part."""

    executor: str
    on: str
    klass: str
    part: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ExecutorRates:
    """Conclusions from a profile.

    `alpha` says by executor how much its parts slow each other down. `rates` are those of parts alone, in
    requests that use them: a fleet file knows rates of parts, not of executors.
    """

    alpha: Mapping[str, float]
    seconds: tuple[PartSeconds, ...]
    rates: tuple[MeasuredRate, ...]


def read_executor_profile(path: Path) -> ExecutorProfile:
    """Read a profile of executors from a JSON file, and check that it is one of a whole mix."""
    found = ExecutorProfile.parse(read_json_object(path), path=path)
    total = sum(klass.share for klass in found.classes.values())
    if abs(total - 1.0) > 1e-6:
        raise InputError(
            f"shares sum to {total:g}", path=path, field="classes", hint="make it 1 over all"
        )
    used = {part for klass in found.classes.values() for part in klass.parts}
    for name, executor in found.executors.items():
        for part in executor.parts:
            if part not in used:
                raise InputError(
                    f"no class uses the part {part!r}",
                    path=path,
                    field=f"executors.{name}.parts",
                    hint="add it to the parts of a class",
                )
    run = {part for executor in found.executors.values() for part in executor.parts}
    for name, klass in found.classes.items():
        for part in klass.parts:
            if part not in run:
                raise InputError(
                    f"no executor runs the part {part!r}",
                    path=path,
                    field=f"classes.{name}.parts",
                    hint="add an executor of it, or leave it out of every class",
                )
    return found


def derive_rates(profile: ExecutorProfile, on: str) -> ExecutorRates:
    """Return seconds by executor, class and part, and rates of parts, of each kind of GPU apart.

    `on` is the GPU or node type of executors that name none.
    """
    classes = {name: frozenset(klass.parts) for name, klass in profile.classes.items()}
    mix = {name: klass.share for name, klass in profile.classes.items()}
    alpha: dict[str, float] = {}
    seconds: list[PartSeconds] = []
    rates: list[MeasuredRate] = []
    for place in dict.fromkeys(e.on or on for e in profile.executors.values()):
        here = {name: e for name, e in profile.executors.items() if (e.on or on) == place}
        found = rates_from_profile(
            classes,
            mix,
            {name: frozenset(e.parts) for name, e in here.items()},
            {name: e.throughput for name, e in here.items()},
        )
        alpha |= found.alpha
        alone: dict[str, float] = {}
        for (name, klass, part), took in found.seconds.items():
            seconds.append(PartSeconds(name, place, klass, part, took))
            if len(set(here[name].parts)) == 1:
                alone[part] = took
        rates += [
            MeasuredRate(part=part, on=place, per_s=1.0 / took, unit="request")
            for part, took in alone.items()
        ]
    return ExecutorRates(alpha, tuple(seconds), tuple(rates))
