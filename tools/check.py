"""Run every check, show what failed, end with a summary; the exit code says if all passed.

The static checks and the parts of the tests run side by side, two at a time, and say nothing unless they
fail. The summary says what was skipped and why, and where the CPU time went; the times of all tests stay in
`.cache/tests`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.changed import list_changed, read_imports, select_tests  # noqa: E402

SCRIPTS = Path(sysconfig.get_path("scripts"))
FOLDERS = ("src", "tests", "tools", "benchmarks", "research", "examples")
SOURCES = [name for name in FOLDERS if (ROOT / name).is_dir()]
KEPT = ROOT / ".cache" / "tests"
MYPY_CACHE = ROOT / ".mypy_cache"
SLOWEST = 20
NO_TESTS = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One command, whose program is a script of the environment."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check went: what it said (unless it said so itself), wall seconds and CPU seconds.

    Of tests also how many there were, how many were skipped for which reason, CPU seconds of each, and what
    the process used before the first: imports and collecting.
    """

    check: Check
    code: int
    said: str
    seconds: float
    cpu_s: float
    tests: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    cpu_s_by_test: dict[str, float] = field(default_factory=dict)
    before_cpu_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing failed; a part whose tests are all left out has none to run."""
        return self.code == 0 or (self.check.command[0] == "pytest" and self.code == NO_TESTS)

    @property
    def line(self) -> str:
        """The outcome in one line."""
        word = "ok    " if self.passed else "FAILED"
        ran = f"  {self.tests} tests, {self.skipped.total()} skipped" if self.tests else ""
        times = f"{self.seconds:6.1f} s {self.cpu_s:6.1f} CPU-s"
        return f"  {word}  {self.check.name:16} {times}{ran}"


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
    ("benchmarks", "dashboard", "examples", "slow"),
)


# Rewriting the asserts takes ten times as long as compiling the tests, and only failures read what that says:
# they show their locals instead. Run by hand, pytest rewrites as always.
_PYTEST = ("pytest", "-q", "-rs", "--assert=plain", "--showlocals")
_FAST = ("-m", "not slow and not aic")


def list_tests(*, full: bool) -> tuple[Check, ...]:
    """Return the tests in parts: all but `REAL`, or those that are fast and need nothing that may lack."""
    selection = ("--hypothesis-profile", "full") if full else _FAST
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


def list_changed_tests(revision: str) -> tuple[Check, ...]:
    """Return the fast tests that can see what changed since a revision, nearest first, in two parts."""
    names = read_imports()
    files = [file for file in select_tests(list_changed(revision), names) if (ROOT / file).exists()]
    every = sum(Path(file).name.startswith("test_") for file in names)
    print(
        f"{len(files)} of {every} files of tests can see what changed since {revision}", flush=True
    )
    parts = (files[::2], files[1::2])
    return tuple(
        Check(f"tests {number}", (*_PYTEST, *_FAST, *part))
        for number, part in enumerate(parts, 1)
        if part
    )


def run(check: Check, *, aloud: bool = False, more: tuple[str, ...] = ()) -> Outcome:
    """Run one check from the repository root; `aloud` shows what it says as it says it."""
    start = time.perf_counter()
    # A file, not a pipe: nobody waits for a process that a test left behind.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            [str(SCRIPTS / check.command[0]), *check.command[1:], *more],
            cwd=ROOT,
            stdout=None if aloud else said,
            stderr=None if aloud else subprocess.STDOUT,
        )
        # What it used together with all the processes that it waited for.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        said.seek(0)
        cpu_s = used.ru_utime + used.ru_stime
        return Outcome(check, process.returncode, said.read(), seconds, cpu_s)


def run_tests(check: Check, *, aloud: bool = False) -> Outcome:
    """Run tests, count them and what they skipped, and keep how long each took."""
    KEPT.mkdir(parents=True, exist_ok=True)
    report = KEPT / f"{check.name.replace(' ', '-')}.xml"
    report.unlink(missing_ok=True)
    outcome = run(check, aloud=aloud, more=("--junit-xml", str(report)))
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    skips = (each.get("message", "") for case in cases for each in case.iter("skipped"))
    cpu_s: defaultdict[str, float] = defaultdict(float)
    before_cpu_s = 0.0
    for case in cases:
        place = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        for each in case.iter("property"):
            if each.get("name") == "cpu_s":
                cpu_s[place] += float(each.get("value", 0))
            elif each.get("name") == "before_cpu_s":
                before_cpu_s += float(each.get("value", 0))
    return replace(
        outcome,
        tests=len(cases),
        skipped=Counter(" ".join(each.split()) for each in skips),
        cpu_s_by_test=cpu_s,
        before_cpu_s=before_cpu_s,
    )


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


def list_costs(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """Yield where the CPU time of tests went: by folder, before the first test, the slowest tests."""
    tests = {test: cpu_s for each in outcomes for test, cpu_s in each.cpu_s_by_test.items()}
    if not tests:
        return
    folders: defaultdict[str, float] = defaultdict(float)
    numbers = Counter[str]()
    for test, cpu_s in tests.items():
        folder = "/".join(Path(test.partition("::")[0]).parts[:2])
        folders[folder] += cpu_s
        numbers[folder] += 1
    yield f"  {'CPU-s':>8}  {'tests':>6}  folder"
    for folder, cpu_s in sorted(folders.items(), key=itemgetter(1), reverse=True):
        yield f"  {cpu_s:8.1f}  {numbers[folder]:6}  {folder}"
    before = [outcome for outcome in outcomes if outcome.before_cpu_s]
    total = sum(outcome.before_cpu_s for outcome in before)
    yield f"  {total:8.1f}          imports and collecting, in {len(before)} processes"
    yield f"\n  {'CPU-s':>8}  the slowest {SLOWEST} of {len(tests)} tests"
    for test, cpu_s in sorted(tests.items(), key=itemgetter(1), reverse=True)[:SLOWEST]:
        yield f"  {cpu_s:8.2f}  {test[:110]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also run slow and extra-needing tests")
    parser.add_argument("--no-tests", action="store_true", help="only the static checks")
    parser.add_argument("--real", action="store_true", help="only the tests of real engines")
    parser.add_argument("--since", metavar="REVISION", help="only the tests that see what changed")
    options = parser.parse_args()
    start = time.perf_counter()
    cold = not MYPY_CACHE.exists()
    outcomes = []
    if options.since:
        outcomes = run_all([*STATIC, *list_changed_tests(options.since)])
    elif not options.real:
        tests = () if options.no_tests else list_tests(full=options.full)
        outcomes = run_all([*STATIC, *tests])
    if options.real or (options.full and not options.no_tests):
        print(f"{_REAL_TESTS.name} ...", flush=True)
        outcomes.append(run_tests(_REAL_TESTS, aloud=True))
    print()
    if _REAL_TESTS in [outcome.check for outcome in outcomes]:
        run(Check("engines", ("python", "tools/real_engines.py", "--no-build")), aloud=True)
        print()
    for line in list_costs(outcomes):
        print(line)
    print()
    # What the tests could not run, and why, is the last thing to be read but the verdict.
    for outcome in outcomes:
        for reason, number in outcome.skipped.most_common():
            print(f"  skipped  {number:4} of {outcome.check.name}: {reason}")
    for outcome in outcomes:
        print(outcome.line)
    failed = [outcome.check.name for outcome in outcomes if not outcome.passed]
    if not (options.no_tests or options.since or any(outcome.tests for outcome in outcomes)):
        failed.append("no test ran")
    minutes, cpu_minutes = (time.perf_counter() - start) / 60, sum(o.cpu_s for o in outcomes) / 60
    mypy = (
        f", of which mypy without a cache {outcomes[0].cpu_s / 60:.1f}" if cold and outcomes else ""
    )
    print(f"\n{minutes:.1f} min, {cpu_minutes:.1f} CPU-min{mypy}")
    print("all checks passed" if not failed else f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
