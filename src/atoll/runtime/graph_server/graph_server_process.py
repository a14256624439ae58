"""Run a graph server: `python -m atoll.runtime.graph_server.graph_server_process --config FILE`.

SIGTERM finishes what runs, within limits, and stops; a second one, or SIGINT, stops at once.
"""

from __future__ import annotations

import logging
import sys

from atoll.core.extras import require_extras
from atoll.runtime.executor.executor_process import read_token
from atoll.runtime.graph_server.graph_config import GraphServerConfig
from atoll.runtime.http.program import close_when_told, run_program

_DRAIN_S = 20.0


async def _serve(config: GraphServerConfig) -> None:
    require_extras("serve")
    from atoll.runtime.graph_server.graph_server import TaskGraphServer

    server = TaskGraphServer(config, read_token(config.token_file))
    host, port = await server.start()
    logging.getLogger("atoll.graph_server").info("listening on http://%s:%d", host, port)
    await close_when_told(lambda: server.close(_DRAIN_S))


def main(arguments: list[str] | None = None) -> int:
    """Read the configuration, serve, and return the exit code."""
    return run_program(
        "atoll.runtime.graph_server.graph_server_process",
        __doc__,
        GraphServerConfig,
        _serve,
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
