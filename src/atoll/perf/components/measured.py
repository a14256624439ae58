"""Measured rates of parts, where shapes are not public or a user knows better, and Cornserve's algorithm 3.

A profile of a system gives requests/s of executors at one mix of classes. Rates do not add up over classes,
seconds do (Cornserve, appendix C): an executor of one component c alone gives its seconds per request,

    tau_c = 1 / (b_c F_c)        b requests/s of the mix, F_c the share of requests that use c

and for an executor s of several components the factor alpha_s, by which they slow each other down, is
measured over predicted seconds of a mean request. A request of class t then takes alpha_s tau_c at s for
each c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from atoll.catalog.nodes import NodeType
from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.workload.classes import RequestClass

Unit = Literal["request", "image", "frame", "audio_s", "speech_s", "token"]


class MeasuredRate(Frozen):
    """A part's measured rate on a GPU type ("A100-80", of each GPU) or a node type ("A100-80:2", of all).

    `unit` is what is counted: requests, images (brought or wanted), frames of video, seconds of sound brought
    or of speech wanted, or tokens of text in prompt and answer.
    """

    part: str = Field(min_length=1, max_length=80)
    on: str = Field(min_length=1, max_length=80)
    per_s: Annotated[float, Field(gt=0, le=1e9)]
    unit: Unit = "request"


class MeasuredRates(Frozen):
    """Measured rates and where they come from; they replace predictions."""

    rates: tuple[MeasuredRate, ...] = ()
    source: str = Field(default="measured", min_length=1, max_length=200)

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
