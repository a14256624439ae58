"""`atoll up`: from a fleet file to a fleet that serves, wherever its machines are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli.operating import TerminalListener
from atoll.cli.options import VerbSettings, json_field, verb
from atoll.control.operation.options import OperationOptions
from atoll.core.errors import UsageError
from atoll.core.extras import require_extras
from atoll.core.options import option
from atoll.core.quantities import Duration
from atoll.report.terminal import console, emit, note

if TYPE_CHECKING:
    from atoll.api.fleet import Fleet
    from atoll.api.fleet_plan import FleetPlan
    from atoll.api.running import RunningFleet

app = typer.Typer(add_completion=False)


class UpSettings(OperationOptions, VerbSettings):
    """Options of `atoll up`."""

    plan: Path = option(..., "A fleet file, or a plan.json.", argument=True, metavar="FLEET|PLAN")
    fleet: Path | None = option(None, "The fleet file that a plan.json is for.")
    yes: bool = option(False, "Do not ask.")
    dry_run: bool = option(False, "Only show what would be done.")
    output: Path | None = option(
        None, "With --dry-run: write scripts, manifests or tasks into this folder.", "-o"
    )
    deadline: Duration = option("60s", "How long to plan at most.")
    wait: Duration = option("30min", "How long to wait until all of it serves; 0: not.")
    as_json: bool = json_field("Print what was done as JSON.")


@verb(app, UpSettings)
def up(options: UpSettings) -> None:
    """Plan a fleet, show what changes and what it costs, and bring it up: hub, gateway, instances.

    Run again after changing the fleet file, it goes from what runs to what is wanted, without serving less
    on the way where there is room. `atoll operate` keeps it right from then on; `atoll down` ends it. Without
    GPUs, --stand-in tries a fleet with processes of this machine and a small model.
    """
    require_extras("serve", "fabric")
    from atoll.runtime.gateway.standalone import read_settings

    terminal = TerminalListener(yes=options.yes, as_json=options.as_json)
    if not options.dry_run:
        terminal.check_can_ask()
    if options.output is not None and not options.dry_run:
        raise UsageError("-o is for --dry-run", field="-o", hint="add --dry-run, or leave it out")
    # Before anything is planned, which takes long.
    read_settings(options.gateway_config, options.cors)
    asked = _read(options)
    if options.dry_run:
        change = asked.preview_up(
            options=options, deadline_s=options.deadline, folder=options.output, listener=terminal
        )
        emit(change, options.as_json, change.text)
        return
    from atoll.control.operation.rollout import ChangeRefusedError

    try:
        fleet = asked.up(
            options=options, deadline_s=options.deadline, wait_s=options.wait, listener=terminal
        )
    except ChangeRefusedError:
        note("nothing was changed")
        return
    if not fleet.serves:
        note(f"started; `atoll status {fleet.name}` shows how far it is")
    _announce(fleet, options)


def _read(options: UpSettings) -> Fleet | FleetPlan:
    """Return what to bring up: a fleet, or a plan of the fleet that it was made for."""
    from atoll.api.fleet import Fleet
    from atoll.api.fleet_plan import FleetPlan
    from atoll.plan.files.read import is_plan

    if is_plan(options.plan):
        return FleetPlan.load(options.plan, options.fleet)
    if options.fleet is not None:
        raise UsageError(f"{options.plan} is a fleet file itself", hint="leave --fleet out")
    return Fleet.load(options.plan)


def _announce(fleet: RunningFleet, options: UpSettings) -> None:
    """Say where to ask."""
    if options.as_json:
        sys.stdout.write(json.dumps(fleet.to_dict()) + "\n")
        sys.stdout.flush()
        return
    for name, weights in fleet.record.weights.items():
        if weights.stand_in:
            note(f"STAND-IN: {name} answers with other weights than the plan's ({weights.source})")
    for name, parts in fleet.record.parts.items():
        if parts.stand_in:
            note(f"STAND-IN: {name} answers with {parts.stand_in}")
    out = console()
    if fleet.url is None:
        out.print(f"{fleet.name} is up; ask a gateway of its fabric", soft_wrap=True)
        return
    key = " -H 'authorization: Bearer KEY'" if fleet.asks_for_keys else ""
    body = json.dumps(
        {
            "model": fleet.services[0],
            "messages": [{"role": "user", "content": "Hello!"}],
            "stream": True,
        }
    )
    out.print(f"{fleet.name} answers at {fleet.url}/v1", soft_wrap=True)
    out.print(f"\n  curl -N {fleet.url}/v1/chat/completions{key} -d '{body}'\n", soft_wrap=True)
    out.print(
        f"`atoll operate {fleet.name}` keeps it right, `atoll down {fleet.name}` ends it",
        soft_wrap=True,
    )
