"""Run a graph server: `python -m atoll.runtime.graph_server.graph_server_process --config FILE`.

SIGTERM finishes what runs, within limits, and stops; a second one, or SIGINT, stops at once.
"""

from __future__ import annotations

import logging
import sys

from atoll.core.errors import MissingDependencyError
from atoll.runtime.executor.executor_process import read_token
from atoll.runtime.graph_server.graph_config import GraphServerConfig
from atoll.runtime.http.listen_address import cannot_listen
from atoll.runtime.http.program import close_when_told, run_program

_DRAIN_S = 20.0


async def _serve(config: GraphServerConfig) -> None:
    try:
        from atoll.runtime.graph_server.graph_server import TaskGraphServer
    except ImportError as error:
        name = error.name or "httptools"
        raise MissingDependencyError(name, "serve", needed_for="a graph server") from error

    server = TaskGraphServer(config, read_token(config.token_file))
    try:
        host, port = await server.start()
    except OSError as error:
        raise cannot_listen(error, config.host, config.port, "port") from error
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
