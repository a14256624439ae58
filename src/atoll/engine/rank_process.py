"""A rank of a node from 1 on: `python -m atoll.engine.rank_process --rank N --pipe FD`.

The first rank, the node process, starts it and tells it everything over the pipe; it ends when the pipe does.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from atoll.core.errors import AtollError
from atoll.engine.node import NodeConfig, die_with_parent, load_stage
from atoll.engine.weights.sources import resolve


def main(arguments: list[str] | None = None) -> int:
    """Follow the first rank until it is gone, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atoll.engine.rank_process")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--pipe", type=int, required=True, help="file descriptor")
    options = parser.parse_args(arguments)
    # The first rank alone decides when the node ends, also where a signal goes to all of its processes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    pipe: Connection[Any, Any] = Connection(options.pipe)
    try:
        with contextlib.suppress(EOFError):
            _follow(pipe, options.rank)
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _follow(pipe: Connection[Any, Any], rank: int) -> None:
    told, port = pipe.recv()
    config = NodeConfig.from_json(told)
    logging.basicConfig(
        level=config.log_level,
        format=f"%(asctime)s %(levelname)s {config.name} rank {rank}: %(message)s",
    )
    from atoll.engine.rank_crew import open_store
    from atoll.engine.rank_group import ProcessRanks, rank_device
    from atoll.engine.ranked_stage import Follower

    device = rank_device(config.device, rank)
    ranks = ProcessRanks(rank, config.tp, device, open_store(port, config.tp))
    follower = Follower(load_stage(config, resolve(config.model), ranks), ranks)
    try:
        while True:
            follower.follow(pipe.recv())
    except EOFError:
        ranks.close()


if __name__ == "__main__":
    sys.exit(main())
