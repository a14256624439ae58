"""A solver that writes to the process's output past Python."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence_output() -> Iterator[None]:
    """Drop what is written to file descriptor 1 meanwhile, by C code too.

    scipy's HiGHS prints a line of its own now and then, whatever its options say.
    """
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        # C keeps what it prints in a buffer of its own, which has to go the same way.
        libc.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
