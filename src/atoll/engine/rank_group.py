"""What the ranks of a node do together: add up, put together, hand out. One process is a rank, on one GPU."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

import torch
from torch import Tensor


class RankGroup(Protocol):
    """The ranks of a node; all of them call the same operations in the same order."""

    rank: int
    size: int

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, in place where it can be."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, of one shape, as [ranks, ...]."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Fill `tensor` with what the first rank has in it."""
        ...


class ProcessRanks:
    """Ranks that are processes of this machine: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        """Meet the others at a `store` that all of them have connected to."""
        import torch.distributed as dist

        self.rank, self.size = rank, size
        self._dist = dist
        on_gpu = device.type == "cuda"
        # All ranks are on this machine; the name it has in a network may lead nowhere.
        if sys.platform.startswith("linux"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            device_id=device if on_gpu else None,
        )

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors."""
        tensor = tensor.contiguous()
        self._dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors as [ranks, ...]."""
        tensor = tensor.contiguous()
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self._dist.all_gather(list(gathered.unbind()), tensor)
        return gathered

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Fill `tensor` with what the first rank has in it."""
        self._dist.broadcast(tensor, 0)
        return tensor

    def close(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()


def rank_device(device: str, rank: int) -> torch.device:
    """Return the device of a rank: of GPUs the next ones after that of the first."""
    first = torch.device(device)
    return first if first.type == "cpu" else torch.device(first.type, (first.index or 0) + rank)
