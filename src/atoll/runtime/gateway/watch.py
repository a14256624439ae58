"""A gateway alone: its configuration from a file, followed while it changes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.core.files import load_yaml
from atoll.runtime.backends import Pool
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewayFile
from atoll.telemetry.logs import JsonLog

_LOOK_S = 0.5
_DRAIN_S = 30.0
TOKEN_VARIABLE = "ATOLL_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
"""Sets the admin token, so that it need not stand in a file."""


def read_config(path: Path) -> GatewayFile:
    """Read a configuration (YAML or JSON); what is wrong is an InputError."""
    file = GatewayFile.parse(load_yaml(path) or {}, path=path)
    token = os.environ.get(TOKEN_VARIABLE)
    return file.model_copy(update={"admin_token": token}) if token else file


async def run(path: Path, ready: asyncio.Future[tuple[str, int]] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once. Returns the exit code."""
    config = read_config(path)
    log = JsonLog()
    pool = Pool(config.backends, outliers=config.outliers, policy=config.policy)
    gateway = Gateway(pool, config, log=log)
    loop = asyncio.get_running_loop()
    stop, kill = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (kill if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    address = await gateway.start()
    if ready is not None:
        ready.set_result(address)
    follow = loop.create_task(_follow(path, config, gateway))
    await stop.wait()
    follow.cancel()
    drained = loop.create_task(gateway.drain(_DRAIN_S))
    killed = loop.create_task(kill.wait())
    await asyncio.wait({drained, killed}, return_when=asyncio.FIRST_COMPLETED)
    killed.cancel()
    drained.cancel()
    await gateway.close()
    return 0


async def _follow(path: Path, config: GatewayFile, gateway: Gateway) -> None:
    """Take over what changes in the file; what cannot be read is logged and changes nothing."""
    seen = _mark(path)
    while True:
        await asyncio.sleep(_LOOK_S)
        now = _mark(path)
        if now == seen or now is None:
            continue
        seen = now
        try:
            new = read_config(path)
            gateway.pool.replace(new.backends)
        except AtollError as error:
            gateway.log.event("config.refused", path=str(path), error=str(error))
            continue
        if (new.host, new.port, new.policy, new.outliers) != (
            config.host,
            config.port,
            config.policy,
            config.outliers,
        ):
            gateway.log.event("config.partly", needs_restart="host, port, policy, outliers")
        config = new
        gateway.configure(new)
        gateway.log.event("config.changed", backends=len(new.backends))


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
