"""A stand-in for the head of a Ray cluster, which answers as a real one did."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from typing import Any

from atoll.deploy.ray.ray_deployer import RayDeployer
from atoll.deploy.ray.ray_package import RayNode, RayOrder, RayState
from atoll.deploy.ray.ray_settings import RaySettings
from atoll.deploy.target import DeployError, FailureKind, InstanceState

NOW_S = 1_794_953_009.0


def make_node(name: str, accelerator: str | None, gpus: int, **fields: Any) -> dict[str, Any]:
    """Return a machine as Ray 2.60 lists it."""
    typed = {f"accelerator_type:{accelerator}": 1.0} if accelerator else {}
    return {
        "node_id": f"id-{name}",
        "node_ip": "10.0.0.1",
        "is_head_node": False,
        "state": "ALIVE",
        "state_message": None,
        "node_name": name,
        "resources_total": {**typed, "CPU": 4.0, "memory": 1e10} | ({"GPU": gpus} if gpus else {}),
        "labels": {"ray.io/node-id": f"id-{name}"},
        **fields,
    }


class FakeRay:
    """A cluster of which every part can be set; jobs that are submitted run until they are stopped.

    `heeds` says whether a job that is told to stop does, `refusal` is raised by the next submission, and
    `takes_refused` has it taken nevertheless.
    """

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.machines = list(nodes) or [make_node("m1", "L4", 2), make_node("m2", "T4", 4)]
        self.placed: list[dict[str, Any]] = []
        self.living: list[dict[str, Any]] = []
        self.records: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.files: dict[tuple[str, str], str] = {}
        self.packages: dict[str, bytes] = {}
        self.heeds = True
        self.refusal: DeployError | None = None
        self.takes_refused = False

    def nodes(self) -> Sequence[dict[str, Any]]:
        return self.machines

    def groups(self) -> Sequence[dict[str, Any]]:
        return self.placed

    def actors(self) -> Sequence[dict[str, Any]]:
        return self.living

    def jobs(self) -> Sequence[dict[str, Any]]:
        return list(self.records.values())

    def submit(self, job: dict[str, Any]) -> None:
        name = job["submission_id"]
        refusal, self.refusal = self.refusal, None
        if refusal is not None and not self.takes_refused:
            raise refusal
        if name in self.records:
            raise DeployError(f"{name} exists", kind="settings")
        self.records[name] = {
            **job,
            "type": "SUBMISSION",
            "status": "RUNNING",
            "message": "Job is currently running.",
            "start_time": int(NOW_S * 1e3),
            "end_time": None,
        }
        self.logs[name] = f"Running entrypoint for job {name}: {job['entrypoint']}\n"
        if name.endswith("-stop"):
            self.end(name.removesuffix("-stop"), "STOPPED")
        if refusal is not None:
            raise refusal

    def stop(self, job: str) -> None:
        if job in self.records and self.records[job]["status"] == "RUNNING" and self.heeds:
            self.end(job, "STOPPED")

    def forget(self, job: str) -> None:
        del self.records[job]

    def job_log(self, job: str) -> str:
        return self.logs.get(job, "")

    def tail(self, node: str, file: str, lines: int) -> str:
        if (node, file) not in self.files:
            raise DeployError("Ray refuses: there is no such file", kind="unreachable")
        return "\n".join(self.files[node, file].splitlines()[-lines:])

    def upload(self, name: str, package: bytes) -> str:
        self.packages[f"gcs://{name}"] = package
        return f"gcs://{name}"

    # What happens in the cluster

    def end(self, job: str, status: str, message: str = "", at_s: float = NOW_S) -> None:
        self.records[job] |= {"status": status, "message": message, "end_time": int(at_s * 1e3)}

    def say(
        self,
        job: str,
        state: InstanceState,
        reason: str = "",
        kind: FailureKind | None = None,
        hosts: Sequence[str] = ("m1",),
    ) -> str:
        nodes = tuple(
            RayNode(node=f"n{at}", machine=f"id-{host}", host=host, log=f"{job}.n{at}.log")
            for at, host in enumerate(hosts)
        )
        said = RayState(state=state, since_s=NOW_S, reason=reason, kind=kind, nodes=nodes)
        self.logs[job] += said.line() + "\n"
        return said.line()

    def order_of(self, job: str) -> RayOrder:
        return RayOrder.from_json(self.unpack(job)["order.json"])

    def unpack(self, job: str) -> dict[str, str]:
        package = self.packages[self.records[job]["runtime_env"]["working_dir"]]
        with zipfile.ZipFile(io.BytesIO(package)) as packed:
            modes = {info.external_attr >> 16 for info in packed.infolist()}
            assert modes == {0o600}
            return {name: packed.read(name).decode() for name in packed.namelist()}

    def shown(self) -> str:
        """Return all that anybody who opens the dashboard can read."""
        return json.dumps(list(self.records.values())) + "".join(self.logs.values())


def make_deployer(ray: FakeRay, **settings: Any) -> RayDeployer:
    """Return a deployer on a stand-in; time stands still."""
    return RayDeployer(
        ray, RaySettings(**settings), drain_s=30.0, clock=lambda: NOW_S, sleep=lambda _s: None
    )
