"""Run every check, show what failed, end with a summary; the exit code says if all passed.

The static checks run side by side, two at a time, and say nothing unless they fail; then come the tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sysconfig.get_path("scripts"))
FOLDERS = ("src", "tests", "tools", "benchmarks", "research", "examples")
SOURCES = [name for name in FOLDERS if (ROOT / name).is_dir()]


@dataclass(frozen=True, slots=True)
class Check:
    """One command, whose program is a script of the environment."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check went: what it said (unless it said so itself) and its wall seconds."""

    check: Check
    passed: bool
    said: str
    seconds: float


# The longest first: the others fit beside it.
STATIC = (
    Check("mypy", ("mypy", *SOURCES)),
    Check("imports", ("lint-imports", "--no-logo")),
    Check("unused code", ("vulture", "--min-confidence", "80", *SOURCES)),
    Check("structure", ("python", "tools/structure.py")),
    Check("ruff check", ("ruff", "check", *SOURCES)),
    Check("ruff format", ("ruff", "format", "--check", *SOURCES)),
)


# Engines of others in one process of tests: each takes minutes to start and all the cores there are.
REAL = "tests/real"


def tests(*, full: bool) -> tuple[Check, ...]:
    """Return the tests: all of them, or those that are fast and need nothing that may be missing."""
    selection = ("--ignore", REAL) if full else ("-m", "not slow and not aic")
    most = Check("pytest", ("pytest", "-q", "-rs", "-n", "2", *selection))
    if not full:
        return (most,)
    return most, Check("real engines", ("pytest", "-q", "-rs", REAL))


def run(check: Check, *, aloud: bool = False) -> Outcome:
    """Run one check from the repository root; `aloud` shows what it says as it says it."""
    start = time.perf_counter()
    done = subprocess.run(
        [str(SCRIPTS / check.command[0]), *check.command[1:]],
        cwd=ROOT,
        check=False,
        text=True,
        stdout=None if aloud else subprocess.PIPE,
        stderr=None if aloud else subprocess.STDOUT,
    )
    seconds = time.perf_counter() - start
    return Outcome(check, done.returncode == 0, done.stdout or "", seconds)


def run_static() -> list[Outcome]:
    """Run the static checks two at a time; what a failed one said is shown as soon as it ends."""
    outcomes = []
    print(", ".join(check.name for check in STATIC), "...", flush=True)
    with ThreadPoolExecutor(2) as pool:
        for outcome in pool.map(run, STATIC):
            if not outcome.passed:
                print(f"\n{outcome.check.name}:\n{outcome.said}", flush=True)
            outcomes.append(outcome)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also run slow and extra-needing tests")
    parser.add_argument("--no-tests", action="store_true", help="only the static checks")
    options = parser.parse_args()
    outcomes = run_static()
    if not options.no_tests:
        for check in tests(full=options.full):
            print(f"{check.name} ...", flush=True)
            outcomes.append(run(check, aloud=True))
    print()
    if options.full and not options.no_tests:
        # What the tests could not run, and why, is the last thing to be read but the verdict.
        run(Check("engines", ("python", "tools/real_engines.py", "--no-build")), aloud=True)
        print()
    for outcome in outcomes:
        word = "ok    " if outcome.passed else "FAILED"
        print(f"  {word}  {outcome.check.name:12} {outcome.seconds:6.1f} s")
    failed = [outcome.check.name for outcome in outcomes if not outcome.passed]
    print(f"\n{'all checks passed' if not failed else 'FAILED: ' + ', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
