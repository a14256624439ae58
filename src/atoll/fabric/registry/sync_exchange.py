"""One comparison of two replicas, from the asker's side."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from atoll.fabric.identity.fabric_keys import slot_of
from atoll.fabric.registry import sync

if TYPE_CHECKING:
    from atoll.fabric.registry.effects import Effect
    from atoll.fabric.registry.records import Record

_ROUNDS_MAX = 128


def one_of(sids: Sequence[str], shown: Mapping[str, int], rng: random.Random) -> str:
    """Return a session to ask: who shows many tokens (`shown`, by slot) is not asked more often for it."""
    while True:
        sid = rng.choice(sids)
        if rng.random() * shown[slot_of(sid)] < 1.0:
            return sid


class SyncedRegistry(Protocol):
    """Part of the registry that a comparison needs on the asker's side."""

    @property
    def hash(self) -> bytes:
        """Of all that it holds."""
        ...

    def merge(self, records: Sequence[Record], now_s: float) -> list[Effect]:
        """Take in records."""
        ...

    def differing(self, digests: Mapping[str, sync.Digest]) -> list[str]:
        """Places whose hashes are others than a peer's."""
        ...

    def lacking(
        self, places: Sequence[str], theirs: Mapping[str, sync.Version], now_s: float
    ) -> tuple[list[str], list[str]]:
        """Sessions to ask of a peer that holds `theirs` in these places, and to give to it."""
        ...

    def fetch(self, sids: Iterable[str]) -> tuple[tuple[Record, ...], tuple[str, ...]]:
        """Records of these sessions that fit into one message, and the ids of the rest."""
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
        self._places: tuple[str, ...] = ("",)
        self._want: list[str] = []
        self._give: list[str] = []
        first = sync.SyncRequest(registry.hash, places=self._places)
        self.ask: bytes | None = sync.encode_message(first)

    def answered(self, data: bytes, now_s: float) -> list[Effect]:
        """Take in the peer's answer and set the next `ask`; a malformed answer raises InputError."""
        self.ask = None
        self._rounds += 1
        answer = sync.decode_answer(data)
        effects = self._registry.merge(answer.records, now_s)
        if self._places:
            self._compare(answer, now_s)
        elif answer.records:  # else it has none of them any more
            self._want = [*answer.rest[: sync.MAX_WANTED], *self._want]
        following = self._next() if self._rounds < _ROUNDS_MAX else None
        if following is None:
            self._registry.exchanged(now_s)
        else:
            self.ask = sync.encode_message(following)
        return effects

    def _compare(self, answer: sync.SyncReply, now_s: float) -> None:
        asked, self._places = self._places, ()
        if answer.versions is None:  # equal by now
            return
        told = [place for place in asked if place not in answer.digests]
        want, give = self._registry.lacking(told, answer.versions, now_s)
        self._want += want
        self._give += give
        divided = {place: answer.digests[place] for place in asked if place in answer.digests}
        self._places = tuple(self._registry.differing(divided))

    def _next(self) -> sync.SyncRequest | None:
        """Return the next message: places until all that differ are known, then records."""
        if self._places:
            return sync.SyncRequest(self._registry.hash, places=self._places)
        want = tuple(self._want[: sync.WANTED_AT_ONCE])
        given, rest = self._registry.fetch(self._give)
        self._want, self._give = self._want[len(want) :], list(rest)
        if not want and not given:
            return None
        return sync.SyncRequest(self._registry.hash, want, given)
