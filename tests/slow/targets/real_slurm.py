"""A real Slurm on this machine whose slurmctld is paused, or killed and started anew, under a fleet of two.

Needs root and Slurm's programs (see `tests.deploy.slurm_cluster`). Turns are a second of real time apart.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from atoll.deploy.local.daemon import process_start
from atoll.deploy.slurm.runner import ProcessRunner
from atoll.deploy.slurm.slurm_deployer import SlurmDeployer
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from tests.deploy.slurm_cluster import SlurmCluster, slurm_cluster, why_not
from tests.slow.targets.faults import SECRET
from tests.slow.targets.target_faults import OLD, REGION, Fleet, Outcome

ENGINE = """
import http.server, os, signal, sys
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
open(sys.argv[2], "w").write(str(os.getpid()))
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Well).serve_forever()
"""
TURN_S = 1.0
SILENT_TURNS = 6


class RealSlurmStage:
    """Jobs of a real Slurm: an instance serves while its process runs, whatever Slurm says of it."""

    fault: str | None = None

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        settings = {
            "work_folder": str(folder / "work"),
            "partitions": ["long"],
            "region": REGION,
            "deadline_s": 3.0,
        }
        self._settings = SlurmSettings.parse(settings)

    @property
    def now_s(self) -> float:
        return time.time()

    def argv(self, instance: str) -> tuple[str, ...]:
        return ("python3", "-c", ENGINE, "{port}", str(self._folder / f"{instance}.pid"))

    def deployer(self) -> SlurmDeployer:
        return SlurmDeployer(self._settings, runner=ProcessRunner(self._cluster.environment))

    def live(self, by_s: float) -> None:
        del by_s
        time.sleep(TURN_S)

    def standing(self) -> set[str]:
        pids = {path.stem: int(path.read_text() or 0) for path in self._folder.glob("*.pid")}
        return {name for name, pid in pids.items() if process_start(pid) is not None}

    def serving(self) -> set[str]:
        return self.standing()

    def without_secret(self) -> set[str]:
        kept = set()
        for path in self._folder.glob("work/f-*/i-*/job.json"):
            if (path.parent / "secrets" / f"n0.{SECRET}").exists():
                kept.add(json.loads(path.read_text())["labels"]["instance"])
        return self.standing() - kept

    def close(self) -> None:
        """End all jobs, and wait until they have."""
        self._cluster.run("scancel", "--user=root")
        for _ in range(100):
            if not self._cluster.run("squeue", "--noheader").strip():
                return
            time.sleep(0.3)


def run_real_slurm() -> Iterator[tuple[str, Outcome]]:
    """Yield what came of each case; nothing where there is no Slurm (`why_not` says why)."""
    with tempfile.TemporaryDirectory() as name, slurm_cluster(Path(name) / "cluster") as cluster:
        for kill in (False, True):
            for takes_over in (False, True):
                folder = Path(name) / f"case-{kill}-{takes_over}"
                folder.mkdir()
                with contextlib.closing(RealSlurmStage(cluster, folder)) as stage:
                    fleet = Fleet(stage, folder)
                    assert fleet.rest(OLD, OLD), "the fleet does not come up on Slurm"
                    with cluster.silent_controller(kill=kill):
                        for turn in range(SILENT_TURNS):
                            if takes_over and turn == 1:
                                fleet.controller = fleet.control(OLD)
                            fleet.turn()
                    doing = "while another controller takes over" if takes_over else "at rest"
                    how = "killed and started anew" if kill else "paused"
                    yield f"slurmctld {how}, {doing}", fleet.end(OLD, OLD)


__all__ = ["run_real_slurm", "why_not"]
