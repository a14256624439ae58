"""One engine process under its supervisor: started, told to end, watched; its last words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from atoll.runtime.supervise import supervisor as supervisor_program

_SUPERVISOR = Path(supervisor_program.__file__)
_TAIL_BYTES = 16 * 2**10
_SUPERVISOR_TERM_S = 2.0
_FORK_S = 5.0
_GONE_S = 5.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run: arguments, changes to the environment, cores (none: any), and where its words go.

    Without cores of its own a process may use all of them; `threads` keeps libraries from starting as
    many threads as the machine has cores; None leaves that to the command. Where `module` is given, the
    command is that Python module, and a fork server may fork it. `mark` begins every line of the log.
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
        """Return what a supervisor is told."""
        # A fork is in the interpreter already: only the arguments of the module are left.
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
            "term_s": _SUPERVISOR_TERM_S,
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


class Forker(Protocol):
    """Starts commands faster than from scratch (`atoll.runtime.supervise.fork_client`)."""

    def fork(self, command: Command, orders: int, answers: int) -> bool:
        """Have the command forked under a supervisor; False if this cannot be done here and now."""
        ...


class ProcessHandle:
    """A running command. It does not outlive this object's process.

    `pid` is 0 where the supervisor ended before it could start the command.
    """

    def __init__(
        self,
        supervisor: asyncio.subprocess.Process | None,
        orders: int,
        reader: asyncio.StreamReader,
        transport: asyncio.BaseTransport,
        pid: int,
    ) -> None:
        self._supervisor = supervisor
        self._orders: int | None = orders
        self._reader = reader
        self._transport = transport
        self.pid = pid

    @classmethod
    async def start(cls, command: Command, forker: Forker | None = None) -> ProcessHandle:
        """Start the command; whether it gets anywhere shows later."""
        process = await cls._start(command, forker)
        if process._supervisor is None and not process.pid:
            # Who was to fork it ended with the order in hand.
            process.close()
            process = await cls._start(command, None)
        return process

    @classmethod
    async def _start(cls, command: Command, forker: Forker | None) -> ProcessHandle:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        try:
            supervisor = None
            if forker is None or not forker.fork(command, theirs_in, theirs_out):
                supervisor = await asyncio.create_subprocess_exec(
                    *(
                        sys.executable,
                        # Isolated, and without site packages: the supervisor needs the standard library
                        # alone.
                        "-I",
                        "-S",
                        str(_SUPERVISOR),
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
            # The other side alone may hold these, or its end would never be seen here.
            os.close(theirs_in)
            os.close(theirs_out)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb")
        )
        try:
            # Only a forker may be frozen; a supervisor that was started here speaks or ends.
            async with asyncio.timeout(_FORK_S if supervisor is None else None):
                word, _, number = (await reader.readline()).partition(b" ")
        except TimeoutError:
            # A forker that is frozen; should it wake, its supervisor finds nobody there.
            word, number = b"", b""
        return cls(supervisor, ours_out, reader, transport, int(number) if word == b"pid" else 0)

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
        if self._supervisor is not None:
            await self._supervisor.wait()
        if word == b"exit":
            return int(number)
        # Someone killed the supervisor: the kernel ends the process, and this what it had started.
        if self.pid:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            await self._gone()
        return 128 + signal.SIGKILL

    async def _gone(self) -> None:
        """Wait until the process, which nobody but the kernel sees to, holds no port any more."""
        for _ in range(round(_GONE_S / _LOOK_S)):
            try:
                if sys.platform.startswith("linux"):
                    stat = Path(f"/proc/{self.pid}/stat").read_bytes()
                    # A process that has ended and is not yet taken away holds nothing any more.
                    if stat.rpartition(b")")[2].split()[0] in b"ZX":
                        return
                else:
                    os.kill(self.pid, 0)
            except OSError:
                return
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """Let go of the supervisor, which ends the process if it still runs."""
        self._transport.close()
        if self._orders is not None:
            os.close(self._orders)
            self._orders = None

    def _order(self, order: bytes) -> None:
        if self._orders is not None:
            with contextlib.suppress(OSError):
                os.write(self._orders, order)


def last_lines(log: Path, count: int = 12) -> tuple[str, ...]:
    """Return the last lines a process has said."""
    try:
        with log.open("rb") as stream:
            # Only the tail: the file may be large.
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-count:]
