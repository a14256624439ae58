"""What instances and plans cost on average over scenarios: spot at the prices there, what is lost unpaid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from atoll.plan.plan import OfferKey, count_machines

if TYPE_CHECKING:
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem
    from atoll.prove.robust.scenarios import Pool, ScenarioSet


class ExpectedPrices:
    """What a machine of each offer costs per hour on average over a set of scenarios."""

    def __init__(self, problem: Problem, among: ScenarioSet) -> None:
        paid: dict[Pool, float] = {}
        for scenario in among.scenarios:
            for pool, factor in scenario.price.items():
                own = 0.0 if pool in scenario.lost else factor
                paid[pool] = paid.get(pool, 0.0) + own / len(among)
        self._usd: dict[OfferKey, float] = {
            offer.key: offer.usd_per_hour
            * (paid.get((offer.region, offer.node_type), 1.0) if offer.market == "spot" else 1.0)
            for offer in problem.offers
        }

    def of_instances(self, instances: Iterable[Instance]) -> float:
        """Return USD per hour of instances, of a cut machine its share."""
        shares: Counter[OfferKey] = Counter()
        for instance in instances:
            for node in instance.nodes:
                key = (instance.region_of(node), node.node_type, node.market)
                shares[key] += node.share  # type: ignore[assignment]
        return sum(self._usd.get(key, 0.0) * share for key, share in sorted(shares.items()))

    def of_plan(self, plan: Plan) -> float:
        """Return USD per hour of a plan's machines, cut ones whole."""
        machines = count_machines(plan.instances)
        return sum(self._usd.get(key, 0.0) * number for key, number in sorted(machines.items()))
