"""Who still needs which arrays: leases that run out by themselves, so that nobody's death leaks anything.

Pure: times are given, in seconds of any clock that never goes back, and nothing is freed here; whoever
keeps the arrays frees what these functions name.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from atoll.core.errors import InputError


class LeaseBook:
    """Leases of holders on arrays. An array is free when no lease on it is left."""

    __slots__ = ("_by_handle", "_by_holder", "_bytes", "_ends", "_leases", "_total")

    def __init__(self) -> None:
        self._by_handle: dict[str, dict[str, float]] = {}
        self._by_holder: dict[str, set[str]] = {}
        self._bytes: dict[str, int] = {}
        # A heap by time. Entries are not removed from its middle: `expire` knows which still count.
        self._ends: list[tuple[float, str, str]] = []
        self._total = 0
        self._leases = 0

    def __contains__(self, handle_id: str) -> bool:
        return handle_id in self._by_handle

    def __len__(self) -> int:
        return len(self._by_handle)

    @property
    def total_bytes(self) -> int:
        """Bytes of all arrays with a lease on them, each counted once."""
        return self._total

    @property
    def leases(self) -> int:
        """How many leases there are."""
        return self._leases

    @property
    def next_end_s(self) -> float | None:
        """When a lease may next run out; never later than it does. None if there are none."""
        return self._ends[0][0] if self._ends else None

    def holders(self, handle_id: str) -> dict[str, float]:
        """Return who holds an array, and until when."""
        return dict(self._by_handle.get(handle_id, {}))

    def grant(self, handle_id: str, nbytes: int, holder: str, until_s: float) -> None:
        """Lease an array of `nbytes` to a holder until `until_s`; a lease it has is never shortened."""
        if nbytes < 0:
            raise InputError(f"an array of {nbytes} bytes", field="nbytes")
        # NaN, which compares with nothing and would never run out.
        if until_s != until_s:
            raise InputError("no time", field="until_s")
        known = self._bytes.get(handle_id)
        if known is not None and known != nbytes:
            raise InputError(f"{handle_id[:40]} has {known} bytes, not {nbytes}", field="nbytes")
        if known is None:
            self._bytes[handle_id] = nbytes
            self._by_handle[handle_id] = {}
            self._total += nbytes
        self._by_holder.setdefault(holder, set()).add(handle_id)
        held = self._by_handle[handle_id]
        self._leases += holder not in held
        if holder not in held or until_s > held[holder]:
            held[holder] = until_s
            self._push(until_s, handle_id, holder)

    def renew(self, handle_id: str, holder: str, until_s: float) -> bool:
        """Extend a lease; False if the holder has none, as when it ran out before."""
        held = self._by_handle.get(handle_id)
        if held is None or holder not in held:
            return False
        if until_s > held[holder]:
            held[holder] = until_s
            self._push(until_s, handle_id, holder)
        return True

    def release(self, handle_id: str, holder: str) -> bool:
        """End a lease, if there is one; return whether the array is free by that."""
        held = self._by_handle.get(handle_id)
        if held is None or holder not in held:
            return False
        del held[holder]
        self._leases -= 1
        of_holder = self._by_holder[holder]
        of_holder.discard(handle_id)
        if not of_holder:
            del self._by_holder[holder]
        if held:
            return False
        del self._by_handle[handle_id]
        self._total -= self._bytes.pop(handle_id)
        return True

    def drop_holder(self, holder: str) -> list[str]:
        """End all leases of a holder; return the arrays that are free by that, in order of their names."""
        held = sorted(self._by_holder.get(holder, ()))
        return [handle_id for handle_id in held if self.release(handle_id, holder)]

    def expire(self, now_s: float) -> list[str]:
        """End the leases until `now_s` or before; return the arrays that are free by that."""
        freed = []
        while self._ends and self._ends[0][0] <= now_s:
            until_s, handle_id, holder = heappop(self._ends)
            # Renewed and released leases leave entries behind, which mean nothing.
            if self._by_handle.get(handle_id, {}).get(holder) == until_s and self.release(
                handle_id, holder
            ):
                freed.append(handle_id)
        return freed

    def _push(self, until_s: float, handle_id: str, holder: str) -> None:
        heappush(self._ends, (until_s, handle_id, holder))
        # Entries that count no more are thrown away in one go when they are most of the heap.
        if len(self._ends) > 64 + 4 * self._leases:
            self._ends = [
                (end_s, handle, holder)
                for handle, held in self._by_handle.items()
                for holder, end_s in held.items()
            ]
            heapify(self._ends)
