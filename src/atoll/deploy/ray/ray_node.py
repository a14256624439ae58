"""Runs the command of one node of an instance; in a Ray cluster this is an actor on the node's machine.

What goes in and comes out are words and numbers in dictionaries. The command is kept by a supervisor
(`atoll.runtime.supervise`), so nothing of it outlives the actor: not where the actor is killed, nor where
the machine leaves the cluster.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.core.errors import shorten
from atoll.deploy.commands.meeting import ADDRESS_VARIABLE
from atoll.deploy.local.daemon import MAX_REASON_CHARACTERS, CommandProbe, last_word
from atoll.deploy.ray.ray_package import SECRETS
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.supervise.agent import Agent, ProcessSpec
from atoll.runtime.supervise.supervised_process import Command, last_lines
from atoll.runtime.supervise.supervision import ProcessState, RestartLimits

_PORT = "{port}"
_THREADS = "OMP_NUM_THREADS"
_STATES = {
    ProcessState.READY: "ready",
    ProcessState.STOPPING: "draining",
    ProcessState.STOPPED: "gone",
    ProcessState.FAILED: "failed",
}


class NodeRunner:
    """The command of one node; `folder` is where its log goes, `address` where other nodes reach it."""

    def __init__(
        self,
        node: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        secrets: Sequence[str],
        *,
        ready_s: float,
        drain_s: float,
        log: str,
        folder: str | None = None,
    ) -> None:
        self._node, self._argv, self._env = node, tuple(argv), dict(env)
        self._secrets = tuple(secrets)
        self._limits = RestartLimits(
            ready_s=ready_s,
            unwell=2**31,  # an engine that hangs is the affair of whoever joined it
            term_s=drain_s,
            # What replaces it is the controller's to decide.
            again=False,
        )
        self._log, self._folder = log, folder
        self._agent = Agent()

    async def start(self, address: str | None = None) -> None:
        """Start the command, which shows later whether it gets anywhere."""
        # Ray sets it by the CPUs that an actor asked for, and engines would compute with as many threads.
        if _THREADS not in self._env:
            os.environ.pop(_THREADS, None)
        port = free_ports(1)[0] if _PORT in " ".join(self._argv) else None
        argv = tuple(word.replace(_PORT, str(port)) for word in self._argv)
        secrets = {name: str(Path.cwd() / SECRETS / name) for name in self._secrets}
        own = {} if address is None else {ADDRESS_VARIABLE: address}
        folder = logs_folder() if self._folder is None else Path(self._folder)
        log = folder / self._log
        command = Command(argv, log, own | self._env | secrets, threads=None)
        self._agent.add(ProcessSpec(self._node, command, CommandProbe(port, log), self._limits))

    async def look(self) -> dict[str, str]:
        """Return its state, and of a command that ended how it did and its last line."""
        process = self._agent.processes[self._node]
        state = _STATES.get(process.state, "starting")
        if state != "failed":
            return {"state": state}
        last = shorten(last_word(last_lines(process.spec.command.log)), MAX_REASON_CHARACTERS)
        return {"state": state, "reason": process.reason, "last": last}

    async def drain(self) -> None:
        """Have the command end when its streams have."""
        self._agent.processes[self._node].stop()


def logs_folder() -> Path:
    """Return the folder of Ray's logs on this machine, whose files the head shows to whoever asks."""
    from ray._private.worker import _global_node

    return Path(_global_node.get_logs_dir_path())
