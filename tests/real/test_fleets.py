"""Fleets of real engines under `atoll up`, on cores: engines and machines die, plans change, under load.

Clients count without end, and every number of every answer must come once.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

from tests.e2e.operated_site import Site, processes_of, until
from tests.real.counting_model import CountingModel, count, write_counting_model
from tests.real.features import CHAT, Lacks, chat, join_text
from tests.real.fleet import CORES, ROOT, Door, Json, Stream, groups_below
from tools.real_engines import RealEngine, UnavailableError, find_engine

pytestmark = [pytest.mark.slow, pytest.mark.engine]
FLEET = """\
name: lab
services:
  counting: {{model: phi-4-14b, ttft: 20s, tpot: 500ms, rate: 11/s, lengths: 512x128, only: [{gpu}]}}
pool:
  offers:
    - {{region: here, node_type: L40S:1, available: 4, usd_per_hour: 1.00}}
    - {{region: here, node_type: A100-80:1, available: 4, usd_per_hour: 2.00}}
settings: {{max_nodes_per_instance: 1}}
"""
START_S = 1200.0
"""Engines start side by side on cores that others use too."""
LONG, SHORT = 900, 120
"""Tokens of an answer that is cut, and of those that clients ask for one after the other."""
CLIENTS = 2
PAUSE_S = 0.5
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CountingModel:
    """The model, in the formats of all engines."""
    for package in ("torch", "transformers", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine' and 'fabric'")
    return write_counting_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=["vllm", "llamacpp"])
def engine(request: pytest.FixtureRequest) -> RealEngine:
    """An engine of others that can run here."""
    try:
        return find_engine(request.param, build=True)
    except UnavailableError as error:
        pytest.skip(f"{request.param} cannot run here: {error}")


@dataclass
class Counters:
    """Clients that ask for one stream after the other until the block ends, and what each of them got."""

    door: Door
    whole: list[str] = field(default_factory=list)
    """Who answered, of each answer that came as it must."""
    lost: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._over.wait(PAUSE_S):
            try:
                stream = self.door.stream(CHAT, ask_to_count(SHORT))
                said = join_text(stream)
            except (OSError, http.client.HTTPException, ValueError, Lacks) as error:
                self.lost.append(repr(error))
                continue
            if said == count(0, SHORT):
                self.whole.append(instance_of(stream))
            else:
                self.lost.append(f"{instance_of(stream)}: {said!r}")


@dataclass
class OperatedFleet:
    """A fleet as its user sees it: a file, `atoll up`, one address."""

    site: Site
    engine: RealEngine
    weights: Path
    url: str = ""
    admin_socket: str = ""

    def up(self, gpu: str) -> set[str]:
        """Bring the fleet to what its file says now, and return its instances."""
        (self.site.folder / "lab.yaml").write_text(FLEET.format(gpu=gpu))
        told = ("--on", "local", "--pretend", "--port", "0", "--yes", "--json")
        weights = ("--engine", self.engine.name, "--model", f"counting={self.weights}")
        came = json.loads(
            self.site.run("up", "lab.yaml", *told, *weights, patience_s=START_S).splitlines()[-1]
        )
        self.url, self.admin_socket = came["url"], came["admin_socket"]
        return set(came["instances"])

    def down(self, *, now: bool = False) -> None:
        """End it."""
        self.site.run("down", "lab", "--yes", *(["--now"] if now else []))

    def door(self) -> Door:
        """Return its gateway."""
        port = urlsplit(self.url).port
        assert port is not None
        return Door(port)

    def stream_at(self, instance: str) -> Stream:
        """Begin a long answer that an instance gives."""
        for _ in range(40):
            stream = self.door().stream(CHAT, ask_to_count(LONG))
            if instance_of(stream) == instance:
                return stream
            stream.close()
        raise AssertionError(f"the gateway never chose {instance}")

    def cut_streams(self) -> int:
        """Return how many streams went on elsewhere so far, by the gateway's count."""
        with closing(http.client.HTTPConnection("gateway")) as connection:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self.admin_socket)
            connection.request("GET", "/metrics")
            with connection.getresponse() as response:
                page = response.read().decode()
        found = re.findall(r'failovers_total\{[^}]*when="after"[^}]*\} (\d+)', page)
        return sum(map(int, found))

    def kill(self, instance: str, *, machine: bool) -> None:
        """Kill an engine with SIGKILL, or all that runs on its machine."""
        (home,) = self.site.folder.glob(f"state/fleets/lab/local/f-lab/i-{instance}")
        state: dict[str, Any] = json.loads((home / "state.json").read_text())
        # Below a daemon are a supervisor, `atoll join`, a supervisor, the engine.
        joined = state["processes"][0]["pid"]
        groups = groups_below(state["daemon"]["pid"] if machine else joined)
        for group in groups if machine else groups[:-2]:
            os.killpg(group, signal.SIGKILL)


def ask_to_count(tokens: int) -> Json:
    """Return a request that no other is like: equal ones would all go where the first one went."""
    return chat([{"role": "user", "content": f"{next(_NUMBERS)}: count"}], tokens)


def instance_of(stream: Stream) -> str:
    """Return the name of the instance that answers."""
    return stream.headers.get("x-atoll-node", "nobody").rpartition("/")[2]


@pytest.fixture
def fleet(engine: RealEngine, model: CountingModel, tmp_path: Path) -> Iterator[OperatedFleet]:
    """A fleet of an engine that is ended in the end, whatever happens."""
    environment = {**CORES, **engine.environment}
    paths = [str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    weights = model.gguf
    if engine.name == "vllm":
        environment["PATH"] = f"{_vllm_for_cores(engine, tmp_path)}{os.pathsep}{os.environ['PATH']}"
        weights = model.folder
    site = Site(tmp_path, **environment)
    try:
        yield OperatedFleet(site, engine, weights)
    finally:
        site.end()


def _vllm_for_cores(engine: RealEngine, folder: Path) -> Path:
    """Write a program `vllm` that says what the real one is told on cores; returns the folder it is in."""
    programs = folder / "bin"
    programs.mkdir()
    program = programs / "vllm"
    real = Path(engine.python).with_name("vllm")
    program.write_text(f'#!/bin/sh\nexec {real} "$@" --dtype float32 --enforce-eager\n')
    program.chmod(0o755)
    return programs


def test_no_answer_is_lost_to_kills_drains_and_new_plans(fleet: OperatedFleet) -> None:
    first = fleet.up("L40S")
    assert len(first) == 2
    with Counters(fleet.door()) as clients:
        # An engine dies in mid-stream: the answer goes on elsewhere, and the node starts it anew.
        victim, heir = sorted(first)
        stream, before = fleet.stream_at(victim), fleet.cut_streams()
        fleet.kill(victim, machine=False)
        assert join_text(stream) == count(0, LONG)
        assert fleet.cut_streams() > before
        until(lambda: _answers(fleet, victim), f"{victim} answers again", START_S)

        # A machine dies with all on it: the same for the answer, and `up` puts another in its place.
        stream, before = fleet.stream_at(heir), fleet.cut_streams()
        fleet.kill(heir, machine=True)
        assert join_text(stream) == count(0, LONG)
        assert fleet.cut_streams() > before
        until(lambda: fleet.site.ready() == {victim}, f"{heir} is missed")
        second = fleet.up("L40S")
        assert len(second) == 2
        assert second & first == {victim}

        # Another plan, on other GPUs: what stands is drained once the new ones serve, and ends.
        stream = fleet.stream_at(victim)
        third = fleet.up("A100-80")
        assert join_text(stream) == count(0, LONG)
        assert not third & second
        until(lambda: fleet.site.ready() == third, "what was replaced has ended", START_S)
        until(lambda: third <= set(clients.whole), "the new ones are asked")
    assert clients.lost == []
    assert first | second | third == set(clients.whole)
    fleet.down()
    assert processes_of(fleet.site.folder / "state") == []


def _answers(fleet: OperatedFleet, instance: str) -> bool:
    """Whether an instance serves, and the gateway asks it."""
    stream = fleet.door().stream(CHAT, ask_to_count(1))
    return join_text(stream) == count(0, 1) and instance_of(stream) == instance
