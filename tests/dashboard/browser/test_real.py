"""A browser on the dashboard of a real gateway with keys, before engines that die when they are told to."""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.dashboard.links import LoginLinks
from atoll.dashboard.server import Dashboard, DashboardSettings
from atoll.dashboard.services import ServiceAddress, ServiceDirectory
from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.api_keys import NewKey, Role
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool
from tests.dashboard.browser.conftest import SiteOnItsLoop, Visit
from tests.runtime.gateway.engine import Fault, ScriptedEngine

pytestmark = pytest.mark.slow


class RealSite(SiteOnItsLoop):
    """Two engines, a gateway with keys and the dashboard."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def make_key(self, role: Role) -> str:
        """Return a new key of this role."""

        async def make() -> str:
            text, _ = await self._accounts.database.create_key(NewKey(name=role, role=role))
            await self._accounts.learn_keys()
            return text

        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(60)

    def ask(self, key: str) -> int:
        """Ask the model with a key; return the status."""
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"{self.gateway_url}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    async def _start(self) -> None:
        self.engines = [ScriptedEngine(name=name, step_s=0.02) for name in ("first", "second")]
        backends = [
            Backend(id=each.name, url=await each.start(), models=("m",), kind="vllm")
            for each in self.engines
        ]
        self._accounts = await Accounts.open(
            f"sqlite:///{self.folder}/accounts.db", journal=self.folder / "journal"
        )
        settings = GatewaySettings(port=0, admin_socket=str(self.folder / "gateway.sock"))
        self._gateway = Gateway(BackendPool(backends), settings, accounts=self._accounts)
        host, port = await self._gateway.start()
        self.gateway_url = f"http://{host}:{port}"
        self.services = ServiceDirectory(
            ServiceAddress(self.gateway_url, self.folder / "gateway.sock"), None
        )
        self._links = LoginLinks(self.folder / "links")
        self._dashboard = Dashboard(DashboardSettings(port=0), self.services, self._links)
        host, port = await self._dashboard.start()
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        await self._dashboard.close()
        await self._gateway.close()
        await self._accounts.close()
        for each in self.engines:
            await each.stop()


@pytest.fixture
def real() -> Iterator[RealSite]:
    with tempfile.TemporaryDirectory(prefix="a-") as folder:
        made = RealSite(Path(folder))
        made.start()
        yield made
        made.stop()


def test_a_conversation_goes_on_when_its_engine_dies(real: RealSite, visit: Visit) -> None:
    for engine in real.engines:
        engine.faults = [Fault("die", 5)]
    page = visit(real).page
    page.get_by_role("link", name="Chat", exact=True).first.click()
    page.get_by_label("Message", exact=True).fill("Tell me of the sea.")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_text("went on at").first.wait_for()
    page.get_by_role("button", name="Answer again").wait_for(timeout=60_000)
    asked = [seen.body["messages"][0]["content"] for e in real.engines for seen in e.seen]
    assert set(asked) == {"Tell me of the sea."}
    assert len(asked) >= 2


def test_a_key_is_made_used_limited_and_revoked(real: RealSite, visit: Visit) -> None:
    page = visit(real).page
    page.get_by_role("link", name="Keys and usage").click()
    page.get_by_role("button", name="Make a key").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("browser test")
    dialog.get_by_role("button", name="Make", exact=False).click()
    page.get_by_text("Copy it now").wait_for()
    key = page.get_by_role("dialog").locator("pre").first.inner_text().strip()
    assert real.ask(key) == 200
    page.get_by_role("button", name="I have kept it").click()
    assert key not in page.content()
    row = page.get_by_role("row").filter(has_text="browser test")
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").wait_for(state="detached")
    assert real.ask(key) == 401
