"""ServeGen client pools: many clients, each with its own rate, gaps and lengths, over days.

A pool is two files in one folder, `.gz` or plain: `POOL_client_windows.csv`, one row per client and
window of 600 s (`client,t_s,rate_req_s,cv,iat_family,shape,scale`), and the lengths, as
`POOL_pdfs.jsonl` (`client,t_s,field,pdf`) or as quantiles in `client_quantiles_6h.csv`. In every window
a client sends its number of requests (its rate times the window, rounded by chance), with gaps from
its own law, stretched so that they fill the window; each length is drawn on its own.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.rng import stream
from atoll.workload.requests import MAX_TOKENS, TEXT, Floats, Ints, Requests, Small, join_requests
from atoll.workload.synthetic import IMAGE
from atoll.workload.trace_reading import line_blocks

WINDOW_S = 600.0
DATA_S = 21_600
_FIELDS = ("input_tokens", "output_tokens", "text_tokens", "image_tokens", "image_count")
_WINDOWS = "_client_windows.csv"
_MAX_RATE = 1e6


@dataclass(frozen=True, slots=True)
class Activity:
    """A client in one window: requests per second, and the family and shape of its gaps."""

    client: int
    rate_per_s: float
    weibull: bool
    shape: float


@dataclass(frozen=True, slots=True)
class Law:
    """Values and the cumulated probability up to each, to draw from."""

    values: Floats
    cumulated: Floats

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Return `count` values."""
        return self.values[np.searchsorted(self.cumulated, rng.random(count), side="right")]


@dataclass(frozen=True)
class ClientPool:
    """A client pool as a workload, from `start_s` of the pool's clock for `duration_s` seconds.

    At `rate_per_s` (None: its own) every client keeps its share. A client whose lengths are not
    published borrows those of another, drawn once by rate.
    """

    folder: str
    pool: str
    duration_s: float
    start_s: float = 0.0
    rate_per_s: float | None = None
    model: str = ""

    def __post_init__(self) -> None:
        if not 0.0 < self.duration_s < math.inf:
            raise InputError(
                f"{self.duration_s!r} s is not a duration above 0",
                field="for",
                hint="give it some time, as in 10min",
            )
        if not 0.0 <= self.start_s < math.inf:
            raise InputError(f"{self.start_s!r} s is not a time of 0 s or more", field="start")

    @property
    def name(self) -> str:
        """The name of the pool."""
        return self.pool

    @cached_property
    def windows(self) -> dict[int, list[Activity]]:
        """Who is active in each window, by number of the window."""
        path = _find(self.folder, f"{self.pool}{_WINDOWS}", self.folder)
        windows: dict[int, list[Activity]] = {}
        for line, row in _csv_rows(path):
            try:
                at, rate = float(row["t_s"]), float(row["rate_req_s"])
                shape, family = float(row["shape"]), row["iat_family"]
                activity = Activity(int(row["client"]), rate, family == "Weibull", shape)
            except (KeyError, ValueError, TypeError) as error:
                raise InputError("not a row of client windows", path=path, line=line) from error
            known = family in ("Weibull", "Gamma")
            if not (known and at >= 0 and 0 <= rate <= _MAX_RATE and 1e-3 < shape < 1e6):
                raise InputError("a value is out of range", path=path, line=line)
            windows.setdefault(int(at // WINDOW_S), []).append(activity)
        if not windows:
            raise InputError("no client is ever active", path=path)
        return windows

    @cached_property
    def laws(self) -> dict[int, dict[int, dict[str, Law]]]:
        """The laws of the lengths: client, then number of the six hours, then field."""
        laws: dict[int, dict[int, dict[str, Law]]] = {}
        for client, at, field, law in _read_laws(self.folder, self.pool):
            laws.setdefault(client, {}).setdefault(int(at // DATA_S), {})[field] = law
        # A client may be quiet in some six hours; only whole sets of fields can be drawn from.
        whole = {
            client: {part: fields for part, fields in parts.items() if _is_whole(fields)}
            for client, parts in laws.items()
        }
        return {client: parts for client, parts in whole.items() if parts}

    def mean_rate(self) -> float:
        """Return the pool's own requests per second over the time asked for."""
        first, last = self._range()
        due = sum(a.rate_per_s for number in range(first, last) for a in self._active(number))
        if due <= 0.0:
            raise InputError(f"no client of {self.pool} is active then", field="start")
        return due / (last - first)

    def _range(self) -> tuple[int, int]:
        first = int(self.start_s // WINDOW_S)
        # At least one window, however short the time.
        return first, max(first + 1, math.ceil((self.start_s + self.duration_s) / WINDOW_S))

    def _active(self, number: int) -> Sequence[Activity]:
        # The pool repeats: the window after the last is the first.
        return self.windows.get(number % (max(self.windows) + 1), ())

    def chunks(self, seed: int = 0) -> Iterator[Requests]:
        """Yield the requests in order of arrival, a window at a time."""
        scale = 1.0 if self.rate_per_s is None else self.rate_per_s / self.mean_rate()
        lenders = self._lenders(seed)
        first, last = self._range()
        for number in range(first, last):
            # A stream for each window: its draws do not depend on where the time asked for begins.
            rng = stream(seed, "workload", self.pool, f"window {number}")
            parts = [
                self._client(rng, active, number, scale, lenders[active.client])
                for active in self._active(number)
            ]
            whole = join_requests(parts).with_names((self.model,), (TEXT, IMAGE))
            since = whole.arrival_s - self.start_s
            kept = np.flatnonzero((since >= 0.0) & (since < self.duration_s))
            order = kept[np.argsort(since[kept], kind="stable")]
            if len(order):
                yield whole.at(since).take(order)

    def _lenders(self, seed: int) -> dict[int, int]:
        """Whose lengths each client has: its own where they are known."""
        rates: dict[int, float] = {}
        for window in self.windows.values():
            for active in window:
                rates[active.client] = rates.get(active.client, 0.0) + active.rate_per_s
        known = sorted(set(self.laws) & set(rates)) or sorted(self.laws)
        if not known:
            raise InputError(f"no lengths of {self.pool} are known", path=self.folder)
        # The weights must not all be 0.
        weights = np.array([rates.get(client, 0.0) + 1e-12 for client in known])
        rng = stream(seed, "workload", self.pool, "lenders")
        drawn = rng.choice(known, len(rates), p=weights / weights.sum())
        return {
            client: client if client in self.laws else int(lender)
            for client, lender in zip(sorted(rates), drawn, strict=True)
        }

    def _client(
        self, rng: np.random.Generator, active: Activity, number: int, scale: float, lender: int
    ) -> Requests:
        # Rounded up or down at random: right on average, also for clients with less than one request.
        count = math.floor(active.rate_per_s * scale * WINDOW_S + rng.random())
        if count == 0:
            return Requests.empty()
        if active.weibull:
            # One gap more than requests, for the time after the last one.
            gaps = rng.weibull(active.shape, count + 1)
        else:
            gaps = rng.standard_gamma(active.shape, count + 1)
        sums = np.cumsum(gaps)
        # Scaled to the window: all of the requests fall into it.
        at = sums[:-1] / sums[-1] if sums[-1] > 0 else np.sort(rng.random(count))
        parts = self.laws[lender]
        wanted = int(number * WINDOW_S // DATA_S)
        # The nearest six hours that are known; of two the earlier.
        laws = parts[min(parts, key=lambda part: (abs(part - wanted), part))]
        prompts, answers, items = _lengths(rng, laws, count)
        klass = (items > 0).astype(np.int16)
        times = (number + at) * WINDOW_S
        return Requests(
            times,
            np.zeros(count, np.int16),
            klass,
            prompts,
            answers,
            (self.model,),
            (TEXT, IMAGE),
            items if "image_count" in laws else None,
        )


def _is_whole(laws: dict[str, Law]) -> bool:
    return "output_tokens" in laws and ("input_tokens" in laws or "text_tokens" in laws)


def _lengths(
    rng: np.random.Generator, laws: dict[str, Law], count: int
) -> tuple[Ints, Ints, Small]:
    answers = laws["output_tokens"].draw(rng, count)
    items = np.zeros(count, np.int16)
    if "text_tokens" in laws:
        prompts = laws["text_tokens"].draw(rng, count)
        if "image_count" in laws and "image_tokens" in laws:
            items = laws["image_count"].draw(rng, count).astype(np.int16)
            # Every image has its own length.
            each = laws["image_tokens"].draw(rng, int(items.sum()))
            owner = np.repeat(np.arange(count), items)
            prompts = prompts + np.bincount(owner, weights=each, minlength=count)
    else:
        prompts = laws["input_tokens"].draw(rng, count)
    return _tokens(prompts), _tokens(answers), items


def _tokens(values: Floats) -> Ints:
    return np.clip(np.rint(values), 1, MAX_TOKENS).astype(np.int32)


def _find(folder: str, name: str, path: str) -> str:
    for ending in ("", ".gz"):
        candidate = os.path.join(folder, name + ending)
        if os.path.isfile(candidate):
            return candidate
    try:
        names = os.listdir(folder)
    except OSError:
        raise InputError("no such folder", path=path, hint="name FOLDER/POOL") from None
    pools = [n.partition(_WINDOWS)[0] for n in names if _WINDOWS in n]
    raise UnknownNameError("client pool", name.removesuffix(_WINDOWS), pools)


def _csv_rows(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    header: list[str] | None = None
    for first, lines in line_blocks(path):
        for number, cells in enumerate(csv.reader(lines), first):
            if header is None:
                header = cells
            elif cells:
                yield number, dict(zip(header, cells, strict=False))


def _read_laws(folder: str, pool: str) -> Iterator[tuple[int, float, str, Law]]:
    for ending in ("", ".gz"):
        path = os.path.join(folder, f"{pool}_pdfs.jsonl{ending}")
        if os.path.isfile(path):
            yield from _pdfs(path)
            return
    path = _find(folder, "client_quantiles_6h.csv", folder)
    for line, row in _csv_rows(path):
        if row.get("pool") != pool or row.get("field") not in _FIELDS:
            continue
        marks = [key for key in row if key[:1] == "q" and key[1:].isdigit()]
        try:
            shares = np.array([0.0, *(int(mark[1:]) / 100 for mark in marks)])
            tokens = np.array([float(row[mark]) for mark in marks])
            client, at = int(row["client"]), float(row["t_s"])
        except (KeyError, ValueError) as error:
            raise InputError("not a row of client quantiles", path=path, line=line) from error
        # Straight lines between quantiles, cut into steps fine enough to draw from.
        ranks = (np.arange(512) + 0.5) / 512
        values = np.interp(ranks, shares, np.concatenate((tokens[:1], tokens)))
        yield client, at, row["field"], Law(values, (np.arange(512) + 1.0) / 512)


def _pdfs(path: str) -> Iterator[tuple[int, float, str, Law]]:
    for first, lines in line_blocks(path):
        for number, line in enumerate(lines, first):
            if not line.strip():
                continue
            try:
                row: dict[str, Any] = json.loads(line)
                client, at, field = int(row["client"]), float(row["t_s"]), str(row["field"])
                pairs = np.array(row["pdf"], np.float64).reshape(-1, 2)
            except (KeyError, ValueError, TypeError) as error:
                raise InputError("not a row of client PDFs", path=path, line=number) from error
            values, shares = pairs[:, 0], pairs[:, 1]
            total = shares.sum()
            if field in _FIELDS and len(pairs) and total > 0 and bool(np.all(pairs >= 0)):
                cumulated = np.cumsum(shares) / total
                # Rounding must not leave anything above the last value.
                cumulated[-1] = 1.0
                yield client, at, field, Law(values, cumulated)
