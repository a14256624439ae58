"""A request as the worker sees it, and the channel it came in by."""

from __future__ import annotations

from collections.abc import Callable

from atoll.fabric.identity.identity import Person
from atoll.fabric.tunnel.handshake import HandshakeResult
from atoll.fabric.tunnel.line import Line, StreamSender
from atoll.fabric.tunnel.tunnel_frames import (
    CHUNK,
    END,
    FAIL,
    HEAD,
    AnswerHead,
    RequestHead,
    TunnelError,
    encode,
)
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings

_REASON = 500


class IncomingCall:
    """A request, complete with its body, and the way to answer it."""

    __slots__ = (
        "_ended",
        "_full",
        "_link",
        "_most",
        "_outlet",
        "_parts",
        "_stream",
        "body",
        "handed",
        "headers",
        "method",
        "missing",
        "moved",
        "on_cancel",
        "on_writable",
        "path",
        "quiet_s",
        "size",
    )

    def __init__(
        self, link: CallerLink, stream: int, head: RequestHead, settings: TunnelSettings
    ) -> None:
        self._link = link
        self._stream = stream
        self._outlet = StreamSender(link.line, CHUNK, stream, settings.stream_window)
        self._outlet.drained = self._drained
        self._most = settings.unsent_bytes
        self._full = settings.stream_window // 4
        self._ended = False
        self._parts: list[bytes] = []
        self.method = head.method
        self.path = head.path
        self.headers = head.headers
        self.body = b""
        self.size = head.body_bytes
        """Bytes of the body, here or not."""
        self.missing = head.body_bytes
        """Bytes of the body that are not here yet."""
        self.handed = False
        self.moved = True
        self.quiet_s = 0.0
        self.on_cancel: Callable[[], None] | None = None
        """Called once if nobody waits for the answer any more; what is sent after goes nowhere."""
        self.on_writable: Callable[[], None] | None = None
        """Called when all that was sent is under way, if it was not `writable` before."""

    # The caller

    @property
    def caller_name(self) -> str:
        """The caller's name in its certificate."""
        return self._link.person.name

    @property
    def caller_provider(self) -> str:
        """The caller's provider in its certificate."""
        return self._link.person.provider

    @property
    def verified(self) -> bool:
        """Whether an authority vouches for name and provider."""
        return self._link.person.verified

    # The answer

    @property
    def writable(self) -> bool:
        """Whether the caller keeps up; a handler that sends on regardless is stopped at a limit."""
        return self._outlet.unsent < self._full

    @property
    def ended(self) -> bool:
        """Whether nothing more can be sent."""
        return self._ended

    def head(self, status: int, content_type: bytes, retry_after: bytes = b"") -> None:
        """Begin the answer; once, before anything is sent."""
        if not self._ended:
            self.moved = True
            self._link.line.push(
                HEAD, self._stream, encode(AnswerHead(status, content_type, retry_after))
            )

    def send(self, data: bytes) -> None:
        """Send a piece of the body."""
        if self._ended or not data:
            return
        self.moved = True
        self._outlet.write(data)
        if self._outlet.unsent > self._most:
            self.fail("the worker sent more than the caller takes")
            self.cancelled()

    def end(self) -> None:
        """Say that the answer is complete."""
        if not self._ended:
            self._ended = True
            if not self._outlet.unsent:
                self._finish(END)

    def fail(self, reason: str) -> None:
        """Say that it never will be."""
        if not self._ended:
            self._ended = True
            self._outlet.drop()
            self._finish(FAIL, reason.encode()[:_REASON])

    def _finish(self, kind: int, payload: bytes = b"") -> None:
        self._link.line.push(kind, self._stream, payload)
        self._link.forget(self._stream)

    def _drained(self) -> None:
        if self._ended:
            self._finish(END)
        elif self.on_writable is not None:
            self.on_writable()

    # What the caller says

    def take(self, piece: bytes) -> bool:
        """Take a piece of the body; return whether it is complete. Raises TunnelError if too long."""
        self.moved = True
        self.missing -= len(piece)
        if self.missing < 0:
            raise TunnelError("the body is longer than was said")
        if piece:
            self._parts.append(piece)
        if self.missing:
            return False
        self.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        return True

    def grant(self, amount: int) -> None:
        """Take credit of the caller."""
        self.moved = True
        self._outlet.grant(min(amount, 2**31))

    def cancelled(self) -> None:
        """The caller has gone: tell the handler, and send nothing more."""
        self._outlet.drop()
        self._link.forget(self._stream)
        callback, self.on_cancel = self.on_cancel, None
        if callback is not None:
            self._ended = True
            callback()
        self._ended = True


class CallerLink:
    """One channel of a caller, and the streams in it."""

    def __init__(
        self, agreed: HandshakeResult, certificate: bytes, line: Line, now_s: float
    ) -> None:
        self.person: Person = agreed.person
        self.session = agreed.session
        self.certificate = certificate
        self.line = line
        self.streams: dict[int, IncomingCall] = {}
        self.last_stream = 0
        self.used_s = now_s
        self.confirmed = False
        """Whether anything was received that only the caller can have sent."""

    def forget(self, stream: int) -> None:
        """Expect no more of a stream."""
        self.streams.pop(stream, None)
