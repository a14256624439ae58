"""Bringing a fleet up: from what runs to what is wanted, until all of it serves or something fails.

`bring_up` plans, has the change approved, opens hub and gateway, and takes turns of the controller until
everything wanted serves and nothing else stands. `preview` only says what it would do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.control.decision.control_view import ControlPolicy
from atoll.control.operation.controller_lease import LeaseHeldError
from atoll.control.operation.entrance import close_entrance
from atoll.control.operation.fleet_change import FleetChange, find_change
from atoll.control.operation.fleet_home import FleetHome, FleetRecord, write_holder
from atoll.control.operation.operated import OperatedFleet, open_fleet, open_gateways
from atoll.control.operation.operated_plans import (
    MixSettler,
    force_plan,
    foresee_dips,
    make_planner,
    pin_plan,
    put_phases_together,
)
from atoll.control.operation.options import (
    OperationListener,
    OperationOptions,
    check_reach,
    home_for,
    make_record,
    open_fleet_entrance,
    token_file,
)
from atoll.core.errors import AtollError, InfeasibleError, UsageError
from atoll.deploy.target import DeployError
from atoll.plan.problem import Problem

if TYPE_CHECKING:
    from atoll.control.decision.control_view import ObservedInstance, View
    from atoll.control.decision.path import CapacityDip
    from atoll.control.operation.control_loop import FleetController, LoopTurn
    from atoll.control.operation.fleet_home import Entrance
    from atoll.plan.choice import ModelMix
    from atoll.plan.plan import Plan

# A look at this machine costs a few files, one at any other target a call to it.
LOOK_HERE_S = 0.5
LOOK_ELSEWHERE_S = 5.0
_OVER = ("failed", "gone")
_GIVE_UP = 3
"""Looks in a row in which a target does not answer until nobody waits for it any more."""
_NEVER_S = 86_400.0
"""How long what has failed is not tried again: whoever waits is told instead."""


class NotUpError(AtollError):
    """Something of a fleet did not come up."""


class ChangeRefusedError(NotUpError):
    """Whoever was asked did not agree to a change, so that nothing was changed."""


@dataclass(frozen=True)
class UpRequest:
    """A fleet to bring up.

    `source` is its fleet file, which `atoll operate` follows later. `plan` is the plan to carry out, called
    `plan_name` in the history; None has one made, in `deadline_s` seconds at most. `wait_s` is how long to
    wait until all of it serves, 0 not at all.
    """

    problem: Problem
    source: Path
    plan: Plan | None = None
    plan_name: str = "a plan"
    deadline_s: float = 60.0
    wait_s: float = 1800.0
    options: OperationOptions = field(default_factory=OperationOptions)


@dataclass(frozen=True)
class BroughtUp:
    """A fleet that was brought up; `serves` is False where nobody waited until all of it does."""

    home: FleetHome
    record: FleetRecord
    instances: tuple[str, ...]
    serves: bool


def bring_up(request: UpRequest, listener: OperationListener) -> BroughtUp | None:
    """Bring a fleet up, or from what runs to what is wanted; None where the change was not approved."""
    home, record, request = _prepare(request, listener)
    home.make()
    try:
        return Rollout.open(request, home, record, listener).run()
    except AtollError as error:
        last = home.history.read(last=1)
        if not last or (last[0].kind, last[0].text) != ("failure", str(error)):
            home.write_down("failure", str(error))  # unless the controller has said so
        raise


def preview(
    request: UpRequest, listener: OperationListener, folder: Path | None = None
) -> FleetChange:
    """Return what bringing a fleet up would change; scripts, manifests or tasks go into `folder`.

    NoCommandError: nothing can start some of its instances.
    """
    from atoll.control.operation.dry_run import OfflineTargets, list_orders, write_orders

    home, record, request = _prepare(request, listener)
    offline = OfflineTargets(record.targets, request.problem.offers, home.folder)
    token = token_file(request.options, home, record)
    fleet = offline.open(home, record, request.problem, token)
    rollout = Rollout.of(request, fleet, listener, keep=False)
    with listener.working(f"planning {record.name}", request.deadline_s):
        turn = rollout.controller.turn(act=False)
    for line in offline.notes:
        listener.note(f"note: {line}")
    rollout.refuse_impossible(turn)
    orders = list_orders(fleet, turn)
    change = rollout.find_change(turn)
    if folder is not None:
        for path in write_orders(fleet, orders, folder):
            listener.note(f"wrote {path}")
    return change


def _prepare(
    request: UpRequest, listener: OperationListener
) -> tuple[FleetHome, FleetRecord, UpRequest]:
    """Return home and record of a fleet, and the request with a problem of plain services."""
    check_reach(request.options)
    problem = put_phases_together(request.problem)
    home = home_for(problem, request.options.state)
    problem, mixes = _settle(request, problem, listener)
    known = home.read()
    record = make_record(request.options, problem, request.source, known, mixes, request.plan)
    return home, record, replace(request, problem=problem)


def _settle(
    request: UpRequest, problem: Problem, listener: OperationListener
) -> tuple[Problem, tuple[ModelMix, ...]]:
    """Return the problem of plain services, and which models answer its choices: as planned, or as given."""
    if request.plan is not None and problem.fit_mixes(request.plan.mixes) is None:
        raise UsageError(
            f"{request.plan_name} does not say which models answer as the fleet file wants it",
            field="fleet",
            hint="plan the fleet file again",
        )
    if problem.is_settled:
        return problem, ()
    known = () if request.plan is None else request.plan.mixes
    keeper = MixSettler(known, make_planner(request.deadline_s))
    with listener.working(f"choosing models of {problem.name}", request.deadline_s):
        return keeper.settle(problem), keeper.mixes


def _list_failed(fleet: OperatedFleet) -> tuple[tuple[str, str, float], ...]:
    """Return what has failed before: whoever runs this again wants it tried again, not backed off from."""
    found = []
    for target in fleet.targets.values():
        with contextlib.suppress(AtollError):  # the first turn says what is wrong
            found += [
                (each.labels.instance, "failed", each.since_s)
                for each in target.list(fleet.problem.name)
                if each.state == "failed"
            ]
    return tuple(sorted(found))


@dataclass
class Rollout:
    """A fleet on its way to a plan since `begun_s`; `opened`: hub and gateway were started for it."""

    request: UpRequest
    fleet: OperatedFleet
    controller: FleetController
    listener: OperationListener
    begun_s: float
    opened: bool = False
    failed: dict[str, None] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(
        cls, request: UpRequest, home: FleetHome, record: FleetRecord, listener: OperationListener
    ) -> Rollout:
        """Return the rollout of a fleet whose targets are opened."""
        token = token_file(request.options, home, record)
        fleet = open_fleet(home, record, request.problem, token, ControlPolicy())
        return cls.of(request, fleet, listener)

    @classmethod
    def of(
        cls,
        request: UpRequest,
        fleet: OperatedFleet,
        listener: OperationListener,
        *,
        keep: bool = True,
    ) -> Rollout:
        """Return a rollout with a controller of its own; without `keep` nothing that it sees is kept."""
        plan = request.plan
        controller = fleet.controller(
            open_gateways(fleet.home, fleet.record, fleet.problem, keep=keep, say=listener.note),
            make_planner(request.deadline_s) if plan is None else pin_plan(plan),
            write_holder("up"),
            policy=ControlPolicy(backoff_s=_NEVER_S, backoff_max_s=_NEVER_S),
            busy_s=request.deadline_s,
        )
        if plan is not None:
            # A turn that does nothing says what stands, which the given plan is fitted to.
            controller.memory = force_plan(plan, controller.turn(act=False).view)
        # Failures of earlier runs count as seen, so that they hold nothing back now.
        controller.memory = replace(controller.memory, states=_list_failed(fleet))
        return cls(request, fleet, controller, listener, time.time())

    @property
    def home(self) -> FleetHome:
        """The fleet's folder."""
        return self.fleet.home

    @property
    def record(self) -> FleetRecord:
        """How the fleet is operated."""
        return self.fleet.record

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of all instances that are to serve."""
        return tuple(one.id for one in self.controller.memory.wanted)

    def run(self) -> BroughtUp | None:
        """Have the change approved and carried out; None where it was refused."""
        name = self.record.name
        try:
            with self.listener.working(f"planning {name}", self.request.deadline_s):
                turn = self.controller.turn(approve=self._approve)
            if not turn.approved:
                return None
            serves = self.wait(turn, self.request.wait_s)
            return BroughtUp(self.home, self.record, self.wanted, serves)
        except LeaseHeldError as error:
            raise LeaseHeldError(
                error.message, hint=f"it follows {self.record.source} by itself; or {error.hint}"
            ) from error
        except KeyboardInterrupt:
            self.listener.note(f"what was begun goes on: see `atoll status {name}`")
            raise
        finally:
            # Given back, so that the next controller need not wait until it runs out.
            with contextlib.suppress(AtollError):
                self.fleet.lease.give_back(time.time())

    def _approve(self, turn: LoopTurn) -> bool:
        """Have the change approved, and open the entrance, so that what is started finds a hub to join."""
        for name in turn.unreachable:
            raise DeployError(f"{name}: {self.controller.reasons[name]}", kind="unreachable")
        self.refuse_impossible(turn)
        change = self.find_change(turn)
        if not self.listener.approve(change):
            return False
        assert turn.decision.plan is not None
        # What was shown is what is done, whatever a second look would find.
        self.controller.use_planner(pin_plan(turn.decision.plan))
        known = self.record.entrance
        entrance = open_fleet_entrance(self.request.options, self.home, self.record)
        # Only what was opened for this rollout is closed again where nothing comes up.
        self.opened = entrance.hub is not None and (known is None or entrance.hub != known.hub)
        self.fleet.record = self.record.model_copy(update={"entrance": entrance, "up": True})
        self.home.write(self.record)
        self.home.keep_file(Path(self.record.source))
        if self.request.plan is not None:
            # The history says that nobody planned: somebody chose.
            self.home.write_down(
                "plan",
                f"{self.request.plan_name} was given",
                plan=self.controller.memory.plan_hash,
                usd_per_hour=change.usd_after,
            )
        # The controller was made before this entrance was known.
        if entrance != known:
            gateways = open_gateways(
                self.home, self.record, self.fleet.problem, say=self.listener.note
            )
            self.controller.place = replace(self.controller.place, gateways=gateways)
        return True

    def find_change(self, turn: LoopTurn) -> FleetChange:
        """Return what is about to change; of a plan that was given, the path there was not foreseen yet."""
        dips: tuple[CapacityDip, ...] = ()
        if self.request.plan is not None:
            dips = foresee_dips(self.controller.memory.wanted, turn.view, self.controller.policy)
        return find_change(turn.view, turn.decision, self.fleet.map.of_instance, dips)

    def refuse_impossible(self, turn: LoopTurn) -> None:
        """Raise where there is nothing to bring up, with what stands in the way."""
        unclaimed = self.fleet.map.list_unclaimed(turn.view.problem.offers)
        if unclaimed:
            self.listener.note(f"note: no target has the region {', '.join(unclaimed)} of the pool")
        if not turn.view.instances and not any(offer.available for offer in turn.view.offers):
            # Also where a plan was given: what it wants would be waited for in vain.
            raise _explain_empty(turn.view, self.record.targets.names)
        if turn.decision.plan is not None and turn.decision.plan.instances:
            return
        why = turn.decision.reasons[-1] if turn.decision.reasons else "no reason is known"
        raise InfeasibleError(
            f"there is no plan for {turn.view.problem.name}: {why.removeprefix('kept: ')}",
            hint=f"`atoll plan {self.record.source}` says more",
        )

    def wait(self, turn: LoopTurn, max_s: float) -> bool:
        """Take turns until everything serves; False where nobody wants to wait.

        Raises with the reason of what failed, or what it still waits for when the time is over.
        """
        names = self.record.targets.names
        every_s = LOOK_HERE_S if names == ("local",) else LOOK_ELSEWHERE_S
        until_s = time.monotonic() + max_s
        with self.listener.working("starting", max_s) as say:
            silent = 0
            while True:
                self._find_failures(turn)
                late = time.monotonic() > until_s
                if self.failed and (late or not self._is_starting(turn)):
                    self._give_up()
                # Looked at before `max_s`: what serves already needs no waiting.
                if self._is_settled(turn):
                    break
                if max_s <= 0:
                    return False
                if late:
                    raise NotUpError(
                        f"not all of {self.record.name} serves yet: {self._describe(turn)}",
                        hint=f"`atoll status {self.record.name}` shows how far it is; `wait` waits longer",
                    )
                say(self._describe(turn))
                time.sleep(every_s)
                turn = self.controller.turn()
                silent = silent + 1 if turn.unreachable else 0
                if silent >= _GIVE_UP:
                    name = turn.unreachable[0]
                    raise NotUpError(f"{name}: {self.controller.reasons[name]}")
            say("waiting until the gateway has heard of all models")
            self._await_gateway(until_s)
        return True

    def _find_failures(self, turn: LoopTurn) -> None:
        """Note why instances that were started did not come up."""
        failed = [
            f"{seen.id}: {seen.status.reason}"
            for seen in self._look(turn).values()
            if seen.status.state == "failed" and seen.status.since_s >= self.begun_s - 1.0
        ]
        refused = [text for text in turn.failures if not any(text in each for each in failed)]
        self.failed |= dict.fromkeys((*refused, *failed))

    def _is_starting(self, turn: LoopTurn) -> bool:
        """Whether something is still on its way: it may come up though another has not."""
        return any(seen.status.state == "starting" for seen in turn.view.instances)

    def _give_up(self) -> None:
        """End what failed; where nothing is left, hub and gateway go as they came."""
        name, failed = self.record.name, list(self.failed)
        turn = self.controller.turn()
        left = [s for s in turn.view.instances if s.status.state in ("starting", "ready")]
        if not left and self.opened and self.record.entrance is not None:
            close_entrance(self.record.entrance)
            self.home.write(self.record.model_copy(update={"up": False}))
            raise NotUpError(
                f"nothing of {name} came up: {failed[0]}", hint=f"`atoll history {name}`"
            )
        raise NotUpError(
            f"not all of {name} came up, {len(left)} serve or start: {failed[0]}",
            hint=f"`atoll operate {name}` tries again, `atoll down {name}` ends it",
        )

    def _look(self, turn: LoopTurn) -> dict[str, ObservedInstance]:
        """Return instances by name, and tell what has changed of them since the last look."""
        found = {seen.id: seen for seen in turn.view.instances}
        for name, seen in found.items():
            state = seen.status.state
            if self.shown.get(name) != state and seen.status.since_s >= self.begun_s:
                self.shown[name] = state
                why = f": {seen.status.reason}" if seen.status.reason else ""
                self.listener.note(f"{name} is {state}{why}")
        return found

    def _is_settled(self, turn: LoopTurn) -> bool:
        seen, wanted = self._look(turn), self.wanted
        ready = all(name in seen and seen[name].status.state == "ready" for name in wanted)
        # What failed stays listed for a while, though it was stopped and holds nothing.
        others = [n for n in seen if n not in wanted and seen[n].status.state not in _OVER]
        return ready and not others and not turn.unreachable

    def _describe(self, turn: LoopTurn) -> str:
        """Say how far it is, and what of it is waited for."""
        seen, wanted = {one.id: one for one in turn.view.instances}, self.wanted
        ready = [n for n in wanted if n in seen and seen[n].status.state == "ready"]
        waiting = []
        for name in (*wanted, *(n for n in seen if n not in wanted)):
            state = seen[name].status.state if name in seen else "not started"
            if name in ready or (state in _OVER and name not in wanted):
                continue
            reason = seen[name].status.reason if name in seen else ""
            waiting.append(f"{name} is {state}{f' ({reason})' if reason else ''}")
        return f"{len(ready)} of {len(wanted)} ready; {', '.join(waiting) or 'routes are told'}"

    def _await_gateway(self, until_s: float) -> None:
        """Wait until the gateway serves every model: what is ready has yet to be announced in the fabric."""
        entrance = self.record.entrance
        if entrance is None or entrance.url is None:
            return
        wanted = {name for one in self.controller.memory.wanted for name in one.services}
        while True:
            models = asyncio.run(_ask_models(entrance))
            missing = wanted - set(models or ())
            # Who would not say without a key never will: waiting for it would not end.
            if models is None or not missing:
                return
            if time.monotonic() > until_s:
                raise NotUpError(
                    f"the gateway at {entrance.url} does not serve {', '.join(sorted(missing))} yet",
                    hint=f"`atoll logs {self.record.name} gateway`",
                )
            time.sleep(LOOK_HERE_S)


def _explain_empty(view: View, names: tuple[str, ...]) -> AtollError:
    kinds = ", ".join(sorted({offer.node_type for offer in view.problem.offers}))
    regions = ", ".join(sorted({offer.region for offer in view.problem.offers}))
    if names == ("local",):
        return UsageError(
            f"this machine has none of the pool's machines ({kinds} in {regions})",
            hint="`pretend` lets processes stand for them, `stand_in` with a small model; or name another "
            "target with `on`",
        )
    return UsageError(
        f"none of the pool's machines ({kinds} in {regions}) can be had on {', '.join(names)}",
        hint="check the pool's regions and node types against the target's",
    )


async def _ask_models(entrance: Entrance) -> list[str] | None:
    """Return what a gateway serves; None where it would not say without a key."""
    from atoll.runtime.http.http_client import FetchError, fetch

    # The admin socket needs no key.
    socket = entrance.admin_socket
    page = "/v1/models" if socket is None else "/atoll/v1/status"
    try:
        code, body = await fetch(f"{entrance.url}{page}", unix_socket=socket)
        if code in (401, 403):
            return None
        said = json.loads(body)
        return list(said["models"]) if socket else [str(each["id"]) for each in said["data"]]
    except (FetchError, ValueError, KeyError, TypeError):
        return []
