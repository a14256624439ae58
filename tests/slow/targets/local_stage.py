"""The local target with its files as they may be found: late, cut, empty, gone, or not to be written.

Instances are processes of this machine that hold the lock of their folder, as daemons do, and do nothing
else; what a daemon writes down is written by the stage, in virtual time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar
from unittest import mock

from atoll.deploy.local import local_deployer
from atoll.deploy.local.daemon import (
    ORDER,
    STATE,
    DaemonOrder,
    DaemonState,
    ProcessId,
    process_start,
)
from atoll.deploy.local.gpu_slots import pretend_machines
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.target import DeployError, InstanceState, InstanceStatus, StartOrder
from atoll.plan.problem import Offer
from tests.slow.targets.faults import BEGAN_S, KIND_COUNT, SECRET

T = TypeVar("T")


class LocalStage:
    """A folder of the local target, and the processes that stand for its instances."""

    def __init__(self, folder: Path, kinds: Sequence[str], region: str) -> None:
        self.fault: str | None = None
        self.now_s = BEGAN_S
        self._folder = folder
        offers = [
            Offer(region=region, node_type=kind, available=KIND_COUNT, usd_per_hour=1.0)
            for kind in kinds
        ]
        self.machines = pretend_machines(offers)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._broken = False

    def deployer(self) -> LocalDeployer:
        return _SpoiledLocal(self, self._folder)

    def argv(self, instance: str) -> tuple[str, ...]:
        del instance
        return ("sleep", "{port}")

    def begin(self, home: Path, lock: int) -> None:
        """Start what stands for a daemon: it holds the lock."""
        if self.fault == "half-started":
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        process = subprocess.Popen(["sleep", "infinity"], pass_fds=(lock,))
        self._processes[process.pid] = process
        self._write(home, process.pid, "starting")

    def answer(self, act: Callable[[], T], *, starts: bool = False) -> T:
        """Do what was asked of the target, as far as the fault of now lets it."""
        fault = self.fault
        if fault is None:
            self._broken = False
        if self._broken:
            fault = "time-out"
        with contextlib.ExitStack() as spoiled:
            if fault in ("time-out", "denied"):
                code = errno.ETIMEDOUT if fault == "time-out" else errno.EACCES
                spoiled.enter_context(_fail_reads(OSError(code, os.strerror(code))))
            elif fault in ("cut", "silent", "errors"):
                spoiled.enter_context(self._spoil_states(fault))
            elif fault in ("no rows", "partial") and not starts:
                spoiled.enter_context(self._hide_homes(fault))
            elif fault == "quota" and starts:
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                spoiled.enter_context(
                    mock.patch.object(local_deployer, "atomic_write", side_effect=full)
                )
            try:
                done = act()
            finally:
                self._broken |= fault == "half-started" and starts
        if fault == "late":
            raise DeployError("the folder does not answer", kind="unreachable")
        return done

    @contextlib.contextmanager
    def _spoil_states(self, fault: str) -> Iterator[None]:
        kept = {path: path.read_text() for path in self._folder.glob(f"f-*/i-*/{STATE}")}
        for path, text in kept.items():
            path.write_text({"cut": text[: len(text) // 2], "silent": ""}.get(fault, "{}"))
        try:
            yield
        finally:
            for path, text in kept.items():
                path.write_text(text)

    @contextlib.contextmanager
    def _hide_homes(self, fault: str) -> Iterator[None]:
        homes = sorted(self._folder.glob("f-*/i-*"))
        hidden = homes if fault == "no rows" else homes[::2]
        for home in hidden:
            home.rename(home.with_name(f"hidden-{home.name}"))
        try:
            yield
        finally:
            for home in hidden:
                home.with_name(f"hidden-{home.name}").rename(home)

    def live(self, by_s: float) -> None:
        self.now_s += by_s
        for home, state in self._states():
            process = self._processes[state.daemon.pid]
            if process.poll() is not None and state.state not in ("gone", "failed"):
                self._write(home, process.pid, "gone")
            elif state.state == "starting":
                self._write(home, process.pid, "ready")

    def _write(self, home: Path, pid: int, state: InstanceState) -> None:
        daemon = ProcessId(pid=pid, start=process_start(pid) or "ended")
        written = DaemonState(daemon=daemon, state=state, since_s=self.now_s)
        (home / STATE).write_text(written.to_json())

    def _states(self) -> list[tuple[Path, DaemonState]]:
        found = sorted(self._folder.glob(f"f-*/i-*/{STATE}"))
        return [(path.parent, DaemonState.from_json(path.read_text())) for path in found]

    def _alive(self, *states: InstanceState) -> set[str]:
        return {
            DaemonOrder.from_json((home / ORDER).read_text()).labels.instance
            for home, state in self._states()
            if state.state in states and self._processes[state.daemon.pid].poll() is None
        }

    def standing(self) -> set[str]:
        return self._alive("starting", "ready", "draining")

    def serving(self) -> set[str]:
        return self._alive("ready")

    def without_secret(self) -> set[str]:
        # A secret is a file of its owner's, which the target only names.
        orders = [DaemonOrder.from_json((home / ORDER).read_text()) for home, _ in self._states()]
        files = {order.labels.instance: Path(order.nodes[0].env[SECRET]) for order in orders}
        return {name for name in self.serving() if not files[name].exists()}

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.kill()
            process.wait()


class _SpoiledLocal(LocalDeployer):
    """The local target as a controller asks it."""

    def __init__(self, stage: LocalStage, folder: Path) -> None:
        super().__init__(stage.machines, folder, settle_s=0.0, clock=lambda: stage.now_s)
        self._stage = stage

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        listed = self._stage.answer(lambda: super(_SpoiledLocal, self).list(fleet))
        if self._stage.fault == "duplicate":
            return (*listed, *listed)
        return listed[::-1] if self._stage.fault == "reordered" else listed

    def start(self, order: StartOrder) -> InstanceStatus:
        return self._stage.answer(lambda: super(_SpoiledLocal, self).start(order), starts=True)

    def drain(self, handle: str, term: int) -> None:
        self._stage.answer(lambda: super(_SpoiledLocal, self).drain(handle, term))

    def stop(self, handle: str, term: int) -> None:
        self._stage.answer(lambda: super(_SpoiledLocal, self).stop(handle, term))

    def _start_daemon(self, home: Path, lock: int) -> None:
        self._stage.begin(home, lock)


def _fail_reads(error: OSError) -> contextlib.AbstractContextManager[object]:
    """Have every file that is read fail as the operating system would say it."""
    from atoll.core.files import unreadable

    failed = lambda path, *_: (_ for _ in ()).throw(unreadable(error, path))  # noqa: E731
    return mock.patch.object(local_deployer, "read_text_limited", side_effect=failed)
