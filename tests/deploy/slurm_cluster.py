"""A real Slurm for tests: munged, slurmctld and several slurmd on this host, on loopback, in one folder.

Needs root, since slurmd switches users, and the Debian packages slurm-wlm and munge. They are installed only
where ATOLL_INSTALL_SLURM=1 says so. Nodes n1, n3, ... have two L4 and n2, n4, ... four T4; a file stands for
every device, nothing opens it. Partitions: `long` without a limit, `short` of two minutes, and `members` for
the account `lab` alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

INSTALL = "ATOLL_INSTALL_SLURM"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo", "scancel", "srun")
_START_S = 60.0


def why_not() -> str | None:
    """Return why no cluster can be started here, None where one can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root: slurmd switches users"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing and os.environ.get(INSTALL) == "1" and shutil.which("apt-get"):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for argv in (["apt-get", "update"], ["apt-get", "install", "-y", "slurm-wlm", "munge"]):
            subprocess.run(argv, env=quiet, check=False, capture_output=True, timeout=600)
        missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: install slurm-wlm and munge, or set {INSTALL}=1"
    return None


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class SlurmCluster:
    """A running cluster; `environment` is what Slurm's commands need to find it."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.nodes = tuple(f"n{i}" for i in range(1, nodes + 1))
        self.conf = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, *argv: str) -> str:
        """Run one of Slurm's commands and return what it says."""
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def start(self) -> None:
        """Start everything and wait until all nodes are idle."""
        for name in ("state", "log", "dev", "munge", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, mode=0o755)
        munge = self.folder / "munge"
        key = munge / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        parts = ("key-file=key", "socket=socket", "pid-file=pid", "log-file=log", "seed-file=seed")
        where = [f"--{name}={munge}/{file}" for name, file in (part.split("=") for part in parts)]
        self._begin("munged", ["munged", "--foreground", "--force", *where])
        self._await((munge / "socket").exists, "munged")
        self._configure()
        self._begin("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        for node in self.nodes:
            self._begin(f"slurmd-{node}", ["slurmd", "-D", "-N", node, "-f", str(self.conf)])
        self._await(self._is_idle, "the nodes")

    def stop(self) -> None:
        """End all jobs, then all parts, the youngest first."""
        if self._processes:
            user = f"--user={os.geteuid()}"
            subprocess.run(
                ["scancel", user], env=self.environment, check=False, capture_output=True
            )
            subprocess.run(
                ["scancel", "--signal=KILL", "--full", user],
                env=self.environment,
                check=False,
                capture_output=True,
            )
            # Without slurmd nobody would end what a job left behind.
            until_s = time.monotonic() + 20
            while self._has_jobs() and time.monotonic() < until_s:
                time.sleep(0.2)
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @contextmanager
    def silent_controller(self, *, kill: bool) -> Iterator[None]:
        """Have slurmctld say nothing for a while: paused, or killed and started again from its state."""
        at = next(n for n, each in enumerate(self._processes) if "slurmctld" in str(each.args))
        process = self._processes[at]
        process.send_signal(signal.SIGKILL if kill else signal.SIGSTOP)
        try:
            if kill:
                process.wait()
            yield
        finally:
            if kill:
                self._begin("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
                # In its old place: parts are ended from the last to the first.
                self._processes[at] = self._processes.pop()
            else:
                process.send_signal(signal.SIGCONT)

    def _begin(self, name: str, argv: Sequence[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("wb") as log:
            self._processes.append(
                subprocess.Popen(argv, env=self.environment, stdout=log, stderr=log)
            )

    def _has_jobs(self) -> bool:
        done = subprocess.run(
            ["squeue", "-h"], env=self.environment, capture_output=True, text=True, check=False
        )
        return bool(done.stdout.strip())

    def _is_idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "-h", "-p", "long", "-t", "idle", "-o", "%D"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() == str(len(self.nodes))

    def _await(self, is_there: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + _START_S
        while not is_there():
            for process in self._processes:
                assert process.poll() is None, f"{process.args!r} ended; see {self.folder}/log"
            assert time.monotonic() < until_s, f"{what} did not start; see {self.folder}/log"
            time.sleep(0.2)

    def _configure(self) -> None:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        every = f"n[1-{len(self.nodes)}]"
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={_free_port()}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge/socket",
            "CredType=cred/munge",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld",
            f"SlurmdLogFile={folder}/log/slurmd-%n",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=bf_interval=1,sched_interval=2",
            "GresTypes=gpu",
            "ReturnToService=2",
            "KillWait=5",
            "MinJobAge=60",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SlurmdParameters=config_overrides",
        ]
        gres = []
        for number, node in enumerate(self.nodes, 1):
            kind, count = ("l4", 2) if number % 2 else ("t4", 4)
            for device in range(count):
                (folder / "dev" / f"{node}-gpu{device}").touch()
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={_free_port()} CPUs=8 "
                f"RealMemory=1000 Gres=gpu:{kind}:{count} State=UNKNOWN"
            )
            gres.append(
                f"NodeName={node} Name=gpu Type={kind} File={folder}/dev/{node}-gpu[0-{count - 1}] "
                "Flags=nvidia_gpu_env"
            )
        lines += [
            f"PartitionName=long Nodes={every} Default=YES MaxTime=INFINITE State=UP",
            f"PartitionName=short Nodes={every} MaxTime=2 State=UP",
            f"PartitionName=members Nodes={every} AllowAccounts=lab State=UP",
        ]
        self.conf.write_text("\n".join([*lines, ""]), "utf-8")
        (folder / "gres.conf").write_text("\n".join([*gres, ""]), "utf-8")


@contextmanager
def slurm_cluster(folder: Path, nodes: int = 3) -> Iterator[SlurmCluster]:
    """Run a cluster in a folder, which must be empty or absent."""
    cluster = SlurmCluster(folder, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
