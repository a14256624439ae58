"""`python -m atoll.runtime.gateway --config FILE`: a gateway alone."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from pathlib import Path

from atoll.core.errors import AtollError, MissingDependencyError


def main() -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m atoll.runtime.gateway", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON; followed")
    options = parser.parse_args()
    try:
        return _serve(options.config)
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def _serve(path: Path) -> int:
    try:
        import uvloop

        from atoll.runtime.gateway.standalone import run
    except ImportError as error:
        raise MissingDependencyError(
            error.name or "uvloop", "serve", needed_for="the gateway"
        ) from error
    # What is loaded by now stays; a request leaves few cycles, so looking for them can be rarer.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(path))


if __name__ == "__main__":
    sys.exit(main())
