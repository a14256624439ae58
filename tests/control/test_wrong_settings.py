"""Wrong settings on real deployers: one line with a kind in the history, and nothing left half-started."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from atoll.control.decision.decide import StartInstance
from atoll.control.operation.control_loop import (
    FleetController,
    FleetPlace,
    InstanceStore,
    TrafficReport,
)
from atoll.control.operation.controller_lease import FileLease
from atoll.control.operation.fleet_history import History
from atoll.deploy.kubernetes.kube_client import KubeClient
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.slurm.runner import ProcessRunner
from atoll.deploy.slurm.slurm_deployer import SlurmDeployer
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import Deployer, FailureKind, StartOrder
from atoll.plan.plan import Flow, Instance, Node, Plan, Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from tests.deploy.kubernetes.tiny_api import TinyApi
from tests.deploy.slurm.builders import NOW_S, FakeSlurm

L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.count": "2"}
_LENGTHS = Lengths(
    input_mean=60.0, output_mean=60.0, input_mean_square=4000.0, output_mean_square=4000.0
)


class Quiet:
    """Gateways that say nothing."""

    def look(self, now_s: float) -> TrafficReport:
        del now_s
        return TrafficReport()

    def route(self, routes: Sequence[Route]) -> None:
        del routes


def make_plan(asked: Problem) -> Plan:
    offer = asked.offers[0]
    node = Node(
        id="n0", node_type=offer.node_type, market=offer.market, start=0, end=36, tp=2, region=None
    )
    one = Instance(
        id="chat-0",
        service="chat",
        role="qwen3-8b/llm/both",
        region=offer.region,
        stages=1,
        nodes=(node,),
        flows=(Flow(src="source", dst="n0", per_s=1.0), Flow(src="n0", dst="sink", per_s=1.0)),
        throughput_per_s=1.0,
        usd_per_hour=0.0,
    )
    return Plan(
        problem_hash=asked.content_hash(),
        problem_name=asked.name,
        instances=(one,),
        routes=(Route(service="chat", instances=("chat-0",), share=1.0),),
        served_fraction={"chat": 1.0},
        usd_per_hour=0.0,
        status="feasible",
        solver="by hand",
    )


def order(action: StartInstance, plan: Plan) -> StartOrder:
    del plan
    (node,) = action.instance.nodes
    command = NodeCommand("n0", node.node_type, ("atoll", "join", "{port}"), 2)
    return StartOrder(action.instance, action.labels, (command,), ready_s=60.0)


def control(
    target: Deployer, folder: Path, clock: Callable[[], float], offer: Offer
) -> FleetController:
    service = Service(
        name="chat",
        model="qwen3-8b",
        ttft_s=5.0,
        tpot_s=1.0,
        rate_per_s=1.0,
        lengths=_LENGTHS,
        phases="together",
    )
    problem = Problem(name="lab", services=(service,), offers=(offer,), settings=Settings())
    return FleetController(
        FleetPlace("lab", problem, {target.name: target}, Quiet(), lambda _: target.name, order),
        InstanceStore(folder / "instances"),
        History(folder / "history.jsonl"),
        FileLease(folder / "lease.json"),
        make_plan,
        holder="one",
        clock=clock,
    )


def told(controller: FleetController) -> list[str]:
    return [e.text for e in controller.history.read() if e.kind in ("failure", "plan", "stop")]


SLURM = Offer(region="slurm", node_type="L4:2", available=2, usd_per_hour=0.0)


@pytest.mark.parametrize(
    ("refusal", "words", "kind"),
    [
        (
            (
                "sbatch: error: Batch job submission failed: "
                "Invalid account or account/partition combination specified\n"
            ),
            "Invalid account",
            "settings",
        ),
        (
            (
                "sbatch: error: invalid partition specified: gone\n"
                "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
            ),
            "invalid partition specified: gone",
            "settings",
        ),
        (
            (
                "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: "
                "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n"
            ),
            "Job violates accounting/QOS policy",
            "quota",
        ),
    ],
)
def test_what_sbatch_refuses(tmp_path: Path, refusal: str, words: str, kind: FailureKind) -> None:
    slurm = FakeSlurm()
    slurm.refusal = refusal
    settings = SlurmSettings(work_folder=str(tmp_path / "work"), partitions=("long",))
    target = SlurmDeployer(settings, runner=slurm, clock=lambda: NOW_S)
    controller = control(target, tmp_path, lambda: NOW_S, SLURM)
    controller.turn()
    controller.turn()
    turn = controller.turn()
    assert any(words in line and "\n" not in line for line in told(controller))
    (seen,) = turn.view.instances
    assert (seen.status.state, seen.status.kind) == ("gone", kind)
    # Held back: it was asked for once.
    assert len(slurm.calls("sbatch")) == 1
    assert not list((tmp_path / "work").rglob("secrets"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"partitions": ("nope",)}, "unknown partition 'nope'")],
)
def test_a_partition_that_is_not_there_is_said_at_the_first_look(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    slurm = FakeSlurm()
    settings = SlurmSettings.parse({"work_folder": str(tmp_path / "work"), **fields})
    target = SlurmDeployer(settings, runner=slurm, clock=lambda: NOW_S)
    controller = control(target, tmp_path, lambda: NOW_S, SLURM)
    assert controller.turn().unreachable == ["slurm"]
    assert any(words in line and "\n" not in line for line in told(controller))
    assert slurm.calls("sbatch") == []


def test_where_slurm_is_not_installed_it_is_said(tmp_path: Path) -> None:
    settings = SlurmSettings(work_folder=str(tmp_path / "work"))
    target = SlurmDeployer(settings, runner=ProcessRunner({"PATH": str(tmp_path)}))
    controller = control(target, tmp_path, time.time, SLURM)
    assert controller.turn().unreachable == ["slurm"]
    assert any("cannot run squeue" in line and "login node" in line for line in told(controller))


def test_a_job_whose_node_never_comes_has_failed_of_capacity(tmp_path: Path) -> None:
    slurm, now_s = FakeSlurm(), [NOW_S]
    settings = SlurmSettings(work_folder=str(tmp_path / "work"), partitions=("long",))
    target = SlurmDeployer(settings, runner=slurm, clock=lambda: now_s[0])
    controller = control(target, tmp_path, lambda: now_s[0], SLURM)
    controller.turn()
    slurm.set_state("100", job_state="PENDING", state_reason="ReqNodeNotAvail, UnavailableNodes:n1")
    turn = controller.turn()
    assert turn.view.instances[0].status.kind == "capacity"
    assert any("did not start: the nodes it needs are down" in line for line in told(controller))
    # It is cancelled, so that it does not come after all when nobody expects it.
    assert ("scancel", "100") in slurm.calls("scancel")


def kubernetes(api: TinyApi, folder: Path) -> FleetController:
    api.add_node("a", L4, 2)
    settings = KubernetesSettings(schedule_s=30.0)
    target = KubernetesDeployer(KubeClient(api, "default"), settings, clock=lambda: api.now_s)
    offer = Offer(region="cluster", node_type="L4:2", market="owned", available=1, usd_per_hour=0.0)
    return control(target, folder, lambda: api.now_s, offer)


def left(api: TinyApi) -> list[tuple[str, str, str]]:
    return [key for key in api.objects if key[0] not in ("nodes", "events", "leases")]


def test_a_quota_of_pods(tmp_path: Path) -> None:
    api = TinyApi()
    api.max_pods = 0
    controller = kubernetes(api, tmp_path)
    controller.turn()
    api.step()
    turn = controller.turn()
    assert turn.view.instances[0].status.kind == "quota"
    assert any("did not start: " in line and "exceeded quota" in line for line in told(controller))
    api.step()
    assert left(api) == []


@pytest.mark.parametrize(
    ("reason", "message", "kind"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "atoll:latest"', "image"),
        ("InvalidImageName", 'couldn\'t parse image name "Atoll::1"', "image"),
        ("CreateContainerConfigError", 'secret "hub" not found', "settings"),
    ],
)
def test_what_a_pod_waits_for_in_vain(
    tmp_path: Path, reason: str, message: str, kind: FailureKind
) -> None:
    api = TinyApi()
    controller = kubernetes(api, tmp_path)
    controller.turn()
    api.step()
    ((_, _, pod), _), *_ = api.of("pods")
    waiting = {"waiting": {"reason": reason, "message": message}}
    api.set_status(pod, phase="Pending", containerStatuses=[{"name": "engine", "state": waiting}])
    turn = controller.turn()
    assert turn.view.instances[0].status.kind == kind
    assert any(f"did not start: {reason}: {message}" in line for line in told(controller))
    api.step()
    api.end_pods()
    assert left(api) == []


def test_a_pod_that_no_machine_takes(tmp_path: Path) -> None:
    api = TinyApi()
    controller = kubernetes(api, tmp_path)
    for _, node in api.of("nodes"):
        node["status"]["allocatable"]["nvidia.com/gpu"] = "2"
    controller.turn()
    for _, node in api.of("nodes"):
        node["status"]["allocatable"]["nvidia.com/gpu"] = "0"
    api.step()
    assert controller.turn().view.instances[0].status.state == "starting"
    api.advance(31.0)
    turn = controller.turn()
    assert turn.view.instances[0].status.kind == "capacity"
    assert any("Insufficient nvidia.com/gpu" in line for line in told(controller))
