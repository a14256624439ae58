"""How loaded a service's instances are in a scenario: its demand over what those that are left carry.

Capacities are those of the performance model with the constants of the scenario, for the share of requests
that must keep their promises. A load above about 1 breaks promises; how much above is for simulation to say
(`trial`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from atoll.core.ids import Phase
from atoll.perf.capacity import CapacityModel, copy_node
from atoll.perf.constants import default_constants
from atoll.perf.memory import position_of
from atoll.perf.mixed import MixedCapacityModel
from atoll.perf.step import analytic
from atoll.plan.capacities import node_capacity, node_source, phase_loads

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.perf.constants import ConstantTable
    from atoll.plan.plan import Instance, Node
    from atoll.plan.problem import Problem, Service
    from atoll.prove.robust.scenarios import Scenario, ScenarioSet

_NodeKey = tuple[str, str, str, str, int, int, int, int]


class ScenarioLoads:
    """Loads of services in scenarios of several sets; what instances carry is worked out once for a draw."""

    def __init__(self, problem: Problem, catalog: Catalog) -> None:
        settings = problem.settings.model_copy(update={"sized_for": "share"})
        self.problem, self.catalog = problem.replace(settings=settings), catalog
        self._rates: dict[tuple[_NodeKey, str, int], float] = {}
        self._limits: dict[_NodeKey, float] = {}
        self.evaluations = 0
        """Capacities of nodes that were worked out."""

    def of(self, service: str, instances: Sequence[Instance], among: ScenarioSet) -> list[float]:
        """Return the load of a service in each scenario, served by these instances; infinite by none."""
        asked = self.problem.service(service)
        return [self._load(asked, instances, one, among) for one in among.scenarios]

    def nominal(self, service: str, instances: Sequence[Instance]) -> float:
        """Return the load of a service when all turns out as the fleet file says."""
        asked = self.problem.service(service)
        carried = self._requests_per_s(asked, [(i, self._known(i)) for i in instances])
        return asked.rate_per_s / carried if carried > 0.0 else math.inf

    def _load(
        self,
        service: Service,
        instances: Sequence[Instance],
        scenario: Scenario,
        among: ScenarioSet,
    ) -> float:
        table = among.constants[scenario.draw]
        left = [
            (i, self._carried(i, among.name, scenario.draw, table))
            for i in instances
            if not is_lost(i, scenario)
        ]
        carried = self._requests_per_s(service, left)
        rate = service.rate_per_s * scenario.demand[service.name]
        return rate / carried if carried > 0.0 else math.inf

    @staticmethod
    def _requests_per_s(service: Service, carried: Iterable[tuple[Instance, float]]) -> float:
        """What instances carry together: those of both phases, and the lesser of prefill and decode."""
        total = dict.fromkeys(Phase, 0.0)
        for instance, rate in carried:
            total[instance.phase] += rate
        lengths = service.lengths
        apart = min(
            total[Phase.PREFILL] / lengths.input_mean, total[Phase.DECODE] / lengths.output_mean
        )
        return total[Phase.BOTH] + apart

    def _known(self, instance: Instance) -> float:
        return self._carried(instance, "", 0, default_constants())

    def _carried(self, instance: Instance, name: str, draw: int, table: ConstantTable) -> float:
        """What an instance carries with these constants: as much as its weakest stage."""
        return min(
            sum(self._rate(instance, node, name, draw, table) for node in stage.nodes)
            for stage in instance.layout()
        )

    def _rate(
        self, instance: Instance, node: Node, name: str, draw: int, table: ConstantTable
    ) -> float:
        key = (
            instance.role,
            instance.region,
            node.kind,
            node.node_type,
            node.start,
            node.end,
            node.tp,
            instance.stages,
        )
        if (key, "", 0) not in self._rates:
            known = self._known_rate(instance, node)
            computed = self._computed_rate(instance, node, default_constants())
            self._rates[key, "", 0] = known
            # Handing over the KV cache limits some nodes below what they compute.
            self._limits[key] = known if known < computed * (1.0 - 1e-9) else math.inf
        found = self._rates.get((key, name, draw))
        if found is None:
            found = min(self._computed_rate(instance, node, table), self._limits[key])
            self._rates[key, name, draw] = found
        return found

    def _known_rate(self, instance: Instance, node: Node) -> float:
        service = self.problem.service(instance.service)
        spec = self.catalog.model(service.model).llm
        return node_capacity(
            self.problem,
            self.catalog,
            service,
            instance.role_id,
            node.kind,
            node.layers,
            instance.stages,
            position_of(spec, node.start, node.end),
            tp=node.tp,
            region=instance.region,
            machine=node.node_type,
        )

    def _computed_rate(self, instance: Instance, node: Node, table: ConstantTable) -> float:
        """What a node computes with these constants; KV caches to hand over are not counted."""
        self.evaluations += 1
        problem, catalog = self.problem, self.catalog
        service = problem.service(instance.service)
        spec = catalog.model(service.model).llm
        positions = [position_of(spec, node.start, node.end)]
        loads = phase_loads(problem, catalog, service, instance.role_id)
        if not loads:
            return 0.0
        source = node_source(catalog, node.kind, region=instance.region, machine=node.node_type)
        copy = copy_node(source.node, node.tp)
        link = source.link.share(node.tp, source.node.count)
        engine = problem.engine_of(service)
        step = analytic(spec, copy, tp=copy.count, engine=engine, constants=table)
        stages = [instance.stages]
        if len(loads) == 1:
            budgets = [loads[0].slo_s / instance.stages]
            model = CapacityModel(loads[0], step, link=link)
            rates = model.throughputs(stages, budgets, positions)
        else:
            prompts, answers = loads
            both = MixedCapacityModel(prompts, answers, step, link=link)
            rates = both.throughputs(stages, positions)
        return float(rates[0, 0, node.layers]) * (source.node.count // node.tp)


def is_lost(instance: Instance, scenario: Scenario) -> bool:
    """Return whether an instance has lost a spot node in a scenario, and serves nothing."""
    return any(
        node.market == "spot" and (instance.region_of(node), node.node_type) in scenario.lost
        for node in instance.nodes
    )
