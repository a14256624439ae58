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
from atoll.core.open_files import allow_files
from atoll.fabric.identity import fabric_keys as keys
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
from atoll.fabric.transport.eviction import LinkEvictor
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.transport.link import UnreachableError
from atoll.fabric.transport.panics import hushed
from atoll.telemetry.logs import Log, SilentLog

_LOOK_S = 2.0
# From telling members to cutting them off, so that they hear why.
_LAST_WORD_S = 0.1
_RELOAD_S = 1.0
"""From putting somebody out to reading the rules again: more may follow."""
_TURN_S = 5.0
"""Between two hubs that do so."""
# Between tries to listen again: the port of the session before is not free at once.
_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# Files beside one link for every slot.
_SPARE_FILES = 256
_FLUSH_S = 0.5
_MAX_REVOKED = 1024
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
    """A running hub: a member that listens, and tells everybody which certificates are revoked.

    A member that is revoked is told so, then cut off, and again whenever it comes back. Meanwhile the hub
    opens its session anew, with rules by which that slot may say and hear nothing; hubs do so one after the
    other, so that members have one to go to.
    """

    def __init__(self, options: HubOptions, log: Log) -> None:
        """Take the options; `start` is what callers use."""
        self.options = options
        self.fabric: Fabric
        self.reloads = 0
        """How often the rules were read again."""
        self._log = log
        self._revoked = _serials(options.revoked)
        self._denied: frozenset[str] = frozenset()
        self._evictor: LinkEvictor | None = None
        self._seen: tuple[int, int] | None = None
        self._unknown: set[str] = set()
        self._news = asyncio.Event()
        self._busy = asyncio.Lock()  # nobody is told of anything while the session is opened anew
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, options: HubOptions, log: Log | None = None) -> Hub:
        """Listen and join the registry."""
        hub = cls(options, log or SilentLog())
        await hub._open()
        loop = asyncio.get_running_loop()
        hub._tasks = [loop.create_task(hub._look()), loop.create_task(hub._follow())]
        return hub

    async def _open(self) -> None:
        options, identity = self.options, self.options.access.identity
        self._denied |= _slots_of(options.revoked, self._revoked)
        self.fabric = await Fabric.connect(
            options.access,
            Metadata(
                name=identity.name,
                provider=identity.provider,
                role="hub",
                revoked=_hex(self._revoked),
            ),
            state=SessionState.SERVING,
            settings=options.settings,
            log=self._log,
            listen=options.listen,
            denied=self._denied,
            hear_loads=False,
        )
        self.fabric.verifier.revoke(self._revoked)
        self.fabric.on_revoked.append(self._deny)
        if not options.access.is_open:
            self._evictor = self.fabric.watch_links(self._noticed)

    async def close(self) -> None:
        """Leave and stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close_fabric()

    async def _close_fabric(self) -> None:
        with hushed() as panics:
            await self.fabric.close()
        if panics:
            self._log.event("hub.transport_failed", panics=panics[:4], count=len(panics))

    def _deny(self) -> None:
        """Cut off whoever is revoked and still has rights here, and have the rules read again."""
        revoked = self.fabric.verifier.shunned() | _slots_of(self.options.revoked, self._revoked)
        if self._evictor is None or revoked <= self._denied:
            return
        self._log.event("hub.cut_off", slots=sorted(revoked - self._denied))
        self._evictor.deny(revoked - self._denied)
        self._denied |= revoked
        self._news.set()

    async def _follow(self) -> None:
        """Read the rules again whenever somebody was put out."""
        number = int(self.options.access.identity.slot[1:])
        while True:
            await self._news.wait()
            others = [p for p in self.fabric.peers() if p.metadata.role == "hub" and p.alive]
            # One hub after the other, by number, so that members find one that listens.
            await asyncio.sleep(_RELOAD_S + (number * _TURN_S if others else 0.0))
            async with self._busy:
                # Cleared before the session opens: what comes meanwhile leads to another round.
                self._news.clear()
                await self._close_fabric()
                await self._open_again()
            self.reloads += 1
            self._log.event("hub.reloaded", denied=sorted(self._denied), sid=self.fabric.sid)

    async def _open_again(self) -> None:
        for pause_s in _PAUSES_S:
            try:
                await self._open()
            except UnreachableError:  # the port is not free yet
                await asyncio.sleep(pause_s)
            else:
                return
        # The last try says what is wrong.
        await self._open()

    def check(self) -> None:
        """Raise what has ended this hub's work, if anything has."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def _noticed(self, slot: str) -> None:
        """Somebody has connected: one whose slot is newer than this hub's rules can do nothing here."""
        number = int(slot[1:]) if keys.is_slot(slot) and not keys.is_hub(slot) else 0
        if number >= self.options.access.slots and slot not in self._unknown:
            self._unknown.add(slot)
            self._log.event(
                "hub.slot_unknown",
                slot=slot,
                slots=self.options.access.slots,
                hint="the fabric has grown: restart this hub with its token of now",
            )

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
            # What has expired leaves the file, so fewer serials are no news.
            if set(serials) <= set(self._revoked):
                continue
            self._revoked = serials
            await self._tell()

    async def _tell(self) -> None:
        """Tell everybody who is revoked: first the members, so that theirs know why they are cut off."""
        async with self._busy:
            await self._tell_of(self.fabric, self._revoked)

    async def _tell_of(self, fabric: Fabric, serials: tuple[int, ...]) -> None:
        fabric.verifier.revoke(serials)
        self._log.event("hub.revoked", serials=_hex(serials))
        if len(serials) > _MAX_REVOKED:
            self._log.event("hub.revoked_too_many", told=_MAX_REVOKED, of=len(serials))
        await fabric.announce(
            metadata=msgspec.structs.replace(fabric.metadata, revoked=_hex(serials))
        )
        await fabric.flush()
        await asyncio.sleep(_LAST_WORD_S)
        fabric.recheck()


def _serials(path: Path | None) -> tuple[int, ...]:
    return () if path is None else read_revoked(path)


def _hex(serials: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{serial:x}" for serial in serials)[-_MAX_REVOKED:]


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
    wanted = options.access.slots + _SPARE_FILES
    if allow_files(wanted) < wanted:
        log.event("hub.few_files", slots=options.access.slots, hint="raise 'ulimit -n'")
    hub = await Hub.start(options, log)
    log.event("hub.listening", addresses=options.listen, sid=hub.fabric.sid)
    log.flush()
    ready(hub)
    # After `ready`: from here on the transport writes to stdout by itself.
    zenoh.init_log_from_env_or(_TRANSPORT_LOG)
    try:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await stop.wait()
            hub.check()
            log.flush()
    finally:
        log.event("hub.stopping", sid=hub.fabric.sid)
        await hub.close()
        log.flush()
