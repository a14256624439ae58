"""Copies between the host and the device that nobody waits for before the result is needed."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device; a GPU takes it when it comes to it."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # Only from pinned memory can a GPU fetch by itself; it is not used anew before that is done.
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host, after all that was asked of the device before it."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_here(self) -> bool:
        """Whether nobody would have to wait for it."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """Return it once it is on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
