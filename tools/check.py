"""Run every check, show what failed, end with a summary; the exit code says if all passed.

The static checks and the parts of the tests run side by side, two at a time, and say nothing unless they
fail. The summary says what was skipped, and why.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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

    @property
    def line(self) -> str:
        """The outcome in one line."""
        word = "ok    " if self.passed else "FAILED"
        ran = f"  {self.tests} tests, {self.skipped.total()} skipped" if self.tests else ""
        return f"  {word}  {self.check.name:16} {self.seconds:6.1f} s{ran}"


# The longest first: the others fit beside it.
STATIC = (
    Check("mypy", ("mypy", *SOURCES)),
    Check("imports", ("lint-imports", "--no-logo")),
    Check("structure", ("python", "tools/structure.py")),
    Check("ruff check", ("ruff", "check", *SOURCES)),
    Check("ruff format", ("ruff", "format", "--check", *SOURCES)),
)


# Engines of others in one process of tests: each takes minutes to start and all the cores there are.
REAL = "tests/real"
_REAL_TESTS = Check("real engines", ("pytest", "-q", "-rs", REAL))

# Folders of tests, each row a process, those that take longest first; all other folders are the third part.
# Workers that share all tests would each import and collect all of them, and each start what modules share;
# each row costs four CPU-seconds of imports.
_PARTS = (
    ("solve", "prove"),
    # Both ask one fleet.
    ("runtime", "compat"),
    ("cli", "deploy", "control"),
    ("components", "e2e", "engine", "engines"),
    ("benchmarks", "dashboard", "examples"),
)


# Rewriting the asserts takes ten times as long as compiling the tests, and only failures read what that says:
# they show their locals instead. Run by hand, pytest rewrites as always.
_PYTEST = ("pytest", "-q", "-rs", "--assert=plain", "--showlocals")


def list_tests(*, full: bool) -> tuple[Check, ...]:
    """Return the tests in parts: all but `REAL`, or those that are fast and need nothing that may lack."""
    selection = ("--hypothesis-profile", "full") if full else ("-m", "not slow and not aic")
    named = {name for part in _PARTS for name in part}
    others = sorted(
        path.name
        for path in (ROOT / "tests").iterdir()
        if (path.name.startswith("test_") or (path.is_dir() and path.name[0] not in "._"))
        and path.name not in named
        and not (full and path == ROOT / REAL)
    )
    parts: list[tuple[str, tuple[str, ...]]] = [(f"tests {part[0]}", part) for part in _PARTS]
    parts.insert(2, ("tests", tuple(others)))
    return tuple(
        Check(name, (*_PYTEST, *selection, *(f"tests/{each}" for each in part)))
        for name, part in parts
    )


def run(check: Check, *, aloud: bool = False, more: tuple[str, ...] = ()) -> Outcome:
    """Run one check from the repository root; `aloud` shows what it says as it says it."""
    start = time.perf_counter()
    # A file, not a pipe: nobody waits for a process that a test left behind.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        done = subprocess.run(
            [str(SCRIPTS / check.command[0]), *check.command[1:], *more],
            cwd=ROOT,
            check=False,
            stdout=None if aloud else said,
            stderr=None if aloud else subprocess.STDOUT,
        )
        seconds = time.perf_counter() - start
        said.seek(0)
        return Outcome(check, done.returncode == 0, said.read(), seconds)


def run_tests(check: Check, *, aloud: bool = False) -> Outcome:
    """Run tests, and count them and what they skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        outcome = run(check, aloud=aloud, more=("--junit-xml", str(report)))
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    skips = (each.get("message", "") for case in cases for each in case.iter("skipped"))
    return replace(outcome, tests=len(cases), skipped=Counter(" ".join(s.split()) for s in skips))


def run_all(checks: Sequence[Check]) -> list[Outcome]:
    """Run checks two at a time; that one ended, and what it said if it failed, is shown at once."""
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(run_tests if check.command[0] == "pytest" else run, check)
            for check in checks
        ]
        for ended in as_completed(running):
            outcome = ended.result()
            print(outcome.line, flush=True)
            if not outcome.passed:
                print(f"\n{outcome.said}", flush=True)
    return [each.result() for each in running]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also run slow and extra-needing tests")
    parser.add_argument("--no-tests", action="store_true", help="only the static checks")
    parser.add_argument("--real", action="store_true", help="only the tests of real engines")
    options = parser.parse_args()
    outcomes = []
    if not options.real:
        tests = () if options.no_tests else list_tests(full=options.full)
        outcomes = run_all([*STATIC, *tests])
    if options.real or (options.full and not options.no_tests):
        print(f"{_REAL_TESTS.name} ...", flush=True)
        outcomes.append(run_tests(_REAL_TESTS, aloud=True))
    print()
    if _REAL_TESTS in [outcome.check for outcome in outcomes]:
        run(Check("engines", ("python", "tools/real_engines.py", "--no-build")), aloud=True)
        print()
    # What the tests could not run, and why, is the last thing to be read but the verdict.
    for outcome in outcomes:
        for reason, number in outcome.skipped.most_common():
            print(f"  skipped  {number:4} of {outcome.check.name}: {reason}")
    for outcome in outcomes:
        print(outcome.line)
    failed = [outcome.check.name for outcome in outcomes if not outcome.passed]
    print(f"\n{'all checks passed' if not failed else 'FAILED: ' + ', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
