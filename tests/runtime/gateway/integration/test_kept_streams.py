"""A gateway dies in the middle of a stream: another one, or the next, goes on with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from atoll.runtime.accounts import schema
from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.gateway import kept_streams
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.kept_streams import KeptStream, KeptStreams, StreamsSettings
from atoll.runtime.gateway.settings import GatewaySettings, HealthSettings
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool
from tests.runtime.accounts.helpers import sqlite_url
from tests.runtime.gateway.engine import ScriptedEngine
from tests.runtime.gateway.harness import CHAT, COMPLETIONS, Bench, Reply, chat
from tests.seeds import slow_except

KEEP = "x-atoll-resume: 1\r\n"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
Events = list[tuple[str, str]]
"""Id and data of each event, without comments."""


def events_of(data: bytes) -> Events:
    """The events in what a client got, the last of which may be cut off."""
    events = []
    for part in data.decode(errors="replace").split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in part.split("\n") if ": " in line)
        if "data" in lines:
            events.append((lines.get("id", ""), lines["data"]))
    return events


class Site:
    """Gateways with one folder, over the same engines."""

    def __init__(self, folder: Path, engines: list[ScriptedEngine], until: AsyncExitStack) -> None:
        self.folder = folder
        self.engines = engines
        self._until = until

    async def gateway(self, accounts: Accounts | None = None, *, keeps: bool = True) -> Bench:
        pool = BackendPool()
        for number, engine in enumerate(self.engines):
            url = engine.url or await engine.start()
            pool.add(Backend(id=f"e{number}", url=url, models=("m",), kind=engine.kind))
        folder = str(self.folder / "streams")
        settings = GatewaySettings(
            port=0,
            health=HealthSettings(enabled=False),
            admin_socket="",
            streams=StreamsSettings(folder=folder) if keeps else None,
        )
        gateway = Gateway(pool, settings, accounts=accounts)
        _, port = await gateway.start()
        self._until.push_async_callback(gateway.close)
        return Bench(gateway, self.engines, port)


@asynccontextmanager
async def standing(folder: Path, *engines: ScriptedEngine) -> AsyncIterator[Site]:
    async with AsyncExitStack() as until:
        for engine in engines:
            until.push_async_callback(engine.stop)
        yield Site(folder, list(engines), until)


def die(bench: Bench) -> None:
    """Let go of everything as a process does that is killed: nothing is written down, nobody is told."""
    for relay in list(bench.gateway.relays):
        if relay.kept is not None:
            relay.kept.stream.close()
            relay.kept = None
        relay.slot = None
    bench.gateway.abort_connections()


async def cut(bench: Bench, path: str, body: object, events: int, headers: str = KEEP) -> bytes:
    """Ask, and return what came by the time that the gateway dies: after so many events."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nhost: x\r\n{headers}content-length: {len(raw)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    writer.write(head.encode() + raw)
    status = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in status, status + await reader.read()
    data = b""
    while len(events_of(data)) < events:
        piece = await reader.read(4096)
        assert piece
        data += piece
    die(bench)
    writer.close()
    return data


def went_on(events: Events) -> str:
    return f"last-event-id: {events[-1][0]}\r\n{KEEP}"


def plain(data: str) -> Any:
    """What an event says, without what differs between any two answers."""
    if data == "[DONE]":
        return data
    said = json.loads(data)
    for each in (said, said.get("message") or {}, said.get("response") or {}):
        for key in ("id", "created", "created_at", "completed_at", "item_id", "timings"):
            each.pop(key, None)
    for each in (said.get("item") or {}, *(said.get("response", {}).get("output") or ())):
        each.pop("id", None)
    return said


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat(stream=True, max_tokens=40, stream_options={"include_usage": True})),
    "two answers": (COMPLETIONS, {"n": 2, "prompt": "x", "max_tokens": 20, "logprobs": 1}),
    "messages": (MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}),
    "responses": (RESPONSES, {"input": "hi", "max_output_tokens": 40}),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_except(
        [*((name, "vllm") for name in ASKED), ("chat", "llamacpp"), ("two answers", "atoll")],
        itertools.product(ASKED, ("vllm", "llamacpp", "atoll")),
    ),
)
async def test_another_gateway_goes_on(tmp_path: Path, name: str, kind: str) -> None:
    """Event by event what a client gets that loses nobody: ids, text, reasons, log-probabilities, usage."""
    path, fields = ASKED[name]
    body = {"model": "m", "stream": True, "temperature": 0} | fields
    engine = ScriptedEngine(kind=kind, step_s=0.002)
    async with standing(tmp_path, engine, ScriptedEngine(kind=kind, step_s=0.002)) as it:
        first, second = await it.gateway(), await it.gateway()
        whole = events_of((await second.post(path, body, KEEP)).body)
        for count in (1, 2, 7):
            had = events_of(await cut(first, path, body, count))
            rest = await second.post(path, body, went_on(had))
            assert rest.status == 200, rest.body
            got = had + events_of(rest.body)
            assert [plain(data) for _, data in got] == [plain(data) for _, data in whole]
            stream = rest.headers["x-atoll-stream"]
            assert [each for each, _ in got] == [f"{stream}-{n + 1}" for n in range(len(got))]


async def test_three_gateways_die(tmp_path: Path) -> None:
    body = chat(stream=True, max_tokens=60)
    async with standing(tmp_path, ScriptedEngine(step_s=0.002), ScriptedEngine(step_s=0.002)) as it:
        last = await it.gateway()
        whole = await last.post(CHAT, body, KEEP)
        got: Events = []
        for _ in range(3):
            headers = went_on(got) if got else KEEP
            got += events_of(await cut(await it.gateway(), CHAT, body, 4, headers))
        got += events_of((await last.post(CHAT, body, went_on(got))).body)
        assert [plain(d) for _, d in got] == [plain(d) for _, d in events_of(whole.body)]


async def test_what_is_refused(tmp_path: Path) -> None:
    body = chat(stream=True, max_tokens=30)
    async with standing(tmp_path, ScriptedEngine(step_s=0.002)) as it:
        first, second = await it.gateway(), await it.gateway()
        had = events_of(await cut(first, CHAT, body, 3))
        again = went_on(had)

        async def ask(bench: Bench, headers: str, **more: object) -> tuple[int, str]:
            reply = await bench.post(CHAT, body | more, headers)
            return reply.status, reply.json["error"]["code"]

        assert await ask(second, again, max_tokens=31) == (409, "other_request")
        assert await ask(second, "last-event-id: 17\r\n") == (400, "unknown_stream")
        assert await ask(second, f"last-event-id: {'0' * 32}-4\r\n") == (410, "stream_gone")
        # Nobody keeps streams there: from the start it would repeat what the client has.
        assert await ask(await it.gateway(keeps=False), again) == (410, "stream_gone")
        # All of this left it as it was.
        assert (await second.post(CHAT, body, again)).status == 200


async def test_one_that_ended_is_sent_again_and_not_computed_again(tmp_path: Path) -> None:
    body = chat(stream=True, max_tokens=12)
    async with standing(tmp_path, ScriptedEngine()) as it:
        bench = await it.gateway()
        whole = events_of((await bench.post(CHAT, body, KEEP)).body)
        asked = len(it.engines[0].seen)
        rest = await bench.post(CHAT, body, went_on(whole[:5]))
        assert events_of(rest.body) == whole[5:]
        assert len(it.engines[0].seen) == asked


async def test_a_client_that_is_back_first(tmp_path: Path) -> None:
    """Its old connection still counts as open: it is closed, and the stream goes on in the new one."""
    body = chat(stream=True, max_tokens=30)
    async with standing(tmp_path, ScriptedEngine(step_s=0.01)) as it:
        bench, other = await it.gateway(), await it.gateway()
        whole = events_of((await bench.post(CHAT, body, KEEP)).body)
        raw = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.0\r\nhost: x\r\n{KEEP}content-length: {len(raw)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(head.encode() + raw)
        await reader.readuntil(b"\r\n\r\n")
        had = events_of(await reader.readuntil(b"\n\n"))
        busy = await other.post(CHAT, body, went_on(had))
        assert (busy.status, busy.json["error"]["code"]) == (409, "stream_busy")
        assert "retry-after" in busy.headers
        got = had + events_of((await bench.post(CHAT, body, went_on(had))).body)
        assert [plain(d) for _, d in got] == [plain(d) for _, d in whole]
        writer.close()


async def test_the_ledger_has_each_token_once(tmp_path: Path) -> None:
    """Over a gateway that dies, one that loses its client, and one that ends the stream; by its key alone."""
    body = chat(stream=True, max_tokens=50)
    url, journal = sqlite_url(tmp_path), tmp_path / "journal"
    async with standing(tmp_path, ScriptedEngine(step_s=0.005)) as it:
        books = [await Accounts.open(url, journal=journal, refresh_s=60) for _ in range(2)]
        text, _ = await books[0].database.create_key(NewKey.parse({"name": "n"}))
        stranger, _ = await books[0].database.create_key(NewKey.parse({"name": "s"}))
        for book in books:
            await book.sync()
        key = f"authorization: Bearer {text}\r\n"
        first, second = [await it.gateway(book) for book in books]
        whole = await second.post(CHAT, body, key + KEEP)
        got = events_of(await cut(first, CHAT, body, 5, key + KEEP))
        other = f"authorization: Bearer {stranger}\r\n"
        assert (await second.post(CHAT, body, other + went_on(got))).status == 410
        # It goes away by itself this time, and the gateway writes that down.
        reader, writer = await asyncio.open_connection("127.0.0.1", second.port)
        raw = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.0\r\n{key}{went_on(got)}content-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        await reader.readuntil(b"\r\n\r\n")
        got += events_of(await reader.readuntil(b"\n\n"))
        writer.close()
        await second.settled()
        rest: Reply = await second.post(CHAT, body, key + went_on(got))
        got += events_of(rest.body)
        assert [plain(d) for _, d in got] == [plain(d) for _, d in events_of(whole.body)]
        await second.settled()
        # The next start finds what the dead one was about.
        books[0]._journal.release()
        assert books[0]._task is not None
        books[0]._task.cancel()
        await books[0].database.close()
        books[0] = await Accounts.open(url, journal=journal, refresh_s=60)
        await books[1].sync()
        async with books[0].database.reading() as connection:
            rows = list(await connection.execute(sa.select(schema.operations)))
        for book in books:
            await book.close()
        used = Counter[str]()
        for row in rows:
            used["prompt"] += row.prompt_tokens
            used["completion"] += row.completion_tokens
        plain_row = max(rows, key=lambda row: row.completion_tokens)
        assert used["prompt"] == 2 * plain_row.prompt_tokens
        assert used["completion"] == 2 * plain_row.completion_tokens


class Doom:
    """Ends a gateway before one of its stores: from then on nothing that it does has an effect.

    Stores are all that a process which is killed leaves to others: what goes into the files of streams, into
    settlements and into the journal, and what clients are sent.
    """

    def __init__(self, bench: Bench, books: Accounts, at: int, patch: pytest.MonkeyPatch) -> None:
        self.stores = 0
        self.dead = False
        self._at = at
        self._bench = bench
        self._mine = set[KeptStream]()
        streams = bench.gateway._streams
        assert streams is not None
        begin = streams.number

        def number(connection: Any, request: Any) -> Any:
            client = begin(connection, request)
            self._mine.add(client.stream)
            for name in ("send", "end_stream"):
                patch.setattr(client, name, self._guard(getattr(client, name)))
            return client

        patch.setattr(streams, "number", number)
        journal = books._journal
        slots = journal._slots
        for owner, names in ((journal, ("_append",)), (slots, ("put", "deliver", "clear"))):
            for name in names:
                patch.setattr(owner, name, self._guard(getattr(owner, name)))
        self._acting: KeptStream | None = None
        for name in ("_append", "bill", "let_go"):
            patch.setattr(KeptStream, name, self._of(getattr(KeptStream, name), name == "_append"))
        for name in ("settle", "forget_settlement"):
            real = getattr(kept_streams, name)
            patch.setattr(kept_streams, name, self._settling(real, self._guard(real)))

    def _of(self, real: Callable[..., Any], stores: bool) -> Callable[..., Any]:
        guarded = self._guard(real) if stores else real

        def method(stream: KeptStream, *args: Any) -> Any:
            mine = stream in self._mine
            before, self._acting = self._acting, stream if mine else None
            try:
                return (guarded if mine else real)(stream, *args)
            finally:
                self._acting = before

        return method

    def _settling(self, real: Callable[..., Any], guarded: Callable[..., Any]) -> Any:
        # The other gateway settles what the dead one is billed.
        def settling(*args: Any) -> Any:
            return real(*args) if self._acting is None else guarded(*args)

        return settling

    def _guard(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def store(*args: Any) -> Any:
            if not self.dead:
                self.stores += 1
                if self.stores == self._at:
                    self.dead = True
                    for stream in self._mine:
                        stream.close()
                    self._bench.gateway.abort_connections()
            # What it would do next is of no use to anybody.
            return True if self.dead else real(*args)

        return store


async def _ask_raw(bench: Bench, body: object, headers: str) -> Events:
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    head = f"POST {CHAT} HTTP/1.0\r\nhost: x\r\n{headers}content-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    with contextlib.suppress(ConnectionError):
        data = b""
        while piece := await reader.read(4096):
            data += piece
    writer.close()
    return events_of(data.partition(b"\r\n\r\n")[2])


@pytest.mark.slow
@pytest.mark.parametrize("recovered_first", [False, True], ids=["taken first", "recovered first"])
async def test_the_ledger_is_exact_wherever_a_gateway_is_killed(
    tmp_path: Path, recovered_first: bool
) -> None:
    """Before each of its stores in turn; its journal is read after another one went on, or before."""
    body = chat(stream=True, max_tokens=2)
    url, journal = sqlite_url(tmp_path), tmp_path / "journal"
    async with standing(tmp_path, ScriptedEngine()) as it:
        books = await Accounts.open(url, journal=journal, refresh_s=60)
        text, _ = await books.database.create_key(NewKey.parse({"name": "n"}))
        await books.sync()
        key = f"authorization: Bearer {text}\r\n"
        second = await it.gateway(books)
        whole = await _ask_raw(second, body, f"{key}{KEEP}x-request-id: r0\r\n")

        async def strike(at: int) -> bool:
            """Kill one before its store `at`; whether it had as many."""
            named = f"{key}x-request-id: r{at}\r\n"
            book = await Accounts.open(url, journal=journal, refresh_s=60)
            bench = await it.gateway(book)
            with pytest.MonkeyPatch.context() as patch:
                doom = Doom(bench, book, at, patch)
                got = await _ask_raw(bench, body, named + KEEP)
                await bench.settled()
                for folder in (book._journal._folder, *book._journal._adopted):
                    folder.close()
                assert book._task is not None
                book._task.cancel()
                # Whoever reads still would not give back what it reads with.
                await bench.gateway.budgets.close()
                await book.database.close()

                async def recover() -> None:
                    # Its start reads what the dead one left; the rest is for the next.
                    await (await Accounts.open(url, journal=journal, refresh_s=60)).close()

                if recovered_first:
                    await recover()
                if got:
                    again = f"{named}last-event-id: {got[-1][0]}\r\n{KEEP}"
                    got += await _ask_raw(second, body, again)
                    assert [plain(d) for _, d in got] == [plain(d) for _, d in whole], at
                if not recovered_first:
                    await recover()
                return doom.dead

        at = 1
        while await strike(at):
            at += 1
        assert at > 12
        await second.settled()
        books._journal.rotate()
        await books.sync()
        async with books.database.reading() as connection:
            rows = list(await connection.execute(sa.select(schema.operations)))
        await books.close()
        used: dict[str, Counter[str]] = {}
        for row in rows:
            tokens = used.setdefault(row.request_id, Counter())
            tokens["prompt"] += row.prompt_tokens
            tokens["completion"] += row.completion_tokens
        once = used["r0"]
        for name, tokens in used.items():
            # A client that had nothing yet asks anew; what it never had is nobody's.
            assert tokens in (once, Counter(prompt=0, completion=0)), (name, tokens)
        assert sum(tokens == once for tokens in used.values()) >= len(used) - 6


async def test_files_go_when_their_time_is_up(tmp_path: Path) -> None:
    body = chat(stream=True, max_tokens=8)
    async with standing(tmp_path, ScriptedEngine()) as it:
        bench = await it.gateway()
        await bench.post(CHAT, body, KEEP)
        folder = it.folder / "streams"
        (file,) = folder.iterdir()
        assert file.stat().st_mode & 0o77 == 0
        store = KeptStreams(StreamsSettings(folder=str(folder), keep_s=300))
        store.sweep()
        assert file.exists()
        os.utime(file, (0, time.time() - 301))
        store.sweep()
        assert not file.exists()
