"""Who operates a fleet in virtual time: Atoll, and what it is compared with.

- `atoll`: `decide`, with the planner over known templates.
- `static-peak`, `static-mean`: one plan for the highest, or the mean, rate of all that comes, at the prices
  of the start; what is lost is started again.
- `reactive`: replicas of the best single template per service, as HPA and KEDA scale them. There should be
  ceil(rate / (target * capacity)) of them: at once up, down to the most that there should have been within
  `window_s`; where utilisation is within `tolerance` of its target nothing changes. New ones stand where the
  template is cheapest then.
- `rolling`: GH/AGH. Plans anew every window for the rate of the last one and adopts whatever is cheapest: no
  penalty for starting, no forecast.
- `oracle`: nobody operates, it is a bound. Every epoch the cheapest plan for the highest rate in it, at its
  mean prices, free to change at no cost, while no machine fails.

All but the oracle live in the same world. Rates are means over five minutes. An operator that wants a machine
that cannot be had takes the cheapest of the same kind elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.control.decision.control_view import ControlPolicy, Memory, View
from atoll.control.decision.decide import MakePlan, decide
from atoll.control.decision.instance_names import rename
from atoll.control.operation.control_loop import TrafficReport
from atoll.control.virtual.fluid_calibration import carried_requests
from atoll.control.virtual.virtual_demand import DAY_MINUTES, MINUTE_S, restate_classes
from atoll.control.virtual.virtual_run import OperationResult, OperationSeries, VirtualSetting
from atoll.control.virtual.world import HOUR_S, VirtualWorld
from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.plan.plan import Instance, Market, Plan, RequestPath, count_machines
from atoll.plan.problem import COMPONENT, Offer, Problem, Service
from atoll.prove.load_curves import units_per_request
from atoll.prove.sized_templates import SizedTemplate
from atoll.solve.derating import NodeSet

_MARKETS: tuple[Market, ...] = ("owned", "on-demand", "spot")


class AtollOperator:
    """`decide` in a virtual world."""

    name = "atoll"

    def __init__(
        self, problem: Problem, plan: MakePlan, policy: ControlPolicy | None = None
    ) -> None:
        self.problem, self.plan = problem, plan
        self.policy = policy or ControlPolicy.for_problem(problem)
        self.memory = Memory()
        self.plans = self.turns = self.adopted = 0

    def turn(self, world: VirtualWorld, seen: TrafficReport) -> None:
        """Decide, and do it."""
        view = View(
            world.time_s,
            self.problem,
            world.offers,
            seen.traffic,
            seen.promises,
            world.observe(),
            seen.notices,
        )
        decision, self.memory = decide(view, self.memory, self.policy, self.plan)
        self.turns += 1
        self.plans += decision.planned
        self.adopted += decision.adopted
        for action in decision.actions:
            world.apply(action)


class _Replacing:
    """Starts instances under names of their own, elsewhere where their machines cannot be had."""

    def __init__(self) -> None:
        self._number = 0

    def start(self, world: VirtualWorld, instance: Instance) -> str | None:
        """Start an instance where it is cheapest now; return its name, None where it fits nowhere."""
        if not world.has_room(instance):
            choices = [
                (usd, other)
                for usd, other in _list_places(instance, world.offers)
                if world.has_room(other)
            ]
            if not choices:
                return None
            instance = min(choices, key=lambda one: (one[0], one[1].region))[1]
        self._number += 1
        name = f"{instance.service}-{self._number}"
        world.start(instance.model_copy(update={"id": name}))
        return name


def _list_places(instance: Instance, offers: Sequence[Offer]) -> list[tuple[float, Instance]]:
    """Return an instance wherever whole machines of its kinds are offered on one market, with its rent."""
    prices = {offer.key: offer.usd_per_hour for offer in offers if offer.available > 0}
    kinds = Counter(node.kind for node in instance.nodes)
    found = []
    for region in sorted({offer.region for offer in offers}):
        for market in _MARKETS:
            keys = [(region, kind, market) for kind in kinds]
            if all(key in prices for key in keys):
                usd = sum(prices[key] * kinds[key[1]] for key in keys)
                whole = {"market": market, "slot": None, "gpu_ids": None}
                nodes = tuple(
                    node.model_copy(update={**whole, "node_type": node.kind})
                    for node in instance.nodes
                )
                update = {"region": region, "nodes": nodes, "usd_per_hour": usd}
                found.append((usd, instance.model_copy(update=update)))
    return found


class StaticOperator:
    """Keeps one plan, whatever comes."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name, self._plan = name, plan
        self.wanted = list(plan.instances)
        self._at: list[str | None] = [None] * len(self.wanted)
        self._starter = _Replacing()

    def turn(self, world: VirtualWorld, seen: TrafficReport) -> None:
        """Start what is not there."""
        del seen
        living = world.living()
        _clean_up(world)
        for at, one in enumerate(self.wanted):
            name = self._at[at]
            if name is None or name not in living or living[name].status.ends_s is not None:
                self._at[at] = self._starter.start(world, one)
        names = {one.id: now or "" for one, now in zip(self.wanted, self._at, strict=True)}
        world.route(rename(self._plan, lambda one: names[one.id]).paths)


class ReactiveOperator:
    """Scales replicas of one template per service by their utilisation, as HPA and KEDA do.

    Of an any-to-any service every kind of executor of the `base` plan is scaled by its own: classes keep
    the paths that they have there.
    """

    name = "reactive"

    def __init__(
        self,
        problem: Problem,
        templates: Sequence[SizedTemplate],
        *,
        target: float = 0.7,
        window_s: float = 300.0,
        tolerance: float = 0.1,
        least: int = 1,
        base: Plan | None = None,
    ) -> None:
        self.target, self.window_s, self.tolerance, self.least = target, window_s, tolerance, least
        self.best = {
            role: template
            for service in problem.plain_services
            for role, template in _choose_best(problem, service, templates, target).items()
        }
        self._services = {service.name: service for service in problem.services}
        self._copied = {} if base is None else copied_executors(base)
        self._paths = () if base is None else base.paths
        names = (*self.best, *self._copied)
        self._mine: dict[str, list[str]] = {name: [] for name in names}
        self._wishes: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
        self._starter = _Replacing()

    def turn(self, world: VirtualWorld, seen: TrafficReport) -> None:
        """Scale every service."""
        _clean_up(world)
        rates = {one.service: one.five_minutes.rate_per_s for one in seen.traffic}
        for name, template in self.best.items():
            service = self._services[template.instance.service]
            units = units_per_request(service, template.instance.phase)
            busy = rates.get(service.name, 0.0) * units / template.per_s
            self._scale(world, name, template.instance, busy)
        classes = {
            (one.service, each.service): each.five_minutes.rate_per_s
            for one in seen.traffic
            for each in one.classes
        }
        for name, copied in self._copied.items():
            self._scale(world, name, copied.instance, copied.busy(classes))
        world.route(_spread_copies(self._paths, self._copied, self._mine))

    def _scale(self, world: VirtualWorld, name: str, like: Instance, busy: float) -> None:
        """Scale replicas of an instance, so many of which would be busy all the time."""
        living = world.living()
        here = [
            one for one in self._mine[name] if one in living and living[one].status.ends_s is None
        ]
        wanted = self._wish(name, busy, len(here), world.time_s)
        while len(here) < wanted:
            started = self._starter.start(world, _stand_cheapest(like, world.offers))
            if started is None:
                break
            here.append(started)
        # As Kubernetes does: what does not serve yet goes first, then what came last.
        here.sort(key=lambda one: one in living and living[one].status.state == "ready")
        while len(here) > wanted:
            gone = here.pop(0) if here[0] not in living else here.pop()
            world.drain(gone)
        self._mine[name] = here

    def _wish(self, name: str, busy: float, there: int, now_s: float) -> int:
        """Return how many replicas there should be, where so many would be busy all the time."""
        wish = max(self.least, math.ceil(busy / self.target - 1e-9))
        if there and abs(busy / (there * self.target) - 1.0) <= self.tolerance:
            wish = there
        kept = [(at, n) for at, n in self._wishes[name] if now_s - at <= self.window_s]
        self._wishes[name] = [*kept, (now_s, wish)]
        return max(wish, min(there, max(n for _, n in self._wishes[name])))


@dataclass(frozen=True)
class CopiedExecutor:
    """A kind of executor of a plan: one of them, the names of all, and seconds by (service, class)."""

    instance: Instance
    names: frozenset[str]
    seconds: Mapping[tuple[str, str], float]

    def busy(self, rates: Mapping[tuple[str, str], float]) -> float:
        """Return how many of them requests/s of classes keep busy all the time."""
        return sum(rate * self.seconds.get(key, 0.0) for key, rate in rates.items())


def copied_executors(plan: Plan) -> dict[str, CopiedExecutor]:
    """Return the kinds of executors of a plan, by a name for each."""
    found: dict[str, list[Instance]] = {}
    for one in plan.executor_instances:
        found.setdefault(f"{one.role} {one.nodes[0].kind}", []).append(one)
    copied = {}
    for name, group in sorted(found.items()):
        work = {(klass, part): seconds for klass, part, seconds in group[0].work}
        names = frozenset(one.id for one in group)
        seconds: dict[tuple[str, str], float] = {}
        for path in plan.paths:
            for step in path.steps:
                here = sum(weight for one, weight in step.instances.items() if one in names)
                if here > 0.0:
                    took = sum(work.get((path.klass, part), 0.0) for part in step.parts)
                    key = path.service, path.klass
                    seconds[key] = seconds.get(key, 0.0) + path.share * here * took
        copied[name] = CopiedExecutor(group[0], names, seconds)
    return copied


def _spread_copies(
    paths: Iterable[RequestPath],
    copied: Mapping[str, CopiedExecutor],
    standing: Mapping[str, Sequence[str]],
) -> list[RequestPath]:
    """Return paths over all that stand of each kind instead of those that a plan names."""
    found = []
    for path in paths:
        steps = []
        for step in path.steps:
            weights: dict[str, float] = {}
            for name, one in copied.items():
                share = sum(w for each, w in step.instances.items() if each in one.names)
                for each in standing[name]:
                    weights[each] = share / len(standing[name])
            weights = {name: weight for name, weight in weights.items() if weight > 0.0}
            steps.append(step.model_copy(update={"instances": weights}))
        found.append(path.model_copy(update={"steps": tuple(steps)}))
    return found


class RollingOperator:
    """Plans anew every window for what was just asked, and changes to that at once."""

    name = "rolling"

    def __init__(self, problem: Problem, plan: MakePlan, *, window_s: float = 300.0) -> None:
        self.problem, self.plan, self.window_s = problem, plan, window_s
        self._planned_s = -math.inf
        self._number = 0
        self._wanted: list[str] = []

    def turn(self, world: VirtualWorld, seen: TrafficReport) -> None:
        """At the start of a window, plan and change; drain what is left over once all is there."""
        _clean_up(world)
        living = world.living()
        lost = any(name not in living for name in self._wanted)
        if world.time_s - self._planned_s >= self.window_s or lost:
            self._planned_s = world.time_s
            self._change(world, seen)
            living = world.living()
        starting = {
            living[name].instance.service
            for name in self._wanted
            if name in living and living[name].status.state == "starting"
        }
        for name, one in living.items():
            if name not in self._wanted and one.instance.service not in starting:
                world.drain(name)

    def _change(self, world: VirtualWorld, seen: TrafficReport) -> None:
        rates = {one.service: one.five_minutes.rate_per_s for one in seen.traffic}
        mixes = {
            one.service: {each.service: each.five_minutes.rate_per_s for each in one.classes}
            for one in seen.traffic
        }
        running = [
            one.instance.model_copy(update={"id": name})
            for name, one in world.living().items()
            if one.status.ends_s is None
        ]
        held = count_machines(running)
        offers = tuple(
            offer.model_copy(update={"available": max(offer.available, held[offer.key])})
            for offer in world.offers
        )
        services = tuple(
            service.model_copy(update={"rate_per_s": rates.get(service.name) or service.rate_per_s})
            for service in self.problem.services
        )
        asked = self.problem.model_copy(
            update={"services": services, "offers": offers, "running": tuple(running)}
        )
        counted = {name: list(mix.values()) for name, mix in mixes.items() if sum(mix.values())}
        asked = restate_classes(asked, counted)
        plan = self.plan(asked)
        if not plan.instances:
            return
        names = {one.id: one.id for one in running}
        self._wanted = []
        for one in plan.instances:
            if one.id in names:
                self._wanted.append(one.id)
                continue
            self._number += 1
            name = f"{one.service}-{self._number}"
            names[one.id] = name
            world.start(one.model_copy(update={"id": name}))
            self._wanted.append(name)
        world.route(rename(plan, lambda one: names[one.id]).paths)


def _clean_up(world: VirtualWorld) -> None:
    """Stop what failed to start: it may hold machines."""
    for seen in world.observe():
        if seen.status.state == "failed":
            world.stop(seen.id)


def _choose_best(
    problem: Problem, service: Service, templates: Sequence[SizedTemplate], target: float
) -> dict[str, SizedTemplate]:
    """Return the template whose replicas for the fleet's own rate cost least, on any of its offers, by role.

    One that runs both phases, or the best for each phase where none does or those two cost less together.
    """
    cost: dict[str, tuple[float, NodeSet, SizedTemplate]] = {}
    for one in templates:
        if one.instance.service != service.name:
            continue
        for usd, _ in _list_places(one.instance, problem.offers):
            asked = service.rate_per_s * units_per_request(service, one.instance.phase)
            found = (usd * math.ceil(asked / (target * one.per_s) - 1e-9), one.nodes, one)
            if one.role not in cost or found[:2] < cost[one.role][:2]:
                cost[one.role] = found
    ways = [
        [cost[role] for role in roles if role in cost]
        for roles in (
            [f"{service.name}/{COMPONENT}/{Phase.BOTH}"],
            [f"{service.name}/{COMPONENT}/{phase}" for phase in (Phase.PREFILL, Phase.DECODE)],
        )
        if all(role in cost for role in roles)
    ]
    if not ways:
        raise UsageError(f"no template serves {service.name} by itself", hint="offer more machines")
    best = min(ways, key=lambda way: sum(one[0] for one in way))
    return {one[2].role: one[2] for one in best}


def _stand_cheapest(like: Instance, offers: Sequence[Offer]) -> Instance:
    places = _list_places(like, offers)
    if not places:
        return like
    return min(places, key=lambda place: (place[0], place[1].region))[1]


def plan_static(
    setting: VirtualSetting, planner: MakePlan, rate_of: Callable[[np.ndarray], float]
) -> Plan:
    """Return the plan for some rate of all that comes, of classes too, at the prices of the start."""
    demand = setting.demand
    rates = {name: [rate_of(row) for row in demand.lanes(name)] for name in demand.services}
    asked = demand.restated(setting.problem, rates)
    return planner(asked.model_copy(update={"offers": setting.market.at(0.0)}))


def find_oracle(
    setting: VirtualSetting, planner: MakePlan, *, epoch_s: float = 900.0
) -> OperationResult:
    """Return what the oracle pays: see the table at the top.

    All requests are counted as kept at the load of each epoch's plan, so that only its cost is meant.
    """
    demand = setting.demand
    lanes = {name: demand.lanes(name) for name in demand.services}
    epoch = round(epoch_s / MINUTE_S)
    minutes = setting.demand.minutes
    usd_per_hour = np.zeros(minutes)
    capacity = np.zeros((len(setting.problem.services), minutes))
    total = 0.0
    for begin in range(0, minutes, epoch):
        end = min(minutes, begin + epoch)
        highest = {name: rows[:, begin:end].max(axis=1).tolist() for name, rows in lanes.items()}
        asked = demand.restated(setting.problem, highest)
        offers = setting.market.over(begin * MINUTE_S, end * MINUTE_S)
        plan = planner(asked.model_copy(update={"offers": offers}))
        usd_per_hour[begin:end] = plan.usd_per_hour
        total += plan.usd_per_hour * (end - begin) * MINUTE_S / HOUR_S
        carried = carried_requests(asked, plan)
        for at, service in enumerate(setting.problem.services):
            capacity[at, begin:end] = carried[service.name]
    counts = setting.demand.counts[:, setting.demand.history :].astype(np.float64)
    none = np.zeros_like(counts)
    series = OperationSeries(usd_per_hour, counts, counts, none, none, capacity)
    return OperationResult(
        name="oracle",
        services=tuple(service.name for service in setting.problem.services),
        targets=tuple(service.attainment for service in setting.problem.services),
        days=minutes / DAY_MINUTES,
        usd=total,
        series=series,
        short_s=0.0,
        below_demand_s=0.0,
    )
