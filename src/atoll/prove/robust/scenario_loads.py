"""How loaded a service's instances are in a scenario: its demand over what those that are left carry.

Capacities are those of the performance model with the constants of the scenario, for the share of requests
that must keep their promises. A load above about 1 breaks promises; how much above is for simulation to say
(`trial`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from atoll.core.ids import Phase
from atoll.perf.capacity import CapacityModel, copy_of
from atoll.perf.constants import default_constants
from atoll.perf.memory_model import position_of
from atoll.perf.mixed_capacity import MixedCapacityModel
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

    def of(
        self,
        service: str,
        instances: Sequence[Instance],
        among: ScenarioSet,
        shares: Mapping[str, float] | None = None,
    ) -> list[float]:
        """Return the load of a service in each scenario, served by these instances; infinite by none.

        `shares` of its requests go to each, by id; unless given, as much as they carry of their phase.
        """
        asked, sent = self.problem.service(service), shares or share_out(instances)
        found = []
        for one in among.scenarios:
            table = among.constants[one.draw]
            left = [
                (i, self._carried(i, among.name, one.draw, table))
                for i in instances
                if not is_lost(i, one)
            ]
            rate = asked.rate_per_s * one.demand[service]
            found.append(spread_load(asked, rate, instances, left, sent))
        return found

    def nominal(
        self,
        service: str,
        instances: Sequence[Instance],
        shares: Mapping[str, float] | None = None,
    ) -> float:
        """Return the load of a service when all turns out as the fleet file says."""
        asked, table = self.problem.service(service), default_constants()
        carried = [(i, self._carried(i, "", 0, table)) for i in instances]
        sent = shares or share_out(instances)
        return spread_load(asked, asked.rate_per_s, instances, carried, sent)

    def _carried(self, instance: Instance, name: str, draw: int, table: ConstantTable) -> float:
        """Return the capacity of an instance with these constants: that of its weakest stage."""
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
            # What limits a node beyond computing does not change with the constants.
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
        """Return the rate of a node with these constants; KV caches to hand over are not counted."""
        self.evaluations += 1
        problem, catalog = self.problem, self.catalog
        service = problem.service(instance.service)
        spec = catalog.model(service.model).llm
        positions = [position_of(spec, node.start, node.end)]
        loads = phase_loads(problem, catalog, service, instance.role_id)
        if not loads:
            return 0.0
        source = node_source(catalog, node.kind, region=instance.region, machine=node.node_type)
        copy, engine = copy_of(source.node, node.tp, problem.engine_of(service))
        link = source.link.share(node.tp, source.node.count)
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


def share_out(instances: Iterable[Instance]) -> dict[str, float]:
    """Return the share of a service's requests that each instance gets, by what they carry of their phase."""
    standing = list(instances)
    total: dict[Phase, float] = {}
    for one in standing:
        total[one.phase] = total.get(one.phase, 0.0) + one.throughput_per_s
    return {i.id: i.throughput_per_s / total[i.phase] if total[i.phase] else 0.0 for i in standing}


def spread_load(
    service: Service,
    rate_per_s: float,
    instances: Iterable[Instance],
    left: Sequence[tuple[Instance, float]],
    shares: Mapping[str, float],
) -> float:
    """Return the load of a service whose requests are dealt by share over those instances that are left.

    Requests go where their share sends them, however slow that turns out. As many of them may be late as the
    service allows: so the load is that of the busiest instances of all but this part of the requests. What
    was meant for instances that are lost goes to the others in proportion. `left` has what each carries, in
    units of its phase per second.
    """
    planned, standing = dict.fromkeys(Phase, 0.0), dict.fromkeys(Phase, 0.0)
    for one in instances:
        planned[one.phase] += shares.get(one.id, 0.0)
    for one, _ in left:
        standing[one.phase] += shares.get(one.id, 0.0)
    together = planned[Phase.BOTH] if standing[Phase.BOTH] > 0.0 else 0.0
    both_sides = min(standing[Phase.PREFILL], standing[Phase.DECODE]) > 0.0
    apart = planned[Phase.PREFILL] if both_sides else 0.0
    if together + apart <= 0.0:
        return math.inf
    way = dict.fromkeys((Phase.PREFILL, Phase.DECODE), apart / (together + apart))
    way[Phase.BOTH] = together / (together + apart)
    size = {Phase.PREFILL: service.lengths.input_mean, Phase.DECODE: service.lengths.output_mean}
    loads: list[tuple[float, float]] = []
    for one, carried in left:
        if way[one.phase] <= 0.0 or shares.get(one.id, 0.0) <= 0.0:
            continue
        part = way[one.phase] * shares[one.id] / standing[one.phase]
        units = rate_per_s * part * size.get(one.phase, 1.0)
        loads.append((units / carried if carried > 0.0 else math.inf, part))
    may, late = 1.0 - service.target, 0.0
    for load, part in sorted(loads, reverse=True):
        late += part
        if late > may:
            return load
    return loads[0][0]


def is_lost(instance: Instance, scenario: Scenario) -> bool:
    """Return whether an instance has lost a spot node in a scenario, and serves nothing."""
    return any(
        node.market == "spot" and (instance.region_of(node), node.node_type) in scenario.lost
        for node in instance.nodes
    )
