"""Fleets as objects of a cluster: controllers, status and the end of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.control.operation.fleet_operator import FINALIZER, ClusterOperator, OperatorSettings
from atoll.deploy.kubernetes.kube_client import KubeClient
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.target import DeployError
from atoll.deploy.target_table import TargetSettings
from tests.deploy.kubernetes.tiny_api import TinyApi

CRD = Path(__file__).resolve().parents[3] / "deploy/helm/atoll/crds/fleet.yaml"
FLEET: dict[str, Any] = {
    "services": {
        "chat": {
            "model": "llama-3.1-8b",
            "ttft": "1500ms",
            "tpot": "80ms",
            "rate": "1/s",
            "lengths": "512x128",
        }
    },
    "pool": {"owned": {"cluster": {"L4:1": 4}}},
}


class FakeProcess:
    """`atoll` with arguments; `code` is how it ended."""

    def __init__(self, arguments: Sequence[str], pid: int) -> None:
        self.arguments, self.pid = tuple(arguments), pid
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = 0


class Stage:
    """An operator, the API it asks, and the processes it starts."""

    def __init__(self, folder: Path) -> None:
        self.api = TinyApi()
        self.folder = folder
        self.processes: list[FakeProcess] = []
        self.client = KubeClient(self.api, "default")
        settings = OperatorSettings(folder, KubernetesSettings(image="atoll:1"), ("--every=300s",))
        self.operator = ClusterOperator(
            self.client, settings, start=self._start, clock=lambda: self.api.now_s
        )

    def _start(self, arguments: Sequence[str]) -> FakeProcess:
        self.processes.append(FakeProcess(arguments, 100 + len(self.processes)))
        return self.processes[-1]

    def add(self, name: str = "lab", **spec: object) -> None:
        made = {"metadata": {"name": name, "generation": 1}, "spec": {"fleet": FLEET, **spec}}
        self.api._create(("fleets", "default", name), made)

    def fleet(self, name: str = "lab") -> dict[str, Any]:
        return self.api.objects["fleets", "default", name]

    def act(self, process: FakeProcess) -> None:
        """Have a controller hold the lease of its fleet, and its home be what it left."""
        holder = f"atoll operate of process {process.pid}.7 on {socket.gethostname()}"
        deployer = KubernetesDeployer(self.client, KubernetesSettings())
        assert deployer.lease("lab", holder, 1000).acquire(self.api.now_s) is not None
        home = FleetHome(self.folder / "lab" / "home")
        home.make()
        home.write(
            FleetRecord(
                name="lab",
                source="lab.yaml",
                targets=TargetSettings(names=("local",)),
                since_s=self.api.now_s,
                up=True,
            )
        )
        home.write_down("plan", "nothing runs yet")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def validate(status: object) -> None:
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["status"]
    # As a server in strict mode: no field that the definition does not have.
    jsonschema_rs.validate({**schema, "additionalProperties": False}, status)


def test_a_fleet_has_a_controller_of_its_own(stage: Stage) -> None:
    stage.add(target={"priority_class": "high"})
    stage.operator.turn()
    (process,) = stage.processes
    folder = stage.folder / "lab"
    assert process.arguments == (
        "operate",
        str(folder / "fleet.yaml"),
        f"--state={folder / 'home'}",
        "--on=kubernetes",
        f"--target-file={folder / 'targets.yaml'}",
        "--every=300s",
        "--yes",
    )
    assert yaml.safe_load((folder / "fleet.yaml").read_text()) == {"name": "lab", **FLEET}
    assert yaml.safe_load((folder / "targets.yaml").read_text()) == {
        "kubernetes": {"image": "atoll:1", "priority_class": "high"}
    }
    assert stage.fleet()["metadata"]["finalizers"] == [FINALIZER]
    stage.operator.turn()
    assert len(stage.processes) == 1
    # One that has ended is started again.
    process.code = 1
    stage.operator.turn()
    assert len(stage.processes) == 2


def test_changes_reach_the_controller_and_mistakes_do_not(stage: Stage) -> None:
    stage.add()
    stage.operator.turn()
    file = stage.folder / "lab" / "fleet.yaml"
    before = file.read_text()
    spec = stage.fleet()["spec"]
    spec["fleet"] = {**FLEET, "services": {"chat": {**FLEET["services"]["chat"], "rate": "fast"}}}
    stage.operator.turn()
    assert file.read_text() == before
    status = stage.fleet()["status"]
    validate(status)
    accepted, ready = status["conditions"]
    assert (status["phase"], accepted["status"], ready["status"]) == ("Invalid", "False", "False")
    assert accepted["message"].startswith("spec.fleet.services.chat.rate: ")
    spec["fleet"] = {**FLEET, "services": {"chat": {**FLEET["services"]["chat"], "rate": "9/s"}}}
    stage.operator.turn()
    # The controller reads its file again by itself; settings of the target it does not.
    assert "9/s" in file.read_text()
    assert len(stage.processes) == 1
    spec["target"] = {"image": "atoll:2"}
    stage.operator.turn()
    assert stage.processes[0].code == 0
    assert len(stage.processes) == 2


def test_a_fleet_that_is_refused_keeps_no_other_waiting(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.add("a")
    stage.add("lab")
    apply = stage.client.apply

    def refuse(manifest: dict[str, Any]) -> dict[str, Any]:
        if manifest["metadata"]["name"] == "a":
            raise DeployError("the server does not like it", kind="settings")
        return apply(manifest)

    monkeypatch.setattr(stage.client, "apply", refuse)
    with pytest.raises(DeployError, match="does not like it"):
        stage.operator.turn()
    assert [str(stage.folder / "lab" / "fleet.yaml")] == [p.arguments[1] for p in stage.processes]


def test_a_fleet_is_called_what_its_object_is_and_stays_in_its_namespace(stage: Stage) -> None:
    # By its name its Lease is found; two objects must not share one.
    stage.add(fleet={**FLEET, "name": "theirs"})
    stage.operator.turn()
    file = stage.folder / "lab" / "fleet.yaml"
    assert yaml.safe_load(file.read_text())["name"] == "lab"
    for key in ("namespace", "kubeconfig", "context"):
        stage.fleet()["spec"]["target"] = {key: "elsewhere"}
        stage.operator.turn()
        (accepted, _) = stage.fleet()["status"]["conditions"]
        assert accepted["message"] == f"spec.target.{key}: it is the operator's (fix: leave it out)"


def test_the_status_is_that_of_the_controller_that_acts(stage: Stage) -> None:
    stage.add()
    stage.operator.turn()
    assert "status" not in stage.fleet()
    stage.act(stage.processes[0])
    stage.operator.turn()
    status = stage.fleet()["status"]
    validate(status)
    assert (status["phase"], status["ready"], status["observedGeneration"]) == (
        "Changing",
        "0/0",
        1,
    )
    assert [each["text"] for each in status["decisions"]] == ["nothing runs yet"]
    # Another operator, whose controller waits, leaves it alone.
    other = Stage(stage.folder / "other")
    other.api = stage.api
    other.operator = ClusterOperator(
        stage.client,
        OperatorSettings(stage.folder / "other", KubernetesSettings()),
        start=lambda words: FakeProcess(words, 7),
        clock=lambda: stage.api.now_s,
    )
    other.operator.turn()
    assert stage.fleet()["status"] == status


def test_what_is_deleted_is_taken_down_first(stage: Stage) -> None:
    stage.add()
    stage.operator.turn()
    stage.act(stage.processes[0])
    stage.fleet()["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    stage.operator.turn()
    down = stage.processes[1]
    assert down.arguments == ("down", "--state", str(stage.folder / "lab" / "home"), "--yes")
    stage.operator.turn()
    assert stage.fleet()["metadata"]["finalizers"] == [FINALIZER]
    # A target that does not answer has let go of nothing.
    down.code = 3
    stage.operator.turn()
    validate(stage.fleet()["status"])
    stage.operator.turn()
    stage.processes[2].code = 0
    stage.operator.turn()
    assert not stage.fleet()["metadata"].get("finalizers")


def test_one_that_never_began_is_let_go(stage: Stage) -> None:
    stage.add(fleet=7)
    stage.operator.turn()
    assert not stage.processes
    stage.fleet()["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    stage.operator.turn()
    assert not stage.fleet()["metadata"].get("finalizers")


def test_the_end_of_an_operator_ends_controllers_alone(stage: Stage) -> None:
    stage.add("lab")
    stage.add("shop")
    stage.operator.turn()
    del stage.api.objects["fleets", "default", "shop"]
    stage.operator.turn()
    assert [each.code for each in stage.processes] == [None, 0]
    stage.operator.close()
    assert [each.code for each in stage.processes] == [0, 0]
