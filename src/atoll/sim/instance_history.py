"""The instances of all plans of a run, and when each is there: plans are reconciled by `plan.plan_diff`."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.core.errors import UnknownNameError
from atoll.plan.plan import Instance, Node, Plan
from atoll.plan.plan_diff import diff
from atoll.sim.sim_arrays import DRAIN, FAIL, READY, REVIVE, WEIGHTS
from atoll.sim.sim_options import SimOptions


@dataclass
class StandingInstance:
    """An instance and when it is rented; `waits_for` is the one whose nodes it takes over."""

    number: int
    instance: Instance
    rented_s: float
    ready: bool
    waits_for: int | None = None


@dataclass(frozen=True)
class LifeEvent:
    """At `time_s` (None: when another instance has drained) something happens to an instance or a node.

    Of `WEIGHTS` with a node its instance gets nothing new from then on.
    """

    time_s: float | None
    kind: int
    instance: int
    node: str | None = None
    plan: int | None = None


@dataclass(frozen=True)
class RoutesLeft:
    """A plan of a run, by number, with the routes that it has once some instances, by number, are lost."""

    number: int
    lost: frozenset[int]
    plan: Plan


@dataclass
class FleetHistory:
    """All instances, what happens to them, and which number each id has under each plan."""

    plans: tuple[Plan, ...]
    standing: list[StandingInstance] = field(default_factory=list)
    events: list[LifeEvent] = field(default_factory=list)
    after_loss: list[RoutesLeft] = field(default_factory=list)
    """What plans have ready for losses of the run."""
    numbers: list[dict[str, int]] = field(default_factory=list)

    def add(self, instance: Instance, now_s: float, *, ready: bool) -> StandingInstance:
        """Add an instance and return it."""
        standing = StandingInstance(len(self.standing), instance, now_s, ready)
        self.standing.append(standing)
        return standing


def fleet_history(plan: Plan, options: SimOptions) -> FleetHistory:
    """Return the instances of a plan and of the plans that follow it, with what happens when.

    New instances are rented when their plan comes, and `startup_s` later they are ready, the weights change
    and instances that go begin to drain. One whose nodes get other layers drains at once, then starts.
    """
    epochs = sorted(options.epochs, key=lambda epoch: epoch.time_s)
    history = FleetHistory((plan, *(epoch.plan for epoch in epochs)))
    history.numbers.append(
        {instance.id: history.add(instance, 0.0, ready=True).number for instance in plan.instances}
    )
    for index, epoch in enumerate(epochs, 1):
        _reconcile(history, index, epoch.time_s, options.startup_s)
    for failure in options.failures:
        hit = _hit(history, failure.instance, failure.node, failure.host)
        for number, node in hit:
            if failure.drained_s is not None and failure.drained_s < failure.time_s:
                history.events.append(LifeEvent(failure.drained_s, WEIGHTS, number, node.id))
            history.events.append(LifeEvent(failure.time_s, FAIL, number, node.id))
            if failure.back_s is not None:
                history.events.append(LifeEvent(failure.back_s, REVIVE, number, node.id))
    hit_ever = {event.instance for event in history.events if event.kind == FAIL}
    for index, own in enumerate(history.plans):
        numbers = history.numbers[index]
        for loss in own.after_loss:
            lost = frozenset(numbers[name] for name in loss.instances if name in numbers)
            if lost and lost <= hit_ever:
                left = own.model_copy(update={"routes": loss.over(own.routes)})
                history.after_loss.append(RoutesLeft(index, lost, left))
    return history


def _reconcile(history: FleetHistory, index: int, now_s: float, startup_s: float) -> None:
    before, after = history.plans[index - 1], history.plans[index]
    change = diff(before, after)
    old = history.numbers[index - 1]
    instances = {instance.id: instance for instance in after.instances}
    numbers: dict[str, int] = {}
    switch_s = now_s + (startup_s if change.started else 0.0)
    for pair in change.kept:
        if not pair.relaid:
            numbers[pair.after] = old[pair.before]
            continue
        standing = history.add(instances[pair.after], now_s, ready=False)
        standing.waits_for = old[pair.before]
        numbers[pair.after] = standing.number
        history.events.append(LifeEvent(now_s, DRAIN, old[pair.before]))
        history.events.append(LifeEvent(None, READY, standing.number))
    for started in change.started:
        standing = history.add(instances[started.id], now_s, ready=False)
        numbers[started.id] = standing.number
        history.events.append(LifeEvent(switch_s, READY, standing.number))
    history.events.append(LifeEvent(switch_s, WEIGHTS, 0, plan=index))
    history.events += [LifeEvent(switch_s, DRAIN, old[stopped.id]) for stopped in change.stopped]
    history.numbers.append(numbers)


def _machine(instance: Instance, node: Node) -> tuple[str, str, str, str | int] | None:
    """Identity of a cut machine; None for a node that is a whole one."""
    machine = node.slot if node.host is None else node.host
    if node.gpu_ids is None or machine is None:
        return None
    return (instance.region_of(node), node.node_type, node.market, machine)


def _hit(
    history: FleetHistory, name: str | None, node: str | None, host: str | None
) -> list[tuple[int, Node]]:
    hit = [
        (standing.number, machine)
        for standing in history.standing
        for machine in standing.instance.nodes
        if (machine.host == host if host is not None else standing.instance.id == name)
        and (node is None or machine.id == node)
    ]
    # The other slices of a machine are gone with it.
    lost = {_machine(history.standing[number].instance, machine) for number, machine in hit}
    hit += [
        (standing.number, machine)
        for standing in history.standing
        for machine in standing.instance.nodes
        if _machine(standing.instance, machine) in lost - {None}
        and (standing.number, machine) not in hit
    ]
    if not hit:
        known = [
            machine.host or f"{standing.instance.id}/{machine.id}"
            for standing in history.standing
            for machine in standing.instance.nodes
        ]
        named = host or (name or "") + (f"/{node}" if node else "")
        raise UnknownNameError("machine of the plan", named, known)
    return hit
