"""Where Atoll keeps what it can make again, what it cannot, and what is only there while it runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from atoll.core.errors import InputError

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


def runtime_dir() -> Path:
    """Return the folder for files and sockets of what runs, made if needed; it belongs to this user alone.

    It is $XDG_RUNTIME_DIR/atoll, else a folder of the user's own under the system's temporary folder.
    """
    import tempfile

    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        folder = Path(base) / "atoll"
    else:
        folder = Path(tempfile.gettempdir()) / f"atoll-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        pass  # a file: refused below
    except OSError as error:
        raise InputError(
            f"cannot make this folder: {(error.strerror or str(error)).lower()}",
            path=folder,
            hint="set XDG_RUNTIME_DIR to a folder of yours",
        ) from error
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InputError(
            "this folder must belong to you alone", path=folder, hint="remove it, or chmod 700"
        )
    return folder
