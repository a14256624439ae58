"""`atoll serve`: bring a plan up on this machine, with a gateway in front."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from atoll.api.served_plan import ServeOptions
from atoll.cli.operating import TerminalListener
from atoll.cli.options import verb
from atoll.cli.progress import live_line
from atoll.cli.serving_loop import (
    FleetSettings,
    check_places,
    make_teller,
    plan_for_serving,
    serve_until_stopped,
)
from atoll.core.errors import UsageError
from atoll.core.extras import require_extras
from atoll.core.options import option
from atoll.core.quantities import Duration

app = typer.Typer(add_completion=False)


class ServeSettings(ServeOptions, FleetSettings):
    """Options of `atoll serve`."""

    plan: Path = option(..., "A plan.json, or a fleet file to plan first.", argument=True)
    fleet: Path | None = option(
        None, "The fleet file, where a plan does not say which models it is for."
    )
    deadline: Duration = option("60s", "How long to plan at most, where there is no plan yet.")


@verb(app, ServeSettings)
def serve(options: ServeSettings) -> None:
    """Start the instances of a plan on this machine and serve them behind one address.

    They run on the GPUs that are here, under the engine that they are planned for; where none holds them, as
    processes of Atoll's own engine on cores, and a line says why. Only the weights of the plan's own models
    are served; engines on GPUs fetch those that the catalog names, SmolLM2 is fetched by itself, for others
    see --model. With --stand-in it serves in their place, the plan's layer ranges shrunk to its layers.
    Ctrl-C finishes what runs and stops everything; a second one stops at once. With --fabric every gateway
    there can use it, as one node.
    """
    require_extras("serve")
    from atoll.api.fleet import Fleet
    from atoll.api.served_plan import prepare_serving
    from atoll.plan.files.read import find_fleet_file, is_plan, read_plan
    from atoll.runtime.http.program import run
    from atoll.runtime.local.serving import StartProgress

    options.local()
    check_places(options)
    options.check_offer()
    plan = read_plan(options.plan) if is_plan(options.plan) else None
    terminal = TerminalListener(yes=True)
    if plan is None and options.fleet is not None:
        raise UsageError(f"{options.plan} is a fleet file itself", hint="leave --fleet out")
    source = options.plan if plan is None else options.fleet
    if plan is not None and source is None:
        source = find_fleet_file(plan, options.plan)
    fleet = None if source is None else Fleet.load(source)
    prepared = prepare_serving(
        plan,
        None if fleet is None else fleet.problem,
        options,
        terminal,
        None if fleet is None else lambda: plan_for_serving(fleet, options.deadline),
    )
    prepared = replace(prepared, source=source)
    tell = make_teller(prepared.stand_ins)
    if plan is not None:
        tell(
            f"it promises what {source} says"
            if source is not None
            else "it promises nothing: no fleet file of the plan is beside it (name one with --fleet)"
        )
    for line in prepared.list_runners():
        tell(line)
    for line in prepared.list_warnings():
        tell(f"warning: {line}")
    with live_line("loading the engine") as say:
        started = StartProgress(say, tell)
        with prepared.open(started, terminal) as serving:
            run(serve_until_stopped(serving, started, options))
