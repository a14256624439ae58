"""One comparison of two replicas, from the asker's side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from atoll.fabric.identity.keys import slot_of
from atoll.fabric.registry import sync

if TYPE_CHECKING:
    from atoll.fabric.registry.effects import Effect
    from atoll.fabric.registry.records import Record

_ROUNDS_MOST = 64


def one_of(sids: Sequence[str], rng: random.Random) -> str:
    """Return a session to ask: of a random slot, so that who shows many tokens is not asked more often."""
    slot = rng.choice(sorted({slot_of(sid) for sid in sids}))
    return rng.choice([sid for sid in sids if slot_of(sid) == slot])


class SyncedRegistry(Protocol):
    """What a comparison needs of the registry on the asker's side."""

    @property
    def hash(self) -> bytes:
        """Of all that it holds."""
        ...

    def merge(self, records: Sequence[Record], now_s: float) -> list[Effect]:
        """Take in records."""
        ...

    def lacking(self, theirs: dict[str, sync.Version], now_s: float) -> sync.SyncRequest | None:
        """What to send to a peer that holds `theirs`; None if there is nothing to swap."""
        ...

    def exchanged(self, now_s: float) -> None:
        """A comparison was completed."""
        ...


class SyncExchange:
    """Send `ask` to the peer, give its answer to `answered`, until `ask` is None.

        while exchange.ask is not None:
            effects = exchange.answered(await query(peer, exchange.ask), now_s)

    Without an answer, or when `answered` raises, tell the registry by `pull_failed`.
    """

    def __init__(self, registry: SyncedRegistry) -> None:
        self._registry = registry
        self._rounds = 0
        self.ask: bytes | None = sync.encode_message(sync.SyncRequest(registry.hash))

    def answered(self, data: bytes, now_s: float) -> list[Effect]:
        """Take in the peer's answer and set the next `ask`; a malformed answer raises InputError."""
        self.ask = None
        self._rounds += 1
        answer = sync.decode_answer(data)
        effects = self._registry.merge(answer.records, now_s)
        following: sync.SyncRequest | None = None
        if answer.versions is not None:
            following = self._registry.lacking(answer.versions, now_s)
        elif answer.rest and answer.records:
            following = sync.SyncRequest(self._registry.hash, answer.rest[: sync.MOST_WANTED])
        if following is None or self._rounds >= _ROUNDS_MOST:
            self._registry.exchanged(now_s)
        else:
            self.ask = sync.encode_message(following)
        return effects
