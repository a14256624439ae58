"""Clients of the check of kills: each knows what every answer must be, and keeps count of what it got.

What an answer must be was asked before anything was broken: text, calls, ids of tokens, log-probabilities and
reason of each of its choices, usage. A client whose gateway is killed has the other one go on after the last
event that it got (`last-event-id`), or asks it from the start if it got none; that is no error. Anything else
that is not the whole right answer is.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.core.rng import stream
from tests.slow.answers import (
    AnswerReader,
    BrokenAnswerError,
    StreamBusyError,
    read_head,
    read_piece,
)
from tests.slow.failover.chaos_fleet import SERVICE

HUNG_S = 90.0
_AGAIN_S = 45.0
_PAUSE_S = 0.25
_SLOW_S = 5.0
_REFUSED_S = 0.2
"""So long after a kill a connection may still seem to be there."""
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Basel", "Geneva"]},
        "codes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1000, "maximum": 9999},
            "minItems": 8,
            "maxItems": 12,
        },
        "open": {"type": "boolean"},
    },
    "required": ["city", "codes", "open"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks things up.", "parameters": _SCHEMA},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A request whose answer is known once it was asked in peace."""

    kind: str
    path: str
    body: dict[str, Any]


def cases(tokens: int) -> list[Case]:
    """Return every request that clients make: greedy, sampled, several at once, by schema, with tools."""
    found = []
    for number in range(6):
        body = {"prompt": f"Prompt number {number * 7919}: " * (1 + number % 3), "temperature": 0}
        found.append(_completion("greedy", body, tokens))
    for number in range(5):
        body = {"prompt": f"Story {number * 104729}: ", "temperature": 0.9, "top_p": 0.95}
        found.append(_completion("sampled", body | {"seed": 1000 + number}, tokens))
    for number in range(3):
        body = {"prompt": f"Twice {number * 7919}: ", "temperature": 0.9, "seed": 500 + number}
        found.append(_completion("several", body | {"n": 2, "logprobs": 2}, tokens // 2))
    for number in range(2):
        warm = {"temperature": 0.7, "seed": 300 + number, "logprobs": True, "top_logprobs": 2}
        found.append(_chat("logprobs", f"And {number}?", warm))
    form = {"type": "json_schema", "json_schema": {"name": "office", "schema": _SCHEMA}}
    for number in range(4):
        warm = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": 77 + number}
        found.append(_chat("schema", f"Office {number}?", warm | {"response_format": form}))
    for number in range(3):
        warm = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": 99 + number}
        asked = {"tools": [_TOOL], "tool_choice": "required"}
        found.append(_chat("tools", f"Look up office {number}.", warm | asked))
    return found


def _completion(kind: str, body: dict[str, Any], tokens: int) -> Case:
    return Case(kind, "/v1/completions", body | {"max_tokens": tokens, "ignore_eos": True})


def _chat(kind: str, question: str, body: dict[str, Any]) -> Case:
    messages = [{"role": "user", "content": question}]
    return Case(kind, "/v1/chat/completions", body | {"messages": messages, "max_tokens": 160})


@dataclass
class Sending:
    """One request as a gateway got it."""

    request_id: str
    gateway: int
    kind: str
    begun_s: float
    seen: int = 0
    """Tokens that the client has."""
    cut: bool = False
    """Whether the gateway was killed under it before the client had anything."""
    moved: int = 0
    """How often its stream went on at another gateway."""
    sent: bool = False


@dataclass
class Seen:
    """What all clients saw."""

    requests: int = 0
    answers: int = 0
    errors: int = 0
    truncated: int = 0
    token_mismatch: int = 0
    hung: int = 0
    no_replica: int = 0
    retried: int = 0
    """Requests that were asked again because their gateway was killed before they had an event."""
    moved: int = 0
    """Streams that another gateway went on with, each time counted."""
    delivered: int = 0
    sendings: list[Sending] = field(default_factory=list, repr=False)
    longest_s: list[float] = field(default_factory=list, repr=False)
    """The longest wait between two tokens of each answer, a gateway's death included."""
    first_s: list[float] = field(default_factory=list, repr=False)
    kinds: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    """Answers that were right, and late."""


class Watched(Protocol):
    """What a client asks the site when something went wrong."""

    ports: list[int]
    key: str

    def is_ready(self, name: str) -> bool:
        """Whether a process is ready."""
        ...

    def was_killed(self, name: str, begun_s: float, ended_s: float) -> bool:
        """Whether a process was killed within a span of time."""
        ...

    def dead_s(self, begun_s: float, ended_s: float) -> float:
        """Return for how long at a stretch no replica was there, in seconds."""
        ...


class ChaosClients:
    """So many clients, each of which asks again as soon as it has its answer."""

    def __init__(self, site: Watched, resume_s: float, tokens: int) -> None:
        self.seen = Seen()
        self._site = site
        self._resume_s = resume_s
        self._cases = cases(tokens)
        self._expected: dict[int, AnswerReader] = {}
        self._over = False
        self._began_s = time.monotonic()

    async def learn(self, say: Callable[[str], None]) -> None:
        """Ask everything in peace, of each gateway; what the engine does not take is left out."""
        learned = [self._learn(number, say) for number in range(len(self._cases))]
        await asyncio.gather(*learned)

    async def _learn(self, number: int, say: Callable[[str], None]) -> None:
        case, answers = self._cases[number], []
        for gateway in range(len(self._site.ports)):
            sending, reader = self._sending(gateway, case.kind), AnswerReader()
            try:
                await self._stream(case, sending, reader, [])
            except BrokenAnswerError as error:
                if case.kind != "tools":
                    raise
                say(f"left out: {case.kind}: {str(error)[:160]}")
                return
            self._count(sending)
            answers.append(reader)
        for other in answers[1:]:
            if why := answers[0].difference(other):
                raise RuntimeError(f"{case.body} has several answers: {why}")
        self._expected[number] = answers[0]

    async def run(self, count: int) -> None:
        """Ask until told to stop; what was begun is finished."""
        self._began_s = time.monotonic()
        await asyncio.gather(*(self._client(number) for number in range(count)))

    def stop(self) -> None:
        """Begin no more requests."""
        self._over = True

    async def _client(self, number: int) -> None:
        chance = stream(number, "chaos", "client")
        known = sorted(self._expected)
        while not self._over:
            which = known[int(chance.integers(len(known)))]
            await self._ask(which, int(chance.integers(len(self._site.ports))))
            await asyncio.sleep(float(chance.uniform(0.0, 2 * _PAUSE_S)))

    def _sending(self, gateway: int, kind: str) -> Sending:
        sending = Sending(secrets.token_hex(12), gateway, kind, time.monotonic())
        self.seen.sendings.append(sending)
        return sending

    async def _ask(self, which: int, gateway: int) -> None:
        """Have one answer, from one gateway or, should it be killed, the other."""
        case, seen, site = self._cases[which], self.seen, self._site
        begun_s = time.monotonic()
        last_s: list[float] = []
        longest_s, again = 0.0, 0
        problem: BrokenAnswerError | None = None
        sending, reader = self._sending(gateway, case.kind), AnswerReader()
        while True:
            problem = None
            try:
                async with asyncio.timeout(HUNG_S):
                    longest_s = max(longest_s, await self._stream(case, sending, reader, last_s))
            except BrokenAnswerError as error:
                problem = error
            except TimeoutError:
                problem = BrokenAnswerError("hung", f"after {reader.tokens} tokens")
            except (OSError, EOFError, ValueError) as error:
                kind = "truncated" if reader.tokens else "errors"
                problem = BrokenAnswerError(kind, f"{type(error).__name__}: {error}")
                # A gateway that was killed may still hold its streams for a moment.
                busy = isinstance(error, StreamBusyError)
                lost = busy or self._lost_gateway(sending)
                if lost and time.monotonic() - begun_s < _AGAIN_S:
                    again += 1
                    if not busy:
                        gateway = (gateway + 1) % len(site.ports)
                    await asyncio.sleep(0.1 * min(again, 10))
                    if reader.last_id:
                        seen.moved += 1
                        sending.moved += 1
                        sending.gateway, sending.begun_s = gateway, time.monotonic()
                        reader.reconnect()
                    else:
                        sending.cut = sending.sent
                        seen.retried += 1
                        self._count(sending)
                        sending, reader = self._sending(gateway, case.kind), AnswerReader()
                    continue
            break
        self._count(sending)
        seen.answers += 1
        if problem is None and (why := reader.difference(self._expected[which])):
            problem = BrokenAnswerError("token_mismatch", why)
        if problem is None:
            seen.kinds[case.kind] = seen.kinds.get(case.kind, 0) + 1
            seen.longest_s.append(longest_s)
            if longest_s > _SLOW_S:
                at_s = begun_s - self._began_s
                what = f"{at_s:.1f} s: {case.kind} {sending.request_id} gateway-{gateway}"
                seen.slow.append(
                    f"{what} waited {longest_s:.1f} s for a token, {again} gateways died"
                )
            return
        if (
            problem.kind in ("errors", "truncated")
            and site.dead_s(begun_s, time.monotonic()) > self._resume_s
        ):
            problem.kind = "no_replica"
        setattr(seen, problem.kind, getattr(seen, problem.kind) + 1)
        at_s = begun_s - self._began_s
        seen.notes.append(
            f"{at_s:.1f} s +{time.monotonic() - begun_s:.1f}: {case.kind} {sending.request_id} "
            f"gateway-{gateway} {problem.kind}: {problem}"
        )

    def _lost_gateway(self, sending: Sending) -> bool:
        """Whether a connection was lost, or refused, because its gateway had been killed."""
        name, now_s = f"gateway-{sending.gateway}", time.monotonic()
        if self._site.was_killed(name, sending.begun_s - _REFUSED_S, now_s):
            return True
        return not sending.sent and not self._site.is_ready(name)

    def _count(self, sending: Sending) -> None:
        self.seen.requests += sending.sent
        self.seen.delivered += sending.seen

    async def _stream(
        self, case: Case, sending: Sending, reader: AnswerReader, last_s: list[float]
    ) -> float:
        """Read one answer; returns the longest wait for a token, in seconds.

        `last_s` holds when the client last got one, over all gateways it asked.
        """
        source, sink = await asyncio.open_connection("127.0.0.1", self._site.ports[sending.gateway])
        longest_s = 0.0
        try:
            sink.write(self._request(case, sending, reader.last_id))
            sending.sent = True
            await read_head(source)
            while data := await read_piece(source):
                came = reader.feed(data)
                if not came:
                    continue
                sending.seen += came
                now_s = time.monotonic()
                if last_s:
                    longest_s = max(longest_s, now_s - last_s[0])
                    last_s[0] = now_s
                else:
                    self.seen.first_s.append(now_s - sending.begun_s)
                    last_s.append(now_s)
        finally:
            sink.transport.abort()
        if not reader.done or [used for _, used in reader.usage] != [reader.tokens]:
            finish = [choice.finish for choice in reader.choices.values()]
            what = f"{reader.tokens} tokens, usage {reader.usage}, {finish}"
            raise BrokenAnswerError("truncated", what)
        return longest_s

    def _request(self, case: Case, sending: Sending, last_id: str) -> bytes:
        asked = {"model": SERVICE, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(case.body | asked).encode()
        return (
            b"POST %b HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\nx-request-id: %b\r\n"
            b"x-atoll-resume: 1\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (
                case.path.encode(),
                self._site.key.encode(),
                sending.request_id.encode(),
                f"last-event-id: {last_id}\r\n".encode() if last_id else b"",
                len(body),
                body,
            )
        )
