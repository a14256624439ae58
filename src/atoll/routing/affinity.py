"""Prefix affinity: a conversation that goes on is best served where its beginning still lies in the cache.

A conversation is known by the hash of everything in it so far, each part hashed with what comes before it.
Its next turn begins with those parts, so the replica that served the turn before is found under one of the
hashes of the longer conversation, the longest first. What is remembered is bounded; nothing here knows of
load, which decides whether the advice is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

_MAX_PARTS = 128
BLOCK_CHARACTERS = 1024
"""Prompts that are one long text are cut into blocks of this size."""


def chain(start: str, parts: Iterable[object]) -> list[int]:
    """Return the hash of each beginning of a conversation, the shortest first.

    `start` tells apart what must not be mixed (the model). Of very long conversations the last parts are
    taken together.
    """
    hashes: list[int] = []
    before = hash(start)
    for number, part in enumerate(parts):
        before = hash((before, part))
        if number < _MAX_PARTS:
            hashes.append(before)
        else:
            hashes[-1] = before
    return hashes


def blocks(text: str) -> Iterator[str]:
    """Yield the whole blocks of a long prompt, one at a time; a short one is its own only block."""
    size = BLOCK_CHARACTERS
    if len(text) < size:
        yield text
    for at in range(0, len(text) - size + 1, size):
        yield text[at : at + size]


class Affinity:
    """Who served which conversation last; the least recently used are forgotten."""

    def __init__(self, max_conversations: int = 65536) -> None:
        self._max_conversations = max_conversations
        self._served: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._served)

    def find(self, keys: Iterable[int]) -> str | None:
        """Return the replica that served the longest known beginning; `keys` begin with the longest."""
        for key in keys:
            name = self._served.get(key)
            if name is not None:
                self._served.move_to_end(key)
                return name
        return None

    def note(self, key: int, name: str) -> None:
        """Remember who serves a conversation now."""
        served = self._served
        served[key] = name
        served.move_to_end(key)
        if len(served) > self._max_conversations:
            served.popitem(last=False)
