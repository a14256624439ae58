"""The local target: instances are processes of this machine, each instance under a daemon of its own.

    machines = find_machines()
    deployer = LocalDeployer(machines, Path("~/.local/state/atoll/local"))
    status = deployer.start(order)

Everything known stands in a folder: for each instance its order with its labels, what its daemon sees, and
the logs of its nodes. A controller that starts anew, or elsewhere on this machine, finds all of it there.
Calls take a lock on the folder, so that two controllers never give a GPU twice, and an order of an older
term than the newest one seen is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

from atoll.core.errors import AtollError, InputError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.deploy.labels import Labels
from atoll.deploy.local.daemon import (
    LOCK,
    ORDER,
    STATE,
    DaemonNode,
    DaemonOrder,
    DaemonState,
    ProcessId,
    process_start,
    take_lock,
)
from atoll.deploy.local.gpu_slots import (
    HeldSlots,
    PoolMachine,
    SlotRequest,
    allocate_slots,
    list_offers,
    visible_devices,
)
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import DeployError, InstanceStatus, StartOrder
from atoll.deploy.terms import fence_term
from atoll.plan.problem import Offer
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.supervise.supervised_process import last_lines

F = TypeVar("F", bound=Frozen)

_PORT = "{port}"
_POLL_S = 0.02
DAEMON_START_S = 30.0
"""How long a daemon may take to begin; a busy machine is slow to start Python."""
STOP_WAIT_S = 15.0
LOCK_WAIT_S = 60.0
MAX_NAME_CHARACTERS = 200
_MAX_STATE_BYTES = 2**20
NOT_INHERITED = ("ATOLL_FABRIC", "ATOLL_ENGINE_KEY", "HF_TOKEN")
"""Variables of the controller that instances do not inherit; they get theirs by file."""


class LocalDeployer:
    """See the module. `drain_s` is how long a draining instance may take to finish its streams.

    `settle_s` is how long `start` looks whether a command ends at once, `keep_s` how long an ended instance
    is still listed. Instances end with the process `owner`, where one is given.
    """

    name = "local"

    def __init__(
        self,
        machines: Sequence[PoolMachine],
        folder: Path,
        *,
        drain_s: float = 600.0,
        settle_s: float = 0.5,
        keep_s: float = 3600.0,
        clock: Callable[[], float] = time.time,
        owner: ProcessId | None = None,
    ) -> None:
        names = [machine.name for machine in machines]
        if len(set(names)) < len(names):
            raise InputError("two machines have one name", field="machines", hint="name each one")
        self._machines = {machine.name: machine for machine in machines}
        self._folder = folder.expanduser()
        self._drain_s, self._settle_s, self._keep_s = drain_s, settle_s, keep_s
        self._clock, self._owner = clock, owner
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DeployError(
                f"cannot make {self._folder}: {error.strerror}",
                kind="settings",
                hint="name a folder you may write to",
            ) from error

    def offers(self) -> Sequence[Offer]:
        """Return this machine's own GPUs, those in use included."""
        return list_offers(self._machines.values())

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        """Return every instance of a fleet that stands here, in the order of their names."""
        with self._say_failures():
            homes = sorted(self.fleet_folder(fleet).glob("i-*"))
            return tuple(found for home in homes if (found := self._look(home)) is not None)

    def start(self, order: StartOrder) -> InstanceStatus:
        """Start every node of an instance; DeployError says why it cannot stand here."""
        labels = order.labels
        home = self.home_of(labels)
        with self._say_failures(), self._fence(labels.fleet, labels.term):
            status = self._look(home)
            # One that failed before it had a daemon (there is no state) may be ordered again.
            if status is not None and (status.state != "failed" or (home / STATE).exists()):
                if status.labels.placement != labels.placement:
                    raise DeployError(
                        f"{labels.instance} stands here with another layout",
                        kind="settings",
                        hint="give every instance a name of its own",
                    )
                return status
            self._forget_old(labels.fleet)
            self._begin(home, order)
        return self._settle(home)

    def drain(self, handle: str, term: int) -> None:
        """Have every command of an instance end when its streams have."""
        home = self.home_of_handle(handle)
        with self._say_failures(), self._fence(self._fleet_of(home), term):
            state = self._read_state(home)
            if state is not None and state.state in ("starting", "ready"):
                _signal_process(state.daemon, signal.SIGTERM)

    def stop(self, handle: str, term: int) -> None:
        """End an instance and wait until nothing of it is left."""
        home = self.home_of_handle(handle)
        with self._say_failures(), self._fence(self._fleet_of(home), term):
            self._end(home)

    def logs(self, handle: str, lines: int = 100) -> str:
        """Return the last lines of each node, with its name before them where there are several."""
        home = self.home_of_handle(handle)
        order = self._read_order(home)
        if order is None:
            raise DeployError(f"there is no instance {handle} here", kind="ended")
        several = len(order.nodes) > 1
        words = []
        for node in order.nodes:
            mark = f"{node.node}: " if several else ""
            said = last_lines(home / f"{node.node}.log", lines)
            words += [f"{mark}{line}" for line in said]
        return "\n".join(words)

    def close(self, drain_s: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """End all instances of all fleets, as whose machine it is may: they have so many seconds to finish.

        Once `is_hurried` they have none.
        """
        left = [home for home in self._folder.glob("f-*/i-*") if not self._is_over(home)]
        for home in left:
            state = self._read_state(home)
            if state is not None and drain_s > 0:
                _signal_process(state.daemon, signal.SIGTERM)
        until_s = time.monotonic() + drain_s
        while left and time.monotonic() < until_s and not is_hurried():
            time.sleep(_POLL_S)
            left = [home for home in left if not self._is_over(home)]
        for home in left:
            self._end(home)

    def _end(self, home: Path) -> None:
        """End an instance now, and wait until nothing of it is left."""
        state = self._wait_begin(home)
        if state is None:
            return
        _signal_process(state.daemon, signal.SIGINT)
        if self._wait_end(home, STOP_WAIT_S):
            return
        # A daemon that does not listen: its supervisors end the rest when it is gone.
        _signal_process(state.daemon, signal.SIGKILL)
        self._wait_end(home, STOP_WAIT_S / 2)
        for process in (self._read_state(home) or state).processes:
            _signal_process(process, signal.SIGKILL)
        if not self._wait_end(home, STOP_WAIT_S / 2):
            raise DeployError(f"{home.name[2:]} does not end", kind="unreachable")

    # Starting

    def _begin(self, home: Path, order: StartOrder) -> None:
        # Checked before anything is held or written.
        for command in order.commands:
            _check_programs(command)
            _check_secrets(command)
        held = self._allocate(order)
        listening = [_PORT in " ".join(command.argv) for command in order.commands]
        ports = iter(self._choose_ports(sum(listening)))
        nodes = tuple(
            self._keep_node(command, slots, next(ports) if listens else None)
            for command, slots, listens in zip(order.commands, held, listening, strict=True)
        )
        kept = DaemonOrder(
            labels=order.labels,
            nodes=nodes,
            held=held,
            ready_s=order.ready_s,
            drain_s=self._drain_s,
            ordered_s=self._clock(),
            owner=self._owner,
        )
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = take_lock(home)
        if lock is None:
            raise DeployError(f"{order.labels.instance} has a daemon already", kind="settings")
        try:
            # Before the daemon starts: it reads this, and others see by it which slots are held.
            atomic_write(home / ORDER, kept.to_json(indent=2) + "\n")
            self._start_daemon(home, lock)
        finally:
            # The daemon holds it from now on; where none was started, nobody does.
            os.close(lock)
        # The call returns as soon as the daemon has left this session; its state says that it has begun.
        until_s = time.monotonic() + DAEMON_START_S
        while not (home / STATE).exists():
            if time.monotonic() > until_s:
                words = last_lines(home / "daemon.log", 1)
                raise DeployError(
                    f"the daemon of {order.labels.instance} does not start: {''.join(words)}",
                    kind="settings",
                )
            time.sleep(_POLL_S)

    def _start_daemon(self, home: Path, lock: int) -> None:
        with (home / "daemon.log").open("ab") as log:
            subprocess.run(
                [sys.executable, "-m", "atoll.deploy.local.daemon", str(home), str(lock)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if k not in NOT_INHERITED},
                pass_fds=(lock,),
                check=False,
                timeout=DAEMON_START_S,
            )

    def _keep_node(self, command: NodeCommand, held: HeldSlots, port: int | None) -> DaemonNode:
        argv = tuple(word.replace(_PORT, str(port)) for word in command.argv)
        machine = self._machines[held.machine]
        env = dict(command.env) | dict(command.secrets) | visible_devices(machine, held.slots)
        return DaemonNode(node=command.node, argv=argv, env=env, port=port)

    def _allocate(self, order: StartOrder) -> tuple[HeldSlots, ...]:
        hosts = {node.id: node.host for node in order.instance.nodes}
        requests = [
            SlotRequest(each.node, each.node_type, each.gpus, hosts.get(each.node))
            for each in order.commands
        ]
        machines = [m for m in self._machines.values() if m.name not in order.avoid_hosts]
        given = allocate_slots(machines, self.list_held(), requests)
        # What has ended gives its GPUs back within moments, which is worth the wait.
        until_s = time.monotonic() + STOP_WAIT_S
        while isinstance(given, SlotRequest) and self._is_ending() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
            given = allocate_slots(machines, self.list_held(), requests)
        if isinstance(given, SlotRequest):
            aside = sorted(self._machines.keys() & set(order.avoid_hosts))
            besides = f", {', '.join(aside)} set aside" if aside else ""
            raise DeployError(
                f"no room for {given.gpus} of {given.node_type} of {order.labels.instance} here{besides}",
                kind="capacity",
                hint="stop an instance, or plan with fewer",
            )
        return given

    def list_held(self) -> Iterator[HeldSlots]:
        """Return the slots held by instances of any fleet, also by those that are still ending."""
        for home in self._folder.glob("f-*/i-*"):
            order = self._read_order(home)
            if order is not None and not self._is_over(home):
                yield from order.held

    def _is_ending(self) -> bool:
        """Whether something that has failed or was stopped holds its GPUs for a moment yet."""
        return any(
            state.state in ("failed", "gone") and not self._is_over(home)
            for home in self._folder.glob("f-*/i-*")
            if (state := self._read_state(home)) is not None
        )

    def _choose_ports(self, count: int) -> Sequence[int]:
        """Return free ports that no instance that is still starting was promised."""
        taken = {
            node.port
            for home in self._folder.glob("f-*/i-*")
            if not self._is_over(home) and (order := self._read_order(home)) is not None
            for node in order.nodes
        }
        chosen: dict[int, None] = {}
        # A port that was promised to another may be free still, since nobody listens at it yet.
        while len(chosen) < count:
            for port in free_ports(count):
                if port not in taken and len(chosen) < count:
                    chosen[port] = None
        return tuple(chosen)

    def _settle(self, home: Path) -> InstanceStatus:
        """Look for a moment whether the instance ends at once, which is an error of the order."""
        until_s = time.monotonic() + self._settle_s
        while True:
            status = self._look(home)
            assert status is not None
            if status.state == "failed":
                raise DeployError(
                    f"{status.labels.instance} ended at once: {status.reason}",
                    kind=status.kind or "settings",
                )
            if status.state != "starting" or time.monotonic() > until_s:
                return status
            time.sleep(_POLL_S)

    def _forget_old(self, fleet: str) -> None:
        """Remove what ended long ago, with its logs."""
        oldest_s = self._clock() - self._keep_s
        for home in self.fleet_folder(fleet).glob("i-*"):
            state = self._read_state(home)
            if state is None:
                order = self._read_order(home)
                if order is None or order.ordered_s < oldest_s:
                    _discard_unborn(home)
            elif state.since_s < oldest_s and self._is_over(home):
                shutil.rmtree(home, ignore_errors=True)

    # Looking

    def _look(self, home: Path) -> InstanceStatus | None:
        """Return an instance as it stands; None where there is none."""
        order = self._read_order(home)
        if order is None:
            return None
        state = self._read_state(home)
        hosts = tuple(dict.fromkeys(each.machine for each in order.held))
        handle = f"{home.parent.name[2:]}/{home.name[2:]}"
        if state is None:
            # No state yet: the lock tells a daemon that begins from one that never came.
            kept = _is_locked(home / LOCK)
            return InstanceStatus(
                handle,
                order.labels,
                "starting" if kept else "failed",
                order.ordered_s,
                reason="" if kept else "its controller ended before it was started",
                kind=None if kept else "ended",
                hosts=hosts,
            )
        status = InstanceStatus(
            handle,
            order.labels,
            state.state,
            state.since_s,
            reason=state.reason,
            kind=state.kind,
            hosts=hosts,
        )
        if state.state in ("starting", "ready", "draining") and not _is_locked(home / LOCK):
            # Written before the daemon ended, or never again: look once more.
            again = self._read_state(home)
            if again is not None and again != state:
                return self._look(home)
            drained = state.state == "draining"
            return InstanceStatus(
                handle,
                order.labels,
                "gone" if drained else "failed",
                state.since_s,
                reason="its daemon was killed, or the machine started anew",
                kind=None if drained else "ended",
                hosts=hosts,
            )
        # The daemon has said its last word, but processes still end: their GPUs are not free.
        if state.state == "gone" and not self._is_over(home):
            return InstanceStatus(handle, order.labels, "draining", state.since_s, hosts=hosts)
        return status

    def _is_over(self, home: Path) -> bool:
        """Whether nothing of an instance runs any more."""
        if _is_locked(home / LOCK):
            return False
        state = self._read_state(home)
        return state is None or not any(map(_is_alive, state.processes))

    def _wait_begin(self, home: Path) -> DaemonState | None:
        """Return the state of an instance, once its daemon has begun; None where there is none any more."""
        until_s = time.monotonic() + DAEMON_START_S
        while (state := self._read_state(home)) is None and not _discard_unborn(home):
            if time.monotonic() > until_s:
                raise DeployError(f"the daemon of {home.name[2:]} hangs", kind="unreachable")
            time.sleep(_POLL_S)
        return state

    def _wait_end(self, home: Path, max_s: float) -> bool:
        until_s = time.monotonic() + max_s
        while not self._is_over(home):
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _read_order(self, home: Path) -> DaemonOrder | None:
        return _read(home / ORDER, DaemonOrder)

    def _read_state(self, home: Path) -> DaemonState | None:
        return _read(home / STATE, DaemonState)

    # Folders and terms

    def fleet_folder(self, fleet: str) -> Path:
        """Return where all of a fleet is kept."""
        return self._folder / f"f-{_quote(fleet)}"

    @contextmanager
    def _say_failures(self) -> Iterator[None]:
        """Have a disk that is full or does not answer be the target's refusal, not the controller's end."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise DeployError(
                f"cannot use {self._folder}: {(error.strerror or str(error)).lower()}",
                kind="quota" if full else "unreachable",
                hint="free some space there" if full else "check the disk it is on",
            ) from error

    def _fleet_of(self, home: Path) -> str:
        return unquote(home.parent.name[2:])

    def home_of(self, labels: Labels) -> Path:
        """Return where all of an instance is kept."""
        return self.fleet_folder(labels.fleet) / f"i-{_quote(labels.instance)}"

    def home_of_handle(self, handle: str) -> Path:
        """Return where all of an instance is kept, by its handle."""
        fleet, _, instance = handle.partition("/")
        return self.fleet_folder(unquote(fleet)) / f"i-{_quote(unquote(instance))}"

    def _fence(self, fleet: str, term: int) -> AbstractContextManager[None]:
        """Hold the folder's lock, all fleets': no GPU is given twice. Refuses an older term of this fleet."""
        return fence_term(
            self.fleet_folder(fleet),
            fleet,
            term,
            lock=self._folder / "lock",
            deadline_s=LOCK_WAIT_S,
        )


def _quote(name: str) -> str:
    text = quote(name, safe="")
    if not name or len(text) > MAX_NAME_CHARACTERS:
        raise DeployError("a name is empty or too long", kind="settings", hint="name it shorter")
    return text


def _read(path: Path, kind: type[F]) -> F | None:
    if not path.exists():
        return None
    try:
        return kind.from_json(read_text_limited(path, _MAX_STATE_BYTES), path=path)
    except AtollError as error:
        # Removed between the two looks.
        if not path.exists():
            return None
        raise DeployError(f"cannot read {path}: {error.message}", kind="settings") from error


def _is_locked(path: Path) -> bool:
    """Whether a daemon holds its lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two that look at a time do not take each other for a daemon.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _discard_unborn(home: Path) -> bool:
    """Remove what was ordered and has no daemon; whether it had none."""
    if not home.exists():
        return True
    descriptor = os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(home, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_alive(process: ProcessId) -> bool:
    return process_start(process.pid) == process.start


def _signal_process(process: ProcessId, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; whether it was there. A number used again is left alone."""
    try:
        if not hasattr(os, "pidfd_open"):
            if not _is_alive(process):
                return False
            os.kill(process.pid, number)
            return True
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        # The descriptor holds on to one process; only then is its beginning compared.
        if not _is_alive(process):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def _check_programs(command: NodeCommand) -> None:
    """Refuse a command, or one that it starts after `--`, whose program is not here."""
    path = dict(command.env).get("PATH")
    starts = [0, *(at + 1 for at, word in enumerate(command.argv) if word == "--")]
    for at in starts:
        if at >= len(command.argv) or shutil.which(command.argv[at], path=path) is None:
            name = command.argv[at] if at < len(command.argv) else "(nothing)"
            raise DeployError(
                f"{command.node} is to run {name}, which is not here",
                kind="settings",
                hint="install it, or give its path",
            )


def _check_secrets(command: NodeCommand) -> None:
    for variable, file in command.secrets:
        try:
            mode = os.stat(file).st_mode
        except OSError as error:
            raise DeployError(
                f"the file of {variable} cannot be read: {error.strerror}",
                kind="settings",
                hint="check its path",
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise DeployError(
                f"others may read {file}, which holds a secret",
                kind="settings",
                hint=f"chmod 600 {file}",
            )
