"""Where Atoll keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "ATOLL_CACHE"


def cache_dir() -> Path:
    """Return the folder for caches: $ATOLL_CACHE, else `atoll` in the user's cache folder."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "atoll"
