"""Run every check, show what failed, end with a summary; the exit code says if all passed."""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sysconfig.get_path("scripts"))
SOURCES = [name for name in ("src", "tests", "tools", "benchmarks") if (ROOT / name).is_dir()]


@dataclass(frozen=True, slots=True)
class Check:
    """One command; `quiet` ones are shown only when they fail."""

    name: str
    command: tuple[str, ...]
    quiet: bool = True


def checks(*, full: bool, tests: bool) -> list[Check]:
    found = [
        Check("ruff check", ("ruff", "check", *SOURCES)),
        Check("ruff format", ("ruff", "format", "--check", *SOURCES)),
        Check("mypy", ("mypy", *SOURCES)),
        Check("imports", ("lint-imports", "--no-logo")),
    ]
    if tests:
        selection = () if full else ("-m", "not slow and not aic")
        found.append(Check("pytest", ("pytest", "-q", "-rs", "-n", "2", *selection), quiet=False))
    return found


def run(check: Check) -> tuple[bool, float]:
    """Run one check from the repository root; returns whether it passed, and its seconds."""
    print(f"{check.name} ...", flush=True)
    start = time.perf_counter()
    done = subprocess.run(
        [str(SCRIPTS / check.command[0]), *check.command[1:]],
        cwd=ROOT,
        check=False,
        text=True,
        stdout=subprocess.PIPE if check.quiet else None,
        stderr=subprocess.STDOUT if check.quiet else None,
    )
    if check.quiet and done.returncode != 0:
        print(done.stdout)
    return done.returncode == 0, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also run slow and extra-needing tests")
    parser.add_argument("--no-tests", action="store_true", help="only the static checks")
    options = parser.parse_args()
    results = [
        (check, *run(check)) for check in checks(full=options.full, tests=not options.no_tests)
    ]
    print()
    for check, passed, seconds in results:
        print(f"  {'ok    ' if passed else 'FAILED'}  {check.name:12} {seconds:6.1f} s")
    failed = [check.name for check, passed, _ in results if not passed]
    print(f"\n{'all checks passed' if not failed else 'FAILED: ' + ', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
