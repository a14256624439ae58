"""What `serve` and `tasks serve` do with a fleet that is put together: start it, say so, wait, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import Field

from atoll.cli.beside import DashboardOptions, check_dashboard, start_dashboard
from atoll.cli.serving import StartProgress
from atoll.core.errors import AtollError
from atoll.core.files import check_target
from atoll.core.quantities import Duration
from atoll.report.terminal import console, emit, note

if TYPE_CHECKING:
    from atoll.runtime.join.node import JoinedNode
    from atoll.runtime.local.build import LocalModel
    from atoll.runtime.local.fleet import LocalFleet
    from atoll.runtime.local.state import FleetState
    from atoll.runtime.supervise.agent import ProcessError
    from atoll.runtime.task_fleet.deployment import TaskDeployment

_CHAT = "/v1/chat/completions"


class FleetSettings(DashboardOptions):
    """What is told wherever a fleet is brought up on this machine."""

    host: str = Field("127.0.0.1", description="Where the gateway listens.")
    port: int = Field(8080, ge=0, le=65535, description="Port of the gateway; 0: any.")
    drain: Duration = Field(
        "30s", validate_default=True, description="How long to finish what runs when stopping."
    )
    log: Path | None = Field(None, description="Where the gateway logs requests, as JSON lines.")
    as_json: bool = Field(
        False,
        description="Print what runs as JSON once it is ready.",
        json_schema_extra={"flag": "--json"},
    )


def check_places(options: FleetSettings) -> None:
    """Raise where the log cannot be written or the port is taken, before anything is started."""
    from atoll.runtime.http.listening import check_listen

    if options.log is not None:
        check_target(options.log)
    if options.port:
        check_listen(options.host, options.port)
    check_dashboard(options)


def make_teller(
    models: Mapping[str, LocalModel], tasks: TaskDeployment | None
) -> Callable[[str], None]:
    """Return what writes a line to stderr; with weights that stand in, every line says so."""
    stand_ins = [f"{name}: {m.stand_in}" for name, m in models.items() if m.stand_in]
    stand_ins += [f"{name}: {text}" for name, text in (tasks.stand_ins if tasks else {}).items()]
    if not stand_ins:
        return note
    mark = f"[stand-in, {'; '.join(stand_ins)}]"
    return lambda text: note(f"{mark} {text}")


class FabricOffer:
    """A fleet as one node of a fabric."""

    def __init__(self, fabric: str, name: str | None, fleet: LocalFleet) -> None:
        from atoll.fabric.identity.access import Access

        self._access = Access.open(fabric)
        self._name = name
        self._fleet = fleet
        self._node: JoinedNode | None = None

    async def start(self) -> None:
        """Join the fabric as a node that offers the gateway's address."""
        import dataclasses

        from atoll.runtime.join.hardware import host_name
        from atoll.runtime.join.node import JoinedNode
        from atoll.runtime.join.options import JoinOptions

        access = self._access
        if access.is_open:
            access = dataclasses.replace(access, open_name=self._name or host_name())
        options = JoinOptions(url=self._fleet.url, name=self._name)
        self._node = JoinedNode(options, access, self._fleet.home, say=note)
        await self._node.start()

    async def stop(self) -> None:
        """Finish what came from there, and leave."""
        if self._node is not None:
            with contextlib.suppress(AtollError):
                await self._node.leave()
            await self._node.close()


async def serve_until_stopped(
    fleet: LocalFleet,
    started: StartProgress,
    options: FleetSettings,
    offer: FabricOffer | None = None,
) -> None:
    """Start a fleet, say where it answers, and stop it when told to; a second signal stops it at once."""
    from atoll.runtime.supervise.agent import ProcessError

    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.create_task(fleet.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        started.tell("stopped before it was ready")
        return
    try:
        starting.result()
    except ProcessError as error:
        _last_words(error, started.tell)
        raise
    started.is_up = True
    started.say("serving")
    if offer is not None:
        await offer.start()
    for endpoint in fleet.state().endpoints:
        if endpoint.stand_in:
            started.tell(f"{endpoint.id} answers with other weights than the plan's")
    choices = fleet.gateway.chooser.choices.by_name
    asked = {name: c.name for c in choices.values() for name in c.dealer.shares}
    state = fleet.state()
    _announce(state, options.as_json, asked)
    reached = ("--gateway", state.url, "--admin-socket", state.admin_socket)
    beside = start_dashboard(options, reached, started.tell)
    await stopped
    if beside is not None:
        await asyncio.to_thread(beside.stop)
    started.say("finishing what runs (Ctrl-C again stops at once)")
    stopping = asyncio.create_task(_stop(fleet, options.drain, offer))
    hurried = asyncio.create_task(at_once.wait())
    await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        await fleet.gateway.close()
        await fleet.agent.close()
    hurried.cancel()
    started.tell("stopped")


async def _stop(fleet: LocalFleet, drain_s: float, offer: FabricOffer | None) -> None:
    if offer is not None:
        await offer.stop()
    await fleet.stop(drain_s)


def _last_words(error: ProcessError, tell: Callable[[str], None]) -> None:
    for line in error.lines:
        tell(f"{error.name}: {line}")


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
