"""Is a process ready, is it well? An endpoint is when it gives a real token, a node when it says so.

Engines exist whose /health answers 200 while the first request kills them; a token cannot lie.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.engine.node import read_progress
from atoll.runtime.http.http_client import FetchError, fetch
from atoll.runtime.supervise.start_watch import StartWatch
from atoll.runtime.supervise.supervision import ProcessState

if TYPE_CHECKING:
    from atoll.runtime.supervise.agent import SupervisedProcess

_TOKEN_S = 15.0
"""How long an instance may take over a token; it gives up itself a little earlier."""


@dataclass(slots=True)
class TokenProbe:
    """Well is an endpoint that gives one token of the model when asked."""

    url: str
    model: str
    every_s: float = 10.0
    timeout_s: float = 30.0
    api_key: str | None = None

    def reset(self) -> None:
        """Do nothing: each check stands for itself."""

    async def check(self, pid: int) -> str | None:
        """Ask for one token; returns what is wrong, or None."""
        del pid
        completion = {"model": self.model, "prompt": "Hi", "max_tokens": 1, "temperature": 0}
        try:
            status, body = await fetch(
                f"{self.url}/v1/completions",
                body=completion,
                timeout_s=self.timeout_s,
                api_key=self.api_key,
            )
        except FetchError as error:
            await asyncio.sleep(0.05)
            return str(error)
        if status == 200:
            return None
        if status == 503:
            await asyncio.sleep(0.2)
        return f"status {status}: {body[:200].decode('utf-8', 'replace')}"


@dataclass(slots=True)
class InstanceProbe:
    """Ready is an instance of the stage engine whose /health, which gives a token, is well.

    From then on it is not well if it says nothing for `max_s`, or gives no token `tokenless` times in a
    row although it hears all its nodes; that it misses some (`excused` is the code) is not its fault.
    """

    url: str
    excused: str
    max_s: float
    every_s: float = 1.0
    tokenless: int = 3
    is_ready: bool = False
    failures: int = 0

    def reset(self) -> None:
        """Forget that it was ready."""
        self.is_ready = False
        self.failures = 0

    async def check(self, pid: int) -> str | None:
        """Ask for its status once it is ready, and for /health; returns what is wrong, or None."""
        del pid
        try:
            if self.is_ready:
                await fetch(f"{self.url}/atoll/v1/status", timeout_s=self.max_s)
            status, body = await fetch(f"{self.url}/health", timeout_s=_TOKEN_S)
        except FetchError as error:
            await asyncio.sleep(0.05)
            return str(error)
        text = body[:200].decode("utf-8", "replace")
        if status == 200:
            self.is_ready, self.failures = True, 0
            return None
        if not self.is_ready:
            await asyncio.sleep(0.1)
            return text
        self.failures = 0 if self.excused in text else self.failures + 1
        return text if self.failures >= self.tokenless else None


@dataclass(slots=True)
class NodeProbe:
    """Ready is a node that has written its file; well is one whose instance hears from it.

    `silent` returns for how many seconds an instance has not heard from a node; a node may be silent
    for `max_s`, not counting what it waited for a core meanwhile.
    """

    ready_file: Path
    name: str
    silent: Callable[[str], float]
    max_s: float
    every_s: float = 1.0
    ready_s: float | None = None
    _watch: StartWatch | None = None
    _waited_s: float = 0.0
    """For a core, since it was heard last."""

    def reset(self) -> None:
        """Remove the file of an earlier run."""
        self.ready_s = self._watch = None
        self.ready_file.unlink(missing_ok=True)

    async def check(self, pid: int) -> str | None:
        """Look for the file, then for how long the node was silent; returns what is wrong, or None."""
        if self.ready_s is None:
            try:
                report = json.loads(self.ready_file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return "loading"
            if report.get("pid") != pid:
                return "loading"
            self.ready_s = time.monotonic()
            return None
        # It cannot have been heard before it was ready.
        silent_s = min(self.silent(self.name), time.monotonic() - self.ready_s)
        if self._watch is None:
            self._watch = StartWatch(pid)
        delay_s = self._watch.take_delay_s()
        self._waited_s = 0.0 if silent_s <= self.every_s else self._waited_s + delay_s
        limit_s = self.max_s + self._waited_s
        return None if silent_s <= limit_s else f"silent for {silent_s:.0f} s"


def read_start(process: SupervisedProcess) -> str:
    """Return how far a node of the stage engine is that starts; "": it does not say, or is none."""
    if process.state is not ProcessState.STARTING or not isinstance(process.spec.probe, NodeProbe):
        return ""
    return read_progress(process.lines())
