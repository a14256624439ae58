"""Node processes forked from one that has loaded torch: loading it takes each of them seconds of CPU time."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

from atoll.engine.node import main

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["atoll.engine.node_core", "transformers.models.llama.modeling_llama"]
)


def _run(path: Path) -> None:
    sys.exit(main(["--config", str(path)]))


class ForkedNode:
    """A node process, with what `subprocess.Popen` has for one."""

    def __init__(self, config: Path) -> None:
        self._process = _FORKS.Process(target=_run, args=(config,))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int | None:
        self._process.join(timeout_s)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
