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
_Result = TypeVar("_Result")


class StopSignals:
    """Signals to this process: the first asks it to finish what runs, the next one to stop at once.

    SIGINT asks to stop at once from the start, unless it comes from people (`is_interactive`: Ctrl-C).
    """

    def __init__(self, *, is_interactive: bool = False) -> None:
        self.asked, self.at_once = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._ask)
        loop.add_signal_handler(signal.SIGINT, self._ask if is_interactive else self._hurry)

    def _ask(self) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()

    def _hurry(self) -> None:
        self.asked.set()
        self.at_once.set()


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result | None:
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


async def close_when_told(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Wait until the process is told to stop, then close; told to hurry, leave it half done."""
    signals = StopSignals()
    await signals.asked.wait()
    await unless(signals.at_once, close())


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
