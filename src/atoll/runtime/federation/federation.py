"""The fabric side of one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection
from typing import Protocol, cast

import msgspec

from atoll.fabric.registry.peers import Peer
from atoll.fabric.registry.records import as_dict
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.tunnel.tunnel_client import TunnelClient
from atoll.runtime.federation.fabric_view import FabricStats, FabricView, ShownPeer
from atoll.runtime.federation.members import Members
from atoll.runtime.federation.upstreams import NodeUpstreamPool, probe
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.http.upstream import HttpUpstream, UpstreamPool
from atoll.runtime.pool.member import Member
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.logs import Log, SilentLog

# Between two looks at loads and addresses.
_LOOK_S = 0.5
# A node whose address did not answer is asked there again after this.
_PROBE_AGAIN_S = 60.0


class NodeRequest(Protocol):
    """A request that may run at a node."""

    def uses(self, member: Member) -> bool:
        """Whether it is at a node now."""
        ...

    def member_down(self, reason: str) -> None:
        """Leave a node that is gone, for another where that is possible."""


class DirectRequest(NodeRequest, Protocol):
    """A request that may run straight at a node's address."""

    def goes_by(self, kind: type) -> bool:
        """Whether it was sent on a connection of a kind."""
        ...


class FederationContext(Protocol):
    """Part of the gateway that a federation needs."""

    settings: GatewaySettings

    @property
    def relays(self) -> Collection[DirectRequest]:
        """Requests that run."""
        ...

    @property
    def service_proxies(self) -> Collection[NodeRequest]:
        """Requests that run at services that are no models."""
        ...

    def upstreams(self, member: Member) -> UpstreamPool:
        """Return the connections to a backend."""
        ...


class Federation:
    """Brings the nodes of a fabric into the pool of a gateway, and requests to them.

    Gateway(pool, settings, federation=Federation(fabric, pool))
    """

    def __init__(
        self,
        fabric: Fabric,
        pool: BackendPool,
        caller: TunnelClient | None = None,
        log: Log | None = None,
    ) -> None:
        self.fabric = fabric
        self.caller = caller or TunnelClient(fabric, log=log)
        self.log: Log = log or SilentLog()
        identity = fabric.identity
        self.members = Members(pool, identity.name, identity.provider, self.log)
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._context: FederationContext | None = None
        self._upstreams: dict[str, NodeUpstreamPool] = {}
        self._probed_s: dict[str, float] = {}
        self._probes: set[asyncio.Task[None]] = set()
        self.changes = 0
        """Rises with all news of nodes, but for their loads."""
        self._watching: asyncio.Task[None] | None = None
        fabric.listeners.append(self._follow_fabric)
        # Those that were there before anybody listened.
        for peer in fabric.peers():
            self.members.take(peer)

    def attach(self, context: FederationContext) -> None:
        """Begin to work for a gateway that runs."""
        self._context = context
        self._watching = self._loop.create_task(self._watch_nodes())

    def detach(self) -> None:
        """Bring no more news; the fabric itself is closed by whoever opened it."""
        if self._follow_fabric in self.fabric.listeners:
            self.fabric.listeners.remove(self._follow_fabric)
        for task in (*self._probes, *([self._watching] if self._watching else [])):
            task.cancel()

    def upstreams(self, member: Member) -> UpstreamPool:
        """Return the connections to a node."""
        upstreams = self._upstreams[member.name] = NodeUpstreamPool(member, self.caller, self._loop)
        return upstreams

    def is_present(self, member: Member) -> bool:
        """Whether the node of a member is there as far as is known here, this very moment."""
        peer = self.fabric.peer(member.name)
        return peer is not None and peer.alive

    # News

    def _follow_fabric(self, event: str, peer: Peer) -> None:
        sid = peer.sid
        self.changes += 1
        if event in ("left", "revoked"):
            member = self._pool.members.get(sid)
            self.members.drop(sid)
            if member is not None and self.fabric.peer(sid) is None:
                self._evict(member)
            self.members.unused.pop(sid, None)
            self._upstreams.pop(sid, None)
            self._probed_s.pop(sid, None)
            return
        self.members.take(peer)
        if event == "down" and self._context is not None:
            # Its token may come back: a short break moves nothing.
            flap_s = self._context.settings.flap_s
            self._loop.call_later(flap_s, self._leave_node, sid)

    def _evict(self, member: Member) -> None:
        """Take everything from a node that the registry dropped: its certificate is good no more.

        One that leaves by its own word stays known for a while, and finishes what it has.
        """
        context = self._context
        if context is None:
            return
        running: list[NodeRequest] = [*context.relays, *context.service_proxies]
        moved = [request for request in running if request.uses(member)]
        if moved:
            self.log.event("fabric.evicted", sid=member.name, requests=len(moved))
        for request in moved:
            request.member_down("its certificate is no longer valid")

    def _leave_node(self, sid: str) -> None:
        """Move what runs straight at a node whose token did not come back; the tunnel sees to its own."""
        member = self._pool.members.get(sid)
        # A gateway that is cut off itself cannot tell whose token is gone.
        if member is None or member.well or self._context is None or not self.fabric.connected:
            return
        for relay in [
            r for r in self._context.relays if r.uses(member) and r.goes_by(HttpUpstream)
        ]:
            relay.member_down("its token is gone")

    async def _watch_nodes(self) -> None:
        """Take in loads and try addresses, for as long as the gateway runs."""
        while True:
            self.members.hear(self.fabric.loads)
            if self._context is not None and self._context.settings.direct:
                self._try_addresses()
            await asyncio.sleep(_LOOK_S)

    def _try_addresses(self) -> None:
        now_s = self._loop.time()
        for member in self._pool.members.values():
            address = member.backend.metadata.get("direct")
            if not member.node or not address or not member.well:
                continue
            upstreams = self._upstreams.get(member.name)
            if upstreams is not None and upstreams.direct is not None:
                continue
            if now_s - self._probed_s.get(member.name, float("-inf")) < _PROBE_AGAIN_S:
                continue
            self._probed_s[member.name] = now_s
            task = self._loop.create_task(self._try_address(member, address))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def _try_address(self, member: Member, address: str) -> None:
        connection = await probe(
            address,
            member.backend.models,
            self._loop,
            own_machine=self.fabric.access.is_open,
        )
        context = self._context
        if connection is None or context is None:
            return
        # It left, or says another address by now: the answer is of no use.
        if member.removed or member.backend.metadata.get("direct") != address:
            connection.close()
            return
        upstreams = context.upstreams(member)
        if isinstance(upstreams, NodeUpstreamPool):
            upstreams.use_direct(connection)
            self.log.event("fabric.direct", sid=member.name, url=address)

    # For people

    def snapshot(self) -> FabricView:
        """Return the nodes as this gateway sees them, for `/atoll/v1/fabric`."""
        peers = self.fabric.peers()
        return FabricView(
            sid=self.fabric.sid,
            name=self.fabric.identity.name,
            provider=self.fabric.identity.provider,
            connected=self.fabric.connected,
            nodes=[self._describe(p) for p in peers if p.metadata.role != "hub"],
            hubs=[self._describe(p) for p in peers if p.metadata.role == "hub"],
            stats=cast(FabricStats, self.fabric.stats()),
            tunnel=self.caller.stats(),
        )

    def _describe(self, peer: Peer) -> ShownPeer:
        shown = as_dict(peer.metadata)
        shown.pop("revoked", None)
        load = self.fabric.loads.get(peer.sid)
        upstreams = self._upstreams.get(peer.sid)
        shown |= {
            "sid": peer.sid,
            "state": peer.state.name.lower(),
            "alive": peer.alive,
            "verified": peer.verified,
            "for_s": round(max(0.0, time.time() - peer.since_s), 3),
            "load": None if load is None else msgspec.structs.asdict(load),
            "used": peer.sid in self._pool.members,
            "unused_because": self.members.unused.get(peer.sid),
            "direct_used": upstreams is not None and upstreams.direct is not None,
        }
        return cast(ShownPeer, shown)

    async def close(self) -> None:
        """Stop, and end what still runs through the tunnel."""
        self.detach()
        with contextlib.suppress(asyncio.CancelledError):
            if self._watching is not None:
                await self._watching
        await self.caller.close()
