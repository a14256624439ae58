"""Commands that ask the console: by the socket of a dashboard here, or by URL and key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli import deploy, history, logs
from atoll.cli.console_client import KEY_VARIABLE
from atoll.cli.console_inside import load_api
from atoll.core.errors import AtollError
from atoll.dashboard.links import LoginLinks, links_folder, socket_of
from atoll.dashboard.server import Dashboard, DashboardSettings
from atoll.dashboard.services import ServiceAddress, ServiceDirectory
from tests.dashboard.browser.conftest import SiteOnItsLoop
from tests.dashboard.fakes import FakeDesk, FakeGateway


class Console(SiteOnItsLoop):
    """A dashboard before a gateway and a planner that are not there, with its socket."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.planner: FakeDesk

    async def _start(self) -> None:
        self.gateway, self.planner = FakeGateway(), FakeDesk(step_s=0.0)
        await self.gateway.start()
        services = ServiceDirectory(
            ServiceAddress(self.gateway.url, token=self.gateway.token), self.planner
        )
        self._dashboard = Dashboard(
            DashboardSettings(port=0), services, LoginLinks(self._folder), load_api
        )
        host, port = await self._dashboard.start()
        self.url = f"http://{host}:{port}"
        self._links = LoginLinks(links_folder(port))
        self._links.announce(self.url)
        await self._dashboard.open_socket(socket_of(links_folder(port)))

    async def _stop(self) -> None:
        self._links.forget()
        await self._dashboard.close()
        await self.gateway.close()


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Console]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ATOLL_CONSOLE", raising=False)
    made = Console(tmp_path)
    made.start()
    yield made
    made.stop()


def test_a_model_is_deployed_through_the_dashboard_that_runs_here(console: Console) -> None:
    words = ["lab", "mail", "--model", "qwen3-8b", "--rate", "1/s"]
    shown = CliRunner().invoke(deploy.app, [*words, "--dry-run"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "vllm tested" in shown.output
    assert not [r for r in console.planner.seen if r.method == b"PUT"]
    done = CliRunner().invoke(deploy.app, [*words, "--yes"], catch_exceptions=False)
    assert done.exit_code == 0
    asked = [r for r in console.planner.seen if r.path.endswith(b"/whatif")][-1]
    edit = json.loads(asked.body)["edit"]
    assert edit == {"services": {"mail": {"model": "qwen3-8b", "rate": "1/s"}}}
    (put,) = [r for r in console.planner.seen if r.method == b"PUT"]
    assert json.loads(put.body)["version"] == "a"


def test_what_ran_elsewhere_is_asked_with_a_key(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--console", console.url)
    with pytest.raises(AtollError, match="a key is needed"):
        CliRunner().invoke(history.app, ["lab", *at], catch_exceptions=False)
    monkeypatch.setenv(KEY_VARIABLE, "atoll-root")
    told = CliRunner().invoke(history.app, ["lab", *at], catch_exceptions=False)
    assert "begins to operate" in told.output
    said = CliRunner().invoke(logs.app, ["lab", "gateway", *at], catch_exceptions=False)
    assert said.output == "it has begun\nit is ready\n"
    monkeypatch.setenv(KEY_VARIABLE, "atoll-notebook")
    with pytest.raises(AtollError, match="not"):
        CliRunner().invoke(
            deploy.app, ["lab", "chat", "--remove", "--yes", *at], catch_exceptions=False
        )


def test_without_a_dashboard_it_says_how_to_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(AtollError, match="no dashboard of yours runs here"):
        CliRunner().invoke(deploy.app, ["lab", "chat", "--remove"], catch_exceptions=False)
