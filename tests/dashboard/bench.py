"""A dashboard on loopback with a gateway and a planner that are not there, and a browser without a window."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.cli.console_inside import load_api
from atoll.dashboard.links import LoginLinks
from atoll.dashboard.server import Dashboard, DashboardSettings
from atoll.dashboard.services import ServiceAddress, ServiceDirectory
from atoll.runtime.http.http_client import HttpResponse, StreamedResponse, open_stream, request
from tests.dashboard.fakes import FakeDesk, FakeGateway

PATIENCE_S = 30.0
JSON = {"content-type": "application/json"}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Browser:
    """Keeps its cookie, and sends what a page of the dashboard would."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url
        self.extra = dict(headers or {})
        self.cookie = self.cookie_name = ""
        self.csrf = ""

    def headers(self) -> dict[str, str]:
        found = {"origin": self.url, **self.extra}
        if self.cookie:
            found["cookie"] = f"theme=dark; {self.cookie_name}={self.cookie}"
        if self.csrf:
            found["x-csrf-token"] = self.csrf
        return found

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        without: tuple[str, ...] = (),
        **headers: str,
    ) -> HttpResponse:
        sent = self.headers() | {k.replace("_", "-"): v for k, v in headers.items()}
        data = b"" if body is None else json.dumps(body).encode()
        if body is not None:
            sent.setdefault("content-type", "application/json")
        for name in without:
            sent.pop(name, None)
        answer = await request(
            self.url + path, method=method, data=data, headers=sent, timeout_s=PATIENCE_S
        )
        if cookie := answer.headers.get("set-cookie"):
            self.cookie_name, _, self.cookie = cookie.partition(";")[0].partition("=")
        return answer

    async def log_in(self, **login: str) -> HttpResponse:
        answer = await self.ask("POST", "/atoll/v1/session", login)
        if answer.status == 200:
            self.csrf = json.loads(answer.body)["csrf"]
        return answer

    def stream(
        self, path: str, method: str = "GET", body: object = None, **headers: str
    ) -> contextlib.AbstractAsyncContextManager[StreamedResponse]:
        sent = self.headers() | {k.replace("_", "-"): v for k, v in headers.items()}
        data = b"" if body is None else json.dumps(body).encode()
        return open_stream(self.url + path, method=method, data=data, headers=JSON | sent)


@dataclass
class Bench:
    dashboard: Dashboard
    gateway: FakeGateway
    planner: FakeDesk
    url: str
    clock: Clock
    links: LoginLinks

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def browser(self, **headers: str) -> Browser:
        return Browser(self.url, {k.replace("_", "-"): v for k, v in headers.items()})

    async def logged_in(self, key: str | None = None) -> Browser:
        """Return a browser that is logged in, by a link unless with a key."""
        browser = self.browser()
        login = {"token": self.links.make()} if key is None else {"key": key}
        assert (await browser.log_in(**login)).status == 200
        return browser


@contextlib.asynccontextmanager
async def open_bench(
    folder: Path,
    settings: DashboardSettings | None = None,
    *,
    gateway: FakeGateway | None = None,
    owned: bool = True,
    missing: bool = False,
) -> AsyncIterator[Bench]:
    """Start all three; `missing` leaves the services out, `owned` is whether there is an admin token."""
    gateway = gateway or FakeGateway(interval_s=0.05, token_s=0.001)
    planner = FakeDesk(interval_s=0.05, step_s=0.001)
    await gateway.start()
    services = ServiceDirectory()
    if not missing:
        token = gateway.token if owned else None
        services = ServiceDirectory(ServiceAddress(gateway.url, token=token), planner)
    clock, links = Clock(), LoginLinks(folder / "links")
    chosen = replace(settings or DashboardSettings(), port=0)
    dashboard = Dashboard(chosen, services, links, load_api, clock)
    host, port = await dashboard.start()
    try:
        url = f"http://{host}:{port}"
        yield Bench(dashboard, gateway, planner, url, clock, links)
    finally:
        await dashboard.close()
        await gateway.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def error_code(answer: HttpResponse) -> Any:
    return json.loads(answer.body)["error"]["code"]
