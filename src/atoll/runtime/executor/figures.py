"""Counters of a component."""

from __future__ import annotations

from collections import Counter, defaultdict

BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Upper bounds of the buckets that batch sizes are counted in."""


class ComponentFigures:
    """Counters of one component."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        """Invocations by how they ended: "ok", "cancelled", or the code of an error."""
        self.batches: Counter[float] = Counter()
        """Batches by the bound of their bucket; inf past the last."""
        self.items: Counter[float] = Counter()
        self.seconds: defaultdict[float, float] = defaultdict(float)
        """Invocations in batches, and seconds that those ran, by the same bounds."""
        self.batched = 0
        self.waited_s = 0.0
        self.ran_s = 0.0

    def count(self, outcome: str, waited_s: float) -> None:
        """Count an invocation that ended."""
        self.ended[outcome] += 1
        self.waited_s += waited_s

    def count_batch(self, size: int, ran_s: float) -> None:
        """Count a batch that ran."""
        bound = next((bound for bound in BATCH_BOUNDS if size <= bound), float("inf"))
        self.batches[bound] += 1
        self.items[bound] += size
        self.seconds[bound] += ran_s
        self.batched += size
        self.ran_s += ran_s
