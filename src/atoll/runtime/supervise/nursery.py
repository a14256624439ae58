"""A process that has loaded what nodes need and forks them, so that each starts in a moment.

Importing torch and transformers takes seconds of CPU time, and every node of a machine would spend them
anew; a node that died would be back only after that. Here it is done once. Every fork has a guard of its
own (`guard`), so nothing else differs from a process started afresh.

Run with the number of a socket and the folders of the models that nodes will hold. Each message on the
socket is a JSON order for a guard, with two descriptors: what the guard reads orders from, and what it
answers on. It ends when the socket closes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys

from atoll.runtime.supervise.guard import Guard

_MOST_BYTES = 2**20


def warm(folders: list[str]) -> None:
    """Import whatever nodes of these models import; nothing is computed, so no thread is started."""
    import torch
    from transformers import AutoModelForCausalLM

    import atoll.engine.node
    import atoll.engine.node_core
    import atoll.runtime.instance.server  # noqa: F401
    from atoll.engine.stage import load_config

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
        if os.fork() == 0:
            _guard(orders, json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _guard(orders: socket.socket, order: dict[str, object], descriptors: list[int]) -> None:
    code = 1
    try:
        orders.close()
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
    with socket.socket(fileno=int(arguments[0])) as orders:
        warm(arguments[1:])
        gc.freeze()
        with contextlib.suppress(OSError):
            orders.send(b"ready")
            serve(orders)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
