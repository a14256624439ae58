"""The Ray target on a real Ray of several machines on this host."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.deploy.commands.node_commands import CommandSettings, ServiceWeights, node_commands
from atoll.deploy.ray.ray_client import HttpRayClient
from atoll.deploy.ray.ray_deployer import RayDeployer
from atoll.deploy.ray.ray_settings import RaySettings
from atoll.deploy.target import DeployError, InstanceStatus
from atoll.plan.plan import Node
from tests.deploy.ray.ray_cluster import RayCluster, ray_cluster, why_not
from tests.deploy.slurm.builders import make_order

pytestmark = pytest.mark.slow

MACHINES = (("a1", "L4", 2), ("a2", "L4", 2), ("b1", "T4", 4))
SAY = (
    "import os, stat, time; key = os.environ['KEY'];"
    " print('sees', os.environ['CUDA_VISIBLE_DEVICES'], open(key).read(),"
    " oct(stat.S_IMODE(os.stat(key).st_mode)), flush=True); time.sleep(701)"
)
PATIENT = (
    "import http.server as h, signal, sys, time;"
    " signal.signal(signal.SIGTERM, lambda *_: (print('was told', flush=True), time.sleep(4), sys.exit()));"
    " h.HTTPServer(('127.0.0.1', int(sys.argv[1])), h.SimpleHTTPRequestHandler).serve_forever()"
)
FAKE_VLLM = """
import http.server, json, multiprocessing, os, signal, sys

def start_workers(pipe, group):
    # As vLLM's engine does, in a process of its own that connects to Ray.
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    ray.init(log_to_driver=False)
    class Worker:
        def where(self):
            return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()
    order = map(int, os.environ["VLLM_RAY_BUNDLE_INDICES"].split(","))
    workers = [
        ray.remote(Worker).options(
            num_cpus=0, num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=at)).remote()
        for at in order
    ]
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    found = ray.get([worker.where.remote() for worker in workers])
    pipe.send([(names[node], gpus) for node, gpus in found])
    signal.pause()

def main():
    import ray
    words = sys.argv
    assert words[:2] == ["vllm", "serve"] and words[-2:] == ["--distributed-executor-backend", "ray"]
    assert os.environ["VLLM_PP_LAYER_PARTITION"] == "20,16"
    assert ray.get_runtime_context().get_actor_id() is not None
    group = ray.util.get_current_placement_group()
    assert all(bundle["GPU"] == 1 for bundle in group.bundle_specs)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=start_workers, args=(theirs, group), daemon=True).start()
    print("workers", json.dumps(ours.recv()), flush=True)
    def end(*_):
        print("was told", flush=True)
        raise SystemExit(0)
    signal.signal(signal.SIGTERM, end)
    port = int(words[words.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(702)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"a real Ray {reason}")
    with ray_cluster(MACHINES) as running:
        yield running


@pytest.fixture
def make(cluster: RayCluster) -> Iterator[Callable[..., RayDeployer]]:
    made: list[RayDeployer] = []

    def build(**settings: object) -> RayDeployer:
        chosen = RaySettings(
            address=cluster.url, python=sys.executable, cpus_per_gpu=0.1, **settings
        )
        made.append(RayDeployer(HttpRayClient(cluster.url), chosen, drain_s=60.0))
        return made[-1]

    yield build
    for status in build().list("f"):
        if status.state not in ("gone", "failed"):
            made[0].stop(status.handle, 2**31)


def see(deployer: RayDeployer, name: str, *states: str, within_s: float = 240) -> InstanceStatus:
    until_s = time.monotonic() + within_s
    while True:
        found = next((s for s in deployer.list("f") if s.labels.instance == name), None)
        if found is not None and found.state in states:
            return found
        assert time.monotonic() < until_s, f"{name} is not {states}: {found}"
        time.sleep(0.3)


def count_processes(word: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        # Supervisors have the command in their own command line.
        found += bool(words[0].endswith(b"python") or b"python" in words[0]) and word.encode() in (
            words[2] if len(words) > 2 and words[1] == b"-c" else b""
        )
    return found


def wait_for(is_so: Callable[[], object], what: str, within_s: float = 60) -> None:
    until_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.2)


def test_instances_stand_by_kind_drain_and_are_adopted(
    make: Callable[..., RayDeployer], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("geheim")
    deployer = make()
    assert {o.node_type: o.available for o in deployer.offers()} == {"L4:2": 2, "T4:4": 1}
    python, secrets = sys.executable, (("KEY", str(key)),)
    names = ("one", "two", "three")
    for name in names:
        order = make_order(name, ["L4:1"], [python, "-c", SAY], secrets=secrets)
        deployer.start(order)
    both = make_order("both", ["L4:1", "T4:4"], [python, "-c", PATIENT, "{port}"])
    handle = deployer.start(both).handle
    assert deployer.start(both).handle == handle
    ready = {name: see(deployer, name, "ready") for name in (*names, "both")}
    # Four L4 for four nodes: nobody has another's.
    seen = []
    for name in names:
        wait_for(lambda: "sees" in deployer.logs(ready[name].handle), "it has written")  # noqa: B023
        _, device, secret, mode = deployer.logs(ready[name].handle).splitlines()[-1].split()
        assert (secret, mode) == ("geheim", "0o600")
        seen.append((ready[name].hosts, device))
    assert len(set(seen)) == 3
    assert {host for (host,), _ in seen} == {"a1", "a2"}
    assert set(ready["both"].hosts) <= {"a1", "a2", "b1"}
    assert ready["both"].hosts[1] == "b1"
    # What is held by instances is still on offer: the controller counts it.
    assert {o.node_type: o.available for o in deployer.offers()} == {"L4:2": 2, "T4:4": 1}
    # A controller elsewhere finds all of it, and what it is.
    elsewhere = {status.labels.instance: status for status in make().list("f")}
    assert {name: each.state for name, each in elsewhere.items()} == dict.fromkeys(ready, "ready")
    assert elsewhere["both"].instance == both.instance
    # Draining lets what runs finish.
    deployer.drain(handle, 1)
    deployer.drain(handle, 1)
    assert see(deployer, "both", "draining").state == "draining"
    assert count_processes("was told") == 2
    assert see(deployer, "both", "gone").reason == "was drained"
    assert deployer.logs(handle).count("was told") == 2
    assert count_processes("was told") == 0
    with pytest.raises(DeployError) as caught:
        deployer.stop(ready["one"].handle, 0)
    assert caught.value.kind == "superseded"
    for name in names:
        deployer.stop(ready[name].handle, 1)
    assert count_processes("701") == 0


def test_what_does_not_listen_is_killed_and_what_fails_says_why(
    make: Callable[..., RayDeployer],
) -> None:
    deployer, python = make(schedule_s=6.0), sys.executable
    deployer.start(make_order("deaf", ["T4:4"], [python, "-c", DEAF]))
    fails = [python, "-c", "print('oh no'); exit(3)", "{port}"]
    deployer.start(make_order("broken", ["L4:1"], fails))
    deployer.start(make_order("absent", ["L4:1"], ["no-such-program", "{port}"]))
    deaf = see(deployer, "deaf", "ready")
    deployer.start(make_order("late", ["T4:1"], [python, "-c", SAY]))
    broken = see(deployer, "broken", "failed")
    assert (broken.kind, broken.reason) == ("settings", "n0 ended with code 3: oh no")
    assert "oh no" in deployer.logs(broken.handle)
    absent = see(deployer, "absent", "failed")
    assert "no-such-program" in absent.reason
    # All T4 are held: what finds no room in time says so.
    late = see(deployer, "late", "failed")
    assert (late.kind, late.reason) == ("capacity", "no room for 1 T4 came within 6 s")
    assert count_processes("702") == 1
    deployer.stop(deaf.handle, 1)
    deployer.stop(deaf.handle, 1)
    gone = see(deployer, "deaf", "gone")
    assert gone.reason == "was stopped"
    wait_for(lambda: count_processes("702") == 0, "nothing is left of it")


def test_python_that_is_not_there_is_a_matter_of_the_image(
    make: Callable[..., RayDeployer],
) -> None:
    deployer = RayDeployer(make()._client, RaySettings(python="no-such-python"), drain_s=10.0)
    deployer.start(make_order("early", ["L4:1"], ["true"]))
    failed = see(deployer, "early", "failed")
    assert failed.kind == "image", failed


def test_a_lost_machine_is_a_lost_instance(
    make: Callable[..., RayDeployer], cluster: RayCluster
) -> None:
    deployer, python = make(), sys.executable
    # One that must not stand on a machine stands on the other.
    order = make_order("kept", ["L4:1"], [python, "-c", PATIENT, "{port}"])
    deployer.start(replace(order, avoid_hosts=("a1",)))
    order = make_order("lost", ["L4:1", "T4:1"], [python, "-c", PATIENT, "{port}"])
    deployer.start(replace(order, avoid_hosts=("a2",)))
    assert see(deployer, "kept", "ready").hosts == ("a2",)
    assert see(deployer, "lost", "ready").hosts == ("a1", "b1")
    cluster.kill("a1")
    failed = see(deployer, "lost", "failed")
    assert (failed.kind, failed.reason) == ("ended", "n0 was lost: a1 has left the cluster")
    assert see(deployer, "kept", "ready").state == "ready"
    wait_for(lambda: count_processes("was told") == 1, "its other node has ended")
    assert {o.node_type: o.available for o in deployer.offers()} == {"L4:2": 1, "T4:4": 1}


def test_vllm_has_its_workers_in_the_bundles_of_its_group(
    make: Callable[..., RayDeployer], tmp_path: Path
) -> None:
    """vLLM does not know Ray on CPUs: a stand-in asks Ray for what vLLM 0.32 asks for, in the same way."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(FAKE_VLLM)
    path = ":".join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    deployer = make(env={"PYTHONPATH": path})
    nodes = [
        Node(id=f"n{at}", node_type=kind, market="owned", start=start, end=end, tp=2)
        for at, (kind, start, end) in enumerate((("L4:2", 0, 20), ("T4:2", 20, 36)))
    ]
    settings = CommandSettings(python=sys.executable, executor="ray")
    weights = ServiceWeights("hf://org/name", ("chat",), engine="vllm")
    order = make_order("wide", nodes=nodes)
    commands = node_commands(order.instance, weights, settings)
    assert [bool(command.argv) for command in commands] == [True, False]
    handle = deployer.start(replace(order, commands=commands)).handle
    first, second = see(deployer, "wide", "ready").hosts
    assert (first[0], second) == ("a", "b1")
    # Machines of one host see each other's logs, and each passes a line on.
    line = next(x for x in deployer.logs(handle).splitlines() if "workers [" in x)
    workers = json.loads(line.partition("workers ")[2])
    assert [host for host, _ in workers] == [first, first, second, second]
    assert len({(host, *gpus) for host, gpus in workers}) == 4
