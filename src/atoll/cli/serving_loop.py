"""`serve` and `tasks serve` at a terminal: start a fleet, say where it answers, stop it at a signal."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from atoll.api.served_plan import GatewayPlace
from atoll.cli.beside import DashboardOptions, check_dashboard, start_dashboard
from atoll.cli.options import json_field
from atoll.cli.progress import show_progress
from atoll.report.terminal import console, emit, note

if TYPE_CHECKING:
    from atoll.api.fleet import Fleet
    from atoll.api.fleet_plan import FleetPlan
    from atoll.runtime.local.fleet_state import FleetState
    from atoll.runtime.local.serving import ServingRun, StartProgress

_CHAT = "/v1/chat/completions"


def plan_for_serving(fleet: Fleet, deadline_s: float) -> FleetPlan:
    """Make a plan to serve, and show how far that is."""
    with show_progress(f"planning {fleet.name}", deadline_s) as tell:
        return fleet.plan_to_serve(deadline_s=deadline_s, on_progress=tell)


class FleetSettings(GatewayPlace, DashboardOptions):
    """Options of every command that brings a fleet up on this machine."""

    as_json: bool = json_field("Print what runs as JSON once it is ready.")


def check_places(options: FleetSettings) -> None:
    """Raise where the log cannot be written or the port is taken, before anything is started."""
    options.check()
    check_dashboard(options)


def make_teller(stand_ins: Sequence[str]) -> Callable[[str], None]:
    """Return what writes a line to stderr; with weights that stand in, every line says so."""
    if not stand_ins:
        return note
    mark = f"[stand-in, {'; '.join(stand_ins)}]"
    return lambda text: note(f"{mark} {text}")


async def serve_until_stopped(
    serving: ServingRun, started: StartProgress, options: FleetSettings
) -> None:
    """Start a fleet, say where it answers, and stop it when told to; a second signal stops it at once."""
    from atoll.runtime.supervise.agent import ProcessError

    def on_signal() -> None:
        (serving.at_once if serving.stop.is_set() else serving.stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        if not await serving.start():
            started.tell("stopped before it was ready")
            return
    except ProcessError as error:
        for line in error.lines:
            started.tell(f"{error.name}: {line}")
        raise
    started.is_up = True
    started.say("serving")
    state = serving.fleet.state()
    for endpoint in state.endpoints:
        if endpoint.stand_in:
            started.tell(f"{endpoint.id} answers with other weights than the plan's")
    choices = serving.fleet.gateway.chooser.choice_table.by_name
    _announce(
        state, options.as_json, {w: c.name for c in choices.values() for w in c.dealer.shares}
    )
    reached = ("--gateway", state.url, "--admin-socket", state.admin_socket)
    beside = start_dashboard(options, reached, started.tell)
    await serving.stop.wait()
    if beside is not None:
        await asyncio.to_thread(beside.stop)
    started.say("finishing what runs (Ctrl-C again stops at once)")
    await serving.finish()
    started.tell("stopped")


def _announce(state: FleetState, as_json: bool, choices: Mapping[str, str]) -> None:
    """Say where to ask; `choices` are the names to ask for, by service behind them."""
    from atoll.cli.status import draw_fleet

    if as_json:
        sys.stdout.write(state.to_json() + "\n")
    else:
        emit(None, False, lambda: draw_fleet(state, None))
        out = console()
        out.print(f"{state.name} answers at {state.url}/v1 until Ctrl-C", soft_wrap=True)
        for command in list_first_requests(state, choices):
            out.print(f"\n  {command}", soft_wrap=True, markup=False)
        out.print()
    sys.stdout.flush()


def list_first_requests(
    state: FleetState, choices: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return commands to try a fleet with, one for each thing that its models do."""
    found: dict[str, str] = {}
    for endpoint in state.endpoints:
        asked = choices.get(endpoint.service, endpoint.service)
        for model, paths in (endpoint.answers or {asked: (_CHAT,)}).items():
            for path in paths:
                found.setdefault(path, _first_request(state.url, model, path))
    return list(found.values())


def _first_request(url: str, model: str, path: str) -> str:
    if path == "/v1/audio/transcriptions":
        return f"curl {url}{path} -F model={model} -F file=@speech.wav"
    orders: dict[str, dict[str, object]] = {
        _CHAT: {"messages": [{"role": "user", "content": "Hello!"}], "stream": True},
        "/v1/audio/speech": {"input": "Hello!", "voice": "heart"},
        "/v1/images/generations": {"prompt": "an island"},
        "/v1/embeddings": {"input": "Hello!"},
    }
    body = json.dumps({"model": model, **orders[path]})
    kept = " -o speech.wav" if path == "/v1/audio/speech" else ""
    return f"curl -N {url}{path}{kept} -d '{body}'"
