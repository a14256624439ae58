"""The loop around `decide`: observe, decide, write down, carry out.

A turn is one pass. It takes or renews the lease, asks every target what stands there, has `decide` say what
to do, writes that to the history, and does it in order. What a target refuses is written down, and stands in
the next view as a failed start, so that `decide` backs off. Nothing else is remembered that a controller
elsewhere would need: instances carry labels, and what they consist of is in the store before they start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from atoll.control.decision.control_view import (
    ControlPolicy,
    EndNotice,
    Memory,
    ObservedInstance,
    PaceSeen,
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
    reroute,
)
from atoll.control.decision.drift import find_drift
from atoll.control.decision.restate import restate_mix
from atoll.control.operation.controller_lease import LeaseTaker, SupersededError, keep_lease
from atoll.control.operation.fleet_history import History, HistoryEvent
from atoll.control.operation.sightings import Sightings
from atoll.core.errors import AtollError, InputError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.deploy.target import Deployer, DeployError, InstanceStatus, StartOrder
from atoll.plan.plan import Instance, Plan, RequestPath, Route
from atoll.plan.problem import Offer, Problem

_LOG = logging.getLogger(__name__)
KEPT_S = 3600.0
"""For how long a start that a target refused stays in views."""

Clock = Callable[[], float]
Order = Callable[[StartInstance, Plan], StartOrder]
"""Makes the commands of an instance's nodes, for its target."""


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """Reports of gateways on every service: demand, promises kept, and machines that will end.

    `serving` are the instances that they send requests to: these answer. `paces` is how fast tokens come.
    """

    traffic: tuple[TrafficSeen, ...] = ()
    promises: tuple[PromiseSeen, ...] = ()
    notices: tuple[EndNotice, ...] = ()
    serving: frozenset[str] = frozenset()
    paces: tuple[PaceSeen, ...] = ()


class Gateways(Protocol):
    """Who serves the fleet's requests."""

    def look(self, now_s: float) -> TrafficReport:
        """Return what was asked and kept lately; an empty report where nobody has answered for long."""
        ...

    def route(self, routes: Sequence[Route]) -> None:
        """Tell who serves which share from now on."""
        ...


class NoGateways:
    """Nobody to ask: what the fleet file says of demand is all that is known."""

    def look(self, now_s: float) -> TrafficReport:
        """Return an empty report."""
        del now_s
        return TrafficReport()

    def route(self, routes: Sequence[Route]) -> None:
        """Tell nobody."""


class InstanceStore:
    """Parts of instances, by their names in the fleet: written before they are started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, Instance] = {}

    @property
    def sightings_path(self) -> Path:
        """Where it stands what targets listed of them."""
        return self.folder.with_name("seen.json")

    def keep(self, instance: Instance) -> None:
        """Write an instance down."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(self._file(instance.id), instance.to_json() + "\n")
        self._known[instance.id] = instance

    def find(self, name: str) -> Instance | None:
        """Return what an instance consists of, None where nobody wrote it down."""
        if name not in self._known:
            path = self._file(name)
            if not path.exists():
                return None
            try:
                self._known[name] = Instance.model_validate_json(read_text_limited(path))
            except ValueError as error:
                raise InputError("not an instance", path=path, hint="move it away") from error
        return self._known[name]

    def forget(self, names: Sequence[str]) -> None:
        """Remove what is not needed any more."""
        for name in names:
            self._known.pop(name, None)
            self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        # The name becomes that of a file, which must not lie outside of the folder.
        if "/" in name or name.startswith("."):
            raise InputError(f"{name!r} cannot name an instance", field="instance")
        return self.folder / f"{name}.json"


@dataclass(frozen=True, slots=True)
class FleetPlace:
    """Where a fleet is operated from: its name, its problem, its targets by name, and who serves it.

    `target_of` says on which target an instance stands, by its nodes' regions for instance. `send_over` has
    graph servers send requests over other paths.
    """

    fleet: str
    problem: Problem
    targets: Mapping[str, Deployer]
    gateways: Gateways
    target_of: Callable[[Instance], str]
    order: Order
    send_over: Callable[[Sequence[RequestPath]], None] = lambda _paths: None


@dataclass(slots=True)
class LoopTurn:
    """Record of one turn: what it saw, decided and did."""

    view: View
    decision: Decision
    done: list[ControlAction] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    approved: bool = True


class PlanInForce(Frozen):
    """A plan that came in force at `made_s` (Unix time), the problem with the demand it is for, and its hash.

    The hash is that of the plan when it was adopted: history and labels have it.
    """

    made_s: float
    hash: str
    problem: Problem
    plan: Plan


KeepPlan = Callable[[PlanInForce], None]
"""Told of every plan that comes in force."""
Approve = Callable[[LoopTurn], bool]
"""Says whether what a turn decided may be done."""


class FleetController:
    """Keeps a fleet true, turn by turn."""

    def __init__(
        self,
        place: FleetPlace,
        store: InstanceStore,
        history: History,
        lease: LeaseTaker,
        plan: MakePlan,
        *,
        holder: str,
        clock: Clock,
        policy: ControlPolicy | None = None,
        valid_s: float = 90.0,
        keep_plan: KeepPlan | None = None,
    ) -> None:
        self.place, self.store, self.history = place, store, history
        self.policy = policy or ControlPolicy()
        self._lease, self._plan, self._clock = lease, plan, clock
        self._holder, self._valid_s = holder, valid_s
        self._keep_plan = keep_plan
        self._kept: Plan | None = None
        self.memory = Memory()
        self._refused: dict[str, ObservedInstance] = {}
        self._cleared: set[str] = set()
        self._sightings = Sightings(
            store.sightings_path,
            self.policy.missing_s,
            lambda name: store.find(name) is not None,
        )
        self._offers: dict[str, tuple[Offer, ...]] = {}
        self._superseded: SupersededError | None = None
        self._drifting: set[str] = set()
        self.reasons: dict[str, str] = {}
        """Why a target did not answer when it was last asked in vain."""

    def use_planner(self, plan: MakePlan) -> None:
        """Ask another planner from now on."""
        self._plan = plan

    def turn(self, *, act: bool = True, approve: Approve | None = None) -> LoopTurn:
        """Observe, decide and, with `act`, carry out; without it nothing changes anywhere.

        `approve` is shown what was decided before anything of it is done; what it refuses is forgotten. That
        gateways send nothing to what is gone needs no approval, and is told before anything is decided.
        Raises `SupersededError` when a target says that a later controller acts, and from then on.
        """
        if act and self._superseded is not None:
            raise self._superseded
        now_s = self._clock()
        # Who only looks needs no lease, and has no term.
        term = self._lease.take(self._holder, now_s, self._valid_s).term if act else 0
        held = keep_lease(self._lease, self._holder, self._clock, self._valid_s)
        with held if act else contextlib.nullcontext():
            view, unreachable = self._observe(now_s, term if act else None)
            if act:
                self._reroute(view, term)
            decision, memory = decide(view, self.memory, self.policy, self._plan)
        turn = LoopTurn(view, decision, unreachable=unreachable)
        if approve is not None:
            turn.approved = approve(turn)
        if not act or not turn.approved:
            return turn
        # Kept only now: what was not approved is forgotten.
        self.memory = memory
        self._write_down(turn, term)
        self._tell_plan(view)
        blocked = set(unreachable)
        for action in decision.actions:
            # The lease may have ended while targets were slow: who acts then must not be this one.
            self._lease.take(self._holder, self._clock(), self._valid_s)
            try:
                self._carry_out(action, turn, term, blocked)
                turn.done.append(action)
            except DeployError as error:
                self._note_refusal(turn, action, error, term)
                if error.kind == "superseded":
                    self._superseded = SupersededError(error.message, hint=error.hint)
                    raise self._superseded from error
        self._tidy(view)
        return turn

    def _reroute(self, view: View, term: int) -> None:
        """Tell gateways who serves what is left, before a plan is made."""
        ready = reroute(view, self.memory)
        if ready is None:
            return
        self._tell_ways(ready)
        self.memory = replace(self.memory, routes=ready.routes, paths=ready.paths)
        self._say("reweight", ready.reason, term)

    def _tell_ways(self, ways: ReweightRoutes) -> None:
        """Tell gateways and graph servers where requests go."""
        self.place.gateways.route(ways.routes)
        try:
            self.place.send_over(ways.paths)
        except (AtollError, OSError) as error:
            # What they were told last goes on; the others must not wait for it.
            _LOG.warning("graph servers are not told their paths: %s", error)

    def _observe(self, now_s: float, term: int | None) -> tuple[View, list[str]]:
        """Ask all targets; of one that does not answer, what it said last. Writes nothing without a term."""
        report = self.place.gateways.look(now_s)
        unreachable: list[str] = []
        for name, target in sorted(self.place.targets.items()):
            try:
                listed = target.list(self.place.fleet)
                self._sightings.hear(name, listed, now_s, report.serving)
                self._offers[name] = tuple(target.offers())
            except DeployError as error:
                unreachable.append(name)
                self.reasons[name] = str(error)
                if term is not None:
                    self._say("failure", f"{name}: {error}", term)
        self._refuse_strangers()
        if term is not None:
            self._sightings.write()
            self._note_drifts(report.paces, term)
        seen = {
            status.labels.instance: ObservedInstance(self._clear(status), instance)
            for statuses in self._sightings.by_target().values()
            for status in statuses
            if (instance := self.store.find(status.labels.instance) or status.instance) is not None
        }
        # What no target lists any more need not be remembered.
        self._cleared &= {one.status.handle for one in seen.values()}
        # A refused start stays until a target lists that name, or its time is over.
        self._refused = {
            name: one
            for name, one in self._refused.items()
            if name not in seen and now_s - one.status.since_s < KEPT_S
        }
        offers = tuple(offer for name in sorted(self._offers) for offer in self._offers[name])
        view = View(
            time_s=now_s,
            problem=self.place.problem,
            # Until some target has said what it offers, the offers of the fleet file hold.
            offers=offers or self.place.problem.offers,
            traffic=report.traffic,
            promises=report.promises,
            instances=tuple(one for _, one in sorted((seen | self._refused).items())),
            notices=report.notices,
            term=term or 0,
        )
        return view, unreachable

    def _note_drifts(self, paces: Sequence[PaceSeen], term: int) -> None:
        """Say once of each instance that it is not as fast as predicted, and once that it is again."""
        wanted = {one.id: one for one in self.memory.wanted}
        self._drifting &= wanted.keys()
        for pace in paces:
            instance = wanted.get(pace.instance)
            drift = None if instance is None else find_drift(pace, instance, self.place.problem)
            if drift is None:
                continue
            if drift.is_large and pace.instance not in self._drifting:
                self._drifting.add(pace.instance)
                self._say("note", drift.text(), term)
            elif not drift.is_large and pace.instance in self._drifting:
                self._drifting.discard(pace.instance)
                self._say("note", f"{pace.instance} is as fast as predicted again", term)

    def _refuse_strangers(self) -> None:
        """Raise InputError where something stands of which nobody wrote down what it is.

        Taken for nothing, it would be started a second time beside itself.
        """
        for name, statuses in sorted(self._sightings.by_target().items()):
            for status in statuses:
                known = self.store.find(status.labels.instance) or status.instance
                if known is None and status.state in ("starting", "ready", "draining"):
                    raise InputError(
                        f"{status.labels.instance} stands on {name}, and {self.store.folder} does not "
                        "say what it is",
                        hint="operate the fleet from the folder it was started from, or take it down",
                    )

    def _clear(self, status: InstanceStatus) -> InstanceStatus:
        """A target lists what failed for a while; once it was stopped it holds nothing any more."""
        if status.state == "failed" and status.handle in self._cleared:
            return replace(status, state="gone")
        return status

    def _carry_out(
        self, action: ControlAction, turn: LoopTurn, term: int, blocked: set[str]
    ) -> None:
        if isinstance(action, ReweightRoutes):
            self._tell_ways(action)
            return
        if isinstance(action, StartInstance):
            name = self.place.target_of(action.instance)
            self._refuse_blocked(name, blocked)
            assert self.memory.plan is not None
            # Before it stands: whoever finds it must be able to say what it is.
            self.store.keep(action.instance)
            order = self.place.order(action, self.memory.plan)
            avoided = dict.fromkeys((*order.avoid_hosts, *turn.decision.set_aside))
            self.place.targets[name].start(replace(order, avoid_hosts=tuple(avoided)))
            return
        if action.id in self._refused:
            # It never stood anywhere.
            one = self._refused[action.id]
            gone = replace(one.status, state="gone")
            self._refused[action.id] = replace(one, status=gone)
            return
        (instance,) = [one.instance for one in turn.view.instances if one.id == action.id]
        name = self.place.target_of(instance)
        self._refuse_blocked(name, blocked)
        target = self.place.targets[name]
        if isinstance(action, DrainInstance):
            target.drain(action.handle, term)
        else:
            target.stop(action.handle, term)
            # From now on it holds nothing, though its target may list it for a while.
            self._cleared.add(action.handle)
        self._sightings.end(action.id)

    def _refuse_blocked(self, name: str, blocked: set[str]) -> None:
        if name in blocked:
            raise DeployError(f"{name} does not answer", kind="unreachable")

    def _note_refusal(
        self, turn: LoopTurn, action: ControlAction, error: DeployError, term: int
    ) -> None:
        turn.failures.append(str(error))
        named = action.instance.id if isinstance(action, StartInstance) else None
        if isinstance(action, DrainInstance | StopInstance):
            named = action.id
        self._say("failure", str(error), term, instance=named)
        # Silence says nothing of the offer: only a refusal makes `decide` back off.
        if isinstance(action, StartInstance) and error.kind not in ("unreachable", "superseded"):
            status = InstanceStatus(
                handle="",
                labels=action.labels,
                state="failed",
                since_s=turn.view.time_s,
                reason=error.message,
                kind=error.kind,
            )
            self._refused[action.instance.id] = ObservedInstance(status, action.instance)

    def _write_down(self, turn: LoopTurn, term: int) -> None:
        """The history knows of everything before it is done."""
        # When it is written, not when the turn began: what was said meanwhile stands before it.
        decision, events, now_s = turn.decision, [], self._clock()
        plan_hash = self.memory.plan_hash or None
        if decision.planned:
            usd = decision.plan.usd_per_hour if decision.plan is not None else None
            text = "; ".join(decision.reasons) or "planned"
            events.append(
                HistoryEvent(
                    at_s=now_s,
                    kind="plan",
                    # The history takes no longer texts.
                    text=text[:4000],
                    term=term,
                    plan=plan_hash,
                    usd_per_hour=usd,
                )
            )
        kinds = {StartInstance: "start", DrainInstance: "drain", StopInstance: "stop"}
        for action in decision.actions:
            if isinstance(action, ReweightRoutes):
                events.append(_event(now_s, "reweight", action.reason, term, None, plan_hash))
                continue
            name = action.instance.id if isinstance(action, StartInstance) else action.id
            events.append(_event(now_s, kinds[type(action)], action.reason, term, name, plan_hash))
        self.history.add(*events)

    def _tell_plan(self, view: View) -> None:
        plan, memory = self.memory.plan, self.memory
        if self._keep_plan is None or plan is None or plan == self._kept:
            return
        self._kept = plan
        asked = memory.asked or view.problem
        rates = dict(memory.bands)
        services = tuple(
            restate_mix(
                service.model_copy(
                    update={"rate_per_s": rates.get(service.name, service.rate_per_s)}
                ),
                memory.mixes.get(service.name),
                self.policy,
            )
            for service in asked.services
        )
        made = PlanInForce(
            made_s=memory.planned_s or view.time_s,
            hash=memory.plan_hash,
            problem=asked.model_copy(update={"services": services}),
            plan=plan,
        )
        try:
            self._keep_plan(made)
        except (AtollError, OSError) as error:
            # A picture of the plan is no reason not to follow it.
            _LOG.warning("the plan in force is not written down: %s", error)

    def _say(self, kind: str, text: str, term: int, *, instance: str | None = None) -> None:
        event = HistoryEvent.parse(
            {
                "at_s": self._clock(),
                "kind": kind,
                "text": text[:4000],
                "term": term,
                "instance": instance,
            }
        )
        self.history.add(event)

    def _tidy(self, view: View) -> None:
        """Forget what instances consisted of that are gone and not wanted."""
        wanted = {one.id for one in self.memory.wanted}
        gone = [one.id for one in view.instances if one.status.state == "gone"]
        self.store.forget([name for name in gone if name not in wanted])


def _event(
    at_s: float, kind: str, text: str, term: int, instance: str | None, plan: str | None
) -> HistoryEvent:
    return HistoryEvent.parse(
        {
            "at_s": at_s,
            "kind": kind,
            "text": text[:4000],
            "term": term,
            "instance": instance,
            "plan": plan,
        }
    )
