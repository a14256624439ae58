"""The command: what it refuses, which gateway it finds, and processes that stand beside another."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.cli import beside
from atoll.cli import main as cli
from atoll.cli.beside import CompanionProcess
from atoll.cli.find_gateway import find_gateway, read_gateway
from atoll.core.errors import UsageError
from atoll.dashboard.links import LoginLinks, links_folder, list_dashboards

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of the test's own; short ones, since the path of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="a-") as folder:
        for name in ("XDG_RUNTIME_DIR", "ATOLL_STATE"):
            path = Path(folder) / name[:3]
            path.mkdir(mode=0o700)
            monkeypatch.setenv(name, str(path))
        yield


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "without TLS"),
        (["--host", "0.0.0.0", "--insecure", "--trust-header", "X-User"], "--trust-proxy"),
        (["--trust-header", "X-User", "--roles", "admins"], "admins=admin"),
        (["--trust-header", "X-User", "--roles", "admins=king"], "no role"),
        (["--trust-proxy", "proxy.example"], "no address"),
        (["--gateway", "ftp://here"], "no URL"),
        (["--gateway", "/nowhere/gateway-1.sock"], "no socket"),
        (["--link"], "no dashboard of yours runs here"),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["dashboard", "--port", "0", "--no-planner", *arguments]) in (2, 3)
    assert said in capsys.readouterr().err


def test_beyond_this_machine_it_is_not_started_beside(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gateway", "--open", "--fabric", "open://127.0.0.1:1", "--port", "0"]
    assert cli.run([*arguments, "--dashboard-at", "0.0.0.0:8090"]) == 2
    assert "without TLS" in capsys.readouterr().err


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    opened = []

    def listen(path: Path) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind(str(path))
        made.listen()
        opened.append(made)

    yield listen
    for each in opened:
        each.close()


def test_the_gateway_of_this_machine(listening: Callable[[Path], None]) -> None:
    assert find_gateway() is None
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "atoll"
    (folder / "gateway-9000.sock").touch()  # what another left
    path = folder / "gateway-9001.sock"
    listening(path)
    found = find_gateway()
    assert found is not None
    assert (found.url, found.socket) == ("http://127.0.0.1:9001", path)
    assert find_gateway("lab") is None
    assert read_gateway(str(path), None, None) == found


def test_a_gateway_that_is_named() -> None:
    found = read_gateway("https://gateway.example/v1/", None, "secret")
    assert found is not None
    assert (found.url, found.token) == ("https://gateway.example", "secret")
    assert "secret" not in repr(found)
    assert read_gateway("lab", None, None) is None  # a fleet
    with pytest.raises(UsageError):
        read_gateway(__file__, None, None)


def test_links_of_dashboards_that_run() -> None:
    assert list_dashboards() == ()
    links = LoginLinks(links_folder(8099))
    links.announce("http://127.0.0.1:8099")
    (found,) = list_dashboards()
    assert (found.url, found.pid) == ("http://127.0.0.1:8099", os.getpid())
    token = LoginLinks(found.folder).make()
    assert links.use(token)
    links.forget()
    assert list_dashboards() == ()


def wait_for(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


class TestCompanion:
    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(beside, "_PAUSES_S", (0.0,))

    def make(self, code: str, said: list[str]) -> CompanionProcess:
        made = CompanionProcess(["nothing"], said.append)
        made._command = (sys.executable, "-S", "-c", code)
        made.start()
        return made

    def test_one_that_dies_is_started_anew(self) -> None:
        said: list[str] = []
        made = self.make("import sys; sys.stdin.read()", said)
        try:
            wait_for(lambda: made.pid)
            first = made.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            wait_for(lambda: made.pid not in (None, first))
            assert said == ["nothing ended with -9 and is started anew in 0 s"]
        finally:
            made.stop()
        assert made.pid is None

    def test_one_that_cannot_work_is_not(self) -> None:
        said: list[str] = []
        made = self.make("raise SystemExit(2)", said)
        wait_for(lambda: said)
        made.stop()
        assert said == ["there is no nothing: it ended with 2"]


@pytest.mark.slow
def test_it_serves_and_ends_with_who_started_it() -> None:
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "atoll",
                "dashboard",
                "--json",
                "--no-planner",
                "--with-parent",
            ),
            *("--port", "0"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        ready = json.loads(process.stdout.readline())
        assert ready["link"].startswith(f"{ready['url']}/#token=")
        (running,) = list_dashboards()
        assert (running.url, running.pid) == (ready["url"], process.pid)
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
        assert list_dashboards() == ()
        process.stdout.close()
    finally:
        process.kill()
