"""How soon the command line answers: CPU time of `atoll --help` next to a bare `import typer`.

The two run by turns and the least of many runs counts, so that neighbours on the machine matter little.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.report import Figure, finish, options

PROGRAMS = {
    "nothing": ("-c", "pass"),
    "import typer": ("-c", "import typer"),
    "import atoll": ("-c", "import atoll"),
    "atoll --version": ("-m", "atoll", "--version"),
    "atoll --help": ("-m", "atoll", "--help"),
    "atoll plan --help": ("-m", "atoll", "plan", "--help"),
}


def main() -> None:
    """Run every program many times and compare the least CPU times."""
    arguments = options(__doc__ or "")
    least = dict.fromkeys(PROGRAMS, float("inf"))
    for _ in range(3 if arguments.quick else 20):
        for name, program in PROGRAMS.items():
            least[name] = min(least[name], _cpu_s(program))
    for name, seconds in least.items():
        print(f"  {name:20s} {1e3 * seconds:6.0f} ms of CPU time")
    finish(
        [
            Figure("help_cpu_s", least["atoll --help"], 0.3),
            Figure("help_to_typer", least["atoll --help"] / least["import typer"], 3.0),
            Figure("import_cpu_s", least["import atoll"]),
        ],
        cpu_s=least,
    )


def _cpu_s(program: tuple[str, ...]) -> float:
    child = subprocess.Popen([sys.executable, *program], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)  # or Popen warns that it still runs
    if child.returncode:
        raise SystemExit(f"error: {' '.join(program)} ended with {child.returncode}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
