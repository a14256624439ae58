"""Workloads in words: "azure-conv@10/s for=1h", "poisson:10/s lengths=1024x128", "trace.csv.gz@x2".

    SPEC    PART, or several joined by " + ", which then run at the same time
    PART    SOURCE OPTION...
    SOURCE  NAME[@RATE]                 a built-in workload, at its own rate or another
            poisson:RATE, gamma:RATE, weibull:RATE
            FILE[@RATE] or FILE[@xN]    a trace, as it is, at a rate, or N times as fast
            servegen:FOLDER/POOL[@RATE] a pool of ServeGen clients
    OPTION  for=10min  n=100k           when it ends (10 minutes, unless the source has an end)
            lengths=L                   1024x128, lognormal:1024/1.2x128/0.9, normal:1024/0.3x128/0.2 (mean
                                        and CV of prompts x answers), a built-in name, or a file
            cv=2                        CV of the gaps (gamma, weibull, built-in)
            curve=C  start=8h           the rate over a day or week (day, week, none, a file), and where
                                        in it to start
            keep=clock | gaps           what stays when a rate is changed; see docs/reference/workloads.md
            model=M or models=A:0.7,B:0.3, class=C, format=F

An end given to one part of several is the end of all of them.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from atoll.core.errors import InputError, UnknownNameError, UsageError, shorten
from atoll.core.units import parse_count, parse_duration, parse_rate
from atoll.workload.arrival_rates import Layer, RateClock, RateCurve, Silence
from atoll.workload.arrivals import FAMILIES, Family, Renewal
from atoll.workload.builtin import NAMES, curve, get_builtin, lengths_like
from atoll.workload.lengths import BUILT_IN, length_mix
from atoll.workload.requests import Requests, Workload
from atoll.workload.sampling import Fixed, Independent, LengthSampler, LogNormal, Marginal, Normal
from atoll.workload.servegen import ClientPool
from atoll.workload.synthetic import Mixed, Synthetic
from atoll.workload.trace_reading import BAD_LIMIT
from atoll.workload.traces import KEEPS, Keep, TraceReplay, read_trace

_T = TypeVar("_T")
DEFAULT_S = 600.0
"""Seconds that a drawn workload lasts if nothing says otherwise."""
_MAX_SPEC = 10_000
_DRAWN = frozenset(
    ("for", "n", "lengths", "cv", "curve", "start", "keep", "model", "models", "class")
)
_READ = frozenset(("for", "n", "keep", "model", "format"))
_POOL = frozenset(("for", "start", "model"))


@dataclass(frozen=True, slots=True)
class _SpecPart:
    """One part of a spec, taken apart."""

    source: str
    options: Mapping[str, str]
    strict: bool
    bad_limit: int

    def only(self, allowed: frozenset[str]) -> None:
        for name in self.options:
            if name not in allowed:
                raise UnknownNameError(f"option of {shorten(self.source)}", name, allowed)

    def read(self, name: str, parse: Callable[[str], _T]) -> _T | None:
        text = self.options.get(name)
        if text is None:
            return None
        try:
            return parse(text)
        except InputError as error:
            raise error.locate(field=name) from error

    @property
    def duration_s(self) -> float | None:
        return self.read("for", parse_duration)

    @property
    def count(self) -> int | None:
        return self.read("n", parse_count)

    @property
    def keep(self) -> Keep | None:
        text = self.options.get("keep")
        if text is not None and text not in KEEPS:
            raise UnknownNameError("way to keep burstiness", text, KEEPS, field="keep")
        return text


def workload_of(spec: str, *, strict: bool = False, bad_limit: int = BAD_LIMIT) -> Workload:
    """Return the workload that a spec describes; see the top of this module for how to write one.

    `strict` and `bad_limit` say what bad rows of trace files do, as in `read_trace`.
    """
    if len(spec) > _MAX_SPEC:
        raise UsageError(f"a workload of more than {_MAX_SPEC:,} characters")
    try:
        words = shlex.split(spec)
    except ValueError as error:
        raise InputError(f"{shorten(spec)!r}: {error}", hint="close every quote") from error
    parts = [_part(part_words, strict, bad_limit) for part_words in _split(words)]
    ends = [part.options["for"] for part in parts if "for" in part.options]
    if len(parts) > 1 and len(ends) == 1:
        parts = [
            part if "n" in part.options else replace(part, options={"for": ends[0], **part.options})
            for part in parts
        ]
    workloads = tuple(_workload(part) for part in parts)
    return (
        workloads[0]
        if len(workloads) == 1
        else Mixed(" + ".join(part.name for part in workloads), workloads)
    )


def generate(spec: str, seed: int = 0) -> Iterator[Requests]:
    """Yield the requests of the workload that a spec describes, in order of arrival."""
    return workload_of(spec).chunks(seed)


def _split(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "+":
            parts.append([])
        else:
            parts[-1].append(word)
    if not all(parts):
        raise InputError(
            "a workload, or a part of it, is empty", hint="write it like azure-conv@10/s for=10min"
        )
    return parts


def _part(words: list[str], strict: bool, bad_limit: int) -> _SpecPart:
    source, *rest = words
    options: dict[str, str] = {}
    for word in rest:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise InputError(
                f"{shorten(word)!r} is not an option",
                hint="write options as NAME=VALUE, as in for=10min",
            )
        if name in options:
            raise InputError("the option is given twice", field=name)
        options[name] = value
    return _SpecPart(source, options, strict, bad_limit)


def _workload(part: _SpecPart) -> Workload:
    family, colon, rest = part.source.partition(":")
    if colon and family in FAMILIES:
        part.only(_DRAWN)
        return _parse_drawn(part, family, parse_rate(rest, field=family))
    if colon and family == "servegen":
        part.only(_POOL)
        return _pool(part, rest)
    name, rate, factor = _split_pace(part.source)
    if name in NAMES:
        part.only(_DRAWN)
        if factor is not None:
            rate = get_builtin(name).rate_per_s * factor
        return _parse_builtin(part, name, rate)
    if os.path.isfile(name) or name.removesuffix(".gz").endswith((".csv", ".jsonl")):
        part.only(_READ)
        return _read(part, name, rate, factor)
    known = [*NAMES, *(f"{family}:10/s" for family in FAMILIES), "FILE.csv", "servegen:FOLDER/POOL"]
    raise UnknownNameError("workload", name, known)


def _split_pace(source: str) -> tuple[str, float | None, float | None]:
    """The name, and the rate or factor after its last "@" if there is one."""
    name, at, pace = source.rpartition("@")
    if not at or os.path.isfile(source):
        return source, None, None
    return _pace(name, pace)


def _pace(name: str, pace: str) -> tuple[str, float | None, float | None]:
    if pace[:1] == "x":
        try:
            factor = float(pace[1:])
        except ValueError:
            factor = math.nan
        if not 0.0 < factor < math.inf:
            raise InputError(f"{pace!r} is not a factor above 0", field="rate", hint="as in @x2")
        return name, None, factor
    rate = parse_rate(pace, field="rate")
    if rate <= 0.0:
        raise InputError(f"{pace!r} is not a rate above 0", field="rate")
    return name, rate, None


def _end(part: _SpecPart) -> tuple[float | None, int | None]:
    duration_s, count = part.duration_s, part.count
    return (DEFAULT_S, None) if duration_s is None and count is None else (duration_s, count)


def _models(part: _SpecPart) -> tuple[tuple[str, ...], tuple[float, ...]]:
    if "models" not in part.options:
        return (part.options.get("model", ""),), (1.0,)
    if "model" in part.options:
        raise InputError("there is model= already", field="models", hint="use one of the two")
    names, shares = [], []
    for word in part.options["models"].split(","):
        name, colon, share = word.rpartition(":")
        try:
            shares.append(float(share) if colon else math.nan)
        except ValueError:
            shares.append(math.nan)
        if not name or not 0.0 <= shares[-1] < math.inf:
            raise InputError(
                f"{shorten(word)!r} is not MODEL:SHARE", field="models", hint="as in a:0.7,b:0.3"
            )
        names.append(name)
    return tuple(names), tuple(shares)


def _cv(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{shorten(text)!r} is not a number", field="cv") from None


def _parse_drawn(part: _SpecPart, family: Family, rate: float) -> Synthetic:
    duration_s, count = _end(part)
    models, shares = _models(part)
    if "keep" in part.options:
        raise InputError("there is no burstiness to keep", field="keep", hint="leave it out")
    return Synthetic(
        part.source,
        RateClock(rate, _curve(part.options.get("curve", "none")), (), _start(part)),
        lengths_of(part.options.get("lengths", "azure-conv")),
        Renewal(family, part.read("cv", _cv) or 1.0),
        duration_s,
        count,
        models,
        shares,
        part.options.get("class", "text"),
    )


def _parse_builtin(part: _SpecPart, name: str, rate: float | None) -> Synthetic:
    builtin = get_builtin(name)
    duration_s, count = _end(part)
    models, shares = _models(part)
    clock = builtin.clock(rate, _start(part))
    if part.keep == "gaps":
        # The whole process runs faster: bursts get shorter by what the rate grows.
        layers = tuple(
            _speed_up(layer, clock.rate_per_s / builtin.rate_per_s) for layer in clock.layers
        )
        clock = replace(clock, layers=layers)
    if "curve" in part.options:
        clock = replace(clock, curve=_curve(part.options["curve"]))
    cv = part.read("cv", _cv)
    lengths = part.options.get("lengths")
    return Synthetic(
        name,
        clock,
        builtin.lengths if lengths is None else lengths_of(lengths),
        builtin.renewal if cv is None else Renewal(builtin.renewal.family, cv),
        duration_s,
        count,
        models,
        shares,
        part.options.get("class", "text"),
        builtin.items if lengths is None else None,
    )


def _speed_up(layer: Layer | Silence, speed: float) -> Layer | Silence:
    if isinstance(layer, Layer):
        return Layer(layer.hold_s / speed, layer.cv)
    return Silence(layer.on_s / speed, layer.off_s / speed)


def _start(part: _SpecPart) -> float:
    return part.read("start", parse_duration) or 0.0


def _pool(part: _SpecPart, place: str) -> ClientPool:
    name, rate, factor = _split_pace(place)
    folder, slash, pool = name.rpartition("/")
    if not slash or not pool:
        raise InputError(f"{shorten(name)!r} is not FOLDER/POOL", field="servegen")
    duration_s = part.duration_s or DEFAULT_S
    clients = ClientPool(
        folder or "/", pool, duration_s, _start(part), rate, part.options.get("model", "")
    )
    return clients if factor is None else replace(clients, rate_per_s=clients.mean_rate() * factor)


def replay_of(
    path: str,
    pace: str | None = None,
    *,
    kind: str | None = None,
    keep: str | None = None,
    strict: bool = False,
    bad_limit: int = BAD_LIMIT,
) -> TraceReplay:
    """Return a trace file as it is, at a rate ("10/s"), or so many times as fast ("x2")."""
    options = {"keep": keep, "format": kind}
    part = _SpecPart(path, {k: v for k, v in options.items() if v is not None}, strict, bad_limit)
    _, rate, factor = (path, None, None) if pace is None else _pace(path, pace)
    return _read(part, path, rate, factor)


def _read(part: _SpecPart, path: str, rate: float | None, factor: float | None) -> TraceReplay:
    keep = part.keep or "gaps"
    trace = read_trace(
        path, kind=part.options.get("format"), strict=part.strict, bad_limit=part.bad_limit
    )
    speed = rate / trace.rate_per_s if rate is not None else factor or 1.0
    return TraceReplay(trace, speed, keep, part.duration_s, part.count, part.options.get("model"))


def _curve(name: str) -> RateCurve | None:
    if name == "none":
        return None
    if not os.path.isfile(name):
        return curve(name)
    from atoll.workload.rate_files import read_curve

    return read_curve(name)


def lengths_of(text: str) -> LengthSampler:
    """Return the lengths that a text describes: see `lengths=` at the top of this module."""
    family, colon, rest = text.partition(":")
    if colon and family in ("lognormal", "normal"):
        sides = rest.split("x")
        if len(sides) != 2:
            raise InputError(
                f"{shorten(text)!r} is not a prompt and an answer",
                field="lengths",
                hint=f"write {family}:MEAN/CVxMEAN/CV, as in {family}:1024/0.8x128/0.6",
            )
        return Independent(_marginal(family, sides[0]), _marginal(family, sides[1]))
    if text in NAMES:
        return get_builtin(text).lengths
    if os.path.isfile(text):
        return read_trace(text, kind="lengths").lengths()
    mix = length_mix(text)
    if text in BUILT_IN:
        return lengths_like(mix)
    return Independent(Fixed(int(mix.input_mean)), Fixed(int(mix.output_mean)))


def _marginal(family: str, text: str) -> Marginal:
    mean, slash, cv = text.partition("/")
    try:
        values = float(mean), float(cv) if slash else math.nan
    except ValueError:
        values = math.nan, math.nan
    if not all(map(math.isfinite, values)):
        raise InputError(
            f"{shorten(text)!r} is not MEAN/CV", field="lengths", hint="as in 1024/0.8"
        )
    return LogNormal(*values) if family == "lognormal" else Normal(*values)
