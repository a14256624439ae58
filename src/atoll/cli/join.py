"""`atoll join`: offer this machine, and an engine on it, to a fabric."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.serving import need_fabric, need_serving
from atoll.core.errors import InputError
from atoll.report.terminal import note

if TYPE_CHECKING:
    from atoll.runtime.join.node import JoinedNode
    from atoll.runtime.join.options import JoinOptions

app = typer.Typer(add_completion=False)
_OFFER, _WATCH, _END = "What is offered", "How the engine is watched", "How it ends"


@app.command(context_settings={"allow_interspersed_args": False})
def join(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="The engine's command, after --. {port} in it becomes a free port.",
            show_default=False,
        ),
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            "--fabric",
            envvar="ATOLL_FABRIC",
            show_envvar=True,
            help="The join token, @FILE that holds it, or open://host:port.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", help="A YAML file with any of these options; what is given here wins."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="Offer a server that runs already, or say where COMMAND answers."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Where COMMAND listens, if it does not say.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", envvar="ATOLL_NODE", help="This node's name. Default: the host's."),
    ] = None,
    region: Annotated[
        str | None, typer.Option("--region", envvar="ATOLL_REGION", help="Where it stands.")
    ] = None,
    site: Annotated[
        str | None, typer.Option("--site", envvar="ATOLL_SITE", help="The cluster it belongs to.")
    ] = None,
    price: Annotated[
        str | None,
        typer.Option("--price", help="Of the whole node: $1.86/h.", rich_help_panel=_OFFER),
    ] = None,
    price_in: Annotated[
        float | None,
        typer.Option("--price-in", help="USD per million tokens read.", rich_help_panel=_OFFER),
    ] = None,
    price_out: Annotated[
        float | None,
        typer.Option("--price-out", help="USD per million tokens written.", rich_help_panel=_OFFER),
    ] = None,
    stability: Annotated[
        str | None,
        typer.Option(
            "--stability", help="spot, batch, standard or reserved.", rich_help_panel=_OFFER
        ),
    ] = None,
    max_inflight: Annotated[
        int | None,
        typer.Option("--max-inflight", help="Requests taken at a time.", rich_help_panel=_OFFER),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option("--weight", help="Share of the requests by a plan.", rich_help_panel=_OFFER),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise",
            help="URL at which gateways may reach the engine without the tunnel.",
            rich_help_panel=_OFFER,
        ),
    ] = None,
    tunnel: Annotated[
        bool | None,
        typer.Option(
            "--tunnel/--no-tunnel", help="Take requests through hubs.", rich_help_panel=_OFFER
        ),
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            "--accept",
            help="Whose requests: any, self, allow:NAME,... or deny:NAME,...",
            rich_help_panel=_OFFER,
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", help="KEY=VALUE, shown in `atoll nodes`.", rich_help_panel=_OFFER),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", help="GPUs, if the driver cannot tell: L4:2.", rich_help_panel=_OFFER
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias", help="ALIAS=MODEL: a further name of a model.", rich_help_panel=_OFFER
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="bf16, fp8, int4, ...", rich_help_panel=_OFFER),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Most tokens of a request.", rich_help_panel=_OFFER),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="llm or embedding.", rich_help_panel=_OFFER)
    ] = None,
    service: Annotated[
        str | None,
        typer.Option("--service", help="Name of a service that is no LLM.", rich_help_panel=_OFFER),
    ] = None,
    generic: Annotated[
        bool | None,
        typer.Option(
            "--generic", help="Offer any HTTP service (with --service).", rich_help_panel=_OFFER
        ),
    ] = None,
    engine_key: Annotated[
        str | None,
        typer.Option(
            "--engine-key",
            envvar="ATOLL_ENGINE_KEY",
            show_envvar=True,
            help="API key of the engine.",
            rich_help_panel=_WATCH,
        ),
    ] = None,
    health: Annotated[
        str | None,
        typer.Option("--health", help="Path that says it is well.", rich_help_panel=_WATCH),
    ] = None,
    health_interval: Annotated[
        str | None,
        typer.Option("--health-interval", help="Between looks: 2s.", rich_help_panel=_WATCH),
    ] = None,
    health_failures: Annotated[
        int | None,
        typer.Option(
            "--health-failures", help="Bad looks before it is withdrawn.", rich_help_panel=_WATCH
        ),
    ] = None,
    health_timeout: Annotated[
        str | None,
        typer.Option("--health-timeout", help="Longest look: 5s.", rich_help_panel=_WATCH),
    ] = None,
    ready: Annotated[
        str | None,
        typer.Option("--ready", help="Longest start of the engine: 30min.", rich_help_panel=_WATCH),
    ] = None,
    hung: Annotated[
        str | None,
        typer.Option("--hung", help="Started anew if not well for: 5min.", rich_help_panel=_WATCH),
    ] = None,
    engine_log: Annotated[
        Path | None,
        typer.Option("--engine-log", help="Where the engine's words go.", rich_help_panel=_WATCH),
    ] = None,
    drain: Annotated[
        str | None,
        typer.Option(
            "--drain", help="To finish what runs when stopping: 25s.", rich_help_panel=_END
        ),
    ] = None,
    ends: Annotated[
        str | None,
        typer.Option(
            "--ends",
            help="When this node ends: 2h, 2025-07-01T18:00. Slurm's limit is read by itself.",
            rich_help_panel=_END,
        ),
    ] = None,
    notice: Annotated[
        str | None,
        typer.Option(
            "--notice", help="How long before the end SIGUSR1 comes: 120s.", rich_help_panel=_END
        ),
    ] = None,
    spot: Annotated[
        str | None,
        typer.Option("--spot", help="Heed notices of aws, gcp or azure.", rich_help_panel=_END),
    ] = None,
    accept_assignments: Annotated[
        bool | None,
        typer.Option(
            "--accept-assignments", help="Let operators change what is served (`atoll assign`)."
        ),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option("--models", help="A folder from which operators may assign weights."),
    ] = None,
    proxy: Annotated[
        str | None, typer.Option("--proxy", help="HTTP proxy to the hubs. Default: $https_proxy.")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", help="Where events go, as JSON lines; -: standard output."),
    ] = None,
) -> None:
    """Offer this machine to a fabric: with an engine to start, with one that runs, or just the hardware.

    `atoll join --fabric TOKEN -- vllm serve MODEL` starts the engine, watches it, and announces what it
    serves. Ctrl-C or SIGTERM withdraws it, finishes what runs and leaves; a second one stops at once.
    SIGUSR1 says that the end is near (Slurm: --signal=B:USR1@120).
    """
    need_fabric()
    need_serving()
    given: dict[str, Any] = {
        "fabric": fabric,
        "command": tuple(command) if command else None,
        "url": url,
        "port": port,
        "name": name,
        "region": region,
        "site": site,
        "price": price,
        "price_in": price_in,
        "price_out": price_out,
        "stability": stability,
        "max_inflight": max_inflight,
        "weight": weight,
        "advertise": advertise,
        "tunnel": tunnel,
        "accept": accept,
        "labels": _pairs(label, "--label"),
        "gpus": gpus,
        "aliases": _pairs(alias, "--alias"),
        "precision": precision,
        "context": context,
        "kind": kind,
        "service": service,
        "generic": generic,
        "engine_key": engine_key,
        "health": health,
        "health_interval": health_interval,
        "health_failures": health_failures,
        "health_timeout": health_timeout,
        "ready": ready,
        "hung": hung,
        "drain": drain,
        "ends": ends,
        "notice": notice,
        "spot": spot,
        "accept_assignments": accept_assignments,
        "models": str(models) if models else None,
        "proxy": proxy,
    }
    _run(read_options(config, given), engine_log, log)


def read_options(config: Path | None, given: dict[str, Any]) -> JoinOptions:
    """Return the options of a file with those given on the command line over them."""
    from atoll.core.files import load_yaml
    from atoll.runtime.join.options import JoinOptions

    merged: dict[str, Any] = {}
    if config is not None:
        found = load_yaml(config)
        if not isinstance(found, dict):
            raise InputError("a mapping of options is needed", path=config)
        # In a file options may be written as on the command line.
        merged = {str(key).replace("-", "_"): value for key, value in found.items()}
    merged |= {key: value for key, value in given.items() if value is not None}
    return JoinOptions.parse(merged, path=config)


def _pairs(texts: list[str] | None, field: str) -> dict[str, str] | None:
    if not texts:
        return None
    found = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key or not value:
            raise InputError(f"cannot read {text!r}", field=field, hint="write KEY=VALUE")
        found[key] = value
    return found


def _run(options: JoinOptions, engine_log: Path | None, log: Path | None) -> None:
    import dataclasses

    from atoll.fabric.identity.access import ENVIRONMENT, Access
    from atoll.runtime.adapters.base import Home
    from atoll.runtime.http.loop import run
    from atoll.runtime.join.hardware import host_name
    from atoll.runtime.local.state import new_home, remove_home
    from atoll.telemetry.logs import JsonLog

    access = Access.open(options.fabric)
    if access.is_open:
        access = dataclasses.replace(access, open_name=options.name or host_name())
    # The engine need not know the key of this machine's certificate.
    os.environ.pop(ENVIRONMENT, None)
    home = Home(new_home())
    descriptor = 1
    if log is not None and str(log) != "-":
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        run(_life(options, access, home, engine_log, JsonLog(descriptor) if log else None))
    finally:
        if descriptor != 1:
            os.close(descriptor)
        remove_home(home.folder)


async def _life(
    options: JoinOptions, access: Any, home: Any, engine_log: Path | None, log: Any
) -> None:
    from atoll.runtime.join.node import JoinedNode
    from atoll.runtime.supervise.agent import ProcessError

    node = JoinedNode(options, access, home, log=log, say=_tell, engine_log=engine_log)
    at_once = _signals(node)
    try:
        if await _unless(at_once, node.start()):
            await node.ended()
            await _unless(at_once, node.leave())
    except ProcessError as error:
        for line in error.lines:
            note(f"{error.name}: {line}")
        raise
    finally:
        await node.close()
    _tell("left")


def _signals(node: JoinedNode) -> asyncio.Event:
    """Have signals end the node; the event is set by the second of them."""
    at_once = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked() -> None:
        if node.stopping:
            at_once.set()
        else:
            _tell("finishing what runs (Ctrl-C again stops at once)")
            node.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, asked)
    loop.add_signal_handler(signal.SIGUSR1, node.notice)
    return at_once


async def _unless(at_once: asyncio.Event, work: Any) -> bool:
    """Do something unless there is a hurry; returns whether it was done."""
    working = asyncio.ensure_future(work)
    hurried = asyncio.ensure_future(at_once.wait())
    await asyncio.wait({working, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not working.done():
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        return False
    working.result()
    return True


def _tell(line: str) -> None:
    note(f"atoll: {line}")
    sys.stderr.flush()
