"""The batch scripts in examples/slurm: run as Slurm would run them, with an engine that is a fake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.join.live import fake_vllm, world
from tests.runtime.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_bash_and_ask_for_the_signal(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --signal=B:USR1@120" in lines
    # Slurm reads options only before the first command.
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


def test_there_is_a_script_for_every_engine() -> None:
    assert [path.stem for path in SCRIPTS] == ["atoll", "llamacpp", "sglang", "vllm"]


@pytest.mark.slow
async def test_a_job_joins_announces_its_end_and_leaves(tmp_path: Path) -> None:
    programs = fake_vllm(tmp_path)
    (programs / "atoll").write_text(f"#!/bin/sh\nexec {sys.executable} -m atoll $@\n")
    (programs / "atoll").chmod(0o755)
    end_s = int(time.time()) + 3600

    async with world(tmp_path) as here:
        slurm = {
            "ATOLL_FABRIC": here.address,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "VENV": str(tmp_path / "none"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_END_TIME": str(end_s),
            "SLURM_ARRAY_TASK_ID": "3",
            "SLURMD_NODENAME": "gpu17",
            "SLURM_CLUSTER_NAME": "alps",
        }
        job = subprocess.Popen(
            ["bash", "examples/slurm/vllm.sbatch", "org/m"],
            cwd=ROOT,
            env=os.environ | slurm,
            stderr=subprocess.PIPE,
            text=True,
        )
        await until(here.serving)
        peer = here.seen()
        assert peer is not None
        assert (peer.name, peer.metadata.site) == ("gpu17-3", "alps")
        assert (peer.metadata.stability, peer.metadata.ends_s) == ("batch", float(end_s))
        job.send_signal(signal.SIGUSR1)
        await until(lambda: (p := here.seen()) is None or p.metadata.ends_s != float(end_s))
        near = here.seen()
        assert near is not None
        assert near.metadata.ends_s == pytest.approx(time.time() + 120, abs=60)
        job.send_signal(signal.SIGTERM)
        await until(lambda: job.poll() is not None)
        job.communicate()
        assert job.returncode == 0
        await until(lambda: here.seen() is None)
