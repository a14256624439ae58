"""How the nodes of one instance find each other: each says where it is, and waits for the others.

They meet in the fabric, whose records are signed, or in a folder that all of them see. Nobody has to know an
address beforehand, so the same commands work in a Slurm job, in pods and on rented machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
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


class MemberAddress(Frozen):
    """Where a node can be reached by the others: an address and two ports of its own.

    The ports after the first are its own too, where it asked for several in a row (`own_address`).
    """

    host: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9.:_-]+$")
    ports: tuple[int, int]

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
                found[path.stem] = MemberAddress.from_json(read_text_limited(path, _MAX_BYTES))
            except AtollError:
                if path.exists():
                    raise
        return found

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
        self._fabric, self._name = fabric, name
        self._own: dict[str, MemberAddress] = {}

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
        labels = self._fabric.metadata.labels
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

        known = self._fabric.metadata
        # A session that has joined and serves nothing gets no requests.
        await self._fabric.announce(
            SessionState.JOIN, msgspec.structs.replace(known, labels=labels)
        )

    async def members(self) -> Mapping[str, MemberAddress]:
        """Return those whose latest record says that they are here."""
        found = {}
        for peer in self._here():
            labels = peer.metadata.labels
            if labels.get(MEETING) != self._name:
                continue
            try:
                found[labels.get(MEMBER, "")] = MemberAddress.from_json(labels.get(ADDRESS, ""))
            except InputError:
                continue
        return found | self._own

    def _here(self) -> Iterator[Peer]:
        """Members of the same provider that have not left, the oldest first."""
        from atoll.fabric.registry.records import SessionState

        own = self._fabric.identity.provider
        for peer in sorted(self._fabric.peers(), key=lambda peer: (peer.since_s, peer.sid)):
            if peer.provider == own and peer.state not in (SessionState.DOWN, SessionState.LEFT):
                yield peer

    async def leave(self) -> None:
        """Say that it has left, and close."""
        await self._fabric.leave()
        await self._fabric.close()


async def gather_members(
    place: MeetingPlace, nodes: Sequence[str], max_s: float
) -> Mapping[str, MemberAddress]:
    """Wait until all nodes are there; AtollError names those that are not."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + max_s
    while True:
        found = await place.members()
        missing = [node for node in nodes if node not in found]
        if not missing:
            return {node: found[node] for node in nodes}
        if loop.time() > until_s:
            raise AtollError(
                f"{', '.join(missing)} did not come within {max_s:g} s",
                hint="look at the logs of these nodes",
            )
        await asyncio.sleep(_POLL_S)


def own_address(toward: str | None = None, ports: int = 1) -> MemberAddress:
    """Return where this node can be reached: $ATOLL_ADDRESS, else what leads to `toward` (host:port).

    The first port and those after it, `ports` in a row, were free just now.
    """
    host = os.environ.get(ADDRESS_VARIABLE) or _outgoing_address(toward or "192.0.2.1:9")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: OSError | None = None
    for _ in range(_PORT_TRIES):
        with contextlib.ExitStack() as stack:

            def bind(port: int, stack: contextlib.ExitStack = stack) -> int:
                each = stack.enter_context(socket.socket(family))
                each.bind((host, port))
                return int(each.getsockname()[1])

            try:
                first = bind(0)
                for number in range(1, ports):
                    bind(first + number)
                return MemberAddress(host=host, ports=(first, bind(0)))
            except (OSError, OverflowError) as error:
                problem = error if isinstance(error, OSError) else None
                if problem is not None and problem.errno != errno.EADDRINUSE:
                    break
    raise InputError(
        f"{host} is no address of this machine: {problem.strerror if problem else 'no free ports'}",
        field=ADDRESS_VARIABLE,
        hint="set it to one that the other nodes can reach",
    ) from problem


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
