"""The other ranks of a node, as the first has them: started, told what to do, watched, ended."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

_LOG = logging.getLogger("atoll.engine.node")
_LOOPBACK = "127.0.0.1"
_END_S = 5.0


class RankCrew:
    """Processes of the ranks from 1 on; when one of them ends by itself, so does this process, at once."""

    def __init__(self, size: int, config: str) -> None:
        """Start them; `config` is the node's, in JSON."""
        self._closing = False
        self._pipes: list[Connection[Any, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.store = open_store(0, size, is_first=True)
        for rank in range(1, size):
            ours, theirs = Pipe()
            words = ("-m", "atoll.engine.rank_process", "--rank", rank, "--pipe", theirs.fileno())
            process = subprocess.Popen(
                [sys.executable, *map(str, words)], pass_fds=(theirs.fileno(),)
            )
            theirs.close()
            ours.send((config, self.store.port))
            self._pipes.append(ours)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the ranks from 1 on."""
        return tuple(process.pid for process in self._processes)

    def tell(self, order: Any) -> None:
        """Tell all ranks what to do next."""
        for pipe in self._pipes:
            pipe.send(order)

    def close(self) -> None:
        """End all ranks: each leaves when its pipe ends."""
        self._closing = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            # Not by an exception: the thread that computes may wait for the lost rank without end.
            _LOG.error("rank %d of the node has ended with code %d", rank, code)
            os._exit(max(1, code))


def open_store(port: int, size: int, *, is_first: bool = False) -> Any:
    """Return the store at which the ranks meet, at a port of this machine; the first has it at a free one."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(_LOOPBACK, port, size, is_master=is_first, wait_for_workers=False)
