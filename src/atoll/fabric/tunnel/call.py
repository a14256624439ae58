"""A request as the caller sees it, and the calls to one worker."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from atoll.fabric.identity.identity import Person
from atoll.fabric.tunnel.line import Line, StreamSender
from atoll.fabric.tunnel.tunnel_frames import (
    ACCEPT,
    AMOUNT,
    BODY,
    CANCEL,
    CHUNK,
    CREDIT,
    END,
    FAIL,
    HEAD,
    SUBMIT,
    RequestHead,
    TunnelError,
    TunnelRequest,
    decode_answer,
    encode_submit,
)

_STREAMS = 2**32 - 1
_NO_LIMIT = 2**62
_REASON = 500


class Receiver(Protocol):
    """Receiver of the answer to a call (the gateway's `upstream.Receiver` is one)."""

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Status and headers are there."""

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_lost(self, reason: str, *, unused: bool) -> None:
        """It will never be."""


class Call:
    """One request; nothing is heard of it after `cancel`, `on_end` or `on_lost`."""

    __slots__ = (
        "_begun",
        "_buffer",
        "_credit",
        "_link",
        "_outlet",
        "_paused",
        "_receiver",
        "_stream",
        "_submit",
        "_used",
        "_window",
        "accepted",
        "deadline_s",
        "moved",
        "quiet_s",
    )

    def __init__(
        self, link: WorkerLink, submit: TunnelRequest, receiver: Receiver, window: int
    ) -> None:
        self._link = link
        self._submit: TunnelRequest | None = submit
        self._receiver: Receiver | None = receiver
        self._window = self._credit = window
        self._used = 0
        self._paused = False
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._outlet: StreamSender | None = None
        self._stream = 0
        self._begun = False
        self.accepted = False
        self.moved = True
        self.quiet_s = self.deadline_s = 0.0

    def pause(self) -> None:
        """Hear no more of the body until `resume`; the worker stops when its credit is used up."""
        self._paused = True

    def resume(self) -> None:
        """Deliver what came during the pause, and what comes from now on."""
        self._paused = False
        while self._buffer and not self._paused and self._receiver is not None:
            self._deliver(*self._buffer.popleft())

    def cancel(self) -> None:
        """Listen no more; the worker stops."""
        if self._receiver is not None:
            self._drop()
            if self._stream:
                self._link.say_cancel(self._stream)

    def _drop(self) -> None:
        self._receiver = self._submit = None
        self._buffer.clear()
        if self._outlet is not None:
            self._outlet.drop()
        self._link.forget(self, self._stream)

    def abandon(self, reason: str) -> None:
        """Tell the worker to stop, and the receiver that there will be no more."""
        receiver = self._receiver
        if receiver is not None:
            self.cancel()
            receiver.on_lost(reason, unused=False)

    def lose(self, reason: str) -> None:
        """Tell that there will be no more of the answer."""
        receiver = self._receiver
        if receiver is not None:
            self._drop()
            receiver.on_lost(reason, unused=False)

    def send(self, line: Line, stream: int) -> None:
        """Send the request, on the line that is open now."""
        submit, self._submit = self._submit, None
        if submit is None:
            return
        self._stream = stream
        body = submit.body
        head = RequestHead(submit.method, submit.path, submit.headers, len(body))
        whole = len(body) <= line.piece
        line.push(SUBMIT, stream, encode_submit(head, body if whole else b""))
        if not whole:
            self._outlet = StreamSender(line, BODY, stream, _NO_LIMIT)
            self._outlet.write(body)

    def take(self, kind: int, payload: bytes) -> None:
        """Hear what the worker says; raises TunnelError if it may not say that."""
        receiver = self._receiver
        if receiver is None:
            return
        self.moved = True
        if kind == CHUNK:
            # What waits in the buffer has earned no new credit yet: so that is bounded, too.
            self._credit -= len(payload)
            if self._credit < 0 or not self._begun:
                raise TunnelError("the worker sends more than it may")
        elif kind == ACCEPT:
            self.accepted = True
            return
        elif kind == HEAD:
            if self._begun:
                raise TunnelError("a second head")
            head = decode_answer(payload)
            self._begun = self.accepted = True
            receiver.on_head(head.status, head.content_type, head.retry_after)
            return
        elif kind == FAIL or (kind == END and self._begun):
            self._link.forget(self, self._stream)
        else:
            raise TunnelError(f"a frame of kind {kind}")
        if self._paused or self._buffer:
            self._buffer.append((kind, payload))
        else:
            self._deliver(kind, payload)

    def _deliver(self, kind: int, payload: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            return
        if kind == CHUNK:
            self._used += len(payload)
            if self._used * 2 >= self._window:
                self._link.say_credit(self._stream, self._used)
                self._credit += self._used
                self._used = 0
            receiver.on_body(payload)
            return
        self._drop()
        if kind == END:
            receiver.on_end()
        else:
            receiver.on_lost(payload[:_REASON].decode(errors="replace"), unused=False)


class WorkerLink:
    """The calls to one worker session, and the line to it once there is one."""

    def __init__(self, sid: str) -> None:
        self.sid = sid
        self.line: Line | None = None
        self.person: Person | None = None
        """The worker, once there is a line."""
        self.calls: dict[int, Call] = {}
        self.waiting: dict[Call, None] = {}
        """Calls made before there is a line."""
        self.opening: asyncio.Task[None] | None = None
        self.used_s = self.since_s = self.opened_s = 0.0
        """When there was a call last; since when the worker should say something; when the line opened."""
        self._streams = 0

    def send(self, call: Call, line: Line, accept_s: float) -> None:
        """Send a call's request."""
        self._streams += 1
        self.calls[self._streams] = call
        call.deadline_s = accept_s
        call.send(line, self._streams)

    @property
    def worn(self) -> bool:
        """Whether a new line is due because stream numbers run out."""
        return self._streams >= _STREAMS

    def forget(self, call: Call, stream: int) -> None:
        """Expect no more of a call."""
        self.waiting.pop(call, None)
        self.calls.pop(stream, None)

    def say_cancel(self, stream: int) -> None:
        """Tell the worker to stop."""
        if self.line is not None:
            self.line.push(CANCEL, stream)

    def say_credit(self, stream: int, amount: int) -> None:
        """Let the worker send more."""
        if self.line is not None:
            self.line.push(CREDIT, stream, AMOUNT.pack(amount))
