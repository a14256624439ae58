"""One fleet over two targets at once: a real Slurm and this machine, from the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm_cluster import SlurmCluster, slurm_cluster, why_not
from tests.e2e.operated_site import Site, ask, processes_of, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]
FLEET = """\
name: lab
services:
  chat:
    {model: llama-3.1-8b, ttft: 1500ms, tpot: 80ms, rate: 1/s, lengths: 512x128, only: [L4]}
  mini:
    {model: llama-3.2-3b, ttft: 2s, tpot: 100ms, rate: 0.5/s, lengths: 256x64, only: [T4]}
pool:
  owned:
    slurm: {"L4:2": 2}
    local: {"T4:1": 2}
settings: {max_nodes_per_instance: 1}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"a real Slurm {reason}" if reason.startswith("needs") else reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("torch", "transformers", "zmq", "tokenizers", "httptools", "zenoh"):
        pytest.importorskip(package, reason="needs the extras 'engine', 'fabric' and 'serve'")
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_plan_over_slurm_and_this_machine(
    cluster: SlurmCluster, tiny: Path, tmp_path: Path
) -> None:
    site = Site(tmp_path, SLURM_CONF=str(cluster.conf))
    (tmp_path / "lab.yaml").write_text(FLEET)
    up = ("up", "lab.yaml", "--on", "local,slurm", "--partition", "long", "--device", "cpu")
    stand_in = ("--stand-in", "--stand-in-model", str(tiny), "--port", "0", "--yes")

    # A partition that is not there: one line, and nothing begun.
    wrong = [word if word != "long" else "lung" for word in up]
    said = site.run(*wrong, *stand_in, code=1)
    assert re.search(r"^error: .*unknown partition 'lung'; did you mean long", said, re.MULTILINE)
    assert processes_of(tmp_path / "state") == []
    try:
        came = json.loads(site.run(*up, *stand_in, "--json").splitlines()[-1])
        where = {row["target"]: row["service"] for row in site.status()["instances"]}
        assert where == {"slurm": "chat", "local": "mini"}
        assert ask(came["url"], "chat") > 0
        assert ask(came["url"], "mini") > 0

        # A job that somebody cancels is replaced; what stands here is not touched.
        before = site.ready()
        cluster.run("scancel", "--user=root")
        until(lambda: len(site.ready()) < len(before), "cancelled")

        def replaced() -> bool:
            # A turn at a time, as cron would: a job that still ends holds its machine for a moment.
            site.run("operate", "lab", "--yes", "--once")
            # As many as the demand of now needs, which may be fewer than the plan promised to begin with.
            return any(name.startswith("chat") for name in site.ready() - before)

        until(replaced, "replaced")
        kept = before & site.ready()
        assert all(name.startswith("mini") for name in kept)
        assert kept
        until(lambda: "chat" in site.status()["gateway"]["models"], "announced")
        assert ask(came["url"], "chat") > 0
    finally:
        site.run("down", "lab", "--yes")
    assert not cluster.run("squeue", "--noheader", "--states=running,pending").strip()
    assert processes_of(tmp_path / "state") == []
