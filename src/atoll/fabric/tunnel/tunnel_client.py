"""The side of the tunnel that asks.

There is one line for each worker session that was called lately, opened with the first call to it. All
the waiting has an end: for the handshake, for the worker's word that it has the request, and from then
on for its next sign of life, which it gives four times a second even while it computes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.tunnel.call import Call, Receiver, WorkerLink
from atoll.fabric.tunnel.channel import Channel, ForgedError, channel_of
from atoll.fabric.tunnel.handshake import ClientHandshake
from atoll.fabric.tunnel.line import Line, LineCounters, TickClock
from atoll.fabric.tunnel.tunnel_frames import TunnelError, TunnelRequest
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings
from atoll.telemetry.logs import Log

if TYPE_CHECKING:
    from atoll.fabric.transport.fabric import Fabric, Peer

__all__ = ["Call", "Receiver", "TunnelClient"]

_COUNTED = ("calls", "channels", "lost", "strays", "forged", "violations")


class TunnelClient:
    """Sends requests to workers; one for a process."""

    def __init__(
        self, fabric: Fabric, settings: TunnelSettings | None = None, log: Log | None = None
    ) -> None:
        self._fabric = fabric
        self._settings = settings or TunnelSettings()
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, WorkerLink] = {}
        """Where new calls go, by session."""
        self._lines: dict[int, WorkerLink] = {}
        """All that are open, by number of the channel; a renewed worker has two for a while."""
        self._counts = LineCounters(_COUNTED)
        self._closed = False
        slot = fabric.identity.slot
        self._endpoint = keys.new_sid(slot, secrets.token_bytes(8))
        self._subscription = fabric.subscribe(keys.outward_all(self._endpoint), self._receive)
        fabric.listeners.append(self._heard_of)
        fabric.on_revoked.append(self.recheck)
        self._ticks = TickClock(self._loop.time(), self._settings.keep_alive_s)
        """When last nothing could be heard here, whoever said what."""
        self._timer = self._loop.call_later(self._settings.keep_alive_s, self._tick)

    # Calls

    def call(self, sid: str, submit: TunnelRequest, receiver: Receiver) -> Call:
        """Send a request to a session; returns at once, `receiver` is told later, never from in here."""
        now_s = self._loop.time()
        link = self._links.get(sid)
        if link is None or (link.line is not None and not link.line.open):
            link = WorkerLink(sid)
        call = Call(link, submit, receiver, self._settings.stream_window)
        call.quiet_s = now_s
        link.used_s = now_s
        self._counts.add("calls")
        line = link.line
        reason = self._refusal(link, submit)
        if reason:
            self._loop.call_soon(call.lose, reason)
        elif line is not None:
            if not link.calls:
                # Nothing was to be heard since the last call ended.
                link.since_s = now_s
                self._ticks.patience.restart(sid)
            link.send(call, line, now_s + self._settings.accept_s)
            if link.worn:
                del self._links[sid]
        else:
            self._links[sid] = link
            link.waiting[call] = None
            if link.opening is None:
                link.opening = self._loop.create_task(self._open(link))
        return call

    def _refusal(self, link: WorkerLink, submit: TunnelRequest) -> str:
        most = self._settings
        if self._closed:
            return "the tunnel is closed"
        if len(link.calls) + len(link.waiting) >= most.channel_streams:
            return "too many requests to this worker"
        if len(submit.body) > most.body_bytes:
            return f"the request is larger than {most.body_bytes} bytes"
        headers = sum(len(name) + len(value) + 16 for name, value in submit.headers)
        if headers + len(submit.path) + len(submit.method) + 64 > most.head_bytes:
            return f"the headers are larger than {most.head_bytes} bytes"
        return ""

    async def _open(self, link: WorkerLink) -> None:
        fabric, settings = self._fabric, self._settings
        try:
            opening = ClientHandshake(
                fabric.identity, fabric.verifier.fabric_id, fabric.sid, link.sid, self._endpoint
            )
            async with asyncio.timeout(settings.handshake_s * 1.1):
                answer = await fabric.query(keys.req(link.sid), opening.hello, settings.handshake_s)
            agreed = opening.finish(answer, fabric.verifier)
            if agreed.channel in self._lines:
                raise TunnelError("the worker gave a channel twice")
        except Exception as error:  # noqa: BLE001  whatever it is, calls must hear of it
            link.opening = None
            what = "no answer" if isinstance(error, TimeoutError) else str(error)
            self._lose(link, f"cannot open a channel: {what}")
            return
        link.opening = None
        now_s = self._loop.time()
        channel = Channel(agreed.channel, agreed.box, settings, now_s)
        link.person = agreed.person
        key = keys.inward(agreed.endpoint, fabric.identity.slot)
        line = Line(
            channel, key, fabric.put, self._loop, settings, lambda why: self._lose(link, why)
        )
        link.line = line
        link.used_s = link.since_s = link.opened_s = now_s
        self._lines[channel.number] = link
        self._counts.add("channels")
        waiting, link.waiting = link.waiting, {}
        for call in waiting:
            link.send(call, line, now_s + settings.accept_s)

    # What workers say

    def _receive(self, batch: list[tuple[str, bytes]]) -> None:
        now_s = self._loop.time()
        lines = self._lines
        for _, packet in batch:
            link = lines.get(channel_of(packet))
            if link is None or link.line is None:
                self._counts.add("strays")
                continue
            line = link.line
            try:
                frames = line.channel.receive(packet, now_s)
            except ForgedError:
                self._counts.add("forged")
                continue
            except TunnelError as error:
                self._report_violation(link, str(error))
                continue
            if link.calls:
                # Without calls it need not say anything.
                self._ticks.patience.hear(link.sid, now_s)
            calls = link.calls
            for kind, stream, payload in frames:
                call = calls.get(stream)
                if call is not None:
                    self._take(call, kind, payload)
            if line.blocked:
                line.pump()
            if line.channel.closed:
                self._lose(link, "the worker closed the channel")
            elif line.channel.pending:
                line.nudge()

    def _take(self, call: Call, kind: int, payload: bytes) -> None:
        try:
            call.take(kind, payload)
        except TunnelError as error:
            self._counts.add("violations")
            self._say("tunnel.violation", reason=str(error))
            self._safely(call.abandon, str(error))
        except Exception as error:  # noqa: BLE001  one receiver must not end the others' streams
            self._loop.call_exception_handler({"message": "tunnel receiver", "exception": error})
            self._safely(call.abandon, "the answer could not be taken")

    def _safely(self, tell: Callable[[str], None], reason: str) -> None:
        try:
            tell(reason)
        except Exception as error:  # noqa: BLE001  the other receivers are to be told, too
            self._loop.call_exception_handler({"message": "tunnel receiver", "exception": error})

    def _report_violation(self, link: WorkerLink, reason: str) -> None:
        self._counts.add("violations")
        self._say("tunnel.violation", sid=link.sid, reason=reason)
        self._lose(link, reason)

    # Loss

    def _lose(self, link: WorkerLink, reason: str) -> None:
        """Give a line up with all that is on it."""
        if self._links.get(link.sid) is link:
            del self._links[link.sid]
        if link.line is not None:
            if self._lines.pop(link.line.channel.number, None) is not None:
                self._counts.closed(link.line.channel)
            link.line.shut(say=True)
        if link.opening is not None:
            link.opening.cancel()
        calls = [*link.waiting, *link.calls.values()]
        if calls:
            self._counts.add("lost", len(calls))
            self._say("tunnel.lost", sid=link.sid, calls=len(calls), reason=reason)
        for call in calls:
            self._safely(call.lose, reason)

    def _heard_of(self, event: str, peer: Peer) -> None:
        """Ask a worker that is said to be gone; a renewed one answers under its old keys."""
        if event not in ("down", "left"):
            return
        now_s = self._loop.time()
        for link in [k for k in self._lines.values() if k.sid == peer.sid]:
            line = link.line
            if line is not None and line.down_s is None:
                line.down_s = now_s
                line.channel.ping()
                line.nudge()
                self._loop.call_later(self._settings.down_s, self._check_down, link)
        opening = self._links.get(peer.sid)
        if opening is not None and opening.line is None:
            self._lose(opening, "the worker is gone")

    def _check_down(self, link: WorkerLink) -> None:
        line = link.line
        if line is None or line.down_s is None or not line.open:
            return
        if line.channel.heard_s <= line.down_s and self._fabric.connected:
            # A worker that was late before, or is asked by one that is, may take longer to answer.
            now_s = self._loop.time()
            extra_s = self._ticks.patience.extra_s(link.sid, now_s)
            if now_s - line.down_s < extra_s:
                self._loop.call_later(self._settings.down_s, self._check_down, link)
                return
            self._lose(link, "the worker is gone")
            return
        line.down_s = None
        if self._links.get(link.sid) is link:
            # It lives on under another session: what is new goes there.
            del self._links[link.sid]

    # Time

    def recheck(self) -> None:
        """Lose the lines to workers whose certificates are no longer believed."""
        for link in list(self._lines.values()):
            person = link.person
            if person is not None and not self._fabric.verifier.believes(person):
                self._lose(link, "the worker's certificate was revoked or has expired")

    def _tick(self) -> None:
        settings = self._settings
        now_s = self._loop.time()
        self._timer = self._loop.call_later(settings.keep_alive_s, self._tick)
        if self._ticks.beat(now_s):
            self.recheck()
        for link in list(self._lines.values()):
            line = link.line
            if line is None or not line.open:
                continue
            channel = line.channel
            busy = bool(link.calls)
            if busy or not channel.settled:
                link.used_s = now_s
                heard_s = max(channel.heard_s, link.since_s)
                if self._is_stalled(link.sid, now_s, heard_s):
                    self._lose(link, f"the worker is silent for {now_s - heard_s:.1f} s")
                    continue
                self._check_calls(link, now_s)
            elif now_s - link.used_s > settings.idle_s:
                self._lose(link, "idle")
                continue
            if now_s - link.opened_s > settings.fresh_s and self._links.get(link.sid) is link:
                del self._links[link.sid]
            channel.tick(now_s, busy=busy)
            line.nudge()

    def _is_stalled(self, sid: str, now_s: float, heard_s: float) -> bool:
        """Whether a worker is silent for too long; time in which nothing could be heard counts less."""
        patience, settings = self._ticks.patience, self._settings
        if now_s - heard_s < 2 * settings.keep_alive_s:
            return False
        if not self._fabric.connected:
            patience.excused_s = now_s
        offline_s = settings.offline_s + patience.extra_s(sid, now_s)
        return now_s - heard_s > offline_s or patience.is_silent(
            sid, heard_s, settings.stall_s, now_s
        )

    def _check_calls(self, link: WorkerLink, now_s: float) -> None:
        for call in list(link.calls.values()):
            if call.moved:
                call.moved = False
                call.quiet_s = now_s
            if not call.accepted and now_s > call.deadline_s:
                self._safely(call.abandon, "the worker does not take the request")
            elif now_s - call.quiet_s > self._settings.quiet_s:
                self._safely(call.abandon, f"nothing came for {self._settings.quiet_s:g} s")

    def _say(self, event: str, **fields: object) -> None:
        if self._log is not None:
            self._log.event(event, **fields)

    def stats(self) -> dict[str, float]:
        """Return figures for metrics: totals since the start, and what is open now."""
        channels = [k.line.channel for k in self._lines.values() if k.line is not None]
        sent = sum(len(k.calls) for k in self._lines.values())
        return self._counts.total(channels) | {
            "open_channels": float(len(channels)),
            "open_calls": float(sent + sum(len(k.waiting) for k in self._links.values())),
        }

    async def close(self) -> None:
        """End all calls (`on_lost`) and stop."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        if self.recheck in self._fabric.on_revoked:
            self._fabric.on_revoked.remove(self.recheck)
        if self._heard_of in self._fabric.listeners:
            self._fabric.listeners.remove(self._heard_of)
        links = {id(k): k for k in (*self._links.values(), *self._lines.values())}
        openings = [k.opening for k in links.values() if k.opening is not None]
        for link in links.values():
            self._lose(link, "the tunnel is closed")
        await asyncio.gather(*openings, return_exceptions=True)
        self._subscription.close()
