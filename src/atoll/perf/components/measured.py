"""Measured rates of parts, where shapes are not public or a user knows better, and Cornserve's algorithm 3.

A profile of a system gives requests/s of executors at one mix of classes. Rates do not add up over classes,
seconds do (Cornserve, appendix C): an executor of one component c alone gives its seconds per request,

    tau_c = 1 / (b_c F_c)        b requests/s of the mix, F_c the share of requests that use c

and for an executor s of several components the factor alpha_s, by which they slow each other down, is
measured over predicted seconds of a mean request. A request of class t then takes alpha_s tau_c at s for
each c.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from atoll.catalog.nodes import NodeType
from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.workload.classes import RequestClass

Unit = Literal["request", "image", "frame", "audio_s", "speech_s", "token"]


MAX_BATCHES = 32
"""Batch sizes in a table, at most."""


class MeasuredRate(Frozen):
    """A part's measured rate on a GPU type ("A100-80", of each GPU) or a node type ("A100-80:2", of all).

    `unit` is what is counted: requests, images (brought or wanted), frames of video, seconds of sound brought
    or of speech wanted, or tokens of text in prompt and answer. With `batches` it was measured in batches:
    (units, seconds) by rising number, and `per_s` is the best of them. Of several parts ("vision+llm") it is
    the requests/s of a whole executor at the service's mix of classes.
    """

    part: str = Field(min_length=1, max_length=80)
    on: str = Field(min_length=1, max_length=80)
    per_s: Annotated[float, Field(gt=0, le=1e9)]
    unit: Unit = "request"
    batches: tuple[tuple[int, float], ...] = Field(default=(), max_length=MAX_BATCHES)

    @model_serializer(mode="wrap")
    def _without_blanks(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out a table that is not there, so that older problems keep their hash."""
        fields: dict[str, object] = write(self)
        return {name: value for name, value in fields.items() if name != "batches" or value}


def rate_of_batches(part: str, on: str, unit: Unit, seconds: Mapping[int, float]) -> MeasuredRate:
    """Return the rate of a table of batch sizes (units) and their seconds; InputError where it is none."""
    table = tuple(sorted(seconds.items()))
    for (few, fast), (many, slow) in itertools.pairwise(table):
        if slow < fast:
            raise InputError(
                f"a batch of {many} takes {slow:g} s, one of {few} {fast:g} s",
                hint="leave out what was disturbed",
            )
    best = max(size / took for size, took in table)
    return MeasuredRate(part=part, on=on, per_s=best, unit=unit, batches=table)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Seconds of batches of requests: `fixed_s` + `item_s` for each, up to `max_batch`."""

    fixed_s: float
    item_s: float
    max_batch: int


class MeasuredRates(Frozen):
    """Measured rates and where they come from; they replace predictions."""

    rates: tuple[MeasuredRate, ...] = ()
    source: str = Field(default="measured", min_length=1, max_length=200)

    def _on(self, part: str, node: NodeType) -> tuple[tuple[MeasuredRate, ...], int]:
        """Return what was measured of a part there, and of how many of it a node has the rate."""
        for on, scale in ((node.id, 1), (node.gpu.name, node.count)):
            found = tuple(rate for rate in self.rates if rate.part == part and rate.on == on)
            if found:
                return found, scale
        return (), 1

    def batch_line(self, part: str, node: NodeType, klass: RequestClass) -> BatchLine | None:
        """Return the seconds of batches of requests of a class on a whole node; None without a table.

        The lowest line of a table's slope that no batch of it lies above.
        """
        rates, scale = self._on(part, node)
        if not any(rate.batches for rate in rates):
            return None
        fixed = item = 0.0
        max_batch: float = math.inf
        for rate in rates:
            each = amount(klass, rate.unit)
            if each <= 0.0:
                continue
            table = rate.batches or ((1, 1.0 / rate.per_s),)
            (few, fast), (many, slow) = table[0], table[-1]
            slope = (slow - fast) / (many - few) if many > few else fast / few
            fixed += max(0.0, *(took - slope * size for size, took in table)) / scale
            item += slope * each / scale
            max_batch = min(max_batch, many / each)
        return BatchLine(fixed, item, max(1, int(max_batch))) if item + fixed > 0.0 else None

    def executor_seconds(self, parts: Sequence[str], node: NodeType) -> float | None:
        """Return the measured seconds of a whole node that a mean request takes, None where nothing is."""
        if len(parts) < 2:
            return None
        rates, scale = self._on("+".join(parts), node)
        return 1.0 / (rates[0].per_s * scale) if rates else None

    def request_seconds(self, part: str, node: NodeType, klass: RequestClass) -> float | None:
        """Return the seconds that a request of a class takes of a whole node, None where nothing is known.

        A rate on the very node type goes before one on its GPU type. Those of several units add up, as of
        images and frames for requests that bring both. What a request has none of was not measured with it.
        """
        for on, scale in ((node.id, 1), (node.gpu.name, node.count)):
            seconds = sum(
                amount(klass, rate.unit) / (rate.per_s * scale)
                for rate in self.rates
                if rate.part == part and rate.on == on
            )
            if seconds > 0.0:
                return seconds
        return None


def amount(klass: RequestClass, unit: Unit) -> float:
    """Return how much of a unit a request of a class is."""
    images = klass.images.count if klass.images is not None else 0.0
    if klass.image_output is not None:
        images += klass.image_output.count
    return {
        "request": 1.0,
        "image": images,
        "frame": float(klass.video.frames) if klass.video is not None else 0.0,
        "audio_s": klass.audio_s or 0.0,
        "speech_s": klass.speech_s or 0.0,
        "token": klass.input_tokens + klass.output_tokens,
    }[unit]


@dataclass(frozen=True, slots=True)
class ProfiledRates:
    """Rates of a profile: `alpha` by executor, and seconds by (executor, class, part)."""

    alpha: Mapping[str, float]
    seconds: Mapping[tuple[str, str, str], float]


def rates_from_profile(
    classes: Mapping[str, frozenset[str]],
    mix: Mapping[str, float],
    executors: Mapping[str, frozenset[str]],
    throughput: Mapping[str, float],
) -> ProfiledRates:
    """Return seconds per (executor, class, part) from requests/s of executors at one mix of classes.

    `classes` has the components that each class uses, `mix` its share of requests (they sum to 1),
    `executors` the components that each runs, and `throughput` requests/s of one replica of it when all
    requests of the mix that use any of its components come by, counted over the whole mix. Every component
    must have been profiled alone, too.
    """
    if abs(sum(mix.values()) - 1.0) > 1e-6:
        raise InputError(f"shares sum to {sum(mix.values()):g}", field="mix", hint="make it 1")
    for name in executors:
        if not throughput.get(name, 0.0) > 0.0:
            raise InputError(
                f"no throughput of executor {name}", field="throughput", hint="profile it"
            )
    alone = {
        next(iter(parts)): 1.0 / throughput[name]
        for name, parts in executors.items()
        if len(parts) == 1
    }
    tau: dict[str, float] = {}
    for part in sorted({part for parts in executors.values() for part in parts}):
        if part not in alone:
            raise InputError(
                f"component {part} was not profiled alone",
                field="executors",
                hint="add an executor that runs it alone",
            )
        share = sum(mix[name] for name, uses in classes.items() if part in uses)
        tau[part] = alone[part] / share if share > 0.0 else 0.0
    alpha: dict[str, float] = {}
    seconds: dict[tuple[str, str, str], float] = {}
    for name, parts in executors.items():
        demand = sum(mix[t] * sum(tau[c] for c in parts & uses) for t, uses in classes.items())
        several = len(parts) > 1 and demand > 0.0
        alpha[name] = 1.0 / throughput[name] / demand if several else 1.0
        for klass, uses in classes.items():
            for part in sorted(parts & uses):
                seconds[name, klass, part] = alpha[name] * tau[part]
    return ProfiledRates(alpha, seconds)
