"""A gateway with a key of every role, and all the ways to ask it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.runtime.accounts.test_gateway import Place, place
from tests.runtime.gateway.engine import ScriptedEngine
from tests.runtime.gateway.harness import Reply

TOKEN = "root-token"
ADA = "ada@lab.example"


@dataclass
class Site:
    """A gateway that has an admin token besides."""

    place: Place
    texts: dict[str, str] = field(default_factory=dict)
    """Keys by name."""
    ids: dict[str, str] = field(default_factory=dict)

    async def add(self, name: str, **spec: object) -> str:
        """Make a key; return its id."""
        self.texts[name] = await self.place.key(**({"name": name} | spec))
        self.ids[name] = self.texts[name].split("-")[1]
        return self.ids[name]

    def headers(self, name: str) -> str:
        """Return the header that shows a key, or the admin token."""
        if not name:
            return ""
        return f"authorization: Bearer {self.texts.get(name, TOKEN)}\r\n"

    async def ask(
        self, name: str, method: str, path: str, body: object = None, more: str = ""
    ) -> Reply:
        """Ask under `/atoll/v1/`: with a key of a name, `token`, on the `socket`, or with nothing ("")."""
        target = f"/atoll/v1/{path}"
        if name == "socket":
            return await self.place.bench.admin(target, body, method=method, headers=more)
        raw = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        head = f"{method} {target} HTTP/1.1\r\nhost: x\r\n{self.headers(name)}{more}"
        return await self.place.bench.ask(
            f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw
        )


@asynccontextmanager
async def open_site(folder: Path) -> AsyncIterator[Site]:
    """A gateway with keys `admin`, `member` (ada's), `other` (nobody's) and `viewer`."""
    async with place(folder, ScriptedEngine()) as found:
        gateway = found.bench.gateway
        gateway.configure(gateway.settings.model_copy(update={"admin_token": TOKEN}))
        site = Site(found)
        await site.add("admin", role="admin")
        await site.add("member", owner=ADA)
        await site.add("other")
        await site.add("viewer", role="viewer")
        yield site
