"""A fleet of a tiny model under `atoll operate --pretend`, with its own dashboard, for the browser."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.runtime.http.listen_address import free_ports
from tests.e2e.operated_site import PATIENCE_S, Site

LAB = """\
# the fleet of the laboratory
name: lab
services:
  chat: {model: llama-3.1-8b, ttft: 1500ms, tpot: 80ms, rate: 0.3/s, lengths: 256x64}
pool:
  offers:
    - {region: here, node_type: L4:1, available: 4, usd_per_hour: 0.80}
settings: {max_nodes_per_instance: 1}
"""
_LINK = re.compile(r"dashboard: (\S+)")


class OperatedSite:
    """The dashboard of a controller; `url` is where, `link()` logs in as admin.

    `model` stands in for those of the fleet file (None: they serve themselves), `options` are more of the
    controller's: it asks on its page unless told.
    """

    def __init__(
        self,
        folder: Path,
        model: Path | None,
        fleet: str = LAB,
        options: Sequence[str] = ("--pretend", "--ask", "page"),
    ) -> None:
        self.folder = folder
        self.file = folder / "lab.yaml"
        runtime = tempfile.mkdtemp(prefix="a-")
        self._site = Site(folder, XDG_RUNTIME_DIR=runtime)
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self._model, self._fleet, self._options = model, fleet, tuple(options)

    def link(self) -> str:
        """Return an address that logs in as the admin of this machine, once."""
        said = self._site.run("dashboard", "--link", "--port", str(self._port))
        found = _LINK.search(said)
        assert found is not None, said
        return found[1]

    def run(self, *words: str) -> str:
        """Run a command as the user who operates the fleet."""
        return self._site.run(*words)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command that goes on, as that user."""
        return subprocess.Popen(
            [sys.executable, "-m", "atoll", *words],
            cwd=self.folder,
            env=self._site.environment,
            stdin=subprocess.DEVNULL,
        )

    @contextlib.contextmanager
    def operating(self) -> Iterator[None]:
        """Operate the fleet until it is over, and take it down then."""
        self.file.write_text(self._fleet)
        model = self._model
        stand_in = () if model is None else ("--stand-in", "--stand-in-model", str(model))
        shown = ("--look", "1s", "--port", "0", "--dashboard-at", f"127.0.0.1:{self._port}")
        words = ("operate", "lab.yaml", "--device", "cpu", *self._options, *stand_in, *shown)
        try:
            with self._site.running(*words):
                self._await_dashboard()
                yield
        finally:
            self._site.end()

    def said(self) -> str:
        """Return what the controller and its dashboard have said."""
        return (self.folder / "said.log").read_text()

    def _await_dashboard(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not _LINK.search(self.said()):
            assert time.monotonic() < end_s, self.said()
            time.sleep(0.2)


def threads_are_few() -> None:
    """Keep the processes of a fleet from taking all cores of a small machine."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
