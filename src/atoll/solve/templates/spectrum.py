"""Templates of one role to look at: what each costs, which are best per dollar, how densely they lie.

Coral's figure 1b: node sets of one type reach few throughputs with wide gaps between them; mixed ones
fill the gaps, so that capacity can follow demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.solve.array_types import Floats
from atoll.solve.templates.generate import TemplateLibrary

Counts = NDArray[np.int8]


@dataclass(frozen=True)
class PricedTemplates:
    """Node sets with their throughput per second and lowest price in USD per hour.

    `usd` is infinite where no region sells all nodes of a set, and `region[i]` then means nothing.
    """

    counts: Counts
    throughput: Floats
    usd: Floats
    region: NDArray[np.int64]

    @property
    def value(self) -> Floats:
        """Throughput per dollar an hour; 0 where there is no price."""
        return self.throughput / np.maximum(self.usd, 1e-9) * np.isfinite(self.usd)

    def only(self, which: NDArray[np.bool_]) -> PricedTemplates:
        """Return some of the sets."""
        return PricedTemplates(
            self.counts[which], self.throughput[which], self.usd[which], self.region[which]
        )

    def best_first(self) -> NDArray[np.int64]:
        """Return the order by throughput per dollar, then throughput, then fewest nodes."""
        nodes = self.counts.sum(axis=1)
        return np.lexsort((nodes, -self.throughput, -self.value))


def price_templates(
    counts: Counts,
    throughput: Floats,
    node_types: Sequence[str],
    regions: Sequence[str],
    prices: Mapping[tuple[str, str], float],
) -> PricedTemplates:
    """Return node sets with their price in the region where they are cheapest.

    `prices` are in USD per hour by (region, node type); all nodes of a set stand in one region.
    """
    total = np.full((max(1, len(regions)), len(counts)), np.inf)
    for r, region in enumerate(regions):
        known = [prices.get((region, kind)) for kind in node_types]
        sold = np.array([price is not None for price in known])
        usd = np.array([0.0 if price is None else price for price in known])
        whole = ~(counts[:, ~sold] > 0).any(axis=1)
        total[r, whole] = counts[whole] @ usd
    return PricedTemplates(counts, throughput, total.min(axis=0), total.argmin(axis=0))


def is_homogeneous(library: TemplateLibrary) -> NDArray[np.bool_]:
    """Return which templates of a library have nodes of one type only."""
    return np.asarray((library.counts > 0).sum(axis=1) == 1)


def distribution(throughput: Floats, top: float, points: int = 200) -> tuple[Floats, Floats]:
    """Return the share of throughputs at or below a value, both 0 to 1, at `points` places at most.

    Values are throughputs over `top`, in rising order.
    """
    x = np.sort(throughput) / top
    y = np.arange(1, len(x) + 1) / len(x)
    if len(x) > points:
        at = np.unique(np.linspace(0, len(x) - 1, points).round().astype(int))
        x, y = x[at], y[at]
    return x, y


def widest_gap(throughput: Floats, top: float) -> float:
    """Return the widest step from one throughput to the next, from 0 up, as a share of `top`."""
    values = np.concatenate([[0.0], np.sort(throughput), [top]])
    return float(np.diff(values).max() / top)
