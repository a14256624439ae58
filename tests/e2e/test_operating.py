"""A fleet's whole life from the command line, on loopback: up, ask, grow, a killed controller, down."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.operated_site import PATIENCE_S, Site, ask, processes_of, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]
FLEET = """\
name: lab
services:
  chat: {model: llama-3.1-8b, ttft: 1500ms, tpot: 80ms, rate: 1/s, lengths: 512x128}
pool:
  offers:
    - {region: here, node_type: L4:1, available: 4, usd_per_hour: 0.80}
settings: {max_nodes_per_instance: 1}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def set_rate(folder: Path, text: str) -> None:
    (folder / "lab.yaml").write_text(re.sub(r"rate: [^,]+", f"rate: {text}", FLEET))


def test_a_fleet_lives_grows_survives_its_controller_and_ends(tmp_path: Path, tiny: Path) -> None:
    site = Site(tmp_path)
    set_rate(site.folder, "1/s")
    try:
        live(site, tiny)
    finally:
        site.end()


def live(site: Site, tiny: Path) -> None:
    stand_in = ("--stand-in", "--stand-in-model", str(tiny))
    said = site.run("up", "lab.yaml", *stand_in, "--yes", "--port", "0", "--json")
    came = json.loads(said.splitlines()[-1])
    url = came["url"]
    assert ask(url) > 0
    first = site.ready()
    assert first == set(came["instances"])
    # No secret is on a command line.
    tokens = [
        "".join(path.read_text().split())
        for path in (site.folder / "state" / "fleets" / "lab" / "fabric").glob("*.token")
    ]
    lines = processes_of(site.folder / "state")
    assert len(tokens) >= 3
    assert lines
    assert not [token for token in tokens for line in lines if token in line]

    # The fleet file asks for more while a controller runs; it is killed as soon as it has begun to act.
    with site.running("operate", "lab", "--yes", "--look", "1s") as controller:
        until(lambda: "controller" in {event["kind"] for event in site.history()}, "operated")
        set_rate(site.folder, "4/s")
        until(
            lambda: [e for e in site.history() if e["kind"] == "start"][len(first) :],
            "growing",
        )
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    assert ask(url) > 0
    # The next one takes over at once, and what was begun is not begun again.
    site.run("operate", "lab", "--yes", "--once")
    # (What was written down and not done when it was killed gets another name.)
    present = {
        row["instance"]
        for row in site.status()["instances"]
        if row["state"] in ("starting", "ready")
    }
    planned = [event for event in site.history() if event["kind"] == "plan"][-1]
    assert len(present) == round(planned["usd_per_hour"] / 0.80) > len(first)
    until(lambda: site.ready() == present, "all of it ready")
    wanted = site.ready()
    assert first < wanted
    shown = site.status()
    assert shown["errors"] == []
    assert ask(url) > 0
    # The gateway tells what it saw, and what was promised.
    (seen,) = shown["traffic"]
    assert seen["service"] == "chat"
    assert seen["requests_per_s"] > 0.0
    assert seen["judged"] >= 1

    # From anywhere, with a token of the fabric: what instances say of themselves.
    observer = site.folder / "state" / "fleets" / "lab" / "fabric" / "fabric.token"
    known = json.loads(site.run("status", "lab", "--fabric", f"@{observer}", "--json"))
    assert {row["instance"] for row in known} == wanted
    assert {(row["fleet"], row["service"], row["routable"]) for row in known} == {
        ("lab", "chat", True)
    }

    # A broken file changes nothing and is told.
    (site.folder / "lab.yaml").write_text("models: {")
    assert "lab.yaml" in site.run("operate", "lab", "--yes", "--once", code=3)
    assert site.ready() == wanted
    name = min(wanted)
    assert "node.announced" in site.run("logs", name)

    # SIGTERM ends the controller and not the fleet.
    set_rate(site.folder, "4/s")
    with site.running("operate", "lab", "--yes", "--look", "1s") as controller:
        until(lambda: site.status()["controller"] is not None, "operated again")
        controller.terminate()
        assert controller.wait(timeout=PATIENCE_S) == 0
    assert site.ready() == wanted
    assert site.status()["controller"] is None

    # A gateway that died is started anew where it was.
    record = json.loads((site.folder / "state" / "fleets" / "lab" / "fleet.json").read_text())
    os.kill(record["entrance"]["gateway"]["process"]["pid"], signal.SIGKILL)
    until(lambda: "gateway has died" in str(site.status()["errors"]), "seen to be dead")
    site.run("operate", "lab", "--yes", "--once")
    until(lambda: site.status()["gateway"]["models"] == ["chat"], "told of the model")
    assert ask(url) > 0

    site.run("down", "lab", "--yes")
    assert not site.status()["up"]
    last = site.history()[-1]
    assert (last["kind"], last["text"]) == ("note", "taken down")
