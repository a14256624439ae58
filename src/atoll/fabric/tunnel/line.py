"""Sending on a channel, for both sides: packets go on the fabric, those without room wait.

Frames pushed in one turn of the loop leave together at its end, those of all streams in one packet.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterable

from atoll.core.patience import Patience
from atoll.fabric.tunnel.channel import Channel
from atoll.fabric.tunnel.tunnel_frames import TunnelError
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings

_SLOW_S = 1.0


class StreamSender:
    """The sending half of a stream: what was written and may not be sent yet."""

    __slots__ = ("_kind", "_line", "_stream", "_waiting", "credit", "drained", "unsent")

    def __init__(self, line: Line, kind: int, stream: int, credit: int) -> None:
        self._line = line
        self._kind = kind
        self._stream = stream
        self._waiting: deque[memoryview] = deque()
        self.credit = credit
        """How many bytes may be sent as far as the receiver is concerned."""
        self.unsent = 0
        """How many bytes wait."""
        self.drained: Callable[[], None] | None = None
        """Called when nothing waits any more."""

    def write(self, data: bytes) -> None:
        """Send, now or as soon as credit and channel allow."""
        size = len(data)
        line = self._line
        if not self.unsent and size <= self.credit and size <= line.piece <= line.channel.room:
            self.credit -= size
            line.push(self._kind, self._stream, data)
            return
        self._waiting.append(memoryview(data))
        self.unsent += size
        self.pump_all()

    def grant(self, amount: int) -> None:
        """Let so many more bytes be sent, and send what waited for it."""
        self.credit += amount
        self.pump_all()

    def pump_all(self) -> None:
        """Send what may be sent."""
        if self.unsent:
            self._line.blocked[self] = None
            self._line.pump()

    def pump(self) -> bool:
        """Send one piece; return whether more may follow as far as this stream is concerned."""
        size = min(len(self._waiting[0]), self.credit, self._line.piece)
        if not size:
            return False
        data = self._waiting.popleft()
        if len(data) > size:
            self._waiting.appendleft(data[size:])
            data = data[:size]
        self.credit -= size
        self.unsent -= size
        self._line.push(self._kind, self._stream, data)
        return self.unsent > 0 and self.credit > 0

    def drop(self) -> None:
        """Forget what waits: nobody will read it."""
        self._waiting.clear()
        self.unsent = 0
        self._line.blocked.pop(self, None)


class TickClock:
    """The clock of a side: whether this process slept, and when it is time for what is looked at rarely."""

    def __init__(self, now_s: float, every_s: float) -> None:
        self._slow_s = now_s
        self.patience = Patience(every_s)

    def beat(self, now_s: float) -> bool:
        """Note that `every_s` should have passed; return whether a second has since the last True."""
        self.patience.tick(now_s)
        slow = now_s - self._slow_s >= _SLOW_S
        if slow:
            self._slow_s = now_s
        return slow


class LineCounters:
    """Counts what happens on a side's lines, those closed included."""

    _OF_CHANNELS = (
        "packets_in",
        "packets_out",
        "bytes_in",
        "bytes_out",
        "resent",
        "gaps",
        "duplicates",
    )

    def __init__(self, names: tuple[str, ...]) -> None:
        self._counts = dict.fromkeys((*names, *self._OF_CHANNELS), 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a count by its name."""
        self._counts[name] += amount

    def closed(self, channel: Channel) -> None:
        """Keep the counts of a channel that is closed."""
        for name in self._OF_CHANNELS:
            self._counts[name] += getattr(channel, name)

    def total(self, channels: Iterable[Channel]) -> dict[str, float]:
        """Return all counts, those of the open channels included."""
        counts = {name: float(count) for name, count in self._counts.items()}
        for channel in channels:
            for name in self._OF_CHANNELS:
                counts[name] += getattr(channel, name)
        return counts


class Line:
    """A channel, the key its packets go to, and the streams that wait for room in it."""

    def __init__(
        self,
        channel: Channel,
        key: str,
        put: Callable[[str, bytes], None],
        loop: AbstractEventLoop,
        settings: TunnelSettings,
        broken: Callable[[str], None],
    ) -> None:
        self.channel = channel
        self._key = key
        self._put = put
        self._loop = loop
        self._broken = broken
        self._scheduled = False
        self.open = True
        self.piece = settings.packet_bytes // 2
        """Bodies go in pieces of at most so many bytes."""
        self.blocked: dict[StreamSender, None] = {}
        self.down_s: float | None = None
        """When the fabric said that the other side is gone."""

    def push(self, kind: int, stream: int, payload: bytes | memoryview = b"") -> None:
        """Send a frame at the end of this turn."""
        if not self.open:
            return
        try:
            self.channel.push(kind, stream, payload)
        except TunnelError as error:
            self._break(str(error))
            return
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def nudge(self) -> None:
        """Send at the end of this turn if there is anything to send."""
        if not self._scheduled and self.open and self.channel.pending:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what was collected."""
        self._scheduled = False
        if not self.open:
            return
        try:
            packets = self.channel.flush(self._loop.time())
        except TunnelError as error:
            self._break(str(error))
            return
        for packet in packets:
            self._put(self._key, packet)

    def pump(self) -> None:
        """Let streams that wait send, a piece each in turn, while the channel has room."""
        blocked, channel, piece = self.blocked, self.channel, self.piece
        drained: list[StreamSender] = []
        while blocked and channel.room >= piece:
            sender = next(iter(blocked))
            del blocked[sender]
            if sender.pump():
                blocked[sender] = None
            elif not sender.unsent:
                drained.append(sender)
        for sender in drained:
            if sender.drained is not None and not sender.unsent:
                sender.drained()

    def shut(self, *, say: bool) -> None:
        """Send no more, after a last word if `say`."""
        if not self.open:
            return
        if say:
            self.channel.close()
            self.flush()
        self.open = False
        self.blocked.clear()

    def _break(self, reason: str) -> None:
        """Have the owner end this line, but not in the midst of what goes on now."""
        self.open = False
        self._loop.call_soon(self._broken, reason)
