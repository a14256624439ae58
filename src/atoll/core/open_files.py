"""How many files and connections this process may have open at once."""

from __future__ import annotations

import contextlib
import resource


def allow_files(wanted: int) -> int:
    """Raise this process's own limit to so many, as far as it may; return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # Some systems have limits of their own besides.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
