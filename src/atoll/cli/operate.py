"""`atoll operate`: the controller, which keeps a fleet right while demand, prices and machines move."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import typer

from atoll.cli.beside import DashboardOptions, check_dashboard, start_dashboard
from atoll.cli.operating import TerminalListener
from atoll.cli.options import VerbSettings, json_field, verb
from atoll.control.operation.options import OperationOptions
from atoll.core.errors import UsageError
from atoll.core.extras import require_extras
from atoll.core.files import atomic_write, check_target
from atoll.core.options import option
from atoll.core.quantities import Duration
from atoll.report.terminal import emit, note

app = typer.Typer(add_completion=False)
_simulated = partial(option, panel="In virtual time")


class OperateSettings(OperationOptions, DashboardOptions, VerbSettings):
    """Options of `atoll operate`."""

    fleet: str = option(
        ..., "A fleet file, or the name of a fleet that was brought up.", argument=True
    )
    once: bool = option(False, "Look, decide and act once, then end.")
    dry_run: bool = option(False, "Look and decide once, show it, change nothing.")
    every: Duration = option("15min", "How often a plan is made anew, at least.")
    look: Duration = option("10s", "How often targets and gateways are asked.")
    deadline: Duration = option("60s", "How long to plan at most.")
    yes: bool = option(False, "Do not ask before each change.")
    ask: Literal["terminal", "page"] = option(
        "terminal", "Where to ask: here, or on the plan page of the dashboard."
    )
    as_json: bool = json_field()
    simulate: str | None = _simulated(
        None,
        "Operate a simulated fleet under this trace instead: a file, or a workload in words.",
        metavar="TRACE",
    )
    days: float | None = _simulated(None, "How many days of it.", gt=0)
    prices: str | None = _simulated(
        None, "How prices and availability move: a CSV file, or a generator in words."
    )
    failures: str | None = _simulated(None, "How machines fail and are taken back.")
    mix: str | None = _simulated(
        None, "How far shares of classes move: a standard deviation, as 30%."
    )
    seed: int = _simulated(0, "Same seed, same bits.", ge=0)
    output: Path | None = _simulated(None, "Write the report here.", "-o")


@verb(app, OperateSettings)
def operate(options: OperateSettings) -> None:
    """Keep a fleet as its file says: look, forecast, plan, and change what has to change, until stopped.

    Every change is shown with its cost and dips first, and asked for unless --yes. The fleet file is read
    again when it changes; what cannot be read changes nothing. SIGTERM and Ctrl-C end the controller and
    leave the fleet serving; the next one, here or elsewhere, takes over what runs. With --simulate the same
    decisions are made about a simulated fleet, days in seconds.
    """
    if options.simulate is not None:
        _simulate(options, options.simulate)
        return
    require_extras("serve", "fabric")
    check_dashboard(options)
    terminal = TerminalListener(yes=options.yes, as_json=options.as_json)
    if not options.dry_run:
        _check_asking(options, terminal)
    from atoll.api.fleet import Fleet

    fleet = Fleet.find(options.fleet, state=options.state)
    controller = fleet.controller(
        options=options,
        every_s=options.every,
        look_s=options.look,
        deadline_s=options.deadline,
        once=options.once,
        on_page=options.ask == "page",
        listener=terminal,
    )
    if options.dry_run:
        change = controller.preview()
        emit(change, options.as_json, change.text)
        return
    with stopping("the fleet goes on serving") as stop:
        at = () if options.state is None else ("--state", str(options.state.resolve()))
        shown = start_dashboard(
            options, ("--gateway", fleet.name, *at, "--fleet", str(controller.request.file))
        )
        try:
            controller.run(stop)
        finally:
            if shown is not None:
                shown.stop()


def _check_asking(options: OperateSettings, terminal: TerminalListener) -> None:
    """Raise UsageError where nobody could be asked, or where asking makes no sense."""
    if options.ask == "terminal":
        terminal.check_can_ask()
    elif options.yes:
        raise UsageError("--yes asks nobody", field="--ask", hint="leave out one of them")
    elif options.once:
        raise UsageError(
            "one turn does not wait for a page", field="--ask", hint="leave out --once"
        )


@contextlib.contextmanager
def stopping(what: str) -> Iterator[threading.Event]:
    """Have the first SIGTERM or Ctrl-C set an event, and the second one end at once."""
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        del frame
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        note(f"{signal.Signals(number).name}: ending after this turn; {what}")

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _simulate(options: OperateSettings, trace: str) -> None:
    """Operate the fleet in virtual time, and show what that and other ways to do so cost."""
    from atoll.api.fleet import Fleet

    if options.output is not None:
        check_target(options.output, (".html",))
    found = Fleet.load(options.fleet).simulate_operation(
        trace,
        days=options.days,
        prices=options.prices,
        failures=options.failures,
        mix=options.mix,
        seed=options.seed,
        listener=TerminalListener(yes=True),
    )
    if options.output is not None:
        atomic_write(options.output, found.to_page())
    emit(found.summaries, options.as_json, lambda: found)
    if options.output is not None:
        note(f"wrote {options.output}")
