"""A real Ray for tests: a head and several machines on this host, each a `ray start` of its own.

A machine says that it has GPUs of a type; nothing opens them. It dies as machines do: all of its processes at
once, with all that they started.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.supervise.supervisor import descendants

_START_S = 300.0
"""A busy machine is slow to start Ray's many processes."""

_PATIENT = """
import time
import ray._private.services as services
from ray.scripts.scripts import main

ask = services.get_node

def ask_patiently(*words):
    for _ in range(600):
        try:
            return ask(*words)
        except RuntimeError:
            time.sleep(0.5)
    return ask(*words)

services.get_node = ask_patiently
main()
"""
"""`ray`, which by itself gives up on a machine that the head does not know within 30 s."""

Machine = tuple[str, str, int]
"""A machine's name, the type that Ray knows its GPUs by, and how many it has."""


def why_not() -> str | None:
    """Return why no cluster can be started here, None where one can."""
    if find_spec("ray") is None or find_spec("aiohttp") is None:
        return "needs the extra 'ray' (pip install 'atoll[ray]')"
    return None


class RayCluster:
    """A running cluster, whose dashboard is at `url`."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = tuple(machines)
        # Sockets lie in it, whose paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="ray"))
        gcs, dashboard, self._client = free_ports(3)
        self.address, self.url = f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the head, then every machine, and wait until it is known."""
        port, dashboard = self.address.rpartition(":")[2], self.url.rpartition(":")[2]
        self._begin(
            "head",
            *("--head", "--port", port, "--dashboard-port", dashboard),
            *("--ray-client-server-port", str(self._client), "--temp-dir", str(self.folder)),
            *("--num-cpus", "1", "--num-gpus", "0", "--disable-usage-stats"),
        )
        self._await("head")
        # One after the other, or they would take longer.
        for name, accelerator, gpus in self._machines:
            typed = json.dumps({f"accelerator_type:{accelerator}": 1})
            self._begin(
                name,
                *("--address", self.address, "--resources", typed),
                *("--num-cpus", "4", "--num-gpus", str(gpus)),
            )
            self._await(name)

    def kill(self, name: str) -> None:
        """End a machine as a power cut does."""
        process = self._processes.pop(name)
        # Parents first: whoever is left could say goodbye, or start something anew.
        _end((process.pid, *descendants(process.pid)))
        process.wait()

    def stop(self) -> None:
        """End everything."""
        for name in reversed(list(self._processes)):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def list_living(self) -> list[str]:
        """Return the names of the machines that the head takes for alive."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v0/nodes?limit=1000", timeout=30) as said:
                nodes = json.load(said)["data"]["result"]["result"]
        except (OSError, ValueError):
            return []
        return [node["node_name"] for node in nodes if node["state"] == "ALIVE"]

    def _begin(self, name: str, *options: str) -> None:
        listen, grpc, runtime = free_ports(3)
        argv = [
            *(sys.executable, "-c", _PATIENT, "start", "--block"),
            *("--node-name", name, "--node-ip-address", "127.0.0.1"),
            *("--dashboard-agent-listen-port", str(listen)),
            *("--dashboard-agent-grpc-port", str(grpc), "--runtime-env-agent-port", str(runtime)),
            *("--min-worker-port", "0", "--max-worker-port", "0"),
            *("--object-store-memory", str(80 * 2**20), *options),
        ]
        # Processes that nobody asked for yet cost seconds of every core.
        quiet = {"RAY_prestart_worker_first_driver": "0", "RAY_DISABLE_DOCKER_CPU_WARNING": "1"}
        environment = {**os.environ, **quiet, "RAY_USAGE_STATS_ENABLED": "0"}
        environment.pop("RAY_ADDRESS", None)
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await(self, name: str) -> None:
        until_s, process = time.monotonic() + _START_S, self._processes[name]
        while name not in self.list_living():
            said = (self.folder / f"{name}.log").read_text("utf-8", "replace")
            assert process.poll() is None, f"{name} ended: {said[-3000:]}"
            assert time.monotonic() < until_s, f"{name} does not come: {said[-3000:]}"
            time.sleep(0.3)


def _end(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def ray_cluster(machines: Sequence[Machine]) -> Iterator[RayCluster]:
    """Run a cluster."""
    cluster = RayCluster(machines)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
