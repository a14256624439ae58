"""A fork server, kept running: the agent's side of it.

    fork_server = await ForkServer.start(folders)          # for this agent alone
    fork_server = await ForkServer.share(folders, path)    # for whoever connects to the socket as well
    fork_server = ForkServer.connect(path)                 # somebody else's
    fork_server.fork(command, orders, answers)          # False: start it from scratch

A fork server has a spare of its own that takes over when it is killed (see `fork_server`). Should both be
gone, it is started again in the background, with the pauses of `supervision`; until then, `fork` says no.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence

from atoll.core.errors import AtollError, UsageError
from atoll.runtime.supervise.start_watch import StartWatch
from atoll.runtime.supervise.supervised_process import Command
from atoll.runtime.supervise.supervision import Action, RestartLimits, Supervision

_LOG = logging.getLogger(__name__)
# A process that forks must not have threads.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_CONNECT_S = 0.5
_CLOSE_S = 10.0
_LOOK_S = 0.25
_WATCH_S = 1.0
"""Between two looks at whether it gets anywhere while it loads."""


class ForkServer:
    """Forks processes that need much code from one that has loaded it."""

    modules = frozenset(
        {
            "atoll.engine.node",
            "atoll.runtime.executor.executor_process",
            "atoll.runtime.instance.instance_process",
        }
    )
    program: tuple[str, ...] = ("-m", "atoll.runtime.supervise.fork_server")
    """Arguments with which Python runs it."""

    def __init__(self, folders: Sequence[str] = (), path: str | None = None) -> None:
        self._folders = tuple(folders)
        self._path = path
        self._orders: socket.socket | None = None
        """Where orders go: the line itself, or a connection to the socket at the path."""
        self._line: socket.socket | None = None
        """To the process that this one started; it ends when we close it, and we hear when it has."""
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.pid: int | None = None
        """The process that forks now; None while there is none, or it is somebody else's."""
        self.starts = 0
        """How often it was loaded."""

    @classmethod
    async def start(cls, folders: Sequence[str], timeout_s: float = 120.0) -> ForkServer:
        """Start one and wait until it has loaded what nodes of these models need."""
        return await cls._started(cls(folders), timeout_s)

    @classmethod
    async def share(cls, folders: Sequence[str], path: str, timeout_s: float = 120.0) -> ForkServer:
        """Start one that others connect to at the socket `path`; this one ends it."""
        return await cls._started(cls(folders, path), timeout_s)

    @classmethod
    def connect(cls, path: str) -> ForkServer:
        """Return one that others use as well, by its socket; it need not be there yet, or still."""
        return cls(path=path)

    @classmethod
    async def _started(cls, fork_server: ForkServer, timeout_s: float) -> ForkServer:
        await fork_server._load(timeout_s)
        fork_server._keeper = asyncio.create_task(
            fork_server._keep(timeout_s), name="keep fork_server"
        )
        return fork_server

    def fork(self, command: Command, orders: int, answers: int) -> bool:
        """Have the command forked under a supervisor; False if this cannot be done here and now."""
        if command.module not in self.modules:
            return False
        message = json.dumps(command.order(fork=True)).encode()
        # A connection that was good may have ended with the one who accepted it.
        for _ in range(2):
            link = self._orders or self._reach()
            if link is None:
                return False
            try:
                socket.send_fds(link, [message], [orders, answers])
            except OSError:
                if self._path is None:
                    return False
                link.close()
                self._orders = None
            else:
                return True
        return False

    def _reach(self) -> socket.socket | None:
        """Connect to the socket at the path; None if nobody answers there."""
        if self._path is None:
            return None
        found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found.settimeout(_CONNECT_S)
        try:
            found.connect(self._path)
        except OSError:
            found.close()
            return None
        self._orders = found
        return found

    async def close(self) -> None:
        """End it; what it forked stays."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        line, process = self._line, self._process
        if line is not None:
            with contextlib.suppress(OSError):
                # It reads the end of its orders and ends; the other direction stays open, to hear when it
                # has.
                line.shutdown(socket.SHUT_WR)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    while await self._hear(line):
                        pass
        self._forget()
        if process is not None:
            await process.wait()

    async def _load(self, timeout_s: float) -> None:
        """Start the process and wait for its greeting."""
        kind = socket.SOCK_SEQPACKET if self._path is None else socket.SOCK_STREAM
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        ours.setblocking(False)
        end = theirs.fileno()
        # Not a pipe: spares, and supervisors, would keep it open.
        with tempfile.TemporaryFile() as words:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *self.program),
                    *((str(end),) if self._path is None else ("--listen", self._path)),
                    *self._folders,
                    stdin=asyncio.subprocess.DEVNULL if self._path is None else end,
                    stdout=asyncio.subprocess.DEVNULL if self._path is None else end,
                    stderr=words,
                    pass_fds=(end,) if self._path is None else (),
                    env=dict(os.environ) | _ONE_THREAD,
                    start_new_session=True,
                )
            heard = False
            try:
                heard = await self._hear_in_time(ours, process.pid, timeout_s)
            finally:
                # Whoever stops while it loads need not wait for it.
                if not heard:
                    ours.close()
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
            if not heard:
                words.seek(0)
                lines = words.read().decode("utf-8", "replace").strip().splitlines()
                said = lines[-1] if lines else "no word"
                raise UsageError(f"the stage engine cannot be loaded: {said}")
        self._line, self._process = ours, process
        if self._path is None:
            self._orders = ours
        self.starts += 1

    async def _hear_in_time(self, line: socket.socket, pid: int, timeout_s: float) -> bool:
        """Return whether it speaks before it got nowhere for so long; time without a core does not count."""
        watch, hearing = StartWatch(pid), asyncio.ensure_future(self._hear(line))
        left_s, loop = timeout_s, asyncio.get_running_loop()
        try:
            while left_s > 0.0:
                began_s = loop.time()
                done, _ = await asyncio.wait({hearing}, timeout=min(left_s, _WATCH_S))
                if done:
                    return hearing.result()
                left_s -= max(0.0, loop.time() - began_s - watch.take_delay_s())
                if watch.advances():
                    left_s = timeout_s
            return False
        finally:
            hearing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hearing

    async def _hear(self, line: socket.socket) -> bool:
        """Wait for word of the process that forks now; False once there is none any more."""
        try:
            said = await asyncio.get_running_loop().sock_recv(line, 64)
        except OSError:
            said = b""
        words = said.split()
        # Two may have taken over since we last looked.
        self.pid = int(words[-1]) if words[:1] == [b"ready"] else None
        return bool(said)

    async def _keep(self, timeout_s: float) -> None:
        """Start it again whenever it has ended, spare and all."""
        core = Supervision(RestartLimits(ready_s=timeout_s))
        # It runs already: the decisions are told as if it had just been started.
        core.tick(time.monotonic())
        core.ready(time.monotonic())
        while True:
            line = self._line
            while line is not None and await self._hear(line):
                pass
            self._forget()
            core.exited(128, time.monotonic())
            while not core.runs:
                if core.over:
                    _LOG.warning("the fork server is given up: processes start from scratch")
                    return
                if core.tick(time.monotonic()) is not Action.START:
                    await asyncio.sleep(_LOOK_S)
                    continue
                _LOG.info("the fork server has ended; it is loaded again")
                try:
                    await self._load(timeout_s)
                except AtollError as error:
                    _LOG.warning("%s", error)
                    core.exited(1, time.monotonic())
                else:
                    core.ready(time.monotonic())

    def _forget(self) -> None:
        for each in {self._line, self._orders} - {None}:
            assert each is not None
            each.close()
        self._line = self._orders = self._process = self.pid = None
