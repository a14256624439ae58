"""Instances on a real Slurm: up, seen, drained, stopped, ended; and nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.deploy.slurm.runner import ProcessRunner
from atoll.deploy.slurm.slurm_deployer import SlurmDeployer
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import DeployError, InstanceStatus
from atoll.fabric.registry.peers import Peer
from tests.deploy.slurm.builders import make_order
from tests.deploy.slurm_cluster import SlurmCluster, slurm_cluster, why_not
from tests.runtime.join.live import fake_vllm, world
from tests.runtime.waiting import until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
SERVER = ("python3", "-u", "-m", "http.server", "{port}", "--bind", "127.0.0.1")
PATIENT = """
import http.server, os, signal, sys, threading, time
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
def end(number, frame):
    print("finishes", flush=True); time.sleep(2); print("has finished", flush=True); os._exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, lambda number, frame: print("was told of the end", flush=True))
print("stands on", os.environ["SLURMD_NODENAME"], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Well).serve_forever()
"""
PATIENT_SERVER = ("python3", "-c", PATIENT, "{port}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"a real Slurm {reason}" if reason.startswith("needs") else reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture
def make(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., SlurmDeployer]]:
    """Return a function that makes a deployer with settings; everything is cancelled afterwards."""

    def build(**fields: object) -> SlurmDeployer:
        settings = {"work_folder": str(tmp_path / "work"), "partitions": ["long"], **fields}
        return SlurmDeployer(
            SlurmSettings.parse(settings), runner=ProcessRunner(cluster.environment)
        )

    yield build
    cluster.run("scancel", "--user=root")
    wait_for(lambda: not cluster.run("squeue", "--noheader").strip(), "the queue is empty")


def wait_for(is_so: Callable[[], object], what: str, within_s: float = 60.0) -> None:
    # Looks are counted, not seconds: a machine that was busy elsewhere has not failed.
    for _ in range(int(within_s / 0.3)):
        if is_so():
            return
        time.sleep(0.3)
    raise AssertionError(f"not within {within_s:g} s: {what}")


def see(
    deployer: SlurmDeployer, instance: str, *states: str, within_s: float = 60.0
) -> InstanceStatus:
    """Wait until an instance is in one of some states, and return it."""
    found: list[InstanceStatus] = []

    def look() -> bool:
        found[:] = [s for s in deployer.list("f") if s.labels.instance == instance]
        return bool(found) and found[0].state in states

    wait_for(look, f"{instance} is {' or '.join(states)}, {found}", within_s)
    return found[0]


def count_processes(words: Sequence[str]) -> int:
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return sum(all(word in line for word in words) for line in done.stdout.splitlines())


def test_an_instance_comes_up_answers_drains_and_is_gone(
    make: Callable[..., SlurmDeployer], tmp_path: Path
) -> None:
    deployer = make()
    token = tmp_path / "token"
    token.write_text("hush", "utf-8")
    order = make_order(kinds=["L4:2"], argv=SERVER, secrets=[("TOKEN", str(token))])
    handle = deployer.start(order).handle
    assert deployer.start(order).handle == handle
    status = see(deployer, "a", "ready", "failed")
    assert status.state == "ready", deployer.logs(handle)
    assert status.hosts in (("n1",), ("n3",))
    said = re.search(r"port (\d+)", deployer.logs(handle))
    assert said is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{said[1]}/", timeout=10) as answer:
        assert answer.status == 200
    offers = {offer.node_type: offer.available for offer in deployer.offers()}
    assert offers == {"L4:2": 2, "T4:4": 1}
    # A controller that comes later finds it, and stops it by its labels alone.
    deployer = make()
    deployer.drain(handle, 1)
    assert see(deployer, "a", "gone").reason == "was drained"
    assert count_processes(["http.server", said[1]]) == 0
    assert not list((tmp_path / "work").rglob("secrets"))


@pytest.mark.parametrize("fault", ["paused", "killed"])
def test_a_silent_slurmctld_ends_nothing(
    make: Callable[..., SlurmDeployer], cluster: SlurmCluster, tmp_path: Path, fault: str
) -> None:
    """Slurm's commands may answer with an empty list, or not at all: nothing is taken for ended."""
    deployer = make(deadline_s=3.0)
    token = tmp_path / "token"
    token.write_text("hush", "utf-8")
    order = make_order(fault, ["L4:1"], PATIENT_SERVER, secrets=[("TOKEN", str(token))])
    handle = deployer.start(order).handle
    assert see(deployer, fault, "ready", "failed").state == "ready", deployer.logs(handle)
    with cluster.silent_controller(kill=fault == "killed"):
        for _ in range(3):
            with pytest.raises(DeployError) as caught:
                deployer.list("f")
            assert caught.value.kind == "unreachable"
    assert list((tmp_path / "work").rglob("n0.TOKEN"))

    def is_back() -> bool:
        try:
            (status,) = (each for each in deployer.list("f") if each.labels.instance == fault)
        except DeployError:
            return False
        return (status.handle, status.state) == (handle, "ready")

    wait_for(is_back, "it is listed again")
    deployer.stop(handle, 1)
    see(deployer, fault, "gone")


@pytest.mark.parametrize("kinds", [("L4:1", "T4:2"), ("L4:1", "L4:1"), ("T4:2", "L4:2", "L4:2")])
def test_pipelines_over_several_machines(
    make: Callable[..., SlurmDeployer], kinds: tuple[str, ...]
) -> None:
    deployer = make()
    name = "-".join(kinds).replace(":", "x")  # Slurm knows the ones before for a minute
    handle = deployer.start(make_order(name, kinds, PATIENT_SERVER)).handle
    status = see(deployer, name, "ready", "failed")
    assert status.state == "ready", deployer.logs(handle)
    assert len(status.hosts) == len(kinds)
    deployer.drain(handle, 1)
    deployer.drain(handle, 1)
    see(deployer, name, "draining")
    see(deployer, name, "gone")
    logs = deployer.logs(handle)
    assert logs.count("stands on") == len(kinds)
    # Every node was told once, and had the time to finish.
    assert logs.count("finishes") == logs.count("has finished") == len(kinds), logs
    assert count_processes(["Well", "serve_forever"]) == 0


HANGING = PATIENT.replace("def end(number, frame):", "def end(number, frame):\n    return")


def test_a_rank_that_dies_ends_its_job_though_the_head_hangs(
    make: Callable[..., SlurmDeployer], tmp_path: Path
) -> None:
    deployer, dies = make(python=sys.executable), tmp_path / "dies"
    env = [
        ("ATOLL_MEETING", str(tmp_path / "meeting")),
        ("ATOLL_ADDRESS", "127.0.0.1"),
        ("PYTHONPATH", str(ROOT / "src")),
    ]
    order = make_order("ranks", ("L4:1", "L4:1"), env=env)
    waits = f"while [ ! -e {dies} ]; do sleep 0.2; done; exit 9"
    runs = (("python3", "-c", HANGING, "{port}"), ("sh", "-c", waits))
    member = ("python3", "-m", "atoll.deploy.commands.instance_member", "--meeting", "ranks")
    commands = [
        replace(each, argv=(*member, "--node", each.node, "--nodes", "n0,n1", "--", *words))
        for each, words in zip(order.commands, runs, strict=True)
    ]
    handle = deployer.start(replace(order, commands=tuple(commands))).handle
    status = see(deployer, "ranks", "ready", "failed", within_s=120.0)
    assert status.state == "ready", deployer.logs(handle)
    dies.touch()
    assert see(deployer, "ranks", "failed").kind == "ended", deployer.logs(handle)
    assert "n1 of this instance has ended" in deployer.logs(handle)
    assert count_processes(["Well", "serve_forever"]) == 0


def test_a_cancelled_job_is_seen_with_a_reason(
    make: Callable[..., SlurmDeployer], cluster: SlurmCluster
) -> None:
    deployer = make()
    handle = deployer.start(make_order("lost", ["L4:1", "T4:1"], ["sleep", "611"])).handle
    see(deployer, "lost", "ready")
    cluster.run("scancel", handle)
    status = see(deployer, "lost", "gone", "failed")
    assert (status.state, status.kind) == ("gone", None)
    assert status.reason == "was cancelled"
    assert count_processes(["sleep", "611"]) == 0


def test_stopping_ends_what_does_not_listen(make: Callable[..., SlurmDeployer]) -> None:
    deployer = make()
    deaf = "trap '' TERM; while :; do sleep 0.612; done"
    handle = deployer.start(make_order("deaf", ["L4:1"], ["bash", "-c", deaf])).handle
    see(deployer, "deaf", "ready")
    deployer.stop(handle, 1)
    deployer.stop(handle, 1)
    assert see(deployer, "deaf", "gone").reason == "was stopped"
    deployer.stop(handle, 1)
    assert count_processes(["sleep", "0.612"]) == 0


def test_what_fails_says_why(make: Callable[..., SlurmDeployer]) -> None:
    deployer = make()
    deployer.start(make_order("absent", ["T4:1"], ["no-such-program"]))
    deployer.start(make_order("broken", ["T4:1"], ["bash", "-c", "echo oh no; exit 3"]))
    deployer.start(
        make_order(
            "half", ["L4:1", "T4:1"], ["bash", "-c", "[ $SLURMD_NODENAME = n2 ] || sleep 613"]
        )
    )
    absent = see(deployer, "absent", "failed")
    assert absent.kind == "image"
    broken = see(deployer, "broken", "failed")
    assert broken.reason == "n0 ended with exit 3: oh no"
    assert "oh no" in deployer.logs(broken.handle)
    see(deployer, "half", "gone", "failed")
    wait_for(lambda: count_processes(["sleep", "613"]) == 0, "the other node has ended, too")


def test_what_waits_says_for_what(make: Callable[..., SlurmDeployer]) -> None:
    deployer = make()
    first = deployer.start(make_order("first", ["T4:4"], ["sleep", "614"]))
    deployer.start(make_order("second", ["T4:4"], ["sleep", "614"]))
    see(deployer, "first", "ready")
    wait_for(
        lambda: "Resources" in see(deployer, "second", "starting").reason, "it waits for nodes"
    )
    deployer.drain(first.handle, 1)
    see(deployer, "second", "ready")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"partitions": ["nope"]}, "unknown partition 'nope'"),
        ({"partitions": ["members"], "account": "nope"}, "account nope"),
        ({"constraint": "nope"}, "Invalid feature specification"),
        ({"partitions": ["short"], "time_limit_minutes": 5}, "allows 2 minutes"),
    ],
)
def test_wrong_settings_are_one_line(
    make: Callable[..., SlurmDeployer], cluster: SlurmCluster, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(DeployError, match=words) as caught:
        make(**fields).start(make_order("wrong"))
    assert caught.value.kind == "settings"
    assert "\n" not in str(caught.value)
    assert not cluster.run("squeue", "--noheader").strip()


def test_labels_of_any_kind_come_back(make: Callable[..., SlurmDeployer]) -> None:
    deployer = make()
    name = "a'b\"c\\d $(id) #e %j é\n"
    order = make_order("odd", argv=["sleep", "615"], fleet="f")
    labels = order.labels.model_copy(update={"plan": name})
    deployer.start(replace(order, labels=labels))
    assert see(make(), "odd", "starting", "ready").labels == labels


def test_the_example_script_brings_nodes_of_a_fabric(cluster: SlurmCluster, tmp_path: Path) -> None:
    for package in ("httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'fabric' and 'serve'")
    programs = fake_vllm(tmp_path)
    (programs / "atoll").write_text(f'#!/bin/sh\nexec {sys.executable} -m atoll "$@"\n', "utf-8")
    (programs / "atoll").chmod(0o755)
    script = ROOT / "examples" / "slurm" / "vllm.sbatch"
    # The test's machines are small; everything else is as the script says.
    small = ["--mem=100", "--cpus-per-task=1", "--time=2", "--partition=short", f"--chdir={ROOT}"]

    async def run() -> None:
        async with world(tmp_path) as here:
            environment = {
                **cluster.environment,
                "ATOLL_FABRIC": here.address,
                "PATH": f"{programs}:{os.environ['PATH']}",
                "VENV": str(tmp_path / "none"),
            }
            said = subprocess.run(
                [
                    "sbatch",
                    "--parsable",
                    "--array=0-1",
                    f"--output={tmp_path}/%a.log",
                    *small,
                    str(script),
                    "org/m",
                ],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )

            def nodes() -> list[Peer]:
                return [p for p in here.observer.peers() if p.routable and p.metadata.services]

            await until(lambda: len(nodes()) == 2)
            assert {peer.name.partition("-")[2] for peer in nodes()} == {"0", "1"}
            for peer in nodes():
                assert peer.name.partition("-")[0] in cluster.nodes
                assert (peer.metadata.site, peer.metadata.stability) == ("test", "batch")
                assert peer.metadata.ends_s is not None
                assert 0 < peer.metadata.ends_s - time.time() < 121
            await asyncio.to_thread(
                cluster.run, "scancel", "--batch", "--signal=TERM", said.stdout.strip()
            )
            await until(lambda: not nodes())

    asyncio.run(run())
    wait_for(lambda: not cluster.run("squeue", "--noheader").strip(), "the queue is empty")


def test_the_end_of_the_wall_time_is_known_and_told(make: Callable[..., SlurmDeployer]) -> None:
    deployer = make(partitions=["short"], notice_s=60)
    order = make_order("brief", ["L4:1", "T4:1"], PATIENT_SERVER)
    handle = deployer.start(order).handle
    status = see(deployer, "brief", "ready")
    assert status.ends_s is not None
    assert status.ends_s - status.since_s == 120
    wait_for(lambda: deployer.logs(handle).count("was told of the end") == 2, "both were told", 150)
    gone = see(deployer, "brief", "gone", within_s=180)
    assert (gone.reason, gone.kind) == ("its wall time ended", None)
    assert count_processes(["Well", "serve_forever"]) == 0


def test_a_drained_node_is_a_notice(
    cluster: SlurmCluster, make: Callable[..., SlurmDeployer]
) -> None:
    deployer = make()
    order = make_order(argv=SERVER, ready_s=900.0)
    deployer.start(order)
    status = see(deployer, order.labels.instance, "ready")
    (host,) = status.hosts
    assert not status.reason
    try:
        cluster.run("scontrol", "update", f"nodename={host}", "state=DRAIN", "reason=test")
        told = see(deployer, order.labels.instance, "ready")
        assert told.reason == f"node {host} is being drained"
        # Counted from the drain by any controller, where Slurm says when that was.
        assert told.ends_s is not None
        assert told.ends_s < time.time() + 901
        assert see(make(), order.labels.instance, "ready").reason == told.reason
    finally:
        cluster.run("scontrol", "update", f"nodename={host}", "state=RESUME")
    assert not see(deployer, order.labels.instance, "ready").reason
