"""Requests to a node of a fabric: through the tunnel, or straight to its address where that answers."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import msgspec

from atoll.core.errors import AtollError
from atoll.fabric.tunnel.tunnel_frames import TunnelRequest
from atoll.runtime.http.upstream import (
    GET,
    JSON,
    HttpUpstream,
    HttpUpstreamPool,
    Receiver,
    RequestTemplate,
    Upstream,
)
from atoll.runtime.pool.member import Backend, Member
from atoll.runtime.pool.outliers import Outliers

if TYPE_CHECKING:
    from atoll.fabric.tunnel.tunnel_client import Call

# For a connection and the list of models together.
_PROBE_S = 2.0
_MAX_MODELS_BYTES = 2**20


class Tunnel(Protocol):
    """Part of `atoll.fabric.tunnel.tunnel_client.TunnelClient` that a request needs."""

    def call(self, sid: str, submit: TunnelRequest, receiver: Receiver) -> Call:
        """Send a request to a session."""
        ...


class TunnelUpstream:
    """One request through the tunnel."""

    __slots__ = ("_call", "_upstreams")
    notes: Mapping[bytes, bytes] | None = None
    """The tunnel carries the type of an answer, and no other headers."""
    unsent = False

    def __init__(self, upstreams: NodeUpstreamPool) -> None:
        self._upstreams = upstreams
        self._call: Call | None = None

    def ask(
        self,
        receiver: Receiver,
        path: bytes,
        body: bytes,
        extra: bytes,
        ask: RequestTemplate = JSON,
    ) -> None:
        """Send a request."""
        # The tunnel takes pairs, not lines.
        headers = [
            (name, value)
            for name, _, value in (line.partition(b": ") for line in extra.split(b"\r\n"))
            if name
        ]
        if body or ask is JSON:
            headers.append((b"content-type", ask.content_type))
        upstreams = self._upstreams
        submit = TunnelRequest(ask.method, path, tuple(headers), body)
        self._call = upstreams.tunnel.call(upstreams.sid, submit, receiver)

    def leave(self) -> None:
        """Listen no more: all that matters is here."""
        self.close()

    def close(self) -> None:
        """Have the node stop."""
        if self._call is not None:
            self._call.cancel()

    def pause(self) -> None:
        """Have the node wait."""
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        """Have it go on."""
        if self._call is not None:
            self._call.resume()


class NodeUpstreamPool:
    """The connections to one node. It is asked straight once a probe of its address was answered."""

    open = 0

    def __init__(self, member: Member, tunnel: Tunnel, loop: asyncio.AbstractEventLoop) -> None:
        self.tunnel = tunnel
        self._loop = loop
        self.direct: HttpUpstreamPool | None = None
        self.aim(member)

    def aim(self, member: Member) -> None:
        """Take the session of a node."""
        self.url = member.backend.url
        self.sid = urlsplit(self.url).netloc
        address = member.backend.metadata.get("direct", "")
        if self.direct is not None and self.direct.url != address:
            self.use_direct(None)

    def use_direct(self, direct: HttpUpstreamPool | None) -> None:
        """Ask at an address from now on, or (None) through the tunnel."""
        if self.direct is not None:
            self.direct.close()
        self.direct = direct

    def take(self) -> Upstream | None:
        """Return a connection that is there already; the tunnel always is."""
        if self.direct is None:
            return TunnelUpstream(self)
        return self.direct.take()

    async def connect(self) -> Upstream:
        """Open a straight connection; if that fails the tunnel is used from now on."""
        direct = self.direct
        if direct is not None:
            try:
                # Less than for a probe: a client waits, and the tunnel is there.
                async with asyncio.timeout(_PROBE_S / 2):
                    return await direct.connect()
            except OSError:  # of which TimeoutError is one
                # Unless another address was found meanwhile.
                if self.direct is direct:
                    self.use_direct(None)
        return TunnelUpstream(self)

    def drop_idle(self) -> None:
        """Close kept connections."""
        if self.direct is not None:
            self.direct.drop_idle()

    def tick(self, now_s: float) -> None:
        """Close what drains for too long."""
        if self.direct is not None:
            self.direct.tick(now_s)

    def close(self) -> None:
        """Give up the direct connection, if there is one."""
        self.use_direct(None)


async def probe(
    url: str,
    models: tuple[str, ...],
    loop: asyncio.AbstractEventLoop,
    *,
    own_machine: bool,
) -> HttpUpstreamPool | None:
    """Return connections to the address that a node says it has, if an engine with its models answers.

    The address comes from the node: one that means this machine or its network link, not the node, is never
    asked unless `own_machine` says that the fabric is on this machine anyway.
    """
    try:
        # A backend needs a model; a node that has services only names none.
        backend = Backend(id="direct", url=url, models=models or ("-",))
        if urlsplit(backend.url).scheme not in ("http", "https"):
            return None
        kind = HttpUpstreamPool if own_machine else FarUpstreamPool
        upstreams = kind(Member(backend, Outliers()), loop)
        async with asyncio.timeout(_PROBE_S):
            upstream = await upstreams.connect()
            served = await _ask_models(upstream, loop)
    except (AtollError, ValueError, OSError):
        return None
    # Somebody answers there, but without the models of the node.
    if served is None or not set(models) <= served:
        upstreams.close()
        return None
    return upstreams


class FarUpstreamPool(HttpUpstreamPool):
    """Connections that never lead to this machine or its network link, whatever a name means by now."""

    async def connect(self) -> HttpUpstream:
        """Open a connection."""
        upstream = await super().connect()
        # By the open connection: a name may mean another address by now than when it was looked up.
        there, here = (upstream.transport.get_extra_info(n) for n in ("peername", "sockname"))
        if not there or not here or not _elsewhere(str(there[0]), str(here[0])):
            upstream.close()
            raise ConnectionRefusedError("the address is not another machine's")
        return upstream


def _elsewhere(address: str, local_address: str) -> bool:
    """Whether an address is another machine's; `local_address` is this one's on the way there."""
    if address == local_address:
        return False
    try:
        # Without the interface, as in fe80::1%eth0.
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    # ::ffff:127.0.0.1 means 127.0.0.1.
    mapped = getattr(parsed, "ipv4_mapped", None) or parsed
    return not (
        mapped.is_loopback or mapped.is_link_local or mapped.is_unspecified or mapped.is_multicast
    )


async def _ask_models(upstream: HttpUpstream, loop: asyncio.AbstractEventLoop) -> set[str] | None:
    """Return the models that `/v1/models` of an address names."""
    answer: asyncio.Future[bytes] = loop.create_future()
    upstream.ask(_ModelsReceiver(answer), b"/v1/models", b"", b"", GET)
    body = await answer
    try:
        data = msgspec.json.decode(body, type=_ModelList)
    except msgspec.DecodeError:
        return None
    return {model.id for model in data.data}


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _ModelsReceiver:
    """Waits for one whole answer."""

    def __init__(self, answer: asyncio.Future[bytes]) -> None:
        self._answer = answer
        self._parts: list[bytes] = []
        self._size = 0
        self._fine = False

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        del content_type, retry_after
        self._fine = status == 200

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        # What is too large is counted on, so that the end knows, and not kept.
        if self._size <= _MAX_MODELS_BYTES:
            self._parts.append(data)

    def on_end(self) -> None:
        if not self._answer.done():
            whole = self._fine and self._size <= _MAX_MODELS_BYTES
            self._answer.set_result(b"".join(self._parts) if whole else b"")

    def on_lost(self, reason: str, *, unused: bool) -> None:
        del unused
        if not self._answer.done():
            self._answer.set_exception(ConnectionError(reason))
