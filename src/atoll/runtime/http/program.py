"""A server as a program: read a configuration, serve, and stop when told to.

SIGTERM asks to finish what runs; a second one, or SIGINT, asks to stop at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from atoll.core.errors import AtollError
from atoll.core.files import read_text_limited


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


class ProgramConfig(Protocol):
    """Settings that every program needs."""

    @property
    def name(self) -> str:
        """How its log calls it."""
        ...

    @property
    def log_level(self) -> str:
        """How much it logs."""
        ...

    @classmethod
    def from_json(cls, text: str, *, path: Path) -> Self:
        """Read it from a file's text."""
        ...


_Config = TypeVar("_Config", bound=ProgramConfig)


async def close_when_told(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Wait until the process is told to stop, then close; told to hurry, leave it half done."""
    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_or_hurry() -> None:
        (at_once if stop.is_set() else stop).set()

    def stop_at_once() -> None:
        stop.set()
        at_once.set()

    loop.add_signal_handler(signal.SIGTERM, stop_or_hurry)
    loop.add_signal_handler(signal.SIGINT, stop_at_once)
    await stop.wait()
    closing = asyncio.create_task(close())
    hurried = asyncio.create_task(at_once.wait())
    await asyncio.wait({closing, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if not closing.done():
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
    hurried.cancel()


def run_program(
    module: str,
    description: str | None,
    config_type: type[_Config],
    serve: Callable[[_Config], Coroutine[Any, Any, None]],
    arguments: list[str] | None,
) -> int:
    """Read `--config FILE`, serve, and return the exit code; what is wrong is a line on stderr."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--config", type=Path, required=True, help="JSON file")
    path: Path = parser.parse_args(arguments).config
    try:
        config = config_type.from_json(read_text_limited(path), path=path)
        logging.basicConfig(
            level=config.log_level, format=f"%(asctime)s %(levelname)s {config.name}: %(message)s"
        )
        run(serve(config))
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0
