"""`atoll deploy`: a model more in an operated fleet, another promise, or one less; the plan comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from atoll.cli.console_client import ConsoleClient, console_field, fleet_path
from atoll.cli.options import VerbSettings, json_field, verb
from atoll.cli.progress import live_line
from atoll.core.errors import UsageError
from atoll.core.extras import require_extras
from atoll.core.options import option
from atoll.core.units import format_duration, format_price, format_share
from atoll.report.terminal import console, emit, note, table

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(add_completion=False)
_KEYS = ("model", "ttft", "tpot", "attainment", "rate", "lengths")
"""Keys of a service in the fleet file that are options here."""


class DeploySettings(VerbSettings):
    """Options of `atoll deploy`; what is said of a service is as in its fleet file."""

    fleet: str = option(..., "Name of an operated fleet.", argument=True)
    service: str = option(..., "The name that requests ask for.", argument=True)
    model: str | None = option(
        None, "A model of the catalog, ORG/NAME of the Hugging Face hub, or a folder of weights."
    )
    ttft: str | None = option(None, "Promised time to the first token: 2s.")
    tpot: str | None = option(None, "Promised time per further token: 100ms.")
    attainment: str | None = option(None, "Share of requests that must keep both: 95%.")
    rate: str | None = option(None, "Requests that arrive: 4/s.")
    lengths: str | None = option(None, "A mix (azure-conv), or PROMPTxANSWER in tokens.")
    remove: bool = option(False, "Take the service out of the fleet.")
    yes: bool = option(False, "Do not ask.")
    dry_run: bool = option(False, "Only show the plan.")
    console: str | None = console_field()
    as_json: bool = json_field("Print the plan as JSON.")


@verb(app, DeploySettings)
def deploy(options: DeploySettings) -> None:
    """Deploy, change or remove a model of an operated fleet: see the plan, agree, and its file is replaced.

    It asks the dashboard that runs here, or the one at --console with a key of role operator. The controller
    follows the fleet file, and asks for approval as it was started.
    """
    require_extras("serve")
    given = {key: getattr(options, key) for key in _KEYS if getattr(options, key) is not None}
    if options.remove == bool(given):
        raise UsageError(
            "say what is to be another, or --remove", hint="--model qwen3-8b --rate 1/s ..."
        )
    asked = ConsoleClient.find(options.console)
    file = asked.ask("GET", fleet_path(options.fleet, "file"))
    edit: dict[str, Any] = {"services": {options.service: None if options.remove else given}}
    if options.model is not None and ("/" in options.model):
        found = asked.ask("POST", "/atoll/v1/catalog/models", {"source": options.model})
        given["model"] = found["name"]
        edit["models"] = {} if found["entry"] is None else {found["name"]: found["entry"]}
    with live_line("planning") as say:
        planned = asked.work("/atoll/v1/whatif", {"fleet": options.fleet, "edit": edit}, say)
    emit(planned, options.as_json, lambda: _draw(planned))
    if not options.as_json:
        console().print(f"{planned['verdict']}", soft_wrap=True, markup=False)
    if options.dry_run:
        return
    if not options.yes and not typer.confirm("Replace the fleet file?", default=False):
        note("nothing was changed")
        return
    body = {"file": planned["fleet_file"], "version": file["version"]}
    said = asked.ask("PUT", fleet_path(options.fleet, "file"), body)
    note(
        f"the fleet file is replaced: {said['changed']}; `atoll status {options.fleet}` shows the rest"
    )


def _draw(planned: dict[str, Any]) -> Table:
    plan, kept = planned["then"]["plan"], planned["then"]["kept"]
    engines: dict[str, set[str]] = {}
    for each in plan["instances"]:
        words = " ".join(filter(None, (each["engine"], each["standing"])))
        engines.setdefault(each["service"], set()).add(words)
    rows = [
        (
            one["name"],
            one["model"],
            None if one["ttft_s"] is None else format_duration(one["ttft_s"]),
            None if one["tpot_s"] is None else format_duration(one["tpot_s"]),
            None if kept.get(one["name"]) is None else format_share(kept[one["name"]]),
            ", ".join(sorted(engines.get(one["name"], ()))) or None,
            format_price(one["usd_per_hour"]),
        )
        for one in plan["services"]
    ]
    before, after = planned["now"]["usd_per_hour"], planned["then"]["usd_per_hour"]
    return table(
        ("service", "model", "ttft", "tpot", "kept", "engine", "cost"),
        rows,
        caption=f"{format_price(before)} -> {format_price(after)}",
        right=("ttft", "tpot", "kept", "cost"),
    )
