"""What only a real API server can say: that it takes every manifest, and how it refuses.

Skipped where its binaries are not given; `test_cluster.py` and the in-process API say what ran instead.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.catalog.catalog import Catalog
from atoll.control.operation.fleet_operator import VERSION, ClusterOperator, OperatorSettings
from atoll.deploy.kubernetes import kube_client as client_module
from atoll.deploy.kubernetes.eviction_guard import EvictionGuard, guard_name
from atoll.deploy.kubernetes.kube_client import KubeClient, KubeTransport
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.labels import MANAGER, lease_name
from atoll.deploy.kubernetes.manifests import own, render_instance, render_secret
from atoll.deploy.target import DeployError, InstanceStatus
from tests.control.operation.test_fleet_operator import CRD, FLEET
from tests.deploy.kubernetes.builders import build_order
from tests.deploy.kubernetes.cluster import LIMITED, TokenTransport, find_binaries, run_cluster
from tests.deploy.kubernetes.test_base import BASE, FILES
from tests.deploy.kubernetes.test_chart import VALUES, render

pytestmark = pytest.mark.slow
CATALOG = Catalog.default()
_PATHS = {
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "Fleet": f"/apis/{VERSION}/namespaces/{{}}/fleets",
    "Namespace": "/api/v1/namespaces",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "ResourceQuota": "/api/v1/namespaces/{}/resourcequotas",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
}


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    binaries = find_binaries()
    if isinstance(binaries, str):
        pytest.skip(f"the in-process API and the schemas were asked instead: {binaries}")
    with run_cluster(binaries, tmp_path_factory.mktemp("kubernetes")) as path:
        yield path


@pytest.fixture(scope="module")
def api(kubeconfig: Path) -> KubeTransport:
    return TokenTransport(kubeconfig)


@pytest.fixture
def space(api: KubeTransport, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own; nobody is there to empty and delete it."""
    name = f"t{zlib.crc32(request.node.name.encode())}"
    put(api, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


def put(api: KubeTransport, made: dict[str, Any], space: str = "", **query: str) -> dict[str, Any]:
    """Apply an object as a careful person would: fields that are not known are an error."""
    path = f"{_PATHS[made['kind']].format(space)}/{made['metadata']['name']}"
    answer = api.ask(
        "PATCH",
        path,
        query={"fieldManager": "person", "fieldValidation": "Strict", **query},
        body=json.dumps(made).encode(),
        content_type="application/apply-patch+yaml",
    )
    assert answer.status < 300, answer.body.decode()
    said: dict[str, Any] = json.loads(answer.body)
    return said


def deployer(api: KubeTransport, space: str, **fields: Any) -> KubernetesDeployer:
    settings = KubernetesSettings(namespace=space, **fields)
    return KubernetesDeployer(KubeClient(api, space), settings)


def eventually(
    look: Callable[[], InstanceStatus], is_so: Callable[[InstanceStatus], bool]
) -> InstanceStatus:
    for _ in range(300):
        seen = look()
        if is_so(seen):
            return seen
        time.sleep(0.2)
    raise AssertionError(f"it stays so: {look()}")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"weights_claim": "weights", "user": 1000, "probe": "http"},
        {"weights_path": "/srv/weights", "image_pull_secrets": ("pull",), "evictable": True},
        {"secrets": {"HUB": "team/hub-token"}, "regions": {"us-east-2": "aws/us-east-2"}},
    ],
)
@pytest.mark.parametrize(
    "order",
    [
        build_order(env=(("A", "1"),)),
        build_order(types=("L4:1", "A100-80:8"), env=(("A", "1"),)),
        build_order(market="spot", region="aws/us-east-2"),
        build_order(host="m1"),
        replace(build_order(), avoid_hosts=("m1", "m2")),
        replace(build_order(gpus=0, argv=("sleep", "9")), avoid_hosts=("m1",)),
        build_order("x" * 200, fleet="Ünïcode fleet / with everything"),
    ],
    ids=["one", "pipeline", "spot", "host", "avoid", "no-gpu", "names"],
)
def test_the_server_takes_every_manifest(
    api: KubeTransport, tmp_path: Path, fields: dict[str, Any], order: Any
) -> None:
    (tmp_path / "token").write_text("very secret")
    secret = (("HUB", str(tmp_path / "token")),)
    commands = tuple(replace(command, secrets=secret) for command in order.commands)
    order = replace(order, commands=commands)
    settings = KubernetesSettings(**fields)
    anchor, *others = render_instance(order, settings, CATALOG)
    made_secret = render_secret(order, settings)
    owner = {
        "metadata": {
            "name": anchor["metadata"]["name"],
            "uid": "0b9c8a7e-1111-4222-8333-444455556666",
        }
    }
    for made in (
        anchor,
        *(own(m, owner) for m in (*others, *([made_secret] if made_secret else []))),
    ):
        said = put(api, made, "default", dryRun="All")
        assert said["kind"] == made["kind"]


def test_the_server_takes_the_base(api: KubeTransport) -> None:
    put(api, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "atoll"}})
    for name in FILES:
        for made in yaml.safe_load_all((BASE / name).read_text()):
            put(api, made, "atoll", dryRun="All")


def test_the_role_of_the_base_is_enough_and_no_more(
    api: KubeTransport, kubeconfig: Path, space: str, tmp_path: Path
) -> None:
    limited = TokenTransport(kubeconfig.with_name(LIMITED))
    here = deployer(limited, space)
    with pytest.raises(DeployError, match="cannot list resource") as caught:
        here.list("lab")
    assert caught.value.kind == "settings"
    assert "rbac.yaml" in str(caught.value.hint)
    assert "\n" not in str(caught.value)
    person = [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": LIMITED}]
    for made in yaml.safe_load_all((BASE / "rbac.yaml").read_text()):
        if made["kind"].endswith("Binding"):
            made["subjects"] = person
            made["metadata"]["name"] += "-test"
        put(api, made, space)
    (tmp_path / "token").write_text("very secret")
    order = build_order(
        types=("L4:1", "L4:1"),
        term=1,
        secrets=(("HUB", str(tmp_path / "token")),),
        env=(("A", "1"),),
    )
    holder = here.lease("lab", "one")
    assert holder.acquire(time.time()) == 1
    handle = here.start(order).handle
    (seen,) = here.list("lab")
    assert (seen.handle, seen.labels, seen.instance) == (handle, order.labels, order.instance)
    assert here.logs(handle) is not None
    assert here.offers() == ()
    here.drain(handle, 1)
    here.stop(handle, 1)
    eventually_gone(here)
    holder.release()
    with pytest.raises(DeployError, match="cannot get resource"):
        KubeClient(limited, space).get("Secret", handle)


def eventually_gone(here: KubernetesDeployer) -> None:
    for _ in range(300):
        if not here.list("lab"):
            return
        time.sleep(0.2)
    raise AssertionError(f"it is still there: {here.list('lab')}")


def test_a_quota_is_told_as_one(api: KubeTransport, space: str) -> None:
    quota: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team"},
        "spec": {"hard": {"pods": "0"}},
    }
    put(api, quota, space)
    # Nobody here counts what is used; the server asks the status alone.
    status = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
    answer = api.ask(
        "PATCH",
        f"/api/v1/namespaces/{space}/resourcequotas/team/status",
        query={},
        body=json.dumps(status).encode(),
        content_type="application/merge-patch+json",
    )
    assert answer.status < 300, answer.body
    here = deployer(api, space)
    here.start(build_order(gpus=0))
    seen = eventually(lambda: here.list("lab")[0], lambda s: s.state == "failed")
    assert seen.kind == "quota"
    assert "exceeded quota: team" in seen.reason
    here.stop(seen.handle, 0)
    eventually_gone(here)


@pytest.mark.parametrize(
    ("waiting", "kind", "words"),
    [
        (
            {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "atoll:nope"'},
            "image",
            "ImagePullBackOff: Back-off pulling image",
        ),
        (
            {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'},
            "settings",
            'secret "hub" not found',
        ),
    ],
)
def test_what_a_kubelet_reports_is_one_line_with_a_kind(
    api: KubeTransport, space: str, waiting: dict[str, str], kind: str, words: str
) -> None:
    here = deployer(api, space)
    handle = here.start(build_order(gpus=0)).handle
    eventually(lambda: here.list("lab")[0], lambda s: s.reason != "no pod yet")
    report(
        api,
        space,
        f"{handle}-0-0",
        phase="Pending",
        containerStatuses=[
            {
                "name": "engine",
                "image": "atoll:nope",
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": {"waiting": waiting},
            }
        ],
    )
    (seen,) = here.list("lab")
    assert (seen.state, seen.kind) == ("failed", kind)
    assert words in seen.reason
    assert "\n" not in seen.reason
    here.stop(handle, 0)
    eventually_gone(here)


def test_a_pod_that_no_machine_takes_and_one_whose_machine_is_never_ready(
    api: KubeTransport, space: str
) -> None:
    here = deployer(api, space, schedule_s=0.0)
    handle = here.start(build_order()).handle
    eventually(lambda: here.list("lab")[0], lambda s: s.reason != "no pod yet")
    pod, now = f"{handle}-0-0", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 60))
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
        "lastTransitionTime": now,
    }
    report(api, space, pod, phase="Pending", conditions=[unscheduled])
    (seen,) = here.list("lab")
    assert (seen.state, seen.kind) == ("failed", "capacity")
    assert "Insufficient nvidia.com/gpu" in seen.reason
    lost = {"type": "Ready", "status": "Unknown", "reason": "NodeLost", "lastTransitionTime": now}
    scheduled = {**unscheduled, "status": "True", "reason": "", "message": ""}
    report(api, space, pod, phase="Running", conditions=[scheduled, lost])
    (seen,) = here.list("lab")
    assert (seen.state, seen.kind) == ("failed", "ended")
    assert "does not answer" in seen.reason
    here.stop(handle, 0)
    eventually_gone(here)


def report(api: KubeTransport, space: str, pod: str, **status: Any) -> None:
    """Say what a kubelet would."""
    path = f"/api/v1/namespaces/{space}/pods/{pod}/status"
    body = json.dumps({"status": status}).encode()
    kind = "application/merge-patch+json"
    answer = api.ask("PATCH", path, query={}, body=body, content_type=kind)
    assert answer.status < 300, answer.body.decode()


def test_fields_of_others_are_left_and_fought_over_by_nobody(
    api: KubeTransport, space: str
) -> None:
    here = deployer(api, space)
    order = build_order(gpus=0)
    handle = here.start(order).handle
    mine = KubeClient(api, space)
    here.hold_evictions("lab", time.time())
    budget = mine.get("PodDisruptionBudget", guard_name("lab"))
    assert budget is not None
    managers = {
        entry["manager"]: entry["operation"] for entry in budget["metadata"]["managedFields"]
    }
    assert managers[MANAGER] == "Apply"
    theirs = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": guard_name("lab"), "annotations": {"team": "blue"}},
        "spec": {"maxUnavailable": 1},
    }
    path = f"{_PATHS['PodDisruptionBudget'].format(space)}/{guard_name('lab')}"
    body = json.dumps(theirs).encode()
    kind = "application/apply-patch+yaml"
    refused = api.ask("PATCH", path, query={"fieldManager": "blue"}, body=body, content_type=kind)
    assert refused.status == 409
    forced = {"fieldManager": "blue", "force": "true"}
    assert api.ask("PATCH", path, query=forced, body=body, content_type=kind).status == 200
    with pytest.raises(DeployError, match="conflict") as caught:
        EvictionGuard(mine, KubernetesSettings(namespace=space), "lab").renew(time.time())
    assert caught.value.kind == "settings"
    assert "somebody else set these fields" in str(caught.value.hint)
    here.stop(handle, 0)
    eventually_gone(here)


def test_an_unknown_field_and_an_unknown_namespace_are_refused(
    api: KubeTransport, space: str
) -> None:
    mine = KubeClient(api, space)
    wrong = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "x"},
        "dta": {"a": "1"},
    }
    with pytest.raises(DeployError, match="dta") as caught:
        mine.apply(wrong)
    assert caught.value.kind == "settings"
    with pytest.raises(DeployError, match='namespaces "nowhere" not found') as caught:
        deployer(api, "nowhere").start(build_order(gpus=0))
    assert caught.value.kind == "settings"
    assert "make the namespace" in str(caught.value.hint)


def test_a_lease_has_one_holder_and_its_versions_are_heeded(api: KubeTransport, space: str) -> None:
    mine = KubeClient(api, space)
    here = deployer(api, space)
    first, second = here.lease("lab", "one", 30), here.lease("lab", "two", 30)
    now_s = time.time()
    assert first.acquire(now_s) == 1
    assert second.acquire(now_s + 1) is None
    read = mine.get("Lease", lease_name("lab"))
    assert read is not None
    assert first.acquire(now_s + 2) == 1
    # Whoever writes over a version that has changed since is refused, and told so.
    read["spec"]["holderIdentity"] = "two"
    assert mine.replace(read) is None
    assert second.acquire(now_s + 40) == 2
    assert first.acquire(now_s + 41) is None
    with pytest.raises(DeployError, match="term 1") as caught:
        here.start(build_order(term=1))
    assert caught.value.kind == "superseded"


def test_what_was_made_anew_under_an_old_name_is_not_deleted(
    api: KubeTransport, space: str
) -> None:
    mine = KubeClient(api, space)
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "data": {}}
    assert mine.create(made) is not None
    assert mine.create(made) is None
    mine.delete("ConfigMap", "x", uid="0b9c8a7e-1111-4222-8333-444455556666")
    assert mine.get("ConfigMap", "x") is not None


def test_lists_longer_than_a_page_are_whole(
    api: KubeTransport, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = KubeClient(api, space)
    for number in range(5):
        meta = {"name": f"x{number}", "labels": {"mine": "yes"}}
        mine.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta})
    monkeypatch.setattr(client_module, "PAGE_SIZE", 2)
    found = mine.select("ConfigMap", labels="mine=yes")
    assert [each["metadata"]["name"] for each in found] == [f"x{n}" for n in range(5)]


def test_a_set_makes_its_pod_under_the_name_that_others_look_for_and_takes_all_with_it(
    api: KubeTransport, space: str
) -> None:
    here = deployer(api, space)
    handle = here.start(build_order(types=("L4:1", "T4:1"))).handle
    mine = KubeClient(api, space)
    eventually(lambda: here.list("lab")[0], lambda s: s.reason != "no pod yet")
    names = [f"{handle}-{index}-0" for index in (0, 1)]
    pods: dict[str, Any] = {}
    for _ in range(300):
        pods = {pod["metadata"]["name"]: pod for pod in mine.select("Pod")}
        if len(pods) == 2:
            break
        time.sleep(0.2)
    assert sorted(pods) == names
    (anchor,) = (each for each in mine.select("ConfigMap") if each["metadata"]["name"] == handle)
    for made in mine.select("StatefulSet"):
        (reference,) = made["metadata"]["ownerReferences"]
        assert (reference["kind"], reference["uid"]) == ("ConfigMap", anchor["metadata"]["uid"])
    here.drain(handle, 0)
    # A pod that no machine has is gone at once, and the owner after it.
    eventually_gone(here)
    assert mine.select("Pod") == mine.select("StatefulSet") == mine.select("Service") == []


def test_evictions_wait_for_a_controller_that_acts_and_for_no_other(
    api: KubeTransport, space: str
) -> None:
    here = deployer(api, space, hold_evictions_s=5)
    handle = here.start(build_order(gpus=0)).handle
    eventually(lambda: here.list("lab")[0], lambda s: s.reason != "no pod yet")
    mine = KubeClient(api, space)

    def evict(**query: str) -> int:
        body = {"metadata": {"name": f"{handle}-0-0"}}
        path = f"/api/v1/namespaces/{space}/pods/{handle}-0-0/eviction"
        return api.ask("POST", path, query=query, body=json.dumps(body).encode()).status

    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
    report(api, space, f"{handle}-0-0", phase="Running", conditions=[ready])
    here.hold_evictions("lab", time.time())
    # The first looks of the cluster's controllers are not in yet.
    eventually_so(lambda: evict(dryRun="All") == 429)
    # Nobody acts any more: the Job ends, and the budget with it.
    eventually_so(lambda: mine.get("PodDisruptionBudget", guard_name("lab")) is None)
    assert mine.get("Job", guard_name("lab")) is None
    assert evict() == 201
    here.stop(handle, 0)


def test_the_server_takes_the_chart_and_keeps_a_fleet(api: KubeTransport, tmp_path: Path) -> None:
    definition = yaml.safe_load(CRD.read_text())
    name = definition["metadata"]["name"]
    put(api, definition)
    path = f"{_PATHS['CustomResourceDefinition']}/{name}"

    def is_there() -> bool:
        said = json.loads(api.ask("GET", path, query={}).body)
        conditions = said.get("status", {}).get("conditions", ())
        assert not [each for each in conditions if each["type"] == "NonStructuralSchema"]
        return any((c["type"], c["status"]) == ("Established", "True") for c in conditions)

    eventually_so(is_there)
    # Its pods are as the strictest of the cluster's own standards wants them.
    meta = {"name": "atoll", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    put(api, {"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
    values = {each: VALUES[each] for each in ("hubs", "gateway", "target", "fleets")}
    for made in render(tmp_path, values):
        put(api, made, "atoll", dryRun="All")
        pod = made.get("spec", {}).get("template")
        if pod is not None:
            claims = made["spec"].get("volumeClaimTemplates", ())
            volumes = [{"name": each["metadata"]["name"], "emptyDir": {}} for each in claims]
            spec = {**pod["spec"], "volumes": [*pod["spec"]["volumes"], *volumes]}
            # Nobody is there to make the account of the namespace.
            spec.pop("serviceAccountName", None)
            meta = {**pod["metadata"], "name": "x"}
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
            query = {"dryRun": "All", "fieldValidation": "Strict"}
            where = "/api/v1/namespaces/atoll/pods"
            answer = api.ask("POST", where, query=query, body=json.dumps(body).encode())
            assert answer.status == 201, answer.body.decode()
    # An operator, with nothing but the status to write.
    mine = KubeClient(api, "atoll")
    fleet = {"apiVersion": VERSION, "kind": "Fleet", "metadata": {"name": "lab"}}
    put(api, {**fleet, "spec": {"fleet": {**FLEET, "services": {}}}}, "atoll")
    settings = OperatorSettings(tmp_path, KubernetesSettings(namespace="atoll"))
    kept = ClusterOperator(mine, settings, start=lambda _: pytest.fail("nothing is to be run"))
    kept.turn()
    (seen,) = mine.select("Fleet")
    assert seen["status"]["phase"] == "Invalid"
    assert seen["status"]["conditions"][0]["message"].startswith("spec.fleet.services")
    # What is not known any more goes.
    for plan in ({"hash": "a", "served": {"chat": "1"}}, {"hash": "b", "served": {}}, {}):
        mine.apply_status({**fleet, "status": {"phase": "Ready", "plan": plan}})
    mine.delete("Fleet", "lab")
    kept.turn()
    assert mine.select("Fleet") == []


def eventually_so(look: Callable[[], bool]) -> None:
    for _ in range(300):
        if look():
            return
        time.sleep(0.2)
    raise AssertionError("it stays as it is")
