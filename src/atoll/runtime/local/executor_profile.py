"""Throughput of executors, measured at one mix of classes, as seconds by class and part (Cornserve, app. C).

    classes:    {image+text: {share: 0.5, parts: [vision, llm]}, text: {share: 0.5, parts: [llm]}}
    executors:  {eyes: {parts: [vision], throughput: 8}, both: {parts: [vision, llm], throughput: 2}, ...}

`throughput` is requests/s of one replica, counted over the whole mix. Instead `metrics` names the page of an
executor that runs (or a file with one): what its components took for a batch, by size, while requests came.
Every part must have been measured alone on each kind of GPU where it was measured together with others; `on`
says which, where it is not the same for all. `perf.components.measured` has the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from atoll.core.errors import InputError
from atoll.core.files import read_json_object
from atoll.core.frozen import Frozen
from atoll.core.quantities import Rate
from atoll.perf.components.measured import MeasuredRate, rate_of_batches, rates_from_profile

Name = Annotated[str, Field(min_length=1, max_length=80)]
Parts = Annotated[tuple[Name, ...], Field(min_length=1)]


class ProfiledClass(Frozen):
    """A class of requests in the mix: its share of them, and the parts that it uses."""

    share: float = Field(gt=0, le=1)
    parts: Parts


class ProfiledExecutor(Frozen):
    """An executor of some parts: requests/s of one replica, and the GPU or node type it ran on.

    With `metrics` what its page says instead; `components` are those that stand for a part there, the part
    itself if left out.
    """

    parts: Parts
    throughput: Annotated[Rate, Field(gt=0, le=1e9)] | None = None
    metrics: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    components: dict[Name, Parts] = Field(default_factory=dict)
    batches: tuple[tuple[int, float], ...] = ()
    on: Name | None = None

    def components_of(self, part: str) -> tuple[str, ...]:
        """Return the components that stand for a part."""
        return self.components.get(part, (part,))


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
    requests that use them, with the seconds of batches where they are known, and those of whole executors of
    several parts at the mix.
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
    for name, executor in found.executors.items():
        if (executor.throughput is None) == (executor.metrics is None):
            raise InputError(
                "give what it carries once",
                path=path,
                field=f"executors.{name}",
                hint="throughput: what was measured, or metrics: its page",
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


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Batches of a component that ran: how many, of how many invocations, and seconds by mean size."""

    number: float
    items: float
    seconds: float
    sizes: Mapping[float, float]


def read_figures(page: str) -> dict[str, BatchFigures]:
    """Return by component what an executor's metrics say of its batches."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for family in text_string_to_metric_families(page):
            kind = _COUNTERS.get(family.name)
            for sample in family.samples if kind is not None else ():
                at = sums.setdefault(sample.labels["component"], {})
                at.setdefault(sample.labels["up_to"], {})[kind or ""] = sample.value
    except (KeyError, ValueError) as error:
        raise InputError("it is no page of an executor's metrics", hint="name /metrics") from error
    found = {}
    for component, by_size in sums.items():
        ran = [one for one in by_size.values() if one.get("items", 0.0) > 0.0]
        found[component] = BatchFigures(
            sum(one["number"] for one in ran),
            sum(one["items"] for one in ran),
            sum(one["seconds"] for one in ran),
            {one["items"] / one["number"]: one["seconds"] / one["number"] for one in ran},
        )
    return found


_COUNTERS = {
    "atoll:executor_batches": "number",
    "atoll:executor_batch_items": "items",
    "atoll:executor_batch_seconds": "seconds",
}


def fill_in(profile: ExecutorProfile, read: Callable[[str], str]) -> ExecutorProfile:
    """Return a profile with the throughput of executors that name a page; `read` returns one's text.

    A request takes of each part the mean seconds of an invocation, as often as requests of the mix use it.
    """
    filled = {}
    for name, executor in profile.executors.items():
        seconds = 0.0
        with located(f"executors.{name}.metrics"):
            figures = {} if executor.metrics is None else read_figures(read(executor.metrics))
            for part in executor.parts if executor.metrics is not None else ():
                share = sum(k.share for k in profile.classes.values() if part in k.parts)
                seconds += share * sum(
                    _figures_of(figures, component).seconds / _figures_of(figures, component).items
                    for component in executor.components_of(part)
                )
        filled[name] = executor
        if executor.metrics is not None:
            update = {"throughput": 1.0 / seconds, "batches": _table(executor, figures)}
            filled[name] = executor.model_copy(update=update)
    return profile.model_copy(update={"executors": filled})


def _figures_of(figures: Mapping[str, BatchFigures], component: str) -> BatchFigures:
    found = figures.get(component)
    if found is None or found.items <= 0.0 or found.seconds <= 0.0:
        raise InputError(
            f"{component} has not run there",
            hint="send it requests of the mix first, or name its component under 'components'",
        )
    return found


def _table(
    executor: ProfiledExecutor, figures: Mapping[str, BatchFigures]
) -> tuple[tuple[int, float], ...]:
    """The seconds of batches of a part that runs alone, by size; none where all were of one size."""
    components = [c for part in executor.parts for c in executor.components_of(part)]
    if len(components) != 1 or len(executor.parts) != 1:
        return ()
    table: dict[int, float] = {}
    slowest = 0.0
    for size, seconds in sorted(figures[components[0]].sizes.items()):
        # Larger batches that took less were less disturbed: they take no less than smaller ones.
        slowest = table[max(1, round(size))] = max(slowest, seconds)
    return tuple(sorted(table.items())) if len(table) > 1 else ()


@contextmanager
def located(field: str) -> Iterator[None]:
    """Say of errors inside which field they are about."""
    try:
        yield
    except InputError as error:
        raise error.locate(field=field) from error


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
            {name: e.throughput or 0.0 for name, e in here.items()},
        )
        alpha |= found.alpha
        alone: dict[str, float] = {}
        tables: dict[str, tuple[tuple[int, float], ...]] = {}
        for (name, klass, part), took in found.seconds.items():
            seconds.append(PartSeconds(name, place, klass, part, took))
            if len(set(here[name].parts)) == 1:
                alone[part] = took
                tables[part] = here[name].batches
        for part, took in alone.items():
            if tables[part]:
                rates.append(rate_of_batches(part, place, "request", dict(tables[part])))
            else:
                rates.append(MeasuredRate(part=part, on=place, per_s=1.0 / took, unit="request"))
        rates += [
            MeasuredRate(
                part="+".join(e.parts), on=place, per_s=e.throughput or 0.0, unit="request"
            )
            for e in here.values()
            if len(e.parts) > 1
        ]
    return ExecutorRates(alpha, tuple(seconds), tuple(rates))
