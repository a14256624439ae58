"""Run an executor: `python -m atoll.runtime.executor.executor_process --config FILE`.

It loads its components, has each run its example, and says that it is ready. SIGTERM refuses what is new,
finishes what runs within `drain_s`, and stops; a second one, or SIGINT, stops at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.components.base import LoadedComponent, Setup
from atoll.components.component_registry import find_component
from atoll.core.errors import AtollError, InputError, MissingDependencyError
from atoll.core.files import atomic_write, read_text_limited
from atoll.runtime.executor.executor_config import ExecutorConfig
from atoll.runtime.http.program import run

if TYPE_CHECKING:
    from atoll.runtime.executor.executor_server import ExecutorServer
    from atoll.runtime.http.handlers import HandlerServer

_LOG = logging.getLogger("atoll.executor")
_MAX_THREADS = 16
_MAX_TOKEN = 1024
_Result = TypeVar("_Result")


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


class _Stop:
    """Signals: the first SIGTERM asks to finish up, the second one or SIGINT to stop at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._finish_up)
        loop.add_signal_handler(signal.SIGINT, self._hurry)

    def _finish_up(self) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()

    def _hurry(self) -> None:
        self.asked.set()
        self.at_once.set()


async def _serve(config: ExecutorConfig) -> None:
    try:
        from atoll.runtime.executor.executor_pages import StatusPages
        from atoll.runtime.executor.executor_server import ExecutorServer
        from atoll.runtime.executor.store import ArrayStore
        from atoll.runtime.executor.workers import make_worker
        from atoll.runtime.http.handlers import HandlerServer
    except ImportError as error:
        name = error.name or "msgspec"
        raise MissingDependencyError(name, "serve", needed_for="an executor") from error

    host, port = split_address(config.address)
    token = read_token(config.token_file)
    stop = _Stop()
    store = ArrayStore(Path(config.store), config.store_bytes, owner=config.name)
    pages = StatusPages(config.name)
    http = HandlerServer(pages.handle)
    threads = ThreadPoolExecutor(
        min(_MAX_THREADS, len(config.components)), thread_name_prefix="component"
    )
    try:
        health = await _listen(http, host, config.health_port, "health_port")
        components = await _unless(stop.asked, _load(config, threads))
        if components is None:
            return
        workers = {
            name: make_worker(name, component, config.max_waiting, threads)
            for name, component in components.items()
        }
        server = pages.server = ExecutorServer(config.name, token, store, workers)
        for worker in workers.values():
            await worker.start()
            await worker.prove()
            _LOG.info("%s runs", worker.name)
        address = await _listen(server, host, port, "address")
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
        await _unless(stop.at_once, server.close(config.drain_s))
        for worker in workers.values():
            await worker.close()
        await http.close()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        store.close()


async def _listen(
    server: ExecutorServer | HandlerServer, host: str, port: int, field: str
) -> tuple[str, int]:
    try:
        return await server.start(host, port)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror}", field=field
        ) from error


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Return what a coroutine returns; None if the event comes first, which ends it."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if working.done():
        return working.result()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    return None


def main(arguments: list[str] | None = None) -> int:
    """Read the configuration, serve, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m atoll.runtime.executor.executor_process", description=__doc__
    )
    parser.add_argument("--config", type=Path, required=True, help="JSON file")
    path: Path = parser.parse_args(arguments).config
    try:
        config = ExecutorConfig.from_json(read_text_limited(path), path=path)
        logging.basicConfig(
            level=config.log_level, format=f"%(asctime)s %(levelname)s {config.name}: %(message)s"
        )
        if config.cpus:
            os.sched_setaffinity(0, config.cpus)
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            # Libraries read them when they are first loaded, which is later.
            os.environ.setdefault(variable, str(config.threads))
        run(_serve(config))
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that still runs a batch cannot be ended, and an orderly exit would wait for it.
    os._exit(code)
