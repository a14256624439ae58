"""The terminal that pages are typed at: a folder, a shell that remembers, and servers that run beside it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 110
"""Width of the terminal unless a block asks for another."""
_PATIENCE_S = 300.0
_GOODBYE_S = 30.0
_OF_THE_USER = (
    "ATOLL_CATALOG",
    "ATOLL_DB",
    "ATOLL_FABRIC",
    "ATOLL_STATE",
    "KUBECONFIG",
    "XDG_STATE_HOME",
)

READY = {
    "serve": "curl .*\n",
    "hub": "watching .*\n",
    "gateway": "curl .*\n",
    "join": "(?:serving|taking assignments).*\n",
    "dashboard": "good once.*\n",
    "operate": "waits for an answer.*\n",
}
"""Verbs of commands that go on running, and the last that they say when they are ready."""

VARYING = (
    r"\d{4}-\d\d-\d\d(?: \d\d:\d\d:\d\d)?",  # days and times of day
    r"\b\d+(?:\.\d+)?(?:ms|s|min|h)\b",  # how long something took
    r"(?<=-)t[0-9a-z]{8}\b",  # names of instances end with when they were made
    r"\b(?:m\d{3}-|req-|call_|chatcmpl-|atoll-)?[0-9a-f]{12,}(?:\.\.\.)?",
    r"(?:(?<=key )|(?<=  )|(?<=\"id\":\")|(?<=atoll-))[a-z0-9]{12}\b",  # ids of keys
    r"\d+ +\d+ +\d+\.\d{3}(?= +(?:ok|failed) )",  # tokens and seconds of an attempt
    r"(?<=smollm2   )[\d.]+$",  # and what it cost
    r"\d+ CPUs [\d.]+GB",
    r"(?<=engine)(?: +load)?(?= +price)",  # whether a node's load was heard of in time
    r"(?<=llamacpp)(?: +(?:-|\d+))?(?= +[-$])|(?: +-){2,}$",
    r"127\.0\.0\.1:[345]\d{4}",
    r"\bprocess [\d.]+",
    r"(?<=run-)\w+",  # folders of what runs
    r'(?<="created":)\d+|(?<="at_s": )[\d.]+',
)
"""What is another each time; a page keeps what it shows where nothing else differs."""
_VARYING = re.compile("|".join(VARYING), re.MULTILINE)


def mask(text: str) -> str:
    """Return a text without what varies; what was aligned with it may stand elsewhere."""
    return re.sub(r"─+", "─", re.sub(r" +", " ", _VARYING.sub("*", text)))


class Terminal:
    """Runs the commands of a page in its folder; variables that they set stay set."""

    def __init__(self, folder: Path) -> None:
        self._variables = folder / "variables"
        self._variables.touch()
        self._places = {str(folder / "home"): "~", str(folder / "run"): "/run/user/1000"}
        self._groups: list[subprocess.Popen[bytes]] = []
        self._lock = (Path(tempfile.gettempdir()) / f"atoll-docs-{os.getuid()}.lock").open("w")

    def run(self, command: str, columns: int = COLUMNS) -> str:
        """Run a command and return what it prints; a server goes on after it has said that it is ready.

        One page at a time has servers, since they listen on the ports that it names.
        """
        found = re.match(r"atoll (?:tasks )?(\w+)", command)
        ready = READY.get(found[1]) if found else None
        if ready is not None:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        script = f"set -a; . {self._variables}\n{command}\nexport -p > {self._variables}"
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                ["bash", "-c", script],
                env={**os.environ, "COLUMNS": str(columns)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._groups.append(process)
            end_s = time.monotonic() + _PATIENCE_S
            while process.poll() is None:
                if ready is not None and re.search(ready, _read(said.fileno())):
                    break
                if time.monotonic() > end_s:
                    raise TimeoutError(f"{command}\n{_read(said.fileno())}")
                time.sleep(0.05)
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:  # nothing of it is left: the number may become another's
                self._groups.remove(process)
            if process.poll() is None:
                with self._variables.open("a") as kept:
                    kept.write(f"LAST_SERVER={process.pid}\n")
            text = _read(said.fileno())
        for place, shown in self._places.items():
            text = text.replace(place, shown)
        return re.sub(r"(?<=atoll-\w{12}-)[\w-]{43}", "...", text).rstrip()  # secrets of keys

    def close(self) -> None:
        """Stop what still runs, as Ctrl-C does, the last one first."""
        for process in reversed(self._groups):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GOODBYE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._lock.close()


def _read(descriptor: int) -> str:
    """Return all that was written to a file so far, wherever its writer stands."""
    return os.pread(descriptor, 1 << 24, 0).decode("utf-8", "replace")


@contextlib.contextmanager
def open_terminal() -> Iterator[Terminal]:
    """A home with nothing but the examples as the current folder, and a plain terminal of the usual width."""
    from atoll.core.paths import cache_dir

    with tempfile.TemporaryDirectory(prefix="docs") as folder:
        home, run = Path(folder, "home"), Path(folder, "run")
        for path in (home, run):
            path.mkdir(mode=0o700)
        (home / "examples").symlink_to(ROOT / "examples")
        others = [found] if (found := os.environ.get("PYTHONPATH")) else []
        plain = {
            "ATOLL_CACHE": str(cache_dir()),
            "COLUMNS": str(COLUMNS),
            "HOME": str(home),
            "NO_COLOR": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *others]),
            "TERM": "dumb",
            "XDG_RUNTIME_DIR": str(run),
        }
        with contextlib.chdir(home), patch.dict(os.environ, plain):
            for name in _OF_THE_USER:
                os.environ.pop(name, None)
            terminal = Terminal(Path(folder))
            try:
                yield terminal
            finally:
                terminal.close()
