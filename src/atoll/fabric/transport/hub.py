"""A hub: the only kind of member that listens. It passes on what others say and reads none of it.

It is a member of the registry too, so that newcomers find somebody who knows, silent sessions get their
obituary, and revoked certificates are told to everybody. `atoll hub` runs one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zenoh

from atoll.core.errors import InputError, UsageError
from atoll.fabric.identity.access import (
    DEFAULT_PORT,
    PREFIX,
    Access,
    is_loopback,
    parse_address,
    split_address,
)
from atoll.fabric.identity.authority import Authority, read_revoked
from atoll.fabric.registry.records import Metadata, SessionState
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.settings import FabricSettings
from atoll.telemetry.logs import Log, SilentLog

_LOOK_S = 2.0
_FLUSH_S = 0.5
_MOST_REVOKED = 1024
# Names of hubs are not verified on purpose (see `link`), which needs no warning.
_TRANSPORT_LOG = "error,zenoh_link_tls=warn,zenoh_link_tls::utils=error"


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How a hub runs."""

    access: Access
    listen: tuple[str, ...]
    revoked: Path | None = None
    """A `revoked.json` that is watched."""
    settings: FabricSettings = field(default_factory=FabricSettings)


def hub_options(
    fabric: str | None,
    *,
    listen: Sequence[str] = (),
    insecure: bool = False,
    revoked: Path | None = None,
    peers: Sequence[str] = (),
    settings: FabricSettings | None = None,
) -> HubOptions:
    """Work out what a hub needs; `fabric` is its token, None for an open fabric.

    It listens at every address of this machine and the port its fabric expects, unless told otherwise. An
    open one listens on loopback, elsewhere only if `insecure`. `peers` are other hubs of an open fabric.
    """
    settings = settings or FabricSettings()
    addresses = tuple(parse_address(address) for address in listen)
    if fabric is None:
        addresses = addresses or (f"127.0.0.1:{DEFAULT_PORT}",)
        far = [address for address in addresses if not is_loopback(address)]
        if far and not insecure:
            raise UsageError(
                f"without certificates anybody could read and write at {far[0]}",
                field="--listen",
                hint="make certificates with 'atoll fabric init', or insist: --insecure",
            )
        access = Access.open_at(
            [*addresses, *peers], name="hub", provider="nobody", role="hub", insecure=insecure
        )
        return HubOptions(access, addresses, revoked, settings)
    access = Access.open(fabric)
    identity = access.identity
    if identity.role != "hub":
        raise UsageError(
            f"this token is of {identity.name!r}, a {identity.role}, not of a hub",
            hint="use hub-h0.token of the folder that 'atoll fabric init' made",
        )
    if not addresses:
        number = int(identity.slot[1:])
        _, port = split_address(access.hubs[number] if number < len(access.hubs) else "")
        addresses = (f"0.0.0.0:{port}",)
    return HubOptions(access, addresses, revoked or _revoked_beside(fabric), settings)


def _revoked_beside(fabric: str) -> Path | None:
    """The revoked.json in the folder of a token's file."""
    if fabric.startswith(PREFIX) or not Path(fabric.removeprefix("@")).is_file():
        return None
    return Path(fabric.removeprefix("@")).parent / "revoked.json"


class Hub:
    """A running hub: a member that listens, and tells everybody which certificates are revoked."""

    def __init__(self, options: HubOptions, fabric: Fabric, log: Log) -> None:
        """Take over a connected fabric; `start` is what callers use."""
        self.options = options
        self.fabric = fabric
        self._log = log
        self._revoked: tuple[int, ...] = ()
        self._seen: tuple[int, int] | None = None
        self._task = asyncio.get_running_loop().create_task(self._look())

    @classmethod
    async def start(cls, options: HubOptions, log: Log | None = None) -> Hub:
        """Listen and join the registry."""
        log = log or SilentLog()
        access = options.access
        revoked = _serials(options.revoked)
        fabric = await Fabric.connect(
            access,
            Metadata(
                name=access.identity.name,
                provider=access.identity.provider,
                role="hub",
                revoked=_hex(revoked),
            ),
            state=SessionState.SERVING,
            settings=options.settings,
            log=log,
            listen=options.listen,
            denied=_slots_of(options.revoked, revoked),
        )
        fabric.verifier.revoke(revoked)
        hub = cls(options, fabric, log)
        hub._revoked = revoked
        return hub

    async def close(self) -> None:
        """Leave and stop listening."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.fabric.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            path = self.options.revoked
            if path is None or not path.exists():
                continue
            stat = path.stat()
            if self._seen == (stat.st_mtime_ns, stat.st_size):
                continue
            self._seen = (stat.st_mtime_ns, stat.st_size)
            try:
                serials = read_revoked(path)
            except InputError as error:
                self._log.event("hub.revoked_unreadable", error=str(error))
                continue
            if set(serials) <= set(self._revoked):
                continue
            self._revoked = serials
            self.fabric.verifier.revoke(serials)
            self._log.event("hub.revoked", serials=_hex(serials))
            if len(serials) > _MOST_REVOKED:
                self._log.event("hub.revoked_too_many", told=_MOST_REVOKED, of=len(serials))
            await self.fabric.announce(
                metadata=msgspec.structs.replace(self.fabric.metadata, revoked=_hex(serials))
            )
            self.fabric.recheck()


def _serials(path: Path | None) -> tuple[int, ...]:
    return () if path is None else read_revoked(path)


def _hex(serials: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{serial:x}" for serial in serials)[-_MOST_REVOKED:]


def _slots_of(path: Path | None, serials: Sequence[int]) -> frozenset[str]:
    """Slots of revoked members, where the authority's list of members lies beside the file."""
    if path is None or not serials or not (path.parent / "fabric.json").exists():
        return frozenset()
    wanted = set(serials)
    members = Authority(path.parent).members
    return frozenset(m.slot for m in members if int(m.serial, 16) in wanted)


async def serve(options: HubOptions, log: Log, ready: Callable[[Hub], None]) -> None:
    """Run a hub until SIGTERM or SIGINT; `ready` is called once it listens.

    After that, connections that TLS refuses are written to stdout by the transport itself, as text.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    hub = await Hub.start(options, log)
    log.event("hub.listening", addresses=options.listen, sid=hub.fabric.sid)
    log.flush()
    ready(hub)
    zenoh.init_log_from_env_or(_TRANSPORT_LOG)
    try:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await stop.wait()
            log.flush()
    finally:
        log.event("hub.stopping", sid=hub.fabric.sid)
        await hub.close()
        log.flush()
