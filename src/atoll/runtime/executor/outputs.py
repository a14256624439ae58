"""Outputs of an invocation on their way to who asked: arrays become handles that are leased to them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from atoll.components.base import Output
from atoll.runtime.executor.arrays import Array, replace_arrays
from atoll.runtime.executor.store import ArrayStore
from atoll.tasks.values import Handle, Value


class OutputSaver:
    """Puts the arrays of one invocation into the store; what was not delivered when it ends is freed.

    `save` may run in a worker thread while `abandon` is called in the loop.
    """

    def __init__(self, store: ArrayStore, holder: str, lease_s: float) -> None:
        self._store = store
        self._holder = holder
        self._lease_s = lease_s
        self._saved: list[str] = []
        self._lock = threading.Lock()
        self.abandoned = False

    def save(self, output: Output) -> Value:
        """Return an output as a value that can be sent."""
        value: Value = replace_arrays(output, self._put)
        if self.abandoned:
            self.abandon()
        return value

    def delivered(self) -> None:
        """Leave what was saved so far to whom it was sent: their lease says how long it is kept."""
        with self._lock:
            self._saved.clear()

    def abandon(self) -> None:
        """Free what was not delivered, now and later."""
        with self._lock:
            self.abandoned = True
            saved, self._saved = self._saved, []
        self._store.release(saved, self._holder)

    def _put(self, array: Array) -> Handle:
        handle = self._store.put(array, self._holder, self._lease_s)
        with self._lock:
            self._saved.append(handle.id)
        return handle


class NoSaver:
    """Keeps nothing: for outputs that are made only to see that they can be."""

    abandoned = False

    def save(self, output: Output) -> Value:
        """Return nothing."""
        del output
        return None


def count_array_bytes(output: Any) -> int:
    """Return the bytes of all arrays in an output."""
    if isinstance(output, np.ndarray):
        return output.nbytes
    if isinstance(output, dict):
        return sum(map(count_array_bytes, output.values()))
    if isinstance(output, (list, tuple)):
        return sum(map(count_array_bytes, output))
    return 0
