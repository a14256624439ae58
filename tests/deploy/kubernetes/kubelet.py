"""A kubelet for tests: binds pods to one machine and runs their commands as processes of this one."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.deploy.kubernetes.kube_client import KubeClient, KubeTransport
from atoll.deploy.kubernetes.kube_lease import read_time_s, write_time
from atoll.deploy.kubernetes.manifests import SECRETS

Json = dict[str, Any]
MACHINE = "test-machine"


@dataclass
class RunningPod:
    """The processes of a pod: its command, and the hook that ends it once it was asked to go."""

    process: subprocess.Popen[bytes]
    env: dict[str, str]
    hook: subprocess.Popen[bytes] | None = None


class ProcessKubelet:
    """Runs the pods of a namespace; `step` looks once."""

    def __init__(self, transport: KubeTransport, folder: Path) -> None:
        self._transport = transport
        self._client = KubeClient(transport, "default")
        self._folder = folder
        self.running: dict[str, RunningPod] = {}
        self.started: list[str] = []

    def step(self) -> None:
        pods = self._client.select("Pod")
        for pod in pods:
            meta = pod["metadata"]
            if meta.get("deletionTimestamp"):
                self._end(pod)
            elif not pod["spec"].get("nodeName"):
                self._bind(meta["name"])
            elif meta["uid"] not in self.running:
                self.running[meta["uid"]] = self._run(pod)
                self.started.append(meta["name"])
            else:
                self._report(pod)

    def close(self) -> None:
        for pod in self.running.values():
            for process in (pod.process, pod.hook):
                if process is not None and process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _bind(self, name: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": MACHINE}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        path = f"/api/v1/namespaces/default/pods/{name}/binding"
        self._transport.ask("POST", path, query={}, body=json.dumps(body).encode())

    def _run(self, pod: Json) -> RunningPod:
        container = pod["spec"]["containers"][0]
        folder = self._folder / pod["metadata"]["uid"]
        folder.mkdir(parents=True)
        env = {"PATH": os.environ["PATH"]}
        for each in container["env"]:
            env[each["name"]] = self._value(each).replace(SECRETS, str(folder))
        env["ATOLL_PORT"] = str(_free_port())
        for volume in pod["spec"]["volumes"]:
            for source in volume.get("projected", {}).get("sources", ()):
                self._write_secret(source["secret"], folder)
        argv = [_expand(word, env) for word in container["command"]]
        log = (folder / "log").open("wb")
        with log:
            process = subprocess.Popen(
                argv, env=env, stdout=log, stderr=log, start_new_session=True
            )
        return RunningPod(process, {**env, "ATOLL_PID": str(process.pid)})

    def _value(self, each: Json) -> str:
        if "value" in each:
            return str(each["value"])
        if "fieldRef" in each["valueFrom"]:
            return "127.0.0.1"
        reference = each["valueFrom"]["configMapKeyRef"]
        found = self._client.get("ConfigMap", reference["name"])
        assert found is not None
        return str(found["data"][reference["key"]])

    def _write_secret(self, reference: Json, folder: Path) -> None:
        found = self._client.get("Secret", reference["name"])
        assert found is not None
        for item in reference["items"]:
            content = base64.b64decode(found["data"][item["key"]])
            (folder / item["path"]).write_bytes(content)

    def _report(self, pod: Json) -> None:
        there = self.running[pod["metadata"]["uid"]]
        probe = pod["spec"]["containers"][0].get("readinessProbe")
        ready = there.process.poll() is None
        if ready and probe is not None:
            look = subprocess.run(
                probe["exec"]["command"], env=there.env, capture_output=True, check=False
            )
            ready = look.returncode == 0
        now = write_time(time.time())[:19] + "Z"
        old = pod.get("status", {}).get("conditions") or ()
        state = "True" if ready else "False"
        if any(c["type"] == "Ready" and c["status"] == state for c in old):
            return
        conditions = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": now},
            {"type": "Ready", "status": state, "lastTransitionTime": now},
        ]
        status = {"status": {"phase": "Running", "conditions": conditions}}
        self._transport.ask(
            "PATCH",
            f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}/status",
            query={},
            body=json.dumps(status).encode(),
            content_type="application/merge-patch+json",
        )

    def _end(self, pod: Json) -> None:
        meta = pod["metadata"]
        there = self.running.get(meta["uid"])
        if there is None or there.process.poll() is not None:
            self._client.delete("Pod", meta["name"], uid=meta["uid"], grace_s=0)
            return
        if there.hook is None:
            hook = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            there.hook = subprocess.Popen(hook, env=there.env, start_new_session=True)
        if time.time() > read_time_s(meta["deletionTimestamp"]):
            os.killpg(there.process.pid, signal.SIGKILL)
            there.process.wait()


def _expand(word: str, env: dict[str, str]) -> str:
    """Put variables for $(NAME) as Kubernetes does; $$( is a plain $(."""

    def put(match: re.Match[str]) -> str:
        return match[0][1:] if match[0].startswith("$$") else env[match[1]]

    return re.sub(r"\$?\$\((\w+)\)", put, word)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
