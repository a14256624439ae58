"""Run an instance of the stage engine: `python -m atoll.runtime.instance.process --config FILE`.

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
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError, InputError, MissingDependencyError
from atoll.core.files import read_text_limited
from atoll.runtime.http.loop import run
from atoll.runtime.instance.config import InstanceConfig, InstanceHelpers

if TYPE_CHECKING:
    from atoll.runtime.instance.server import InstanceServer

_DRAIN_S = 20.0
_FOLLOW_S = 0.25


async def _serve(config: InstanceConfig) -> None:
    from atoll.engine.text import TextCodec
    from atoll.engine.weights.sources import resolve

    try:
        from atoll.runtime.instance.server import InstanceServer
    except ImportError as error:
        name = error.name or "httptools"
        raise MissingDependencyError(name, "serve", needed_for="an instance") from error

    server = InstanceServer(config, TextCodec(resolve(config.model)))
    try:
        host, port = await server.start()
    except OSError as error:
        raise InputError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}", field="port"
        ) from error
    logging.getLogger("atoll.instance").info("listening on http://%s:%d", host, port)
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
    following = asyncio.create_task(_follow(server, config.helpers))
    await stop.wait()
    following.cancel()
    closing = asyncio.create_task(server.close(_DRAIN_S))
    hurried = asyncio.create_task(at_once.wait())
    await asyncio.wait({closing, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if not closing.done():
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
    hurried.cancel()


async def _follow(server: InstanceServer, helpers: str | None) -> None:
    """Have the server use the helpers that a file names, as it changes."""
    if helpers is None:
        return
    path, known = Path(helpers), InstanceHelpers()
    log = logging.getLogger("atoll.instance")
    while True:
        try:
            found = InstanceHelpers.from_json(read_text_limited(path), path=path)
            if found != known:
                server.help_with(found)
                known = found
                names = ", ".join(part.instance.id for part in found.parts)
                log.info("prompts are computed by %s", names or "this instance")
        except AtollError as error:
            if path.exists():
                log.warning("%s", error)
        await asyncio.sleep(_FOLLOW_S)


def main(arguments: list[str] | None = None) -> int:
    """Read the configuration, serve, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m atoll.runtime.instance.process", description=__doc__
    )
    parser.add_argument("--config", type=Path, required=True, help="JSON file")
    path: Path = parser.parse_args(arguments).config
    try:
        config = InstanceConfig.from_json(read_text_limited(path), path=path)
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
