"""Where Atoll keeps what it can make again, and what it cannot."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "ATOLL_CACHE"
STATE_VARIABLE = "ATOLL_STATE"


def cache_dir() -> Path:
    """Return the folder for caches: $ATOLL_CACHE, else `atoll` in the user's cache folder."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "atoll"


def state_dir() -> Path:
    """Return the folder for what must not be lost: $ATOLL_STATE, else `atoll` in the user's state folder."""
    folder = os.environ.get(STATE_VARIABLE)
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "atoll"
