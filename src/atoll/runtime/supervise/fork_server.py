"""A process that has loaded what nodes need and forks them, so that each starts in a moment.

Importing torch and transformers takes seconds of CPU time, and every node of a machine would spend them
anew; a node that died would be back only after that. Here it is done once. Every fork has a supervisor of its
own (`supervisor`), so nothing else differs from a process started afresh.

Run with the number of a socket and the folders of the models that nodes will hold. Each message on the
socket is a JSON order for a supervisor, with two descriptors: what it reads orders from, and what it
answers on. It ends when the socket closes.

It is forked itself, too: a spare of it waits for its end and takes its place at once, sockets and all, since
loading anew would take seconds of CPU time while the processes it would have forked are missing. A spare
costs next to nothing, for it shares all memory. Whoever forks from now on says "ready PID".

`python -m atoll.runtime.supervise.fork_server --listen PATH FOLDER ...` does the same for
whoever of this user connects to the socket at PATH: agents in different processes share it where
$ATOLL_FORK_SERVER names it. It says "ready PID" on its standard output, and ends when its input closes.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

from atoll.runtime.supervise.supervisor import Supervisor

_MAX_BYTES = 2**20


def warm(folders: list[str]) -> None:
    """Import whatever nodes of these models import; nothing is computed, so no thread is started."""
    import torch
    from transformers import AutoModelForCausalLM

    import atoll.engine.node
    import atoll.engine.node_core
    import atoll.runtime.executor.executor_process
    import atoll.runtime.instance.instance_server  # noqa: F401
    from atoll.engine.model_stage import load_config

    with contextlib.suppress(ImportError):  # of the extra "components", which executors alone need
        import onnxruntime  # noqa: F401

    # Of several threads a fork keeps one, so none may be started before.
    torch.set_num_threads(1)
    # On the meta device: all code of the model is imported, and no memory taken for weights.
    for folder in folders:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(load_config(folder))


def spare() -> socket.socket:
    """Fork a spare of this process; returns the line to it, on which nothing ever comes but its end.

    In the spare this returns, too: once its parent is gone, and with a spare of its own by then. A word on
    the line ends it.
    """
    while True:
        ours, theirs = socket.socketpair()
        if os.fork():
            theirs.close()
            return ours
        ours.close()
        with theirs, contextlib.suppress(OSError):
            if theirs.recv(1):
                _end()


def serve(orders: socket.socket | None, listening: socket.socket | None) -> None:
    """Serve, with a spare, until there is nobody to serve; neither is left then."""
    line = _serve(orders, listening)
    with contextlib.suppress(OSError):
        line.send(b"\n")


def _serve(orders: socket.socket | None, listening: socket.socket | None) -> socket.socket:
    """Fork a supervisor for every order, until nobody is left to give one.

    Orders come from `orders`, until that closes, or from whoever connects to `listening`, until the standard
    input closes. Returns the line to the spare.
    """
    # Nobody waits for the supervisors: the kernel takes them away.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    agents: list[socket.socket] = [] if orders is None else [orders]
    line, told = spare(), 0
    while True:
        if told != os.getpid():
            told = os.getpid()
            _tell(orders)
        watched: list[int | socket.socket] = [line, *agents]
        if listening is not None:
            watched += [0, listening]
        ready, _, _ = select.select(watched, [], [])
        for agent in [agent for agent in agents if agent in ready]:
            try:
                message, descriptors, _, _ = socket.recv_fds(agent, _MAX_BYTES, 2)
            except OSError:
                message, descriptors = b"", []
            if message:
                # Closed in the fork: as long as it held them, nobody would see them close.
                sockets = [line, *agents] if listening is None else [line, listening, *agents]
                _fork(sockets, message, descriptors)
            elif agent is orders:
                return line
            else:
                agents.remove(agent)
                agent.close()
        if listening is not None:
            if 0 in ready and not os.read(0, 4096):
                return line
            if listening in ready:
                agents.append(listening.accept()[0])
        # The spare is gone: there must always be one.
        if line in ready:
            line.close()
            line = spare()


def _tell(orders: socket.socket | None) -> None:
    """Say that this process forks from now on."""
    word = f"ready {os.getpid()}\n".encode()
    with contextlib.suppress(OSError):
        if orders is not None:
            orders.send(word)
        else:
            os.write(1, word)


def _fork(sockets: list[socket.socket], message: bytes, descriptors: list[int]) -> None:
    """Fork the supervisor of an order; what is open here stays open here alone."""
    if os.fork() == 0:
        _supervisor(sockets, json.loads(message), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


def _supervisor(
    sockets: list[socket.socket], order: dict[str, object], descriptors: list[int]
) -> None:
    code = 1
    try:
        for each in sockets:
            each.close()
        os.setsid()
        # A supervisor waits for its command, so it must hear of its end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if _is_gone(descriptors[0]):
            return
        for descriptor, target in zip(descriptors, (0, 1), strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        environment = order["environment"]
        assert isinstance(environment, dict)
        os.environ.update(environment)
        code = Supervisor(order).run()
    finally:
        os._exit(code)


def _is_gone(orders: int) -> bool:
    """Whether whoever gave the order does not wait any more: we may have been frozen since."""
    look = select.poll()
    look.register(orders, 0)
    return any(events & select.POLLHUP for _, events in look.poll(0))


def main(arguments: list[str]) -> int:
    """Load, say so, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments[:1] == ["--listen"]:
        _listen(Path(arguments[1]), arguments[2:])
        _end()
    with socket.socket(fileno=int(arguments[0])) as orders:
        warm(arguments[1:])
        # What is loaded stays for good: the collector need not touch memory that forks share.
        gc.freeze()
        serve(orders, None)
    _end()
    return 0


def _end() -> None:
    """End without the interpreter's way out: in a spare libraries would wait for threads it never had."""
    os._exit(0)


def _listen(path: Path, folders: list[str]) -> None:
    """Load, then fork for whoever connects to the socket; only this user can."""
    warm(folders)
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        # The mask comes before the file: at no moment can another user connect.
        mask = os.umask(0o177)
        try:
            _bind(listening, path)
        finally:
            os.umask(mask)
        listening.listen()
        try:
            serve(None, listening)
        finally:
            path.unlink(missing_ok=True)


def _bind(listening: socket.socket, path: Path) -> None:
    """Bind to the path, also where one that was killed has left its socket."""
    try:
        listening.bind(str(path))
    except OSError:
        # Somebody who answers is alive and keeps the path; one that was killed refuses.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            if other.connect_ex(str(path)) != errno.ECONNREFUSED:
                raise
        path.unlink(missing_ok=True)
        listening.bind(str(path))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
