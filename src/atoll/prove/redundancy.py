"""Plans that keep promises although spot nodes are lost: more of them than needed, or fewer and others below.

Services stand on nodes of their own, so what is spare is searched for each by itself, cheapest first: its
instances in plans of the solver that are asked for ever more to spare (`ladders`), and these with an instance
more, of those that any of the plans has, or with nodes that stay in place of spot. What may do is simulated,
all services together, with losses. A service that falls short then takes its next choice, so the first plan
that keeps all promises has the cheapest instances of all that were looked at.

What may do says an estimate that needs no simulation: nodes are lost independently of each other and are away
for as long as instances take to start, and while less is left than carries the demand requests wait longer
and longer. It is a little too good: streams that move are not in it. What simulations find it to be too good
by is counted. All limits are counts of plans, so the same problem has the same plan.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.ids import Phase, parse_node_type
from atoll.plan.losses import kind_of, region_of
from atoll.plan.plan import Instance
from atoll.plan.validate.check import validate
from atoll.prove.load_curves import units_per_request
from atoll.prove.losses import SpotAbsence
from atoll.prove.smaller_plans import on_offer
from atoll.solve.array_types import Floats, Ints
from atoll.solve.assembly import assemble, price
from atoll.solve.packing import pack

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Limits, Problem

_MAX_GROWN = 300
"""Choices of instances that others are grown from, of a service, at most."""
_MAX_TRIALS = 16
"""Plans that are simulated, at most."""
_LOST_AT_ONCE = (1, 2, 3)
_HEADROOMS = (1.25, 1.6, 2.2)
_HALF = 0.5
_MAX_GPUS = 4
"""Types of GPUs on spot that plans of one type are made of, at most."""
_PHASES = (Phase.BOTH, Phase.PREFILL, Phase.DECODE)
_RARE = 1e-7
"""Chance below which so many nodes are not taken to be away at once."""
_ALL = 1000
"""All of the demand, in the parts that are told apart."""
_BASE = _ALL + 1
_BEYOND = 1.1
"""What instances may carry together, times what was found of each alone."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Spare:
    """What a plan is asked for beyond its problem: other limits, headroom times so much, GPUs to avoid."""

    limits: Limits
    headroom: float = 1.0
    avoid: tuple[str, ...] = ()

    def ask(self, problem: Problem, services: frozenset[str]) -> Problem:
        """Return the problem with this asked for, of these services alone but for the limits."""
        return problem.replace(
            limits=self.limits,
            services=tuple(
                one.model_copy(
                    update={
                        "headroom": one.headroom * self.headroom,
                        "avoid": (*one.avoid, *self.avoid),
                    }
                )
                if one.name in services
                else one
                for one in problem.services
            ),
        )


@dataclass(frozen=True)
class TrialOutcome:
    """What a simulation found of a plan: services that fall short, and what each keeps."""

    short: frozenset[str]
    kept: Mapping[str, float]


def ladders(problem: Problem, services: frozenset[str]) -> tuple[tuple[Spare, ...], ...]:
    """Return what to ask plans for, so that these services keep more: each ladder from little to much.

    The first has one step: no spot at all. The last have one each: nothing but one type of GPU. Of what is
    cheapest when nothing is lost several may be needed where one that is larger is lost less often.
    """
    limits = problem.limits
    cheapest: dict[str, float] = {}
    for offer in problem.offers:
        gpu = parse_node_type(offer.node_type).gpu
        usd = offer.usd_per_hour / offer.gpus if offer.market == "spot" else math.inf
        cheapest[gpu] = min(cheapest.get(gpu, math.inf), usd)
    on_spot = sorted((usd, gpu) for gpu, usd in cheapest.items() if usd < math.inf)[:_MAX_GPUS]
    alone = [tuple(sorted(cheapest.keys() - {gpu})) for _, gpu in on_spot if len(cheapest) > 1]
    most = 1.0 if limits.spot_share is None else limits.spot_share

    def lost(number: int) -> Limits:
        own = limits.survival
        update: dict[str, object] = {"machines": max(number, own.machines)}
        if not own.lost:
            stay = {
                kind_of("machine", o.region, o.node_type, o.market)
                for o in problem.offers
                if o.market != "spot"
            }
            update |= {"services": tuple(sorted(services)), "spared": tuple(sorted(stay))}
        return limits.model_copy(update={"survive": own.model_copy(update=update)})

    def less(share: float) -> Limits:
        return limits.model_copy(update={"spot_share": most * share})

    return (
        (Spare(less(0.0)),),
        tuple(Spare(lost(number)) for number in _LOST_AT_ONCE),
        tuple(Spare(limits, headroom) for headroom in _HEADROOMS),
        (Spare(less(_HALF)),),
        *((Spare(limits, avoid=others),) for others in alone),
    )


class Availability:
    """The share of a service's requests that keep promises at most, by which nodes are away."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._absence = SpotAbsence(problem)

    def kept_at_most(self, service: str, instances: Iterable[Instance]) -> float:
        """Return about the largest share of requests that instances of a service can keep promises of.

        Where losses must be survived, after the worst of them.
        """
        survival, left = self.problem.limits.survival, list(instances)
        found = self._kept_by(service, left)
        if not survival.covers(service):
            return found
        places = {"zone": lambda place: place, "region": region_of}
        for unit, number in survival.lost.items():
            rest = left
            for _ in range(number):
                if unit == "machine":
                    lost = [[one] for one in {one.placement_key: one for one in rest}.values()]
                else:
                    of = places[unit]
                    lost = [
                        [one for one in rest if of(one.region) == place]
                        for place in sorted({of(one.region) for one in rest})
                    ]
                others = [_without(rest, some) for some in lost]
                rest = min(others, key=lambda some: self._kept_by(service, some), default=[])
            found = min(found, self._kept_by(service, rest))
        return found

    def _kept_by(self, service: str, instances: Iterable[Instance]) -> float:
        own = self.problem.service(service)
        alike: Counter[tuple[Phase, int, float]] = Counter()
        longest_s = 0.0
        for one in instances:
            spot = _count_spot(one)
            there = (1.0 - self._absence.share(one)) ** spot if spot else 1.0
            longest_s = max(longest_s, self._absence.back_s(one) if spot else 0.0)
            alike[one.phase, self._share(one), there] += 1
        # By phase the thousandths of the demand that are carried, in one number, each with its chance.
        left: Ints = np.zeros(1, np.int64)
        chance: Floats = np.ones(1)
        for (phase, share, there), number in sorted(alike.items()):
            here, likely = _binomial(number, there)
            base = _BASE ** _PHASES.index(phase)
            had = left // base % _BASE
            # More than all of the demand is as good as all of it.
            more = np.minimum(had[:, None] + here * share, _ALL) - had[:, None]
            left, place = np.unique(left[:, None] + more * base, return_inverse=True)
            joint = (chance[:, None] * likely).ravel()
            chance = np.bincount(place.ravel(), joint).astype(np.float64)
        both, prefill, decode = (left // _BASE**at % _BASE for at in range(len(_PHASES)))
        total = (both + np.minimum(prefill, decode)) / _ALL
        # Requests wait longer by the second; those who come before that is too long are served in time.
        lacks = np.maximum(_ROUNDING, 1.0 - total)
        in_time = np.minimum(1.0, own.ttft_s / np.maximum(longest_s * lacks, _ROUNDING))
        return float((chance * in_time).sum() / chance.sum())

    def _share(self, instance: Instance) -> int:
        """The thousandths of the demand that an instance carries at most."""
        service = self.problem.service(instance.service)
        per_s = instance.throughput_per_s / units_per_request(service, instance.phase)
        return round(_ALL * min(1.0, _BEYOND * per_s / max(service.rate_per_s, _ROUNDING)))


def _without(instances: Iterable[Instance], lost: Iterable[Instance]) -> list[Instance]:
    """Instances without some of them, each once."""
    left = list(instances)
    for one in lost:
        left.remove(one)
    return left


def _binomial(number: int, chance: float) -> tuple[Ints, Floats]:
    """Return how many of a number of things there are, each with a chance, and how likely that is."""
    from scipy.special import gammaln

    if chance >= 1.0:
        return np.array([number]), np.ones(1)
    here = np.arange(number + 1)
    ways = gammaln(number + 1) - gammaln(here + 1) - gammaln(number - here + 1)
    likely = np.exp(ways + here * math.log(chance) + (number - here) * math.log1p(-chance))
    some = likely > _RARE
    return here[some], likely[some]


def _count_spot(instance: Instance) -> int:
    return sum(node.market == "spot" for node in instance.nodes)


State = tuple[int, ...]
"""Instances of a service, as places on its menu, in order."""


class _Choices:
    """Instances that a service may have, the cheapest first of those that may keep its promises."""

    def __init__(self, name: str, problem: Problem, catalog: Catalog, max_usd: float) -> None:
        self.service, self.problem, self.catalog = problem.service(name), problem, catalog
        self.max_usd = max_usd
        self.optimism = 0.0
        """What the estimate is too high by, as far as simulations tell."""
        self.now: State = ()
        self._availability = Availability(problem)
        self._offered = frozenset(offer.key for offer in problem.offers)
        self._menu: list[Instance] = []
        self._places: dict[object, int] = {}
        self._waiting: list[tuple[float, int, State]] = []
        self._seen: set[State] = set()
        self._grown = 0

    @property
    def instances(self) -> list[Instance]:
        """The instances of the choice that was made last."""
        return [self._menu[at] for at in self.now]

    def add(self, instances: Iterable[Instance]) -> bool:
        """Put a choice on the list; say whether it may keep promises."""
        own = [one for one in instances if one.service == self.service.name]
        state = tuple(sorted(self._place(one) for one in own))
        self._push(sum(one.usd_per_hour for one in own), state)
        return self._may_do(state)

    def take_next(self) -> bool:
        """Make the next choice; False where there is none."""
        while self._waiting:
            usd, _, state = heapq.heappop(self._waiting)
            if self._grown < _MAX_GROWN:
                self._grown += 1
                for more_usd, more in self._grow(state):
                    self._push(usd + more_usd, more)
            if self._may_do(state):
                self.now = state
                return True
        return False

    def learn(self, kept: float) -> None:
        """Remember what the choice made last kept in simulation, which was too little."""
        over = max(0.0, self._estimate(self.now) - kept)
        # Simulations differ by luck: half of what they say, and the least of it.
        self.optimism = 0.5 * over if self.optimism <= 0.0 else min(self.optimism, 0.5 * over)

    def _estimate(self, state: State) -> float:
        own = [self._menu[at] for at in state]
        return self._availability.kept_at_most(self.service.name, own)

    def _may_do(self, state: State) -> bool:
        return self._estimate(state) - self.optimism >= self.service.target

    def _place(self, instance: Instance) -> int:
        key = instance.placement_key
        if key not in self._places:
            self._places[key] = len(self._menu)
            self._menu.append(instance)
        return self._places[key]

    def _push(self, usd: float, state: State) -> None:
        if state in self._seen or usd > self.max_usd * (1.0 + _ROUNDING):
            return
        self._seen.add(state)
        heapq.heappush(self._waiting, (round(usd, 9), len(self._seen), state))

    def _grow(self, state: State) -> Iterator[tuple[float, State]]:
        """Yield choices with an instance more, or one that stays instead of one on spot, and their price."""
        for at in sorted(set(state)):
            other = self._stays(at)
            if other is not None:
                rest = list(state)
                rest.remove(at)
                more = self._menu[other].usd_per_hour - self._menu[at].usd_per_hour
                yield max(0.0, more), tuple(sorted((*rest, other)))
        for at, one in enumerate(self._menu):
            yield one.usd_per_hour, tuple(sorted((*state, at)))

    def _stays(self, at: int) -> int | None:
        """The place on the menu of an instance with all nodes on demand; None where they are not on offer."""
        one = self._menu[at]
        if not _count_spot(one):
            return None
        nodes = tuple(node.model_copy(update={"market": "on-demand"}) for node in one.nodes)
        if not all((one.region_of(n), n.node_type, n.market) in self._offered for n in nodes):
            return None
        usd = price(self.problem, one.region, nodes)
        return self._place(one.model_copy(update={"nodes": nodes, "usd_per_hour": usd}))


class Redundancy:
    """The search for the cheapest plan that keeps its promises with spot nodes lost.

    `plan` asks the solver, `judge` simulates with losses. `first` is the plan of which too few requests do,
    as the verdict says.
    """

    def __init__(
        self,
        problem: Problem,
        catalog: Catalog,
        first: Plan,
        verdict: TrialOutcome,
        plan: Callable[[Spare, frozenset[str]], Plan],
        judge: Callable[[Plan], TrialOutcome],
    ) -> None:
        self.problem, self.catalog, self.first = problem, catalog, first
        self.services, self._plan, self._judge = verdict.short, plan, judge
        self.trials = 0

    def find(self) -> Plan | None:
        """Return the cheapest plan of those looked at that keeps its promises; None where none does."""
        whole: list[Plan] = []
        joined = True
        while joined:
            joined = False
            choices, more = self._climb()
            whole += more
            taken = [one.take_next() for one in choices.values()]
            while all(taken) and self.trials < _MAX_TRIALS:
                plan = self._build(choices)
                if plan is None:
                    break
                verdict = self._try(plan)
                if not verdict.short:
                    return plan
                # One that had kept its promises, by little, may not do so beside others: it chooses, too.
                joined = not verdict.short <= self.services
                if joined:
                    self.services |= verdict.short
                    break
                taken = []
                for name in sorted(verdict.short):
                    choices[name].learn(verdict.kept[name])
                    taken.append(choices[name].take_next())
        # Services may be in each other's way: then plans of the solver as they are.
        for plan in sorted(whole, key=lambda one: (one.objective or 0.0, one.content_hash())):
            if self.trials < _MAX_TRIALS + len(whole) and not self._try(plan).short:
                return plan
        return None

    def _try(self, plan: Plan) -> TrialOutcome:
        self.trials += 1
        return self._judge(plan)

    def _climb(self) -> tuple[dict[str, _Choices], list[Plan]]:
        """Plan with ever more to spare; return what services may choose from, and plans that may do."""
        whole: list[Plan] = []
        choices: dict[str, _Choices] = {}
        for ladder in ladders(self.problem, self.services):
            for spare in ladder:
                plan = self._plan(spare, self.services)
                served = plan.status in ("optimal", "feasible")
                if not choices:
                    # Nothing that costs more than to have no spot at all is of use.
                    for name in sorted(self.services):
                        own = [i.usd_per_hour for i in plan.instances if i.service == name]
                        most = sum(own) if served else math.inf
                        choices[name] = _Choices(name, self.problem, self.catalog, most)
                        choices[name].add(self.first.instances)
                if not served:
                    break
                may_do = [one.add(plan.instances) for one in choices.values()]
                if all(may_do):
                    whole.append(plan)
                    break
        return choices, whole

    def _build(self, choices: Mapping[str, _Choices]) -> Plan | None:
        """Return the plan of the choices beside the other services; None where it is not valid."""
        free: dict[object, list[Instance]] = defaultdict(list)
        instances: list[Instance] = []
        for one in self.first.instances:
            if one.service in self.services:
                free[one.placement_key].append(one)
            else:
                instances.append(one)
        taken = {one.id for one in self.first.instances}
        for one in [each for own in choices.values() for each in own.instances]:
            if free[one.placement_key]:
                instances.append(free[one.placement_key].pop(0))
                continue
            number = next(n for n in range(len(taken) + 1) if _name(one, n) not in taken)
            taken.add(_name(one, number))
            instances.append(one.model_copy(update={"id": _name(one, number), "kept": False}))
        if not on_offer(self.problem, instances):
            return None
        made = assemble(
            self.problem,
            pack(self.problem, instances),
            catalog=self.catalog,
            status="feasible",
            solver=self.first.solver,
        )
        # What they keep is not known yet.
        wrong = [v for v in validate(made, self.problem, self.catalog) if v.rule != "promise"]
        return None if wrong or made.status != "feasible" else made


def _name(instance: Instance, number: int) -> str:
    return f"{instance.service}-{instance.phase}-{number}"
