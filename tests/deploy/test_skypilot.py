"""SkyPilot's tasks as plain data, the target against a small stand-in for the SDK, and the SDK itself."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import yaml

from atoll.catalog.catalog import Catalog
from atoll.core.errors import MissingDependencyError
from atoll.deploy.labels import Labels
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.skypilot import (
    PID_FILE,
    SkyDeployer,
    SkypilotSettings,
    _write_script,
    format_tasks,
    load_sky,
    name_cluster,
    read_refusal,
    write_task,
)
from atoll.deploy.target import DeployError, StartOrder
from atoll.runtime.http.listen_address import free_ports
from tests.runtime.local.test_placing import instance

SETTINGS = SkypilotSettings(
    setup=("pip install vllm",), instead=(("gcp/us-central1", "L4:1"), ("aws/us-east-2", "L40S:1"))
)


def labels(name: str = "chat-0", **changes: object) -> Labels:
    values: dict[str, object] = {
        "fleet": "Lab One",
        "instance": name,
        "plan": "ab" * 32,
        "placement": "cd" * 32,
        "service": "chat",
        "role": "chat/llm/both",
    }
    return Labels.model_validate(values | changes)


def order(
    node_types: tuple[str, ...] = ("L40S:1",), market: str = "spot", term: int = 0
) -> StartOrder:
    made = instance([(2 * at, 2 * at + 2) for at in range(len(node_types))])
    nodes = [
        node.model_copy(update={"node_type": kind, "market": market})
        for node, kind in zip(made.nodes, node_types, strict=True)
    ]
    made = made.model_copy(update={"nodes": tuple(nodes), "region": "aws/us-east-2"})
    commands = tuple(
        NodeCommand(
            node=node.id,
            node_type=node.node_type,
            argv=("vllm", "serve", "it's; rm -rf /", "--port", "{port}"),
            gpus=1,
            env=(("A", "b c"),),
            secrets=(("ATOLL_FABRIC", "/etc/hostname"),),
        )
        for node in nodes
    )
    return StartOrder(made, labels(term=term), commands)


def test_a_task_asks_for_any_of_what_will_do_and_goes_down_when_idle() -> None:
    task = write_task(order(), SETTINGS)
    assert task["resources"]["any_of"] == [
        {"infra": "aws/us-east-2", "accelerators": {"L40S": 1}, "use_spot": True},
        {"infra": "gcp/us-central1", "accelerators": {"L4": 1}, "use_spot": True},
    ]
    assert task["resources"]["autostop"] == {"idle_minutes": 10, "down": True}
    assert task["num_nodes"] == 1
    on_demand = write_task(order(market="on-demand"), SkypilotSettings(setup=()))
    assert [each["use_spot"] for each in on_demand["resources"]["any_of"]] == [False]
    assert "setup" not in on_demand


def test_every_node_runs_its_own_command_quoted_and_secrets_are_files() -> None:
    task = write_task(order(("L40S:1", "L40S:1")), SETTINGS)
    assert task["num_nodes"] == 2
    script = task["run"]
    assert script.count("exec env A='b c' vllm serve") == 2
    assert """'it'"'"'s; rm -rf /' --port 8000 ;;""" in script
    assert task["file_mounts"] == {"~/.atoll-secrets/ATOLL_FABRIC": "/etc/hostname"}
    assert "export ATOLL_FABRIC=~/.atoll-secrets/ATOLL_FABRIC" in script
    assert "chmod 600" in script
    assert "ATOLL_FABRIC" not in task["envs"]


def test_a_dry_run_is_yaml_that_says_the_same() -> None:
    task = write_task(order(), SETTINGS)
    assert list(yaml.safe_load_all(format_tasks([task, task]))) == [task, task]
    assert write_task(order(), SETTINGS) == task


def test_a_dry_run_refers_to_files_that_there_are(tmp_path: Path) -> None:
    made = order()
    rendered = SETTINGS.render_orders([made], SkyDeployer(()), Catalog.default())
    (text,) = rendered.values()
    assert "/etc/hostname" in text
    missing = tmp_path / "instances.token"
    commands = [replace(one, secrets=(("ATOLL_FABRIC", str(missing)),)) for one in made.commands]
    made = replace(made, commands=tuple(commands))
    rendered = SETTINGS.render_orders([made], SkyDeployer(()), Catalog.default())
    assert str(missing) in rendered.pop("ATOLL_FABRIC.token")
    (text,) = rendered.values()
    assert yaml.safe_load(text)["file_mounts"] == {
        "~/.atoll-secrets/ATOLL_FABRIC": "./ATOLL_FABRIC.token"
    }


def test_what_a_task_cannot_be_is_refused() -> None:
    with pytest.raises(DeployError, match="unlike nodes") as caught:
        write_task(order(("L40S:1", "L4:1")), SETTINGS)
    assert caught.value.kind == "settings"
    with pytest.raises(DeployError, match="machines of one's own"):
        write_task(order(market="owned"), SETTINGS)


def test_names_are_short_and_nobody_elses() -> None:
    made = {name_cluster(labels(name)) for name in ("a/b", "a-b", "A-B", "x" * 200, "x" * 201)}
    assert len(made) == 5
    assert all(len(name) <= 50 and name.startswith("atoll-lab-one-") for name in made)


class ResourcesUnavailableError(Exception):
    """As the SDK calls it."""


class SmallSky:
    """Clusters and jobs in memory, asked as the SDK is."""

    def __init__(self) -> None:
        self.clusters: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, list[dict[str, Any]]] = {}
        self.full = False
        self.calls: list[str] = []
        self.answering = True
        self.requests: dict[str, str] = {}
        self.silent: set[str] = set()
        self.Task = SimpleNamespace(from_yaml_config=copy.deepcopy)

    def get(self, answer: Any) -> Any:
        if self.requests.get(str(answer)) == "FAILED":
            raise ResourcesUnavailableError("no L40S anywhere\nand more lines")
        return answer

    def status(self) -> list[dict[str, Any]]:
        return list(self.clusters.values())

    def queue(self, name: str) -> list[dict[str, Any]]:
        self._reach(name)
        return self.jobs[name]

    def _reach(self, name: str) -> None:
        if name in self.silent:
            raise OSError(f"{name} cannot be reached")

    def api_status(self, requests: list[str], **_: object) -> list[dict[str, str]]:
        return [{"status": f"RequestStatus.{self.requests[each]}"} for each in requests]

    def api_cancel(self, requests: list[str]) -> None:
        self.calls.append("cancel")
        for each in requests:
            del self.requests[each]

    def launch(self, task: dict[str, Any], cluster_name: str) -> str:
        """Do at once what takes minutes, unless `full` or asked to wait: then nothing comes of it yet."""
        self.calls.append("launch")
        request = f"r{len(self.requests)}"
        self.requests[request] = "RUNNING" if self.full else "SUCCEEDED"
        if not self.full:
            self.rent(task, cluster_name)
        return request

    def rent(self, task: dict[str, Any], cluster_name: str) -> None:
        self.clusters[cluster_name] = {
            "name": cluster_name,
            "status": "ClusterStatus.UP",
            "launched_at": 5,
            "last_creation_yaml": yaml.safe_dump(task),
        }
        job = {"job_id": 1, "job_name": cluster_name, "status": "JobStatus.RUNNING", "start_at": 9}
        self.jobs[cluster_name] = [job]

    def exec(self, task: dict[str, Any], cluster_name: str) -> None:
        self.calls.append("exec")
        assert "kill -TERM" in task["run"]
        self.jobs[cluster_name].append({"job_id": 2, "job_name": task["name"], "status": "RUNNING"})

    def tail_logs(self, name: str, job: None, *, output_stream: IO[str], **_: object) -> None:
        self._reach(name)
        output_stream.write(f"{name} began\n")
        if self.answering:
            run = yaml.safe_load(self.clusters[name]["last_creation_yaml"])["run"]
            nodes = run.count("this node answers")
            output_stream.write("(n, pid=7) atoll: this node answers\n" * nodes)

    def down(self, name: str) -> None:
        self.calls.append("down")
        del self.clusters[name]


def test_an_instance_stands_as_a_cluster_and_carries_its_labels() -> None:
    sky = SmallSky()
    deployer = SkyDeployer((), SETTINGS, sky=lambda: sky)
    sky.clusters["somebody"] = {"name": "somebody", "status": "UP", "last_creation_yaml": "a: b"}
    started = deployer.start(order(term=2))
    assert (started.state, started.labels, started.since_s) == ("ready", labels(term=2), 9.0)
    assert deployer.start(order(term=3)) == started
    assert sky.calls == ["launch"]
    assert deployer.list("other") == ()
    with pytest.raises(DeployError, match="an order of term 1"):
        deployer.stop(started.handle, 1)
    deployer.drain(started.handle, 2)
    (still,) = deployer.list("Lab One")
    assert still.state == "ready"
    sky.jobs[started.handle][0]["status"] = "SUCCEEDED"
    (ended,) = deployer.list("Lab One")
    assert ended.state == "gone"
    deployer.stop(started.handle, 2)
    deployer.stop(started.handle, 2)
    assert sky.calls == ["launch", "exec", "down"]
    with pytest.raises(DeployError, match="no instance of a fleet"):
        deployer.stop("somebody", 2)


def test_what_fails_says_why_in_a_line() -> None:
    sky = SmallSky()
    deployer = SkyDeployer((), SETTINGS, sky=lambda: sky)
    started = deployer.start(order())
    sky.jobs[started.handle][0]["status"] = "FAILED_SETUP"
    (failed,) = deployer.list("Lab One")
    assert (failed.state, failed.kind) == ("failed", "image")
    assert failed.reason == "its job is failed setup"
    assert read_refusal(ValueError()).kind == "settings"


def test_starting_waits_for_no_machine_and_says_what_came_of_it() -> None:
    sky = SmallSky()
    sky.full = True
    deployer = SkyDeployer((), SETTINGS, sky=lambda: sky, clock=lambda: 7.0)
    first = deployer.start(order())
    assert (first.state, first.since_s, first.reason) == ("starting", 7.0, "being rented")
    # Asked again nothing is rented twice, and others are asked for meanwhile.
    assert deployer.start(order()) == first
    second = deployer.start(replace(order(), labels=labels("chat-1")))
    assert sky.calls == ["launch", "launch"]
    assert [each.state for each in deployer.list("Lab One")] == ["starting", "starting"]
    sky.requests["r0"] = "FAILED"
    for _ in range(2):
        failed, waiting = deployer.list("Lab One")
        assert (failed.handle, failed.state, failed.kind) == (first.handle, "failed", "capacity")
        assert failed.reason == "SkyPilot: no L40S anywhere"
        assert (waiting.handle, waiting.state) == (second.handle, "starting")
    deployer.stop(first.handle, 0)
    deployer.stop(second.handle, 0)
    assert deployer.list("Lab One") == ()
    assert sky.calls == ["launch", "launch", "cancel"]


def test_ready_is_a_job_that_answers() -> None:
    sky = SmallSky()
    sky.answering = False
    deployer = SkyDeployer((), SETTINGS, sky=lambda: sky)
    started = deployer.start(order(("L40S:1", "L40S:1")))
    assert (started.state, started.reason) == ("starting", "runs; it does not answer yet")
    sky.answering = True
    assert [each.state for each in deployer.list("Lab One")] == ["ready"]
    # Its log need not be read again.
    sky.answering = False
    assert [each.state for each in deployer.list("Lab One")] == ["ready"]


def test_a_cluster_that_cannot_be_asked_leaves_the_others_known() -> None:
    sky = SmallSky()
    deployer = SkyDeployer((), SETTINGS, sky=lambda: sky)
    first = deployer.start(order())
    deployer.start(replace(order(), labels=labels("chat-1")))
    sky.silent.add(first.handle)
    silent, other = sorted(deployer.list("Lab One"), key=lambda each: each.handle != first.handle)
    assert (silent.state, other.state) == ("ready", "ready")
    assert (silent.reason, other.reason) == (f"SkyPilot: {first.handle} cannot be reached", "")
    # Who has not seen it before takes it for one that starts.
    anew = SkyDeployer((), SETTINGS, sky=lambda: sky)
    assert [each.state for each in anew.list("Lab One") if each.handle == first.handle] == [
        "starting"
    ]


def test_a_job_that_is_not_listed_is_asked_for_in_its_log() -> None:
    sky = SmallSky()
    started = SkyDeployer((), SETTINGS, sky=lambda: sky).start(order())
    sky.jobs[started.handle].clear()
    (status,) = SkyDeployer((), SETTINGS, sky=lambda: sky).list("Lab One")
    assert status.state == "ready"
    assert status.reason.endswith("SkyPilot does not list its job")
    sky.answering = False
    (status,) = SkyDeployer((), SETTINGS, sky=lambda: sky).list("Lab One")
    assert status.state == "starting"


def test_a_node_says_in_its_log_that_it_answers(tmp_path: Path) -> None:
    """The script itself, with an engine that answers after a while."""
    port = free_ports(1)[0]
    serve = f"{sys.executable} -m http.server {port} --bind 127.0.0.1"
    command = replace(order().commands[0], argv=(*serve.split(), "{port}"), env=(), secrets=())
    script = _write_script([command]).replace(" 8000 ;;", " ;;").replace("8000", str(port))
    script = script.replace("sleep 2", "sleep 0.05").replace(PID_FILE, str(tmp_path / "pid"))
    with subprocess.Popen(
        ["bash", "-c", script],
        env={**os.environ, "SKYPILOT_NODE_RANK": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert "atoll: this node answers\n" in iter(process.stdout.readline, "")
        finally:
            process.terminate()


@pytest.mark.filterwarnings("ignore")  # the SDK's own
def test_the_sdk_reads_the_task() -> None:
    try:
        sky = load_sky()
    except MissingDependencyError:
        pytest.skip("SkyPilot is not installed: pip install skypilot")
    sky.Task.from_yaml_config(write_task(order(("L40S:1", "L40S:1")), SETTINGS))
    wrong = write_task(order(), SETTINGS)
    wrong["resources"]["any_of"][0]["no_such_field"] = 1
    with pytest.raises(Exception, match="no_such_field") as caught:
        sky.Task.from_yaml_config(wrong)
    assert "SkyPilot" in str(read_refusal(caught.value))
