"""In which scenarios a service keeps its promises on some instances: told by load, simulated where in doubt.

A simulation of every plan in every scenario would take hours. What mostly decides is the load
(`scenario_loads`): below some threshold enough requests keep their promises, above it they do not. The
threshold of a set of instances is found by simulating scenarios between those that are surely enough and
surely too much, by halves, and then those nearest to it. What was simulated counts as simulated, all else
by its load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.ids import Phase
from atoll.perf.constants import default_constants
from atoll.prove.kept import find_worst, simulate_kept
from atoll.prove.robust.scenario_loads import ScenarioLoads, is_lost
from atoll.sim.sim_options import Failure

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atoll.catalog.catalog import Catalog
    from atoll.perf.constants import ConstantTable
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem
    from atoll.prove.robust.scenarios import Scenario, ScenarioSet
    from atoll.solve.deadline import Deadline

REQUESTS = 1_500
"""Requests of the service that is asked least often, per simulation, within limits."""
_FIRST_SEED = 7_001
_SAFE_LOAD = 0.6
"""Load up to which promises are taken to be kept, before any simulation."""
_HOPELESS_LOAD = 1.7
"""Load from which on they are taken to be broken."""
_HALVINGS = 5
_DOUBT_MARGIN = 0.03
"""A share kept that is this near to its target, as the fleet file has it, is simulated some more."""
_MORE_RUNS = 4


@dataclass
class ServiceTrial:
    """Results of one service on one set of instances so far.

    `plan` has those instances (and others'). `loads` are by set of scenarios; `kept` are shares of requests
    that kept their promises, by set and scenario, where simulated. `threshold` is the load up to which
    promises are taken to be kept.
    """

    service: str
    plan: Plan
    instances: tuple[Instance, ...]
    target: float
    threshold: float = 1.0
    nominal: float = 1.0
    """The share of requests that keep their promises when all turns out as the fleet file says."""
    loads: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    kept: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        """The share of requests that goes to each instance, by id."""
        found: dict[str, float] = {}
        for phase in (Phase.PREFILL, Phase.DECODE, Phase.BOTH):
            found |= self.plan.weights(self.service, phase)
        return found

    @property
    def is_valid(self) -> bool:
        """Whether promises are kept when all turns out as the fleet file says."""
        return self.nominal >= self.target

    def holds(self, name: str) -> NDArray[np.bool_]:
        """Return in which scenarios of a set enough requests keep their promises."""
        found = self.told(name)
        for (of_set, at), share in self.kept.items():
            if of_set == name:
                found[at] = share >= self.target
        return found

    def told(self, name: str) -> NDArray[np.bool_]:
        """Return the same as load alone tells it."""
        return np.asarray(self.loads[name] <= self.threshold)

    def nearest(self, name: str, number: int) -> list[int]:
        """Return scenarios of a set that were not simulated, the most doubtful first."""
        with np.errstate(divide="ignore"):
            over = np.log(self.loads[name] / self.threshold)
        # What is taken to hold and does not is worse than the other way round: look further on that side.
        doubt = np.where(over > 0.0, over, -0.5 * over)
        order = np.argsort(doubt, kind="stable")
        fresh = [int(at) for at in order if (name, int(at)) not in self.kept]
        return [at for at in fresh if math.isfinite(doubt[at])][:number]

    def fit(self, name: str) -> None:
        """Put the threshold where it tells most of what was simulated right, in the middle of such loads."""
        known = sorted(
            (float(self.loads[of_set][at]), share >= self.target)
            for (of_set, at), share in self.kept.items()
            if of_set == name and math.isfinite(self.loads[of_set][at])
        )
        if not known:
            return
        loads = [load for load, _ in known]
        # Beyond what was simulated nobody knows: no more than capacity promises.
        edges = [min(1.0, loads[0]), *loads, max(1.0, loads[-1])]
        wrong = []
        for cut in range(len(known) + 1):
            below = sum(not good for _, good in known[:cut])
            above = sum(good for _, good in known[cut:])
            wrong.append(below + above)
        # Several cuts may be as good: the middle one is the least biased.
        best = [cut for cut, number in enumerate(wrong) if number == min(wrong)]
        cut = best[len(best) // 2]
        if cut in (0, len(known)):
            self.threshold = edges[0] * (1.0 - 1e-9) if cut == 0 else edges[-1]
        else:
            # Loads are ratios: the geometric mean of the two loads next to the cut.
            self.threshold = math.sqrt(edges[cut] * edges[cut + 1])


class ScenarioLab:
    """Where services are tried in scenarios; equal instances are tried once."""

    def __init__(
        self, problem: Problem, catalog: Catalog, deadline: Deadline | None = None
    ) -> None:
        # Scenarios bring their own losses, so those of the problem are switched off and do not count twice.
        limits = problem.limits.model_copy(update={"spot_loss_per_h": 0.0, "survive": 0})
        self.problem, self.catalog, self.deadline = problem, catalog, deadline
        # Losses are the scenarios' own.
        self._calm = problem.model_copy(update={"limits": limits})
        self._loads = ScenarioLoads(problem, catalog)
        self._trials: dict[object, ServiceTrial] = {}
        self.simulations = 0

    @property
    def evaluations(self) -> int:
        """Capacities of nodes that were worked out."""
        return self._loads.evaluations

    def trial(self, plan: Plan, service: str) -> ServiceTrial:
        """Return the trial of a service as a plan serves it."""
        own = tuple(i for i in plan.instances if i.service == service)
        # Plans that serve a service with the same instances share the trial, with all that was simulated.
        key = (service, _standing(own))
        if key not in self._trials:
            target = self.problem.service(service).target
            self._trials[key] = ServiceTrial(service, plan, own, target)
        return self._trials[key]

    def look(self, trial: ServiceTrial, among: ScenarioSet) -> None:
        """Work out the loads of a trial in a set of scenarios."""
        if among.name not in trial.loads:
            trial.loads[among.name] = self.loads(
                trial.service, trial.instances, among, trial.shares
            )

    def loads(
        self,
        service: str,
        instances: Sequence[Instance],
        among: ScenarioSet,
        shares: Mapping[str, float] | None = None,
    ) -> NDArray[np.float64]:
        """Return the load of a service on some instances in each scenario of a set."""
        return np.array(self._loads.of(service, instances, among, shares))

    def headroom(self, trial: ServiceTrial) -> float:
        """Return what instances of a trial carry, by the performance model, over the fleet's demand."""
        load = self._loads.nominal(trial.service, trial.instances, trial.shares)
        return 1.0 / load if 0.0 < load < math.inf else 0.0

    def calibrate(self, trial: ServiceTrial, among: ScenarioSet) -> None:
        """Find the threshold of a trial by simulating scenarios of a set, by halves."""
        self.look(trial, among)
        trial.nominal = self._simulate(trial, self._calm, default_constants(), 0, ())
        if abs(trial.nominal - trial.target) < _DOUBT_MARGIN:
            # One run is luck: of those that are near it takes some more to tell.
            more = [
                self._simulate(trial, self._calm, default_constants(), -run, ())
                for run in range(1, _MORE_RUNS + 1)
            ]
            trial.nominal = float(np.mean([trial.nominal, *more]))
        # An option that fails when nothing goes wrong is not taken, so its threshold does not matter.
        if not trial.is_valid:
            return
        loads = trial.loads[among.name]
        order = np.argsort(loads, kind="stable")
        # Scenarios outside the two loads are taken as known: simulations are spent between them.
        low = int(np.searchsorted(loads[order], _SAFE_LOAD)) - 1
        high = int(np.searchsorted(loads[order], _HOPELESS_LOAD))
        for _ in range(_HALVINGS):
            if high - low < 2:
                break
            middle = (low + high) // 2
            share = self.simulate(trial, among, int(order[middle]))
            if share >= trial.target:
                low = middle
            else:
                high = middle
        trial.fit(among.name)

    def refine(self, trial: ServiceTrial, among: ScenarioSet, number: int) -> int:
        """Simulate the most doubtful scenarios of a set; return how many there were."""
        doubtful = trial.nearest(among.name, number)
        for at in doubtful:
            self.simulate(trial, among, at)
        trial.fit(among.name)
        return len(doubtful)

    def simulate(self, trial: ServiceTrial, among: ScenarioSet, at: int) -> float:
        """Return the share of requests that keep their promises in a scenario, by simulation."""
        key = (among.name, at)
        if key not in trial.kept:
            scenario = among.scenarios[at]
            gone = [i.id for i in trial.instances if is_lost(i, scenario)]
            self.look(trial, among)
            phases = {i.phase for i in trial.instances if i.id not in gone}
            # With a whole phase gone nobody is served: nothing to simulate.
            if {i.phase for i in trial.instances} - phases and not math.isfinite(
                trial.loads[among.name][at]
            ):
                trial.kept[key] = 0.0
            else:
                losses = tuple(Failure(0.0, instance=name) for name in gone)
                table = among.constants[scenario.draw]
                asked = self._asked(scenario)
                # The seed goes with the scenario: all options meet the same arrivals in it.
                trial.kept[key] = self._simulate(trial, asked, table, 1 + at, losses)
        return trial.kept[key]

    def _asked(self, scenario: Scenario) -> Problem:
        services = tuple(
            s.model_copy(update={"rate_per_s": s.rate_per_s * scenario.demand[s.name]})
            for s in self._calm.services
        )
        return self._calm.model_copy(update={"services": services})

    def _simulate(
        self,
        trial: ServiceTrial,
        problem: Problem,
        table: ConstantTable,
        luck: int,
        losses: Iterable[Failure],
    ) -> float:
        self.simulations += 1
        found = simulate_kept(
            trial.plan,
            problem,
            self.catalog,
            _FIRST_SEED + luck,
            self.deadline,
            tuple(losses),
            constants=table,
            requests=REQUESTS,
            services=[trial.service],
        )
        kept = found.get(trial.service)
        return 0.0 if kept is None else find_worst(kept, trial.target).both


def _standing(instances: Sequence[Instance]) -> object:
    """Return the identity of instances for simulation: their places and shares of requests."""
    sent: dict[Phase, float] = {}
    for one in instances:
        sent[one.phase] = sent.get(one.phase, 0.0) + one.throughput_per_s
    return tuple(
        sorted(
            # Rounded: shares that differ by less than this are simulated once.
            (one.placement_key, round(one.throughput_per_s / sent[one.phase], 3))
            for one in instances
        )
    )


def joint(holds: Sequence[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Return in which scenarios all services keep their promises."""
    return np.asarray(np.all(np.stack(holds), axis=0))
