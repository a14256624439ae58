"""`atoll join`: offer this machine, and an engine on it, to a fabric."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from atoll.cli.options import VerbSettings, verb
from atoll.core.extras import require_extras
from atoll.core.options import option
from atoll.report.terminal import note
from atoll.runtime.join.join_options import JoinOptions

if TYPE_CHECKING:
    from atoll.runtime.join.joined_node import Hosting, JoinedNode

app = typer.Typer(add_completion=False)


class JoinSettings(VerbSettings, JoinOptions):
    """Options of `atoll join`: what the node is to know, and where it logs."""

    config: Path | None = option(
        None, "A YAML file with any of these options; what is given here wins.", file=True
    )
    engine_log: Path | None = option(
        None, "Where the engine's words go.", panel="How the engine is watched"
    )
    log: Path | None = option(None, "Where events go, as JSON lines; -: standard output.")


@verb(app, JoinSettings, context_settings={"allow_interspersed_args": False})
def join(options: JoinSettings) -> None:
    """Offer this machine to a fabric: with an engine to start, with one that runs, or just the hardware.

    `atoll join --fabric TOKEN -- vllm serve MODEL` starts the engine, watches it, and announces what it
    serves. Ctrl-C or SIGTERM withdraws it, finishes what runs and leaves; a second one stops at once.
    SIGUSR1 says that the end is near (Slurm: --signal=B:USR1@120).
    """
    require_extras("fabric")
    require_extras("serve")
    _run(options)


def _run(options: JoinSettings) -> None:
    import dataclasses

    from atoll.fabric.identity.access import ENVIRONMENT, Access
    from atoll.runtime.endpoints.endpoint import RunDirectory
    from atoll.runtime.http.program import run
    from atoll.runtime.join.hardware import host_name
    from atoll.runtime.local.fleet_state import new_home, remove_home
    from atoll.telemetry.logs import JsonLog

    access = Access.open(options.fabric)
    if access.is_open:
        access = dataclasses.replace(access, open_name=options.name or host_name())
    # The engine need not know the key of this machine's certificate.
    os.environ.pop(ENVIRONMENT, None)
    home = RunDirectory(new_home())
    descriptor, log = 1, options.log
    if log is not None and str(log) != "-":
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        run(_life(options, access, home, JsonLog(descriptor) if log else None))
    finally:
        if descriptor != 1:
            os.close(descriptor)
        remove_home(home.folder)


async def _life(options: JoinSettings, access: Any, home: Any, log: Any) -> None:
    from atoll.runtime.join.joined_node import JoinedNode
    from atoll.runtime.supervise.agent import ProcessError

    node = JoinedNode(
        *(options, access, home),
        log=log,
        say=_tell,
        engine_log=options.engine_log,
        host=_host if options.waits else None,
    )
    at_once = _signals(node)
    try:
        if await _unless(at_once, node.start()):
            await node.wait_ended()
            await _unless(at_once, node.leave())
    except ProcessError as error:
        for line in error.lines:
            note(f"{error.name}: {line}")
        raise
    finally:
        await node.close()
    _tell("left")


def _host(node: JoinedNode) -> Hosting:
    """Host instances of fleets; what starts them takes a while to load."""
    from atoll.deploy.joined.machine_host import host_instances

    return host_instances(node)


def _signals(node: JoinedNode) -> asyncio.Event:
    """Have signals end the node; the event is set by the second of them."""
    at_once = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if node.stopping:
            at_once.set()
        else:
            _tell("finishing what runs (Ctrl-C again stops at once)")
            node.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
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
