"""Files that a command will write: checked before the first of them is written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from atoll.core.errors import InputError


def check_target(path: Path) -> None:
    """Raise InputError where no file could be written at `path`; nothing is written or created.

    A disk may still fill up later; what a person can mistype is found here.
    """
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        is_folder = False
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError(f"cannot write: {reason}", path=path, hint="name another file") from error
    if is_folder:
        hint = "name a file, not a folder"
        raise InputError("cannot write: is a directory", path=path, hint=hint)
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):  # Path.is_dir() raises where the name is too long
        raise InputError("no such folder", path=path.parent, hint="create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        hint = "name a folder you may write to"
        raise InputError("cannot write: permission denied", path=path, hint=hint)
