"""Deciding: from what is seen and remembered to what is done now, and why.

`decide` is a function of its arguments alone. What it does, in order:

1. count what failed, died or vanished since (`backoff`), and give what must be replaced a new name;
2. forecast every service's demand (`forecast`);
3. find reasons to plan; if there is a new one, ask the planner, with what runs as `running`;
4. judge the answer (`judge`): it takes the place of the plan in force, or not;
5. take the next safe step from what stands to the plan in force (`path`), and tell gateways who serves.

A plan that was refused, or none at all, changes nothing: the one in force goes on, and what it has lost is
started again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.control.decision.backoff import HeldBack, Lost, count_failures, hold_back, is_late
from atoll.control.decision.capacity import (
    CarriedLoad,
    demand_by_lane,
    find_mixed,
    find_short,
    is_short,
)
from atoll.control.decision.forecast import forecast
from atoll.control.decision.judge import Verdict, judge
from atoll.control.decision.names import hash_place, name_instances, rename, stamp_name
from atoll.control.decision.path import CapacityDip, PathQuestion, PathStep, foresee, next_steps
from atoll.control.decision.pool import MachinePool
from atoll.control.decision.restate import restate_demand, restate_supply
from atoll.control.decision.slots import move_slots
from atoll.control.decision.view import (
    ControlPolicy,
    ForecastState,
    Memory,
    ObservedInstance,
    TrafficSeen,
    View,
    adopt_running,
)
from atoll.control.decision.weights import spread_routes
from atoll.core.errors import AtollError
from atoll.deploy.door import Labels
from atoll.plan.plan import Instance, Plan, Route, count_machines
from atoll.plan.problem import Offer, Problem

MakePlan = Callable[[Problem], Plan]
"""A planner: from a problem to a plan; it may raise an `AtollError`."""


@dataclass(frozen=True, slots=True)
class StartInstance:
    """Bring an instance up under these labels."""

    instance: Instance
    labels: Labels
    reason: str


@dataclass(frozen=True, slots=True)
class DrainInstance:
    """Have an instance take no new requests, and end when its streams have."""

    id: str
    handle: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopInstance:
    """End an instance now: it does not serve, or had its time."""

    id: str
    handle: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReweightRoutes:
    """Tell gateways which instances serve which share of each service."""

    routes: tuple[Route, ...]
    reason: str


ControlAction = StartInstance | DrainInstance | StopInstance | ReweightRoutes


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, in this order; carrying out only the first few is safe.

    `reasons` say why a plan was made and what became of it, `waits` what cannot be done yet, and `dips` which
    lanes will carry less than is asked because of this step, or on the way to a plan adopted with it. `plan`
    is in force, `planned` whether the planner was asked, `set_aside` are hosts that nothing should start on.
    """

    actions: tuple[ControlAction, ...] = ()
    reasons: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()
    dips: tuple[CapacityDip, ...] = ()
    plan: Plan | None = None
    planned: bool = False
    adopted: bool = False
    set_aside: tuple[str, ...] = ()


def decide(
    view: View, memory: Memory, policy: ControlPolicy, plan: MakePlan
) -> tuple[Decision, Memory]:
    """Return what to do now and what to remember; see the module's text."""
    if memory.planned_s is None:  # until there is a plan, all that runs is wanted
        adopted_plan = adopt_running(view.problem, view.instances, memory.plan)
        memory = replace(memory, plan=adopted_plan)
    before = memory
    memory, lost = count_failures(view, memory, policy)
    rates, forecasts = _forecast_all(view, memory, policy)
    memory = replace(memory, forecasts=forecasts)
    situation = _look(view, before, memory, policy, rates)
    memory = replace(memory, plan=situation.in_force)
    triggers = _find_triggers(situation, lost)
    told: tuple[str, ...] = ()
    dips: tuple[CapacityDip, ...] = ()
    asked = adopted = False
    if _is_due(memory, triggers, view.time_s, policy):
        asked = True
        raised = _catch_up(situation)
        learned = _boost(situation, _remember_demand(memory, view.time_s, raised))
        if learned.forecasts != memory.forecasts:
            memory, rates = learned, rates | raised
            situation = _look(view, before, memory, policy, rates)
        memory, verdict, dips = _plan_anew(situation, memory, plan)
        adopted = verdict.adopt
        outcome = "adopted" if adopted else "kept"
        told = (*triggers.values(), f"{outcome}: {verdict.reason}")
        memory = replace(memory, tried_s=view.time_s, tried_for=tuple(sorted(triggers)))
        situation = replace(situation, in_force=memory.plan)
    if memory.plan is not None:
        plan_in_force = move_slots(memory.plan, situation.holding(), situation.problem.offers)
        memory = replace(memory, plan=plan_in_force)
        situation = replace(situation, in_force=plan_in_force)
    step = next_steps(situation.ask())
    actions, routes = _act(situation, memory, step)
    decision = Decision(
        actions=actions,
        reasons=told,
        waits=step.waits,
        dips=tuple(dict.fromkeys((*dips, *step.dips))),
        plan=memory.plan,
        planned=asked,
        adopted=adopted,
        set_aside=tuple(sorted(situation.held.hosts)),
    )
    return decision, replace(memory, routes=routes)


@dataclass(frozen=True, slots=True)
class _Situation:
    """What one decision works with.

    `problem` is the fleet's with the demand to plan for and the offers of now; `observed` are the instances
    with what the plan in force says of them; `leaving` are those whose machines go soon, `ending` those of
    them whose streams must move now, and `renewed` the old names of what will be replaced.
    """

    view: View
    memory: Memory
    policy: ControlPolicy
    problem: Problem
    observed: tuple[ObservedInstance, ...]
    in_force: Plan | None
    held: HeldBack
    leaving: frozenset[str]
    ending: frozenset[str]
    renewed: tuple[str, ...]

    @property
    def wanted(self) -> tuple[Instance, ...]:
        """The instances of the plan in force."""
        return () if self.in_force is None else self.in_force.instances

    def running(self) -> dict[str, Instance]:
        """Return what starts or serves and will stay, by name."""
        services = {service.name for service in self.problem.services}
        return {
            seen.id: seen.instance
            for seen in self.observed
            if seen.standing.state in ("starting", "ready")
            and seen.id not in self.leaving
            and seen.instance.service in services
            and not is_late(seen, self.view, self.policy)
        }

    def holding(self) -> dict[str, Instance]:
        """Return what holds machines, by name."""
        return {seen.id: seen.instance for seen in self.observed if seen.standing.state != "gone"}

    def awaited(self) -> dict[str, Instance]:
        """Return what is wanted and was never started, as far as is known, by the name it will have."""
        listed = {seen.id for seen in self.view.instances}
        listed |= {name for name, _, _ in self.memory.states}
        return {one.id: one for one in self.wanted if one.id not in listed}

    def ask(self, wanted: Sequence[Instance] | None = None) -> PathQuestion:
        """Return the question for the next step to the plan in force, or to another."""
        return PathQuestion(
            self.problem,
            self.observed,
            self.wanted if wanted is None else wanted,
            self.view.time_s,
            self.policy,
            self.held.blocks,
            late=frozenset(
                seen.id for seen in self.observed if is_late(seen, self.view, self.policy)
            ),
            ending=self.ending,
            spared=self.leaving - self.ending,
        )

    def living(self) -> tuple[Instance, ...]:
        """Return the wanted instances that stand, or can be started now."""
        running = self.running()
        standing = [one for one in self.wanted if one.id in running]
        missing = [one for one in self.wanted if one.id not in running]
        if not missing:
            return tuple(standing)
        holding = (seen.instance for seen in self.observed if seen.standing.state != "gone")
        pool = MachinePool(self.problem.offers, holding)
        for one in missing:
            if not self.held.blocks(one) and pool.has_room(one):
                pool.take(one)
                standing.append(one)
        return tuple(standing)


def _look(
    view: View, before: Memory, memory: Memory, policy: ControlPolicy, rates: Mapping[str, float]
) -> _Situation:
    """Put together what is decided on."""
    leaving, ending = _find_leaving(view, policy)
    in_force, renewed = _renew(view, before, memory.plan, leaving, policy)
    planned = {one.id: one for one in (in_force.instances if in_force else ())}
    boosted = dict(rates)
    written = {service.name: service.rate_per_s for service in view.problem.services}
    for state in memory.forecasts:
        if state.boost > 1.0 and state.service in written:
            rate = rates.get(state.service, written[state.service])
            boosted[state.service] = rate * state.boost
    return _Situation(
        view=view,
        memory=memory,
        policy=policy,
        problem=restate_demand(view, boosted, policy),
        observed=tuple(
            ObservedInstance(seen.standing, planned.get(seen.id, seen.instance))
            for seen in view.instances
        ),
        in_force=in_force,
        held=hold_back(memory, view.time_s, policy, _count_machines(view)),
        leaving=leaving,
        ending=ending,
        renewed=renewed,
    )


def _count_machines(view: View) -> int:
    """Return how many machines there are to stand on, those in use included."""
    return sum(offer.available for offer in view.offers or view.problem.offers)


def _find_leaving(view: View, policy: ControlPolicy) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of instances whose machines go soon, and of those that must be drained now.

    One that never had long, as a job with a short wall time, is replaced after half of its time at the
    earliest and drained in the last quarter of it. While what may replace it is starting it serves a little
    longer: a third of that time is enough to move streams.
    """
    starting = {s.instance.role for s in view.instances if s.standing.state == "starting"}
    noticed: dict[str, float] = {}
    for notice in view.notices:
        noticed[notice.name] = min(notice.ends_s, noticed.get(notice.name, notice.ends_s))
    leaving, ending = set(), set()
    for seen in view.instances:
        standing = seen.standing
        if standing.state not in ("starting", "ready"):
            continue
        known = [] if standing.ends_s is None else [standing.ends_s]
        if noticed:
            hosts = (node.host for node in seen.instance.nodes if node.host is not None)
            names = {standing.handle, seen.id, *standing.hosts, *hosts}
            known += [noticed[name] for name in names if name in noticed]
        if not known:
            continue
        life_s, left_s = min(known) - standing.since_s, min(known) - view.time_s
        if left_s <= min(policy.lead_s, 0.5 * life_s):
            leaving.add(seen.id)
        move_s = min(policy.move_s, 0.25 * life_s)
        if left_s <= (move_s / 3.0 if seen.instance.role in starting else move_s):
            ending.add(seen.id)
    return frozenset(leaving), frozenset(ending)


def _renew(
    view: View, before: Memory, plan: Plan | None, leaving: frozenset[str], policy: ControlPolicy
) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the plan in force with new names for what will not serve any more, and their old ones.

    What a target has never listed keeps its name: it was not started yet, or the list lags behind.
    """
    if plan is None:
        return None, ()
    states = {seen.id: seen for seen in view.instances}
    listed_before = {name for name, _, _ in before.states}
    taken = {*states, *(one.id for one in plan.instances)}
    names: dict[str, str] = {}
    for one in plan.instances:
        seen = states.get(one.id)
        if seen is None:
            over = one.id in listed_before
        else:
            serves = seen.standing.state in ("starting", "ready")
            over = not serves or one.id in leaving or is_late(seen, view, policy)
        if over:
            names[one.id] = stamp_name(one.id, view.time_s, taken)
            taken.add(names[one.id])
    return rename(plan, lambda one: names.get(one.id, one.id)), tuple(sorted(names))


def _forecast_all(
    view: View, memory: Memory, policy: ControlPolicy
) -> tuple[dict[str, float], tuple[ForecastState, ...]]:
    """Return the requests/s to plan for of services whose traffic is seen, and what was learned."""
    states = {state.service: state for state in memory.forecasts}
    rates: dict[str, float] = {}
    for traffic in view.traffic:
        state = states.get(traffic.service, ForecastState(traffic.service))
        rates[traffic.service], states[traffic.service] = forecast(
            traffic, state, view.time_s, policy
        )
    return rates, tuple(states[name] for name in sorted(states))


def _find_triggers(situation: _Situation, lost: Sequence[Lost]) -> dict[str, str]:
    """Return why a plan should be made now, in words, by a short name for each reason."""
    view, memory, policy = situation.view, situation.memory, situation.policy
    found: dict[str, str] = {}
    if memory.planned_s is None:
        found["first"] = "no plan is known yet"
    elif view.time_s - memory.planned_s >= policy.epoch_s:
        found["epoch"] = f"{policy.epoch_s:g} s since the last plan"
    if memory.asked is not None and memory.asked != view.problem:
        found["asked"] = "what the fleet asks for has changed"
    for one in lost:
        what = "did not start" if one.starting else "was lost"
        found[f"lost {one.id}"] = f"{one.id} {what}: {one.reason}"
    for name in situation.renewed:
        if name in situation.leaving:
            found[f"ends {name}"] = f"{name} ends soon"
    found |= _demand_triggers(situation)
    found |= _market_triggers(situation)
    for seen in view.promises:
        if seen.requests >= policy.enough_requests and seen.is_broken:
            text = f"{seen.service} keeps its promises for {seen.kept:.1%}, not {seen.target:.1%}"
            found[f"promise {seen.service}"] = text
    return found


def _demand_triggers(situation: _Situation) -> dict[str, str]:
    """Return services whose demand has left the band of the plan, and lanes that are short."""
    policy, problem = situation.policy, situation.problem
    bands = dict(situation.memory.bands)
    found: dict[str, str] = {}
    for service in problem.services:
        rate, planned = service.rate_per_s, bands.get(service.name)
        if planned is None:
            continue
        if not planned * (1.0 - policy.band_down) <= rate <= planned * (1.0 + policy.band_up):
            text = f"{service.name} is expected to get {rate:.3g} requests/s, planned {planned:.3g}"
            found[f"demand {service.name}"] = text
    living = situation.living()
    mixed = find_mixed(problem, living)
    carried = CarriedLoad(problem, mixed, living).lanes()
    for lane in find_short(carried, _find_pressing(situation, mixed)):
        found[f"short {lane}"] = f"{lane} will carry less than is asked"
    running = situation.running()
    for one in situation.wanted:
        if one.id not in running and situation.held.blocks(one):
            # By its place: a name changes with every plan, which would make a new reason of an old one.
            found[f"held {hash_place(one)}"] = f"{one.id} cannot be started there for now"
    return found


def _find_pressing(situation: _Situation, mixed: frozenset[str]) -> dict[str, float]:
    """Return what lanes must carry not to need a plan at once.

    That is a little less than what is planned for, which may never come, and no less than what is asked now.
    """
    now = {seen.service: seen.five_minutes.rate_per_s for seen in situation.view.traffic}
    pressing = demand_by_lane(situation.problem, mixed)
    for service in situation.problem.services:
        rate = service.rate_per_s
        asked = min(rate, now.get(service.name, rate))
        share = max(1.0 - situation.policy.slack, asked / rate if rate > 0.0 else 1.0)
        lanes = (service.name,) if service.name in mixed else map(str, service.roles)
        for lane in lanes:
            pressing[lane] *= share
    return pressing


def _market_triggers(situation: _Situation) -> dict[str, str]:
    """Return offers whose price or count has moved since the plan was made, where that may matter.

    What nobody uses and is dearer, or cannot be had any more, makes no other plan the best.
    """
    policy, found = situation.policy, {}
    used = count_machines(situation.wanted)
    if situation.memory.planned_s is None or situation.memory.offers == situation.view.offers:
        return {}
    before = {offer.key: offer for offer in situation.memory.offers}
    after = {offer.key: offer for offer in situation.view.offers}
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        name = " ".join(key)
        was, now = (0 if offer is None else offer.available for offer in (old, new))
        if key not in used and now <= was and _is_no_cheaper(old, new):
            continue
        if abs(now - was) > policy.count_moves * max(was, now) or (was == 0) != (now == 0):
            found[f"count {name}"] = f"{name}: {now} can be had, not {was}"
        if old is None or new is None:
            continue
        moved = abs(new.usd_per_hour - old.usd_per_hour)
        if moved > policy.price_moves * max(old.usd_per_hour, new.usd_per_hour):
            text = f"{name} costs ${new.usd_per_hour:.3g}/h, not ${old.usd_per_hour:.3g}/h"
            found[f"price {name}"] = text
    return found


def _is_no_cheaper(old: Offer | None, new: Offer | None) -> bool:
    """Return whether an offer, if it is still there, costs no less than before."""
    return new is None or (old is not None and new.usd_per_hour >= old.usd_per_hour)


def _is_due(
    memory: Memory, triggers: Mapping[str, str], now_s: float, policy: ControlPolicy
) -> bool:
    """Return whether to plan: there is a reason that was not planned for a moment ago."""
    if not triggers:
        return False
    if memory.tried_s is None or now_s - memory.tried_s >= policy.retry_s:
        return True
    return not triggers.keys() <= set(memory.tried_for)


def _catch_up(situation: _Situation) -> dict[str, float]:
    """Return more requests/s to plan for of services that ask for more now than all that starts will carry.

    They came faster than was foreseen; who only follows them is short again when that has started.
    """
    problem, policy = situation.problem, situation.policy
    living = situation.living()
    mixed = find_mixed(problem, living)
    carried = CarriedLoad(problem, mixed, living)
    planned = demand_by_lane(problem, mixed)
    raised: dict[str, float] = {}
    for seen in situation.view.traffic:
        service = next((one for one in problem.services if one.name == seen.service), None)
        if service is None or service.rate_per_s <= 0.0:
            continue
        share = seen.five_minutes.rate_per_s / service.rate_per_s
        lanes = carried.of_service(seen.service)
        if any(is_short(carries, share * planned[lane]) for lane, carries in lanes.items()):
            rate = max((1.0 + policy.band_up) * seen.five_minutes.rate_per_s, _lead(seen, policy))
            if rate > service.rate_per_s:
                raised[seen.service] = rate
    return raised


def _lead(seen: TrafficSeen, policy: ControlPolicy) -> float:
    """Return where a rising rate will be after a start-up, if it goes on; half more than now at most."""
    five, minute = seen.five_minutes.rate_per_s, seen.minute.rate_per_s
    # The middles of both windows are two minutes apart, and that of the last minute half a minute ago.
    slope = (minute - five) / 120.0
    return min(1.5 * five, minute + slope * (policy.startup_s + 30.0))


def _remember_demand(memory: Memory, now_s: float, raised: Mapping[str, float]) -> Memory:
    """Return the memory with rates that are planned for now, so that capacity stays for a while."""
    if not raised:
        return memory
    states = []
    for state in memory.forecasts:
        rate = raised.get(state.service)
        if rate is not None:
            higher = tuple(one for one in state.recent if one[1] > rate)
            state = replace(state, recent=(*higher, (now_s, rate)))
        states.append(state)
    return replace(memory, forecasts=tuple(states))


def _boost(situation: _Situation, memory: Memory) -> Memory:
    """Return the memory with more to plan for where promises are broken although all of the plan serves."""
    view, policy = situation.view, situation.policy
    ready = {seen.id for seen in view.instances if seen.standing.state == "ready"}
    waiting = {one.service for one in situation.wanted if one.id not in ready}
    seen = {one.service: one for one in view.promises if one.requests >= policy.enough_requests}
    states = {state.service: state for state in memory.forecasts}
    for name, promise in seen.items():
        state = states.get(name, ForecastState(name))
        since_s = None if state.boosted_s is None else view.time_s - state.boosted_s
        if since_s is not None and since_s < policy.startup_s + 300.0:
            continue  # what was done about it shows only after that
        boost = state.boost
        if promise.is_broken and name not in waiting:
            boost = min(policy.boost_most, boost * (1.0 + policy.boost))
        elif promise.kept >= promise.target:
            boost = max(1.0, boost / (1.0 + 0.5 * policy.boost))
        if boost != state.boost:
            states[name] = replace(state, boost=boost, boosted_s=view.time_s)
    return replace(memory, forecasts=tuple(states[name] for name in sorted(states)))


def _plan_anew(
    situation: _Situation, memory: Memory, plan: MakePlan
) -> tuple[Memory, Verdict, tuple[CapacityDip, ...]]:
    """Ask the planner and judge its answer; return the memory with the plan that is in force then."""
    view, policy = situation.view, situation.policy
    running = situation.running()
    going = [seen.instance for seen in situation.observed if seen.id in situation.leaving]
    answer: Plan | None = None
    # What must be replaced serves until the new one does: their machines are not free yet. If that leaves
    # too little, the replacement has to wait for them.
    for reserved in (going, []) if going else ([],):
        try:
            answer = plan(
                restate_supply(situation.problem, situation.held, running, reserved, policy)
            )
        except AtollError as error:
            return memory, Verdict(False, f"no plan: {error}"), ()
        if all(share >= 1.0 for share in answer.served_fraction.values()) and answer.instances:
            break
    if answer is None:
        return memory, Verdict(False, "no plan"), ()
    taken = (*(seen.id for seen in view.instances), *(one.id for one in situation.wanted))
    named = name_instances(answer, {**situation.awaited(), **running}, view.time_s, taken)
    named = move_slots(named, situation.holding(), situation.problem.offers)
    foreseen = _foresee_later(situation, named)
    unchanged = bool(named.instances) and {one.id for one in named.instances} == {
        one.id for one in situation.wanted
    }
    if unchanged:
        verdict = Verdict(True, "the plan in force is still the best")
    else:
        verdict = judge(
            situation.problem, named, situation.living(), policy, lambda: _worst_of(foreseen())
        )
    if answer.status == "infeasible":
        return memory, verdict, ()
    memory = replace(
        memory,
        asked=view.problem,
        planned_s=view.time_s,
        bands=tuple((service.name, service.rate_per_s) for service in situation.problem.services),
        offers=view.offers,
    )
    if not verdict.adopt:
        return memory, verdict, ()
    memory = replace(memory, plan=named)
    if unchanged and memory.plan_hash:
        return memory, verdict, ()
    return replace(memory, plan_hash=named.content_hash()[:16]), verdict, foreseen()


def _foresee_later(situation: _Situation, new: Plan) -> Callable[[], tuple[CapacityDip, ...]]:
    """Return a function that finds the dips on the way to a plan: once, and only if there may be any."""
    found: list[tuple[CapacityDip, ...]] = []

    def find() -> tuple[CapacityDip, ...]:
        if not found:
            question = situation.ask(new.instances)
            found.append(() if _has_room_for_all(question) else foresee(question).dips)
        return found[0]

    return find


def _worst_of(dips: Sequence[CapacityDip]) -> float:
    """Return the largest share of its demand that a lane loses in a dip."""
    shares = (
        (min(dip.before_per_s, dip.demand_per_s) - dip.after_per_s) / dip.demand_per_s
        for dip in dips
    )
    return max(shares, default=0.0)


def _has_room_for_all(asked: PathQuestion) -> bool:
    """Return whether all that is missing fits beside all that stands."""
    holding = [seen.instance for seen in asked.observed if seen.standing.state != "gone"]
    standing = {seen.id for seen in asked.observed if seen.standing.state != "gone"}
    pool = MachinePool(asked.problem.offers, holding)
    for one in asked.wanted:
        if one.id not in standing:
            if not pool.has_room(one):
                return False
            pool.take(one)
    return True


def _act(
    situation: _Situation, memory: Memory, step: PathStep
) -> tuple[tuple[ControlAction, ...], tuple[Route, ...] | None]:
    """Return the actions of a step in order, and the routes that gateways then have.

    Gateways hear of new weights first, so that nothing is sent to what is drained next.
    """
    actions: list[ControlAction] = []
    gone = {seen.standing.handle for seen, _ in (*step.drains, *step.stops)}
    serving = {
        seen.id: seen.instance.model_copy(update={"id": seen.id})
        if seen.instance.id != seen.id
        else seen.instance
        for seen in situation.observed
        if seen.standing.state == "ready" and seen.standing.handle not in gone
    }
    planned = () if situation.in_force is None else situation.in_force.routes
    routes = spread_routes(situation.problem, serving.values(), planned)
    if routes != memory.routes and (routes or memory.routes):
        actions.append(ReweightRoutes(routes, f"{len(serving)} instances serve"))
    actions += [
        StopInstance(seen.id, seen.standing.handle, why)
        for seen, why in step.stops
        if seen.standing.state == "failed"
    ]
    view = situation.view
    actions += [StartInstance(one, _label(view, memory, one), why) for one, why in step.starts]
    actions += [DrainInstance(seen.id, seen.standing.handle, why) for seen, why in step.drains]
    actions += [
        StopInstance(seen.id, seen.standing.handle, why)
        for seen, why in step.stops
        if seen.standing.state != "failed"
    ]
    return tuple(actions), routes


def _label(view: View, memory: Memory, instance: Instance) -> Labels:
    return Labels(
        fleet=view.problem.name,
        instance=instance.id,
        plan=memory.plan_hash,
        placement=hash_place(instance),
        service=instance.service,
        role=instance.role,
        term=view.term,
    )
