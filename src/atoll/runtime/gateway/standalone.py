"""A gateway alone: its configuration from a file, followed while it changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from atoll.core.errors import AtollError, InputError
from atoll.core.files import load_yaml
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.cors import CorsSettings
from atoll.runtime.gateway.settings import GatewayFile
from atoll.runtime.http.program import StopSignals, unless
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.logs import JsonLog

_LOOK_S = 0.5
_DRAIN_S = 30.0
_FIXED = ("host", "port", "share_port", "policy", "outliers", "admin_socket", "metrics")
"""Settings that need a restart."""
_PLACES = ("host", "port", "backends")
TOKEN_VARIABLE = "ATOLL_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
"""Sets the admin token, so that it need not stand in a file."""


def read_config(path: Path | None) -> GatewayFile:
    """Read a configuration (YAML or JSON), or take the defaults; what is wrong is an InputError."""
    file = GatewayFile() if path is None else GatewayFile.parse(load_yaml(path) or {}, path=path)
    token = os.environ.get(TOKEN_VARIABLE)
    return file.model_copy(update={"admin_token": token}) if token else file


def read_settings(path: Path | None, origins: Sequence[str] = ()) -> dict[str, Any]:
    """Return settings of a gateway that others start, as they are written; what is wrong is an InputError.

    `path` is a configuration without backends and addresses, `origins` are those whose pages may ask.
    """
    read = {} if path is None else load_yaml(path) or {}
    GatewayFile.parse(read, path=path)
    given: dict[str, Any] = dict(read) if isinstance(read, Mapping) else {}
    for name in _PLACES:
        if name in given:
            raise InputError("whoever starts the gateway says it", path=path, field=name)
    if origins:
        cors = CorsSettings.parse((given.get("cors") or {}) | {"origins": list(origins)})
        given = given | {"cors": cors.model_dump(mode="json", exclude_defaults=True)}
    return given


async def run(path: Path, ready: asyncio.Future[tuple[str, int]] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once. Returns the exit code."""
    config = read_config(path)
    log = JsonLog()
    pool = BackendPool(config.backends, outliers=config.outliers, policy=config.policy)
    gateway = Gateway(pool, config, log=log)
    signals = StopSignals(is_interactive=True)
    address = await gateway.start()
    if ready is not None:
        ready.set_result(address)
    following = asyncio.create_task(follow(path, config, gateway))
    await signals.asked.wait()
    following.cancel()
    await drain(gateway, _DRAIN_S, signals)
    return 0


async def drain(gateway: Gateway, seconds: float, signals: StopSignals) -> None:
    """Let a gateway finish what runs, unless asked to hurry, and close it."""
    await unless(signals.at_once, gateway.drain(seconds))
    await gateway.close()


async def follow(
    path: Path,
    config: GatewayFile,
    gateway: Gateway,
    overruled: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Take over what changes in the file; what cannot be read is logged and changes nothing.

    `overruled` are settings that were given otherwise and stay.
    """
    last_mark = _mark(path)
    while True:
        await asyncio.sleep(_LOOK_S)
        now = _mark(path)
        if now == last_mark or now is None:
            continue
        last_mark = now
        try:
            new = read_config(path).model_copy(update=overruled)
            gateway.pool.replace(new.backends)
        except AtollError as error:
            gateway.log.event("config.refused", path=str(path), error=str(error))
            continue
        if any(getattr(new, field) != getattr(config, field) for field in _FIXED):
            gateway.log.event("config.partly", needs_restart=", ".join(_FIXED))
        config = new
        gateway.configure(new)
        gateway.log.event("config.changed", backends=len(new.backends))


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
