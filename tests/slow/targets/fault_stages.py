"""Stand-ins for targets whose answers go wrong for a while, in virtual time.

A stage has the machines of a target and what runs there, which is the truth; a deployer asks it through a
layer that answers wrongly in one way while `fault` is set. What is ordered happens all the same, as far as
the way of answering wrongly lets it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from atoll.control.operation.controller_lease import ClusterLease
from atoll.deploy.kubernetes.kube_client import HttpAnswer, KubeClient
from atoll.deploy.kubernetes.kube_deployer import KubernetesDeployer
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.labels import DOMAIN
from atoll.deploy.skypilot import SkyDeployer, SkypilotSettings, read_task_labels
from atoll.deploy.slurm.runner import SlurmAnswer
from atoll.deploy.slurm.slurm_deployer import SlurmDeployer
from atoll.deploy.slurm.slurm_jobs import read_comment
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import Deployer, DeployError
from atoll.plan.problem import Offer
from tests.deploy.killed_rollouts import FLEET
from tests.deploy.kubernetes.tiny_api import TinyApi
from tests.deploy.kubernetes.tiny_machines import is_ready
from tests.deploy.slurm.builders import FakeSlurm
from tests.deploy.test_skypilot import SmallSky
from tests.slow.targets.faults import BEGAN_S, KIND_COUNT, SECRET
from tests.slow.targets.joined_stage import JoinedStage
from tests.slow.targets.local_stage import LocalStage


class Stage(Protocol):
    """A target, its machines and what runs there."""

    fault: str | None

    @property
    def now_s(self) -> float:
        """Return the time, in seconds of Unix time."""
        ...

    def deployer(self) -> Deployer:
        """Return the target as a controller asks it."""
        ...

    def argv(self, instance: str) -> tuple[str, ...]:
        """Return what an instance runs."""
        ...

    def live(self, by_s: float) -> None:
        """Let time pass: what was started becomes ready, what was drained ends."""
        ...

    def standing(self) -> set[str]:
        """Return the instances of which anything is there."""
        ...

    def serving(self) -> set[str]:
        """Return the instances that answer requests."""
        ...

    def without_secret(self) -> set[str]:
        """Return the instances that serve, and could not start again: their secret is not there."""
        ...

    def close(self) -> None:
        """End what stands for instances."""
        ...


def spoil_rows(fault: str, rows: list[Any]) -> list[Any]:
    """Return the rows of an answer as a fault of lists leaves them."""
    return {
        "no rows": [],
        "partial": rows[1::2],
        "duplicate": [*rows, *rows],
        "reordered": rows[::-1],
    }.get(fault, rows)


class SlurmStage(FakeSlurm):
    """Jobs of Slurm; also the runner of its commands."""

    def __init__(self, folder: Path, kinds: Sequence[str], region: str) -> None:
        super().__init__()
        self.fault: str | None = None
        self.now_s = BEGAN_S
        self._settings = SlurmSettings.parse({"work_folder": str(folder), "region": region})
        nodes = [
            {
                "name": f"{kind[:-2].lower()}{number}",
                "state": "idle",
                "state_flags": [],
                "partitions": ["long"],
                "gres": f"gpu:{kind[:-2].lower()}:1",
                "cpus": 8,
                "real_memory": 100_000,
            }
            for kind in kinds
            for number in range(KIND_COUNT)
        ]
        self.nodes = json.dumps({"errors": [], "nodes": nodes})
        names = ",".join(str(node["name"]) for node in nodes)
        words = "AllowAccounts=ALL MaxTime=UNLIMITED Default=YES State=UP"
        self.partitions = f"PartitionName=long {words} Nodes={names}"
        self._folder = folder
        self._signalled: set[str] = set()
        self._broken = False

    def close(self) -> None:
        """Nothing runs."""

    def argv(self, instance: str) -> tuple[str, ...]:
        del instance
        return ("sleep", "{port}")

    def deployer(self) -> SlurmDeployer:
        return SlurmDeployer(self._settings, runner=self, clock=lambda: self.now_s)

    def run(self, argv: Sequence[str], *, deadline_s: float) -> SlurmAnswer:
        fault, writes = self.fault, argv[0] in ("sbatch", "scancel")
        silence = SlurmAnswer(-9, "", "", timed_out=True)
        if fault is None:
            self._broken = False
        if fault == "time-out" or self._broken:
            return silence
        if fault == "denied":
            return SlurmAnswer(1, "", f"{argv[0]}: error: Access/permission denied")
        if fault == "quota" and argv[0] == "sbatch":
            return SlurmAnswer(1, "", "sbatch: error: QOSMaxSubmitJobPerUserLimit")
        answer = super().run(argv, deadline_s=deadline_s)
        if any(word.startswith("--signal") for word in argv):
            self._signalled.add(argv[-1])
        if fault == "late" or (fault == "half-started" and writes):
            self._broken = fault == "half-started"
            return silence
        if fault is None or writes:
            return answer
        if fault == "silent":
            return SlurmAnswer(0, "", "")
        if fault == "cut":
            return SlurmAnswer(0, answer.out[: len(answer.out) // 2], "")
        return self._spoil(fault, answer)

    def _spoil(self, fault: str, answer: SlurmAnswer) -> SlurmAnswer:
        if not answer.out.startswith("{"):
            return answer
        said = json.loads(answer.out)
        (key,) = {"jobs", "nodes"} & set(said)
        if fault == "errors":
            # As Slurm 22.05 answers while slurmctld is silent.
            said["errors"] = [{"error": "Unable to contact slurm controller (connect failure)"}]
            said[key] = []
        said[key] = spoil_rows(fault, said[key])
        return SlurmAnswer(0, json.dumps(said), "")

    def live(self, by_s: float) -> None:
        self.now_s += by_s
        for row in self.rows:
            job, state = str(row["job_id"]), row["job_state"]
            if state == "PENDING":
                host = str(self._kind(row)).lower() + str(int(job) % KIND_COUNT)
                row |= {"job_state": "RUNNING", "nodes": host, "start_time": int(self.now_s)}
            elif state == "RUNNING" and job in self._signalled:
                row |= {"job_state": "COMPLETED", "end_time": int(self.now_s)}
            elif state == "RUNNING":
                for home in self._homes(row):
                    (home / "n0.state").write_text("ready\n")

    def _kind(self, row: Mapping[str, Any]) -> str:
        (home,) = self._homes(row)
        record = json.loads((home / "job.json").read_text())
        return str(record["instance"]["nodes"][0]["node_type"])[:-2]

    def _homes(self, row: Mapping[str, Any]) -> list[Path]:
        return [
            path.parent
            for path in self._folder.glob("f-*/i-*/job.json")
            if json.loads(path.read_text())["labels"]["instance"] == self._name(row)
        ]

    def _name(self, row: Mapping[str, Any]) -> str:
        comment = read_comment(str(row["comment"]))
        assert comment is not None
        return comment.labels.instance

    def standing(self) -> set[str]:
        alive = ("PENDING", "RUNNING")
        return {self._name(row) for row in self.rows if row["job_state"] in alive}

    def serving(self) -> set[str]:
        return {
            self._name(row)
            for row in self.rows
            if row["job_state"] == "RUNNING"
            and str(row["job_id"]) not in self._signalled
            and any((home / "n0.state").read_text() for home in self._homes(row))
        }

    def without_secret(self) -> set[str]:
        return {
            self._name(row)
            for row in self.rows
            if row["job_state"] in ("PENDING", "RUNNING")
            and not any((home / "secrets" / f"n0.{SECRET}").exists() for home in self._homes(row))
        }


class KubeStage:
    """Objects of a Kubernetes API; also the way to it."""

    def __init__(self, folder: Path, kinds: Sequence[str], region: str, **settings: Any) -> None:
        del folder
        self.fault: str | None = None
        self.api = TinyApi(BEGAN_S)
        self._names: dict[str, str] = {}
        self.settings = KubernetesSettings(region=region, **settings)
        for kind in kinds:
            for number in range(KIND_COUNT):
                product = f"NVIDIA-{kind[:-2]}"
                labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.count": kind[-1]}
                self.api.add_node(f"{kind[:-2].lower()}-{number}", labels, int(kind[-1]))
        self._writes = 0

    @property
    def now_s(self) -> float:
        return self.api.now_s

    def close(self) -> None:
        """Nothing runs."""

    def argv(self, instance: str) -> tuple[str, ...]:
        del instance
        return ("sleep", "{port}")

    def deployer(self) -> KubernetesDeployer:
        clock = lambda: self.api.now_s  # noqa: E731
        client = KubeClient(self, "default")
        return KubernetesDeployer(client, self.settings, clock=clock, fleet=FLEET)

    def lease(self) -> ClusterLease:
        """Return the cluster's lease, which is always answered: a turn without one does nothing."""
        return ClusterLease(KubernetesDeployer(self.client(), self.settings, fleet=FLEET), FLEET)

    def client(self) -> KubeClient:
        """Return a way to the API that never answers wrongly."""
        return KubeClient(self.api, "default")

    def ask(self, method: str, path: str, **words: Any) -> HttpAnswer:
        fault, writes = self.fault, method != "GET"
        self._writes = self._writes + writes if fault == "half-started" else 0
        if fault == "time-out" or self._writes > 2:
            raise DeployError("the API server does not answer", kind="unreachable")
        if fault == "denied":
            return _refuse(403, "forbidden: User cannot do this")
        if fault == "quota" and method in ("PATCH", "POST"):
            return _refuse(403, "forbidden: exceeded quota: gpus")
        answer = self.api.ask(method, path, **words)
        if fault == "late":
            raise DeployError("the API server does not answer", kind="unreachable")
        if fault is None or writes or answer.status >= 300:
            return answer
        if fault == "silent":
            return HttpAnswer(200, b"")
        if fault == "cut":
            return HttpAnswer(200, answer.body[: len(answer.body) // 2])
        if fault == "errors":
            return _refuse(500, "etcdserver: request timed out")
        said = json.loads(answer.body)
        if isinstance(said, dict) and "items" in said:
            said["items"] = spoil_rows(fault, said["items"])
        return HttpAnswer(200, json.dumps(said).encode())

    def live(self, by_s: float) -> None:
        for _, made in self.api.of("configmaps"):
            labels = made["metadata"].get("labels") or {}
            if labels.get(f"{DOMAIN}/fleet") == FLEET and f"{DOMAIN}/instance" in labels:
                self._names.setdefault(made["metadata"]["name"], labels[f"{DOMAIN}/instance"])
        self.api.advance(by_s)
        self.api.make_ready()
        self.api.end_pods()

    def standing(self) -> set[str]:
        known = (made for _, made in self.api.of("configmaps"))
        return {self._instance(made) for made in known if made["metadata"]["name"] in self._names}

    def serving(self) -> set[str]:
        return {
            self._instance(pod)
            for _, pod in self.api.of("pods")
            if is_ready(pod)
            and "deletionTimestamp" not in pod["metadata"]
            and pod["metadata"]["name"].removesuffix("-0-0") in self._names
        }

    def _instance(self, made: Mapping[str, Any]) -> str:
        # By its name: somebody may have taken its labels away.
        return self._names[str(made["metadata"]["name"]).removesuffix("-0-0")]

    def without_secret(self) -> set[str]:
        return self.serving() - {self._instance(made) for _, made in self.api.of("secrets")}


class SkyStage:
    """Clusters that SkyPilot's server rents."""

    def __init__(self, folder: Path, kinds: Sequence[str], region: str) -> None:
        del folder
        self.fault: str | None = None
        self.now_s = BEGAN_S
        self._sky = SmallSky()
        self._broken = False
        self._offers = [
            Offer(region=region, node_type=kind, available=KIND_COUNT, usd_per_hour=1.0)
            for kind in kinds
        ]

    def close(self) -> None:
        """Nothing runs."""

    def argv(self, instance: str) -> tuple[str, ...]:
        del instance
        return ("sleep", "{port}")

    def deployer(self) -> SkyDeployer:
        asked = SimpleNamespace(Task=self._sky.Task)
        for verb in (
            "get",
            "status",
            "queue",
            "api_status",
            "api_cancel",
            "launch",
            "exec",
            "down",
        ):
            setattr(asked, verb, self._spoiled(verb))
        asked.tail_logs = self._spoiled("tail_logs")
        return SkyDeployer(
            self._offers, SkypilotSettings(), sky=lambda: asked, clock=lambda: self.now_s
        )

    def _spoiled(self, verb: str) -> Callable[..., Any]:
        act = getattr(self._sky, verb)
        return lambda *words, **named: self._answer(verb, lambda: act(*words, **named))

    def _answer(self, verb: str, act: Callable[[], Any]) -> Any:
        fault, writes = self.fault, verb in ("launch", "exec", "down", "api_cancel")
        silence = type("ApiServerConnectionError", (Exception,), {})("no answer")
        if fault is None:
            self._broken = False
        # What was answered is at hand: only asking goes wrong.
        if verb == "get":
            return act()
        if fault == "time-out" or self._broken:
            raise silence
        if fault == "denied":
            raise PermissionError("denied")
        if fault == "quota" and verb == "launch":
            raise type("QuotaExceededError", (Exception,), {})("no GPUs left of the quota")
        answer = act()
        for cluster in self._sky.clusters.values():
            if cluster["launched_at"] < BEGAN_S:
                cluster["launched_at"] = self.now_s
        if fault == "late" or (fault == "half-started" and writes):
            self._broken = fault == "half-started"
            raise silence
        if fault in ("silent", "errors") and verb in ("status", "queue"):
            return []
        if fault == "cut" and verb == "status":
            return [{**each, "last_creation_yaml": None} for each in answer]
        return spoil_rows(fault, answer) if fault and verb in ("status", "queue") else answer

    def live(self, by_s: float) -> None:
        self.now_s += by_s
        for name in list(self._sky.clusters):
            # What was drained has ended, and its machine goes down by itself.
            if len(self._sky.jobs[name]) > 1:
                self._sky.clusters.pop(name)

    def standing(self) -> set[str]:
        return {self._instance(name) for name in self._sky.clusters}

    def serving(self) -> set[str]:
        return {
            self._instance(name) for name in self._sky.clusters if len(self._sky.jobs[name]) == 1
        }

    def _instance(self, name: str) -> str:
        labels = read_task_labels(self._sky.clusters[name]["last_creation_yaml"])
        assert labels is not None
        return labels.instance

    def without_secret(self) -> set[str]:
        # Secrets are on the machines themselves.
        return set()


STAGES: Mapping[str, type[LocalStage | SlurmStage | KubeStage | SkyStage | JoinedStage]] = {
    "local": LocalStage,
    "joined": JoinedStage,
    "slurm": SlurmStage,
    "kubernetes": KubeStage,
    "skypilot": SkyStage,
}


def _refuse(status: int, message: str) -> HttpAnswer:
    said = {"kind": "Status", "code": status, "message": message}
    return HttpAnswer(status, json.dumps(said).encode())
