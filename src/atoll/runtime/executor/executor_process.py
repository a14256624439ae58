"""Run an executor: `python -m atoll.runtime.executor.executor_process --config FILE`.

It loads its components, has each run its example, and says that it is ready. SIGTERM refuses what is new,
finishes what runs within `drain_s`, and stops; a second one, or SIGINT, stops at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.components.base import LoadedComponent, Setup
from atoll.components.component_registry import find_component
from atoll.core.errors import InputError
from atoll.core.extras import require_extras
from atoll.core.files import atomic_write, read_text_limited
from atoll.runtime.executor.executor_client import Dial
from atoll.runtime.executor.executor_config import ExecutorConfig
from atoll.runtime.http.program import StopSignals, run_program, unless

_LOG = logging.getLogger("atoll.executor")
_MAX_THREADS = 16
_MAX_TOKEN = 1024


def split_address(address: str, field: str = "address") -> tuple[str, int]:
    """Return host and port of "host:port"."""
    host, sign, port = address.rpartition(":")
    if not sign or not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{address[:60]!r} is not host:port", field=field)
    return host, int(port)


def read_token(path: str) -> str:
    """Return the token in a file of one line."""
    token = read_text_limited(Path(path)).strip()
    if not 16 <= len(token) <= _MAX_TOKEN or len(token.split()) != 1:
        raise InputError(
            "a token is one word of 16 characters or more", field="token_file", hint="make it anew"
        )
    return token


async def _load(config: ExecutorConfig, threads: ThreadPoolExecutor) -> dict[str, LoadedComponent]:
    """Load every component, several at once."""
    loop = asyncio.get_running_loop()

    def load(name: str) -> LoadedComponent:
        setup = Setup(config.device, config.threads, config.components[name])
        return find_component(name).load(setup)

    loading = [loop.run_in_executor(threads, load, name) for name in config.components]
    return dict(zip(config.components, await asyncio.gather(*loading), strict=True))


async def serve_executor(config: ExecutorConfig, dial: Dial = asyncio.open_connection) -> None:
    """Run an executor until this process is told to stop; `dial` is how it reaches others."""
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        # Libraries read them when they are first loaded, which is later.
        os.environ.setdefault(variable, str(config.threads))
    require_extras("serve")
    from atoll.runtime.executor.executor_pages import StatusPages
    from atoll.runtime.executor.executor_server import ExecutorServer
    from atoll.runtime.executor.nixl_wire import open_wire
    from atoll.runtime.executor.store import ArrayStore
    from atoll.runtime.executor.workers import make_worker
    from atoll.runtime.http.handlers import HandlerServer

    host, port = split_address(config.address)
    token = read_token(config.token_file)
    stop = StopSignals()
    wire = open_wire(config.nixl, config.name, host)
    store = ArrayStore(Path(config.store), config.store_bytes, owner=config.name)
    pages = StatusPages(config.name)
    http = HandlerServer(pages.handle)
    threads = ThreadPoolExecutor(
        min(_MAX_THREADS, len(config.components)), thread_name_prefix="component"
    )
    try:
        health = await http.start(
            config.health_host or host, config.health_port, field="health_port"
        )
        components = await unless(stop.asked, _load(config, threads))
        if components is None:
            return
        workers = {
            name: make_worker(name, component, config.max_waiting, threads)
            for name, component in components.items()
        }
        server = ExecutorServer(config.name, token, store, workers, dial=dial, wire=wire)
        pages.server = server
        for worker in workers.values():
            await worker.start()
            await worker.prove()
            _LOG.info("%s runs", worker.name)
        address = await server.start(host, port)
        pages.is_ready = True
        if config.ready_file is not None:
            report = {
                "pid": os.getpid(),
                "address": store.address,
                "health": "{}:{}".format(*health),
            }
            atomic_write(Path(config.ready_file), json.dumps(report) + "\n")
        _LOG.info("listening on %s:%d", *address)
        await stop.asked.wait()
        await unless(stop.at_once, server.close(config.drain_s))
        for worker in workers.values():
            await worker.close()
        await http.close()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        store.close()
        if wire is not None:
            wire.close()


def main(arguments: list[str] | None = None) -> int:
    """Read the configuration, serve, and return the exit code."""
    return run_program(
        "atoll.runtime.executor.executor_process",
        __doc__,
        ExecutorConfig,
        serve_executor,
        arguments,
    )


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that still runs a batch cannot be ended, and an orderly exit would wait for it.
    os._exit(code)
