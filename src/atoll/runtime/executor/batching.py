"""Which invocations of a component run together: first come, first served, like with like."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Item = TypeVar("_Item", bound=Hashable)


class BatchQueue(Generic[_Item]):
    """What waits for a component. The oldest always runs next, with others of its key behind it.

    Nobody is overtaken but by those who ride along with an older one, so nobody starves.
    """

    def __init__(self, most_batch: int, most_waiting: int) -> None:
        if most_batch < 1:
            raise ValueError("a batch has at least one")
        self._most_batch = most_batch
        self._most_waiting = most_waiting
        self._waiting: OrderedDict[_Item, object] = OrderedDict()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether no more may wait."""
        return len(self._waiting) >= self._most_waiting

    def add(self, item: _Item, key: object) -> None:
        """Have one wait; `key` is what it must share with those it runs with."""
        if self.is_full:
            raise OverflowError("the queue is full")
        self._waiting[item] = key

    def drop(self, item: _Item) -> bool:
        """Have one wait no more; False if it did not."""
        if item not in self._waiting:
            return False
        del self._waiting[item]
        return True

    def take(self) -> list[_Item]:
        """Return those that run next, in order of arrival; none if none waits."""
        batch: list[_Item] = []
        first: object = None
        for item, key in self._waiting.items():
            if not batch:
                first = key
            elif key != first:
                continue
            batch.append(item)
            if len(batch) == self._most_batch:
                break
        for item in batch:
            del self._waiting[item]
        return batch
