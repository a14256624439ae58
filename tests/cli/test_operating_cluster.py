"""The verbs over a Kubernetes API in this process: up, adopt from elsewhere, what goes wrong, down."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from atoll.catalog.catalog import Catalog
from atoll.cli import main as cli
from atoll.cli import operate as operate_verb
from atoll.cli.operating import TerminalListener
from atoll.control.decision.decide import MakePlan
from atoll.control.operation import live_operation, rollout
from atoll.control.operation.fleet_home import home_of
from atoll.deploy.kubernetes.kube_client import HttpAnswer, KubeClient
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from tests.cli.test_operating import FLEET
from tests.deploy.kubernetes.tiny_api import TinyApi

Captured = pytest.CaptureFixture[str]
L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.count": "1"}
FABRIC = ("--fabric", "open://127.0.0.1:1")


class LivelyApi(TinyApi):
    """A cluster whose machines act between any two questions: pods come, fail or become ready, and go."""

    def __init__(self, nodes: int = 4) -> None:
        super().__init__(time.time())
        self.waiting: dict[str, str] | None = None
        for number in range(nodes):
            self.add_node(f"n{number}", L4, 1)

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> HttpAnswer:
        self.now_s = time.time()
        self.step()
        if self.waiting is None:
            self.make_ready()
        else:
            for key, _ in list(self.of("pods")):
                state = {"name": "engine", "ready": False, "state": {"waiting": self.waiting}}
                self.set_status(key[2], phase="Pending", containerStatuses=[state])
        self.end_pods()
        return super().ask(method, path, query=query, body=body, content_type=content_type)

    def left(self) -> list[tuple[str, str, str]]:
        return [key for key in self.objects if key[0] not in ("nodes", "leases", "events")]


@pytest.fixture(autouse=True)
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LivelyApi:
    made = LivelyApi()

    def connect(
        settings: KubernetesSettings, catalog: Catalog | None = None, fleet: str = ""
    ) -> KubernetesDeployer:
        client = KubeClient(made, settings.namespace)
        return KubernetesDeployer(client, settings, catalog, fleet=fleet)

    def quick(deadline_s: float = 60.0) -> MakePlan:
        del deadline_s
        return lambda problem: solve(problem, PlanRequest(effort=Effort(cached=False)))

    monkeypatch.setattr(KubernetesDeployer, "connect", connect)
    monkeypatch.setattr(rollout, "make_planner", quick)
    monkeypatch.setattr(live_operation, "make_planner", quick)
    monkeypatch.setattr(rollout, "LOOK_ELSEWHERE_S", 0.01)
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ATOLL_FABRIC", raising=False)
    monkeypatch.chdir(tmp_path)
    write(1)
    return made


def write(rate: int) -> None:
    text = FLEET.replace("region: here", "region: cluster").replace("rate: 1/s", f"rate: {rate}/s")
    Path("lab.yaml").write_text(text)


def run(capsys: Captured, *args: str, code: int = 0) -> str:
    capsys.readouterr()
    found = cli.run(list(args))
    said = capsys.readouterr()
    assert found == code, said.err
    return said.out if code == 0 else said.err


def bring_up(capsys: Captured) -> list[str]:
    said = run(capsys, "up", "lab.yaml", "--on", "kubernetes", *FABRIC, "--yes", "--json")
    names: list[str] = json.loads(said.splitlines()[-1])["instances"]
    return names


def rows(capsys: Captured, *args: str) -> dict[str, str]:
    (found,) = json.loads(run(capsys, "status", *args, "--json"))
    return {row["instance"]: row["state"] for row in found["operated"]["instances"]}


def test_a_fleet_comes_is_adopted_elsewhere_grows_and_goes(
    api: LivelyApi, capsys: Captured, tmp_path: Path
) -> None:
    first = bring_up(capsys)
    assert first
    assert rows(capsys, "lab") == dict.fromkeys(first, "ready")
    # A controller with an empty folder of its own knows what runs, and starts nothing twice.
    there = ("--state", str(tmp_path / "pod"))
    operate = ("operate", "lab.yaml", "--on", "kubernetes", *FABRIC, *there, "--once", "--yes")
    run(capsys, *operate)
    assert rows(capsys, "lab") == dict.fromkeys(first, "ready")
    write(4)
    shown = run(capsys, *operate)
    assert f"{len(first)} instance" in shown
    grown = rows(capsys, *there)
    assert set(first) < set(grown)
    # The first one hears of it the same way.
    assert set(rows(capsys, "lab")) == set(grown)
    run(capsys, "down", "lab", "--yes")
    assert api.left() == []


def test_an_image_that_does_not_pull_is_said_and_leaves_nothing(
    api: LivelyApi, capsys: Captured
) -> None:
    api.waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    said = run(capsys, "up", "lab.yaml", "--on", "kubernetes", *FABRIC, "--yes", code=1)
    (line,) = (line for line in said.splitlines() if line.startswith("error:"))
    assert "ImagePullBackOff" in line
    assert api.left() == []
    kinds = [event.kind for event in home_of("lab").history.read()]
    assert "failure" in kinds
    assert "ImagePullBackOff" in run(capsys, "status", "lab")
    # Put right, it comes up.
    api.waiting = None
    first = bring_up(capsys)
    assert rows(capsys, "lab") == dict.fromkeys(first, "ready")
    assert "ImagePullBackOff" not in run(capsys, "status", "lab")


@pytest.mark.slow
def test_when_growing_fails_the_old_goes_on(api: LivelyApi, capsys: Captured) -> None:
    first = bring_up(capsys)
    write(4)
    api.max_pods = len(first)
    said = run(capsys, "up", "lab.yaml", *FABRIC, "--yes", code=1)
    assert "exceeded quota" in said
    states = rows(capsys, "lab")
    assert {name: states[name] for name in first} == dict.fromkeys(first, "ready")
    assert "exceeded quota" in run(capsys, "status", "lab")
    pods = [key for key in api.left() if key[0] == "pods"]
    assert len(pods) == len(first)


def test_another_controller_is_not_disturbed(api: LivelyApi, capsys: Captured) -> None:
    first = bring_up(capsys)
    target = KubernetesDeployer(KubeClient(api, "default"), KubernetesSettings())
    assert target.lease("lab", "somebody", 90).acquire(time.time()) is not None
    write(4)
    said = run(capsys, "up", "lab.yaml", *FABRIC, "--yes", code=1)
    assert "another controller operates this fleet" in said
    assert "another controller operates this fleet" in run(capsys, "down", "lab", "--yes", code=1)
    assert set(rows(capsys, "lab")) == set(first)


def test_who_says_no_changes_nothing(
    api: LivelyApi, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(TerminalListener, "check_can_ask", lambda _listener: None)

    def refuse(listener: object) -> bool:
        asked.append(listener)
        return False

    monkeypatch.setattr(TerminalListener, "_ask", refuse)
    shown = run(capsys, "up", "lab.yaml", "--on", "kubernetes", *FABRIC)
    assert "cost: $0.00/h -> $" in shown
    assert len(asked) == 1
    assert api.left() == []
    assert home_of("lab").read() is None
    assert home_of("lab").history.read() == []


class FewTurns(threading.Event):
    """Told to stop after so many waits."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.left = turns

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        self.left -= 1
        if self.left <= 0:
            self.set()
        return self.is_set()


def operate_for(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def stopping(_: str) -> Iterator[threading.Event]:
        yield FewTurns(turns)

    monkeypatch.setattr(operate_verb, "stopping", stopping)


def test_a_controller_asks_once_and_follows_the_file(
    api: LivelyApi, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bring_up(capsys)
    answers = [False, True]
    asked: list[object] = []

    def answer(listener: object) -> bool:
        asked.append(listener)
        return answers[len(asked) - 1]

    monkeypatch.setattr(TerminalListener, "check_can_ask", lambda _listener: None)
    monkeypatch.setattr(TerminalListener, "_ask", answer)
    write(4)
    operate_for(3, monkeypatch)
    run(capsys, "operate", "lab", *FABRIC)
    # What was refused is not asked again, and not done.
    assert len(asked) == 1
    assert set(rows(capsys, "lab")) == set(first)
    operate_for(3, monkeypatch)
    run(capsys, "operate", "lab", *FABRIC)
    assert len(asked) == 2
    grown = rows(capsys, "lab")
    assert set(first) < set(grown)
    assert set(grown.values()) == {"ready"}
    texts = [event.text for event in home_of("lab").history.read()]
    assert texts.count("a change was refused") == 1
    assert texts[-1] == "ends; the fleet goes on serving"
    # Given back, so that the next one need not wait.
    lease = KubernetesDeployer(KubeClient(api, "default"), KubernetesSettings()).lease("lab", "me")
    assert lease.acquire(time.time()) is not None


def test_a_broken_file_is_told_once_and_changes_nothing(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bring_up(capsys)

    class Breaks(FewTurns):
        def wait(self, timeout: float | None = None) -> bool:
            Path("lab.yaml").write_text("models: {")
            return super().wait(timeout)

    @contextlib.contextmanager
    def stopping(_: str) -> Iterator[threading.Event]:
        yield Breaks(4)

    monkeypatch.setattr(operate_verb, "stopping", stopping)
    run(capsys, "operate", "lab", *FABRIC, "--yes")
    told = [e.text for e in home_of("lab").history.read() if e.kind == "failure"]
    assert len(told) == 1
    assert told[0].startswith("the fleet file is not followed: ")
    assert set(rows(capsys, "lab")) == set(first)


@pytest.mark.slow
def test_a_second_controller_stands_by(
    api: LivelyApi, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bring_up(capsys)
    other = KubernetesDeployer(KubeClient(api, "default"), KubernetesSettings())
    assert other.lease("lab", "somebody", 90).acquire(time.time()) is not None
    write(4)
    operate_for(3, monkeypatch)
    run(capsys, "operate", "lab", *FABRIC, "--yes")
    assert set(rows(capsys, "lab")) == set(first)
    other.lease("lab", "somebody", 90).release()
    operate_for(3, monkeypatch)
    run(capsys, "operate", "lab", *FABRIC, "--yes")
    assert set(first) < set(rows(capsys, "lab"))
