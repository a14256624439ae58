"""Requests as arrays: one row a request, in order of arrival.

Everything that produces load is a `Workload`: it yields chunks of `Requests`, so that a week of
traffic needs no more memory than one chunk. `collect` joins them where all is wanted at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InputError, UsageError

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Small = NDArray[np.int16]
Longs = NDArray[np.int64]

CHUNK = 65_536
"""Requests in one chunk, unless asked otherwise."""
MAX_TOKENS = 10_000_000
"""No request has a prompt or answer longer than this; a file that says so is wrong."""
MAX_NAMES = 32_767
TEXT = "text"
"""The class of a request that needs the llm alone."""


@dataclass(frozen=True, slots=True)
class PrefixBlocks:
    """Which blocks each prompt starts with: an equal id is an equal prefix of `block_tokens` tokens.

    The blocks of request i are `ids[offsets[i]:offsets[i + 1]]`; `offsets` has one more entry than
    there are requests.
    """

    offsets: Longs
    ids: Longs
    block_tokens: int = 512

    def __post_init__(self) -> None:
        whole = len(self.offsets) > 0 and self.offsets[0] == 0
        if not whole or self.offsets[-1] != len(self.ids) or np.any(np.diff(self.offsets) < 0):
            raise UsageError("the offsets of prefix blocks must rise from 0 to the number of ids")

    def of(self, index: int) -> Longs:
        """Return the block ids of one request."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @classmethod
    def begin(cls, firsts: Longs, counts: Longs, block_tokens: int) -> PrefixBlocks:
        """Return beginnings of so many blocks a request, numbered on from the first."""
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        return cls(offsets, np.repeat(firsts, counts) + within, block_tokens)

    def take(self, order: Longs) -> PrefixBlocks:
        """Return the blocks of the requests at these indices, in this order."""
        counts = np.diff(self.offsets)[order]
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        ids = self.ids[np.repeat(self.offsets[:-1][order], counts) + within]
        return PrefixBlocks(offsets, ids, self.block_tokens)


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in order of arrival, a column an array.

    `arrival_s` is seconds from the start of the workload. `model` and `klass` index `models` and
    `classes`; a class says which components of the model a request needs, and "text" is the llm
    alone. `input` and `output` are tokens of prompt (media included) and answer. `items` is how many
    media items (images) a request brings, None where no request brings any. In a stream of chunks
    the names of a later chunk start with those of an earlier one, so that an index keeps its meaning.
    """

    arrival_s: Floats
    model: Small
    klass: Small
    input: Ints
    output: Ints
    models: tuple[str, ...] = ("",)
    classes: tuple[str, ...] = (TEXT,)
    items: Small | None = None
    prefix: PrefixBlocks | None = None

    def __post_init__(self) -> None:
        count = len(self.arrival_s)
        lengths = {len(self.model), len(self.klass), len(self.input), len(self.output)}
        lengths |= set() if self.items is None else {len(self.items)}
        if lengths != {count}:
            raise UsageError("the columns of requests differ in length")
        if self.prefix is not None and len(self.prefix.offsets) != count + 1:
            raise UsageError("the prefix blocks belong to another number of requests")

    def rename_models(self, model: str) -> Requests:
        """Return the same requests, all of them for one model."""
        return replace(self, model=np.zeros_like(self.model), models=(model,))

    @classmethod
    def of(
        cls,
        arrival_s: Floats,
        prompts: Ints,
        answers: Ints,
        *,
        model: str = "",
        klass: str = TEXT,
    ) -> Requests:
        """Return requests of one model and one class."""
        zeros = np.zeros(len(arrival_s), np.int16)
        return cls(
            np.asarray(arrival_s, np.float64),
            zeros,
            zeros,
            np.asarray(prompts, np.int32),
            np.asarray(answers, np.int32),
            (model,),
            (klass,),
        )

    @classmethod
    def empty(cls) -> Requests:
        """Return no requests."""
        none = np.zeros(0, np.int32)
        return cls.of(np.zeros(0), none, none)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def take(self, order: Longs | slice) -> Requests:
        """Return the requests at these indices, in this order."""
        prefix = self.prefix
        if prefix is not None:
            at = np.arange(len(self))[order] if isinstance(order, slice) else order
            prefix = prefix.take(at)
        return Requests(
            self.arrival_s[order],
            self.model[order],
            self.klass[order],
            self.input[order],
            self.output[order],
            self.models,
            self.classes,
            None if self.items is None else self.items[order],
            prefix,
        )

    def at(self, arrival_s: Floats) -> Requests:
        """Return the same requests at other times, in seconds."""
        return Requests(
            arrival_s,
            self.model,
            self.klass,
            self.input,
            self.output,
            self.models,
            self.classes,
            self.items,
            self.prefix,
        )

    def with_names(self, models: Sequence[str], classes: Sequence[str]) -> Requests:
        """Return the same requests over lists of names that hold all of theirs."""
        if tuple(models) == self.models and tuple(classes) == self.classes:
            return self
        return Requests(
            self.arrival_s,
            _rename(self.model, self.models, models),
            _rename(self.klass, self.classes, classes),
            self.input,
            self.output,
            tuple(models),
            tuple(classes),
            self.items,
            self.prefix,
        )

    def with_model(self, model: str) -> Requests:
        """Return the same requests, all for one model."""
        return Requests(
            self.arrival_s,
            np.zeros(len(self), np.int16),
            self.klass,
            self.input,
            self.output,
            (model,),
            self.classes,
            self.items,
            self.prefix,
        )


def _rename(index: Small, old: Sequence[str], new: Sequence[str]) -> Small:
    place = {name: at for at, name in enumerate(new)}
    return np.array([place[name] for name in old], np.int16)[index]


@runtime_checkable
class Workload(Protocol):
    """Load that can be produced again and again."""

    @property
    def name(self) -> str:
        """Name in reports."""

    def chunks(self, seed: int = 0) -> Iterator[Requests]:
        """Yield the requests in order of arrival; the same seed gives the same bits."""


def join_requests(parts: Iterable[Requests]) -> Requests:
    """Return chunks as one, in the order given; their names are united."""
    chunks = [part for part in parts if len(part)]
    if not chunks:
        return Requests.empty()
    if len(chunks) == 1:
        return chunks[0]
    models = _unite_names(chunk.models for chunk in chunks)
    classes = _unite_names(chunk.classes for chunk in chunks)
    chunks = [chunk.with_names(models, classes) for chunk in chunks]
    return Requests(
        np.concatenate([chunk.arrival_s for chunk in chunks]),
        np.concatenate([chunk.model for chunk in chunks]),
        np.concatenate([chunk.klass for chunk in chunks]),
        np.concatenate([chunk.input for chunk in chunks]),
        np.concatenate([chunk.output for chunk in chunks]),
        models,
        classes,
        _join_items(chunks),
        _join_prefixes(chunks),
    )


def _join_items(chunks: Sequence[Requests]) -> Small | None:
    if all(chunk.items is None for chunk in chunks):
        return None
    return np.concatenate(
        [np.zeros(len(c), np.int16) if c.items is None else c.items for c in chunks]
    )


def _join_prefixes(chunks: Sequence[Requests]) -> PrefixBlocks | None:
    prefixes = [chunk.prefix for chunk in chunks if chunk.prefix is not None]
    if not prefixes:
        return None
    sizes = {prefix.block_tokens for prefix in prefixes}
    if len(sizes) > 1:
        raise InputError(
            f"prefix blocks of {' and '.join(map(str, sorted(sizes)))} tokens are mixed"
        )
    counts = [
        np.zeros(len(c), np.int64) if c.prefix is None else np.diff(c.prefix.offsets)
        for c in chunks
    ]
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts)))).astype(np.int64)
    return PrefixBlocks(offsets, np.concatenate([p.ids for p in prefixes]), sizes.pop())


def _unite_names(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))


def collect(workload: Workload, seed: int = 0, *, limit: int | None = None) -> Requests:
    """Return all requests of a workload, or the first `limit`, as one."""
    parts: list[Requests] = []
    count = 0
    for chunk in workload.chunks(seed):
        if limit is not None and count + len(chunk) >= limit:
            parts.append(chunk.take(slice(0, limit - count)))
            break
        parts.append(chunk)
        count += len(chunk)
    return join_requests(parts)
