"""How the nodes of one instance find each other: each says where it is, and waits for the others.

They meet in the fabric, whose records are signed, or in a folder that all of them see. Nobody has to know an
address beforehand, so the same commands work in a Slurm job, in pods and on rented machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import Field

from atoll.core.errors import AtollError, InputError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen

if TYPE_CHECKING:
    from atoll.fabric.registry.peers import Peer
    from atoll.fabric.transport.fabric import Fabric

MEETING = "atoll.meeting"
MEMBER = "atoll.node"
ADDRESS = "atoll.address"
POOL = "atoll.pool"
WORD = "atoll.helps"
FOLDER_VARIABLE = "ATOLL_MEETING"
ADDRESS_VARIABLE = "ATOLL_ADDRESS"
_MAX_BYTES = 4096
_POLL_S = 0.1
_PORT_TRIES = 64
_LASTING = range(20_000, 28_000, 16)
"""First ports of rows that are found again: below those that Linux and Kubernetes give to whoever asks."""
_STALE_S = 5.0
"""How long after its last sign a member counts as there, in a folder."""
_INTERFACE_ADDRESS = 0x8915
"""SIOCGIFADDR of netdevice(7)."""


class MemberAddress(Frozen):
    """Where a node can be reached by the others: an address and two ports of its own.

    The ports after the first are its own too, where it asked for several in a row (`hold_address`). `begun`
    is the digest of all members (`digest_members`) once it has begun its work with them.
    """

    host: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9.:_-]+$")
    ports: tuple[int, int]
    begun: str = Field("", max_length=64)

    def is_same(self, other: MemberAddress | None) -> bool:
        """Whether both are one start of a node: one that starts anew has other ports."""
        return other is not None and (self.host, self.ports) == (other.host, other.ports)

    def endpoint(self, which: int = 0) -> str:
        """Return one of its ports as ZeroMQ writes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.ports[which]}"


@dataclass(frozen=True, slots=True)
class PoolWord:
    """Message of a node to a pool: its name, and one line that members of the pool understand."""

    pool: str
    text: str


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A node that helps in a pool: its id in its instance, what it said, and where it is."""

    node: str
    text: str
    address: MemberAddress


class MeetingPlace(Protocol):
    """Where members say that they are there."""

    async def enter(self, node: str, address: MemberAddress, word: PoolWord | None = None) -> None:
        """Say where this node is, and to a pool what it helps with."""
        ...

    async def withdraw(self) -> None:
        """Help no more; the others of the instance still see this node."""
        ...

    async def helpers(self, pool: str) -> Sequence[PoolMember]:
        """Return who helps in a pool now."""
        ...

    async def members(self) -> Mapping[str, MemberAddress]:
        """Return who is there now."""
        ...

    async def departed(self) -> Collection[str]:
        """Return those of them who were there and have said that they leave."""
        ...

    async def stay(self) -> None:
        """Show that this node is still there; called every second or so."""
        ...

    async def leave(self) -> None:
        """Say that this node is there no more."""
        ...


class FolderMeeting:
    """A meeting in a folder that all nodes see; a file for each of them."""

    def __init__(self, folder: Path, name: str) -> None:
        if not name or "/" in name or name.startswith("."):
            raise InputError(f"{name!r} is no name of a meeting", field="--meeting")
        self._all, self._name = folder, name
        self._folder = folder / name
        self._own: Path | None = None
        self._word: Path | None = None
        self._signs: dict[str, tuple[int, float]] = {}

    async def enter(self, node: str, address: MemberAddress, word: PoolWord | None = None) -> None:
        """Write where this node is, and for a pool what it helps with."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own = self._folder / f"{node}.json"
        atomic_write(self._own, address.to_json())
        if word is not None:
            pool = self._pool(word.pool)
            pool.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._word = pool / f"{self._name}.{node}.json"
            said = {"node": node, "text": word.text, "address": address.model_dump()}
            atomic_write(self._word, json.dumps(said))

    async def withdraw(self) -> None:
        """Remove what the pool reads."""
        if self._word is not None:
            self._word.unlink(missing_ok=True)

    async def helpers(self, pool: str) -> Sequence[PoolMember]:
        """Read what nodes wrote for the pool."""
        found = []
        for path in sorted(self._pool(pool).glob("*.json")):
            try:
                said = json.loads(read_text_limited(path, _MAX_BYTES))
                address = MemberAddress.parse(said["address"])
                found.append(PoolMember(str(said["node"]), str(said["text"]), address))
            except (AtollError, ValueError, KeyError, TypeError):
                continue
        return found

    def _pool(self, pool: str) -> Path:
        if not pool or "/" in pool:
            raise InputError(f"{pool!r} is no name of a pool", field="--pool")
        return self._all / f".pool-{pool}"

    async def members(self) -> Mapping[str, MemberAddress]:
        """Read who is there; a file that was just removed is somebody who left."""
        found = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                address = MemberAddress.from_json(read_text_limited(path, _MAX_BYTES))
                sign = path.stat().st_mtime_ns
            except (AtollError, FileNotFoundError):
                if path.exists():
                    raise
                continue
            # By this clock, whatever the folder's own says: it has changed since it was looked at.
            before, since_s = self._signs.get(path.stem, (0, 0.0))
            if sign != before:
                since_s = time.monotonic()
            self._signs[path.stem] = sign, since_s
            if path == self._own or time.monotonic() - since_s < _STALE_S:
                found[path.stem] = address
        return found

    async def departed(self) -> Collection[str]:
        """Return whose file was there and is no more."""
        return [node for node in self._signs if not (self._folder / f"{node}.json").exists()]

    async def stay(self) -> None:
        """Touch the file of this node."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                os.utime(self._own)

    async def leave(self) -> None:
        """Remove the files of this node."""
        await self.withdraw()
        if self._own is not None:
            self._own.unlink(missing_ok=True)


class FabricMeeting:
    """A meeting in a fabric: a session of each node carries its address as labels, under its signature.

    Only members of the same provider count: others of the fabric cannot pass for a node of the instance.
    """

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.fabric, self._name = fabric, name
        self._own: dict[str, MemberAddress] = {}
        self._sessions: dict[str, str] = {}

    @classmethod
    async def connect(cls, token: str | None, name: str, node: str) -> FabricMeeting:
        """Join the fabric of a token (None: of $ATOLL_FABRIC) as a node that serves nothing by itself."""
        import dataclasses

        from atoll.fabric.identity.access import Access
        from atoll.fabric.registry.records import Metadata
        from atoll.fabric.transport.fabric import Fabric

        access = Access.open(token)
        title = f"{name}.{node}"[:100]
        if access.is_open:
            access = dataclasses.replace(access, open_name=title)
        # Provider and role become those of the certificate.
        metadata = Metadata(name=title, provider="", role="worker")
        return cls(await Fabric.connect(access, metadata), name)

    async def enter(self, node: str, address: MemberAddress, word: PoolWord | None = None) -> None:
        """Announce where this node is, and to a pool what it helps with."""
        self._own = {node: address}
        labels = {MEETING: self._name, MEMBER: node, ADDRESS: address.to_json()}
        await self._announce(labels | ({} if word is None else {POOL: word.pool, WORD: word.text}))

    async def withdraw(self) -> None:
        """Announce the same without the pool."""
        labels = self.fabric.metadata.labels
        if POOL in labels:
            await self._announce({k: v for k, v in labels.items() if k not in (POOL, WORD)})

    async def helpers(self, pool: str) -> Sequence[PoolMember]:
        """Return those who live, and whose latest record says that they help."""
        found = []
        for peer in self._here():
            labels = peer.metadata.labels
            if labels.get(POOL) != pool or not peer.alive:
                continue
            try:
                address = MemberAddress.from_json(labels.get(ADDRESS, ""))
            except InputError:
                continue
            found.append(PoolMember(labels.get(MEMBER, ""), labels.get(WORD, ""), address))
        return found

    async def _announce(self, labels: dict[str, str]) -> None:
        import msgspec

        from atoll.fabric.registry.records import SessionState

        known = self.fabric.metadata
        # A session that has joined and serves nothing gets no requests.
        await self.fabric.announce(SessionState.JOIN, msgspec.structs.replace(known, labels=labels))

    async def members(self) -> Mapping[str, MemberAddress]:
        """Return those who live, and whose latest record says that they are here."""
        found = {}
        for peer in self._here():
            labels = peer.metadata.labels
            if labels.get(MEETING) != self._name or not peer.alive:
                continue
            node = labels.get(MEMBER, "")
            try:
                found[node] = MemberAddress.from_json(labels.get(ADDRESS, ""))
            except InputError:
                continue
            self._sessions[node] = peer.sid
        return found | self._own

    async def departed(self) -> Collection[str]:
        """Return those whose session has ended by their own word."""
        from atoll.fabric.registry.records import SessionState

        known = {node: self.fabric.peer(sid) for node, sid in self._sessions.items()}
        return [node for node, peer in known.items() if peer and peer.state is SessionState.LEFT]

    async def stay(self) -> None:
        """Do nothing: the fabric sees by its own signs who is there."""

    def session_at(self, host: str, port: int) -> str | None:
        """Return the session of the latest member that says it is at a host and port; None: nobody does."""
        found = None
        for peer in self._here():
            with contextlib.suppress(InputError):
                address = MemberAddress.from_json(peer.metadata.labels.get(ADDRESS, ""))
                if (address.host, address.ports[0]) == (host, port) and peer.alive:
                    found = peer.sid
        return found

    def _here(self) -> Iterator[Peer]:
        """Members of the same provider that have not left, the oldest first."""
        from atoll.fabric.registry.records import SessionState

        own = self.fabric.identity.provider
        for peer in sorted(self.fabric.peers(), key=lambda peer: (peer.since_s, peer.sid)):
            if peer.provider == own and peer.state not in (SessionState.DOWN, SessionState.LEFT):
                yield peer

    async def leave(self) -> None:
        """Say that it has left, and close."""
        await self.fabric.leave()
        await self.fabric.close()


async def open_meeting(name: str, node: str) -> tuple[MeetingPlace, str | None]:
    """Return where nodes meet, and the address of a hub: $ATOLL_MEETING is a folder, else $ATOLL_FABRIC."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        return FolderMeeting(Path(folder), name), None
    from atoll.fabric.identity.access import Access

    toward = Access.open(None).hubs[0]
    return await FabricMeeting.connect(None, name, node), toward


def digest_members(members: Mapping[str, MemberAddress]) -> str:
    """Return a short digest of who they are and where, which another start of one of them does not have."""
    said = [(node, each.host, each.ports) for node, each in sorted(members.items())]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


async def gather_members(
    place: MeetingPlace, nodes: Sequence[str], max_s: float
) -> Mapping[str, MemberAddress]:
    """Wait until all nodes are there; AtollError names those that are not.

    Who has begun with others, because a node was started anew since, is waited for until it is, too.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + max_s
    while True:
        everyone = await place.members()
        found = {node: everyone[node] for node in nodes if node in everyone}
        ready = ("", digest_members(found))
        missing = [node for node in nodes if node not in found or found[node].begun not in ready]
        if not missing:
            return found
        if loop.time() > until_s:
            raise AtollError(
                f"{', '.join(missing)} did not come within {max_s:g} s",
                hint="look at the logs of these nodes",
            )
        await asyncio.sleep(_POLL_S)


def own_address(toward: str | None = None, ports: int = 1) -> MemberAddress:
    """Return where this node can be reached, with ports that were free just now (see `hold_address`)."""
    with hold_address(toward, ports) as address:
        return address


def list_lasting(key: str) -> list[int]:
    """Return the ports to ask for first where those of one start should be those of the next one.

    Where several of a key stand on a host they are the first ports of rows that are next to each other.
    """
    begin = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) % len(_LASTING)
    return [*_LASTING[begin:], *_LASTING[:begin]]


@contextlib.contextmanager
def hold_address(
    toward: str | None = None,
    ports: int = 1,
    *,
    first: Sequence[int] = (),
    second: Sequence[int] = (),
) -> Iterator[MemberAddress]:
    """Hold an address at which this node can be reached: $ATOLL_ADDRESS, else what leads to `toward`.

    `toward` is host:port. The first port and those after it, `ports` in a row, and the second are given to
    nobody else who asks for any, for as long as this lasts; whoever names them may listen there (engines take
    a minute until they do), if it sets SO_REUSEADDR as servers do. Only Linux keeps ports so, and only there
    those are tried before any others that `first` and `second` name (`list_lasting`). Not both: a node that
    starts anew is known by a port that is another.
    """
    host = os.environ.get(ADDRESS_VARIABLE) or _outgoing_address(toward or "192.0.2.1:9")
    linux = sys.platform.startswith("linux")
    with contextlib.ExitStack() as held:
        finder = _PortFinder(host, held)
        address = MemberAddress(
            host=host,
            ports=(
                finder.find(ports, first if linux and ports <= _LASTING.step else ()),
                finder.find(1, second if linux else ()),
            ),
        )
        if not linux:
            held.close()
        yield address


class _PortFinder:
    """Finds free ports of a host, and holds them."""

    def __init__(self, host: str, held: contextlib.ExitStack) -> None:
        self._host, self._held = host, held
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def find(self, count: int, wanted: Sequence[int]) -> int:
        """Return the first of so many ports in a row: one of those wanted, else any."""
        problem: OSError | None = None
        for port in (*wanted, *[0] * _PORT_TRIES):
            with contextlib.ExitStack() as stack:
                try:
                    found = self._take(stack, port, claim=True) if port else self._take(stack, 0)
                    for number in range(1, count):
                        self._take(stack, found + number, claim=port != 0)
                except (OSError, OverflowError) as error:
                    problem = error if isinstance(error, OSError) else None
                    if problem is not None and problem.errno != errno.EADDRINUSE:
                        break
                else:
                    self._held.push(stack.pop_all())
                    return found
        raise InputError(
            f"{self._host} is no address of this machine:"
            f" {problem.strerror if problem else 'no free ports'}",
            field=ADDRESS_VARIABLE,
            hint="set it to one that the other nodes can reach",
        ) from problem

    def _take(self, stack: contextlib.ExitStack, port: int, *, claim: bool = False) -> int:
        each = stack.enter_context(socket.socket(self._family))
        if claim:
            # Connections of the start before may linger at a port for a minute, which only SO_REUSEADDR
            # overlooks; with it others who hold the port would be overlooked too, but for this name.
            name = stack.enter_context(socket.socket(socket.AF_UNIX))
            name.bind(f"\0atoll-port-{port}")
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind((self._host, port))
        # Set only now: before, it would share a port that another node holds.
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return int(each.getsockname()[1])


def find_interface(host: str) -> str | None:
    """Return the network interface that has an IPv4 address of this machine; None where that is not known."""
    if not sys.platform.startswith("linux") or ":" in host:
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(256, b"\0")
            try:
                answer = fcntl.ioctl(probe, _INTERFACE_ADDRESS, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None


def _outgoing_address(toward: str) -> str:
    """The address from which this machine would send there; nothing is sent."""
    host, _, port = toward.rpartition(":")
    try:
        ways = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, _, _, _, target = ways[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
