"""The side of the tunnel that serves.

Callers open channels by a question (`handshake`); what they submit is handed to the handler as an
`IncomingCall` once its body is complete. Everything a caller can make grow is bounded by this side's own
settings, and everything that can stand still has an end: a caller that goes away, falls silent or stops
reading loses its own streams and nobody else's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.identity import Person, RefusedError
from atoll.fabric.tunnel.accept import accepts
from atoll.fabric.tunnel.channel import Channel, ForgedError, channel_of
from atoll.fabric.tunnel.handshake import CALLING, read_hello, refusal, welcome
from atoll.fabric.tunnel.incoming import CallerLink, IncomingCall
from atoll.fabric.tunnel.line import Line, LineCounters, TickClock
from atoll.fabric.tunnel.tunnel_frames import (
    ACCEPT,
    BODY,
    CANCEL,
    CREDIT,
    FAIL,
    SUBMIT,
    RequestHead,
    TunnelError,
    decode_amount,
    decode_submit,
)
from atoll.fabric.tunnel.tunnel_settings import TunnelSettings
from atoll.telemetry.logs import Log

if TYPE_CHECKING:
    from atoll.fabric.transport.fabric import Fabric, Peer, QueryIn, Subscription

__all__ = ["IncomingCall", "TunnelServer"]

_LOGGED_PER_S = 20
_COUNTED = ("requests", "channels", "cancelled", "refused", "strays", "forged", "violations")


class TunnelServer:
    """Takes requests of callers; one for a process."""

    def __init__(
        self,
        fabric: Fabric,
        handler: Callable[[IncomingCall], None],
        *,
        accept: str | None = None,
        callers: tuple[str, ...] = CALLING,
        settings: TunnelSettings | None = None,
        log: Log | None = None,
    ) -> None:
        self.accept = accept
        self._callers = callers
        """Whose requests are taken (`Metadata.accept`); may be changed at any time."""
        self._fabric = fabric
        self._handler = handler
        self._settings = settings or TunnelSettings()
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._links: dict[int, CallerLink] = {}
        self._counts = LineCounters(_COUNTED)
        self._handshakes = 0
        self._handshakes_of: Counter[str] = Counter()
        self._closed = False
        self._endpoint = keys.new_sid(fabric.identity.slot, secrets.token_bytes(8))
        self._inward = fabric.subscribe(keys.inward_all(self._endpoint), self._receive)
        self._door: Subscription = fabric.queryable(keys.req(fabric.sid), self._asked)
        fabric.listeners.append(self._heard_of)
        fabric.on_renewed.append(self._renewed)
        fabric.on_revoked.append(self.recheck)
        self._ticks = TickClock(self._loop.time(), self._settings.keep_alive_s)
        self._timer = self._loop.call_later(self._settings.keep_alive_s, self._tick)

    @property
    def running(self) -> int:
        """Requests that are not answered yet."""
        return sum(len(link.streams) for link in self._links.values())

    # Opening

    def _renewed(self, old: str, new: str) -> None:
        """Be found under the new session; channels do not mind."""
        del old
        self._door.close()
        self._door = self._fabric.queryable(keys.req(new), self._asked)

    def _asked(self, question: QueryIn) -> None:
        self._handshakes += 1
        if self._closed or self._handshakes > self._settings.handshakes_per_s:
            question.reply(refusal("busy"))
            return
        try:
            question.reply(self._open(question.payload))
        except TunnelError as error:
            self._counts.add("refused")
            if self._handshakes <= _LOGGED_PER_S:  # counted all, logged a few
                self._say("tunnel.refused", reason=str(error))
            question.reply(refusal(str(error)))

    def _open(self, question: bytes) -> bytes:
        fabric, settings = self._fabric, self._settings
        hello, person, hello_body = read_hello(question, fabric.verifier, fabric.sid, self._callers)
        # Counted by whom it is of: nobody uses up what others may ask for.
        self._handshakes_of[person.slot] += 1
        if self._handshakes_of[person.slot] > settings.slot_handshakes_per_s:
            raise TunnelError("busy")
        self._check_accept(person)
        self._make_room(person.slot)
        number = secrets.randbits(64)
        while number in self._links:
            number = secrets.randbits(64)
        answer, agreed = welcome(fabric.identity, hello, person, hello_body, self._endpoint, number)
        now_s = self._loop.time()
        channel = Channel(number, agreed.box, settings, now_s)
        key = keys.outward(agreed.endpoint, fabric.identity.slot, "x")
        line = Line(
            channel, key, fabric.put, self._loop, settings, lambda why: self._lose(number, why)
        )
        self._links[number] = CallerLink(agreed, hello.certificate, line, now_s)
        self._counts.add("channels")
        return answer

    def _check_accept(self, person: Person) -> None:
        if not accepts(self.accept, self._fabric.identity.provider, person.name, person.provider):
            raise TunnelError(f"requests of {person.name} ({person.provider}) are not taken here")

    def _make_room(self, slot: str) -> None:
        """Forget the slot's oldest channel without streams if it has too many."""
        slot_links = [(n, k) for n, k in self._links.items() if k.person.slot == slot]
        if len(slot_links) < self._settings.slot_channels:
            return
        # Those never used go first: somebody may repeat a HELLO to crowd others out.
        idle = sorted((k.confirmed, k.used_s, n) for n, k in slot_links if not k.streams)
        if not idle:
            raise TunnelError("too many channels")
        self._lose(idle[0][2], "room for another channel")

    # What callers say

    def _receive(self, batch: list[tuple[str, bytes]]) -> None:
        now_s = self._loop.time()
        for _, packet in batch:
            number = channel_of(packet)
            link = self._links.get(number)
            if link is None:
                self._counts.add("strays")
                continue
            channel = link.line.channel
            try:
                frames = channel.receive(packet, now_s)
                link.confirmed = link.confirmed or bool(frames)
                for kind, stream, payload in frames:
                    self._take(link, kind, stream, payload)
            except ForgedError:
                self._counts.add("forged")
                continue
            except TunnelError as error:
                self._counts.add("violations")
                self._say("tunnel.violation", caller=link.person.name, reason=str(error))
                self._lose(number, str(error))
                continue
            if link.line.blocked:
                link.line.pump()
            if channel.closed:
                self._lose(number, "closed by the caller")
            elif channel.pending:
                link.line.nudge()

    def _take(self, link: CallerLink, kind: int, stream: int, payload: bytes) -> None:
        if kind == SUBMIT:
            self._submitted(link, stream, payload)
            return
        incoming = link.streams.get(stream)
        if incoming is None:
            # The stream may have ended here while this was on its way.
            if kind not in (BODY, CANCEL, CREDIT):
                raise TunnelError(f"a frame of kind {kind}")
            return
        if kind == CREDIT:
            incoming.grant(decode_amount(payload))
        elif kind == CANCEL:
            self._cancel(incoming)
        elif kind == BODY and not incoming.handed:
            if incoming.take(payload):
                self._hand(incoming)
        else:
            raise TunnelError(f"a frame of kind {kind}")

    def _submitted(self, link: CallerLink, stream: int, payload: bytes) -> None:
        # Numbers only rise, so that a stream that was refused or has ended never comes back.
        if stream <= link.last_stream:
            raise TunnelError("a stream's number was used before")
        link.last_stream = stream
        link.used_s = self._loop.time()
        head, piece = decode_submit(payload, self._settings.head_bytes)
        reason = self._refusal(link, head)
        if reason:
            self._counts.add("refused")
            self._say("tunnel.refused", caller=link.person.name, reason=reason)
            link.line.push(FAIL, stream, reason.encode())
            return
        incoming = IncomingCall(link, stream, head, self._settings)
        incoming.quiet_s = link.used_s
        link.streams[stream] = incoming
        link.line.push(ACCEPT, stream)
        if incoming.take(piece):
            self._hand(incoming)

    def _refusal(self, link: CallerLink, head: RequestHead) -> str:
        most, slot = self._settings, link.person.slot
        # For every request: `accept` may have changed, and the certificate may have been revoked.
        try:
            self._check_accept(self._fabric.verifier.person(link.certificate))
        except (TunnelError, RefusedError) as error:
            return f"refused: {error}"
        if self._closed:
            return "the worker stops"
        if head.body_bytes > most.body_bytes:
            return f"the request is larger than {most.body_bytes} bytes"
        slot_links = [k for k in self._links.values() if k.person.slot == slot]
        if (
            len(link.streams) >= most.channel_streams
            or sum(len(k.streams) for k in slot_links) >= most.slot_streams
        ):
            return "too many requests of this caller"
        if head.body_bytes > most.packet_bytes:
            # Also those that are complete: they are kept until they are answered.
            held = sum(s.size for k in slot_links for s in k.streams.values())
            if held + head.body_bytes > most.bodies_bytes:
                return "too many large requests of this caller"
        return ""

    def _hand(self, incoming: IncomingCall) -> None:
        incoming.handed = True
        self._counts.add("requests")
        try:
            self._handler(incoming)
        except Exception as error:  # noqa: BLE001  one request must not end the others
            self._loop.call_exception_handler({"message": "tunnel handler", "exception": error})
            incoming.fail("the worker failed")

    def _cancel(self, incoming: IncomingCall) -> None:
        self._counts.add("cancelled")
        try:
            incoming.cancelled()
        except Exception as error:  # noqa: BLE001  one request must not end the others
            self._loop.call_exception_handler({"message": "tunnel handler", "exception": error})

    # Loss

    def _lose(self, number: int, reason: str) -> None:
        """Forget a channel; its streams are cancelled."""
        link = self._links.pop(number, None)
        if link is None:
            return
        link.line.shut(say=True)
        self._counts.closed(link.line.channel)
        if link.streams:
            self._say(
                "tunnel.lost", caller=link.person.name, streams=len(link.streams), reason=reason
            )
        for incoming in list(link.streams.values()):
            self._cancel(incoming)

    def _heard_of(self, event: str, peer: Peer) -> None:
        """Ask a caller that is said to be gone; one whose session was renewed answers."""
        if event not in ("down", "left"):
            return
        now_s = self._loop.time()
        for number, link in self._links.items():
            line = link.line
            if link.session == peer.sid and line.down_s is None:
                line.down_s = now_s
                line.channel.ping()
                line.nudge()
                self._loop.call_later(self._settings.down_s, self._check_down, number)

    def _check_down(self, number: int) -> None:
        link = self._links.get(number)
        if link is None or link.line.down_s is None:
            return
        if link.line.channel.heard_s <= link.line.down_s:
            now_s = self._loop.time()
            if now_s - link.line.down_s < self._ticks.patience.extra_s(link.session, now_s):
                self._loop.call_later(self._settings.down_s, self._check_down, number)
                return
            self._lose(number, "the caller is gone")
        else:
            link.line.down_s = None

    # Time

    def recheck(self) -> None:
        """Lose the lines of callers whose certificates are no longer believed."""
        for number, link in list(self._links.items()):
            if not self._fabric.verifier.believes(link.person):
                self._lose(number, "the caller's certificate was revoked or has expired")

    def _tick(self) -> None:
        settings = self._settings
        now_s = self._loop.time()
        self._timer = self._loop.call_later(settings.keep_alive_s, self._tick)
        slow = self._ticks.beat(now_s)
        if slow:
            self._handshakes = 0
            self._handshakes_of.clear()
            self.recheck()
        for number, link in list(self._links.items()):
            channel = link.line.channel
            busy = bool(link.streams)
            if busy or not channel.settled:
                # While this process stood still it could hear nobody.
                heard_s, limit_s = channel.heard_s, settings.caller_gone_s
                if self._ticks.patience.is_silent(link.session, heard_s, limit_s, now_s):
                    self._lose(number, f"the caller is silent for {settings.caller_gone_s:g} s")
                    continue
            elif now_s - link.used_s > (
                # Callers close theirs after `idle_s`: this ends what they have left.
                settings.idle_s * 3 if link.confirmed else settings.confirm_s
            ):
                self._lose(number, "idle")
                continue
            if busy:
                link.used_s = now_s
                if slow:
                    self._check_streams(link, now_s)
            channel.tick(now_s, busy=busy)
            link.line.nudge()

    def _check_streams(self, link: CallerLink, now_s: float) -> None:
        settings = self._settings
        for incoming in list(link.streams.values()):
            if incoming.moved:
                incoming.moved = False
                incoming.quiet_s = now_s
                continue
            max_s = settings.quiet_s if incoming.handed else settings.body_s
            if now_s - incoming.quiet_s > max_s:
                incoming.fail(f"nothing moved for {max_s:g} s")
                self._cancel(incoming)

    def _say(self, event: str, **fields: object) -> None:
        if self._log is not None:
            self._log.event(event, **fields)

    def stats(self) -> dict[str, float]:
        """Return figures for metrics: totals since the start, and what is open now."""
        return self._counts.total(k.line.channel for k in self._links.values()) | {
            "open_channels": float(len(self._links)),
            "open_requests": float(self.running),
        }

    async def close(self) -> None:
        """Cancel what runs (tell callers) and stop."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        if self.recheck in self._fabric.on_revoked:
            self._fabric.on_revoked.remove(self.recheck)
        if self._heard_of in self._fabric.listeners:
            self._fabric.listeners.remove(self._heard_of)
        if self._renewed in self._fabric.on_renewed:
            self._fabric.on_renewed.remove(self._renewed)
        self._door.close()
        for number in list(self._links):
            self._lose(number, "the worker stops")
        self._inward.close()
        await asyncio.sleep(0)
