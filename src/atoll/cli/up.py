"""`atoll up`: from a fleet file to a fleet that serves, wherever its machines are."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from pydantic import Field

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
from atoll.cli.progress import live_line
from atoll.cli.rollout import Rollout
from atoll.cli.serving import need_fabric, need_serving
from atoll.core.errors import AtollError, InfeasibleError, UsageError
from atoll.core.quantities import Duration
from atoll.report.terminal import console, emit, note

if TYPE_CHECKING:
    from atoll.control.decision.path import CapacityDip
    from atoll.control.decision.view import View
    from atoll.control.operation.change import FleetChange
    from atoll.control.operation.home import Entrance, FleetHome, FleetRecord
    from atoll.control.operation.loop import FleetController, LoopTurn
    from atoll.control.operation.operated import OperatedFleet
    from atoll.plan.choice import ModelMix
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem

app = typer.Typer(add_completion=False)
_NEVER_S = 86_400.0


class UpSettings(OperatingSettings):
    """What `atoll up` is told."""

    plan: Path = Field(
        description="A fleet file, or a plan.json.",
        json_schema_extra={"argument": True, "metavar": "FLEET|PLAN"},
    )
    fleet: Path | None = Field(None, description="The fleet file that a plan.json is for.")
    yes: bool = Field(False, description="Do not ask.")
    dry_run: bool = Field(False, description="Only show what would be done.")
    output: Path | None = Field(
        None,
        description="With --dry-run: write scripts, manifests or tasks into this folder.",
        json_schema_extra={"flag": "-o"},
    )
    deadline: Duration = Field(
        "60s", validate_default=True, description="How long to plan at most."
    )
    wait: Duration = Field(
        "30min",
        validate_default=True,
        description="How long to wait until all of it serves; 0: not.",
    )
    as_json: bool = Field(
        False,
        description="Print what was done as JSON.",
        json_schema_extra={"flag": "--json"},
    )


@dataclass
class _UpRun(Rollout):
    """One run of the verb: what it works with besides."""

    options: UpSettings = field(kw_only=True)
    fleet: OperatedFleet = field(kw_only=True)
    pinned: Plan | None = field(kw_only=True)


@verb(app, UpSettings)
def up(options: UpSettings) -> None:
    """Plan a fleet, show what changes and what it costs, and bring it up: hub, gateway, instances.

    Run again after changing the fleet file, it goes from what runs to what is wanted, without serving less
    on the way where there is room. `atoll operate` keeps it right from then on; `atoll down` ends it. Without
    GPUs, --stand-in tries a fleet with processes of this machine and a small model.
    """
    need_serving()
    need_fabric()
    if not options.dry_run:
        check_can_ask(options.yes)
    if options.output is not None and not options.dry_run:
        raise UsageError("-o is for --dry-run", field="-o", hint="add --dry-run, or leave it out")
    check_reach(options)
    pinned, problem, source = _read(options)
    home = home_for(problem, options.state)
    problem, mixes = _settle(options, problem, pinned)
    record = make_record(options, problem, source, home.read(), mixes)
    if options.dry_run:
        _dry_run(options, home, record, problem, pinned)
        return
    home.make()
    try:
        _bring_up(options, home, record, problem, pinned)
    except AtollError as error:
        _write_down(home, str(error))
        raise


def _read(options: UpSettings) -> tuple[Plan | None, Problem, Path]:
    """Return the plan if one is given, the problem, and the fleet file."""
    from atoll.control.operation.home import list_homes
    from atoll.control.operation.planner import put_phases_together
    from atoll.plan.files.read import is_plan, read_plan, read_problem
    from atoll.plan.unserved import refuse_unserved

    if not is_plan(options.plan):
        if options.fleet is not None:
            raise UsageError(f"{options.plan} is a fleet file itself", hint="leave --fleet out")
        asked = read_problem(options.plan)
        refuse_unserved(asked)
        return None, put_phases_together(asked), options.plan.resolve()
    plan, source = read_plan(options.plan), options.fleet
    refuse_unserved(plan)
    if source is None:
        for home in list_homes():
            record = home.read()
            if record is not None and record.name == plan.problem_name:
                source = Path(record.source)
    if source is None:
        raise UsageError(
            f"{options.plan} does not say what is asked of {plan.problem_name}",
            field="--fleet",
            hint="name the fleet file that the plan was made for",
        )
    problem = put_phases_together(read_problem(source))
    refuse_unserved(problem)
    names = {service.name for service in problem.services}
    strange = sorted({one.service for one in plan.instances} - names)
    if strange:
        raise UsageError(
            f"{source} has no {', '.join(strange)}, which {options.plan} serves",
            field="--fleet",
            hint="name the fleet file that the plan was made for",
        )
    return plan, problem, source.resolve()


def _settle(
    options: UpSettings, problem: Problem, pinned: Plan | None
) -> tuple[Problem, tuple[ModelMix, ...]]:
    """Return the problem of plain services, and which models answer its choices: as planned, or as given."""
    from atoll.control.operation.mixing import MixKeeper, fit_mixes
    from atoll.control.operation.planner import make_planner

    if pinned is not None and fit_mixes(problem.choices, pinned.mixes) is None:
        raise UsageError(
            f"{options.plan} does not say which models answer as the fleet file wants it",
            field="--fleet",
            hint="plan the fleet file again",
        )
    if not problem.choices:
        return problem, ()
    known = () if pinned is None else pinned.mixes
    keeper = MixKeeper(known, make_planner(options.deadline))
    with live_line(f"choosing models of {problem.name}", options.deadline):
        return keeper.settle(problem), keeper.mixes


def _open(
    options: UpSettings, home: FleetHome, record: FleetRecord, problem: Problem
) -> OperatedFleet:
    from atoll.control.decision.view import ControlPolicy
    from atoll.control.operation.operated import open_fleet

    return open_fleet(home, record, problem, token_file(options, home, record), ControlPolicy())


# Only looking


def _dry_run(
    options: UpSettings,
    home: FleetHome,
    record: FleetRecord,
    problem: Problem,
    pinned: Plan | None,
) -> None:
    from atoll.control.operation.dry_run import OfflineTargets, write_orders

    offline = OfflineTargets(record.targets, problem.offers, home.folder)
    fleet = offline.open(home, record, problem, token_file(options, home, record))
    controller = _controller(options, fleet, pinned)
    with live_line(f"planning {problem.name}", options.deadline):
        turn = controller.turn(act=False)
    for line in offline.notes:
        note(f"note: {line}")
    _refuse_impossible(turn, fleet)
    change = _find_change(turn, fleet, controller, pinned)
    emit(change, options.as_json, change.text)
    if options.output is not None:
        for path in write_orders(fleet, turn, options.output):
            note(f"wrote {path}")


def _controller(options: UpSettings, fleet: OperatedFleet, pinned: Plan | None) -> FleetController:
    from atoll.control.decision.view import ControlPolicy
    from atoll.control.operation.home import write_holder
    from atoll.control.operation.operated import open_gateways
    from atoll.control.operation.planner import force_plan, make_planner, pin_plan

    planner = make_planner(options.deadline) if pinned is None else pin_plan(pinned)
    gateways = open_gateways(
        fleet.home, fleet.record, fleet.problem, keep=not options.dry_run, say=note
    )
    holder = write_holder("up")
    # Whoever waits is told what failed; trying again is for them or for `atoll operate` to do.
    policy = ControlPolicy(backoff_s=_NEVER_S, backoff_most_s=_NEVER_S)
    controller = fleet.controller(gateways, planner, holder, policy=policy, busy_s=options.deadline)
    if pinned is not None:
        controller.memory = force_plan(pinned, controller.turn(act=False).view)
    controller.memory = replace(controller.memory, states=_list_failed(fleet))
    return controller


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


def _find_change(
    turn: LoopTurn, fleet: OperatedFleet, controller: FleetController, pinned: Plan | None
) -> FleetChange:
    """Return what is about to change; of a plan that was given, the way there was not foreseen yet."""
    from atoll.control.operation.change import find_change
    from atoll.control.operation.planner import foresee_dips

    dips: tuple[CapacityDip, ...] = ()
    if pinned is not None:
        wanted = controller.memory.wanted
        dips = foresee_dips(wanted, turn.view, controller.policy)
    return find_change(turn.view, turn.decision, fleet.map.of_instance, dips)


# Bringing up


def _bring_up(
    options: UpSettings,
    home: FleetHome,
    record: FleetRecord,
    problem: Problem,
    pinned: Plan | None,
) -> None:
    from atoll.control.operation.lease import LeaseHeldError

    fleet = _open(options, home, record, problem)
    controller = _controller(options, fleet, pinned)
    run = _UpRun(home, record, controller, time.time(), options=options, fleet=fleet, pinned=pinned)
    try:
        with live_line(f"planning {problem.name}", options.deadline) as say:
            turn = controller.turn(approve=lambda turn: _approve(run, turn, say))
        if not turn.approved:
            note("nothing was changed")
            return
        if not run.wait(turn, options.wait):
            note(f"started; `atoll status {record.name}` shows how far it is")
        _announce(run)
    except LeaseHeldError as error:
        raise LeaseHeldError(
            error.message, hint=f"it follows {record.source} by itself; or {error.hint}"
        ) from error
    except KeyboardInterrupt:
        note(f"what was begun goes on: see `atoll status {record.name}`")
        raise
    finally:
        with contextlib.suppress(AtollError):
            fleet.lease.give_back(time.time())


def _approve(run: _UpRun, turn: LoopTurn, say: object) -> bool:
    """Show the change, ask, and open the entrance, so that what is started finds a hub to join."""
    from atoll.control.operation.operated import open_gateways
    from atoll.control.operation.planner import pin_plan

    del say
    _refuse_impossible(turn, run.fleet, run.controller)
    change = _find_change(turn, run.fleet, run.controller, run.pinned)
    if not run.options.as_json:
        console().print(change.text(), soft_wrap=True)
    if not change.is_empty and not ask("Go ahead?", run.options.yes):
        return False
    assert turn.decision.plan is not None
    # What was shown is what is done, whatever a second look would find.
    run.controller.use_planner(pin_plan(turn.decision.plan))
    known = run.record.entrance
    entrance = open_fleet_entrance(run.options, run.home, run.record)
    run.opened = entrance.hub is not None and (known is None or entrance.hub != known.hub)
    run.record = run.record.model_copy(update={"entrance": entrance, "up": True})
    run.home.write(run.record)
    run.home.keep_file(Path(run.record.source))
    if run.pinned is not None:
        _note_choice(run, change.usd_after)
    if entrance != known:
        gateways = open_gateways(run.home, run.record, run.fleet.problem, say=note)
        run.controller.place = replace(run.controller.place, gateways=gateways)
    return True


def _refuse_impossible(
    turn: LoopTurn, fleet: OperatedFleet, controller: FleetController | None = None
) -> None:
    """Raise where there is nothing to bring up, with what stands in the way."""
    from atoll.deploy.door import DeployError

    for name in turn.unreachable if controller is not None else ():
        assert controller is not None
        raise DeployError(f"{name}: {controller.reasons[name]}", kind="unreachable")
    unclaimed = fleet.map.list_unclaimed(turn.view.problem.offers)
    if unclaimed:
        note(f"note: no target has the region {', '.join(unclaimed)} of the pool")
    if turn.decision.plan is not None and turn.decision.plan.instances:
        return
    if not any(offer.available for offer in turn.view.offers):
        raise _explain_empty(turn.view, fleet)
    why = turn.decision.reasons[-1] if turn.decision.reasons else "no reason is known"
    raise InfeasibleError(
        f"there is no plan for {turn.view.problem.name}: {why.removeprefix('kept: ')}",
        hint=f"`atoll plan {fleet.record.source}` says more",
    )


def _explain_empty(view: View, fleet: OperatedFleet) -> AtollError:
    kinds = ", ".join(sorted({offer.node_type for offer in view.problem.offers}))
    names = fleet.record.targets.names
    regions = ", ".join(sorted({offer.region for offer in view.problem.offers}))
    if names == ("local",):
        return UsageError(
            f"this machine has none of the pool's machines ({kinds} in {regions})",
            hint="--pretend lets processes stand for them, --stand-in with a small model; or --on TARGET",
        )
    return UsageError(
        f"none of the pool's machines ({kinds} in {regions}) can be had on {', '.join(names)}",
        hint="check the pool's regions and node types against the target's",
    )


def _note_choice(run: _UpRun, usd_per_hour: float) -> None:
    """Have the history say that nobody planned: somebody chose."""
    from atoll.control.operation.history import HistoryEvent

    event = HistoryEvent(
        at_s=time.time(),
        kind="plan",
        text=f"{run.options.plan} was given",
        plan=run.controller.memory.plan_hash,
        usd_per_hour=usd_per_hour,
    )
    run.home.history.add(event)


def _write_down(home: FleetHome, text: str) -> None:
    """Have the history say why bringing up failed."""
    from atoll.control.operation.history import HistoryEvent

    with contextlib.suppress(AtollError, OSError):
        last = home.history.read(last=1)
        if last and last[0].kind == "failure" and last[0].text == text:
            return  # the controller has said so
        home.history.add(HistoryEvent(at_s=time.time(), kind="failure", text=text[:4000]))


def _announce(run: _UpRun) -> None:
    """Say where to ask."""
    entrance = run.record.entrance
    assert entrance is not None
    behind = {name for mix in run.record.mixes for name in mix.shares}
    services = [mix.name for mix in run.record.mixes]
    services += [name for name in run.record.weights if name not in behind]
    if run.options.as_json:
        shown = {
            "fleet": run.record.name,
            "home": str(run.home.folder),
            "url": entrance.url,
            "admin_socket": entrance.admin_socket,
            "services": services,
            "instances": list(run.wanted),
            "targets": list(run.record.targets.names),
        }
        sys.stdout.write(json.dumps(shown) + "\n")
        sys.stdout.flush()
        return
    for name, weights in run.record.weights.items():
        if weights.stand_in:
            note(f"STAND-IN: {name} answers with other weights than the plan's ({weights.source})")
    out = console()
    if entrance.url is None:
        out.print(f"{run.record.name} is up; ask a gateway of its fabric", soft_wrap=True)
        return
    key = " -H 'authorization: Bearer KEY'" if _asks_for_keys(entrance) else ""
    body = json.dumps(
        {"model": services[0], "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    )
    out.print(f"{run.record.name} answers at {entrance.url}/v1", soft_wrap=True)
    out.print(f"\n  curl -N {entrance.url}/v1/chat/completions{key} -d '{body}'\n", soft_wrap=True)
    out.print(
        f"`atoll operate {run.record.name}` keeps it right, `atoll down {run.record.name}` ends it",
        soft_wrap=True,
    )


def _asks_for_keys(entrance: Entrance) -> bool:
    """Whether the fleet's own gateway listens beyond this machine, where it asks for keys."""
    from urllib.parse import urlsplit

    from atoll.fabric.identity.access import is_loopback

    host = urlsplit(entrance.url or "").hostname
    return entrance.gateway is not None and host is not None and not is_loopback(host)
