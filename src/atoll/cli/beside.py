"""Processes that run beside another of Atoll's: started with it, started anew if they die, ended with it.

A process beside is a command of Atoll's own. It is in a session of its own, so that Ctrl-C is for whoever
started it to hear, and its standard input is a pipe that ends with that process, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from atoll.cli.options import VerbSettings
from atoll.core.errors import AtollError, UsageError
from atoll.core.options import option
from atoll.report.terminal import note

DASHBOARD_PORT = 8090
_PANEL = "Dashboard"
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
_STEADY_S = 60.0
"""One that has run for so long is started anew at once when it ends."""
_END_S = 5.0
_HOPELESS = (2, 3, 4, 6)
"""Exit codes of what cannot work however often it is tried: wrong options, no package."""
_STDERR = 2


class CompanionProcess:
    """A command that is kept running in a process of its own.

    What it prints goes to our stderr.
    """

    def __init__(self, arguments: Sequence[str], say: Callable[[str], None]) -> None:
        self._command = (sys.executable, "-m", "atoll", *arguments)
        self._name = arguments[0]
        self._say = say
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name=self._name, daemon=True)

    def start(self) -> None:
        """Start it, and keep it running from now on."""
        self._thread.start()

    def stop(self) -> None:
        """End it, and wait until it has ended."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None:
            if process.stdin is not None:
                # What it ends with.
                process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    @property
    def pid(self) -> int | None:
        """The number of the process that runs now, or None."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def _keep(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            begun_s = time.monotonic()
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=_STDERR,
                    start_new_session=True,
                )
            code = process.wait()
            if process.stdin is not None:
                process.stdin.close()
            if self._stopping.is_set():
                return
            if code in _HOPELESS:
                self._say(f"there is no {self._name}: it ended with {code}")
                return
            failures = 0 if time.monotonic() - begun_s > _STEADY_S else failures + 1
            pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
            self._say(f"{self._name} ended with {code} and is started anew in {pause_s:g} s")
            self._stopping.wait(pause_s)


def end_with_input() -> None:
    """Have the loop's process told to stop (SIGTERM) when its standard input ends."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            if not os.read(0, 4096):
                loop.remove_reader(0)
                os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(0, read)


class DashboardOptions(VerbSettings):
    """Options of verbs that start a dashboard beside what they serve."""

    dashboard: bool = option(
        False,
        f"Show it in a browser too, at port {DASHBOARD_PORT}, else at any that is free.",
        panel=_PANEL,
    )
    dashboard_at: str | None = option(
        None, "The same at another address.", metavar="[HOST:]PORT", panel=_PANEL
    )


def start_dashboard(
    options: DashboardOptions,
    arguments: tuple[str, ...],
    say: Callable[[str], None] = note,
) -> CompanionProcess | None:
    """Start a dashboard beside, where it is asked for; `arguments` say of what. It prints its address."""
    if not options.dashboard and options.dashboard_at is None:
        return None
    host, port = _choose_address(options)
    command = ("dashboard", *arguments, "--host", host, "--port", str(port), "--with-parent")
    process = CompanionProcess(command, say)
    process.start()
    return process


def check_dashboard(options: DashboardOptions) -> None:
    """Raise where the dashboard that is asked for could not be started, before anything is."""
    if options.dashboard_at is not None:
        _choose_address(options)


def _choose_address(options: DashboardOptions) -> tuple[str, int]:
    from atoll.dashboard.headers import is_loopback
    from atoll.runtime.http.listen_address import check_listen

    if options.dashboard_at is not None:
        host, port = _read_address(options.dashboard_at)
        if not is_loopback(host):
            raise UsageError(
                f"beyond this machine keys and cookies would travel to {host} without TLS",
                field="--dashboard-at",
                hint="run `atoll dashboard` beside, with --public-url or --insecure",
            )
        if port:
            check_listen(host, port, field="--dashboard-at")
        return host, port
    with contextlib.suppress(AtollError):
        check_listen("127.0.0.1", DASHBOARD_PORT)
        return "127.0.0.1", DASHBOARD_PORT
    return "127.0.0.1", 0


def _read_address(text: str) -> tuple[str, int]:
    """Read PORT or HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address", field="--dashboard-at", hint="127.0.0.1:8090")
    return host.strip("[]") or "127.0.0.1", int(port)
