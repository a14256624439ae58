"""Live events for every open page: the gateway and the planner are listened to once, however many there are.

A page is told the newest of each kind of event; what it was too slow for is not kept. Services are listened
to only while there are pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable

import msgspec

from atoll.dashboard.services import (
    ADMIN_PATH,
    ServiceAddress,
    ServiceCall,
    ServiceDirectory,
    at_public_port,
    own,
)
from atoll.dashboard.sessions import LoginSession
from atoll.runtime.http.http_client import FetchError
from atoll.runtime.openai import ApiError

_LOG = logging.getLogger(__name__)
MAX_PAGES = 1000
_SHARE = 4
"""One person has at most this part of them."""
_HEARTBEAT_S = 15.0
_SILENCE_S = 45.0
"""A service that says nothing for so long, not even that it has nothing to say, is gone."""
_LINGER_S = 10.0
"""How long a service is listened to after the last page has gone: pages are reloaded."""
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_NONE_S = 3.0
"""Between two looks for a service that is not there."""
_MAX_EVENT_BYTES = 16 * 2**20
_NAME = re.compile(rb"[a-z]{1,32}")
_SERVICES = ("gateway", "planner")


class _Versioned(msgspec.Struct):
    version: int | None = None


_VERSION = msgspec.json.Decoder(_Versioned)


class EventParser:
    """Reads server-sent events out of the bytes of a stream; ValueError for one that is too large."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Take bytes as they came; returns names and data of the events that are complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) + sum(map(len, self._data)) > _MAX_EVENT_BYTES:
            raise ValueError("an event is too large")
        events = []
        for line in lines:
            line = line.rstrip(b"\r")
            if not line:
                if self._data:
                    events.append((self._name or b"message", b"\n".join(self._data)))
                self._name, self._data = b"", []
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events


class LivePage:
    """An open page: what it has not been told yet, the newest of each kind."""

    __slots__ = ("session", "waiting", "wake")

    def __init__(self, session: LoginSession) -> None:
        self.session = session
        self.waiting: dict[str, bytes] = {}
        self.wake = asyncio.Event()

    def put(self, name: str, frame: bytes) -> None:
        """Have the page told; takes the place of what was to be told of the same kind."""
        self.waiting[name] = frame
        self.wake.set()

    def take(self) -> bytes:
        """Return what is to be told now."""
        self.wake.clear()
        frames = b"".join(self.waiting.values())
        self.waiting.clear()
        return frames


class LiveEvents:
    """Listens to the services, and tells the pages."""

    def __init__(
        self,
        services: ServiceDirectory,
        is_over: Callable[[LoginSession], bool],
        end: Callable[[LoginSession], None],
        *,
        changed: Callable[[], None] = lambda: None,
        max_pages: int = MAX_PAGES,
        heartbeat_s: float = _HEARTBEAT_S,
    ) -> None:
        """Call `end` where a key is no longer good, `changed` where machines or models are other ones."""
        self._services = services
        self._is_over = is_over
        self._end = end
        self._changed = changed
        self._version: int | None = None
        self._max_pages = max_pages
        self._heartbeat_s = heartbeat_s
        self.pages: set[LivePage] = set()
        self._latest: dict[str, bytes] = {}
        self._states: dict[str, str] = {}
        """By service: up, down or none; nothing until it is known."""
        self._reasons = dict.fromkeys(_SERVICES, "")
        self._wanted = asyncio.Event()
        self._left_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self.connections = dict.fromkeys(_SERVICES, 0)
        """How often each service was connected to."""

    def start(self) -> None:
        """Begin to listen, once there is a page."""
        self._tasks = [
            asyncio.create_task(follow()) for follow in (self._follow_gateway, self._follow_planner)
        ]

    async def close(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def tell(self, session: LoginSession) -> AsyncGenerator[bytes, None]:
        """Yield what happens to a page of a session, as events, until the session is over."""
        own = sum(page.session.who == session.who for page in self.pages)
        if len(self.pages) >= self._max_pages or own >= max(1, self._max_pages // _SHARE):
            raise ApiError(
                503,
                "too many open pages",
                kind="server_error",
                code="too_many_pages",
                retry_after_s=5,
            )
        page = LivePage(session)
        page.waiting.update(self._latest)
        self._put_health(page)
        self.pages.add(page)
        session.pages += 1
        self._wanted.set()
        return self._pour(page)

    def wake(self, session: LoginSession) -> None:
        """Have the pages of a session find out that it is over."""
        for page in self.pages:
            if page.session is session:
                page.wake.set()

    async def _pour(self, page: LivePage) -> AsyncGenerator[bytes, None]:
        try:
            yield b"retry: 3000\n\n"
            while not self._is_over(page.session):
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await page.wake.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if frames := page.take():
                    yield frames
            # A page that is told so does not come back to be refused.
            told = json.dumps({"message": page.session.over_because}).encode()
            yield b"event: over\ndata: %b\n\n" % told
        finally:
            self.pages.discard(page)
            page.session.pages -= 1
            if not self.pages:
                self._left_s = asyncio.get_running_loop().time()
                self._wanted.clear()

    def _publish(self, name: str, data: bytes) -> None:
        frame = b"event: %b\n%b\n\n" % (
            name.encode(),
            b"\n".join(b"data: " + line for line in data.split(b"\n")),
        )
        self._latest[name] = frame
        for page in self.pages:
            page.put(name, frame)

    def _put_health(self, page: LivePage) -> None:
        if len(self._states) < len(_SERVICES):
            return  # it will be told when all of it is known
        why = "; ".join(filter(None, self._reasons.values()))
        health = json.dumps({**self._states, "why": why}).encode()
        page.put("health", b"event: health\ndata: %b\n\n" % health)

    def _set_state(self, name: str, state: str, why: str = "") -> None:
        if (self._states.get(name), self._reasons[name]) == (state, why):
            return
        if self._states.get(name) != state:
            _LOG.info("%s: %s %s", name, state, why)
        self._states[name], self._reasons[name] = state, why
        for page in self.pages:
            self._put_health(page)

    async def _follow_gateway(self) -> None:
        failures = 0
        while True:
            await self._wanted.wait()
            address = self._services.gateway
            if address is None:
                self._set_state("gateway", "none")
                await self._look_again()
                await asyncio.sleep(_NONE_S)
                continue
            try:
                failures = 0 if await self._listen(address) else failures
            except (FetchError, ApiError, ValueError) as error:
                self._set_state("gateway", "down", f"gateway: {error}")
            else:
                if not self._wanted.is_set():
                    continue
                self._set_state("gateway", "down", "gateway: the connection ended")
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1
            await self._look_again()

    async def _follow_planner(self) -> None:
        planner = self._services.planner
        if planner is None:
            self._set_state("planner", "none")
            return
        while True:
            await self._wanted.wait()
            if "planner" not in self._states:
                self._set_state("planner", "down", "planner: it is starting")
            try:
                await self._hear("planner", planner.listen())
            except Exception as error:  # whatever it is must not end the listening  # noqa: BLE001
                _LOG.exception("the planner does not tell how fleets stand")
                self._set_state("planner", "down", f"planner: {error}")
                await asyncio.sleep(_NONE_S)

    async def _hear(self, name: str, pieces: AsyncGenerator[bytes, None]) -> bool:
        """Tell what a service says until it ends or nobody listens; returns whether it said anything."""
        heard = False
        parser = EventParser()
        self.connections[name] += 1
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if not heard:
                    heard = True
                    self._set_state(name, "up")
                for event, data in parser.feed(piece):
                    self._take(name, event, data)
                if self._is_alone():
                    break
        return heard

    async def _look_again(self) -> None:
        try:
            await self._services.look_again()
        except Exception:  # a bad file of another program must not end the listening  # noqa: BLE001
            _LOG.exception("looking for a gateway failed")

    async def _listen(self, address: ServiceAddress) -> bool:
        call, session = self._choose_call(address)
        if call is None:
            raise FetchError("nobody is logged in with a key")
        opened = call.open("GET", f"{ADMIN_PATH}/live", headers={"accept": "text/event-stream"})
        async with opened as answer:
            if answer.status == 401 and session is not None:
                self._end(session)
            if answer.status != 200:
                raise FetchError(f"status {answer.status} for what happens")
            return await self._hear("gateway", answer.pieces(_SILENCE_S))

    def _take(self, service: str, event: bytes, data: bytes) -> None:
        if service == "gateway":
            if event == b"snapshot":
                self._note_version(data)
                self._publish("gateway", data)
        elif _NAME.fullmatch(event) and event not in (b"gateway", b"health"):
            self._publish(event.decode(), data)

    def _note_version(self, data: bytes) -> None:
        try:
            version = _VERSION.decode(data).version
        except msgspec.DecodeError:
            return
        if version != self._version:
            self._version = version
            self._changed()

    def _choose_call(
        self, address: ServiceAddress
    ) -> tuple[ServiceCall | None, LoginSession | None]:
        """Return how to listen: as the owner, else with the key of somebody who has a page open."""
        if address.is_owned:
            return own(address), None
        for page in self.pages:
            if page.session.key is not None and not self._is_over(page.session):
                return at_public_port(address, page.session.key), page.session
        return None, None

    def _is_alone(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        return not self.pages and now_s - self._left_s > _LINGER_S
