"""A process that does what takes time: a job a line on its input, what becomes of it in lines on its output.

    {"job": "atoll.planner.plans:find_binds", "arguments": {...}}
    {"event": "progress", "said": {...}}
    {"event": "result", "said": {...}}   or   {"event": "error", "said": {"status", "message", "code", ...}}

It ends with its input, and with the process that started it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

from atoll.core.errors import AtollError, InfeasibleError, UnknownNameError

_LOG = logging.getLogger(__name__)
_MAX_MEMORY_BYTES = 8 * 2**30
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl."""

Said = dict[str, Any]
Report = Callable[[Said], None]
"""Told how far a job is: plain data, such as {"text": "planning", "share": 0.3}."""
Job = Callable[[Said, Report], Said]
"""A function of a module, from plain data to plain data; an AtollError is told to whoever asked."""
NamedJob = Job | str
"""A job, or how a worker finds it (`MODULE:NAME`)."""
Event = Literal["progress", "result", "error"]


def name_of(job: NamedJob) -> str:
    """Return how a worker finds a job."""
    return job if isinstance(job, str) else f"{job.__module__}:{job.__qualname__}"


def describe_error(error: Exception) -> Said:
    """Return what is told of an error, in the fields of `ApiError`; of one that nobody expected, nothing."""
    if isinstance(error, MemoryError):
        text = "this takes more memory than there is: ask for less"
        return {"status": 400, "message": text, "kind": "invalid_request_error", "code": None}
    if not isinstance(error, AtollError):
        return {"status": 500, "message": "internal error", "kind": "server_error", "code": None}
    code = {InfeasibleError: "infeasible", UnknownNameError: "not_found"}.get(type(error))
    return {
        "status": 404 if isinstance(error, UnknownNameError) else 400,
        "message": str(error),
        "kind": "invalid_request_error",
        "code": code,
        "param": getattr(error, "field", None),
    }


def end_with_parent() -> None:
    """Have this process be killed when the one that started it ends, however that ends."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def limit_memory() -> None:
    """Have this process go without before the machine does: whoever asks for too much gets no answer."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        max_bytes = min(_MAX_MEMORY_BYTES, there // 2)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or max_bytes < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    with contextlib.suppress(OSError):
        # Of all processes it is the first that the system ends for want of memory.
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")


def _do(line: str, tell: Callable[[Event, Said], None]) -> None:
    try:
        asked = json.loads(line)
        module, _, name = str(asked["job"]).partition(":")
        job: Job = getattr(importlib.import_module(module), name)
        result = job(asked["arguments"], lambda said: tell("progress", said))
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - one job must not end the worker
        if not isinstance(error, AtollError):
            _LOG.exception("a job failed")
        tell("error", describe_error(error))
    else:
        tell("result", result)


def main(arguments: list[str] | None = None) -> None:
    """Do jobs until there are no more; `--warm MODULE` is loaded before, and its `prepare` called."""
    parser = argparse.ArgumentParser(prog="python -m atoll.planner.worker", description=__doc__)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--warm", action="append", default=[])
    options = parser.parse_args(arguments)
    end_with_parent()
    limit_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.nice:
        os.nice(options.nice)
    # What libraries print must not be taken for answers.
    out: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(event: Event, said: Said) -> None:
        out.write(json.dumps({"event": event, "said": said}, allow_nan=False) + "\n")
        out.flush()

    for module in options.warm:
        prepare = getattr(importlib.import_module(module), "prepare", None)
        if prepare is not None:
            prepare()
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for line in sys.stdin:
            _do(line, tell)


if __name__ == "__main__":
    main()
