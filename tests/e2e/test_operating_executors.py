"""A fleet of an any-to-any model from the command line: up, ask, a killed executor, more of them, down."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.operated_site import Site, ask, processes_of, until
from tests.e2e.small_parts import HERE

pytestmark = [pytest.mark.slow]
ROOT = Path(__file__).parents[2]
FLEET = """\
name: lab
services:
  look:
    model: qwen2.5-vl-7b
    rate: 1/s
    ttft: 3s
    tpot: 100ms
    paths: [[vision, llm]]
    classes:
      text: {share: 50%, input: 300, output: 100}
      image+text: {share: 50%, input: 200, output: 100, images: {size: 1280x720}}
pool:
  offers:
    - {region: here, node_type: L4:1, available: 6, usd_per_hour: 0.80}
"""
PARTS = f"""\
services:
  look:
    parts: {{vision: ["{HERE}:SmallEye"], llm: ["{HERE}:SmallMind"]}}
    tasks: {{chat: "atoll.tasks.library.assistant:SpeakingAssistant"}}
    options: {{see: "{HERE}:SmallEye", think: "{HERE}:SmallMind"}}
"""


def test_executors_are_started_replaced_added_and_ended(tmp_path: Path) -> None:
    for package in ("zenoh", "httptools", "onnxruntime", "PIL"):
        pytest.importorskip(package, reason="needs the extras 'components', 'fabric' and 'serve'")
    known = os.environ.get("PYTHONPATH", "")
    site = Site(tmp_path, PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), known))))
    (tmp_path / "lab.yaml").write_text(FLEET)
    (tmp_path / "parts.yaml").write_text(PARTS)
    try:
        live(site)
    finally:
        site.end()


def live(site: Site) -> None:
    up = ("up", "lab.yaml", "--pretend", "--yes", "--port", "0", "--json")
    came = json.loads(site.run(*up, "--parts", "parts.yaml").splitlines()[-1])
    url = came["url"]
    assert ask(url, "look") > 0
    first = site.ready()
    assert first == set(came["instances"])
    assert len(first) == 2
    tokens = [
        "".join(path.read_text().split())
        for path in (site.folder / "state" / "fleets" / "lab" / "fabric").glob("*.token")
    ]
    assert tokens
    lines = processes_of(site.folder / "state")
    assert not [token for token in tokens for line in lines if token in line]
    with site.running("operate", "lab", "--every", "5s", "--look", "1s", "--yes"):
        mind = next(name for name in first if "llm" in name)
        kill_executor(mind)
        until(lambda: is_replaced(site, mind), "replaced")
        assert ask(url, "look") > 0
        text = (site.folder / "lab.yaml").read_text()
        (site.folder / "lab.yaml").write_text(text.replace("rate: 1/s", "rate: 8/s"))
        until(lambda: len(site.ready()) > 2, "grown")
        assert ask(url, "look") > 0
    site.run("down", "lab", "--yes")
    assert processes_of(site.folder / "state") == []


def kill_executor(name: str) -> None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if b"atoll.deploy.commands.executor_node" in words[:3] and name.encode() in words:
            os.kill(int(path.parent.name), signal.SIGKILL)
            return
    raise AssertionError(f"no process of {name}")


def is_replaced(site: Site, name: str) -> bool:
    ready = site.ready()
    return len(ready) == 2 and name not in ready
