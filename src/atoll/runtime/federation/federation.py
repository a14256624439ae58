"""The fabric side of one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec

from atoll.fabric.registry.records import as_dict
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.peers import Peer
from atoll.fabric.tunnel.client import TunnelClient
from atoll.runtime.federation.links import NodeLinks, probe
from atoll.runtime.federation.members import Members
from atoll.runtime.http.upstream import HttpUpstream, UpstreamPool
from atoll.runtime.pool.pool import BackendPool, Member
from atoll.telemetry.logs import Log, SilentLog

if TYPE_CHECKING:
    from atoll.runtime.gateway.app import Gateway

_LOOK_S = 0.5
_PROBE_AGAIN_S = 60.0


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
        self._app: Gateway | None = None
        self._ways: dict[str, NodeLinks] = {}
        self._probed_s: dict[str, float] = {}
        self._probes: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        fabric.listeners.append(self._heard)
        for peer in fabric.peers():
            self.members.take(peer)

    def attach(self, app: Gateway) -> None:
        """Begin to work for a gateway that runs."""
        self._app = app
        self._watch = self._loop.create_task(self._look())

    def detach(self) -> None:
        """Bring no more news; the fabric itself is closed by whoever opened it."""
        if self._heard in self.fabric.listeners:
            self.fabric.listeners.remove(self._heard)
        for task in (*self._probes, *([self._watch] if self._watch else [])):
            task.cancel()

    def ways(self, member: Member) -> UpstreamPool:
        """Return the ways to a node."""
        links = self._ways[member.name] = NodeLinks(member, self.caller, self._loop)
        return links

    def has(self, member: Member) -> bool:
        """Whether the node of a member is there as far as is known here, this very moment."""
        peer = self.fabric.peer(member.name)
        return peer is not None and peer.alive

    # News

    def _heard(self, event: str, peer: Peer) -> None:
        sid = peer.sid
        if event == "left":
            self.members.drop(sid)
            self.members.unused.pop(sid, None)
            self._ways.pop(sid, None)
            self._probed_s.pop(sid, None)
            return
        self.members.take(peer)
        if event == "down" and self._app is not None:
            flap_s = self._app.settings.flap_s
            self._loop.call_later(flap_s, self._gone, sid)

    def _gone(self, sid: str) -> None:
        """Move what runs straight at a node whose token did not come back; the tunnel sees to its own."""
        member = self._pool.members.get(sid)
        if member is None or member.up or self._app is None or not self.fabric.connected:
            return
        for relay in [r for r in self._app.relays if r.uses(member) and r.goes_by(HttpUpstream)]:
            relay.member_down("its token is gone")

    async def _look(self) -> None:
        """Take in loads and try addresses, for as long as the gateway runs."""
        while True:
            self.members.hear(self.fabric.loads)
            if self._app is not None and self._app.settings.direct:
                self._try_addresses()
            await asyncio.sleep(_LOOK_S)

    def _try_addresses(self) -> None:
        now_s = self._loop.time()
        for member in self._pool.members.values():
            address = member.backend.metadata.get("direct")
            if not member.node or not address or not member.up:
                continue
            links = self._ways.get(member.name)
            if links is not None and links.direct is not None:
                continue
            if now_s - self._probed_s.get(member.name, float("-inf")) < _PROBE_AGAIN_S:
                continue
            self._probed_s[member.name] = now_s
            task = self._loop.create_task(self._try(member, address))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def _try(self, member: Member, address: str) -> None:
        found = await probe(
            address,
            member.backend.models,
            self._loop,
            own_machine=self.fabric.access.is_open,
        )
        app = self._app
        if found is None or app is None:
            return
        if member.removed or member.backend.metadata.get("direct") != address:
            found.close()
            return
        links = app.links(member)
        if isinstance(links, NodeLinks):
            links.go_straight(found)
            self.log.event("fabric.direct", sid=member.name, url=address)

    # For people

    def snapshot(self) -> dict[str, object]:
        """Return the nodes as this gateway sees them, for `/atoll/v1/fabric`."""
        peers = self.fabric.peers()
        return {
            "sid": self.fabric.sid,
            "name": self.fabric.identity.name,
            "provider": self.fabric.identity.provider,
            "connected": self.fabric.connected,
            "nodes": [self._shown(p) for p in peers if p.metadata.role != "hub"],
            "hubs": [self._shown(p) for p in peers if p.metadata.role == "hub"],
            "stats": self.fabric.stats(),
            "tunnel": self.caller.stats(),
        }

    def _shown(self, peer: Peer) -> dict[str, Any]:
        shown = as_dict(peer.metadata)
        shown.pop("revoked", None)
        load = self.fabric.loads.get(peer.sid)
        links = self._ways.get(peer.sid)
        return shown | {
            "sid": peer.sid,
            "state": peer.state.name.lower(),
            "alive": peer.alive,
            "verified": peer.verified,
            "for_s": round(max(0.0, time.time() - peer.since_s), 3),
            "load": None if load is None else msgspec.to_builtins(load),
            "used": peer.sid in self._pool.members,
            "unused_because": self.members.unused.get(peer.sid),
            "direct_used": links is not None and links.direct is not None,
        }

    async def close(self) -> None:
        """Stop, and end what still runs through the tunnel."""
        self.detach()
        with contextlib.suppress(asyncio.CancelledError):
            if self._watch is not None:
                await self._watch
        await self.caller.close()
