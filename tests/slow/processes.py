"""Processes that checks start: `atoll` asked from the command line, and what of them still runs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def dies_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends; for `preexec_fn`."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


async def ask_atoll(*arguments: str, **environment: str) -> Any:
    """Run an `atoll` command that answers in JSON, and return the answer."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atoll", *arguments),
        cwd=ROOT,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env=os.environ | environment,
        preexec_fn=dies_with_parent,
    )
    answer, complaints = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"atoll {arguments[0]}: {complaints.decode()[-2000:]}")
    return json.loads(answer)


def find_marked(name: str, value: str | Path) -> list[int]:
    """Return the living processes whose environment has a variable at a value."""
    mark, found = os.fsencode(f"{name}={value}"), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        # One that has ended and waits to be forgotten has none.
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
