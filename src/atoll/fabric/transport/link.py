"""A zenoh session for one event loop: nothing blocks the loop, nothing of the loop blocks zenoh.

What comes in is handed to the loop in batches: a busy subscription has a thread that empties its channel
and wakes the loop once per batch, quiet ones share an inbox. What goes out passes one sender thread, so a
full link delays the sender and never the loop. A lost hub is replaced by another; while there is none,
what is sent is lost.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import random
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import zenoh

from atoll.core.errors import AtollError
from atoll.core.patience import Patience
from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.access import Access, is_loopback, split_address
from atoll.fabric.transport.eviction import LinkEvictor
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.transport.forward import Forwarder, proxy_for
from atoll.fabric.transport.panics import CONTAINED
from atoll.fabric.transport.silent_links import SilentLinks
from atoll.fabric.transport.zenoh_config import session_config

_T = TypeVar("_T")
# Samples that may wait in the channel of a busy key, and how many the loop takes at once.
_CHANNEL = 8192
_BATCH = 512
_SWITCH_S = 0.0005
# How long threads, and the session itself, may take to end before nobody waits any more.
_END_S = 2.0
_CLOSE_S = 10.0
_RETRY_EMPTY_S = 0.02
_RETRY_EMPTY_MAX_S = 0.5
_BLOCK = zenoh.CongestionControl.BLOCK


_links: weakref.WeakSet[FabricLink] = weakref.WeakSet()


class UnreachableError(AtollError):
    """No hub answers."""


class FabricLink:
    """The session; everything but the inner threads belongs to the loop it was opened in."""

    def __init__(
        self, session: zenoh.Session, forwarders: Sequence[Forwarder], settings: FabricSettings
    ) -> None:
        self._session = session
        self._silent = SilentLinks(session, settings)
        self._forwarders = forwarders
        self._loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[tuple[str, bytes] | Callable[[], object] | None] = (
            queue.SimpleQueue()
        )
        self._open: set[Declaration] = set()
        self._closed = False
        self._evictor: LinkEvictor | None = None
        self.sent = 0
        self._threads: list[threading.Thread] = []
        self._sender = self._start(self._send, "fabric-send")
        _links.add(self)

    @classmethod
    async def open(
        cls,
        access: Access,
        settings: FabricSettings,
        *,
        listen: Sequence[str] = (),
        denied: frozenset[str] = frozenset(),
    ) -> FabricLink:
        """Connect to a hub, or be one that listens at `listen`; UnreachableError names what was tried."""
        # By default a thread that computes keeps the others waiting for 5 ms, at every hand-over to the loop.
        if sys.getswitchinterval() > _SWITCH_S:
            sys.setswitchinterval(_SWITCH_S)
        hubs = list(access.hubs)
        if listen:
            hubs = _other_hubs(access, listen)
        else:
            # Members spread over the hubs by chance.
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
                endpoints += await _resolve_addresses(hub)
        config = session_config(access, settings, endpoints, listen, denied)
        # A hub needs nobody to begin; a member waits until there is one.
        patience_s = 0.0 if listen else settings.connect_s
        try:
            session = await _open_session(config, patience_s, settings)
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
        return cls(session, forwarders, settings)

    @property
    def id(self) -> str:
        """Id of this session, as hubs list it."""
        return str(self._session.zid())

    def watch_links(self, noticed: Callable[[str], None]) -> LinkEvictor:
        """Watch who connects to this hub; `noticed` is called in the loop with slots that do."""
        self._evictor = self._evictor or LinkEvictor(
            self._session, lambda slot: self._call(noticed, slot)
        )
        return self._evictor

    def cut_silent(self, patience: Patience) -> None:
        """Cut links that say nothing for too long; to be called a few times a lease."""
        if not self._closed:
            self._silent.look(patience, self._loop.time())

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
            pause = min(pause * 2, _RETRY_EMPTY_MAX_S)

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
        # zenoh ends a question by itself at `timeout_s`; this only helps against a stuck sender.
        async with asyncio.timeout(timeout_s + 1):
            return await answered

    def subscribe(
        self, key: str, callback: Callable[[list[tuple[str, bytes]]], None]
    ) -> Declaration:
        """Hear a busy key: a thread empties its channel and wakes the loop once per batch."""
        subscriber = self._session.declare_subscriber(key, zenoh.handlers.FifoChannel(_CHANNEL))
        closer = Declaration(self._open, subscriber.undeclare)
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
                except BaseException as error:
                    # A panic inside of zenoh is no `Exception`.
                    if CONTAINED.__exit__(type(error), error, None):
                        return
                    raise
                self._call(
                    deliver, [(str(sample.key_expr), sample.payload.to_bytes()) for sample in batch]
                )

        self._start(drain, f"fabric-{key}")
        return closer

    def hear(self, key: str, callback: Callable[[list[tuple[str, bytes]]], None]) -> Declaration:
        """Hear a quiet key: no thread of its own, so an idle subscription costs nothing."""
        inbox = Inbox(self._call, callback)

        def arrived(sample: zenoh.Sample) -> None:
            inbox.push((str(sample.key_expr), sample.payload.to_bytes()))

        subscriber = self._session.declare_subscriber(key, _direct(arrived))
        return Declaration(self._open, inbox.close, subscriber.undeclare)

    def watch(self, key: str, callback: Callable[[list[tuple[str, bool]]], None]) -> Declaration:
        """Hear tokens come (True) and go (False); those that are there already come first."""
        inbox = Inbox(self._call, callback)

        def arrived(sample: zenoh.Sample) -> None:
            inbox.push((str(sample.key_expr), sample.kind == zenoh.SampleKind.PUT))

        subscriber = self._session.liveliness().declare_subscriber(
            key, _direct(arrived), history=True
        )
        return Declaration(self._open, inbox.close, subscriber.undeclare)

    def token(self, key: str) -> Declaration:
        """Show a token until it is closed or this process is gone."""
        return Declaration(self._open, self._session.liveliness().declare_token(key).undeclare)

    def queryable(self, key: str, callback: Callable[[Question], None]) -> Declaration:
        """Answer questions under a key."""

        def deliver(questions: list[Question]) -> None:
            for question in questions:
                callback(question)

        inbox = Inbox(self._call, deliver)

        def on_query(query: zenoh.Query) -> None:
            inbox.push(Question(query, self._outbox.put))

        queryable = self._session.declare_queryable(key, _direct(on_query))
        return Declaration(self._open, inbox.close, queryable.undeclare)

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
        # What is queued goes out first; then nobody is called any more; then the session ends.
        self._outbox.put(None)
        await asyncio.to_thread(self._sender.join, _END_S)
        for closer in tuple(self._open):
            closer.silence()
        await asyncio.to_thread(self.end)
        for forwarder in self._forwarders:
            await forwarder.close()

    def end(self) -> None:
        """Disconnect now, from any thread; what is queued is lost."""
        self._closed = True
        # In a thread of its own: after a panic inside, closing may never return.
        closer = threading.Thread(target=self._disconnect, name="fabric-close", daemon=True)
        try:
            closer.start()
            closer.join(_CLOSE_S)
        except RuntimeError:  # the interpreter ends: no thread starts any more
            self._disconnect()
        # Ends the sender, where `close` has not.
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(_END_S)

    def _disconnect(self) -> None:
        if self._evictor is not None:
            self._evictor.close()
        with CONTAINED:
            self._session.close()  # type: ignore[no-untyped-call]

    def _start(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()
        return thread

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _send(self) -> None:
        session, get = self._session, self._outbox.get
        while (item := get()) is not None:
            with CONTAINED:  # no hub, or closing: lost, as promised
                if isinstance(item, tuple):
                    # Waits where the link is full, and is not held for a batch: only this thread is delayed.
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
        # Appending and popping are safe between threads without a lock.
        self._items: deque[_T] = deque()
        self._call = call
        self._deliver = deliver
        self._scheduled = False
        self._closed = False

    def push(self, item: _T) -> None:
        """Add an item, from any thread."""
        self._items.append(item)
        # Two threads may both ask for a call: the second one finds nothing, which does no harm.
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


class Declaration:
    """Takes something declared back, once."""

    def __init__(self, register: set[Declaration], *actions: Callable[[], object]) -> None:
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
            with CONTAINED:  # the session is gone, and this with it
                action()

    def silence(self) -> None:
        """Count as closed without telling anybody: the whole session ends."""
        self.closed = True
        self._register.discard(self)


def _direct(callback: Callable[[Any], None]) -> Any:
    return zenoh.handlers.Callback(callback, indirect=False)


def _other_hubs(access: Access, listen: Sequence[str]) -> list[str]:
    own_slot = access.identity.slot
    if access.is_open:
        # Without certificates a hub knows itself only by the port that it listens at here.
        here = {split_address(address)[1] for address in listen}
        return [
            hub for hub in access.hubs if not (is_loopback(hub) and split_address(hub)[1] in here)
        ]
    return [hub for number, hub in enumerate(access.hubs) if keys.hub_slot(number) != own_slot]


async def _open_session(
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
        # Somewhere between the first pause and three times the last one: members fall out of step.
        longer_s = random.SystemRandom().uniform(settings.retry_first_s, 3 * pause_s)
        pause_s = min(longer_s, settings.retry_max_s)


async def _resolve_addresses(hub: str) -> list[str]:
    """Return every address a hub's name has, then the name itself, for when they change."""
    host, port = split_address(hub)
    try:
        resolved = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )
    except OSError:
        # It may resolve later: zenoh gets the name as it is.
        return [hub]
    addresses = []
    for family, *_, place in resolved:
        text = f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])
        addresses.append(f"{text}:{port}")
    return list(dict.fromkeys([*addresses, hub]))


@atexit.register
def _end_all() -> None:
    """A process that ends without closing must not be torn down under zenoh's threads."""
    for link in tuple(_links):
        link.end()
