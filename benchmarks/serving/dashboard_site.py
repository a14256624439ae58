"""A gateway with keys before a fake engine, and the dashboard beside it: processes as users start them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

from benchmarks.process_cpu import list_children, read_cpu_s, stop
from benchmarks.report import ROOT
from benchmarks.serving.fake_engine import MODEL
from benchmarks.serving.gateway_peers import engine

_START_S = 60.0
FLEET = ROOT / "examples" / "any-to-any.yaml"


@dataclass(frozen=True, slots=True)
class DashboardSite:
    """Where things are, and which processes to charge."""

    url: str
    gateway_pid: int
    dashboard_pid: int
    folder: Path

    def gateway_cpu_s(self) -> float:
        """CPU seconds of the gateway alone."""
        return read_cpu_s([self.gateway_pid])

    def planner_cpu_s(self) -> float:
        """CPU seconds of the dashboard and the workers that plan for it."""
        return read_cpu_s([self.dashboard_pid, *list_children(self.dashboard_pid)])

    def make_link(self) -> str:
        """Return an address that logs in once."""
        done = subprocess.run(
            [sys.executable, "-m", "atoll", "dashboard", "--link", "--json"],
            cwd=ROOT,
            env=_environment(self.folder),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return str(json.loads(done.stdout.splitlines()[-1])["link"])


class Visitor:
    """Somebody who is logged in, without a browser."""

    def __init__(self, site: DashboardSite) -> None:
        self.url = site.url
        self.cookies = CookieJar()
        self._open = urllib.request.build_opener(
            urllib.request.HTTPCookieProcessor(self.cookies)
        ).open
        token = site.make_link().partition("#token=")[2]
        self.csrf = ""
        self.csrf = json.loads(self.post("/atoll/v1/session", {"token": token}))["csrf"]
        self._wait_for_planner()

    def _wait_for_planner(self) -> None:
        """Wait until plans can be asked for: the planner loads for a while."""
        until_s = time.monotonic() + _START_S
        while True:
            try:
                with self._open(self.url + "/atoll/v1/fleets", timeout=60):
                    return
            except urllib.error.HTTPError as error:
                if error.code not in (502, 503) or time.monotonic() > until_s:
                    raise
                time.sleep(0.2)

    @property
    def cookie(self) -> str:
        """The header that shows who asks."""
        return "; ".join(f"{cookie.name}={cookie.value}" for cookie in self.cookies)

    def post(self, path: str, body: object) -> bytes:
        """Send JSON and return the answer, all of it."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={
                "content-type": "application/json",
                "origin": self.url,
                "x-csrf-token": self.csrf,
            },
        )
        with self._open(request, timeout=300) as answer:
            return bytes(answer.read())


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "ATOLL_STATE": str(folder / "state"),
        "XDG_RUNTIME_DIR": str(folder / "run"),
    }


def _start(folder: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start a command of Atoll's; return it and what it says as JSON once it listens."""
    with (folder / f"{arguments[0]}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "atoll", *arguments],
            cwd=ROOT,
            env=_environment(folder),
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        raise RuntimeError((folder / f"{arguments[0]}.log").read_text()[-2000:])
    return process, json.loads(said)


@contextlib.contextmanager
def open_site(folder: Path) -> Iterator[DashboardSite]:
    """Start everything, and end it again."""
    (folder / "run").mkdir(mode=0o700)
    config = folder / "gateway.yaml"
    with contextlib.ExitStack() as stack:
        fake = engine(folder)
        stack.callback(fake.stop)
        config.write_text(
            "backends:\n"
            f"  - {{id: e, url: 'http://127.0.0.1:{fake.port}', models: [{MODEL}], kind: vllm}}\n"
        )
        database = f"sqlite:///{folder / 'accounts.db'}"
        gateway, told = _start(
            folder, "gateway", "--config", str(config), "--db", database, "--port", "0", "--json"
        )
        stack.callback(stop, gateway)
        dashboard, page = _start(
            folder,
            "dashboard",
            *("--gateway", told["admin_socket"], "--fleet", str(FLEET), "--port", "0", "--json"),
        )
        stack.callback(stop, dashboard)
        yield DashboardSite(page["url"], gateway.pid, dashboard.pid, folder)
