"""Workloads that ship with Atoll: how public traces behave, without any of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from atoll.core.errors import UnknownNameError
from atoll.workload.arrival_rates import Layer, RateClock, RateCurve, Silence
from atoll.workload.arrivals import Renewal
from atoll.workload.lengths import BUILT_IN, LengthMix
from atoll.workload.sampling import Independent, LengthSampler, LogNormal, Quantiles
from atoll.workload.synthetic import MediaItems

NAMES = ("azure-code", "azure-conv", "burstgpt", "multimodal", "reasoning")
CURVES = ("burstgpt-day", "code-day", "code-week", "conv-day", "conv-week")
ALIASES = {"day": "conv-day", "week": "conv-week"}


@dataclass(frozen=True)
class BuiltIn:
    """A workload by name: its own rate, how bursty it is, its lengths, and what was measured.

    `measured` holds the statistics of the trace it follows, under the names that `comparison` uses.
    """

    name: str
    about: str
    rate_per_s: float
    renewal: Renewal
    layers: tuple[Layer | Silence, ...]
    lengths: LengthSampler
    items: MediaItems | None
    curve: RateCurve | None
    measured: Mapping[str, float]

    def clock(self, rate_per_s: float | None = None, start_s: float = 0.0) -> RateClock:
        """Return the clock at its own rate or another; how long bursts last does not change."""
        return RateClock(rate_per_s or self.rate_per_s, self.curve, self.layers, start_s)


@cache
def _data() -> dict[str, Any]:
    import yaml

    text = (files("atoll.workload") / "data" / "builtin.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    return loaded


@cache
def get_builtin(name: str) -> BuiltIn:
    """Return the built-in workload called `name`."""
    if name not in NAMES:
        raise UnknownNameError("workload", name, NAMES)
    entry = _data()["workloads"][name]
    return BuiltIn(
        name,
        entry["about"],
        entry["rate_per_s"],
        Renewal(entry["family"], entry["cv"]),
        (
            *(Layer(hold, cv) for hold, cv in entry["layers"]),
            *(Silence(on, off) for on, off in entry.get("silences", ())),
        ),
        _lengths(entry),
        _items(entry.get("items")),
        curve(entry["curve"]) if "curve" in entry else None,
        entry["measured"],
    )


@cache
def curve(name: str) -> RateCurve:
    """Return a rate curve by name: `day` and `week`, or one of `CURVES`."""
    key = ALIASES.get(name, name)
    if key not in CURVES:
        raise UnknownNameError("rate curve", name, [*ALIASES, *CURVES])
    entry = _data()["curves"][key]
    return RateCurve(tuple(entry["levels"]), entry["period_s"])


def lengths_like(mix: LengthMix) -> LengthSampler:
    """Return lengths to draw from that have the moments of a mix.

    A mix that is built in is drawn as it was measured; any other as independent log-normal lengths.
    """
    for name in NAMES:
        if name in BUILT_IN and BUILT_IN[name].has_moments_of(mix):
            return get_builtin(name).lengths
    input_cv, output_cv = mix.spreads
    return Independent(LogNormal(mix.input_mean, input_cv), LogNormal(mix.output_mean, output_cv))


def _lengths(entry: Mapping[str, Any]) -> LengthSampler:
    if "lognormal" in entry:
        sides = entry["lognormal"]
        return Independent(LogNormal(*sides["input"]), LogNormal(*sides["output"]))
    data = _data()
    return Quantiles(
        tuple(data["input_shares"]),
        tuple(entry["input"]),
        tuple(data["output_shares"]),
        tuple(tuple(row) for row in entry["output"]),
    )


def _items(entry: Mapping[str, Any] | None) -> MediaItems | None:
    if entry is None:
        return None
    return MediaItems(
        tuple(entry["bounds"]), tuple(tuple(group.items()) for group in entry["shares"])
    )
