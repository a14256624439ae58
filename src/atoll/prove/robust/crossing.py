"""More options of a service whose phases run apart: prefill of one plan with decode of another.

Risk seldom asks as much more of the one as of the other. Of all pairs only those are tried that by load alone
look better than anything as cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.ids import Phase
from atoll.prove.robust.service_options import compose

if TYPE_CHECKING:
    from atoll.plan.plan import Instance, Plan
    from atoll.prove.robust.expected_prices import ExpectedPrices
    from atoll.prove.robust.scenarios import ScenarioSet
    from atoll.prove.robust.trial import ScenarioLab, ServiceTrial

_USUAL = 0.93
"""A load up to which promises are kept, about, before anything is simulated."""
_MAX_PAIRS = 5
"""Pairs that are tried of a service."""
_Side = tuple["Instance", ...]


def cross_phases(
    ways: Sequence[ServiceTrial],
    nominal: Plan,
    lab: ScenarioLab,
    among: ScenarioSet,
    prices: ExpectedPrices,
) -> list[ServiceTrial]:
    """Return trials of pairs that look worth it: each surer than all that cost no more; none for no pairs.

    Other services stand as in the plan without risk.
    """
    for way in ways:
        lab.look(way, among)
    apart = [w for w in ways if all(i.phase is not Phase.BOTH for i in w.instances)]
    if len(apart) < 2:
        return []
    service = apart[0].service
    sides: dict[Phase, dict[object, _Side]] = {Phase.PREFILL: {}, Phase.DECODE: {}}
    for way in apart:
        for phase, known in sides.items():
            side = tuple(i for i in way.instances if i.phase is phase)
            known.setdefault(tuple(sorted(i.placement_key for i in side)), side)
    pairs = [
        (*first, *second)
        for first in sides[Phase.PREFILL].values()
        for second in sides[Phase.DECODE].values()
    ]
    ranked = [
        (prices.of_instances(way.instances), -_share(way.loads[among.name]), at, way)
        for at, way in enumerate(ways)
    ]
    drawn: list[tuple[float, float, int, ServiceTrial | _Side]] = [*ranked]
    for pair in pairs:
        share = _share(lab.loads(service, pair, among))
        drawn.append((prices.of_instances(pair), -share, len(drawn), pair))
    best, chosen = 0.0, []
    for _, share, _, own in sorted(drawn, key=lambda one: one[:3]):
        if -share > best + 1e-9:
            best = -share
            if isinstance(own, tuple):
                chosen.append(own)
    others = [i for i in nominal.instances if i.service != service]
    found = []
    # Dear ones are the sure ones, of which there are fewest.
    for pair in chosen[-_MAX_PAIRS:]:
        plan = compose(lab.problem, lab.catalog, [*others, *pair])
        if plan is not None:
            found.append(lab.trial(plan, service))
    return found


def _share(loads: np.ndarray) -> float:
    return float(np.mean(loads <= _USUAL))
