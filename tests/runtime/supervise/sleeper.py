"""A module that a fork server can fork: says that it is up, and sleeps."""

from __future__ import annotations

import sys
import time


def main(arguments: list[str] | None = None) -> int:
    """Sleep until ended."""
    del arguments
    sys.stdout.write("up\n")
    sys.stdout.flush()
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
