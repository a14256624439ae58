"""A fleet on machines that joined by the line of an invitation: killed, replaced, lost with its machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.operated_site import Site, ask, processes_of, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]
LAB = """\
name: lab
services:
  chat: {model: llama-3.1-8b, ttft: 1500ms, tpot: 80ms, rate: 0.3/s, lengths: 256x64}
pool:
  offers:
    - {region: joined, node_type: L4:1, available: 4, usd_per_hour: 0.80}
settings: {max_nodes_per_instance: 1}
"""


class JoiningSite(Site):
    """A user whose machines join by hand; all of them are this one."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.runtime = tempfile.mkdtemp(prefix="a-")
        super().__init__(folder, XDG_RUNTIME_DIR=self.runtime)
        self.home = folder / "state" / "fleets" / "lab"
        self._model = model

    def operate(self) -> contextlib.AbstractContextManager[object]:
        (self.folder / "lab.yaml").write_text(LAB)
        words = ("--stand-in", "--stand-in-model", str(self._model), "--address", "127.0.0.1")
        return self.running(
            *("operate", "lab.yaml", "--on", "joined", "--yes", "--look", "1s", "--port", "0"),
            *words,
        )

    @contextlib.contextmanager
    def machine(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Let a machine join by the line that the page shows."""
        from atoll.control.operation.fleet_home import FleetHome
        from atoll.planner.machine_pages import Invitation, make_invitation

        line = shlex.split(make_invitation(FleetHome(self.home), Invitation(name=name))["line"])
        assert line[:2] == ["atoll", "join"]
        # What this machine lacks: a GPU, and the name of weights on a hub.
        here = ("--gpus", "L4:1", "--models", str(self._model.parent))
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *line, *here],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def where(self) -> dict[str, str]:
        """Return on which machine each ready instance stands."""
        rows = self.status()["instances"]
        return {each["instance"]: each["hosts"][0] for each in rows if each["state"] == "ready"}


@pytest.fixture
def site(tmp_path: Path) -> JoiningSite:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    from tests.tiny_model import write_tiny_model

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return JoiningSite(tmp_path, write_tiny_model(tmp_path / "models" / "tiny"))


def test_machines_that_join_serve_and_are_replaced(site: JoiningSite) -> None:
    try:
        with site.operate():
            until((site.home / "fabric" / "ca.key").exists, "operated")
            until((site.home / "gateway.json").exists, "reachable")
            with site.machine("gpu7") as first:
                until(lambda: len(site.where()) == 1, "ready")
                ((lost, host),) = site.where().items()
                assert host == "gpu7"
                url = str(site.status()["url"]).removesuffix("/v1")
                assert ask(url) > 0
                assert "serving chat" in site.run("logs", "lab", lost)
                kill_instance(lost)
                until(lambda: site.where() and lost not in site.where(), "replaced")
                assert ask(url) > 0
                started = [e["instance"] for e in site.history() if e["kind"] == "start"]
                assert len(started) == len(set(started)) == 2
                # The machine goes without a word, and another one comes.
                with site.machine("gpu8") as second:
                    first.kill()
                    first.wait()
                    until(lambda: set(site.where().values()) == {"gpu8"}, "on the other machine")
                    assert ask(url) > 0
                    assert not [p for p in processes_of(site.folder) if "gpu7" in p]
                    second.send_signal(signal.SIGTERM)
                    assert second.wait(60) == 0
            assert not [p for p in processes_of(Path(site.runtime)) if "instances" in p]
    finally:
        site.end()


def kill_instance(name: str) -> None:
    """End what serves an instance, as if the kernel had."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"join" in words and name.encode() in words and b"--" in words:
                os.kill(int(path.parent.name), signal.SIGKILL)
                return
    raise AssertionError(f"nothing serves {name}")
