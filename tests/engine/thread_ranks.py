"""Ranks of a node as threads of the test's own process."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atoll.engine.model_stage import StageModel
from atoll.engine.ranked_stage import Follower, RankedStage, RankOrder

_WAIT_S = 60.0


class _Meeting:
    """Where the threads of one node exchange tensors."""

    def __init__(self, size: int) -> None:
        self.places: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=_WAIT_S)


class ThreadRanks:
    """One rank of a `RankGroup` of threads."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, size
        self._meeting = meeting

    def _exchange(self, tensor: Tensor | None) -> list[Any]:
        self._meeting.places[self.rank] = tensor
        self._meeting.barrier.wait()
        found = list(self._meeting.places)
        # Nobody may bring its next before all have this one.
        self._meeting.barrier.wait()
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        found = self._exchange(tensor.clone())
        return torch.stack(found).sum(0)

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor.clone()))

    def broadcast(self, tensor: Tensor) -> Tensor:
        tensor.copy_(self._exchange(tensor if self.rank else tensor.clone())[0])
        return tensor


def ranked_stage(make: Callable[[Any], StageModel], size: int) -> RankedStage:
    """Return a stage over `size` ranks, of which all but the first are threads; `make` is given a group."""
    meeting = _Meeting(size)
    groups = [ThreadRanks(rank, size, meeting) for rank in range(size)]
    queues = [queue.Queue[bytes]() for _ in groups[1:]]

    def run(group: ThreadRanks, orders: queue.Queue[bytes]) -> None:
        torch.set_num_threads(1)
        try:
            follower = Follower(make(group), group)
            while True:
                follower.follow(pickle.loads(orders.get()))
        except BaseException:
            # Whoever waits for this rank must not wait in vain.
            meeting.barrier.abort()
            raise

    for group, orders in zip(groups[1:], queues, strict=True):
        threading.Thread(target=run, args=(group, orders), daemon=True).start()

    def tell(order: RankOrder) -> None:
        # As bytes, as between processes: nothing may be shared.
        for orders in queues:
            orders.put(pickle.dumps(order))

    return RankedStage(make(groups[0]), groups[0], tell)
