"""Who holds which array until when."""

from __future__ import annotations


class Holdings:
    """Leases by array and holder, for `store.ArrayStore`."""

    def __init__(self) -> None:
        self._until_s: dict[str, dict[str, float]] = {}

    def grant(self, handle_id: str, nbytes: int, holder: str, until_s: float) -> None:
        """Have `holder` hold an array until `until_s`, or longer if it does."""
        del nbytes
        holders = self._until_s.setdefault(handle_id, {})
        holders[holder] = max(until_s, holders.get(holder, until_s))

    def renew(self, handle_id: str, holder: str, until_s: float) -> bool:
        """Hold it longer; False if it is not held."""
        holders = self._until_s.get(handle_id, {})
        if holder not in holders:
            return False
        holders[holder] = max(until_s, holders[holder])
        return True

    def release(self, handle_id: str, holder: str) -> list[str]:
        """Hold it no more."""
        holders = self._until_s.get(handle_id, {})
        holders.pop(holder, None)
        return self._sweep([handle_id])

    def drop_holder(self, holder: str) -> list[str]:
        """Hold nothing more."""
        for holders in self._until_s.values():
            holders.pop(holder, None)
        return self._sweep(list(self._until_s))

    def expire(self, now_s: float) -> list[str]:
        """End the leases that have run out."""
        for holders in self._until_s.values():
            for holder in [name for name, until_s in holders.items() if until_s <= now_s]:
                del holders[holder]
        return self._sweep(list(self._until_s))

    def _sweep(self, ids: list[str]) -> list[str]:
        freed = [number for number in ids if not self._until_s.get(number, {})]
        for number in freed:
            self._until_s.pop(number, None)
        return freed
