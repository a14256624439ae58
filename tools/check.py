"""Run every check, show what failed, end with a summary; the exit code says if all passed.

The static checks run side by side, two at a time, and say nothing unless they fail; then come the tests. The
summary says what was skipped, and why.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

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
    """How a check went: what it said (unless it said so itself) and its wall seconds.

    Of tests also how many there were, and how many were skipped for which reason.
    """

    check: Check
    passed: bool
    said: str
    seconds: float
    tests: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


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
_REAL_TESTS = Check("real engines", ("pytest", "-q", "-rs", REAL))


def list_tests(*, full: bool) -> tuple[Check, ...]:
    """Return the tests: all of them, or those that are fast and need nothing that may be missing."""
    selection = ("--ignore", REAL) if full else ("-m", "not slow and not aic")
    most = Check("pytest", ("pytest", "-q", "-rs", "-n", "2", *selection))
    return (most, _REAL_TESTS) if full else (most,)


def run(check: Check, *, aloud: bool = False, more: tuple[str, ...] = ()) -> Outcome:
    """Run one check from the repository root; `aloud` shows what it says as it says it."""
    start = time.perf_counter()
    done = subprocess.run(
        [str(SCRIPTS / check.command[0]), *check.command[1:], *more],
        cwd=ROOT,
        check=False,
        text=True,
        stdout=None if aloud else subprocess.PIPE,
        stderr=None if aloud else subprocess.STDOUT,
    )
    seconds = time.perf_counter() - start
    return Outcome(check, done.returncode == 0, done.stdout or "", seconds)


def run_tests(check: Check) -> Outcome:
    """Run tests, and count them and what they skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        outcome = run(check, aloud=True, more=("--junit-xml", str(report)))
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    skips = (each.get("message", "") for case in cases for each in case.iter("skipped"))
    return replace(outcome, tests=len(cases), skipped=Counter(" ".join(s.split()) for s in skips))


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
    parser.add_argument("--real", action="store_true", help="only the tests of real engines")
    options = parser.parse_args()
    outcomes = [] if options.real else run_static()
    checks = (_REAL_TESTS,) if options.real else list_tests(full=options.full)
    for check in () if options.no_tests else checks:
        print(f"{check.name} ...", flush=True)
        outcomes.append(run_tests(check))
    print()
    if _REAL_TESTS in [outcome.check for outcome in outcomes]:
        run(Check("engines", ("python", "tools/real_engines.py", "--no-build")), aloud=True)
        print()
    # What the tests could not run, and why, is the last thing to be read but the verdict.
    for outcome in outcomes:
        for reason, number in outcome.skipped.most_common():
            print(f"  skipped  {number:4} of {outcome.check.name}: {reason}")
    for outcome in outcomes:
        word = "ok    " if outcome.passed else "FAILED"
        ran = f"  {outcome.tests} tests, {outcome.skipped.total()} skipped" if outcome.tests else ""
        print(f"  {word}  {outcome.check.name:12} {outcome.seconds:6.1f} s{ran}")
    failed = [outcome.check.name for outcome in outcomes if not outcome.passed]
    print(f"\n{'all checks passed' if not failed else 'FAILED: ' + ', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
