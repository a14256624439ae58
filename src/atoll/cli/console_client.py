"""The console, asked by commands: by URL and key, by the socket of one that runs here, else in this process.

It is the same API that pages and programs ask (docs/reference/http.md, "One API").
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from atoll.core.errors import AtollError, InputError, UnknownNameError, UsageError
from atoll.core.options import option
from atoll.core.paths import state_dir

KEY_VARIABLE = "ATOLL_KEY"
CONSOLE_VARIABLE = "ATOLL_CONSOLE"
CONSOLE_HELP = (
    f"Ask the dashboard at this URL, with the API key in ${KEY_VARIABLE}; default: what runs here."
)
_QUESTION_S = 60.0
_JOB_S = 600.0


class NotThereError(AtollError):
    """What the console was asked for is not there."""

    exit_code = UnknownNameError.exit_code


def console_field() -> Any:
    """Return the field of --console."""
    return option(None, CONSOLE_HELP, env=CONSOLE_VARIABLE, metavar="URL")


@dataclass(frozen=True, slots=True)
class ConsoleClient:
    """Where the console is asked, and with which key; on a socket none is needed."""

    url: str
    key: str | None = field(default=None, repr=False)
    socket: Path | None = None
    states: tuple[Path, ...] | None = None
    """Where it is none but a planner in this process: folders of fleets beside those of the state folder."""

    @classmethod
    def find_fleets(cls, url: str | None, state: Path | None = None) -> ConsoleClient:
        """Return who can tell of fleets: the console that `find` finds, else this process.

        Of a folder that somebody names, a console that runs may not know.
        """
        if url is None and (state is not None or not (cls._list_sockets())):
            return cls("", states=() if state is None else (state,))
        return cls.find(url)

    @classmethod
    def find(cls, url: str | None) -> ConsoleClient:
        """Return the console at a URL, else the one that runs here; UsageError where there is none."""
        if url is not None:
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"{url!r} is no URL", field="--console")
            # From the environment alone: command lines are seen by all.
            key = os.environ.get(KEY_VARIABLE)
            if not key:
                raise UsageError("a key is needed there", hint=f"export {KEY_VARIABLE}=atoll-...")
            return cls(url.rstrip("/"), key)
        for socket in cls._list_sockets():
            return cls("http://console", socket=socket)
        raise UsageError(
            "no dashboard of yours runs here",
            hint="`atoll operate FLEET --dashboard` or `atoll dashboard` starts one; --console names another",
        )

    @staticmethod
    def _list_sockets() -> list[Path]:
        """Return the sockets of consoles that run here, for the same state folder."""
        from atoll.dashboard.links import list_dashboards, socket_of

        own = str(state_dir())
        found = [socket_of(each.folder) for each in list_dashboards() if each.state == own]
        return [socket for socket in found if socket.is_socket()]

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return what is answered to a request for `/atoll/v1/...`, as plain data; a refusal raises."""
        return asyncio.run(self._ask(method, path, body))

    def work(self, path: str, body: object, say: Callable[[str], None]) -> Any:
        """Return the result of a question that takes a while; `say` hears how far it is."""
        return asyncio.run(self._work(path, body, say))

    async def _ask(self, method: str, path: str, body: object) -> Any:
        if self.states is not None:
            return await _answer_inside(self.states, method, path, body)
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
        from atoll.dashboard.live import EventParser
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
            parser = EventParser()
            async for piece in pieces:
                for event, said in parser.feed(piece):
                    if event == b"progress":
                        say(str(json.loads(said).get("text", "")))
                    elif event == b"result":
                        return json.loads(said)
                    else:
                        raise _refusal(400, said)
        raise AtollError("the console broke off before it had an answer")


async def _answer_inside(states: tuple[Path, ...], method: str, path: str, body: object) -> Any:
    """Answer what is asked about fleets in this process, as a console that runs would."""
    from atoll.planner.planner_api import PlannerApi
    from atoll.planner.planner_service import PlanningService
    from atoll.runtime.http.handlers import Response
    from atoll.runtime.http.http_request import Request
    from atoll.runtime.openai import ApiError

    planner = PlannerApi(PlanningService((), states))
    target, _, query = path.partition("?")
    request = Request(method.encode(), target.encode(), {}, query.encode())
    request.body = b"" if body is None else json.dumps(body).encode()
    try:
        answer = await planner.answer(request, "admin")
    except ApiError as error:
        raise _refusal(error.status, error.body()) from None
    finally:
        await planner.close()
    assert isinstance(answer, Response)
    return json.loads(answer.body)


def _refusal(status: int, body: bytes) -> AtollError:
    """Return what a server said it refuses, with the field it is about."""
    try:
        error = json.loads(body)["error"]
        text, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        return AtollError(f"the console answered with status {status}")
    # Errors of files have their field in their text.
    if status == 404:
        return NotThereError(text)
    return InputError(text) if param else AtollError(text)


def fleet_path(fleet: str, what: str = "", query: Mapping[str, object] | None = None) -> str:
    """Return the path of a fleet, or of something of it."""
    path = f"/atoll/v1/fleets/{quote(fleet, safe='')}"
    path = f"{path}/{what}" if what else path
    return f"{path}?{urlencode(query)}" if query else path


def name_fleet(fleet: str | None, state: Path | None, console: str | None) -> str:
    """Return the name of an operated fleet: here by its name, file or folder, or the only one that is up."""
    if console is None:
        from atoll.control.operation.fleet_home import find_home

        return find_home(fleet, state)[1].name
    if fleet is None:
        raise UsageError("of which fleet?", hint="name it, as --console names another machine")
    return fleet
