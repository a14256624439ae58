"""Instances come, serve, change, drain and go, against an API in this process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atoll.deploy.kubernetes.kube_client import HttpAnswer, KubeClient
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_lease import write_time
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.labels import object_labels, workload_name
from atoll.deploy.kubernetes.manifests import render_instance
from atoll.deploy.target import Deployer, DeployError, FailureKind, InstanceStatus
from atoll.plan.plan import Market
from tests.deploy.kubernetes.builders import build_order
from tests.deploy.kubernetes.tiny_api import ControllerDiedError, TinyApi

L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.count": "1"}
T4 = {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.count": "4"}
ROOT = Path(__file__).resolve().parents[3]


class Cluster:
    """Four machines, their API, and a deployer to it."""

    def __init__(self, **settings: Any) -> None:
        self.api = TinyApi()
        for name in ("a", "b", "c"):
            self.api.add_node(name, L4, 1)
        self.api.add_node("d", T4, 4)
        self.settings = KubernetesSettings(**settings)
        self.client = KubeClient(self.api, "default")
        self.deployer = KubernetesDeployer(
            self.client, self.settings, clock=lambda: self.api.now_s, fleet="lab"
        )

        self.target: Deployer = self.deployer

    def settle(self) -> None:
        self.api.step()
        self.api.make_ready()

    def only(self) -> InstanceStatus:
        (status,) = self.deployer.list("lab")
        return status

    def left(self) -> list[tuple[str, str, str]]:
        return [key for key in self.api.objects if key[0] not in ("nodes", "leases", "events")]


def test_an_instance_comes_becomes_ready_drains_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    cluster = Cluster()
    order = build_order(types=("L4:1", "T4:4"), secrets=(("HUB", str(tmp_path / "token")),))
    started = cluster.target.start(order)
    assert (started.state, started.labels) == ("starting", order.labels)
    cluster.settle()
    status = cluster.only()
    assert (status.state, status.hosts) == ("ready", ("a", "d"))
    cluster.deployer.drain(status.handle, 0)
    cluster.api.step()
    draining = cluster.only()
    assert draining.state == "draining"
    assert draining.since_s == cluster.api.now_s
    assert draining.ends_s == cluster.api.now_s + cluster.settings.drain_s
    # Streams run: time alone within the grace takes nothing away, and asking again changes nothing.
    cluster.api.advance(300)
    cluster.deployer.drain(status.handle, 0)
    cluster.api.step()
    assert len(list(cluster.api.of("pods"))) == 2
    assert cluster.only() == draining
    cluster.api.end_pods()
    assert cluster.deployer.list("lab") == ()
    assert cluster.left() == []
    cluster.deployer.drain(status.handle, 0)
    cluster.deployer.stop(status.handle, 0)


def test_a_plan_changes_make_before_break() -> None:
    cluster = Cluster()
    cluster.deployer.start(build_order("old"))
    cluster.settle()
    cluster.deployer.start(build_order("new", plan="p2"))
    cluster.settle()
    assert {s.labels.plan: s.state for s in cluster.deployer.list("lab")} == {
        "p1": "ready",
        "p2": "ready",
    }
    cluster.deployer.drain(workload_name("lab", "old"), 0)
    cluster.api.step()
    cluster.api.end_pods()
    assert [s.labels.instance for s in cluster.deployer.list("lab")] == ["new"]


def test_starting_twice_changes_nothing() -> None:
    cluster = Cluster()
    first = cluster.deployer.start(build_order())
    versions = {
        key: made["metadata"]["resourceVersion"] for key, made in cluster.api.objects.items()
    }
    assert cluster.deployer.start(build_order()) == first
    assert versions == {
        key: made["metadata"]["resourceVersion"] for key, made in cluster.api.objects.items()
    }


@given(st.integers(0, 6), st.booleans())
def test_a_controller_that_dies_between_any_two_writes_is_finished_or_cleaned_up(
    writes: int, clean_up: bool
) -> None:
    cluster = Cluster()
    order = build_order(types=("L4:1", "T4:4"))
    cluster.api.fail_after = writes
    try:
        cluster.deployer.start(order)
    except ControllerDiedError:
        assert writes < 5
    cluster.api.fail_after = None
    cluster.settle()
    if clean_up:
        for status in cluster.deployer.list("lab"):
            cluster.deployer.stop(status.handle, 0)
        cluster.api.advance(2)
        assert cluster.left() == []
        return
    cluster.deployer.start(order)
    cluster.settle()
    assert cluster.only().state == "ready"
    assert len(list(cluster.api.of("pods"))) == 2


@given(st.integers(0, 7))
@pytest.mark.slow
def test_a_controller_that_dies_while_it_drains_leaves_no_orphan(writes: int) -> None:
    cluster = Cluster()
    handle = cluster.deployer.start(build_order(types=("L4:1", "T4:4"))).handle
    cluster.settle()
    cluster.api.fail_after = writes
    try:
        cluster.deployer.drain(handle, 0)
    except ControllerDiedError:
        assert writes < 6
    cluster.api.fail_after = None
    cluster.api.step()
    cluster.api.end_pods()
    if writes == 0:
        assert cluster.only().state == "ready"
    else:
        assert cluster.left() == []


def test_stopping_does_not_wait_for_streams() -> None:
    cluster = Cluster()
    handle = cluster.deployer.start(build_order()).handle
    cluster.settle()
    cluster.deployer.stop(handle, 0)
    cluster.api.step()
    cluster.api.advance(1)
    assert cluster.left() == []


def test_half_an_instance_says_so_and_fails_in_time() -> None:
    cluster = Cluster()
    cluster.api.fail_after = 1
    with pytest.raises(ControllerDiedError):
        cluster.deployer.start(build_order(ready_s=60))
    cluster.api.fail_after = None
    assert (cluster.only().state, cluster.only().reason) == ("starting", "0 of 1 nodes applied")
    cluster.api.advance(61)
    assert cluster.only().state == "failed"
    assert cluster.only().reason.startswith("not ready after 60 s")


def test_what_cannot_be_finished_does_not_stay() -> None:
    cluster = Cluster()
    allowed = ("configmaps", "services", "secrets", "statefulsets")
    groups = ["", "apps", "coordination.k8s.io"]
    verbs = ["get", "list", "create", "patch", "delete"]
    rule = {"apiGroups": groups, "resources": [*allowed, "leases", "pods", "events"]}
    cluster.api.rules = [
        {**rule, "verbs": ["get", "list", "delete"]},
        {**rule, "resources": ["configmaps"], "verbs": verbs},
    ]
    with pytest.raises(DeployError, match="refuses to apply StatefulSet"):
        cluster.deployer.start(build_order())
    cluster.api.step()
    assert cluster.left() == []


def test_fleets_in_one_namespace_do_not_see_each_other() -> None:
    cluster = Cluster()
    cluster.deployer.start(build_order())
    cluster.deployer.start(build_order(fleet="other"))
    assert [s.labels.fleet for s in cluster.deployer.list("lab")] == ["lab"]


def test_what_others_own_is_not_taken_over() -> None:
    cluster = Cluster()
    order = build_order()
    manifest = render_instance(order, cluster.settings, cluster.deployer._catalog)[-1]
    cluster.client.apply(manifest)
    name = manifest["metadata"]["name"]
    cluster.api.edit("StatefulSet", name, ("spec", "replicas"), 0, "kubectl")
    with pytest.raises(DeployError, match=r"apply StatefulSet .*kubectl") as error:
        cluster.client.apply(manifest)
    assert error.value.kind == "settings"
    # A field that only they set stays when ours are applied.
    cluster.api.edit("StatefulSet", name, ("spec", "replicas"), 1, "kubectl")
    cluster.api.edit("StatefulSet", name, ("metadata", "labels", "team"), "blue", "kubectl")
    assert cluster.client.apply(manifest)["metadata"]["labels"]["team"] == "blue"
    # One of ours that is left out goes.
    less = {**manifest, "metadata": {**manifest["metadata"], "annotations": {}}}
    assert not cluster.client.apply(less)["metadata"].get("annotations")


def test_what_is_not_ours_is_not_deleted() -> None:
    cluster = Cluster()
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}}
    cluster.client.apply(made)
    with pytest.raises(DeployError, match="not an instance of Atoll"):
        cluster.deployer.stop("settings", 0)
    assert cluster.client.get("ConfigMap", "settings") is not None


WAITING = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
CRASHED = {"waiting": {"reason": "CrashLoopBackOff"}}
BAD_EXIT = {"terminated": {"exitCode": 2, "message": "loading\nno such model: qwen"}}


@pytest.mark.parametrize(
    ("container", "kind", "words"),
    [
        ({"state": WAITING}, "image", "ImagePullBackOff: Back-off"),
        (
            {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "secret x"}}},
            "settings",
            "CreateContainerConfigError: secret x",
        ),
        (
            {"state": CRASHED, "lastState": {"terminated": {"reason": "OOMKilled"}}},
            "memory",
            "OOMKilled",
        ),
        (
            {"state": CRASHED, "lastState": BAD_EXIT, "restartCount": 2},
            "settings",
            "CrashLoopBackOff: its engine ended with code 2: no such model: qwen",
        ),
        ({"state": CRASHED, "lastState": BAD_EXIT, "restartCount": 1}, None, "no such model"),
    ],
)
def test_a_container_that_does_not_run_says_why(
    container: dict[str, Any], kind: FailureKind | None, words: str
) -> None:
    cluster = Cluster()
    handle = cluster.deployer.start(build_order()).handle
    cluster.api.step()
    cluster.api.set_status(f"{handle}-0-0", phase="Pending", containerStatuses=[container])
    status = cluster.only()
    assert (status.state, status.kind) == ("failed" if kind else "starting", kind)
    assert words in status.reason
    assert "\n" not in status.reason


def test_a_pod_without_a_machine_is_given_time_and_then_counts_as_no_capacity() -> None:
    cluster = Cluster(schedule_s=100)
    cluster.deployer.start(build_order(types=("H100:8",)))
    cluster.api.step()
    assert cluster.only().state == "starting"
    assert "Insufficient nvidia.com/gpu" in cluster.only().reason
    cluster.api.advance(101)
    assert (cluster.only().state, cluster.only().kind) == ("failed", "capacity")


def test_a_quota_that_is_used_up_is_told_from_its_event() -> None:
    cluster = Cluster()
    cluster.api.max_pods = 0
    cluster.deployer.start(build_order())
    cluster.api.step()
    assert (cluster.only().state, cluster.only().kind) == ("failed", "quota")
    assert "exceeded quota" in cluster.only().reason


def test_a_machine_that_does_not_answer_and_one_that_is_taken_away() -> None:
    cluster = Cluster()
    handle = cluster.deployer.start(build_order()).handle
    cluster.settle()
    pod = f"{handle}-0-0"
    at = write_time(cluster.api.now_s)
    lost = {"type": "Ready", "status": "Unknown", "lastTransitionTime": at}
    cluster.api.set_status(pod, conditions=[lost])
    assert cluster.only().reason == "machine a does not answer"
    assert cluster.only().state == "failed"
    cluster.settle()
    taken = {"type": "DisruptionTarget", "status": "True", "message": "preempted by x"}
    cluster.client.delete("Pod", pod, grace_s=40)
    cluster.api.set_status(pod, conditions=[taken])
    status = cluster.only()
    assert (status.state, status.reason) == ("draining", "preempted by x")
    assert status.ends_s == cluster.api.now_s + 40


def test_a_cordon_is_a_notice_whose_end_comes_nearer() -> None:
    cluster = Cluster(drain_s=50)
    cluster.deployer.start(build_order(ready_s=200))
    cluster.settle()
    assert (cluster.only().ends_s, cluster.only().leave) == (None, False)
    (before, _) = cluster.deployer.offers()
    machine = cluster.api.objects["nodes", "", "a"]
    machine["spec"]["unschedulable"] = True
    status = cluster.only()
    assert (status.state, status.reason) == ("ready", "machine a is cordoned")
    assert status.leave
    # What it holds there counts: a plan subtracts it from what there is.
    assert cluster.deployer.offers()[0] == before
    # Time for another to start: evictions wait for it.
    ends_s = cluster.api.now_s + 200
    assert status.ends_s == ends_s
    cluster.api.advance(150)
    assert cluster.only().ends_s == ends_s
    # The machine itself says when; another controller knows it, too.
    changed = {"time": write_time(ends_s - 300), "fieldsV1": {"f:spec": {"f:unschedulable": {}}}}
    machine["metadata"]["managedFields"] = [changed]
    assert cluster.only().ends_s == ends_s - 100
    machine["spec"]["unschedulable"] = False
    assert cluster.only().ends_s is None


def test_where_pods_may_be_evicted_a_cordon_leaves_time_for_streams_alone() -> None:
    cluster = Cluster(drain_s=50, evictable=True)
    cluster.deployer.start(build_order(ready_s=200))
    cluster.settle()
    cluster.api.objects["nodes", "", "a"]["spec"]["unschedulable"] = True
    assert cluster.only().ends_s == cluster.api.now_s + 50


@pytest.mark.parametrize("gone", [False, True])
def test_a_machine_that_died_is_a_loss_at_once(gone: bool) -> None:
    cluster = Cluster()
    cluster.deployer.start(build_order())
    cluster.settle()
    (pod,) = (key[2] for key, _ in cluster.api.of("pods"))
    # As the controller of nodes leaves it: not ready, without a reason.
    cluster.api.set_status(pod, conditions=[{"type": "Ready", "status": "False"}])
    assert cluster.only().state == "starting"
    if gone:
        del cluster.api.objects["nodes", "", "a"]
    else:
        cluster.api.objects["nodes", "", "a"]["status"]["conditions"][0]["status"] = "Unknown"
    status = cluster.only()
    assert (status.state, status.kind) == ("failed", "ended")
    assert status.reason == "machine a does not answer"


def test_what_lost_labels_is_known_by_its_name_or_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster()
    handle = cluster.deployer.start(build_order()).handle
    cluster.deployer.start(build_order("other"))
    cluster.settle()
    for plural in ("pods", "statefulsets"):
        _, made = next(iter(cluster.api.of(plural)))
        del made["metadata"]["labels"]["app.kubernetes.io/instance"]
    anchor = cluster.api.objects["configmaps", "default", handle]
    anchor["data"]["nodes"] = "many"
    anchor["metadata"]["annotations"]["atoll-serving.github.io/ready-s"] = "soon"
    damaged, whole = sorted(cluster.deployer.list("lab"), key=lambda s: s.handle != handle)
    assert (damaged.state, whole.state) == ("ready", "ready")
    # Its set still says whose it is.
    anchor["metadata"]["annotations"] = {}
    assert {s.labels.instance for s in cluster.deployer.list("lab")} == {"chat-0", "other"}
    told = capsys.readouterr().err
    assert told.count("has lost labels: it is known by its name") == 2
    cluster.api.objects["statefulsets", "default", f"{handle}-0"]["metadata"]["annotations"] = {}
    assert [s.handle for s in cluster.deployer.list("lab")] == [whole.handle]
    cluster.deployer.list("lab")
    assert capsys.readouterr().err.count(f"ConfigMap {handle} has lost what says whose it is") == 1
    assert ("configmaps", "default", handle) in cluster.api.objects


def test_a_pod_that_is_evicted_again_and_again_fails_in_time() -> None:
    cluster = Cluster()
    cluster.deployer.start(build_order(ready_s=100))
    for _ in range(3):
        cluster.api.step()
        assert cluster.only().state == "starting"
        cluster.api.advance(40)
        (pod,) = (key for key, _ in cluster.api.of("pods"))
        del cluster.api.objects[pod]
    cluster.api.step()
    status = cluster.only()
    assert status.state == "failed"
    assert status.reason.startswith("not ready after 100 s")
    # Once it has been ready, a start begins anew.
    cluster.settle()
    assert cluster.only().state == "ready"
    (pod,) = (key for key, _ in cluster.api.of("pods"))
    del cluster.api.objects[pod]
    cluster.api.step()
    assert cluster.only().state == "starting"


def test_nodes_that_are_alike_come_restart_and_go_together() -> None:
    cluster = Cluster()
    cluster.api.absent.clear()
    order = build_order(types=("T4:4", "L4:1", "L4:1"))
    status = cluster.deployer.start(order)
    assert (status.state, status.unfinished) == ("starting", False)
    cluster.settle()
    assert cluster.only().state == "ready"
    assert {key[0] for key in cluster.left()} == {"configmaps", "leaderworkersets", "pods"}
    before = {key[2]: pod["metadata"]["uid"] for key, pod in cluster.api.of("pods")}
    assert set(before) == {status.handle + end for end in ("-0", "-0-1", "-0-2")}
    assert cluster.only().hosts == ("a", "b", "d")
    # One of them is lost: all begin anew.
    del cluster.api.objects["pods", "default", f"{status.handle}-0-2"]
    cluster.api.step()
    after = {key[2]: pod["metadata"]["uid"] for key, pod in cluster.api.of("pods")}
    assert not set(before.values()) & set(after.values())
    assert cluster.only().state == "starting"
    # A label that somebody takes away changes nothing.
    cluster.settle()
    for _, made in (*cluster.api.of("leaderworkersets"), *cluster.api.of("pods")):
        made["metadata"]["labels"] = {}
    assert cluster.only().state == "ready"
    cluster.deployer.drain(status.handle, 0)
    assert cluster.only().state == "draining"
    cluster.api.step()
    cluster.api.end_pods()
    assert cluster.left() == []


@pytest.mark.parametrize("writes", range(6))
def test_a_group_that_was_left_halfway_is_finished(writes: int) -> None:
    cluster = Cluster()
    cluster.api.absent.clear()
    cluster.api.fail_after = writes
    with contextlib.suppress(ControllerDiedError):
        cluster.deployer.start(build_order(types=("L4:1", "L4:1")))
    cluster.api.fail_after = None
    cluster.deployer.start(build_order(types=("L4:1", "L4:1")))
    cluster.settle()
    assert (cluster.only().state, cluster.only().unfinished) == ("ready", False)
    assert len(list(cluster.api.of("leaderworkersets"))) == 1


def test_nodes_that_cannot_be_a_group_are_sets_or_refused() -> None:
    unlike = build_order(types=("L4:1", "L4:1", "T4:4"))
    cluster = Cluster()
    cluster.api.absent.clear()
    cluster.deployer.start(unlike)
    assert len(list(cluster.api.of("statefulsets"))) == 3
    for absent, order, why in (
        (True, build_order(types=("L4:1", "L4:1")), "has no LeaderWorkerSet"),
        (False, unlike, "want different machines"),
    ):
        cluster = Cluster(multi_node="leader-worker-set")
        if not absent:
            cluster.api.absent.clear()
        with pytest.raises(DeployError, match=why):
            cluster.deployer.start(order)
        assert cluster.left() == []
    cluster = Cluster(multi_node="stateful-sets")
    cluster.api.absent.clear()
    cluster.deployer.start(build_order(types=("L4:1", "L4:1")))
    assert len(list(cluster.api.of("statefulsets"))) == 2


@pytest.mark.parametrize(
    ("market", "region", "host", "stands"),
    [
        ("owned", "cluster", None, "a"),
        ("owned", "cluster", "c", "c"),
        ("spot", "cluster", None, "s"),
        ("owned", "east", None, "e"),
        ("spot", "east", None, None),
        ("owned", "aws/us-west", None, "w"),
    ],
)
def test_pods_stand_where_they_are_planned(
    market: Market, region: str, host: str | None, stands: str | None
) -> None:
    cluster = Cluster(regions={"us-west": "aws/us-west"})
    cluster.api.add_node("w", {**L4, "topology.kubernetes.io/region": "us-west"}, 1)
    spot = {**L4, "cloud.google.com/gke-spot": "true"}
    taint = {"key": "cloud.google.com/gke-spot", "effect": "NoSchedule"}
    cluster.api.add_node("s", spot, 1, taints=[taint])
    cluster.api.add_node("e", {**L4, "topology.kubernetes.io/region": "east"}, 1)
    cluster.deployer.start(build_order(market=market, region=region, host=host))
    cluster.api.step()
    assert cluster.only().hosts == ((stands,) if stands else ())
    assert "aws/us-west" in {offer.region for offer in cluster.deployer.offers()}


def test_offers_are_machines_that_can_be_had_less_what_others_hold() -> None:
    cluster = Cluster(usd_per_hour={"L4:1": 0.7, "L4:1/spot": 0.2}, market="on-demand")
    api = cluster.api
    api.add_node("spot", {**L4, "karpenter.sh/capacity-type": "spot"}, 1)
    api.add_node("unknown", {"nvidia.com/gpu.product": "Voodoo-2"}, 1)
    api.add_node("shared", {"nvidia.com/gpu.product": "NVIDIA-L4-SHARED"}, 4)
    api.add_node("cordoned", L4, 1, unschedulable=True)
    api.add_node("theirs", L4, 1, taints=[{"key": "team", "effect": "NoSchedule"}])
    api.add_node("plain", {}, 0)
    api.add_node("sick", L4, 1)
    api.objects["nodes", "", "sick"]["status"]["conditions"][0]["status"] = "Unknown"
    api.add_node("east", {**L4, "topology.kubernetes.io/region": "east"}, 1)
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    pod = {"nodeName": "d", "containers": [{"name": "x", "resources": limits}]}
    api._create(("pods", "ml", "x"), {"metadata": {"name": "x"}, "spec": pod, "status": {}})
    cluster.deployer.start(build_order())
    api.step()
    offers = [
        (o.region, o.node_type, o.market, o.available, o.usd_per_hour)
        for o in cluster.deployer.offers()
    ]
    assert offers == [
        ("cluster", "L4:1", "on-demand", 3, 0.7),
        ("cluster", "L4:1", "spot", 1, 0.2),
        ("cluster", "T4:2", "on-demand", 1, 0.0),
        ("east", "L4:1", "on-demand", 1, 0.7),
    ]


def test_pools_that_grow_are_offered_up_to_their_limit() -> None:
    stated = {"big": {"node_type": "H100:8", "max": 3}, "gone": {"node_type": "L4:1", "max": 0}}
    cluster = Cluster(node_pools=stated, market="on-demand", schedule_s=60)
    api = cluster.api
    api.add_node("h", {"cloud.google.com/gke-nodepool": "big"}, 8, unschedulable=True)
    requirements = [
        {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot", "on-demand"]},
        {
            "key": "node.kubernetes.io/instance-type",
            "operator": "In",
            "values": ["g6e.12xlarge", "m5.large"],
        },
        {"key": "topology.kubernetes.io/region", "operator": "In", "values": ["us-east-2"]},
    ]
    spec = {
        "template": {"spec": {"requirements": requirements}},
        "limits": {"nvidia.com/gpu": "16"},
    }
    api._create(("nodepools", "", "gpu"), {"metadata": {"name": "gpu"}, "spec": spec})
    node = {"karpenter.sh/nodepool": "gpu", "node.kubernetes.io/instance-type": "g6e.12xlarge"}
    api.add_node("k", {**node, "topology.kubernetes.io/region": "us-east-2"}, 4)
    named = [
        {"key": "karpenter.k8s.aws/instance-gpu-name", "operator": "In", "values": ["l4"]},
        {"key": "karpenter.k8s.aws/instance-gpu-count", "operator": "In", "values": ["1"]},
    ]
    spec = {"template": {"spec": {"requirements": named}}, "limits": {"nvidia.com/gpu": 2}}
    api._create(("nodepools", "", "small"), {"metadata": {"name": "small"}, "spec": spec})
    found = {(o.region, o.node_type, o.market): o.available for o in cluster.deployer.offers()}
    assert found["cluster", "H100:8", "on-demand"] == 2
    assert found["us-east-2", "L40S:4", "on-demand"] == 1 + 3
    assert found["us-east-2", "L40S:4", "spot"] == 3
    assert found["us-east-2", "L4:1", "on-demand"] == 2
    # A machine that is made takes longer than one that is free.
    cluster.deployer.start(build_order(types=("H100:8",), market="on-demand", gpus=8, ready_s=9e3))
    api.step()
    api.advance(600)
    assert cluster.only().state == "starting"
    api.advance(600)
    assert (cluster.only().state, cluster.only().kind) == ("failed", "capacity")


def test_offers_leave_out_what_other_fleets_and_settings_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    toleration = {"key": "team", "operator": "Equal", "value": "ml"}
    rules = [{"key": "tier", "operator": "NotIn", "values": ["slow"]}]
    cluster = Cluster(node_selector={"pool": "gpu"}, tolerations=[toleration], node_affinity=rules)
    api = cluster.api
    pool = {**L4, "pool": "gpu"}
    api.add_node("slow", {**pool, "tier": "slow"}, 1)
    for name in ("mine", "theirs"):
        api.add_node(name, pool, 1)
    api.add_node("ours", pool, 1, taints=[{**toleration, "effect": "NoSchedule"}])
    api.add_node("not", pool, 1, taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}])
    api.add_node("cloud", {"node.kubernetes.io/instance-type": "g6.xlarge", "pool": "gpu"}, 1)
    api.add_node("odd", {"nvidia.com/gpu.product": "NVIDIA-A16", "pool": "gpu"}, 1)
    api.add_node("house", {"nvidia.com/gpu.product": "NVIDIA-A16", "pool": "gpu"}, 1)
    for fleet, host in (("lab", "mine"), ("other", "theirs")):
        cluster.deployer.start(build_order(fleet, fleet=fleet, host=host))
    api.step()
    for _ in range(2):
        (offer,) = cluster.deployer.offers()
        # Its own machine counts as free, since a plan counts what it uses itself.
        assert (offer.node_type, offer.available) == ("L4:1", 3)
    assert capsys.readouterr().err.count("no such GPU: NVIDIA-A16; set gpu_names") == 1


def test_one_controller_acts_and_an_older_term_is_refused() -> None:
    cluster = Cluster()
    first = cluster.deployer.lease("lab", "one", 30)
    second = cluster.deployer.lease("lab", "two", 30)
    assert first.acquire(1000.0) == 1
    assert second.acquire(1010.0) is None
    assert first.acquire(1020.0) == 1
    handle = cluster.deployer.start(build_order(term=1)).handle
    assert second.acquire(1049.9) is None
    assert second.acquire(1050.0) == 2
    assert first.acquire(1051.0) is None
    for act in (
        lambda: cluster.deployer.start(build_order("late", term=1)),
        lambda: cluster.deployer.drain(handle, 1),
        lambda: cluster.deployer.stop(handle, 1),
    ):
        with pytest.raises(DeployError, match=r"an order of term 1 for lab, .* term 2") as caught:
            act()
        assert caught.value.kind == "superseded"
    assert [s.state for s in cluster.deployer.list("lab")] == ["starting"]
    second.release()
    assert first.acquire(1052.0) == 3
    cluster.deployer.stop(handle, 3)


def test_the_term_of_what_stands_counts_where_the_lease_is_kept_elsewhere() -> None:
    cluster = Cluster()
    handle = cluster.deployer.start(build_order(term=5)).handle
    for act in (
        lambda: cluster.deployer.start(build_order("late", term=4)),
        lambda: cluster.deployer.stop(handle, 4),
    ):
        with pytest.raises(DeployError, match="term 4 for lab") as caught:
            act()
        assert caught.value.kind == "superseded"
    cluster.deployer.start(build_order("late", fleet="other", term=4))


def test_two_who_take_a_lease_at_once_do_not_both_get_it() -> None:
    cluster = Cluster()
    lease = cluster.deployer.lease("lab", "one")
    assert lease.acquire(0.0) == 1
    read = cluster.client.get("Lease", workload_name("lab", "controller"))
    assert read is not None
    assert lease.acquire(1.0) == 1
    assert cluster.client.replace(read) is None


def test_logs_are_the_last_lines_of_every_node() -> None:
    cluster = Cluster()
    handle = cluster.deployer.start(build_order(types=("L4:1", "L4:1"))).handle
    cluster.settle()
    cluster.api.logs[f"{handle}-0-0"] = "one\ntwo\nthree\n"
    text = cluster.deployer.logs(handle, 2)
    assert text == f"== {handle}-0-0\ntwo\nthree\n== {handle}-1-0\n"
    with pytest.raises(DeployError, match="no instance stands as"):
        cluster.deployer.logs("other")


def test_a_dry_run_says_what_would_be_applied_and_asks_nothing() -> None:
    cluster = Cluster()
    orders = [build_order("a"), build_order("b", types=("L4:1", "T4:4"))]
    texts = [cluster.deployer.dry_run(order) for order in orders]
    assert cluster.api.asked == []
    for text in texts:
        for manifest in yaml.safe_load_all(text):
            cluster.client.apply(manifest)
    cluster.settle()
    assert {s.state for s in cluster.deployer.list("lab")} == {"ready"}
    for status in cluster.deployer.list("lab"):
        cluster.deployer.drain(status.handle, 0)
    cluster.api.step()
    cluster.api.end_pods()
    assert cluster.left() == []


def test_long_lists_come_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.deploy.kubernetes.kube_client.PAGE_SIZE", 2)
    cluster = Cluster()
    for index in range(5):
        cluster.deployer.start(build_order(f"i{index}"))
    assert len(cluster.deployer.list("lab")) == 5


@pytest.mark.parametrize(
    ("status", "message", "kind", "words"),
    [
        (401, "Unauthorized", "settings", "log in again"),
        (403, "cannot patch", "settings", "rbac.yaml"),
        (403, "exceeded quota: team", "quota", "quota"),
        (404, 'namespaces "x" not found', "settings", "make the namespace"),
        (422, "spec: Invalid", "settings", "settings"),
        (429, "slow down", "unreachable", "later"),
        (503, "etcd is away", "unreachable", "later"),
    ],
)
def test_refusals_are_one_line_with_a_fix(
    status: int, message: str, kind: FailureKind, words: str
) -> None:
    class Refusing(TinyApi):
        def ask(self, *_words: Any, **_more: Any) -> HttpAnswer:
            return HttpAnswer(status, b'{"message": "%s"}' % message.replace('"', "'").encode())

    client = KubeClient(Refusing(), "default")
    with pytest.raises(DeployError) as error:
        client.apply({"kind": "Pod", "metadata": {"name": "x"}})
    assert error.value.kind == kind
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_role_in_the_base_is_enough_and_grants_nothing_unused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    text = (ROOT / "deploy/kubernetes/base/rbac.yaml").read_text()
    objects = [made for made in yaml.safe_load_all(text) if "rules" in made]
    rules = [
        {**rule, "everywhere": made["kind"] == "ClusterRole"}
        for made in objects
        for rule in made["rules"]
    ]
    cluster = Cluster()
    cluster.api.rules = rules
    assert cluster.deployer.lease("lab", "one").acquire(0.0) == 1
    secrets = (("HUB", str(tmp_path / "token")),)
    cluster.deployer.offers()
    handle = cluster.deployer.start(
        build_order(types=("L4:1", "L4:1"), secrets=secrets, term=1)
    ).handle
    cluster.deployer.list("lab")
    assert cluster.deployer.lease("lab", "one").acquire(1.0) == 1
    meta = {"name": "old", "uid": "old", "labels": object_labels(build_order().labels)}
    budget = {"kind": "PodDisruptionBudget", "metadata": meta}
    cluster.api.objects["poddisruptionbudgets", "default", "old"] = budget
    for at_s in (0.0, 1000.0):
        cluster.deployer.hold_evictions("lab", at_s)
        for _, job in cluster.api.of("jobs"):
            job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    cluster.settle()
    cluster.deployer.logs(handle)
    cluster.deployer.stop(handle, 1)
    cluster.api.absent.clear()
    together = cluster.deployer.start(build_order("together", types=("L4:1", "L4:1"), term=1))
    cluster.deployer.stop(together.handle, 1)
    granted = {
        (verb, resource, rule["everywhere"])
        for rule in rules
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    # Some clusters ask for this of whoever says that an owner is to wait.
    finalizers = ("update", "configmaps/finalizers", False)
    assert granted - cluster.api.used == {finalizers}


def test_a_namespace_alone_is_enough_to_list_and_start() -> None:
    cluster = Cluster()
    text = (ROOT / "deploy/kubernetes/base/rbac.yaml").read_text()
    objects = list(yaml.safe_load_all(text))
    cluster.api.rules = [
        rule for made in objects if made["kind"] == "Role" for rule in made["rules"]
    ]
    cluster.deployer.start(build_order())
    assert cluster.only().state == "starting"
    with pytest.raises(DeployError, match="cannot list resource"):
        cluster.deployer.offers()
