"""Operating a fleet: keep it as its file says while demand, prices and machines move, until stopped."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.control.decision.control_view import ControlPolicy
from atoll.control.operation.approval import ApprovalGate
from atoll.control.operation.controller_lease import LeaseHeldError, SupersededError
from atoll.control.operation.entrance import keep_entrance
from atoll.control.operation.fleet_change import FleetChange, find_change
from atoll.control.operation.fleet_home import FleetRecord, write_holder
from atoll.control.operation.operated import (
    FleetSource,
    OperatedFleet,
    open_fleet,
    open_gateways,
    renew_gateways,
    reopen,
)
from atoll.control.operation.operated_plans import MixSettler, make_planner
from atoll.control.operation.options import (
    OperationListener,
    OperationOptions,
    check_reach,
    home_for,
    make_record,
    open_fleet_entrance,
    token_file,
)
from atoll.core.errors import AtollError

if TYPE_CHECKING:
    from atoll.control.operation.control_loop import FleetController, LoopTurn

_ANSWER_S = 0.5
"""How often is looked for an answer while one is waited for."""


@dataclass(frozen=True)
class OperateRequest:
    """A fleet to operate, by its file.

    Targets and gateways are asked every `look_s` seconds, and a plan is made anew every `every_s` at least,
    in `deadline_s` at most. With `once` there is one turn only; with `on_page` changes are agreed to on the
    plan page of the dashboard, not by the listener.
    """

    file: Path
    every_s: float = 900.0
    look_s: float = 10.0
    deadline_s: float = 60.0
    once: bool = False
    on_page: bool = False
    options: OperationOptions = field(default_factory=OperationOptions)


class LiveOperation:
    """The life of a controller; `stop` ends it after its turn, and the fleet goes on serving."""

    def __init__(self, request: OperateRequest, listener: OperationListener) -> None:
        check_reach(request.options)
        self.request = request
        self.options = request.options
        self.listener = listener
        self.file = FleetSource(request.file)
        self.policy = ControlPolicy.for_problem(self.file.problem, epoch_s=request.every_s)
        self.home = home_for(self.file.problem, request.options.state)
        known = self.home.read()
        if not self.file.problem.is_settled:
            planner = make_planner(request.deadline_s)
            self.file.settle(MixSettler(() if known is None else known.mixes, planner))
        self.record = self._make_record(known)
        self.stop = threading.Event()
        self._said = ""
        self._waited_for: str | None = None
        self._file_error = ""
        ask = None if request.on_page else listener.approve
        self._gate = ApprovalGate(self.home.board, write_holder("operate"), time.time, ask)
        self._gate.on_refused = lambda: self.home.write_down("note", "a change was refused")

    def preview(self) -> FleetChange:
        """Look and decide once, and return what would change; nothing is."""
        fleet = self._open()
        gateways = open_gateways(
            self.home, self.record, self.file.problem, keep=False, say=self.listener.note
        )
        planner = make_planner(self.request.deadline_s)
        controller = fleet.controller(gateways, planner, write_holder("look"), policy=self.policy)
        turn = controller.turn(act=False)
        for name in turn.unreachable:
            self.listener.note(f"{name}: {controller.reasons[name]}")
        return find_change(turn.view, turn.decision, fleet.map.of_instance)

    def run(self, stop: threading.Event | None = None) -> None:
        """Take turns until `stop` is set."""
        self.stop = stop or self.stop
        self.home.make()
        try:
            self._run()
        except AtollError as error:
            self.home.write_down("failure", str(error))
            raise

    def _make_record(self, known: FleetRecord | None) -> FleetRecord:
        return make_record(self.options, self.file.problem, self.file.path, known, self.file.mixes)

    def _open(self) -> OperatedFleet:
        token = token_file(self.options, self.home, self.record)
        return open_fleet(self.home, self.record, self.file.problem, token, self.policy)

    def _run(self) -> None:
        fleet = self._open()
        controller = fleet.controller(
            open_gateways(self.home, self.record, self.file.problem, say=self._hear),
            make_planner(self.request.deadline_s),
            write_holder("operate"),
            policy=self.policy,
            busy_s=self.request.look_s + self.request.deadline_s,
        )
        self._introduce()
        self.home.write_down("controller", "begins to operate")
        try:
            while not self.stop.is_set():
                fleet = self._read_file(fleet, controller)
                self._take_turn(fleet, controller)
                if self.request.once:
                    break
                self._rest()
        finally:
            self._gate.leave()
            with contextlib.suppress(AtollError):
                fleet.lease.give_back(time.time())
            self.home.write_down("controller", "ends; the fleet goes on serving")

    def _introduce(self) -> None:
        """Have pages know of a fleet that is new, before the first change is agreed to: it is not up yet."""
        if self.request.on_page and self.home.read() is None:
            self.home.write(self.record.model_copy(update={"up": False}))
            self.home.keep_file(self.file.path)

    def _rest(self) -> None:
        """Wait for the next turn; an answer on a page is followed at once."""
        if not self._gate.is_waiting:
            self.stop.wait(self.request.look_s)
            return
        ends_s = time.monotonic() + self.request.look_s
        while not self.stop.is_set() and (left_s := ends_s - time.monotonic()) > 0:
            if self._gate.has_answer():
                return
            self.stop.wait(min(_ANSWER_S, left_s))

    def _read_file(self, fleet: OperatedFleet, controller: FleetController) -> OperatedFleet:
        """Read the fleet file if it has changed; one that is broken changes nothing."""
        try:
            if not self.file.read_again():
                return fleet  # as it was, or it still cannot be read
            known = self.record.model_copy(update={"entrance": fleet.record.entrance})
            self.record = self._make_record(known)
            fleet.record = self.record
            opened = reopen(fleet, controller, self.file.problem, self._hear)
        except AtollError as error:
            text = f"the fleet file is not followed: {error}"
            if text != self._file_error:
                self._file_error = text
                self._hear(text, "failure")
            return fleet
        self._file_error = ""
        self.home.write(self.record)
        self.home.keep_file(self.file.path)
        self.home.write_down("note", "the fleet file has changed")
        return opened

    def _take_turn(self, fleet: OperatedFleet, controller: FleetController) -> None:
        try:
            self._keep_entrance(fleet, controller)
            turn = controller.turn(approve=lambda turn: self._approve(fleet, controller, turn))
        except LeaseHeldError as error:
            # Another acts; this one stands by, and takes over when the other is gone.
            if self.request.once or isinstance(error, SupersededError):
                raise
            if self._said != str(error):
                self._said = str(error)
                self.listener.note(str(error))
            return
        except AtollError as error:
            if self.request.once:
                raise
            self._complain(str(error))
            return
        self._tell(turn, controller)
        if self.request.once and (turn.failures or turn.unreachable):
            failed = [*turn.failures, *(controller.reasons[n] for n in turn.unreachable)]
            raise AtollError(f"not all was done: {failed[0]}", hint="what served goes on serving")

    def _keep_entrance(self, fleet: OperatedFleet, controller: FleetController) -> None:
        """Start anew what has died of hub, gateway and graph servers; those of others are theirs to keep."""
        known = self.record.entrance
        if known is None or known.hub is None:
            return
        kept = keep_entrance(self.home, self.record.name, known)
        if kept != known:
            self.home.write_down(
                "note", "what had died of hub, gateway and graph servers was started anew"
            )
            self._use(fleet, controller, self.record.model_copy(update={"entrance": kept}))

    def _use(self, fleet: OperatedFleet, controller: FleetController, record: FleetRecord) -> None:
        """Go on with another entrance."""
        self.record = fleet.record = record
        self.home.write(record)
        before = controller.place.gateways
        gateways = renew_gateways(before, self.home, record, self.file.problem, self._hear)
        controller.place = replace(controller.place, gateways=gateways)

    def _hear(self, text: str, kind: str = "note") -> None:
        """Have history and whoever watches know."""
        self.listener.note(text)
        self.home.write_down(kind, text)

    def _approve(self, fleet: OperatedFleet, controller: FleetController, turn: LoopTurn) -> bool:
        """Return whether a change may be done, and have hub and gateway stand before the first one is."""
        change = find_change(turn.view, turn.decision, fleet.map.of_instance)
        if not self._gate.admit(change):
            if self._gate.is_waiting and self._gate.shown != self._waited_for:
                self._waited_for = self._gate.shown
                self.listener.note("a change waits for an answer on the plan page")
            return False
        if self.record.entrance is None or not self.record.up:
            entrance = open_fleet_entrance(self.options, self.home, self.record)
            record = self.record.model_copy(update={"entrance": entrance, "up": True})
            self._use(fleet, controller, record)
            self.home.keep_file(self.file.path)
        return True

    def _tell(self, turn: LoopTurn, controller: FleetController) -> None:
        for text in turn.failures:
            self.listener.note(f"failed: {text}")
        for name in turn.unreachable:
            text = f"{name}: {controller.reasons[name]}"
            if text != self._said:
                self.listener.note(text)
            self._said = text
        if not turn.unreachable and not turn.failures:
            self._said = ""
        self.listener.turned(turn)

    def _complain(self, text: str) -> None:
        """Have history and whoever watches know what is wrong, once for each thing."""
        if text != self._said:
            self._said = text
            self._hear(text, "failure")
