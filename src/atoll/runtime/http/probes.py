"""Is a process ready, is it well? An endpoint is when it gives a real token, a node when it says so.

Engines exist whose /health answers 200 while the first request kills them; a token cannot lie.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from atoll.core.errors import AtollError

_TOKEN_S = 15.0
"""How long an instance may take over a token; it gives up itself a little earlier."""


class FetchError(AtollError):
    """A server did not answer, or not in HTTP."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What a server answered; names of headers are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def fetch(
    url: str,
    *,
    body: object = None,
    timeout_s: float = 5.0,
    api_key: str | None = None,
    unix_socket: str | None = None,
) -> tuple[int, bytes]:
    """GET a URL, or POST a JSON body to it; returns status and body. FetchError if there is none."""
    answer = await ask(
        url, body=body, timeout_s=timeout_s, api_key=api_key, unix_socket=unix_socket
    )
    return answer.status, answer.body


async def ask(
    url: str,
    *,
    method: str | None = None,
    body: object = None,
    timeout_s: float = 5.0,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    most_bytes: int = 64 * 2**20,
    unix_socket: str | None = None,
) -> HttpResponse:
    """Send a request, by default as `fetch` does; FetchError if there is no answer.

    With `unix_socket` it goes there, whatever host and port the URL names.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    data = b"" if body is None else json.dumps(body).encode()
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [
        f"{method or ('GET' if body is None else 'POST')} {target} HTTP/1.1",
        f"host: {parts.netloc}",
        "connection: close",
        "accept: application/json",
        f"content-length: {len(data)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    if data:
        lines.append("content-type: application/json")
    if api_key:
        lines.append(f"authorization: Bearer {api_key}")
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    try:
        async with asyncio.timeout(timeout_s):
            context = ssl.create_default_context() if secure else None
            reader, writer = await (
                asyncio.open_connection(parts.hostname, port, ssl=context)
                if unix_socket is None
                else asyncio.open_unix_connection(unix_socket)
            )
            try:
                writer.write(head + data)
                return _read(await _read_all(reader, most_bytes))
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError as error:
        raise FetchError(f"{url} did not answer within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise FetchError(f"{url} did not answer: {error}") from error


async def _read_all(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    found = bytearray()
    # Not every server closes the connection when it is asked to.
    while not _complete(found) and (piece := await reader.read(2**16)):
        found += piece
        if len(found) > most_bytes:
            raise ValueError(f"more than {most_bytes} bytes")
    return bytes(found)


def _complete(data: bytearray) -> bool:
    """Whether an answer is all there, as far as it says how long it is."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(data[:end]).lower()
    length = re.search(rb"\r\ncontent-length:\s*(\d+)", head)
    if length is not None:
        return len(data) >= end + 4 + int(length[1])
    chunked = re.search(rb"\r\ntransfer-encoding:\s*chunked", head) is not None
    return chunked and data.endswith(b"\r\n0\r\n\r\n", end + 2)


def _read(data: bytes) -> HttpResponse:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    fields = first.split(None, 2)
    if len(fields) < 2 or not first.startswith("HTTP/1"):
        raise ValueError("no HTTP")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (r.partition(":") for r in rest)
    }
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = _unchunked(body)
    return HttpResponse(int(fields[1]), headers, body)


def _unchunked(body: bytes) -> bytes:
    found: list[bytes] = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size.partition(b";")[0] or b"0", 16)
        if not length:
            break
        found.append(body[:length])
        body = body[length + 2 :]
    return b"".join(found)


@dataclass(slots=True)
class TokenProbe:
    """Well is an endpoint that gives one token of the model when asked."""

    url: str
    model: str
    every_s: float = 10.0
    timeout_s: float = 30.0
    api_key: str | None = None

    def reset(self) -> None:
        """Nothing to forget."""

    async def check(self, pid: int) -> str | None:
        """Ask for one token."""
        del pid
        asked = {"model": self.model, "prompt": "Hi", "max_tokens": 1, "temperature": 0}
        try:
            status, body = await fetch(
                f"{self.url}/v1/completions",
                body=asked,
                timeout_s=self.timeout_s,
                api_key=self.api_key,
            )
        except FetchError as error:
            await asyncio.sleep(0.05)
            return str(error)
        if status == 200:
            return None
        if status == 503:
            await asyncio.sleep(0.2)
        return f"status {status}: {body[:200].decode('utf-8', 'replace')}"


@dataclass(slots=True)
class InstanceProbe:
    """Ready is an instance of the stage engine whose /health, which gives a token, is well.

    From then on it is not well if it says nothing for `most_s`, or gives no token `tokenless` times in a
    row although it hears all its nodes; that it misses some (`excused` is the code) is not its fault.
    """

    url: str
    excused: str
    most_s: float
    every_s: float = 1.0
    tokenless: int = 3
    is_ready: bool = False
    failures: int = 0

    def reset(self) -> None:
        """Forget that it was ready."""
        self.is_ready = False
        self.failures = 0

    async def check(self, pid: int) -> str | None:
        """Ask how it is, and for /health."""
        del pid
        try:
            if self.is_ready:
                await fetch(f"{self.url}/atoll/v1/status", timeout_s=self.most_s)
            status, body = await fetch(f"{self.url}/health", timeout_s=_TOKEN_S)
        except FetchError as error:
            await asyncio.sleep(0.05)
            return str(error)
        text = body[:200].decode("utf-8", "replace")
        if status == 200:
            self.is_ready, self.failures = True, 0
            return None
        if not self.is_ready:
            await asyncio.sleep(0.1)
            return text
        self.failures = 0 if self.excused in text else self.failures + 1
        return text if self.failures >= self.tokenless else None


@dataclass(slots=True)
class NodeProbe:
    """Ready is a node that has written its file; well is one whose instance hears from it.

    `silent` returns for how many seconds an instance has not heard from a node; a node may be silent
    for `most_s`.
    """

    ready_file: Path
    name: str
    silent: Callable[[str], float]
    most_s: float
    every_s: float = 1.0
    ready_s: float | None = None

    def reset(self) -> None:
        """Remove the file of an earlier run."""
        self.ready_s = None
        self.ready_file.unlink(missing_ok=True)

    async def check(self, pid: int) -> str | None:
        """Look for the file, then listen to the instance."""
        if self.ready_s is None:
            try:
                said = json.loads(self.ready_file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return "loading"
            if said.get("pid") != pid:
                return "loading"
            self.ready_s = time.monotonic()
            return None
        # It cannot have been heard before it was ready.
        silent_s = min(self.silent(self.name), time.monotonic() - self.ready_s)
        return None if silent_s <= self.most_s else f"silent for {silent_s:.0f} s"
