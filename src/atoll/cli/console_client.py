"""The console, asked by commands: a dashboard that runs here by its socket, or one elsewhere by URL and key.

It is the same API that pages and programs ask (docs/reference/http.md, "One API").
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from atoll.core.errors import AtollError, InputError, UsageError
from atoll.core.options import option

KEY_VARIABLE = "ATOLL_KEY"
_QUESTION_S = 60.0
_JOB_S = 600.0


def console_field() -> Any:
    """Return the field of --console."""
    return option(
        None,
        f"Ask the dashboard at this URL, with the API key in ${KEY_VARIABLE}; default: what runs here.",
        env="ATOLL_CONSOLE",
        metavar="URL",
    )


@dataclass(frozen=True, slots=True)
class ConsoleClient:
    """Where the console is asked, and with which key; on a socket none is needed."""

    url: str
    key: str | None = field(default=None, repr=False)
    socket: Path | None = None

    @classmethod
    def find(cls, url: str | None) -> ConsoleClient:
        """Return the console at a URL, else the one that runs here; UsageError where there is none."""
        from atoll.dashboard.links import list_dashboards, socket_of

        if url is not None:
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"{url!r} is no URL", field="--console")
            # From the environment alone: command lines are seen by all.
            key = os.environ.get(KEY_VARIABLE)
            if not key:
                raise UsageError("a key is needed there", hint=f"export {KEY_VARIABLE}=atoll-...")
            return cls(url.rstrip("/"), key)
        for each in list_dashboards():
            socket = socket_of(each.folder)
            if socket.is_socket():
                return cls("http://console", socket=socket)
        raise UsageError(
            "no dashboard of yours runs here",
            hint="`atoll operate FLEET --dashboard` or `atoll dashboard` starts one; --console names another",
        )

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return what is answered to a request for `/atoll/v1/...`, as plain data; a refusal raises."""
        return asyncio.run(self._ask(method, path, body))

    def work(self, path: str, body: object, say: Callable[[str], None]) -> Any:
        """Return the result of a question that takes a while; `say` hears how far it is."""
        return asyncio.run(self._work(path, body, say))

    async def _ask(self, method: str, path: str, body: object) -> Any:
        from atoll.runtime.http.http_client import request

        answer = await request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={} if body is None else {"content-type": "application/json"},
            timeout_s=_QUESTION_S,
            api_key=self.key,
            unix_socket=self.socket,
        )
        if answer.status >= 300:
            raise _refusal(answer.status, answer.body)
        return json.loads(answer.body)

    async def _work(self, path: str, body: object, say: Callable[[str], None]) -> Any:
        from atoll.runtime.http.http_client import open_stream

        opened = open_stream(
            self.url + path,
            method="POST",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", "accept": "text/event-stream"},
            timeout_s=_QUESTION_S,
            api_key=self.key,
            unix_socket=self.socket,
        )
        async with opened as answer:
            pieces = answer.pieces(_JOB_S)
            if answer.status != 200:
                raise _refusal(answer.status, b"".join([piece async for piece in pieces]))
            async for event, said in _events(pieces):
                if event == "progress":
                    say(str(said.get("text", "")))
                elif event == "result":
                    return said
                else:
                    raise _refusal(400, json.dumps(said).encode())
        raise AtollError("the console broke off before it had an answer")


async def _events(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[tuple[str, Any], None]:
    rest = b""
    async for piece in pieces:
        *blocks, rest = (rest + piece).split(b"\n\n")
        for block in blocks:
            lines = dict(
                line.split(": ", 1)
                for line in block.decode().splitlines()
                if not line.startswith(":") and ": " in line
            )
            if "data" in lines:
                yield lines.get("event", "message"), json.loads(lines["data"])


def _refusal(status: int, body: bytes) -> AtollError:
    """Return what a server said it refuses, with the field it is about."""
    try:
        error = json.loads(body)["error"]
        text, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        return AtollError(f"the console answered with status {status}")
    # Errors of files have their field in their text.
    return InputError(text) if param else AtollError(text)


def fleet_path(fleet: str, what: str = "") -> str:
    """Return the path of a fleet, or of something of it."""
    path = f"/atoll/v1/fleets/{quote(fleet, safe='')}"
    return f"{path}/{what}" if what else path
