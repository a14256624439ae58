"""A real Kubernetes API on loopback: etcd, kube-apiserver and the controllers, without a kubelet.

The binaries are those of envtest: KUBEBUILDER_ASSETS names their folder, or they are on the PATH.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import yaml

from atoll.deploy.kubernetes.kube_client import HttpAnswer

LIMITED = "limited"
BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager")
CONTROLLERS = ",".join(
    f"{name}-controller"
    for name in ("statefulset", "garbage-collector", "disruption", "job", "ttl-after-finished")
)
_START_S = 120.0


def find_binaries() -> dict[str, str] | str:
    """Return where the binaries are, or what is missing."""
    places = os.pathsep.join(
        filter(None, (os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH")))
    )
    found = {name: shutil.which(name, path=places) for name in BINARIES}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        return f"{', '.join(missing)} not found (set KUBEBUILDER_ASSETS)"
    return {name: path for name, path in found.items() if path is not None}


@contextmanager
def run_cluster(binaries: dict[str, str], folder: Path) -> Iterator[Path]:
    """Run an API server and its controllers; gives the path of a kubeconfig.

    Beside it lies another, of the user `LIMITED`, who may do nothing but what a Role lets them.
    """
    store, peer, api, manager = (_free_port() for _ in range(4))
    token = secrets.token_hex(16)
    key = folder / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    limited = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(
        f"{token},tester,tester,system:masters\n{limited},{LIMITED},{LIMITED}\n"
    )
    kubeconfig = folder / "kubeconfig"
    address = f"https://127.0.0.1:{api}"
    _write_kubeconfig(kubeconfig, address, token)
    _write_kubeconfig(kubeconfig.with_name(LIMITED), address, limited)
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *flags: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            processes.append(subprocess.Popen([binaries[name], *flags], stdout=log, stderr=log))

    try:
        start(
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{store}",
            f"--advertise-client-urls=http://127.0.0.1:{store}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{store}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={api}",
            f"--cert-dir={folder / 'certs'}",
            "--authorization-mode=RBAC",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none",
        )
        for path in ("/readyz", "/api/v1/namespaces/default"):
            _wait_ready(f"https://127.0.0.1:{api}{path}", token, processes, folder)
        start(
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={manager}",
            f"--cert-dir={folder / 'manager-certs'}",
            "--use-service-account-credentials=false",
            f"--controllers={CONTROLLERS}",
        )
        yield kubeconfig
    finally:
        # The API server before its etcd: without it, it does not go.
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _write_kubeconfig(path: Path, address: str, token: str) -> None:
    server = {"server": address, "insecure-skip-tls-verify": True}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": server}],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
        "current-context": "test",
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(content))


class TokenTransport:
    """The way to that API without the official client, where it is not installed."""

    def __init__(self, kubeconfig: Path) -> None:
        content = yaml.safe_load(kubeconfig.read_text())
        self._server = content["clusters"][0]["cluster"]["server"]
        self._token = content["users"][0]["user"]["token"]

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> HttpAnswer:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content_type}
        url = f"{self._server}{path}" + (f"?{urlencode(query)}" if query else "")
        request = urllib.request.Request(url, data=body, headers=headers, method=method)
        loopback = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(request, timeout=30, context=loopback) as answer:
                return HttpAnswer(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return HttpAnswer(error.code, error.read())


def _wait_ready(
    url: str, token: str, processes: list[subprocess.Popen[bytes]], folder: Path
) -> None:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    loopback = ssl._create_unverified_context()
    until = time.monotonic() + _START_S
    while time.monotonic() < until and all(p.poll() is None for p in processes):
        try:
            with urllib.request.urlopen(request, timeout=5, context=loopback) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    tail = (folder / "kube-apiserver.log").read_text()[-500:]
    raise RuntimeError(f"the API server did not become ready: {tail}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
