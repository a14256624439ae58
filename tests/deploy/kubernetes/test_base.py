"""The base for hub, gateway and controller: what it may do, and what it shows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

BASE = Path(__file__).resolve().parents[3] / "deploy/kubernetes/base"
FILES = ("namespace.yaml", "rbac.yaml", "hub.yaml", "gateway.yaml", "controller.yaml")


def read_all() -> list[dict[str, Any]]:
    return [made for name in FILES for made in yaml.safe_load_all((BASE / name).read_text())]


def pods() -> list[dict[str, Any]]:
    found = [
        made["spec"]["template"]["spec"]
        for made in read_all()
        if "template" in made.get("spec", {})
    ]
    assert len(found) == 3
    return found


def test_everything_in_the_folder_is_part_of_the_base() -> None:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    assert set(listed["resources"]) == set(FILES)
    (generated,) = listed["configMapGenerator"]
    others = {"kustomization.yaml", *generated["files"]}
    assert {path.name for path in BASE.iterdir()} == {*FILES, *others}


def test_pods_run_as_nobody_in_particular_and_take_secrets_as_files() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not any("valueFrom" in each for each in container["env"])
        secrets = [v["secret"] for v in pod["volumes"] if "secret" in v]
        assert secrets
        assert all(secret["defaultMode"] == 0o440 for secret in secrets)


def test_only_the_controller_may_ask_the_api() -> None:
    accounts = [pod.get("serviceAccountName") for pod in pods()]
    assert accounts == [None, None, "atoll-controller"]
    for pod in pods()[:2]:
        assert pod["automountServiceAccountToken"] is False


def test_the_fleet_is_one_that_can_be_planned() -> None:
    from atoll.plan.files.fleet_file import load_fleet

    assert load_fleet(BASE / "fleet.yaml") is not None


def test_the_controller_is_told_what_it_understands() -> None:
    from atoll.deploy.kubernetes.kube_settings import KubernetesSettings

    (settings,) = yaml.safe_load((BASE / "targets.yaml").read_text()).values()
    there = KubernetesSettings.parse(settings)
    namespace = yaml.safe_load((BASE / "namespace.yaml").read_text())["metadata"]["name"]
    assert there.namespace == namespace
    controller = pods()[2]["containers"][0]
    verb, *options = controller["command"][1:]
    known = yaml.safe_load((BASE / "kustomization.yaml").read_text())["configMapGenerator"][0]
    mounted = [word.rpartition("/")[2] for word in controller["command"] if "/etc/atoll/" in word]
    assert mounted == known["files"]
    from typer.testing import CliRunner

    from atoll.cli.main import app

    shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0
    for option in options[1:]:
        assert option.partition("=")[0] in shown.output


def test_the_base_keeps_the_published_schemas() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for made in read_all():
        validate.validate(made, "1.30", strict=True)


@pytest.mark.slow
def test_kustomize_builds_the_base() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed; the files were checked one by one")
    built = subprocess.run([kubectl, "kustomize", str(BASE)], capture_output=True, check=True)
    made = list(yaml.safe_load_all(built.stdout))
    spaced = [
        m for m in made if m["kind"] not in ("Namespace", "ClusterRole", "ClusterRoleBinding")
    ]
    assert {m["metadata"]["namespace"] for m in spaced} == {"atoll"}
    (config,) = [m for m in made if m["kind"] == "ConfigMap"]
    (controller,) = [
        m for m in made if m["metadata"]["name"] == "atoll-controller" and m["kind"] == "Deployment"
    ]
    volumes = controller["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["configMap"]["name"] == config["metadata"]["name"]
