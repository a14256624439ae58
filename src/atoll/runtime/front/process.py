"""Run a front: `python -m atoll.runtime.front.process --config FILE`.

SIGTERM finishes what runs, within limits, and stops; a second one, or SIGINT, stops at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from atoll.core.errors import AtollError, MissingDependencyError
from atoll.core.files import read_text_limited
from atoll.runtime.executor.process import read_token
from atoll.runtime.front.config import FrontConfig
from atoll.runtime.http.listening import cannot_listen
from atoll.runtime.http.loop import run

_DRAIN_S = 20.0


async def _serve(config: FrontConfig) -> None:
    try:
        from atoll.runtime.front.server import FrontServer
    except ImportError as error:
        name = error.name or "httptools"
        raise MissingDependencyError(name, "serve", needed_for="a front") from error

    server = FrontServer(config, read_token(config.token_file))
    try:
        host, port = await server.start()
    except OSError as error:
        raise cannot_listen(error, config.host, config.port, "port") from error
    logging.getLogger("atoll.front").info("listening on http://%s:%d", host, port)
    stop = asyncio.Event()
    at_once = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_or_hurry() -> None:
        (at_once if stop.is_set() else stop).set()

    def stop_at_once() -> None:
        stop.set()
        at_once.set()

    loop.add_signal_handler(signal.SIGTERM, stop_or_hurry)
    loop.add_signal_handler(signal.SIGINT, stop_at_once)
    await stop.wait()
    closing = asyncio.create_task(server.close(_DRAIN_S))
    hurried = asyncio.create_task(at_once.wait())
    await asyncio.wait({closing, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if not closing.done():
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
    hurried.cancel()


def main(arguments: list[str] | None = None) -> int:
    """Read the configuration, serve, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m atoll.runtime.front.process", description=__doc__
    )
    parser.add_argument("--config", type=Path, required=True, help="JSON file")
    path: Path = parser.parse_args(arguments).config
    try:
        config = FrontConfig.from_json(read_text_limited(path), path=path)
        logging.basicConfig(
            level=config.log_level, format=f"%(asctime)s %(levelname)s {config.name}: %(message)s"
        )
        run(_serve(config))
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
