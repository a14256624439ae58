"""`atoll desk`: answers what pages and programs ask about plans, and `start_desk` for who needs one beside.

`start_desk(files)` starts a desk as a process of its own and returns once it can be asked:

    desk = start_desk([Path("fleet.yaml")])
    desk.socket         # where it listens, a Unix socket
    desk.is_alive()
    desk.stop()         # also called when the `with` statement ends that it is used in

It ends with the process that started it, however that ends. It blocks for the second that a desk takes to
start: in an event loop call it with `asyncio.to_thread`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import typer
from pydantic import Field

from atoll.cli.options import VerbSettings, verb
from atoll.cli.serving import need_serving
from atoll.core.errors import AtollError, InputError, UsageError
from atoll.report.terminal import console, note

if TYPE_CHECKING:
    from atoll.desk.server import DeskAddress

app = typer.Typer(add_completion=False)

_START_S = 60.0
_STOP_S = 5.0


class DeskSettings(VerbSettings):
    """What `atoll desk` is told."""

    fleets: tuple[Path, ...] = Field(
        (),
        description="A fleet file that can be asked about; repeatable.",
        json_schema_extra={"flag": "--fleet", "metavar": "FILE"},
    )
    socket: Path | None = Field(
        None, description="Unix socket to listen on; default: one in the runtime folder."
    )
    port: int | None = Field(
        None, ge=0, le=65535, description="Port of this machine instead, with a token; 0: any."
    )
    token: str | None = Field(
        None,
        min_length=16,
        max_length=200,
        pattern=r"^[!-~]+$",
        repr=False,
        description="The token of the port, $ATOLL_DESK_TOKEN; default: a new one, printed.",
        json_schema_extra={"env": "ATOLL_DESK_TOKEN"},
    )
    with_parent: bool = Field(
        False, description="End when its input ends: with the process that started it."
    )
    as_json: bool = Field(
        False,
        description="Print where it listens as JSON.",
        json_schema_extra={"flag": "--json"},
    )


@verb(app, DeskSettings)
def desk(options: DeskSettings) -> None:
    """Answer what pages and programs ask about plans: fleets, history, what-if, traces, simulations.

    Fleets are those that are operated from here, examples, and files that are named. It answers on a Unix
    socket that only you can open, or on a port of this machine to whoever shows its token.
    """
    need_serving()
    if options.port is not None and options.socket is not None:
        raise UsageError("a socket or a port, not both", field="--port", hint="leave out one")
    for path in options.fleets:
        if not path.is_file():
            raise InputError("there is no such file", path=path, hint="name a fleet file")
    from atoll.desk.server import DeskOptions, serve
    from atoll.runtime.http.loop import run

    asked = DeskOptions(options.fleets, options.socket, options.port, options.token)
    if options.with_parent:
        threading.Thread(target=_end_with_input, daemon=True).start()
    run(serve(asked, lambda address: _ready(address, as_json=options.as_json)))
    if not options.with_parent:
        note("stopped")


def _end_with_input() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _ready(address: DeskAddress, *, as_json: bool) -> None:
    if as_json:
        said = {"socket": address.socket, "url": address.url, "token": address.token}
        sys.stdout.write(json.dumps(said) + "\n")
    elif address.socket is not None:
        console().print(f"answers at {address.socket} until Ctrl-C", soft_wrap=True)
        example = f"curl --unix-socket {address.socket} http://desk/atoll/v1/fleets"
        console().print(f"\n  {example}\n", soft_wrap=True)
    else:
        console().print(f"answers at {address.url} until Ctrl-C", soft_wrap=True)
        example = f"curl -H 'authorization: Bearer {address.token}' {address.url}/atoll/v1/fleets"
        console().print(f"\n  {example}\n", soft_wrap=True)
    sys.stdout.flush()


@dataclass(slots=True)
class RunningDesk:
    """A desk that was started beside this process; `socket` is where it is asked."""

    process: subprocess.Popen[bytes]
    socket: Path

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End it; nothing happens where it has ended already."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_desk(files: Sequence[Path] = (), *, socket: Path | None = None) -> RunningDesk:
    """Start a desk that ends with this process, and return it once it can be asked; see the module.

    `files` are fleet files beside what it finds itself, `socket` where it listens (default: one of its own in
    the runtime folder). AtollError where it cannot start; what it has to say goes to this process's stderr.
    """
    words = [sys.executable, "-m", "atoll", "desk", "--json", "--with-parent"]
    for path in files:
        words += ["--fleet", str(path)]
    if socket is not None:
        words += ["--socket", str(socket)]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        said = json.loads(_read_line(process))
        return RunningDesk(process, Path(said["socket"]))
    except BaseException:
        process.kill()
        process.wait()
        raise


def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        ends_s = time.monotonic() + _START_S
        line = b""
        while not line.endswith(b"\n"):
            if not selector.select(ends_s - time.monotonic()):
                raise AtollError(f"the desk did not start within {_START_S:g} s")
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                raise AtollError("the desk did not start", hint="see what it said above")
            line += piece
    return line
