"""Deciding: from what is seen and remembered to what is done now, and why.

`decide` is a function of its arguments alone. What it does, in order:

1. count what failed, died or vanished since (`backoff`), and give what must be replaced a new name;
2. forecast the demand of every service and of its classes (`forecast`);
3. find reasons to plan; if there is a new one, ask the planner, with what runs as `running`;
4. judge the answer (`judge`): it takes the place of the plan in force, or not;
5. take the next safe step from what stands to the plan in force (`path`), and tell gateways who serves.

Planning may take a minute. Where something is gone that gateways send to, `reroute` says before it who serves
what is left.

A plan that was refused, or none at all, changes nothing: the one in force goes on, and what it has lost is
started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.control.decision.backoff import count_failures
from atoll.control.decision.control_view import (
    ControlPolicy,
    ForecastState,
    Memory,
    Mixes,
    PromiseSeen,
    TrafficSeen,
    View,
    adopt_running,
    list_mixes,
)
from atoll.control.decision.forecast import forecast, forecast_classes, min_rate
from atoll.control.decision.instance_names import hash_place, name_instances
from atoll.control.decision.lane_capacity import (
    CarriedLoad,
    demand_by_lane,
    find_mixed,
    is_short,
)
from atoll.control.decision.machine_pool import MachinePool, move_slots
from atoll.control.decision.path import CapacityDip, PathQuestion, PathStep, foresee, next_steps
from atoll.control.decision.plan_judge import Verdict, judge
from atoll.control.decision.plan_parts import judge_parts
from atoll.control.decision.restate import restate_supply
from atoll.control.decision.route_weights import spread_paths, spread_routes
from atoll.control.decision.situation import Situation, look_around
from atoll.control.decision.triggers import find_triggers, is_due
from atoll.core.errors import AtollError
from atoll.core.units import pluralize
from atoll.deploy.labels import Labels
from atoll.plan.plan import Instance, Plan, RequestPath, Route
from atoll.plan.problem import Problem

MakePlan = Callable[[Problem], Plan]
"""A planner: from a problem to a plan; it may raise an `AtollError`."""


PROMISES_SEEN_S = 300.0
"""Kept and broken promises are those of about the last five minutes."""


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
    """Tell gateways which instances serve which share of each service, and graph servers the paths."""

    routes: tuple[Route, ...]
    reason: str
    paths: tuple[RequestPath, ...] = ()


ControlAction = StartInstance | DrainInstance | StopInstance | ReweightRoutes


@dataclass(frozen=True, slots=True)
class Decision:
    """Actions to take now, in this order; carrying out only the first few is safe.

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
    # `look_around` needs the memory both before and after failures are counted.
    before = memory
    memory, lost = count_failures(view, memory, policy)
    rates, mixes, forecasts = _forecast_all(view, memory, policy)
    memory = replace(memory, forecasts=forecasts)
    situation = look_around(view, before, memory, policy, rates, mixes)
    memory = replace(memory, plan=situation.in_force)
    triggers = find_triggers(situation, lost)
    told: tuple[str, ...] = ()
    dips: tuple[CapacityDip, ...] = ()
    asked = adopted = False
    if is_due(memory, triggers, view.time_s, policy):
        asked = True
        # Demand that outran its forecast, and broken promises, count for more once a plan is made.
        raised = _catch_up(situation)
        learned = _boost(situation, _remember_demand(memory, view.time_s, raised))
        if learned.forecasts != memory.forecasts:
            memory, rates = learned, rates | raised
            situation = look_around(view, before, memory, policy, rates, mixes)
        memory, verdict, dips = _plan_anew(situation, memory, plan)
        adopted = verdict.adopt
        outcome = "adopted" if adopted else "kept"
        told = (*triggers.values(), f"{outcome}: {verdict.reason}")
        # Where no plan was found, the market that comes is compared with the one of now.
        seen = view.offers if memory.planned_s is None else memory.offers
        reasons = tuple(sorted(triggers))
        memory = replace(memory, tried_s=view.time_s, tried_for=reasons, offers=seen)
        situation = replace(situation, in_force=memory.plan)
    if memory.plan is not None:
        plan_in_force = move_slots(memory.plan, situation.holding(), situation.problem.offers)
        memory = replace(memory, plan=plan_in_force)
        situation = replace(situation, in_force=plan_in_force)
    step = next_steps(situation.ask())
    actions, told_ways = _act(situation, memory, step)
    decision = Decision(
        actions=actions,
        reasons=told,
        waits=step.waits,
        # A dip foreseen with a plan may be the one of this very step: it is told once.
        dips=tuple(dict.fromkeys((*dips, *step.dips))),
        plan=memory.plan,
        planned=asked,
        adopted=adopted,
        set_aside=tuple(sorted(situation.held.hosts)),
    )
    return decision, replace(memory, routes=told_ways[0], paths=told_ways[1])


def _forecast_all(
    view: View, memory: Memory, policy: ControlPolicy
) -> tuple[dict[str, float], Mixes, tuple[ForecastState, ...]]:
    """Return the requests/s to plan for of services whose traffic is seen, their mixes, and what was learned.

    Classes ask for other machines, so each is planned for by a forecast of its own: the service's rate is
    then that of all of them.
    """
    mixes: dict[str, dict[str, float]] = {}
    states = {state.service: state for state in memory.forecasts}
    policies = {service.name: policy.of(service) for service in view.problem.services}
    rates: dict[str, float] = {}
    for traffic in view.traffic:
        state = states.get(traffic.service, ForecastState(traffic.service))
        rates[traffic.service], states[traffic.service] = forecast(
            traffic, state, view.time_s, policies.get(traffic.service, policy)
        )
        own, states[traffic.service] = forecast_classes(
            traffic, states[traffic.service], view.time_s, policies.get(traffic.service, policy)
        )
        total = sum(own.values())
        if total > 0.0:
            rates[traffic.service] = max(total, rates[traffic.service])
            mixes[traffic.service] = {name: rate / total for name, rate in own.items()}
    return rates, mixes, tuple(states[name] for name in sorted(states))


def _catch_up(situation: Situation) -> dict[str, float]:
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
        # Lanes grow with the rate: this share of each lane's planned demand is asked now.
        share = min_rate(seen.five_minutes.rate_per_s) / service.rate_per_s
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
    slope = max(0.0, min_rate(minute, 60.0) - five) / 120.0
    return min(1.5 * five, minute + slope * (policy.startup_s + 30.0))


def _remember_demand(memory: Memory, now_s: float, raised: Mapping[str, float]) -> Memory:
    """Return the memory with rates that are planned for now, so that capacity stays for a while."""
    if not raised:
        return memory
    states = []
    for state in memory.forecasts:
        rate = raised.get(state.service)
        if rate is not None:
            # Falling rates only, as in `forecast`: one that a later one exceeds is never the highest again.
            higher = tuple(one for one in state.recent if one[1] > rate)
            state = replace(state, recent=(*higher, (now_s, rate)))
        states.append(state)
    return replace(memory, forecasts=tuple(states))


def _boost(situation: Situation, memory: Memory) -> Memory:
    """Return the memory with more to plan for where promises are broken although all of the plan serves."""
    view, policy = situation.view, situation.policy
    ready = {seen.id for seen in view.instances if seen.status.state == "ready"}
    # Where not all of the plan serves yet, a broken promise says nothing about the plan.
    waiting = {name for one in situation.wanted if one.id not in ready for name in one.services}
    # Nor does one that was broken before the latest of it served.
    waiting |= {
        name
        for seen in view.instances
        if seen.status.state == "ready" and view.time_s - seen.status.since_s < PROMISES_SEEN_S
        for name in seen.instance.services
    }
    seen: dict[str, list[PromiseSeen]] = {}
    for one in view.promises:
        if one.requests >= policy.enough_requests:
            seen.setdefault(one.service, []).append(one)
    states = {state.service: state for state in memory.forecasts}
    for name, promises in seen.items():
        state = states.get(name, ForecastState(name))
        since_s = None if state.boosted_s is None else view.time_s - state.boosted_s
        if since_s is not None and since_s < policy.startup_s + 300.0:
            continue  # what was done about it shows only after that
        boost = state.boost
        # Every group must keep its own share, as the service must.
        if any(promise.is_broken for promise in promises) and name not in waiting:
            boost = min(policy.boost_most, boost * (1.0 + policy.boost))
        elif all(promise.kept >= promise.target for promise in promises):
            # Down at half the pace of up, and never below what is forecast.
            boost = max(1.0, boost / (1.0 + 0.5 * policy.boost))
        if boost != state.boost:
            states[name] = replace(state, boost=boost, boosted_s=view.time_s)
    return replace(memory, forecasts=tuple(states[name] for name in sorted(states)))


def _plan_anew(
    situation: Situation, memory: Memory, plan: MakePlan
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
    # No name is used twice: what stands keeps its own, and what is wanted, too.
    taken = (*(seen.id for seen in view.instances), *(one.id for one in situation.wanted))
    named = name_instances(answer, running, view.time_s, taken, situation.awaited())
    named = move_slots(named, situation.holding(), situation.problem.offers)
    parts = None
    if situation.in_force is not None and answer.status != "infeasible":
        parts = judge_parts(
            situation.problem,
            named,
            situation.in_force,
            situation.living(),
            situation.outlook,
            lambda plan: _worst_of(_foresee_later(situation, plan)()),
        )
    if parts is not None:
        named = parts[0]
    foreseen = _foresee_later(situation, named)
    unchanged = bool(named.instances) and {one.id for one in named.instances} == {
        one.id for one in situation.wanted
    }
    if parts is not None:
        verdict = parts[1]
    elif unchanged:
        verdict = Verdict(True, "the plan in force is still the best")
    else:
        verdict = judge(
            situation.problem,
            named,
            situation.living(),
            situation.outlook,
            lambda: _worst_of(foreseen()),
        )
    # Nothing counts as planned for, so that the same reasons lead to another try.
    if answer.status == "infeasible":
        return memory, verdict, ()
    # Counts as planned for even if it is not adopted: the same demand and prices are no new reason.
    memory = replace(
        memory,
        asked=view.problem,
        planned_s=view.time_s,
        bands=tuple((service.name, service.rate_per_s) for service in situation.problem.services),
        mixes=list_mixes(situation.problem),
        offers=view.offers,
    )
    if not verdict.adopt:
        return memory, verdict, ()
    memory = replace(memory, plan=named)
    # A plan that has not changed keeps its hash, which is in the labels of what runs.
    if unchanged and memory.plan_hash:
        return memory, verdict, ()
    return replace(memory, plan_hash=named.content_hash()[:16]), verdict, foreseen()


def _foresee_later(situation: Situation, new: Plan) -> Callable[[], tuple[CapacityDip, ...]]:
    """Return a function that finds the dips on the way to a plan: once, and only if there may be any."""
    found: list[tuple[CapacityDip, ...]] = []

    def find() -> tuple[CapacityDip, ...]:
        if not found:
            question = situation.ask(new.instances)
            # Where all fits side by side there is no dip, and no need to walk the whole way.
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
    holding = [seen.instance for seen in asked.observed if seen.status.state != "gone"]
    present = {seen.id for seen in asked.observed if seen.status.state != "gone"}
    pool = MachinePool(asked.problem.offers, holding)
    for one in asked.wanted:
        if one.id not in present:
            if not pool.has_room(one):
                return False
            pool.take(one)
    return True


def _act(
    situation: Situation, memory: Memory, step: PathStep
) -> tuple[tuple[ControlAction, ...], tuple[tuple[Route, ...], tuple[RequestPath, ...]]]:
    """Return the actions of a step in order, and the routes and paths that are told then.

    Gateways hear of new weights first, so that nothing is sent to what is drained next.
    """
    actions: list[ControlAction] = []
    gone = {seen.status.handle for seen, _ in (*step.drains, *step.stops)}
    serving = {
        seen.id: seen.instance.model_copy(update={"id": seen.id})
        if seen.instance.id != seen.id
        else seen.instance
        for seen in situation.observed
        if seen.status.state == "ready" and seen.status.handle not in gone
    }
    routes = _route(situation.problem, serving.values(), situation.in_force)
    paths = spread_paths(situation.problem, serving.values(), situation.in_force, memory.mixes)
    if (routes != memory.routes and (routes or memory.routes)) or paths != memory.paths:
        actions.append(ReweightRoutes(routes, _describe_serving(len(serving)), paths))
    # What failed is stopped first, for it may hold machines that the starts need.
    actions += [
        StopInstance(seen.id, seen.status.handle, why)
        for seen, why in step.stops
        if seen.status.state == "failed"
    ]
    view = situation.view
    # Starts come before drains: who carries out only the first few has lost no capacity.
    actions += [StartInstance(one, _label(view, memory, one), why) for one, why in step.starts]
    # A controller may have died in the midst of a start; what it left would wait in vain for the rest.
    actions += [
        StartInstance(
            seen.instance.model_copy(update={"id": seen.id}),
            seen.status.labels.model_copy(update={"term": view.term}),
            "its start was cut short",
        )
        for seen in situation.observed
        if seen.status.unfinished
        and seen.status.state == "starting"
        and seen.status.handle not in gone
    ]
    actions += [DrainInstance(seen.id, seen.status.handle, why) for seen, why in step.drains]
    actions += [
        StopInstance(seen.id, seen.status.handle, why)
        for seen, why in step.stops
        if seen.status.state != "failed"
    ]
    return tuple(actions), (routes, paths)


def _route(
    problem: Problem, serving: Iterable[Instance], in_force: Plan | None
) -> tuple[Route, ...]:
    planned = () if in_force is None else in_force.routes
    ready = () if in_force is None else in_force.after_loss
    return spread_routes(problem, serving, planned, ready)


def reroute(view: View, memory: Memory) -> ReweightRoutes | None:
    """Return the routes over what is left, where something that gateways send to does not serve any more.

    They need no plan: told at once, they hold while one is made. None where all of it serves.
    """
    told = {name for route in memory.routes or () for name in route.instances}
    told |= {name for path in memory.paths for step in path.steps for name in step.instances}
    serving = {
        seen.id: seen.instance.model_copy(update={"id": seen.id})
        for seen in view.instances
        if seen.status.state == "ready" and (seen.id in told or seen.instance.is_executor)
    }
    gone = sorted(told - serving.keys())
    if not gone or not serving:
        return None
    routes = _route(view.problem, serving.values(), memory.plan)
    paths = spread_paths(view.problem, serving.values(), memory.plan, memory.mixes)
    # Paths may name executors that do not serve, where no others can do what they are planned for.
    if routes == (memory.routes or ()) and paths == memory.paths:
        return None
    text = f"{', '.join(gone)} gone: {_describe_serving(len(serving))}"
    return ReweightRoutes(routes, text, paths)


def _describe_serving(count: int) -> str:
    """Return in words how many instances serve."""
    return f"{pluralize(count, 'instance')} {'serves' if count == 1 else 'serve'}"


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
