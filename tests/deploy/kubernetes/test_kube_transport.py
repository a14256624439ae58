"""The official client's way in: kubeconfigs, plugins, and what goes wrong before an API answers."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from atoll.core.errors import MissingDependencyError
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.target import DeployError
from tests.deploy.kubernetes.builders import build_order
from tests.deploy.kubernetes.http_api import TOKEN, serve_api, write_kubeconfig
from tests.deploy.kubernetes.tiny_api import TinyApi


def connect(path: Path, **more: str) -> KubernetesDeployer:
    return KubernetesDeployer.connect(KubernetesSettings(kubeconfig=str(path), **more))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(MissingDependencyError, match=r"atoll\[kubernetes\]"):
        KubernetesDeployer.connect(KubernetesSettings())


def need_package() -> None:
    pytest.importorskip(
        "kubernetes", reason="the package kubernetes is not installed (extra kubernetes)"
    )


def test_a_missing_or_broken_kubeconfig_is_one_line(tmp_path: Path) -> None:
    need_package()
    with pytest.raises(DeployError, match="no cluster is known from") as error:
        connect(tmp_path / "none")
    assert error.value.kind == "settings"
    assert "KUBECONFIG" in str(error.value)
    (tmp_path / "bad").write_text("{clusters: 3")
    with pytest.raises(DeployError, match="no cluster is known from") as error:
        connect(tmp_path / "bad")
    assert "\n" not in str(error.value)
    write_kubeconfig(tmp_path / "good", "http://127.0.0.1:1", {"token": TOKEN})
    with pytest.raises(DeployError, match="other"):
        connect(tmp_path / "good", context="other")


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    need_package()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        write_kubeconfig(tmp_path / "config", address, {"token": TOKEN})
        with pytest.raises(DeployError, match="does not answer") as error:
            connect(tmp_path / "config").list("lab")
    assert error.value.kind == "unreachable"
    assert address in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_instances_come_and_go_over_the_official_client(tmp_path: Path) -> None:
    need_package()
    plugin = tmp_path / "plugin"
    said = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": TOKEN},
    }
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    plugin.chmod(0o700)
    run = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": str(plugin),
        "interactiveMode": "Never",
    }
    api = TinyApi()
    api.add_node("a", {"nvidia.com/gpu.product": "NVIDIA-L4"}, 1)
    with serve_api(api) as address:
        for user in ({"token": TOKEN}, {"exec": run}):
            write_kubeconfig(tmp_path / "config", address, user)
            deployer = connect(tmp_path / "config")
            handle = deployer.start(build_order(term=1)).handle
            api.step()
            api.make_ready()
            api.logs[f"{handle}-0-0"] = "hello\n"
            assert deployer.logs(handle) == "hello"
            assert [o.node_type for o in deployer.offers()] == ["L4:1"]
            assert deployer.lease("lab", "me").acquire(0.0) == 1
            deployer.drain(handle, 1)
            api.step()
            assert [s.state for s in deployer.list("lab")] == ["draining"]
            api.end_pods()
            assert deployer.list("lab") == ()
        write_kubeconfig(tmp_path / "config", address, {"token": "wrong"})
        with pytest.raises(DeployError, match="log in again"):
            connect(tmp_path / "config").list("lab")
