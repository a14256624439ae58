"""A planner as a process of its own, which ends with the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from atoll.core.errors import AtollError

START_S = 60.0
STOP_S = 5.0


@dataclass(slots=True)
class PlannerProcess:
    """A planner that was started beside this process; `socket` is where it is asked."""

    process: subprocess.Popen[bytes]
    socket: Path

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End it; nothing happens where it has ended already."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_planner(files: Sequence[Path] = (), *, socket: Path | None = None) -> PlannerProcess:
    """Start a planner that ends with this process, and return it once it can be asked; see the module.

    `files` are fleet files beside what it finds itself, `socket` where it listens (default: one of its own in
    the runtime folder). AtollError where it cannot start; what it has to say goes to this process's stderr.
    """
    words = [sys.executable, "-m", "atoll", "planner", "--json", "--with-parent"]
    for path in files:
        words += ["--fleet", str(path)]
    if socket is not None:
        words += ["--socket", str(socket)]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        said = json.loads(_read_line(process))
        return PlannerProcess(process, Path(said["socket"]))
    except BaseException:
        process.kill()
        process.wait()
        raise


def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        ends_s = time.monotonic() + START_S
        line = b""
        while not line.endswith(b"\n"):
            if not selector.select(ends_s - time.monotonic()):
                raise AtollError(f"the planner did not start within {START_S:g} s")
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                raise AtollError("the planner did not start", hint="see what it said above")
            line += piece
    return line
