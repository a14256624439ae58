"""One engine process under its guard: started, told to end, watched; its last words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.errors import InternalError, UsageError
from atoll.runtime.supervise import guard as guard_program

_GUARD = Path(guard_program.__file__)
_TAIL_BYTES = 16 * 2**10
_GUARD_TERM_S = 2.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: arguments, changes to the environment, cores (none: any), and where its words go.

    Without cores of its own a process may use all of them; `threads` keeps libraries from starting as
    many threads as the machine has cores; None leaves that to the command. Where `module` is given, the
    command is that Python module, and a nursery may fork it. `mark` begins every line of the log.
    """

    arguments: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    threads: int | None = 1
    log_bytes: int = 8 * 2**20
    log_keep: int = 3
    module: str | None = None
    mark: str = ""

    @classmethod
    def of_module(
        cls,
        module: str,
        arguments: tuple[str, ...],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        cpus: tuple[int, ...] = (),
        threads: int = 1,
    ) -> Command:
        """Return the command `python -m MODULE ARGUMENTS`."""
        whole = (sys.executable, "-m", module, *arguments)
        return cls(whole, log, environment or {}, cpus=cpus, threads=threads, module=module)

    def order(self, *, fork: bool) -> dict[str, object]:
        """Return what a guard is told."""
        command = ("", *self.arguments[3:]) if fork else self.arguments
        return {
            "command": command,
            "module": self.module if fork else None,
            "environment": self.surroundings(),
            "cpus": self.cpus,
            "log": str(self.log),
            "log_bytes": self.log_bytes,
            "log_keep": self.log_keep,
            "mark": self.mark,
            "term_s": _GUARD_TERM_S,
        }

    def surroundings(self) -> dict[str, str]:
        """Return what is set in the environment."""
        if self.threads is None:
            return {"PYTHONUNBUFFERED": "1", **self.environment}
        threads = str(self.threads)
        return {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            **self.environment,
        }


class GuardedProcess:
    """A running command. It does not outlive this object's process."""

    def __init__(
        self,
        guard: asyncio.subprocess.Process | None,
        orders: int,
        reader: asyncio.StreamReader,
        transport: asyncio.BaseTransport,
        pid: int,
    ) -> None:
        self._guard = guard
        self._orders: int | None = orders
        self._reader = reader
        self._transport = transport
        self.pid = pid

    @classmethod
    async def start(cls, command: Command, nursery: Nursery | None = None) -> GuardedProcess:
        """Start the command; whether it gets anywhere shows later."""
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        try:
            guard = None
            if nursery is None or not nursery.fork(command, theirs_in, theirs_out):
                guard = await asyncio.create_subprocess_exec(
                    *(
                        sys.executable,
                        "-I",
                        "-S",
                        str(_GUARD),
                        json.dumps(command.order(fork=False)),
                    ),
                    stdin=theirs_in,
                    stdout=theirs_out,
                    stderr=asyncio.subprocess.DEVNULL,
                    env=dict(os.environ) | command.surroundings(),
                    # Ctrl-C is for the agent, which then ends its processes in order.
                    start_new_session=True,
                )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb")
        )
        word, _, number = (await reader.readline()).partition(b" ")
        if word != b"pid":
            transport.close()
            os.close(ours_out)
            if guard is not None:
                await guard.wait()
            raise InternalError(f"the guard of {command.arguments[0]} did not start")
        return cls(guard, ours_out, reader, transport, int(number))

    def term(self) -> None:
        """Ask the process and its group to end."""
        self._order(b"term\n")

    def kill(self) -> None:
        """End the process and all its descendants now."""
        self._order(b"kill\n")

    async def wait(self) -> int:
        """Return the exit code once the process has ended; 128 + n if signal n ended it."""
        word, _, number = (await self._reader.readline()).partition(b" ")
        self.close()
        if self._guard is not None:
            await self._guard.wait()
        if word == b"exit":
            return int(number)
        # Someone killed the guard: the kernel ends the process, and this what it had started.
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        return 128 + signal.SIGKILL

    def close(self) -> None:
        """Let go of the guard, which ends the process if it still runs."""
        self._transport.close()
        if self._orders is not None:
            os.close(self._orders)
            self._orders = None

    def _order(self, order: bytes) -> None:
        if self._orders is not None:
            with contextlib.suppress(OSError):
                os.write(self._orders, order)


class Nursery:
    """Forks processes that need much code from one that has loaded it (see `nursery`)."""

    modules = frozenset(
        {
            "atoll.engine.node",
            "atoll.runtime.executor.process",
            "atoll.runtime.instance.process",
        }
    )

    def __init__(self, process: asyncio.subprocess.Process | None, orders: socket.socket) -> None:
        self._process = process
        self._orders = orders

    @classmethod
    async def share(cls, folders: Sequence[str], path: str, timeout_s: float = 120.0) -> Nursery:
        """Start one that others connect to at the socket `path`; this one ends it."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atoll.runtime.supervise.nursery", "--listen", path, *folders),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(os.environ) | _ONE_THREAD,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                word = await process.stdout.readline()
        except TimeoutError:
            process.kill()
            word = b""
        found = cls.connect(path) if word == b"ready\n" else None
        if found is None:
            process.stdin.close()  # type: ignore[union-attr]
            raise await _explain_nursery(process)
        found._process = process
        return found

    @classmethod
    def connect(cls, path: str) -> Nursery | None:
        """Return one that others use as well, by its socket; None if it does not answer."""
        orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            orders.connect(path)
        except OSError:
            orders.close()
            return None
        return cls(None, orders)

    @classmethod
    async def start(cls, folders: Sequence[str], timeout_s: float = 120.0) -> Nursery:
        """Start it and wait until it has loaded what nodes of these models need."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "atoll.runtime.supervise.nursery"),
                *(str(theirs.fileno()), *folders),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=dict(os.environ) | _ONE_THREAD,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(timeout_s):
                greeting = await asyncio.get_running_loop().sock_recv(ours, 64)
        except TimeoutError:
            process.kill()
            greeting = b""
        except asyncio.CancelledError:
            # Whoever stops while it loads need not wait for it.
            ours.close()
            process.kill()
            await process.wait()
            raise
        if greeting != b"ready":
            ours.close()
            raise await _explain_nursery(process)
        ours.setblocking(True)
        return cls(process, ours)

    def fork(self, command: Command, orders: int, answers: int) -> bool:
        """Have the command forked under a guard; False if this cannot be done here."""
        ended = self._process is not None and self._process.returncode is not None
        if command.module not in self.modules or ended:
            return False
        try:
            message = json.dumps(command.order(fork=True)).encode()
            socket.send_fds(self._orders, [message], [orders, answers])
        except OSError:
            return False
        return True

    async def close(self) -> None:
        """End it; what it forked stays."""
        self._orders.close()
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            await self._process.wait()


async def _explain_nursery(process: asyncio.subprocess.Process) -> UsageError:
    """Return why a nursery that is ending did not become ready, from its last words."""
    assert process.stderr is not None
    words = (await process.stderr.read()).decode("utf-8", "replace").strip()
    await process.wait()
    last = words.splitlines()[-1] if words else "no word"
    return UsageError(f"the stage engine cannot be loaded: {last}")


def last_lines(log: Path, most: int = 12) -> tuple[str, ...]:
    """Return the last lines a process has said."""
    try:
        with log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-most:]
