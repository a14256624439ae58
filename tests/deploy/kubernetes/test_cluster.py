"""The life of a fleet with processes for pods: against a real API where its binaries are, else ours."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.deploy.kubernetes.kube_client import KubeClient, KubeTransport
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.kube_transport import ClusterTransport
from atoll.deploy.kubernetes.labels import select_fleet
from atoll.deploy.target import DeployError, InstanceStatus
from tests.deploy.kubernetes.builders import build_order
from tests.deploy.kubernetes.cluster import TokenTransport, find_binaries, run_cluster
from tests.deploy.kubernetes.kubelet import ProcessKubelet
from tests.deploy.kubernetes.tiny_api import TinyApi

# The test cluster's certificate is made up on the spot.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Unverified HTTPS request")]

KINDS = ("ConfigMap", "Secret", "Service", "StatefulSet", "PodDisruptionBudget", "Pod")
ENGINE = textwrap.dedent(
    """
    import os, pathlib, signal, sys, threading, time
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *_):
            pass

    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    assert pathlib.Path(os.environ["HUB"]).read_text() == "very secret"
    assert os.environ["MODE"] == "test $(HOME)"
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stream = pathlib.Path(sys.argv[2])
    while not ending.is_set():
        time.sleep(0.05)
    while stream.exists():
        time.sleep(0.05)
    stream.with_suffix(".ended").touch()
    """
)


class World:
    """An API, a deployer to it, and the machine on which its pods run."""

    def __init__(self, transport: KubeTransport, folder: Path, api: TinyApi | None) -> None:
        settings = KubernetesSettings(drain_s=60)
        self.client = KubeClient(transport, "default")
        self.deployer = KubernetesDeployer(self.client, settings)
        self.kubelet = ProcessKubelet(transport, folder / "pods")
        self.api = api

    def pump(self) -> None:
        if self.api is not None:
            self.api.now_s = time.time()
            self.api.step()
        self.kubelet.step()

    def wait(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + 120
        while not what():
            assert time.monotonic() < until, self.deployer.list("lab")
            self.pump()
            time.sleep(0.05)

    def states(self) -> dict[str, str]:
        return {s.labels.instance: s.state for s in self.deployer.list("lab")}

    def left(self) -> list[str]:
        selector = select_fleet("lab")
        return [
            f"{kind} {made['metadata']['name']}"
            for kind in KINDS
            for made in self.client.select(kind, labels=selector)
        ]


@pytest.fixture(params=["in-process", "real"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "in-process":
        api = TinyApi(time.time())
        api.add_node("test-machine", {}, 0)
        yield from _living(World(api, tmp_path, api))
        return
    binaries = find_binaries()
    if isinstance(binaries, str):
        pytest.skip(f"ran against the in-process API only: {binaries}")
    with run_cluster(binaries, tmp_path) as kubeconfig:
        yield from _living(World(_open(kubeconfig), tmp_path, None))


def _open(kubeconfig: Path) -> KubeTransport:
    """Return the way in that users take, or a plain one where the official client is not installed."""
    if importlib.util.find_spec("kubernetes") is None:
        return TokenTransport(kubeconfig)
    return ClusterTransport(str(kubeconfig))


def _living(world: World) -> Iterator[World]:
    try:
        yield world
    finally:
        world.kubelet.close()


def test_a_fleet_comes_changes_drains_and_leaves_nothing(world: World, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "token").write_text("very secret")
    deployer = world.deployer

    def order(instance: str, stream: str, **more: Any) -> InstanceStatus:
        argv = (sys.executable, str(tmp_path / "engine.py"), "{port}", str(tmp_path / stream))
        return deployer.start(
            build_order(
                instance,
                gpus=0,
                argv=argv,
                env=(("MODE", "test $(HOME)"),),
                secrets=(("HUB", str(tmp_path / "token")),),
                **more,
            )
        )

    term = deployer.lease("lab", "first").acquire(1000.0)
    assert term == 1
    old = order("old", "old.stream", types=("L4:1", "L4:1"), term=1)
    assert order("old", "old.stream", types=("L4:1", "L4:1"), term=1).handle == old.handle
    world.wait(lambda: world.states() == {"old": "ready"})
    (tmp_path / "old.stream").touch()

    # A change of plan, by a controller that takes over: the new one is ready before the old one drains.
    assert deployer.lease("lab", "second").acquire(2000.0) == 2
    with pytest.raises(DeployError, match="an order of term 1 for lab"):
        deployer.drain(old.handle, 1)
    new = order("new", "new.stream", plan="p2", term=2)
    world.wait(lambda: world.states() == {"old": "ready", "new": "ready"})
    deployer.drain(old.handle, 2)
    world.wait(lambda: world.states()["old"] == "draining")
    for _ in range(20):
        world.pump()
        time.sleep(0.05)
    assert world.states() == {"old": "draining", "new": "ready"}
    assert not (tmp_path / "old.ended").exists()
    (tmp_path / "old.stream").unlink()
    world.wait(lambda: world.states() == {"new": "ready"})
    assert (tmp_path / "old.ended").exists()

    # Stopping does not wait for a stream.
    (tmp_path / "new.stream").touch()
    deployer.stop(new.handle, 2)
    world.wait(lambda: world.left() == [])
    assert not (tmp_path / "new.ended").exists()
    assert sorted(world.kubelet.started) == sorted(
        [f"{old.handle}-0-0", f"{old.handle}-1-0", f"{new.handle}-0-0"]
    )
    assert all(pod.process.poll() is not None for pod in world.kubelet.running.values())
