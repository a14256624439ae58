"""Mean cost of plans over scenarios: spot at the prices there, lost machines unpaid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from atoll.plan.plan import count_machines
from atoll.prove.robust.option_choice import RentableMachines

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem
    from atoll.prove.robust.scenarios import Pool, ScenarioSet


class ExpectedPrices:
    """Mean price per hour of a machine of each offer over a set of scenarios."""

    def __init__(self, problem: Problem, among: ScenarioSet) -> None:
        paid: dict[Pool, float] = {}
        for scenario in among.scenarios:
            for pool, factor in scenario.price.items():
                own = 0.0 if pool in scenario.lost else factor
                paid[pool] = paid.get(pool, 0.0) + own / len(among)
        factors = [
            paid.get((offer.region, offer.node_type), 1.0) if offer.market == "spot" else 1.0
            for offer in problem.offers
        ]
        self._at = {offer.key: at for at, offer in enumerate(problem.offers)}
        self.machines = RentableMachines(
            np.array([o.usd_per_hour * f for o, f in zip(problem.offers, factors, strict=True)]),
            np.array([float(offer.gpus) for offer in problem.offers]),
            np.array([float(offer.available) for offer in problem.offers]),
        )

    def count(
        self, instances: Sequence[Instance]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return by offer whole machines that instances have, and GPUs of machines that are cut."""
        whole, cut = np.zeros(len(self._at)), np.zeros(len(self._at))
        for instance in instances:
            for node in instance.nodes:
                at = self._at[instance.region_of(node), node.node_type, node.market]
                if node.gpu_ids is None:
                    whole[at] += 1.0
                else:
                    cut[at] += node.gpus
        return whole, cut

    def of_instances(self, instances: Sequence[Instance]) -> float:
        """Return USD per hour of instances by themselves, machines that they cut paid whole."""
        whole, cut = self.count(instances)
        return float((whole + np.ceil(cut / self.machines.gpus)) @ self.machines.usd)

    def of_plan(self, plan: Plan) -> float:
        """Return USD per hour of a plan's machines, cut ones whole."""
        counts = sorted(count_machines(plan.instances).items())
        return float(sum(self.machines.usd[self._at[key]] * number for key, number in counts))
