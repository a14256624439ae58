"""One-time links: whoever runs the dashboard logs in without a key.

A link is good once and for ten minutes. What was handed out stands, as its SHA-256, as the name of a file in
a folder of this user alone, so that another process of the same user (`atoll dashboard --link`) can make one
for a dashboard that runs, and one that was started anew knows the links of the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from atoll.core.files import atomic_write
from atoll.core.paths import runtime_dir, state_dir

VALID_S = 600.0
_ABOUT = "dashboard.json"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class RunningDashboard:
    """A dashboard of this user that runs on this machine."""

    url: str
    pid: int
    folder: Path
    state: str
    """The folder of the fleets that it knows."""


class LoginLinks:
    """The links of one dashboard."""

    def __init__(self, folder: Path, *, valid_s: float = VALID_S) -> None:
        self._folder = folder
        self._valid_s = valid_s

    def make(self) -> str:
        """Return a token that logs in once."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        token = secrets.token_urlsafe(32)
        self._path(token).touch(mode=0o600)
        return token

    def use(self, token: str) -> bool:
        """Whether a token was handed out, lately, and not used before; it is used up now."""
        if _TOKEN.fullmatch(token) is None:
            return False
        path = self._path(token)
        try:
            age_s = time.time() - path.stat().st_mtime
            # Of several who try at the same time one removes it.
            path.unlink()
        except OSError:
            return False
        return -1.0 < age_s <= self._valid_s

    def announce(self, url: str) -> None:
        """Let other processes of this user know where the dashboard is; old links are removed."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._folder.glob("*.link"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > self._valid_s:
                    path.unlink()
        about = {"url": url, "pid": os.getpid(), "state": str(state_dir())}
        atomic_write(self._folder / _ABOUT, json.dumps(about) + "\n")

    def forget(self) -> None:
        """Remove the folder: the dashboard ends."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, token: str) -> Path:
        return self._folder / f"{hashlib.sha256(token.encode()).hexdigest()}.link"


def links_folder(port: int) -> Path:
    """Return where the dashboard on a port of this machine keeps its links."""
    return runtime_dir() / f"dashboard-{port}"


def socket_of(folder: Path) -> Path:
    """Return where the dashboard with this folder answers programs of its user."""
    return folder.with_name(f"{folder.name}.sock")


def list_dashboards() -> tuple[RunningDashboard, ...]:
    """Return the dashboards of this user that run here, in the order of their folders."""
    found = []
    for path in sorted(runtime_dir().glob(f"dashboard-*/{_ABOUT}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads(path.read_text("utf-8"))
            os.kill(int(about["pid"]), 0)
            url, state = str(about["url"]), str(about["state"])
            found.append(RunningDashboard(url, int(about["pid"]), path.parent, state))
    return tuple(found)
