"""A zenoh session for one event loop: nothing blocks the loop, nothing of the loop blocks zenoh.

What comes in is handed to the loop in batches: a busy subscription has a thread that empties its channel
and wakes the loop once per batch, quiet ones share an inbox. What goes out passes one sender thread, so a
full link delays the sender and never the loop. A lost hub is replaced by another; while there is none,
what is sent is lost.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import queue
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import zenoh
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from atoll.core.errors import AtollError
from atoll.fabric import keys
from atoll.fabric.access import Access, is_loopback, split_address
from atoll.fabric.forward import Forwarder, proxy_for
from atoll.fabric.settings import FabricSettings

_T = TypeVar("_T")
_CHANNEL = 8192
_BATCH = 512
_MAX_MESSAGE_BYTES = 64 * 2**20
_SWITCH_S = 0.0005
_RETRY_EMPTY_S = 0.02
_RETRY_EMPTY_MOST_S = 0.5
_BLOCK = zenoh.CongestionControl.BLOCK


class UnreachableError(AtollError):
    """No hub answers."""


class Link:
    """The session; everything but the inner threads belongs to the loop it was opened in."""

    def __init__(self, session: zenoh.Session, forwarders: Sequence[Forwarder]) -> None:
        self._session = session
        self._forwarders = forwarders
        self._loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[tuple[str, bytes] | Callable[[], object] | None] = (
            queue.SimpleQueue()
        )
        self._open: set[Closer] = set()
        self._closed = False
        self.sent = 0
        self._sender = threading.Thread(target=self._send, name="fabric-send", daemon=True)
        self._sender.start()

    @classmethod
    async def open(
        cls,
        access: Access,
        settings: FabricSettings,
        *,
        listen: Sequence[str] = (),
        denied: frozenset[str] = frozenset(),
    ) -> Link:
        """Connect to a hub, or be one that listens at `listen`; UnreachableError names what was tried."""
        if sys.getswitchinterval() > _SWITCH_S:
            sys.setswitchinterval(_SWITCH_S)
        hubs = list(access.hubs)
        if listen:
            hubs = _other_hubs(access, listen)
        else:
            random.SystemRandom().shuffle(hubs)
        forwarders: list[Forwarder] = []
        endpoints: list[str] = []
        for hub in hubs:
            proxy = proxy_for(hub, settings.proxy)
            if proxy is not None:
                forwarder = await Forwarder.start(proxy, hub)
                forwarders.append(forwarder)
                endpoints.append(forwarder.address)
            else:
                endpoints += await _resolved(hub)
        config = _config(access, settings, endpoints, listen, denied)
        patience_s = 0.0 if listen else settings.connect_s
        try:
            session = await _opened(config, patience_s, settings)
        except zenoh.ZError as error:
            for forwarder in forwarders:
                await forwarder.close()
            if listen:
                raise UnreachableError(
                    f"cannot listen at {', '.join(listen)}",
                    hint="is another process there? give another address with --listen",
                ) from error
            raise UnreachableError(
                f"no hub answers at {', '.join(access.hubs)} after {settings.connect_s:g} s",
                hint="is a hub running there, may this machine reach it, is the token its own?",
            ) from error
        return cls(session, forwarders)

    @property
    def id(self) -> str:
        """Id of this session, as hubs list it."""
        return str(self._session.zid())

    @property
    def queued(self) -> int:
        """Messages the sender has not taken yet."""
        return self._outbox.qsize()

    def hubs(self) -> tuple[str, ...]:
        """Ids of the hubs this session is connected to; empty: cut off."""
        return tuple(str(zid) for zid in self._session.info.routers_zid())

    def put(self, key: str, payload: bytes) -> None:
        """Send; returns at once."""
        self._outbox.put((key, payload))

    async def query(self, key: str, payload: bytes, timeout_s: float) -> bytes:
        """Ask; an empty answer is tried again until `timeout_s`, then it is a TimeoutError."""
        deadline = time.monotonic() + timeout_s
        pause = _RETRY_EMPTY_S
        while True:
            left = deadline - time.monotonic()
            answer = await self._ask(key, payload, left) if left > 0 else None
            if answer is not None:
                return answer
            if time.monotonic() + pause >= deadline or self._closed:
                raise TimeoutError(f"no answer from {key} within {timeout_s:g} s")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _RETRY_EMPTY_MOST_S)

    async def _ask(self, key: str, payload: bytes, timeout_s: float) -> bytes | None:
        answered: asyncio.Future[bytes | None] = self._loop.create_future()

        def settle(answer: bytes | None) -> None:
            if not answered.done():
                answered.set_result(answer)

        def replied(reply: zenoh.Reply) -> None:
            if reply.ok is not None:
                self._call(settle, reply.ok.payload.to_bytes())

        def ended() -> None:
            self._call(settle, None)

        def get() -> None:
            self._session.get(
                key,
                zenoh.handlers.Callback(replied, ended, indirect=False),
                payload=payload,
                timeout=timeout_s,
                congestion_control=_BLOCK,
                express=True,
            )

        self._outbox.put(get)
        # zenoh ends a question by itself at `timeout_s`; this only guards against a stuck sender.
        async with asyncio.timeout(timeout_s + 1):
            return await answered

    def subscribe(self, key: str, callback: Callable[[list[tuple[str, bytes]]], None]) -> Closer:
        """Hear a busy key: a thread empties its channel and wakes the loop once per batch."""
        subscriber = self._session.declare_subscriber(key, zenoh.handlers.FifoChannel(_CHANNEL))
        closer = Closer(self._open, subscriber.undeclare)
        # Waiting on the subscriber itself would keep it from being undeclared.
        channel = subscriber.handler

        def deliver(batch: list[tuple[str, bytes]]) -> None:
            if not closer.closed:
                callback(batch)

        def drain() -> None:
            while True:
                try:
                    sample = channel.recv()
                    batch = [sample]
                    while len(batch) < _BATCH:
                        more = channel.try_recv()
                        if more is None:
                            break
                        batch.append(more)
                except zenoh.ZError:
                    return
                self._call(deliver, [(str(one.key_expr), one.payload.to_bytes()) for one in batch])

        threading.Thread(target=drain, name=f"fabric-{key}", daemon=True).start()
        return closer

    def hear(self, key: str, callback: Callable[[list[tuple[str, bytes]]], None]) -> Closer:
        """Hear a quiet key: no thread of its own, so an idle subscription costs nothing."""
        inbox = Inbox(self._call, callback)

        def arrived(sample: zenoh.Sample) -> None:
            inbox.push((str(sample.key_expr), sample.payload.to_bytes()))

        subscriber = self._session.declare_subscriber(key, _direct(arrived))
        return Closer(self._open, inbox.close, subscriber.undeclare)

    def watch(self, key: str, callback: Callable[[list[tuple[str, bool]]], None]) -> Closer:
        """Hear tokens come (True) and go (False); those that are there already come first."""
        inbox = Inbox(self._call, callback)

        def arrived(sample: zenoh.Sample) -> None:
            inbox.push((str(sample.key_expr), sample.kind == zenoh.SampleKind.PUT))

        subscriber = self._session.liveliness().declare_subscriber(
            key, _direct(arrived), history=True
        )
        return Closer(self._open, inbox.close, subscriber.undeclare)

    def token(self, key: str) -> Closer:
        """Show a token until it is closed or this process is gone."""
        return Closer(self._open, self._session.liveliness().declare_token(key).undeclare)

    def queryable(self, key: str, callback: Callable[[Question], None]) -> Closer:
        """Answer questions under a key."""

        def deliver(questions: list[Question]) -> None:
            for question in questions:
                callback(question)

        inbox = Inbox(self._call, deliver)

        def asked(query: zenoh.Query) -> None:
            inbox.push(Question(query, self._outbox.put))

        queryable = self._session.declare_queryable(key, _direct(asked))
        return Closer(self._open, inbox.close, queryable.undeclare)

    async def flush(self) -> None:
        """Wait until everything put so far is on its way; a second at most."""
        done = asyncio.Event()
        self._outbox.put(lambda: self._call(done.set))
        try:
            async with asyncio.timeout(1.0):
                await done.wait()
        except TimeoutError:
            pass  # the link is stuck; whoever waits for this has better things to do

    async def close(self) -> None:
        """Send what is queued, then disconnect."""
        if self._closed:
            return
        self._closed = True
        self._outbox.put(None)
        await asyncio.to_thread(self._sender.join, 2.0)
        for closer in tuple(self._open):
            closer.silence()
        await asyncio.to_thread(self._end)
        for forwarder in self._forwarders:
            await forwarder.close()

    def _end(self) -> None:
        with contextlib.suppress(zenoh.ZError):
            self._session.close()  # type: ignore[no-untyped-call]

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _send(self) -> None:
        session, get = self._session, self._outbox.get
        while (item := get()) is not None:
            with contextlib.suppress(zenoh.ZError):  # no hub, or closing: lost, as promised
                if isinstance(item, tuple):
                    session.put(item[0], item[1], congestion_control=_BLOCK, express=True)
                    self.sent += 1
                else:
                    item()


class Question:
    """A question to this member; answer it once, now or later. Dropped unanswered, it has no answer."""

    __slots__ = ("_query", "_send", "key", "payload")

    def __init__(self, query: zenoh.Query, send: Callable[[Callable[[], object]], None]) -> None:
        self._query: zenoh.Query | None = query
        self._send = send
        self.key = str(query.key_expr)
        payload = query.payload
        self.payload = b"" if payload is None else payload.to_bytes()

    def reply(self, payload: bytes) -> None:
        """Answer it; a second answer is ignored."""
        query, self._query = self._query, None
        if query is None:
            return

        def answer() -> None:
            query.reply(query.key_expr, payload, express=True)
            query.drop()  # type: ignore[no-untyped-call]

        self._send(answer)


class Inbox(Generic[_T]):
    """Collects what threads push and hands it to the loop, one call per batch."""

    def __init__(
        self,
        call: Callable[..., None],
        deliver: Callable[[list[_T]], None],
    ) -> None:
        self._items: deque[_T] = deque()
        self._call = call
        self._deliver = deliver
        self._scheduled = False
        self._closed = False

    def push(self, item: _T) -> None:
        """Add an item, from any thread."""
        self._items.append(item)
        if not self._scheduled:
            self._scheduled = True
            self._call(self._flush)

    def close(self) -> None:
        """Deliver nothing any more."""
        self._closed = True

    def _flush(self) -> None:
        # Cleared first: what is pushed from here on is either taken below or schedules the next call.
        self._scheduled = False
        batch = [self._items.popleft() for _ in range(len(self._items))]
        if batch and not self._closed:
            self._deliver(batch)


class Closer:
    """Takes something declared back, once."""

    def __init__(self, register: set[Closer], *actions: Callable[[], object]) -> None:
        self._register = register
        self._actions = actions
        self.closed = False
        register.add(self)

    def close(self) -> None:
        """Take it back; nothing is delivered after."""
        if self.closed:
            return
        self.silence()
        for action in self._actions:
            with contextlib.suppress(zenoh.ZError):  # the session is gone, and this with it
                action()

    def silence(self) -> None:
        """Count as closed without telling anybody: the whole session ends."""
        self.closed = True
        self._register.discard(self)


def _direct(callback: Callable[[Any], None]) -> Any:
    return zenoh.handlers.Callback(callback, indirect=False)


def _other_hubs(access: Access, listen: Sequence[str]) -> list[str]:
    own = access.identity.slot
    if access.is_open:
        here = {split_address(address)[1] for address in listen}
        return [
            hub for hub in access.hubs if not (is_loopback(hub) and split_address(hub)[1] in here)
        ]
    return [hub for number, hub in enumerate(access.hubs) if keys.hub_slot(number) != own]


async def _opened(
    config: zenoh.Config, patience_s: float, settings: FabricSettings
) -> zenoh.Session:
    """Try every endpoint once, then again. With a time limit zenoh would only ever try the first."""
    deadline = time.monotonic() + patience_s
    pause_s = settings.retry_first_s
    while True:
        try:
            return await asyncio.to_thread(zenoh.open, config)
        except zenoh.ZError:
            if time.monotonic() + pause_s > deadline:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, settings.retry_most_s)


async def _resolved(hub: str) -> list[str]:
    """Return every address a hub's name has, then the name itself, for when they change."""
    host, port = split_address(hub)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
    except OSError:
        return [hub]
    addresses = []
    for family, *_, place in found:
        text = f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])
        addresses.append(f"{text}:{port}")
    return list(dict.fromkeys([*addresses, hub]))


def _config(
    access: Access,
    settings: FabricSettings,
    endpoints: Sequence[str],
    listen: Sequence[str],
    denied: frozenset[str],
) -> zenoh.Config:
    protocol = "tcp" if access.is_open else "tls"
    transport: dict[str, Any] = {
        "unicast": {"max_sessions": 4096, "accept_pending": 1000},
        "link": {
            "protocols": [protocol],
            "tx": {"lease": round(settings.lease_s * 1000), "keep_alive": 4},
            "rx": {"max_message_size": _MAX_MESSAGE_BYTES},
        },
        "shared_memory": {"enabled": False},
    }
    if not access.is_open:
        transport["link"]["tls"] = _tls(access)
    config: dict[str, Any] = {
        "mode": "router" if listen else "client",
        "scouting": {
            "delay": 0,
            "multicast": {"enabled": False},
            "gossip": {"enabled": False},
        },
        "transport": transport,
        "connect": {
            "endpoints": [f"{protocol}/{endpoint}" for endpoint in endpoints],
            "timeout_ms": 0,
            "exit_on_failure": not listen,
            "retry": {
                "period_init_ms": round(settings.retry_first_s * 1000),
                "period_max_ms": round(settings.retry_most_s * 1000),
                "period_increase_factor": 2,
            },
        },
    }
    if listen:
        config["listen"] = {
            "endpoints": [f"{protocol}/{address}" for address in listen],
            "exit_on_failure": True,
            "timeout_ms": 0,
        }
        if not access.is_open:
            config["access_control"] = keys.hub_rules(access.slots, denied)
    return zenoh.Config.from_json5(json.dumps(config))


def _tls(access: Access) -> dict[str, object]:
    assert access.authority is not None
    assert access.certificate is not None
    assert access.key is not None
    certificate, key = _pem(access.certificate), _key_pem(access.key)
    return {
        "root_ca_certificate_base64": _pem(access.authority),
        "listen_certificate_base64": certificate,
        "listen_private_key_base64": key,
        "connect_certificate_base64": certificate,
        "connect_private_key_base64": key,
        "enable_mtls": True,
        # A hub is whoever the authority let stand for a server, wherever it is reached: through a
        # forwarder, under a new address. Members' certificates do not do for one.
        "verify_name_on_connect": False,
        "close_link_on_expiration": True,
    }


def _pem(certificate: bytes) -> str:
    parsed = x509.load_der_x509_certificate(certificate)
    return base64.b64encode(parsed.public_bytes(serialization.Encoding.PEM)).decode()


def _key_pem(key: bytes) -> str:
    parsed = serialization.load_der_private_key(key, None)
    pem = parsed.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return base64.b64encode(pem).decode()
