"""Clients that know the right answers: they ask an any-to-any model, and what comes is held against those."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.slow.tasks.task_clients import (
    SILENT_S,
    WHOLE_S,
    AskError,
    ClientOrder,
    HeardReply,
    ask,
)

STUCK_S = 240.0
"""How long a run waits for what must happen next before it is given up."""
_LOOK_S = 0.05


@dataclass
class AnswersSeen:
    """What clients saw. Times are seconds."""

    requests: Counter[str] = field(default_factory=Counter)
    took_s: dict[str, list[float]] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    """The longest silence of each stream."""
    errors: int = 0
    wrong_answers: int = 0
    notes: list[str] = field(default_factory=list)


class CheckedClients:
    """Asks orders whose right answers it has learned; `streams` are the replies that are coming now."""

    def __init__(
        self,
        url: str,
        orders: Sequence[ClientOrder],
        seen: AnswersSeen,
        tell: Callable[[str], None],
        *,
        silent_s: float = SILENT_S,
        whole_s: float = WHOLE_S,
    ) -> None:
        self.orders = orders
        self.seen = seen
        self.streams: dict[int, HeardReply] = {}
        self.answers = 0
        self._url, self._tell = url, tell
        self._limits = {"silent_s": silent_s, "whole_s": whole_s}
        self._right: dict[str, HeardReply] = {}
        self._number = 0

    async def learn(self) -> None:
        """Ask everything once, while nothing disturbs: these answers are right."""
        for order in self.orders:
            reply = HeardReply()
            await ask(self._url, order, reply)
            self._right[order.name] = reply

    async def ask(self, order: ClientOrder) -> None:
        """Ask, and take note of an error, and of an answer that is not the right one."""
        self._number += 1
        number, reply, seen = self._number, HeardReply(), self.seen
        self.streams[number] = reply
        began_s = time.monotonic()
        try:
            await ask(self._url, order, reply, **self._limits)
        except AskError as error:
            seen.errors += 1
            after_s = time.monotonic() - began_s
            self._note(f"{order.name}, after {after_s:.1f} s: {error}")
        else:
            right = self._right[order.name]
            if not reply.is_same(right):
                seen.wrong_answers += 1
                self._note(f"{order.name}: {reply.difference(right)}")
        finally:
            del self.streams[number]
        self.answers += 1
        seen.requests[order.kind] += 1
        seen.took_s.setdefault(order.kind, []).append(reply.took_s)
        if reply.pieces > 1:
            seen.gaps_s.append(reply.gap_s)

    async def more_answers(self, count: int) -> None:
        """Wait until so many more answers have come."""
        least = self.answers + count
        await until(lambda: self.answers >= least, f"{count} answers")

    def _note(self, text: str) -> None:
        self.seen.notes.append(text)
        self._tell(text)


async def until(is_so: Callable[[], object], what: str, most_s: float = STUCK_S) -> None:
    """Wait until something is so; AskError where it is not in time."""
    try:
        async with asyncio.timeout(most_s):
            while not is_so():
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise AskError(f"no {what} within {most_s:g} s") from None


def show_requests(seen: AnswersSeen) -> None:
    """Print how many requests of each kind there were, and the seconds they took."""
    print(f"{'requests':14s} {'count':>6s} {'p50 s':>8s} {'p99 s':>8s} {'longest':>8s}")
    for kind, took_s in sorted(seen.took_s.items()):
        middle, most = np.percentile(took_s, (50, 99))
        print(f"{kind:14s} {seen.requests[kind]:6d} {middle:8.2f} {most:8.2f} {max(took_s):8.2f}")
