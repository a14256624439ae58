"""Clients that stream answers all the time and look at every token of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field

from atoll.core.rng import stream
from tests.slow.answers import BrokenAnswerError, read_head, read_piece
from tests.slow.churn.churn_engine import MODEL, prompt, word

PATIENCE_S = 90.0
BIN_S = 0.5
_SERVED_S = 20.0


@dataclass
class Seen:
    """What clients saw."""

    requests: int = 0
    errors: int = 0
    truncated: int = 0
    reordered: int = 0
    delivered: int = 0
    """Tokens, of complete answers and others."""
    first_s: list[float] = field(default_factory=list, repr=False)
    gaps_s: list[float] = field(default_factory=list, repr=False)
    """Between two tokens of a stream."""
    longest_s: list[float] = field(default_factory=list, repr=False)
    """The longest gap of each stream."""
    bins: Counter[int] = field(default_factory=Counter, repr=False)
    """Tokens in every `BIN_S` seconds since the start."""
    notes: list[str] = field(default_factory=list)


class Reader:
    """Reads a stream of completions and checks that it is the answer to a seed."""

    def __init__(self, seed: int, tokens: int) -> None:
        self.seed = seed
        self.tokens = tokens
        self.position = 0
        self.complete = False
        self._rest = b""
        self._finish: str | None = None
        self._usage: dict[str, int] | None = None

    def feed(self, data: bytes) -> int:
        """Take in bytes of the body; return how many tokens came with them."""
        before = self.position
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            self._event(event)
        return self.position - before

    def _event(self, event: bytes) -> None:
        if not event.startswith(b"data: "):
            return  # a comment
        if event == b"data: [DONE]":
            self._check_end()
            self.complete = True
            return
        chunk = json.loads(event[6:])
        if "error" in chunk:
            raise BrokenAnswerError("errors", event.decode()[:300])
        for choice in chunk["choices"]:
            self._text(choice["text"])
            self._finish = choice["finish_reason"] or self._finish
        self._usage = chunk.get("usage") or self._usage

    def _text(self, text: str) -> None:
        size = len(word(0, 0))
        for at in range(0, len(text), size):
            expected = word(self.seed, self.position)
            if text[at : at + size] != expected or self.complete:
                what = f"{text[at : at + size]!r} for {expected!r} at {self.position}"
                raise BrokenAnswerError("reordered", what)
            self.position += 1

    def _check_end(self) -> None:
        if self.position != self.tokens or self._finish != "length":
            what = f"{self.position} of {self.tokens} tokens, {self._finish}"
            raise BrokenAnswerError("truncated", what)
        if self._usage is None or self._usage["completion_tokens"] != self.tokens:
            raise BrokenAnswerError("errors", f"usage {self._usage} for {self.tokens} tokens")


class Clients:
    """So many clients, each of which asks again as soon as it has its answer."""

    def __init__(self, port: int, key: str, seed: int, tokens: tuple[int, int]) -> None:
        self.seen = Seen()
        self._shortest, self._longest = tokens
        self._port = port
        self._key = key
        self._seed = seed
        self._over = False
        self._began_s = time.monotonic()

    async def run(self, count: int) -> None:
        """Ask until told to stop; what was begun is finished."""
        self._began_s = time.monotonic()
        await asyncio.gather(*(self._client(number) for number in range(count)))

    async def served(self) -> None:
        """Wait until the gateway knows somebody who serves the model."""
        request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n\r\n"
        async with asyncio.timeout(_SERVED_S):
            while True:
                source, sink = await asyncio.open_connection("127.0.0.1", self._port)
                sink.write(request % self._key.encode())
                answer = await source.readuntil(b"\r\n\r\n") + await source.read(65536)
                sink.transport.abort()
                if f'"{MODEL}"'.encode() in answer:
                    return
                await asyncio.sleep(0.1)

    def stop(self) -> None:
        """Begin no more requests."""
        self._over = True

    async def _client(self, number: int) -> None:
        chance = stream(self._seed, "churn", "client", str(number))
        await asyncio.sleep(float(chance.uniform(0.0, 1.0)))
        while not self._over:
            seed = int(chance.integers(2**31))
            await self.ask(seed, int(chance.integers(self._shortest, self._longest + 1)))

    async def ask(self, seed: int, tokens: int) -> bool:
        """Stream one answer; return whether it was the right one."""
        seen = self.seen
        seen.requests += 1
        reader = Reader(seed, tokens)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._stream(reader)
            if not reader.complete:
                raise BrokenAnswerError("truncated", f"ended at {reader.position} of {tokens}")
        except BrokenAnswerError as error:
            setattr(seen, error.kind, getattr(seen, error.kind) + 1)
            self._note(seed, f"{error.kind}: {error}")
        except (OSError, EOFError, ValueError, LookupError, TimeoutError) as error:
            # Asked, and no answer; or half of one.
            broken = reader.position > 0 and not isinstance(error, TimeoutError)
            seen.truncated += broken
            seen.errors += not broken
            self._note(seed, f"{type(error).__name__}: {error} after {reader.position} tokens")
        seen.delivered += reader.position
        return reader.complete

    def _note(self, seed: int, what: str) -> None:
        at_s = time.monotonic() - self._began_s
        self.seen.notes.append(f"{at_s:.1f} s, seed {seed}: {what}")

    async def _stream(self, reader: Reader) -> None:
        source, sink = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            sink.write(self._request(reader))
            asked_s = last_s = time.monotonic()
            longest_s = 0.0
            await read_head(source)
            while data := await read_piece(source):
                came = reader.feed(data)
                now_s = time.monotonic()
                if not came:
                    continue
                self.seen.bins[int((now_s - self._began_s) / BIN_S)] += came
                if last_s == asked_s:
                    self.seen.first_s.append(now_s - asked_s)
                else:
                    longest_s = max(longest_s, now_s - last_s)
                    self.seen.gaps_s += [now_s - last_s, *(0.0,) * (came - 1)]
                last_s = now_s
            self.seen.longest_s.append(longest_s)
        finally:
            sink.transport.abort()

    def _request(self, reader: Reader) -> bytes:
        fields = {
            "model": MODEL,
            "prompt": prompt(reader.seed),
            "max_tokens": reader.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(fields).encode()
        return (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (self._key.encode(), len(body), body)
        )
