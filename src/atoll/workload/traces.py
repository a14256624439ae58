"""Traces as workloads: read from a file, replayed as they are or at another rate."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from atoll.core.errors import InputError
from atoll.core.rng import stream
from atoll.workload.requests import CHUNK, Requests
from atoll.workload.sampling import Empirical
from atoll.workload.trace_reading import BAD_LIMIT, RowReport
from atoll.workload.trace_rows import read_blocks

Keep = Literal["gaps", "clock"]
KEEPS: tuple[Keep, ...] = ("gaps", "clock")
MAX_SPEED = 1e6
_MAX_PAIRS = 20_000_000


@dataclass
class Trace:
    """A trace file; every pass over `chunks` reads it anew and leaves a fresh `report`.

    `kind` is its format (a name of `formats.FORMATS`), or None to find out. The first bad row is
    an error if `strict`, else the one after `bad_limit`.
    """

    path: str
    kind: str | None = None
    strict: bool = False
    bad_limit: int = BAD_LIMIT
    report: RowReport = field(init=False)

    def __post_init__(self) -> None:
        if self.bad_limit < 0:
            raise InputError(f"{self.bad_limit} is not a number of rows", field="bad_limit")
        self.report = self._fresh()

    def _fresh(self) -> RowReport:
        return RowReport(self.path, self.strict, self.bad_limit)

    @property
    def name(self) -> str:
        """The name of the file."""
        return os.path.basename(self.path)

    def chunks(self, seed: int = 0) -> Iterator[Requests]:  # noqa: ARG002
        """Yield the requests of the file in order of arrival; the seed changes nothing."""
        self.report = self._fresh()
        count = 0
        for block in read_blocks(self.path, self.kind, self.report):
            whole = block.requests
            count += len(whole)
            for first in range(0, len(whole), CHUNK):
                yield whole.take(slice(first, first + CHUNK)) if len(whole) > CHUNK else whole
        if not count:
            detail = f"; {self.report.bad:,} bad rows" if self.report.bad else ""
            if self.report.examples:
                line, what = self.report.examples[0]
                detail += f", the first at line {line}: {what}"
            raise InputError(
                f"the trace holds no requests{detail}",
                path=self.path,
                hint="check its rows and columns",
            )

    @cached_property
    def span(self) -> tuple[int, float, float]:
        """The number of requests, and the first and last arrival in seconds; reads the whole file."""
        count, first, last = 0, math.nan, math.nan
        for chunk in self.chunks():
            first = float(chunk.arrival_s[0]) if not count else first
            count, last = count + len(chunk), float(chunk.arrival_s[-1])
        return count, first, last

    @property
    def rate_per_s(self) -> float:
        """Mean requests per second between the first arrival and the last."""
        count, first, last = self.span
        if last <= first:
            raise InputError(
                "all requests come at the same moment, so they have no rate",
                path=self.path,
                hint="replay it as it is, without a rate",
            )
        return count / (last - first)

    def lengths(self) -> Empirical:
        """Return the pairs of lengths in the file, to draw from."""
        pairs = [(chunk.input, chunk.output) for chunk in self.chunks()]
        if sum(len(prompts) for prompts, _ in pairs) > _MAX_PAIRS:
            raise InputError(f"more than {_MAX_PAIRS:,} lengths to draw from", path=self.path)
        return Empirical(
            np.concatenate([prompts for prompts, _ in pairs]),
            np.concatenate([answers for _, answers in pairs]),
        )


def read_trace(
    path: str | os.PathLike[str],
    *,
    kind: str | None = None,
    strict: bool = False,
    bad_limit: int = BAD_LIMIT,
) -> Trace:
    """Return the trace in a file; it is read when its chunks are asked for."""
    return Trace(os.fspath(path), kind, strict, bad_limit)


@dataclass(frozen=True)
class TraceReplay:
    """A trace at `speed` times its rate, for `duration_s` seconds or `count` requests (None: all of it).

    Keeping `gaps` runs the trace's clock faster or slower: every gap is divided by the speed, so the
    CV of gaps, and every other statistic counted in mean gaps, stays exactly the same. Keeping the
    `clock` leaves a minute a minute: above 1, each gap is filled with evenly spaced copies of the
    request that ends it, so counts in every window grow by the speed (peaks over means and the CV
    of gaps stay); below 1, each request is kept with that probability. Times start at the first
    arrival. Copies share their original's prefix blocks.
    """

    trace: Trace
    speed: float = 1.0
    keep: Keep = "gaps"
    duration_s: float | None = None
    count: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if not 1.0 / MAX_SPEED <= self.speed <= MAX_SPEED:
            raise InputError(f"{self.speed!r} is not a factor from 1e-6 to 1e6", field="rate")
        if self.duration_s is not None and not self.duration_s > 0.0:
            raise InputError(
                f"{self.duration_s!r} s is not a duration above 0",
                field="for",
                hint="give it some time, as in 10min",
            )
        if self.count is not None and self.count < 1:
            raise InputError(
                f"{self.count} is not a number of requests above 0",
                field="n",
                hint="ask for some, as in n=1000",
            )

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.trace.name

    def chunks(self, seed: int = 0) -> Iterator[Requests]:
        """Yield the requests in order of arrival; chance is used only to keep some of them."""
        left = self.count
        for chunk in self._pace(seed):
            if self.duration_s is not None:
                cut = int(np.searchsorted(chunk.arrival_s, self.duration_s, side="left"))
                ended, chunk = cut < len(chunk), chunk.take(slice(0, cut))
            else:
                ended = False
            if left is not None:
                chunk = chunk.take(slice(0, left))
                left -= len(chunk)
            if len(chunk):
                yield chunk if self.model is None else chunk.with_model(self.model)
            if ended or left == 0:
                return

    def _pace(self, seed: int) -> Iterator[Requests]:
        rng = stream(seed, "workload", self.name, "replay")
        start: float | None = None
        before = 0.0
        place = 0.0
        for chunk in self.trace.chunks(seed):
            start = float(chunk.arrival_s[0]) if start is None else start
            times = chunk.arrival_s - start
            if self.keep == "gaps":
                yield chunk.at(times / self.speed)
            elif self.speed <= 1.0:
                yield chunk.at(times).take(np.flatnonzero(rng.random(len(chunk)) < self.speed))
            else:
                # Request i ends the stretch (i - 1, i] of operational time; copies stand 1/speed apart.
                copies = np.arange(
                    math.floor(place * self.speed) + 1,
                    math.floor((place + len(chunk)) * self.speed) + 1,
                )
                at = copies / self.speed - place
                known = np.concatenate(([before], times))
                filled = np.interp(at, np.arange(len(known)), known)
                index = np.clip(np.ceil(at - 1e-9).astype(np.int64) - 1, 0, len(chunk) - 1)
                for first in range(0, len(at), CHUNK):
                    cut = slice(first, first + CHUNK)
                    yield chunk.take(index[cut]).at(filled[cut])
                before, place = float(times[-1]), place + len(chunk)
