"""A user who operates fleets from the command line, for tests that bring them up for real."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 240.0


class Site:
    """A user with a state folder of their own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if k != "ATOLL_FABRIC"},
            "ATOLL_STATE": str(folder / "state"),
            **environment,
        }

    def run(self, *words: str, code: int = 0, patience_s: float = 2 * PATIENCE_S) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "atoll", *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience_s,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    def end(self) -> None:
        """Take the fleet down, however it stands; nothing of it may be left."""
        subprocess.run(
            [sys.executable, "-m", "atoll", "down", "lab", "--yes", "--now"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            check=False,
        )
        assert processes_of(self.folder / "state") == []

    @contextlib.contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        with (self.folder / "said.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "atoll", *words],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def status(self) -> dict[str, Any]:
        (found,) = json.loads(self.run("status", "lab", "--json"))
        operated: dict[str, Any] = found["operated"]
        return operated

    def ready(self) -> set[str]:
        rows = self.status()["instances"]
        return {row["instance"] for row in rows if row["state"] == "ready"}

    def history(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = json.loads(
            self.run("history", "lab", "--last", "500", "--json")
        )
        return events


def until(reached: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < end_s, f"not {what} after {patience_s} s"
        time.sleep(0.5)


def processes_of(folder: Path) -> list[str]:
    """Command lines of all processes that have something to do with a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            if str(folder) in text and path.parent.name != str(os.getpid()):
                found.append(text)
    return found


def ask(url: str, model: str = "chat") -> int:
    """Ask a question and return how many tokens came."""
    body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        tokens: int = json.load(answer)["usage"]["completion_tokens"]
        return tokens
