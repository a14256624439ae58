"""Which node of an instance is rented on which market."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from atoll.plan.plan import Instance, Market
from atoll.plan.problem import Offer


class Markets:
    """Hands out the nodes that an allocation rents, offer by offer, one's own first and spot last."""

    _ORDER: tuple[Market, ...] = ("owned", "on-demand", "spot")

    def __init__(self, offers: tuple[Offer, ...], used: NDArray[np.int64]) -> None:
        self._left: Counter[tuple[str, str, Market]] = Counter()
        for offer, number in zip(offers, used, strict=True):
            self._left[offer.key] = int(number)

    def take_nodes(self, instance: Instance) -> None:
        """Set aside the nodes of an instance that keeps running, as it has them."""
        for node in instance.nodes:
            self._left[instance.region, node.node_type, node.market] -= 1

    def take(self, region: str, nodes: Counter[str]) -> dict[tuple[str, Market], int]:
        """Take nodes by type in a region, from whatever markets still have some."""
        taken: Counter[tuple[str, Market]] = Counter()
        for kind, number in nodes.items():
            for _ in range(number):
                # A kept instance may hold a node on another market than the allocation meant.
                market = max(self._ORDER, key=lambda m: self._left[region, kind, m])
                self._left[region, kind, market] -= 1
                taken[kind, market] += 1
        return dict(taken)
