"""Work that takes long, under seeded faults: nothing may be lost, cut or done twice, and nothing left behind.

- probes: backends that are too busy to say how they are, while they answer
- late failovers: backends that fail a request after more time than the search for another one may take
- deadlines: backends that end at a time they have announced, beside one that does not
- ghosts: instances of a real fleet that are killed while they answer: what their nodes run ten seconds later

Engines of the first three write known words (`churn_engine`), and count every token they write: what the
client got is compared word by word, and tokens written beyond it were done twice (one may be under way when a
stream moves).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from benchmarks.report import Figure, options
from tests.slow.answers import BrokenAnswerError, complete
from tests.slow.churn.churn_engine import MODEL, PROMPT_TOKENS, Answer, prompt, word
from tests.slow.failover.chaos_fleet import SERVICE, tiny_fleet
from tests.slow.tcp_server import HOST, TcpServer
from tests.slow.verdict import conclude

if TYPE_CHECKING:
    from atoll.runtime.gateway.app import Gateway
    from atoll.runtime.local.local_fleet import LocalFleet

_FAULTS = {"probes": 70, "late failovers": 60, "deadlines": 50, "ghosts": 20}
_TOKEN_S = 0.01
_TOKENS = 150
"""Of an answer of the real fleet."""
_AT_ONCE = 4
"""Scenarios that run side by side: they mostly wait."""
_RETRY_S = 0.3
_HANDOVER_S = 0.4
_GHOSTS_S = 10.0
_ANSWER_S = 90.0


@dataclass
class Outcome:
    """What went wrong."""

    errors: int = 0
    truncated: int = 0
    done_twice: int = 0
    ghosts: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, error: BrokenAnswerError) -> None:
        """Count an answer that is not what it should be."""
        self.truncated += error.kind == "truncated"
        self.errors += error.kind != "truncated"
        self.notes.append(str(error))

    def add(self, other: Outcome) -> None:
        """Add what went wrong elsewhere."""
        self.errors += other.errors
        self.truncated += other.truncated
        self.done_twice += other.done_twice
        self.ghosts += other.ghosts
        self.notes += other.notes


class LongEngine(TcpServer):
    """An engine of known words over HTTP; `fails` are how long it holds the next requests before it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.busy = False
        self.fails: list[float] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the client has gone."""
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = head.partition("content-length:")[2].partition("\r\n")[0].strip()
            body = await reader.readexactly(int(length or 0))
            if head.startswith("get"):
                while self.busy and not reader.at_eof():
                    await asyncio.sleep(_TOKEN_S)
                _write(writer, 200, b"{}")
            elif self.fails:
                await asyncio.sleep(self.fails.pop(0))
                _write(writer, 503, b'{"error":{"message":"too late","type":"x"}}')
            else:
                await self._answer(reader, writer, json.loads(body))

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]
    ) -> None:
        answer, said = Answer(body), []
        if body.get("stream"):
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
        while not answer.done:
            await asyncio.sleep(_TOKEN_S)
            if reader.at_eof() or writer.transport.is_closing():
                raise ConnectionError("nobody listens")
            said.append(word(answer.seed, answer.position))
            event = answer.event()
            self.made += 1
            if body.get("stream"):
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        if body.get("stream"):
            writer.write(b"0\r\n\r\n")
            return
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(said)}
        choice = {"index": 0, "text": "".join(said), "finish_reason": "length"}
        _write(writer, 200, json.dumps({"choices": [choice], "usage": usage}).encode())


def _write(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)


class LongSite:
    """A gateway over such engines, of which some end at known times, and what its clients get."""

    def __init__(self, lives_s: list[float | None]) -> None:
        self._lives_s = lives_s
        self.engines = [LongEngine() for _ in lives_s]
        self.outcome = Outcome()
        self.gateway: Gateway
        self._port = 0
        self._asked = 0

    async def __aenter__(self) -> Self:
        """Start all of it."""
        from atoll.runtime.gateway.app import Gateway
        from atoll.runtime.gateway.settings import Deadlines, GatewaySettings, HealthSettings
        from atoll.runtime.pool.member import Backend, Facts
        from atoll.runtime.pool.pool import BackendPool

        pool = BackendPool(policy="learned")
        for number, (engine, life_s) in enumerate(zip(self.engines, self._lives_s, strict=True)):
            await engine.open()
            backend = Backend(id=f"e{number}", url=engine.url, models=(MODEL,), kind="atoll")
            ends_s = None if life_s is None else time.time() + life_s
            pool.add(backend, None if ends_s is None else Facts(ends_s=ends_s))
            if life_s is not None:
                asyncio.get_running_loop().call_later(life_s, engine.close)
        settings = GatewaySettings(
            port=0,
            admin_socket="",
            policy="learned",
            affinity=True,
            handover_s=_HANDOVER_S,
            deadlines=Deadlines(retry_s=_RETRY_S),
            health=HealthSettings(interval_s=0.1, timeout_s=0.05),
        )
        self.gateway = Gateway(pool, settings)
        _, self._port = await self.gateway.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop all of it, and compare what was written with what was got."""
        await self.gateway.close()
        for engine in self.engines:
            engine.close()
        twice = sum(engine.made for engine in self.engines) - self._asked
        if twice > 0:
            self.outcome.done_twice += twice
            self.outcome.notes.append(f"{twice} tokens of {self._asked} done twice")

    async def ask(self, seed: int, tokens: int, *, streamed: bool) -> None:
        """Ask for an answer, and compare it."""
        body = {"model": MODEL, "prompt": prompt(seed), "max_tokens": tokens, "temperature": 0}
        url = f"http://{HOST}:{self._port}"
        # Where a stream moves, one token may have been under way in vain.
        self._asked += tokens + streamed
        try:
            if streamed:
                text = (await complete(url, body, _ANSWER_S)).text
            else:
                text = await _ask_whole(url, body)
            wanted = "".join(word(seed, position) for position in range(tokens))
            if text != wanted:
                cut = bool(text) and wanted.startswith(text)
                raise BrokenAnswerError("truncated" if cut else "errors", f"ends {text[-60:]!r}")
        except BrokenAnswerError as error:
            self.outcome.note(error)


async def _ask_whole(url: str, body: dict[str, Any]) -> str:
    """Return the text of an answer that is not streamed."""
    from atoll.runtime.http.http_client import FetchError, fetch

    try:
        status, answer = await fetch(f"{url}/v1/completions", body=body, timeout_s=_ANSWER_S)
    except FetchError as error:
        raise BrokenAnswerError("errors", str(error)) from error
    if status != 200:
        raise BrokenAnswerError("errors", f"status {status}: {answer[-200:].decode()}")
    return str(json.loads(answer)["choices"][0]["text"])


async def probes(rng: random.Random) -> Outcome:
    """Have backends too busy to say how they are while they answer."""
    count = rng.randint(1, 3)
    async with LongSite([None] * count) as site:
        streamed = count > 1 or rng.random() < 0.5
        asked = [
            asyncio.create_task(
                site.ask(rng.getrandbits(30), rng.randint(40, 90), streamed=streamed)
            )
            for _ in range(rng.randint(1, 3))
        ]
        await asyncio.sleep(rng.uniform(0.02, 0.2))
        for engine in rng.sample(site.engines, rng.randint(1, count)):
            engine.busy = True
        await asyncio.gather(*asked)
    return site.outcome


async def late_failovers(rng: random.Random) -> Outcome:
    """Have backends fail a request after longer than another one is looked for."""
    async with LongSite([None] * 3) as site:
        # One failure each: whoever is asked first, and whoever is next.
        for engine in rng.sample(site.engines, rng.randint(1, 2)):
            engine.fails = [rng.uniform(1.1, 2.0) * _RETRY_S]
        await site.ask(rng.getrandbits(30), rng.randint(5, 30), streamed=rng.random() < 0.5)
    return site.outcome


async def deadlines(rng: random.Random) -> Outcome:
    """Have backends end as they said, while long and short answers are asked for."""
    lives: list[float | None] = [rng.uniform(1.2, 2.0) for _ in range(rng.randint(1, 2))]
    async with LongSite([None, *lives]) as site:
        for _ in range(4):
            await site.ask(rng.getrandbits(30), 3, streamed=False)
        asked = []
        for _ in range(rng.randint(3, 6)):
            tokens = rng.choice((5, 20, 120, 200))
            task = site.ask(rng.getrandbits(30), tokens, streamed=rng.random() < 0.5)
            asked.append(asyncio.create_task(task))
            await asyncio.sleep(rng.uniform(0.0, 0.3))
        await asyncio.gather(*asked)
    return site.outcome


async def kill_instances(kills: int, rng: random.Random) -> Outcome:
    """Kill instances of a real fleet while they answer; count what their nodes run ten seconds later."""
    outcome = Outcome()
    waits = {"health": {"interval_s": 0.5}, "deadlines": {"retry_s": 40, "resume_s": 40}}
    async with tiny_fleet(waits) as fleet:
        for _ in range(kills):
            outcome.add(await _kill_one(fleet, rng))
        await asyncio.sleep(_GHOSTS_S)
        outcome.ghosts += await _count_sequences(fleet)
    return outcome


async def _kill_one(fleet: LocalFleet, rng: random.Random) -> Outcome:
    """Kill one instance under six answers, which must be whole, and wait until it is back."""
    outcome = Outcome()

    async def ask(number: int) -> None:
        body = {"model": SERVICE, "prompt": f"Prompt {number}", "max_tokens": _TOKENS}
        body |= {"temperature": 0, "ignore_eos": True}
        try:
            (await complete(fleet.url, body, _ANSWER_S)).check_end(_TOKENS)
        except BrokenAnswerError as error:
            outcome.note(error)

    asked = [asyncio.create_task(ask(number)) for number in range(6)]
    await asyncio.sleep(rng.uniform(0.1, 0.5))
    name = rng.choice([each.endpoint.backend.id for each in fleet.endpoints])
    pid = fleet.agent.processes[name].pid
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*asked)
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s and not all(
        str(process.state) == "ready" for process in fleet.agent.processes.values()
    ):
        await asyncio.sleep(0.1)
    return outcome


async def _count_sequences(fleet: LocalFleet) -> int:
    """Return the sequences that nodes hold though nothing is asked: the least of three looks.

    The gateway has a backend that comes back make a token, which is no ghost and soon over.
    """
    from atoll.runtime.http.http_client import fetch

    looks = []
    for _ in range(3):
        await asyncio.sleep(1.0)
        held = 0
        for named in fleet.endpoints:
            _, body = await fetch(f"{named.endpoint.backend.url}/atoll/v1/status", timeout_s=10)
            stats = [node["stats"] for node in json.loads(body)["nodes"]]
            held += sum(each["running"] + each["waiting"] for each in stats if each is not None)
        looks.append(held)
    return min(looks)


_KINDS: dict[str, Callable[[random.Random], Awaitable[Outcome]]] = {
    "probes": probes,
    "late failovers": late_failovers,
    "deadlines": deadlines,
}


async def run_faults(counts: dict[str, int]) -> tuple[Outcome, dict[str, Outcome]]:
    """Return what went wrong under so many faults of each kind, all together and by kind."""
    by_kind: dict[str, Outcome] = {}
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(kind: str, seed: int) -> None:
        async with room:
            found = await _KINDS[kind](random.Random(f"{kind} {seed}"))
        found.notes = [f"{kind} {seed}: {note}" for note in found.notes]
        by_kind.setdefault(kind, Outcome()).add(found)

    tasks = [one(kind, seed) for kind in _KINDS for seed in range(counts.get(kind, 0))]
    await asyncio.gather(*tasks)
    if counts.get("ghosts"):
        by_kind["ghosts"] = await kill_instances(counts["ghosts"], random.Random("ghosts"))
    whole = Outcome()
    for outcome in by_kind.values():
        whole.add(outcome)
    return whole, by_kind


def main() -> None:
    """Run all faults."""
    arguments = options(__doc__ or "")
    counts = {
        kind: -(-count // 10) if arguments.quick else count for kind, count in _FAULTS.items()
    }
    begun_s = time.monotonic()
    whole, by_kind = asyncio.run(run_faults(counts))
    for kind, found in by_kind.items():
        told = f"errors {found.errors}, truncated {found.truncated}, twice {found.done_twice}"
        print(f"  {kind:16s} {counts[kind]:4d} faults: {told}")
    for note in whole.notes[:20]:
        print(f"    {note}")
    conclude(
        [
            Figure("faults", sum(counts.values())),
            Figure("errors", whole.errors, 0),
            Figure("truncated", whole.truncated, 0),
            Figure("done_twice", whole.done_twice, 0),
            Figure("ghosts_after_10s", whole.ghosts, 0),
        ],
        seconds=round(time.monotonic() - begun_s, 1),
    )


if __name__ == "__main__":
    main()
