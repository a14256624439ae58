"""A fabric that is only in memory, and a loop whose clock jumps to whatever happens next."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.identity import Identity, Verifier
from atoll.fabric.tunnel.tunnel_client import TunnelClient
from atoll.fabric.tunnel.tunnel_frames import TunnelRequest
from atoll.fabric.tunnel.tunnel_server import IncomingCall, TunnelServer
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings

if TYPE_CHECKING:
    from atoll.fabric.transport.fabric import Fabric

T = TypeVar("T")
LATENCY_S = 0.001
SSE = b"text/event-stream"


class _Selector(selectors.SelectSelector):
    """Waits for nothing: moves the clock instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everybody waits, and nothing will happen")
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        self.virtual = _Selector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, in no time; errors in callbacks are errors."""
    loop = VirtualLoop()
    problems: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    try:
        result = loop.run_until_complete(main)
    finally:
        loop.close()
    assert not problems, problems
    return result


@dataclass
class Net:
    """What connects fake fabrics: delivers after a while, unless told to lose things."""

    fate: Callable[[str, bytes], list[float]] = lambda key, payload: [LATENCY_S]
    """Delays after which a message arrives: none if lost, several if repeated."""
    fabrics: list[FakeFabric] = field(default_factory=list)
    puts: list[tuple[str, bytes]] = field(default_factory=list)
    last_s: float = 0.0

    def put(self, key: str, payload: bytes) -> None:
        self.puts.append((key, payload))
        loop = asyncio.get_running_loop()
        for delay_s in self.fate(key, payload):
            at_s = loop.time() + delay_s
            if delay_s == LATENCY_S:
                # Timers of the same time come in any order; messages keep theirs.
                at_s = self.last_s = max(at_s, self.last_s + 1e-9)
            loop.call_at(at_s, self.deliver, key, payload)

    def deliver(self, key: str, payload: bytes) -> None:
        for fabric in list(self.fabrics):
            for pattern, callback in list(fabric.subscriptions):
                if _matches(pattern, key) and not fabric.dead:
                    callback([(key, payload)])

    def kill(self, fabric: FakeFabric, *, tell: bool = True) -> None:
        """Let a member vanish; others hear of its token unless it only fell silent."""
        fabric.dead = True
        if tell:
            self.tell("down", fabric.sid)

    def tell(self, event: str, sid: str) -> None:
        for other in self.fabrics:
            if not other.dead:
                for listener in list(other.listeners):
                    listener(event, SimpleNamespace(sid=sid))


def _matches(pattern: str, key: str) -> bool:
    if pattern.endswith("/**"):
        return key.startswith(pattern[:-2])
    if pattern.endswith("/*"):
        return key.rpartition("/")[0] == pattern[:-2]
    return pattern == key


class FakeFabric:
    """As much of `Fabric` as the tunnel needs."""

    def __init__(self, net: Net, identity: Identity, verifier: Verifier, session: int) -> None:
        self.net = net
        self.identity = identity
        self.verifier = verifier
        self.sid = keys.new_sid(identity.slot, session.to_bytes(8, "big"))
        self.listeners: list[Callable[[str, Any], None]] = []
        self.on_renewed: list[Callable[[str, str], None]] = []
        self.on_revoked: list[Callable[[], None]] = []
        self.subscriptions: list[tuple[str, Callable[[list[tuple[str, bytes]]], None]]] = []
        self.queryables: dict[str, Callable[[Any], None]] = {}
        self.dead = False
        self.connected = True
        net.fabrics.append(self)

    def put(self, key: str, payload: bytes) -> None:
        if not self.dead:
            self.net.put(key, payload)

    def subscribe(self, key: str, callback: Callable[[list[tuple[str, bytes]]], None]) -> Any:
        entry = (key, callback)
        self.subscriptions.append(entry)
        return SimpleNamespace(close=lambda: self.subscriptions.remove(entry))

    def queryable(self, key: str, callback: Callable[[Any], None]) -> Any:
        self.queryables[key] = callback
        return SimpleNamespace(close=lambda: self.queryables.pop(key, None))

    async def query(self, key: str, payload: bytes, timeout_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()

        def reply(data: bytes) -> None:
            if not answer.done():
                answer.set_result(data)

        def ask() -> None:
            for fabric in self.net.fabrics:
                if key in fabric.queryables and not fabric.dead:
                    fabric.queryables[key](SimpleNamespace(key=key, payload=payload, reply=reply))

        loop.call_later(LATENCY_S, ask)
        async with asyncio.timeout(timeout_s):
            return await answer

    def renew(self) -> None:
        old = self.sid
        self.sid = keys.new_sid(
            self.identity.slot, (int(old.partition("-")[2], 16) + 1).to_bytes(8, "big")
        )
        for callback in self.on_renewed:
            callback(old, self.sid)
        self.net.tell("left", old)

    def as_fabric(self) -> Fabric:
        return cast("Fabric", self)


def open_members(net: Net, count: int = 2) -> Iterator[FakeFabric]:
    """Return members of an open fabric: a gateway, then workers."""
    for number in range(count):
        role = "worker" if number else "gateway"
        identity = Identity.self_made(
            keys.member_slot(number), f"site{number}", f"provider{number}", role
        )
        yield FakeFabric(net, identity, Verifier("open", None), number * 2**32 + 1)


class Log:
    """Notes what a call is told."""

    def __init__(self) -> None:
        self.status = 0
        self.data = bytearray()
        self.ended = False
        self.lost: str | None = None
        self.at_s: list[float] = []
        self.done = asyncio.Event()

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        assert not self.status
        self.status = status

    def on_body(self, data: bytes) -> None:
        assert self.status
        assert not self.done.is_set()
        self.data += data
        self.at_s.append(asyncio.get_running_loop().time())

    def on_end(self) -> None:
        assert not self.done.is_set()
        self.ended = True
        self.done.set()

    def on_lost(self, reason: str, *, unused: bool) -> None:
        assert not self.done.is_set()
        self.lost = reason
        self.done.set()


def request(body: bytes = b"{}", path: bytes = b"/v1/x") -> TunnelRequest:
    return TunnelRequest(b"POST", path, ((b"x-a", b"b"),), body)


class Pair:
    """A caller and a worker on one net."""

    def __init__(
        self,
        handler: Callable[[IncomingCall], None],
        *,
        net: Net | None = None,
        caller_settings: TunnelSettings | None = None,
        worker_settings: TunnelSettings | None = None,
        accept: str | None = None,
    ) -> None:
        self.net = net or Net()
        self.gateway, self.worker = open_members(self.net)
        self.caller = TunnelClient(self.gateway.as_fabric(), caller_settings)
        self.answerer = TunnelServer(
            self.worker.as_fabric(), handler, accept=accept, settings=worker_settings
        )

    async def ask(self, submit: TunnelRequest | None = None) -> Log:
        log = Log()
        self.caller.call(self.worker.sid, submit or request(), log)
        async with asyncio.timeout(3600):
            await log.done.wait()
        return log

    async def close(self) -> None:
        await self.caller.close()
        await self.answerer.close()


def echo(incoming: IncomingCall) -> None:
    incoming.head(200, b"text/plain")
    incoming.send(incoming.body)
    incoming.end()


def paced(tokens: int, step_s: float) -> Callable[[IncomingCall], None]:
    """A handler that sends a token a step, until it is told to stop."""

    def handle(incoming: IncomingCall) -> None:
        loop = asyncio.get_running_loop()
        state = {"sent": 0, "stopped": False}

        def step() -> None:
            if state["stopped"]:
                return
            if state["sent"] == tokens:
                incoming.end()
                return
            incoming.send(b"%05d" % state["sent"])
            state["sent"] += 1
            loop.call_later(step_s, step)

        def stop() -> None:
            state["stopped"] = True

        incoming.on_cancel = stop
        incoming.head(200, SSE)
        loop.call_later(step_s, step)

    return handle


def tokens(count: int) -> bytes:
    return b"".join(b"%05d" % n for n in range(count))
