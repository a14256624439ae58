"""A process that has loaded what nodes need and forks them, so that each starts in a moment.

Importing torch and transformers takes seconds of CPU time, and every node of a machine would spend them
anew; a node that died would be back only after that. Here it is done once. Every fork has a guard of its
own (`guard`), so nothing else differs from a process started afresh.

Run with the number of a socket and the folders of the models that nodes will hold. Each message on the
socket is a JSON order for a guard, with two descriptors: what the guard reads orders from, and what it
answers on. It ends when the socket closes.

`python -m atoll.runtime.supervise.nursery --listen PATH FOLDER ...` does the same for whoever of this user
connects to the socket at PATH: agents in different processes share it where $ATOLL_NURSERY names it. It says
"ready" on its standard output, and ends when its standard input closes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

from atoll.runtime.supervise.guard import Guard

_MOST_BYTES = 2**20


def warm(folders: list[str]) -> None:
    """Import whatever nodes of these models import; nothing is computed, so no thread is started."""
    import torch
    from transformers import AutoModelForCausalLM

    import atoll.engine.node
    import atoll.engine.node_core
    import atoll.runtime.executor.process
    import atoll.runtime.instance.server  # noqa: F401
    from atoll.engine.stage import load_config

    with contextlib.suppress(ImportError):  # of the extra "components", which executors alone need
        import onnxruntime  # noqa: F401

    torch.set_num_threads(1)
    for folder in folders:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(load_config(folder))


def serve(orders: socket.socket) -> None:
    """Fork a guard for every order until nobody is left to give one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, _MOST_BYTES, 2)
        if not message:
            return
        _fork([orders], message, descriptors)


def serve_many(listening: socket.socket, until: int) -> None:
    """Fork a guard for every order of anybody who connects, until the descriptor `until` is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    agents: list[socket.socket] = []
    while True:
        watched: list[int | socket.socket] = [until, listening, *agents]
        ready, _, _ = select.select(watched, [], [])
        if until in ready and not os.read(until, 4096):
            return
        for agent in [agent for agent in agents if agent in ready]:
            try:
                message, descriptors, _, _ = socket.recv_fds(agent, _MOST_BYTES, 2)
            except OSError:
                message, descriptors = b"", []
            if message:
                _fork([listening, *agents], message, descriptors)
            else:
                agents.remove(agent)
                agent.close()
        if listening in ready:
            agents.append(listening.accept()[0])


def _fork(sockets: list[socket.socket], message: bytes, descriptors: list[int]) -> None:
    """Fork the guard of an order; what is open here stays open here alone."""
    if os.fork() == 0:
        _guard(sockets, json.loads(message), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def _guard(sockets: list[socket.socket], order: dict[str, object], descriptors: list[int]) -> None:
    code = 1
    try:
        for each in sockets:
            each.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor, target in zip(descriptors, (0, 1), strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        environment = order["environment"]
        assert isinstance(environment, dict)
        os.environ.update(environment)
        code = Guard(order).run()
    finally:
        os._exit(code)


def main(arguments: list[str]) -> int:
    """Load, say so, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments[:1] == ["--listen"]:
        _listen(Path(arguments[1]), arguments[2:])
        return 0
    with socket.socket(fileno=int(arguments[0])) as orders:
        warm(arguments[1:])
        gc.freeze()
        with contextlib.suppress(OSError):
            orders.send(b"ready")
            serve(orders)
    return 0


def _listen(path: Path, folders: list[str]) -> None:
    """Load, then fork for whoever connects to the socket; only this user can."""
    warm(folders)
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        mask = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(mask)
        listening.listen()
        try:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            serve_many(listening, 0)
        finally:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
