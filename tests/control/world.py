"""A toy world for the controller: machines with start-up times, failures and losses, and a greedy planner.

Nothing here has a clock or chance of its own: time moves when a test says so, failures are given.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from atoll.control.decision.control_view import (
    ControlPolicy,
    EndNotice,
    Memory,
    ObservedInstance,
    PromiseSeen,
    TrafficSeen,
    View,
)
from atoll.control.decision.decide import (
    ControlAction,
    Decision,
    DrainInstance,
    MakePlan,
    ReweightRoutes,
    StartInstance,
    StopInstance,
    decide,
)
from atoll.control.decision.lane_capacity import CarriedLoad, demand_by_lane, find_mixed
from atoll.control.decision.machine_pool import MachinePool, rent_of
from atoll.control.decision.restate import restate_demand
from atoll.core.ids import Phase, parse_role
from atoll.deploy.labels import Labels
from atoll.deploy.target import FailureKind, InstanceStatus
from atoll.plan.plan import Instance, Market, Node, OfferKey, Plan
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings

EAST = "us-east"
WEST = "eu-west"
TEMPLATES: tuple[tuple[str, int, float], ...] = (
    ("H100:1", 1, 10.0),
    ("L40S:1", 1, 4.0),
    ("L4:1", 2, 3.0),
)
"""Node type, how many of them, and requests/s that an instance of them carries."""
LENGTHS = Lengths(
    input_mean=100.0, output_mean=50.0, input_mean_square=20_000.0, output_mean_square=5_000.0
)
POLICY = ControlPolicy(
    epoch_s=300.0,
    startup_s=60.0,
    drain_s=60.0,
    move_s=20.0,
    settled_s=30.0,
    backoff_max_s=480.0,
)
TICK_S = 30.0
START_S = 1_000_000.0


def service(name: str = "chat", rate: float = 8.0, **changes: object) -> Service:
    values: dict[str, object] = {
        "name": name,
        "model": "llama-3.1-8b",
        "ttft_s": 1.0,
        "tpot_s": 0.1,
        "rate_per_s": rate,
        "lengths": LENGTHS,
        "phases": "together",
    }
    return Service.model_validate(values | changes)


def offer(
    node_type: str,
    usd: float,
    available: int = 100,
    region: str = EAST,
    market: Market = "on-demand",
) -> Offer:
    return Offer(
        region=region, node_type=node_type, market=market, available=available, usd_per_hour=usd
    )


OFFERS = (offer("H100:1", 4.0), offer("L40S:1", 1.8), offer("L4:1", 0.8))


def problem(*services: Service, limits: Limits | None = None) -> Problem:
    return Problem(
        name="toy",
        services=services or (service(),),
        offers=OFFERS,
        limits=limits or Limits(),
        settings=Settings(),
    )


def instance(
    name: str,
    role: str = "chat/llm/both",
    node_type: str = "L40S:1",
    *,
    region: str = EAST,
    market: Market = "on-demand",
    host: str | None = None,
    usd: float = 1.8,
    per_s: float | None = None,
) -> Instance:
    count, requests = next((n, rate) for kind, n, rate in TEMPLATES if kind == node_type)
    units = {Phase.PREFILL: 100.0, Phase.DECODE: 50.0}.get(parse_role(role).phase, 1.0)
    return Instance(
        id=name,
        service=parse_role(role).model,
        role=role,
        region=region,
        stages=1,
        nodes=tuple(
            Node(
                id=f"n{k}",
                node_type=node_type,
                market=market,
                start=16 * k * (count - 1),
                end=16 * (k + 1) if count > 1 else 32,
                tp=1,
                host=host,
            )
            for k in range(count)
        ),
        flows=(),
        throughput_per_s=(requests if per_s is None else per_s) * units,
        usd_per_hour=usd * count,
    )


def plan_greedily(asked: Problem) -> Plan:
    """The cheapest capacity first, role by role; what runs costs no start-up."""
    left = {one.key: one for one in asked.offers}
    free = Counter({key: one.available for key, one in left.items()})
    chosen: list[Instance] = []
    served: dict[str, float] = {}
    penalty = 1.0 + asked.settings.init_penalty
    for each in asked.services:
        shares = [1.0]
        for role in map(str, each.roles):
            need = each.demand(role)
            got = 0.0
            choices: list[tuple[float, str, Instance | OfferKey]] = []
            for one in asked.running:
                if one.role == role:
                    usd = sum(left[key].usd_per_hour for key in keys_of(one))
                    choices.append((usd / one.throughput_per_s, one.id, one))
            units = {Phase.PREFILL: 100.0, Phase.DECODE: 50.0}.get(parse_role(role).phase, 1.0)
            number = 0
            for key, priced in sorted(left.items()):
                count, per_s = next((n, rate) for kind, n, rate in TEMPLATES if kind == key[1])
                for _ in range(min(40, free[key] // count)):
                    rate = penalty * priced.usd_per_hour * count / (per_s * units)
                    name = f"{each.name}-{parse_role(role).phase}-{number}"
                    choices.append((rate, name, key))
                    number += 1
            picked: list[Instance] = []
            for _, name, choice in sorted(choices, key=lambda choice: choice[:2]):
                if got >= need:
                    break
                one = choice if isinstance(choice, Instance) else make_new(name, role, left[choice])
                needs = Counter(keys_of(one))
                if all(free[key] >= n for key, n in needs.items()):
                    free.subtract(needs)
                    picked.append(one)
                    got += one.throughput_per_s
            for one in sorted(picked, key=lambda one: (-one.usd_per_hour, one.id)):
                if got - one.throughput_per_s >= need:
                    picked.remove(one)
                    free.update(keys_of(one))
                    got -= one.throughput_per_s
            chosen += picked
            shares.append(min(1.0, got / need) if need > 0 else 1.0)
        served[each.name] = min(shares)
    status = "infeasible" if not chosen else "partial" if min(served.values()) < 1 else "feasible"
    return Plan(
        problem_hash="",
        problem_name=asked.name,
        instances=tuple(chosen),
        served_fraction=served,
        usd_per_hour=rent_of(asked.offers, chosen),
        status=status,
        solver="toy",
    )


def make_new(name: str, role: str, where: Offer) -> Instance:
    return instance(
        name,
        role,
        where.node_type,
        region=where.region,
        market=where.market,
        usd=where.usd_per_hour,
    )


def keys_of(one: Instance) -> list[OfferKey]:
    return [(one.region_of(node), node.node_type, node.market) for node in one.nodes]


@dataclass
class World:
    """What targets would show, and what they do with orders.

    `broken` are offers on which starts fail, by how; `startup_s` and `drain_s` are how long things take.
    """

    asked: Problem
    offers: tuple[Offer, ...] = OFFERS
    time_s: float = START_S
    startup_s: float = 60.0
    drain_s: float = 30.0
    broken: dict[OfferKey, FailureKind] = field(default_factory=dict)
    observed: dict[str, ObservedInstance] = field(default_factory=dict)
    traffic: tuple[TrafficSeen, ...] = ()
    promises: tuple[PromiseSeen, ...] = ()
    notices: tuple[EndNotice, ...] = ()
    routes: ReweightRoutes | None = None
    started: list[str] = field(default_factory=list)

    def view(self) -> View:
        return View(
            self.time_s,
            self.asked,
            self.offers,
            self.traffic,
            self.promises,
            tuple(self.observed.values()),
            self.notices,
        )

    def put(self, one: Instance, state: str = "ready", ends_s: float | None = None) -> None:
        """Have an instance stand there, whoever started it."""
        labels = Labels(
            fleet="toy", instance=one.id, plan="", placement="", service=one.service, role=one.role
        )
        status = InstanceStatus(f"job-{one.id}", labels, state, self.time_s, ends_s)  # type: ignore[arg-type]
        self.observed[one.id] = ObservedInstance(status, one)

    def apply(self, action: ControlAction) -> None:
        match action:
            case StartInstance(one, labels):
                self._start(one, labels)
            case DrainInstance(name):
                if self.observed[name].status.state in ("starting", "ready"):
                    self._turn(name, "draining")
            case StopInstance(name):
                self._turn(name, "gone")
            case ReweightRoutes():
                self.routes = action

    def _start(self, one: Instance, labels: Labels) -> None:
        name = labels.instance
        if name in self.observed:
            assert self.observed[name].status.labels == labels, "a name was used again"
            return
        self.started.append(name)
        holding = (seen.instance for seen in self.observed.values() if seen.status.state != "gone")
        assert MachinePool(self.offers, holding).has_room(one), f"no room for {name}"
        kind = next((self.broken[key] for key in keys_of(one) if key in self.broken), None)
        self.observed[name] = ObservedInstance(
            InstanceStatus(
                f"job-{name}",
                labels,
                "starting" if kind is None else "failed",
                self.time_s,
                kind=kind,
                reason="" if kind is None else f"no {kind}",
            ),
            one,
        )

    def _turn(
        self, name: str, state: str, reason: str = "", kind: FailureKind | None = None
    ) -> None:
        seen = self.observed[name]
        status = replace(
            seen.status,
            state=state,  # type: ignore[arg-type]
            since_s=self.time_s,
            reason=reason,
            kind=kind,
        )
        self.observed[name] = replace(seen, status=status)

    def lose(self, name: str) -> None:
        """A machine of the instance dies."""
        self._turn(name, "gone", "a machine died", "ended")

    def advance(self, seconds: float = TICK_S) -> None:
        self.time_s += seconds
        for name, seen in list(self.observed.items()):
            since_s = self.time_s - seen.status.since_s
            if seen.status.state == "starting" and since_s >= self.startup_s:
                self._turn(name, "ready")
            elif seen.status.state == "draining" and since_s >= self.drain_s:
                self._turn(name, "gone")
            elif seen.status.state in ("starting", "ready") and (
                seen.status.ends_s is not None and self.time_s >= seen.status.ends_s
            ):
                self._turn(name, "gone", "its time was over", "ended")
            elif seen.status.state == "gone" and since_s >= 600.0:
                del self.observed[name]

    def ready(self) -> list[Instance]:
        return [s.instance for s in self.observed.values() if s.status.state == "ready"]

    def alive(self) -> dict[str, Instance]:
        return {
            name: seen.instance
            for name, seen in self.observed.items()
            if seen.status.state in ("starting", "ready")
        }

    def lanes(self) -> dict[str, float]:
        mixed = find_mixed(self.asked, (s.instance for s in self.observed.values()))
        return CarriedLoad(self.asked, mixed, self.ready()).lanes()

    def demand(self, policy: ControlPolicy = POLICY) -> dict[str, float]:
        """What is asked of lanes where no traffic is seen: what the fleet says."""
        mixed = find_mixed(self.asked, (s.instance for s in self.observed.values()))
        return demand_by_lane(restate_demand(self.view(), {}, policy), mixed)

    def shape(self) -> Counter[object]:
        """What stands, whatever its name."""
        return Counter(one.placement_key for one in self.alive().values())


@dataclass
class Loop:
    """The shell around `decide`, with checks on every decision."""

    world: World
    memory: Memory = field(default_factory=Memory)
    policy: ControlPolicy = POLICY
    plan: MakePlan = plan_greedily
    plans: int = 0

    def decide(self) -> Decision:
        decision, self.memory = decide(self.world.view(), self.memory, self.policy, self.plan)
        self.plans += decision.planned
        return decision

    def tick(self) -> Decision:
        decision = self.decide()
        for action in decision.actions:
            self.world.apply(action)
        self.world.advance()
        return decision

    def settle(self, ticks: int = 120, quiet: int = 25) -> list[ControlAction]:
        """Run until nothing was done for so many ticks; fail if that never comes."""
        done: list[ControlAction] = []
        still = 0
        for _ in range(ticks):
            decision = self.tick()
            done += decision.actions
            still = 0 if decision.actions else still + 1
            if still >= quiet:
                return done
        raise AssertionError(f"never still; last: {done[-3:]}")
