"""The arrays that one request holds at executors: who granted them, what made them, what stands for them now.

Nothing here does I/O: it says what to renew and what to release, and each handle is released exactly once.
"""

from __future__ import annotations

from collections.abc import Hashable

from atoll.tasks.values import Handle, Value, handles_in


def array_bytes(value: Value) -> int:
    """Return the bytes of all arrays that a value names."""
    return sum(handle.nbytes for handle in handles_in(value))


class HandleLedger:
    """Handles granted to one request.

    A maker is what was run to make a handle; it is run again when the handle is lost.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, Handle]] = {}
        self._makers: dict[str, Hashable] = {}
        self._successors: dict[str, Handle] = {}

    def grant(self, executor: str, value: Value, maker: Hashable = None) -> None:
        """Take note of the handles in a result; after the end, `release` gives them back, too.

        Handles that carry their arrays are nobody's to give back.
        """
        for handle in handles_in(value):
            if handle.is_inline or handle.id in self._makers:
                continue
            self._held[handle.id] = (executor, handle)
            self._makers[handle.id] = maker

    def maker(self, handle: str) -> Hashable:
        """Return what made a handle, None if nothing of this request did."""
        return self._makers.get(handle)

    def made_again(self, before: Value, after: Value) -> None:
        """Let the handles of a result that was made again stand for those of the first one."""
        old, new = list(handles_in(before)), list(handles_in(after))
        for gone, made in zip(old, new, strict=False):
            if gone.id != made.id:
                self._successors[gone.id] = made

    def current(self, value: Value) -> Value:
        """Return a value with every handle that was made again replaced by its successor."""
        if not self._successors:
            return value
        if isinstance(value, Handle):
            while value.id in self._successors:
                value = self._successors[value.id]
            return value
        if isinstance(value, dict):
            return {key: self.current(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self.current(part) for part in value]
        return value

    def successor(self, handle: str) -> Handle | None:
        """Return what stands for a handle that was made again, None if it was not."""
        found = self._successors.get(handle)
        while found is not None and found.id in self._successors:
            found = self._successors[found.id]
        return found

    def held(self) -> dict[str, list[Handle]]:
        """Return the handles that are held, by executor: what is to be renewed."""
        held: dict[str, list[Handle]] = {}
        for executor, handle in self._held.values():
            held.setdefault(executor, []).append(handle)
        return held

    def release(self) -> dict[str, list[Handle]]:
        """Return, by executor, what is to be released now and was not before."""
        held = self.held()
        self._held.clear()
        return held
