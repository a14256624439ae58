"""How messages get from one process to another: over ZeroMQ.

Everyone has one inbox with an endpoint and sends to the endpoints of others. Messages from one
sender to one receiver keep their order; nothing else is promised. A message to someone who is gone
waits for a while and is then lost, which the scheduler's deadlines cover.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from atoll.core.errors import MissingDependencyError
from atoll.engine.engine_errors import FrameError
from atoll.engine.engine_messages import Message
from atoll.engine.frames import decode, encode

_LOG = logging.getLogger(__name__)
# Messages that wait for one receiver before more are dropped.
_HIGH_WATER = 10_000
_LINGER_MS = 200
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 500


class ZmqMailbox:
    """An inbox (ROUTER) and one DEALER per receiver, over TCP or IPC. Not for several threads."""

    def __init__(self, bind: str = "tcp://127.0.0.1:*", context: Any = None) -> None:
        zmq = import_zmq()
        self._zmq = zmq
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._inbox = self._context.socket(zmq.ROUTER)
        self._inbox.setsockopt(zmq.LINGER, 0)
        # No limit on what comes in: with one, the queues of senders would fill up, and full ones drop
        # messages.
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(bind)
        self.endpoint: str = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._outboxes: dict[str, Any] = {}
        self._monitors: dict[str, Any] = {}

    @property
    def fileno(self) -> int:
        """A file descriptor that becomes readable when something may have come."""
        return int(self._inbox.getsockopt(self._zmq.FD))

    def watch(self, to: str) -> None:
        """Note when the connection to `to` breaks; see `take_broken`."""
        if to not in self._monitors:
            outbox = self._outbox(to)
            self._monitors[to] = outbox.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)

    def take_broken(self) -> list[str]:
        """Return the watched endpoints whose connection broke since last asked."""
        gone = []
        for to, monitor in self._monitors.items():
            if monitor.poll(0):
                gone.append(to)
                # Several events may wait; one is enough to know.
                with contextlib.suppress(self._zmq.Again):
                    while True:
                        monitor.recv_multipart(self._zmq.NOBLOCK)
        return gone

    def _outbox(self, to: str) -> Any:
        if to not in self._outboxes:
            self._outboxes[to] = dealer(self._context, to)
        return self._outboxes[to]

    def send(self, to: str, message: Message) -> None:
        """Send without waiting; to someone gone too long the message is dropped."""
        outbox = self._outbox(to)
        try:
            outbox.send_multipart(encode(message), self._zmq.NOBLOCK, copy=False)
        except self._zmq.Again:
            _LOG.warning("dropped a message to %s: its queue is full", to)

    def receive(self, timeout_s: float, busy_s: float = 0.0) -> list[Message]:
        """Return everything that has come, waiting at most `timeout_s` for the first.

        For the first `busy_s` it looks again and again: who sleeps takes a while to be woken.
        """
        messages: list[Message] = []
        until_s = time.monotonic() + busy_s
        while not self._inbox.poll(0):
            if time.monotonic() >= until_s:
                if not self._inbox.poll(round(timeout_s * 1000)):
                    return messages
                break
        with contextlib.suppress(self._zmq.Again):
            while True:
                # The first part is the sender's identity, which ROUTER adds.
                parts = self._inbox.recv_multipart(self._zmq.NOBLOCK, copy=False)
                message = read_parts([part.buffer for part in parts[1:]])
                if message is not None:
                    messages.append(message)
        return messages

    def forget(self, to: str) -> None:
        """Close the way to `to`; what was sent may still leave for a moment."""
        outbox = self._outboxes.pop(to, None)
        monitor = self._monitors.pop(to, None)
        if monitor is not None:
            outbox.disable_monitor()
            monitor.close(0)
        if outbox is not None:
            outbox.close(_LINGER_MS)

    def close(self) -> None:
        """Close every socket; what was sent may still leave for a moment."""
        for to in list(self._outboxes):
            self.forget(to)
        self._inbox.close(0)
        if self._owns_context:
            self._context.destroy(_LINGER_MS)


def read_parts(parts: list[Any]) -> Message | None:
    """Decode a message, or log why it is void and return None."""
    try:
        return decode(parts)
    except FrameError as error:
        _LOG.warning("dropped a message: %s", error)
        return None


def dealer(context: Any, to: str) -> Any:
    """Connect a DEALER that reconnects soon and never blocks its owner."""
    zmq = import_zmq()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.connect(to)
    return socket


def import_zmq() -> Any:
    """Return the zmq module, or say which extra brings it."""
    try:
        import zmq
    except ImportError as error:
        raise MissingDependencyError("pyzmq", "engine", needed_for="the stage engine") from error
    return zmq
