"""A gateway over scripted engines in one loop, and a client that sees every byte."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import Deadlines, GatewayLimits, GatewaySettings, HealthSettings
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.usage_record import UsageRecord
from tests.runtime.gateway.engine import ScriptedEngine

Json = dict[str, Any]
QUICK = Deadlines(
    header_s=0.3,
    body_s=0.4,
    connect_s=0.5,
    first_token_s=0.4,
    between_tokens_s=0.3,
    answer_s=0.6,
    retry_s=1.0,
    resume_s=2.0,
)
"""For engines that stall. On a busy machine one that works may miss them, so nobody else has them."""


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """What the events say; there is nothing but events."""
        parts = self.body.decode().split("\n\n")
        assert parts[-1] == ""
        assert all(part.startswith("data: ") for part in parts[:-1]), parts
        return [part.removeprefix("data: ") for part in parts[:-1]]

    @property
    def chunks(self) -> list[Json]:
        assert self.events[-1] == "[DONE]", self.events[-3:]
        return [json.loads(event) for event in self.events[:-1]]

    @property
    def text(self) -> str:
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for chunk in self.chunks
            for choice in chunk["choices"]
        )


@dataclass
class Bench:
    """A running gateway."""

    gateway: Gateway
    engines: list[ScriptedEngine]
    port: int
    records: list[UsageRecord] = field(default_factory=list)

    async def post(self, path: str, body: object, headers: str = "") -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {len(raw)}\r\n\r\n".encode()
            + raw
        )

    async def get(self, path: str, headers: str = "", method: str = "GET") -> Reply:
        return await self.ask(
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode()
        )

    async def ask(self, raw: bytes) -> Reply:
        return await self._ask(raw, asyncio.open_connection("127.0.0.1", self.port))

    async def admin(
        self, path: str, body: object = None, *, method: str | None = None, headers: str = ""
    ) -> Reply:
        """Ask on the admin socket; a body is posted as JSON."""
        raw = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        verb = method or ("GET" if body is None else "POST")
        head = f"{verb} {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(raw)}\r\n\r\n"
        assert self.gateway.admin_socket is not None
        opening = asyncio.open_unix_connection(self.gateway.admin_socket)
        return await self._ask(head.encode() + raw, opening)

    async def _ask(
        self,
        raw: bytes,
        opening: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    ) -> Reply:
        reader, writer = await opening
        try:
            writer.write(raw)
            return await asyncio.wait_for(read_reply(reader), 60)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def settled(self) -> None:
        """Wait until nothing runs any more."""
        async with asyncio.timeout(60):
            while self.gateway.relays or any(e.running for e in self.engines):
                await asyncio.sleep(0.01)


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int((await reader.readuntil(b"\n")).strip(), 16):
            parts.append(await reader.readexactly(size))
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
        body = b"".join(parts)
    else:
        body = await reader.read()
    return Reply(int(first.split()[1]), headers, body)


def deadlines_for(engines: Sequence[ScriptedEngine]) -> Deadlines:
    """Return those of the product, unless an engine stalls."""
    stalling = any(f.what.startswith("stall") for e in engines for f in getattr(e, "faults", ()))
    return QUICK if stalling else Deadlines()


@asynccontextmanager
async def running(
    engines: Sequence[ScriptedEngine],
    *,
    deadlines: Deadlines | None = None,
    limits: GatewayLimits | None = None,
    health: HealthSettings | None = None,
    max_inflight: int | None = None,
    metadata: dict[str, str] | None = None,
    **more: Any,
) -> AsyncIterator[Bench]:
    pool = BackendPool()
    async with AsyncExitStack() as ending:
        ending.push_async_callback(asyncio.sleep, 0.01)
        for number, engine in enumerate(engines):
            engine.name = f"e{number}"
            ending.push_async_callback(engine.stop)
            url = engine.url or await engine.start()
            pool.add(
                Backend(
                    id=engine.name,
                    url=url,
                    models=(engine.model,),
                    kind=engine.kind,
                    max_inflight=max_inflight,
                    metadata=(metadata or {}) | engine.metadata,
                )
            )
        folder = Path(tempfile.mkdtemp(prefix="atoll-"))
        ending.callback(folder.rmdir)
        settings = GatewaySettings(
            port=0,
            deadlines=deadlines or deadlines_for(engines),
            limits=limits or GatewayLimits(),
            health=health or HealthSettings(enabled=False),
            **({"admin_socket": str(folder / "admin.sock")} | more),
        )
        records: list[UsageRecord] = []
        gateway = Gateway(pool, settings, on_usage=records.append)
        ending.push_async_callback(gateway.close)
        _, port = await gateway.start()
        yield Bench(gateway, list(engines), port, records)


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(text: str = "hello", **more: Any) -> Json:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0} | more
