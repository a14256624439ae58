"""A browser on the dashboard of a real gateway with keys, before engines that die when they are told to."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import tempfile
import time
import urllib.error
import urllib.request
import wave
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from atoll.cli.console_inside import load_api
from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.core.roles import Role
from atoll.dashboard.links import LoginLinks
from atoll.dashboard.server import Dashboard, DashboardSettings
from atoll.dashboard.services import ServiceAddress, ServiceDirectory
from atoll.deploy.target_table import TargetSettings
from atoll.fabric.identity.authority import Authority
from atoll.planner.jobs import JobRunner
from atoll.planner.planner_api import PlannerApi
from atoll.planner.planner_service import PlanningService
from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.pool.backend_metadata import MODALITIES, write_modalities
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool
from atoll.runtime.pool.routes import ModelPromise
from tests.dashboard.browser.conftest import SiteOnItsLoop, Visit, check_axe
from tests.planner.test_fleet_edit import FLEET
from tests.runtime.gateway.engine import Fault, ScriptedEngine
from tests.runtime.gateway.graph_server import ScriptedGraphServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

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

    def end_step(self) -> None:
        """Have ten seconds pass for the gateway's history."""
        self._do(self._end_step())

    async def _end_step(self) -> None:
        gateway, loop = self._gateway, asyncio.get_running_loop()
        gateway.history.tick(loop.time() + 10.0)
        if gateway.history._writing is not None:
            await gateway.history._writing

    async def _start(self) -> None:
        self.engines = [ScriptedEngine(name=name, step_s=0.02) for name in ("first", "second")]
        backends = [
            Backend(id=each.name, url=await each.start(), models=("m",), kind="vllm")
            for each in self.engines
        ]
        # One that sees, hears and speaks, as a graph server does.
        self.omni = ScriptedGraphServer(name="omni", model="omni")
        known = {"omni": (("text", "image", "audio"), ("text", "audio"))}
        metadata = {MODALITIES: write_modalities(known)}
        url = await self.omni.start()
        backends.append(Backend(id="omni", url=url, models=("omni",), metadata=metadata))
        self._accounts = await Accounts.open(
            f"sqlite:///{self.folder}/accounts.db", journal=self.folder / "journal"
        )
        settings = GatewaySettings(
            port=0,
            admin_socket=str(self.folder / "gateway.sock"),
            history=str(self.folder / "history.db"),
            promises={"m": ModelPromise(ttft_s=5.0, tpot_s=1.0, target=0.95)},
            budgets=({"usd_per_month": 5.0},),
        )
        self._gateway = Gateway(BackendPool(backends), settings, accounts=self._accounts)
        host, port = await self._gateway.start()
        self.gateway_url = f"http://{host}:{port}"
        # An operated fleet whose home is where `operate --state` keeps it.
        home = FleetHome(self.folder / "home")
        home.make()
        source = self.folder / "lab.yaml"
        source.write_text(FLEET)
        home.write(FleetRecord(name="lab", source=str(source), targets=TargetSettings(), up=True))
        Authority.create(home.folder / "fabric", "lab", ["127.0.0.1:9"])
        (home.folder / "gateway.log").write_text("gateway starts\n")
        planner = PlannerApi(PlanningService((), (home.folder,), JobRunner(1, modules=())))
        self.services = ServiceDirectory(
            ServiceAddress(self.gateway_url, self.folder / "gateway.sock"),
            planner,
        )
        self._links = LoginLinks(self.folder / "links")
        self._dashboard = Dashboard(DashboardSettings(port=0), self.services, self._links, load_api)
        host, port = await self._dashboard.start()
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        await self._dashboard.close()
        await self._gateway.close()
        await self._accounts.close()
        for each in (*self.engines, self.omni):
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


def _chat(real: RealSite, page: Page) -> None:
    page.get_by_role("link", name="Chat", exact=True).first.click()
    page.get_by_label("Message", exact=True).fill("Tell me of the sea.")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("button", name="Answer again").wait_for(timeout=60_000)


def test_what_was_asked_is_in_the_history(real: RealSite, visit: Visit) -> None:
    page = visit(real).page
    _chat(real, page)
    real.end_step()
    page.get_by_role("link", name="History").click()
    page.get_by_label("Time", exact=True).select_option("3600")
    kept = page.get_by_role("region", name="Requests that kept their promise", exact=True)
    kept.locator("summary").click()
    assert "100 %" in kept.get_by_role("row").filter(has_text="m").last.inner_text()
    page.get_by_label("Of", exact=True).select_option("machines")
    page.get_by_role("region", name="Requests running", exact=True).wait_for()


def test_the_way_of_a_request_that_moved(real: RealSite, visit: Visit) -> None:
    for engine in real.engines:
        engine.faults = [Fault("die", 5)]
    page = visit(real).page
    _chat(real, page)
    page.get_by_role("link", name="Requests").click()
    row = page.get_by_role("row").filter(has_text="attempts")
    row.get_by_role("link").click()
    way = page.get_by_role("region", name="The way of the request")
    way.wait_for()
    steps = way.locator("tbody tr").all_inner_texts()
    assert sum("failed" in step for step in steps) >= 1
    assert sum(step.startswith("Machine") for step in steps) >= 2


def test_the_log_of_an_operated_fleet_is_followed(real: RealSite, visit: Visit) -> None:
    page = visit(real).page
    page.get_by_role("link", name="Logs").click()
    log = page.get_by_role("log", name="Log")
    log.get_by_text("gateway starts").wait_for()
    with (real.folder / "home" / "gateway.log").open("a") as file:
        file.write("a machine joined\n")
    log.get_by_text("a machine joined").wait_for()


def test_a_budget_is_shown_with_what_is_spent(real: RealSite, visit: Visit) -> None:
    real._do(real._gateway.budgets.look(time.time()))
    page = visit(real).page
    page.get_by_role("link", name="Keys and usage").click()
    page.get_by_role("tab", name="Usage", exact=True).click()
    budgets = page.get_by_role("region", name="Budgets", exact=True)
    budgets.get_by_text("$0.00 of $5.00").wait_for()
    # One of the settings is changed there; one that is set here is removed here.
    assert budgets.get_by_role("button", name="Remove").count() == 0
    real.make_key("member")
    page.reload()
    page.get_by_role("tab", name="Usage", exact=True).click()
    budgets.get_by_label("Budget of").select_option(label="key member")
    budgets.get_by_label("Dollars a month").fill("7")
    budgets.get_by_role("button", name="Set budget").click()
    budgets.get_by_text("$0.00 of $7.00").wait_for()
    budgets.get_by_role("button", name="Remove").click()
    budgets.get_by_text("$0.00 of $7.00").wait_for(state="detached")


def make_picture() -> bytes:
    """Return a small picture as a PNG file."""
    rows = b"".join(b"\0" + bytes(3 * 8) for _ in range(4))
    head = struct.pack(">IIBBBBB", 8, 4, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def make_sound() -> bytes:
    """Return a tenth of a second of silence as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(16_000)
        written.writeframes(bytes(3200))
    return file.getvalue()


def test_a_model_sees_hears_and_speaks_in_the_chat(real: RealSite, visit: Visit) -> None:
    visitor = visit(real)
    page = visitor.page
    visitor.go("/chat?model=omni")
    page.get_by_text("takes text, pictures").wait_for()
    (real.folder / "sea.png").write_bytes(make_picture())
    (real.folder / "waves.wav").write_bytes(sound := make_sound())
    files = [real.folder / "sea.png", real.folder / "waves.wav"]
    page.locator("input[type=file]").set_input_files(files)
    page.get_by_text("8 \N{MULTIPLICATION SIGN} 4 px").wait_for()
    page.get_by_text("waves.wav").wait_for()
    check_axe(visitor)
    page.get_by_label("Answer with speech, too").check()
    page.get_by_role("textbox", name="Message").fill("What is this?")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("list", name="Conversation").get_by_text("I see a sea").wait_for()
    spoken = page.get_by_label("The answer as speech")
    spoken.wait_for()
    page.wait_for_function(
        "() => document.querySelector('audio[aria-label=\"The answer as speech\"]').duration > 1"
    )
    asked = real.omni.seen[-1].body
    text, seen, heard = asked["messages"][0]["content"]
    assert text["text"] == "What is this?"
    # A browser writes the picture anew, and leaves the sound as it is.
    assert seen["image_url"]["url"].startswith("data:image/png;base64,")
    assert base64.b64decode(heard["input_audio"]["data"]) == sound
    assert asked["modalities"] == ["text", "audio"]
    check_axe(visitor)
