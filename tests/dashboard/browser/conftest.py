"""A real browser on the dashboard, before a gateway and a planner that are not there (`fakes`)."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from atoll.cli.console_inside import load_api
from atoll.dashboard.links import LoginLinks
from atoll.dashboard.server import Dashboard, DashboardSettings
from atoll.dashboard.services import ServiceAddress, ServiceDirectory
from tests.dashboard.fakes import FakeDesk, FakeGateway

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Return the browser of this machine: $ATOLL_CHROMIUM, or the first that is installed."""
    named = os.environ.get("ATOLL_CHROMIUM")
    return named or next((path for name in _NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Open the browser for a file of tests: as long as it is open, its loop runs in this thread."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = find_chromium()
    if path is None:
        pytest.skip("no chromium here: install it, or name it in ATOLL_CHROMIUM")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield opened
        opened.close()


class SiteOnItsLoop:
    """A dashboard and what is behind it, on a loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._links: LoginLinks
        self.url = ""

    def start(self) -> None:
        self._thread.start()
        self._do(self._start())

    def stop(self) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def link(self) -> str:
        """Return an address that logs in as the admin of this machine, once."""
        return f"{self.url}/#token={self._links.make()}"

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self) -> None:
        raise NotImplementedError

    async def _stop(self) -> None:
        raise NotImplementedError


class Site(SiteOnItsLoop):
    """The dashboard and the fakes behind it."""

    def __init__(self, folder: Path, *, gateway: bool = True, planner: bool = True) -> None:
        super().__init__()
        self._with = gateway, planner
        self._folder = folder
        self.gateway: FakeGateway
        self.planner: FakeDesk

    def find_gateway(self) -> None:
        """Have a dashboard that knew of no gateway find one."""
        self._services.gateway = ServiceAddress(self.gateway.url, token=self.gateway.token)

    def stop_gateway(self) -> None:
        """End the gateway."""
        self._do(self.gateway.close())

    def hold_planner(self, held: bool) -> None:
        """Have the planner take its time to start, or have started."""
        ready = self.planner.ready
        self._loop.call_soon_threadsafe(ready.clear if held else ready.set)

    async def _start(self) -> None:
        self.gateway = FakeGateway(interval_s=0.5, token_s=0.005)
        self.planner = FakeDesk(step_s=0.02)
        await self.gateway.start()
        has_gateway, has_planner = self._with
        services = self._services = ServiceDirectory(
            ServiceAddress(self.gateway.url, token=self.gateway.token) if has_gateway else None,
            self.planner if has_planner else None,
        )
        self._links = LoginLinks(self._folder)
        self._dashboard = Dashboard(DashboardSettings(port=0), services, self._links, load_api)
        host, port = await self._dashboard.start()
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        await self._dashboard.close()
        await self.gateway.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def bare_site(tmp_path: Path) -> Iterator[Site]:
    """A fresh install: no gateway."""
    made = Site(tmp_path, gateway=False)
    made.start()
    yield made
    made.stop()


class Visitor:
    """A page in the browser that notes what must not happen: errors in the console, strangers asked."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.faults: list[str] = []
        self.expected: list[str] = []
        """Parts of messages that a test provokes."""
        page.on("console", lambda m: self._note(f"console {m.type}: {m.text}", m.type == "error"))
        page.on("pageerror", lambda error: self._note(f"exception: {error}", True))
        page.on("dialog", self._dismiss)
        page.on("request", self._check_request)

    def go(self, path: str, patience_ms: float = 20_000) -> None:
        """Open a page of the dashboard without loading the whole again, and wait for its content."""
        self.page.evaluate("p => import('/static/js/app.js').then((app) => app.go(p))", path)
        self.page.wait_for_function(
            "() => !document.querySelector('main .state.loading, main .boot')",
            timeout=patience_ms,
        )

    def check(self) -> None:
        """Fail if anything happened that must not."""
        assert [f for f in self.faults if not any(e in f for e in self.expected)] == []

    def _dismiss(self, dialog: Dialog) -> None:
        self._note(f"alert: {dialog.message}", True)
        dialog.dismiss()

    def _note(self, text: str, fault: bool) -> None:
        if fault:
            self.faults.append(text)

    def _check_request(self, request: Any) -> None:
        address = urlsplit(request.url)
        if address.scheme in ("http", "https", "ws", "wss"):
            self._note(f"asked a stranger: {request.url}", not request.url.startswith(self.origin))


def check_axe(visitor: Visitor) -> None:
    """Fail if axe finds anything on the page as it is."""
    visitor.expected.append("Applying inline style")  # Axe tries out what it finds.
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(visitor.page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


Visit = Callable[..., Visitor]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Open the dashboard as somebody: by link, or with a key of the fake gateway."""
    opened: list[Any] = []
    visitors: list[Visitor] = []

    def enter(
        site: Site,
        *,
        key: str | None = None,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
    ) -> Visitor:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        opened.append(context)
        page = context.new_page()
        visitor = Visitor(page, site.url)
        visitors.append(visitor)
        if key is None:
            page.goto(site.link())
        else:
            page.goto(site.url)
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Log in").click()
        page.wait_for_selector("#nav", state="attached")
        return visitor

    yield enter
    for visitor in visitors:
        visitor.check()
    for context in opened:
        context.close()
