"""What an instance becomes, as data."""

from __future__ import annotations

import base64
import itertools
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.deploy.kubernetes.gpu_labels import PRODUCT, find_gpu, list_rules
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.labels import (
    label_value,
    object_labels,
    read_labels,
    workload_name,
)
from atoll.deploy.kubernetes.manifests import render_instance, render_secret, write_manifests
from atoll.deploy.labels import Labels
from atoll.deploy.target import DeployError
from tests.deploy.kubernetes.builders import build_order

LEGAL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
SETTINGS = KubernetesSettings()
CATALOG = Catalog.default()
names = st.text(min_size=1, max_size=120)
OWN: dict[str, Any] = {
    "requests": {"cpu": "8", "memory": "64Gi"},
    "limits": {"memory": "96Gi", "rdma/hca": "1"},
    "env": {"NCCL_DEBUG": "WARN", "ATOLL_PORT": "1"},
    "tolerations": ({"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"},),
    "node_selector": {"pool": "gpu"},
    "priority_class": "serving",
    "runtime_class": "nvidia",
    "annotations": {"sidecar.istio.io/inject": "false"},
    "sidecars": ({"name": "logs", "image": "fluent-bit:3"},),
    "read_only_root": True,
}


def render(**order: Any) -> dict[str, dict[str, Any]]:
    """Return an order's objects by kind; sets by name's end."""
    settings = order.pop("settings", SETTINGS)
    objects = render_instance(build_order(**order), settings, CATALOG)
    return {
        made["kind"]
        + (made["metadata"]["name"][-2:] if made["kind"] == "StatefulSet" else ""): made
        for made in objects
    }


def pod_of(**order: Any) -> dict[str, Any]:
    pod: dict[str, Any] = render(**order)["StatefulSet-0"]["spec"]["template"]["spec"]
    return pod


@given(names, names)
def test_labels_and_names_are_legal_for_any_instance(fleet: str, instance: str) -> None:
    labels = Labels(
        fleet=fleet, instance=instance, plan="0" * 64, placement="b", service="s", role=instance
    )
    assert all(LEGAL.fullmatch(value) for value in object_labels(labels).values())
    name = workload_name(fleet, instance)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    # The label of a pod that names its revision: NAME-INDEX and another 11 characters.
    assert len(f"{name}-99999999-0123456789") <= 63


@given(st.lists(names, min_size=2, max_size=6, unique=True))
def test_different_instances_have_different_names(instances: list[str]) -> None:
    assert len({label_value(name) for name in instances}) == len(instances)
    assert len({workload_name("lab", name) for name in instances}) == len(instances)
    assert workload_name("a", instances[0]) != workload_name("b", instances[0])


@given(names, names, st.integers(0, 10**6))
def test_labels_are_read_back_as_they_were(fleet: str, instance: str, term: int) -> None:
    order = build_order(instance, fleet=fleet, term=term)
    for made in render_instance(order, SETTINGS, CATALOG):
        assert read_labels(made["metadata"]["annotations"]) == order.labels


def test_same_order_same_bytes() -> None:
    env = (("B", "2"), ("A", "1"))
    text = write_manifests(build_order(env=env, types=("L4:1", "T4:4")), SETTINGS, CATALOG)
    swapped = build_order(env=env[::-1], types=("L4:1", "T4:4"))
    assert write_manifests(swapped, SETTINGS, CATALOG) == text
    assert [made["kind"] for made in yaml.safe_load_all(text)] == [
        *("ConfigMap", "Service", "StatefulSet", "StatefulSet")
    ]


def test_nodes_of_a_pipeline_stand_on_their_own_machines_and_say_where() -> None:
    made = render(types=("L4:1", "A100-80:8"))
    first, second = (made[f"StatefulSet-{i}"]["spec"]["template"]["spec"] for i in (0, 1))
    env = {each["name"]: each for each in first["containers"][0]["env"]}
    assert env["ATOLL_ADDRESS"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    for pod, product, gpus in ((first, "NVIDIA-L4", 1), (second, "NVIDIA-A100-SXM4-80GB", 8)):
        terms = json.dumps(pod["affinity"])
        assert f'"{product}"' in terms
        assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": gpus}
    assert made["Service"]["spec"]["publishNotReadyAddresses"] is True
    assert "Service" not in render()


def test_a_word_that_looks_like_a_variable_reaches_the_command_as_it_is() -> None:
    command = pod_of(argv=("sh", "-c", "echo $(HOME) {port}"))["containers"][0]["command"]
    assert command == ["sh", "-c", "echo $$(HOME) $(ATOLL_PORT)"]


def test_pods_end_by_draining_within_their_grace() -> None:
    pod = pod_of(settings=KubernetesSettings(drain_s=90))
    assert pod["terminationGracePeriodSeconds"] > 90
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert "kill -TERM" in hook[-1]
    tries = pod["containers"][0]["startupProbe"]
    assert tries["failureThreshold"] * tries["periodSeconds"] == 600


def test_a_node_that_listens_nowhere_is_not_asked() -> None:
    assert "readinessProbe" in pod_of()["containers"][0]
    assert "readinessProbe" not in pod_of(argv=("worker",))["containers"][0]


def test_secrets_are_files_and_never_in_what_everybody_sees(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("very secret")
    secrets = (("ATOLL_FABRIC", str(tmp_path / "token")), ("HUB", str(tmp_path / "other")))
    order = build_order(secrets=secrets, env=(("MODE", "x"),))
    settings = KubernetesSettings(secrets={"HUB": "team/hub-token"})
    text = write_manifests(order, settings, CATALOG)
    assert "very secret" not in text
    assert base64.b64encode(b"very secret").decode() not in text
    assert str(tmp_path) not in text
    secret = render_secret(order, settings)
    assert secret is not None
    assert base64.b64decode(secret["data"]["ATOLL_FABRIC"]) == b"very secret"
    assert set(secret["data"]) == {"ATOLL_FABRIC"}
    pod = pod_of(secrets=secrets, env=(("MODE", "x"),), settings=settings)
    env = {each["name"]: each for each in pod["containers"][0]["env"]}
    assert env["ATOLL_FABRIC"]["value"] == "/run/secrets/atoll/ATOLL_FABRIC"
    assert env["HUB"]["value"] == "/run/secrets/atoll/HUB"
    assert "configMapKeyRef" in env["MODE"]["valueFrom"]
    volume = next(v for v in pod["volumes"] if v["name"] == "secrets")["projected"]
    assert volume["defaultMode"] == 0o440
    assert {source["secret"]["name"] for source in volume["sources"]} == {
        "team",
        secret["metadata"]["name"],
    }
    assert f"Needs the Secret {secret['metadata']['name']} with ATOLL_FABRIC" in text


def test_a_secret_that_cannot_be_read_says_which(tmp_path: Path) -> None:
    order = build_order(secrets=(("HUB", str(tmp_path / "none")),))
    with pytest.raises(DeployError, match="the file of HUB cannot be read") as error:
        render_secret(order, SETTINGS)
    assert error.value.kind == "settings"
    (tmp_path / "large").write_bytes(b"x" * 70_000)
    with pytest.raises(DeployError, match="over 64 KiB"):
        render_secret(build_order(secrets=(("HUB", str(tmp_path / "large")),)), SETTINGS)


def test_bad_orders_are_refused() -> None:
    with pytest.raises(InputError, match="no name of an environment variable"):
        render(env=(("A B", "1"),))
    with pytest.raises(InputError, match="given twice"):
        render(env=(("A", "1"), ("A", "2")))
    with pytest.raises(DeployError, match="MI300X is not NVIDIA's"):
        render(types=("MI300X:8",))
    with pytest.raises(DeployError, match="nothing to run"):
        render(argv=())
    with pytest.raises(ValueError, match="write SECRET/KEY"):
        KubernetesSettings(secrets={"A": "no-key"})


@pytest.mark.parametrize("gpu", sorted(CATALOG.gpus))
def test_every_gpu_of_the_catalog_has_its_own_labels(gpu: str) -> None:
    rules = list_rules(gpu, CATALOG, {})
    theirs = CATALOG.gpu(gpu).architecture in ("CDNA2", "CDNA3", "Apple")
    assert bool(rules) is not theirs
    for rule in rules:
        # What pods ask for is what offers are read from: each combination of labels means this GPU.
        for values in itertools.product(*rule.values.values()):
            labels = dict(zip(rule.values, values, strict=True))
            assert find_gpu(labels, CATALOG, {}) == gpu
            assert all(LEGAL.fullmatch(value) for value in values)
    keys = [key for rule in rules for key in rule.values]
    assert theirs or keys[0] == PRODUCT


def test_manifests_keep_the_published_schemas(tmp_path: Path) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate",
        reason="kubernetes-validate is not installed; the in-process API checked names and labels only",
    )
    (tmp_path / "token").write_text("x")
    order = build_order(
        types=("L4:1", "T4:4"), market="spot", secrets=(("HUB", str(tmp_path / "token")),)
    )
    settings = KubernetesSettings(
        user=1000,
        weights_path="/weights",
        image_pull_secrets=("pull",),
        probe="http",
        **OWN,
    )
    secret = render_secret(order, settings)
    assert secret is not None
    for made in (*render_instance(order, settings, CATALOG), secret):
        validate.validate(made, "1.30", strict=True)
    group = render_instance(order, settings, CATALOG, group=True)[-1]
    together = group["spec"]["leaderWorkerTemplate"]
    # Its own fields by its documentation, and its pods as those of any set.
    assert set(group["spec"]) == {"replicas", "startupPolicy", "leaderWorkerTemplate"}
    assert set(together) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    for name in ("leaderTemplate", "workerTemplate"):
        head = {"apiVersion": "v1", "kind": "Pod"}
        meta = {**together[name]["metadata"], "name": "x"}
        pod = {**head, "metadata": meta, "spec": together[name]["spec"]}
        validate.validate(pod, "1.30", strict=True)


def test_workers_of_a_group_run_their_own_commands(tmp_path: Path) -> None:
    order = build_order(types=("L4:1", "L4:1", "L4:1"), argv=("sh", "-c", ":"), env=(("A", "0"),))
    same = render_instance(order, KubernetesSettings(), CATALOG, group=True)[-1]
    worker = same["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert worker["spec"]["containers"][0]["command"] == ["sh", "-c", ":"]
    told = tmp_path / "told"
    commands = [
        replace(
            command,
            argv=("sh", "-c", f"echo $A '$(A)' $1 > {told}", "x", "it's {port}"),
            env=(("A", f"a '{at}'"),),
        )
        for at, command in enumerate(order.commands)
    ]
    own = replace(order, commands=tuple(commands))
    made = render_instance(own, KubernetesSettings(), CATALOG, group=True)[-1]
    worker = made["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    (program, flag, script) = worker["spec"]["containers"][0]["command"]
    assert "$(" not in script.replace("$$(", "")
    for index in ("1", "2"):
        environment = {"PATH": "/usr/bin:/bin", "LWS_WORKER_INDEX": index, "ATOLL_PORT": "8000"}
        # As Kubernetes passes what was escaped.
        words = [program, flag, script.replace("$$(", "$(")]
        subprocess.run(words, env=environment, check=True)
        assert told.read_text() == f"a '{index}' $(A) it's 8000\n"


@pytest.mark.parametrize("gpus", [0, 1])
def test_machines_that_are_set_aside_are_out_in_every_term(gpus: int) -> None:
    order = replace(build_order(gpus=gpus), avoid_hosts=("m2", "m1"))
    (made,) = (m for m in render_instance(order, SETTINGS, CATALOG) if m["kind"] == "StatefulSet")
    rules = made["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    terms = rules["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    # Terms are alternatives: one without the rule would let the machine in.
    out = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["m1", "m2"]}
    assert terms
    assert all(out in term["matchExpressions"] for term in terms)
    assert "affinity" not in pod_of(gpus=0)


def test_what_a_cluster_asks_of_pods_is_set() -> None:
    made = render(types=("L4:1",), settings=KubernetesSettings(**OWN))["StatefulSet-0"]
    template = made["spec"]["template"]
    assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    pod = template["spec"]
    engine, logs = pod["containers"]
    assert logs == {"name": "logs", "image": "fluent-bit:3"}
    assert engine["resources"] == {
        "limits": {"memory": "96Gi", "rdma/hca": "1", "nvidia.com/gpu": 1},
        "requests": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": 1},
    }
    env = {each["name"]: each.get("value") for each in engine["env"]}
    # What Atoll sets itself stays.
    assert (env["NCCL_DEBUG"], env["HOME"], env["ATOLL_PORT"]) == ("WARN", "/tmp", "8000")
    assert engine["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "scratch", "mountPath": "/tmp"} in engine["volumeMounts"]
    assert OWN["tolerations"][0] in pod["tolerations"]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("serving", "nvidia")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"requests": {"cpu": "many"}}, "no quantity"),
        ({"limits": {"nvidia.com/gpu": "1"}}, "GPUs are the plan's"),
        ({"env": {"A B": "x"}}, "no name of an environment variable"),
        ({"tolerations": [{"effect": "NoSchedule"}]}, "needs operator: Exists"),
        ({"tolerations": [{"kee": "a"}]}, "a toleration has no 'kee'"),
        ({"sidecars": [{"name": "engine", "image": "x"}]}, "'engine' is taken"),
        ({"sidecars": [{"name": "x"}]}, "a name and an image"),
    ],
)
def test_settings_that_no_pod_can_have_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        KubernetesSettings(**given)


@pytest.mark.parametrize(
    ("labels", "gpu"),
    [
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}, "A100-40"),
        ({"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"}, "H100"),
        ({"karpenter.k8s.aws/instance-gpu-name": "l40s"}, "L40S"),
        (
            {
                "karpenter.k8s.aws/instance-gpu-name": "a100",
                "karpenter.k8s.aws/instance-gpu-memory": "81920",
            },
            "A100-80",
        ),
        # Which of the two it is, nobody says.
        ({"karpenter.k8s.aws/instance-gpu-name": "a100"}, None),
        ({"node.kubernetes.io/instance-type": "g5.12xlarge"}, "A10G"),
        ({"node.kubernetes.io/instance-type": "Standard_ND96isr_H100_v5"}, "H100"),
        # Not the one with NVLink.
        ({"node.kubernetes.io/instance-type": "Standard_NC24ads_A100_v4"}, "A100-80-PCIe"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-80GB-PCIe"}, "A100-80-PCIe"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-PCIE-40GB"}, "A100-40-PCIe"),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-PCIe"}, "H100-PCIe"),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-NVL"}, "H100-NVL"),
        ({"nvidia.com/gpu.product": "NVIDIA-A30"}, "A30"),
        ({"nvidia.com/gpu.product": "NVIDIA-L40"}, "L40"),
        ({"nvidia.com/gpu.product": "NVIDIA-A10"}, "A10"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-80GB-PCIe-MIG-1g.10gb"}, None),
        (
            {
                "nvidia.com/gpu.product": "NVIDIA-A16",
                "node.kubernetes.io/instance-type": "g5.xlarge",
            },
            None,
        ),
        ({"nvidia.com/gpu.product": "house-gpu"}, "L4"),
        (
            {
                "nvidia.com/gpu.product": "NVIDIA-L4",
                "nvidia.com/gpu.sharing-strategy": "time-slicing",
            },
            None,
        ),
        (
            {
                "cloud.google.com/gke-accelerator": "nvidia-tesla-a100",
                "cloud.google.com/gke-gpu-partition-size": "1g.5gb",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_labels_of_clouds_name_one_gpu_or_none(labels: dict[str, str], gpu: str | None) -> None:
    assert find_gpu(labels, CATALOG, {"house-gpu": "L4"}) == gpu


def test_machines_are_those_that_the_settings_want() -> None:
    rule = {"key": "tier", "operator": "NotIn", "values": ("slow",)}
    settings = KubernetesSettings.parse({"node_affinity": [rule]})
    for order in (build_order(), build_order(gpus=0)):
        (made,) = (
            m for m in render_instance(order, settings, CATALOG) if m["kind"] == "StatefulSet"
        )
        affinity = made["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
        terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        wanted = {**rule, "values": ["slow"]}
        assert all(wanted in term["matchExpressions"] for term in terms)
    for wrong in ({**rule, "values": []}, {**rule, "operator": "Exists"}):
        with pytest.raises(InputError, match="need values"):
            KubernetesSettings.parse({"node_affinity": [wrong]})
