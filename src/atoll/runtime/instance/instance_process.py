"""Run an instance of the stage engine: `python -m atoll.runtime.instance.instance_process --config FILE`.

SIGTERM finishes what runs, within limits, and stops; a second one, or SIGINT, stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError
from atoll.core.extras import require_extras
from atoll.core.files import read_text_limited
from atoll.runtime.http.process_memory import return_large_memory
from atoll.runtime.http.program import close_when_told, run_program
from atoll.runtime.instance.instance_config import InstanceConfig, InstanceHelpers

if TYPE_CHECKING:
    from atoll.runtime.instance.instance_server import InstanceServer

_DRAIN_S = 20.0
_FOLLOW_S = 0.25


async def _serve(config: InstanceConfig) -> None:
    require_extras("serve")
    from atoll.engine.text import TextCodec
    from atoll.engine.weights.sources import resolve
    from atoll.runtime.instance.instance_server import InstanceServer

    return_large_memory()
    server = InstanceServer(config, TextCodec(resolve(config.model)))
    host, port = await server.start()
    logging.getLogger("atoll.instance").info("listening on http://%s:%d", host, port)
    following = asyncio.create_task(_follow(server, config.helpers))

    async def close() -> None:
        following.cancel()
        await server.close(_DRAIN_S)

    await close_when_told(close)


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
    return run_program(
        "atoll.runtime.instance.instance_process", __doc__, InstanceConfig, _serve, arguments
    )


if __name__ == "__main__":
    sys.exit(main())
