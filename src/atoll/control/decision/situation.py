"""Inputs of one decision: the view beside what is remembered and what the policy says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.control.decision.backoff import HeldBack, hold_back, is_late
from atoll.control.decision.control_view import (
    ControlPolicy,
    Memory,
    Mixes,
    ObservedInstance,
    View,
)
from atoll.control.decision.instance_names import rename, stamp_name
from atoll.control.decision.lane_capacity import CarriedLoad, find_mixed, is_short
from atoll.control.decision.machine_pool import MachinePool
from atoll.control.decision.outlook import Outlook, look_ahead
from atoll.control.decision.path import PathQuestion
from atoll.control.decision.restate import restate_demand
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem


@dataclass(frozen=True, slots=True)
class Situation:
    """Inputs of one decision.

    `problem` is the fleet's with the demand to plan for and the offers of now; `observed` are the instances
    with what the plan in force says of them; `leaving` are those whose machines go soon, `ending` those of
    them whose streams must move now, `renewed` the old names of what will be replaced, and `outlook` is on
    demand later.
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
    outlook: Outlook

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
            if seen.status.state in ("starting", "ready")
            and seen.id not in self.leaving
            and seen.instance.service in services
            and not is_late(seen, self.view, self.policy)
        }

    def holding(self) -> dict[str, Instance]:
        """Return what holds machines, by name."""
        return {seen.id: seen.instance for seen in self.observed if seen.status.state != "gone"}

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
            recovering=self.recovering(),
        )

    def recovering(self) -> frozenset[str]:
        """Return services of which nothing should go though the plan has it no more.

        Of one that was short, got more lately and breaks promises still, requests wait that came before:
        until these are answered, later ones are late too. And where an executor cannot be replaced for now
        others seem to be of no use, but will be again.
        """
        view, policy = self.view, self.policy
        ready = [seen for seen in self.observed if seen.status.state == "ready"]
        late = {
            one.service
            for one in view.promises
            if one.requests >= policy.enough_requests and one.is_broken
        }
        found = {
            name
            for seen in ready
            if view.time_s - seen.status.since_s < policy.recover_s
            for name in late.intersection(seen.instance.services)
        }
        # What was held back is tried again with the next plan.
        if any(view.time_s < one.until_s + policy.epoch_s for one in self.memory.backoffs):
            mixed = find_mixed(self.problem, ())
            carried = CarriedLoad(self.problem, mixed, [seen.instance for seen in ready])
            found |= {
                service.name
                for service in self.problem.graph_services
                if is_short(carried.of_service(service.name)[service.name], service.demand_per_s)
            }
        return frozenset(found)

    def living(self) -> tuple[Instance, ...]:
        """Return the wanted instances that stand, or can be started now."""
        running = self.running()
        present = [one for one in self.wanted if one.id in running]
        missing = [one for one in self.wanted if one.id not in running]
        if not missing:
            return tuple(present)
        holding = (seen.instance for seen in self.observed if seen.status.state != "gone")
        pool = MachinePool(self.problem.offers, holding)
        for one in missing:
            if not self.held.blocks(one) and pool.has_room(one):
                pool.take(one)
                present.append(one)
        return tuple(present)


def look_around(
    view: View,
    before: Memory,
    memory: Memory,
    policy: ControlPolicy,
    rates: Mapping[str, float],
    mixes: Mixes,
) -> Situation:
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
    return Situation(
        view=view,
        memory=memory,
        policy=policy,
        problem=restate_demand(view, boosted, policy, mixes),
        observed=tuple(
            ObservedInstance(seen.status, planned.get(seen.id, seen.instance))
            for seen in view.instances
        ),
        in_force=in_force,
        held=hold_back(memory, view.time_s, policy, _count_machines(view)),
        leaving=leaving,
        ending=ending,
        renewed=renewed,
        outlook=look_ahead(view, memory.forecasts, policy),
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
    starting = {s.instance.role for s in view.instances if s.status.state == "starting"}
    noticed: dict[str, float] = {}
    for notice in view.notices:
        noticed[notice.name] = min(notice.ends_s, noticed.get(notice.name, notice.ends_s))
    leaving, ending = set(), set()
    for seen in view.instances:
        status = seen.status
        if status.state not in ("starting", "ready"):
            continue
        known = [] if status.ends_s is None else [status.ends_s]
        if noticed:
            hosts = (node.host for node in seen.instance.nodes if node.host is not None)
            # A notice may name the instance, its handle or a host.
            names = {status.handle, seen.id, *status.hosts, *hosts}
            known += [noticed[name] for name in names if name in noticed]
        if not known:
            continue
        life_s, left_s = min(known) - status.since_s, min(known) - view.time_s
        # Who waits for a machine need not wait longer than a replacement takes.
        if status.leave or left_s <= min(policy.lead_s, 0.5 * life_s):
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
            serves = seen.status.state in ("starting", "ready")
            over = not serves or one.id in leaving or is_late(seen, view, policy)
        if over:
            names[one.id] = stamp_name(one.id, view.time_s, taken)
            taken.add(names[one.id])
    return rename(plan, lambda one: names.get(one.id, one.id)), tuple(sorted(names))
