"""Workloads that are drawn: arrivals, lengths, models and classes, each from its own random stream."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from atoll.core.errors import InputError
from atoll.core.rng import stream
from atoll.workload.arrival_rates import RateClock, arrivals
from atoll.workload.arrivals import Renewal
from atoll.workload.lengths import PREFIX_BLOCK, SharedPrefix
from atoll.workload.requests import (
    CHUNK,
    MAX_NAMES,
    TEXT,
    Ints,
    PrefixBlocks,
    Requests,
    Small,
    Workload,
    join_requests,
)
from atoll.workload.sampling import ClassMix, LengthSampler

IMAGE = "image"
"""The class of a request that brings images, which an encoder must see first."""
_PICKS = 65_536


@dataclass(frozen=True)
class MediaItems:
    """How many media items a request brings, given the length of its prompt.

    Prompts up to `bounds[0]` tokens are the first group, up to `bounds[1]` the second, and so on;
    `shares[g]` maps a number of items to its probability in group g.
    """

    bounds: tuple[int, ...]
    shares: tuple[tuple[tuple[int, float], ...], ...]

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.bounds) + 1 or list(self.bounds) != sorted(self.bounds):
            raise InputError("items need ascending bounds and one more group than bounds")

    @cached_property
    def _table(self) -> Small:
        return np.concatenate(
            [
                _picks([share for _, share in group], [count for count, _ in group], 4096)
                for group in self.shares
            ]
        )

    def draw(self, rng: np.random.Generator, prompts: Ints) -> Small:
        """Return the number of items for each prompt."""
        group = np.searchsorted(self.bounds, prompts, side="left").astype(np.int32)
        place = group * np.int32(4096) + rng.integers(0, 4096, len(prompts), np.uint16)
        drawn: Small = self._table[place]
        return drawn


@dataclass(frozen=True)
class Synthetic:
    """Requests drawn from a renewal process under a clock, with lengths from a mix.

    It ends after `duration_s` seconds or `count` requests, whichever comes first; one of them must
    be given. Models are drawn by `shares`. With `items` every request that brings some is of the
    class "image"; a `ClassMix` of lengths has classes of its own. Prompts with the `prefix` begin alike.
    """

    name: str
    clock: RateClock
    lengths: LengthSampler
    renewal: Renewal = field(default_factory=Renewal)
    duration_s: float | None = None
    count: int | None = None
    models: tuple[str, ...] = ("",)
    shares: tuple[float, ...] = (1.0,)
    klass: str = TEXT
    items: MediaItems | None = None
    prefix: SharedPrefix | None = None
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        if self.duration_s is None and self.count is None:
            raise InputError(
                "the workload has no end", field=self.name, hint="say for=10min or n=10000"
            )
        if self.duration_s is not None and not 0.0 < self.duration_s < math.inf:
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
        if not 1 <= len(self.models) <= MAX_NAMES or len(self.models) != len(self.shares):
            raise InputError("every model needs one share", field="models")
        if len(set(self.models)) != len(self.models):
            raise InputError("a model is named twice", field="models")
        if not all(0.0 <= share < math.inf for share in self.shares) or sum(self.shares) <= 0.0:
            raise InputError("shares are 0 or more, and not all 0", field="models")

    def chunks(self, seed: int = 0) -> Iterator[Requests]:
        """Yield the requests in order of arrival; the same seed gives the same bits."""
        drawing = stream(seed, "workload", self.name, "lengths")
        choosing = stream(seed, "workload", self.name, "models")
        beginning = stream(seed, "workload", self.name, "prefix")
        first_block = (zlib.crc32(self.name.encode()) >> 1) << 32
        left = self.count
        size = self.clock.chunk(self.chunk)
        for times in arrivals(
            self.renewal,
            self.clock,
            seed=seed,
            name=self.name,
            end_s=self.duration_s,
            chunk=self.chunk,
        ):
            if left is not None:
                times = times[:left]
                left -= len(times)
            # Whole chunks are drawn and then cut, so that a shorter run is the start of a longer one.
            cut = slice(0, len(times))
            klass = np.zeros(size, np.int16)
            classes: tuple[str, ...] = (self.klass,)
            if isinstance(self.lengths, ClassMix):
                classes = self.lengths.names
                prompts, answers, klass = self.lengths.draw_classes(drawing, size)
            else:
                prompts, answers = self.lengths.draw(drawing, size)
            klass = klass[cut]
            model = np.zeros(len(times), np.int16)
            if len(self.models) > 1:
                model = self._model_picks[choosing.integers(0, _PICKS, size, np.uint16)[cut]]
            items = None
            if self.items is not None:
                items = self.items.draw(choosing, prompts)[cut]
                klass, classes = (items > 0).astype(np.int16), (self.klass, IMAGE)
            prefix = None
            if self.prefix is not None:
                has = beginning.random(size)[cut] < self.prefix.share
                counts = np.where(has, self.prefix.blocks, 0)
                firsts = np.full(len(times), first_block, np.int64)
                prefix = PrefixBlocks.begin(firsts, counts, PREFIX_BLOCK)
            yield Requests(
                times, model, klass, prompts[cut], answers[cut], self.models, classes, items, prefix
            )
            if left == 0:
                return

    @cached_property
    def _model_picks(self) -> Small:
        return _picks(self.shares, range(len(self.models)), _PICKS)


def _picks(shares: Sequence[float], values: Sequence[int], size: int) -> Small:
    """A table in which each value stands as often as its share says, to the nearest entry."""
    bounds = np.rint(np.cumsum(shares) / np.sum(shares) * size).astype(np.int64)
    return np.repeat(np.array(values, np.int16), np.diff(bounds, prepend=0))


@dataclass(frozen=True)
class Mixed:
    """Several workloads at once, merged by arrival.

    Parts that are alike still differ: each has a seed of its own. With `by_name` they differ by their names
    alone, so that what comes of one is the same whatever else there is.
    """

    name: str
    parts: tuple[Workload, ...]
    by_name: bool = False

    def chunks(self, seed: int = 0) -> Iterator[Requests]:
        """Yield the requests of all parts in order of arrival."""
        own = stream(seed, "workload", self.name, "parts").integers(0, 2**62, len(self.parts))
        seeds = [seed] * len(self.parts) if self.by_name else own.tolist()
        streams = [
            part.chunks(part_seed) for part, part_seed in zip(self.parts, seeds, strict=True)
        ]
        waiting = [next(each, None) for each in streams]
        models: tuple[str, ...] = ()
        classes: tuple[str, ...] = ()
        while any(chunk is not None for chunk in waiting):
            safe = min(float(chunk.arrival_s[-1]) for chunk in waiting if chunk is not None)
            ready = []
            for index, chunk in enumerate(waiting):
                if chunk is None:
                    continue
                cut = int(np.searchsorted(chunk.arrival_s, safe, side="right"))
                ready.append(chunk.take(slice(0, cut)))
                rest = chunk.take(slice(cut, None))
                waiting[index] = rest if len(rest) else next(streams[index], None)
            merged = join_requests(ready)
            models = tuple(dict.fromkeys((*models, *merged.models)))
            classes = tuple(dict.fromkeys((*classes, *merged.classes)))
            order = np.argsort(merged.arrival_s, kind="stable")
            yield merged.with_names(models, classes).take(order)
