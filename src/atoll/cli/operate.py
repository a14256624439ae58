"""`atoll operate`: the controller, which keeps a fleet right while demand, prices and machines move."""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from pydantic import Field

from atoll.cli.beside import DashboardOptions, check_dashboard, start_dashboard
from atoll.cli.operating import (
    OperatingSettings,
    ask,
    check_can_ask,
    check_reach,
    home_for,
    make_record,
    open_fleet_entrance,
    token_file,
)
from atoll.cli.options import verb
from atoll.cli.serving import need_fabric, need_serving
from atoll.core.errors import AtollError, UsageError
from atoll.core.quantities import Duration
from atoll.report.terminal import console, emit, note

if TYPE_CHECKING:
    from atoll.control.decision.view import ControlPolicy
    from atoll.control.operation.approval import ApprovalGate
    from atoll.control.operation.change import FleetChange
    from atoll.control.operation.home import FleetHome, FleetRecord
    from atoll.control.operation.loop import FleetController, LoopTurn
    from atoll.control.operation.operated import FleetSource, OperatedFleet

app = typer.Typer(add_completion=False)
_SIMULATED = "In virtual time"
_ANSWER_S = 0.5
"""How often is looked for an answer while one is waited for."""


class OperateSettings(OperatingSettings, DashboardOptions):
    """What `atoll operate` is told."""

    fleet: str = Field(
        description="A fleet file, or the name of a fleet that was brought up.",
        json_schema_extra={"argument": True},
    )
    once: bool = Field(False, description="Look, decide and act once, then end.")
    dry_run: bool = Field(False, description="Look and decide once, show it, change nothing.")
    every: Duration = Field(
        "15min", validate_default=True, description="How often a plan is made anew, at least."
    )
    look: Duration = Field(
        "10s", validate_default=True, description="How often targets and gateways are asked."
    )
    deadline: Duration = Field(
        "60s", validate_default=True, description="How long to plan at most."
    )
    yes: bool = Field(False, description="Do not ask before each change.")
    ask: Literal["terminal", "page"] = Field(
        "terminal", description="Where to ask: here, or on the plan page of the dashboard."
    )
    as_json: bool = Field(
        False, description="Print JSON, in base units.", json_schema_extra={"flag": "--json"}
    )
    simulate: str | None = Field(
        None,
        description="Operate a simulated fleet under this trace instead: a file, or a workload in words.",
        json_schema_extra={"panel": _SIMULATED, "metavar": "TRACE"},
    )
    days: float | None = Field(
        None, gt=0, description="How many days of it.", json_schema_extra={"panel": _SIMULATED}
    )
    prices: str | None = Field(
        None,
        description="How prices and availability move: a CSV file, or a generator in words.",
        json_schema_extra={"panel": _SIMULATED},
    )
    failures: str | None = Field(
        None,
        description="How machines fail and are taken back.",
        json_schema_extra={"panel": _SIMULATED},
    )
    seed: int = Field(
        0, ge=0, description="Same seed, same bits.", json_schema_extra={"panel": _SIMULATED}
    )
    output: Path | None = Field(
        None,
        description="Write the report here.",
        json_schema_extra={"panel": _SIMULATED, "flag": "-o"},
    )


@verb(app, OperateSettings)
def operate(options: OperateSettings) -> None:
    """Keep a fleet as its file says: look, forecast, plan, and change what has to change, until stopped.

    Every change is shown with its cost and dips first, and asked for unless --yes. The fleet file is read
    again when it changes; what cannot be read changes nothing. SIGTERM and Ctrl-C end the controller and
    leave the fleet serving; the next one, here or elsewhere, takes over what runs. With --simulate the same
    decisions are made about a simulated fleet, days in seconds.
    """
    if options.simulate is not None:
        importlib.import_module("atoll.cli.operate_simulated").simulate_operation(options)
        return
    need_serving()
    need_fabric()
    check_reach(options)
    check_dashboard(options)
    if not options.dry_run:
        _check_asking(options)
    from atoll.control.decision.view import ControlPolicy
    from atoll.control.operation.mixing import MixKeeper
    from atoll.control.operation.operated import FleetSource
    from atoll.control.operation.planner import make_planner

    file = FleetSource(_find_file(options))
    home = home_for(file.problem, options.state)
    known = home.read()
    if file.problem.choices:
        planner = make_planner(options.deadline)
        file.settle(MixKeeper(() if known is None else known.mixes, planner))
    record = make_record(options, file.problem, file.path, known, file.mixes)
    policy = ControlPolicy(epoch_s=options.every)
    if options.dry_run:
        _dry_run(options, home, record, file, policy)
        return
    home.make()
    with _stopping() as stop:
        shown = start_dashboard(options, ("--gateway", record.name, "--fleet", str(file.path)))
        try:
            _Operation(options, home, record, file, policy, stop).run()
        except AtollError as error:
            _write_down(home, "failure", str(error))
            raise
        finally:
            if shown is not None:
                shown.stop()


def _check_asking(options: OperateSettings) -> None:
    """Raise UsageError where nobody could be asked, or where asking makes no sense."""
    if options.ask == "terminal":
        check_can_ask(options.yes)
        return
    if options.yes:
        raise UsageError("--yes asks nobody", field="--ask", hint="leave out one of them")
    if options.once:
        raise UsageError(
            "one turn does not wait for a page", field="--ask", hint="leave out --once"
        )


def _find_file(options: OperateSettings) -> Path:
    """Return the fleet file: the one that is named, or that of the fleet of this name."""
    from atoll.control.operation.home import FleetHome, find_home

    path = Path(options.fleet)
    if path.is_file():
        return path.resolve()
    if options.state is not None:
        record = FleetHome(options.state).read()
        if record is not None and record.name == options.fleet:
            return Path(record.source)
    _, record = find_home(options.fleet, None)
    return Path(record.source)


def _dry_run(
    options: OperateSettings,
    home: FleetHome,
    record: FleetRecord,
    file: FleetSource,
    policy: ControlPolicy,
) -> None:
    from atoll.control.operation.change import find_change
    from atoll.control.operation.home import write_holder
    from atoll.control.operation.operated import open_fleet, open_gateways
    from atoll.control.operation.planner import make_planner

    token = token_file(options, home, record)
    fleet = open_fleet(home, record, file.problem, token, policy)
    gateways = open_gateways(home, record, file.problem, keep=False, say=note)
    planner = make_planner(options.deadline)
    controller = fleet.controller(gateways, planner, write_holder("look"), policy=policy)
    turn = controller.turn(act=False)
    for name in turn.unreachable:
        note(f"{name}: {controller.reasons[name]}")
    change = find_change(turn.view, turn.decision, fleet.map.of_instance)
    emit(change, options.as_json, change.text)


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Have the first SIGTERM or Ctrl-C set an event, and the second one end at once."""
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        del frame
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        note(f"{signal.Signals(number).name}: ending after this turn; the fleet goes on serving")

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Operation:
    """The life of a controller."""

    options: OperateSettings
    home: FleetHome
    record: FleetRecord
    file: FleetSource
    policy: ControlPolicy
    stop: threading.Event
    gate: ApprovalGate = field(init=False)
    said: str = ""
    waited_for: str | None = None
    file_error: str = ""

    def __post_init__(self) -> None:
        from atoll.control.operation.approval import ApprovalGate
        from atoll.control.operation.home import write_holder

        ask_here = None if self.options.ask == "page" else self._ask
        self.gate = ApprovalGate(self.home.board, write_holder("operate"), time.time, ask_here)
        self.gate.on_refused = lambda: _write_down(self.home, "note", "a change was refused")

    def run(self) -> None:
        """Take turns until told to stop."""
        from atoll.control.operation.home import write_holder
        from atoll.control.operation.operated import open_fleet, open_gateways
        from atoll.control.operation.planner import make_planner

        token = token_file(self.options, self.home, self.record)
        fleet = open_fleet(self.home, self.record, self.file.problem, token, self.policy)
        controller = fleet.controller(
            open_gateways(self.home, self.record, self.file.problem, say=self._hear),
            make_planner(self.options.deadline),
            write_holder("operate"),
            policy=self.policy,
            busy_s=self.options.look + self.options.deadline,
        )
        self._introduce()
        _write_down(self.home, "controller", "begins to operate")
        try:
            while not self.stop.is_set():
                fleet = self._read_file(fleet, controller)
                self._take_turn(fleet, controller)
                if self.options.once:
                    break
                self._rest()
        finally:
            self.gate.leave()
            with contextlib.suppress(AtollError):
                fleet.lease.give_back(time.time())
            _write_down(self.home, "controller", "ends; the fleet goes on serving")

    def _introduce(self) -> None:
        """Have pages know of a fleet that is new, before the first change is agreed to: it is not up yet."""
        if self.options.ask == "page" and self.home.read() is None:
            self.home.write(self.record.model_copy(update={"up": False}))
            self.home.keep_file(self.file.path)

    def _rest(self) -> None:
        """Wait for the next turn; an answer on a page is followed at once."""
        if not self.gate.is_waiting:
            self.stop.wait(self.options.look)
            return
        ends_s = time.monotonic() + self.options.look
        while not self.stop.is_set() and (left_s := ends_s - time.monotonic()) > 0:
            if self.gate.has_answer():
                return
            self.stop.wait(min(_ANSWER_S, left_s))

    def _read_file(self, fleet: OperatedFleet, controller: FleetController) -> OperatedFleet:
        """Read the fleet file if it has changed; one that is broken changes nothing."""
        from atoll.control.operation.operated import reopen

        try:
            if not self.file.read_again():
                return fleet  # as it was, or it still cannot be read
            known = self.record.model_copy(update={"entrance": fleet.record.entrance})
            self.record = make_record(
                self.options, self.file.problem, self.file.path, known, self.file.mixes
            )
            fleet.record = self.record
            opened = reopen(fleet, controller, self.file.problem, self._hear)
        except AtollError as error:
            text = f"the fleet file is not followed: {error}"
            if text != self.file_error:
                self.file_error = text
                note(text)
                _write_down(self.home, "failure", text)
            return fleet
        self.file_error = ""
        self.home.write(self.record)
        self.home.keep_file(self.file.path)
        _write_down(self.home, "note", "the fleet file has changed")
        return opened

    def _take_turn(self, fleet: OperatedFleet, controller: FleetController) -> None:
        from atoll.control.operation.lease import LeaseHeldError, SupersededError

        try:
            self._keep_entrance(fleet, controller)
            turn = controller.turn(approve=lambda turn: self._approve(fleet, controller, turn))
        except LeaseHeldError as error:
            # Another acts; this one stands by, and takes over when the other is gone.
            if self.options.once or isinstance(error, SupersededError):
                raise
            if self.said != str(error):
                self.said = str(error)
                note(str(error))
            return
        except AtollError as error:
            if self.options.once:
                raise
            self._complain(str(error))
            return
        self._tell(turn, controller)
        if self.options.once and (turn.failures or turn.unreachable):
            failed = [*turn.failures, *(controller.reasons[n] for n in turn.unreachable)]
            raise AtollError(f"not all was done: {failed[0]}", hint="what served goes on serving")

    def _keep_entrance(self, fleet: OperatedFleet, controller: FleetController) -> None:
        """Start hub or gateway anew if they have died; those of others are theirs to keep."""
        from atoll.control.operation.entrance import keep_entrance

        known = self.record.entrance
        if known is None or known.hub is None:
            return
        kept = keep_entrance(self.home, self.record.name, known)
        if kept != known:
            _write_down(self.home, "note", "hub or gateway had died and were started anew")
            self._use(fleet, controller, self.record.model_copy(update={"entrance": kept}))

    def _use(self, fleet: OperatedFleet, controller: FleetController, record: FleetRecord) -> None:
        """Go on with another entrance."""
        from atoll.control.operation.operated import renew_gateways

        self.record = fleet.record = record
        self.home.write(record)
        before = controller.place.gateways
        gateways = renew_gateways(before, self.home, record, self.file.problem, self._hear)
        controller.place = replace(controller.place, gateways=gateways)

    def _hear(self, text: str) -> None:
        """Take what is said of gateways."""
        note(text)
        _write_down(self.home, "note", text)

    def _approve(self, fleet: OperatedFleet, controller: FleetController, turn: LoopTurn) -> bool:
        """Return whether a change may be done, and have hub and gateway stand before the first one is."""
        from atoll.control.operation.change import find_change

        change = find_change(turn.view, turn.decision, fleet.map.of_instance)
        if not self.gate.admit(change):
            if self.gate.is_waiting and self.gate.shown != self.waited_for:
                self.waited_for = self.gate.shown
                note("a change waits for an answer on the plan page")
            return False
        if self.record.entrance is None or not self.record.up:
            entrance = open_fleet_entrance(self.options, self.home, self.record)
            record = self.record.model_copy(update={"entrance": entrance, "up": True})
            self._use(fleet, controller, record)
            self.home.keep_file(self.file.path)
        return True

    def _ask(self, change: FleetChange) -> bool:
        if not self.options.as_json:
            console().print(change.text(), soft_wrap=True)
        return ask("Go ahead?", self.options.yes)

    def _tell(self, turn: LoopTurn, controller: FleetController) -> None:
        for text in turn.failures:
            note(f"failed: {text}")
        for name in turn.unreachable:
            self.said = self._tell_once(f"{name}: {controller.reasons[name]}")
        if not turn.unreachable and not turn.failures:
            self.said = ""
        if self.options.as_json:
            done = [type(action).__name__ for action in turn.done]
            emit({"time_s": turn.view.time_s, "reasons": turn.decision.reasons, "done": done}, True)

    def _tell_once(self, text: str) -> str:
        if text != self.said:
            note(text)
        return text

    def _complain(self, text: str) -> None:
        """Have history and whoever watches know what is wrong, once for each thing."""
        if text != self.said:
            self.said = text
            note(text)
            _write_down(self.home, "failure", text)


def _write_down(home: FleetHome, kind: str, text: str) -> None:
    from atoll.control.operation.history import HistoryEvent

    event = {"at_s": time.time(), "kind": kind, "text": text[:4000]}
    with contextlib.suppress(AtollError, OSError):
        home.history.add(HistoryEvent.parse(event))
