"""What a first run on a machine waits for: compiling before a first plan, placement and simulation; the demo.

Each command runs twice in processes of its own: with empty caches, then again with what the first run left
there. The difference of their CPU seconds is what compiling took; CPU seconds, since a first run shares its
machine with whatever installs it. A placement searches for as long as it may, so only its compiling is run.
The demo is timed by the clock, with its weights and the packages there.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from atoll.core.paths import cache_dir
from benchmarks.report import ROOT, Figure, finish, options

FLEET = ROOT / "examples" / "quickstart.yaml"
DEMO_LIMIT_S = 600.0
ATOLL = ["-m", "atoll"]
COMPILE_PLACING = """
from atoll.prove.warm import entries
for one in entries():
    if ".place." in one.dispatcher.py_func.__module__:
        one.compile()
"""


@dataclass(frozen=True)
class Spent:
    """What a command took."""

    cpu_s: float
    wall_s: float


def run(command: list[str], caches: Path, limit_s: float | None = None) -> Spent:
    """Run Python with a command line, on caches in a folder; it must end well."""
    environment = dict(os.environ) | {
        "NUMBA_CACHE_DIR": str(caches / "numba"),
        "ATOLL_CACHE": str(caches / "atoll"),
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    wall_s = time.perf_counter() - begun_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:40]}: {done.stderr.strip()[-300:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(cpu_s, wall_s)


def compile_cpu_s(what: str, command: list[str], folder: Path) -> float:
    """Return the CPU seconds that compiling took of a first run of a command."""
    cold, warm = run(command, folder), run(command, folder)
    print(
        f"  {what:9s} first {cold.cpu_s:6.2f} CPU-s ({cold.wall_s:.1f} s),"
        f" again {warm.cpu_s:5.2f} CPU-s ({warm.wall_s:.1f} s)"
    )
    return cold.cpu_s - warm.cpu_s


def time_demo(folder: Path) -> tuple[float | None, float | None, str]:
    """Return the seconds of a first demo and of a second one, and why there are none."""
    # The weights are fetched, not compiled: they are those of whoever runs this.
    models = cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "atoll").mkdir(parents=True)
    (folder / "atoll" / "models").symlink_to(models)
    try:
        cold = run([*ATOLL, "demo"], folder, DEMO_LIMIT_S).wall_s
        return cold, run([*ATOLL, "demo"], folder, DEMO_LIMIT_S).wall_s, ""
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return None, None, str(error).splitlines()[-1][:120]


def main() -> None:
    """Time all of it."""
    arguments = options(__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = folder / "plan.json"
        planned = compile_cpu_s(
            "plan", [*ATOLL, "plan", str(FLEET), "-o", str(plan)], folder / "plan"
        )
        simulated = compile_cpu_s(
            "simulate", [*ATOLL, "simulate", str(plan), "--fleet", str(FLEET)], folder / "simulate"
        )
        placed = compile_cpu_s("place", ["-c", COMPILE_PLACING], folder / "place")
        cold, again, reason = None, None, "left out by --quick"
        if not arguments.quick:
            cold, again, reason = time_demo(folder / "demo")
    finish(
        [
            Figure("plan_compile_cpu_s", planned, 8, note="before a first plan"),
            Figure("simulate_compile_cpu_s", simulated, 8, note="before a first simulation"),
            Figure("place_compile_cpu_s", placed, note="before a first placement in a cluster"),
            Figure("demo_cold_s", cold, 75, note=reason),
            Figure("demo_warm_s", again, 30, note=reason),
        ]
    )


if __name__ == "__main__":
    main()
