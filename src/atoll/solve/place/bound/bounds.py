"""Upper bounds on the flow of any placement, and what is missing where there is none.

Notation: node i carries at most T_i(j) tokens/s when it holds j of the L layers; F is the flow.

    U1  compute:  every token needs L layers, so F L <= sum_i max_j j T_i(j).
    U2  coverage: no node carries more than F, so F L <= sum_i max_j j min(T_i(j), F); U2 is the largest F.

The right side of U2 over F never rises with F, so bisection finds it. The network tightens both: T_i is cut
to what the links of node i carry, and the nodes of a region R together compute at most X_R min(L, layers
they hold) token-layers per second (`cuts`). The bound by covers (`proof`) looks at single layers and is the
tightest. All hold with and without partial inference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from atoll.solve.place.bound.cuts import needed_cuts, rates, region_cuts
from atoll.solve.place.instance import FlowInstance

Kind = Literal["memory", "compute", "coverage", "network", "covers"]
_STEPS = 200
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Bound:
    """No placement has a flow above `value` tokens/s; which argument says so, and in words."""

    value: float
    kind: Kind
    why: str


@dataclass(frozen=True)
class Missing:
    """Layers of a model that have no place on a cluster (0: all have one), and their memory."""

    layers: int
    held: int
    needed: int
    layer_gb: float
    """GB of one layer."""

    @property
    def gb(self) -> float:
        """GB of all layers without a place."""
        return self.layers * self.layer_gb

    def __str__(self) -> str:
        if not self.layers:
            return f"all {self.needed} layers have a place: the nodes hold {self.held}"
        memory = f", {self.gb:.3g} GB at {self.layer_gb:.3g} GB a layer" if self.layer_gb else ""
        noun = "layer has" if self.layers == 1 else "layers have"
        return f"{self.layers} of {self.needed} {noun} no place{memory}: the nodes hold {self.held}"


def find_missing(instance: FlowInstance, bytes_per_layer: float = 0.0) -> Missing:
    """Return how many layers the nodes cannot hold together, with the memory these take."""
    held = int(instance.most.sum())
    short = max(0, instance.layers - held)
    return Missing(short, held, instance.layers, bytes_per_layer / 1e9)


def compute_bound(instance: FlowInstance) -> float:
    """Return U1, tokens/s, links not counted."""
    held = np.arange(instance.rate.shape[1])
    inside = held[None, :] <= np.minimum(instance.most, instance.layers)[:, None]
    return float((held * instance.rate * inside).max(axis=1).sum() / instance.layers)


def coverage_bound(instance: FlowInstance) -> float:
    """Return U2, tokens/s, tightened by links of nodes and of regions."""
    held = np.arange(instance.rate.shape[1])
    node_rates = rates(instance)
    groups = [
        (cut.inside, cut.tokens_per_s * min(instance.layers, int(instance.most[cut.inside].sum())))
        for cut in region_cuts(instance)
    ]

    def fits(flow: float) -> bool:
        work = (held * np.minimum(node_rates, flow)).max(axis=1)
        total = sum(min(float(work[inside].sum()), most) for inside, most in groups)
        return total >= flow * instance.layers * (1.0 - _ROUNDING)

    low, high = 0.0, max(1e-9, float(node_rates.sum()))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return high


def upper_bound(instance: FlowInstance, *, tight: bool = True, value: float = 0.0) -> Bound:
    """Return the least of all bounds; `tight` also tries the one by covers, which takes seconds.

    `value` is what some placement is known to reach: the search for the bound ends where it is met.
    """
    short = find_missing(instance)
    if short.layers:
        return Bound(0.0, "memory", str(short))
    cuts = needed_cuts(instance)
    narrow = min(cuts, key=lambda cut: cut.tokens_per_s)
    bounds = [
        Bound(compute_bound(instance), "compute", "all nodes at their best number of layers"),
        Bound(
            coverage_bound(instance),
            "coverage",
            "all nodes busy, none with more than the whole flow",
        ),
        Bound(narrow.tokens_per_s, "network", f"links at {narrow.name} carry no more"),
    ]
    best = min(bounds, key=lambda bound: bound.value)
    if tight and best.value > value:
        from atoll.solve.place.bound.proof import cover_bound

        layered = cover_bound(instance, high=best.value, value=value)
        if layered < best.value:
            return Bound(
                layered, "covers", "layers cannot all be covered by whole nodes at a higher flow"
            )
    return best
