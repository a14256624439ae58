"""One engine process under its guard: started, told to end, watched; its last words."""

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

from atoll.runtime.supervise import guard as guard_program

_GUARD = Path(guard_program.__file__)
_TAIL_BYTES = 16 * 2**10
_GUARD_TERM_S = 2.0
_FORK_S = 5.0
_GONE_S = 5.0
_LOOK_S = 0.01


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


class Forker(Protocol):
    """Starts commands faster than from scratch (`atoll.runtime.supervise.forker`)."""

    def fork(self, command: Command, orders: int, answers: int) -> bool:
        """Have the command forked under a guard; False if this cannot be done here and now."""
        ...


class GuardedProcess:
    """A running command. It does not outlive this object's process.

    `pid` is 0 where the guard ended before it could start the command.
    """

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
    async def start(cls, command: Command, forker: Forker | None = None) -> GuardedProcess:
        """Start the command; whether it gets anywhere shows later."""
        process = await cls._start(command, forker)
        if process._guard is None and not process.pid:
            # Who was to fork it ended with the order in hand.
            process.close()
            process = await cls._start(command, None)
        return process

    @classmethod
    async def _start(cls, command: Command, forker: Forker | None) -> GuardedProcess:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        try:
            guard = None
            if forker is None or not forker.fork(command, theirs_in, theirs_out):
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
        try:
            async with asyncio.timeout(_FORK_S if guard is None else None):
                word, _, number = (await reader.readline()).partition(b" ")
        except TimeoutError:
            # A forker that is frozen; should it wake, its guard finds nobody there.
            word, number = b"", b""
        return cls(guard, ours_out, reader, transport, int(number) if word == b"pid" else 0)

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
                    if stat.rpartition(b")")[2].split()[0] in b"ZX":
                        return
                else:
                    os.kill(self.pid, 0)
            except OSError:
                return
            await asyncio.sleep(_LOOK_S)

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
