"""Settings shared by every test."""

from __future__ import annotations

import gc
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from atoll.runtime.endpoints.compile_cache import FOLDER_VARIABLE
from tests.seeds import EXAMPLES, FULL_EXAMPLES

pytest_plugins = ["tests.served_fleet"]

# Fixed examples by default, so a red run is red again; `make test-full` tries more of them, and
# HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=EXAMPLES)
settings.register_profile("full", settings.get_profile("fixed"), max_examples=FULL_EXAMPLES)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_configure(config: pytest.Config) -> None:
    """Have stand-ins for engines leave nothing among what the user's own engines have compiled."""
    # Processes of pytest-xdist have it from the one that starts them.
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="atoll-compiled-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ[FOLDER_VARIABLE] = folder.name


_PLANNING = tuple(f"tests/{name}/" for name in ("cli", "prove", "research", "solve"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Have planners stop after so much CPU time instead of wall time.

    What a search finds in a second must not depend on who else is at work on the machine. A fixture for
    every test would do as well, for a tenth of the time that a short test takes.
    """
    if not item.nodeid.startswith(_PLANNING):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", time.process_time)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected, nor ever again in what that loaded.

    Modules and tests stay to the end, and going over them takes a quarter of the time of loading them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        # Seldom: tests make few cycles, and all that lives is gone over each time.
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


# What a test costs, kept with its outcome: tools/check.py adds it up.
_CPU_S = "cpu_s"
_BEFORE_CPU_S = "before_cpu_s"
# Memory of the processes that run tests: told where one grows large, with the files by which it grew.
_LARGE_MIB = 4096
_RSS = "rss_mib"
_STATM = Path("/proc/self/statm")

_COUNTED_CPU_S = pytest.StashKey[float]()


def _used_cpu_s() -> float:
    """CPU seconds of this process and of those it started that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note CPU seconds since the test before, and the resident memory of this process in MiB.

    What was used before the first test, for imports and for collecting, is noted with that test.
    """
    report = yield
    counted = item.config.stash
    if _COUNTED_CPU_S not in counted:
        counted[_COUNTED_CPU_S] = _used_cpu_s() - call.duration
        # Of the item, since what is written is taken from the report of its end.
        item.user_properties.append((_BEFORE_CPU_S, counted[_COUNTED_CPU_S]))
    if call.when == "teardown":
        used = _used_cpu_s()
        report.user_properties.append((_CPU_S, used - counted[_COUNTED_CPU_S]))
        counted[_COUNTED_CPU_S] = used
        if _STATM.exists():
            pages = int(_STATM.read_text().split()[1])
            report.user_properties.append((_RSS, pages * os.sysconf("SC_PAGE_SIZE") // 2**20))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which files a process grew by, where one came to hold much."""
    last, grown, most = dict[str, int](), Counter[str](), 0
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, mib in getattr(report, "user_properties", ()):
                if name == _RSS:
                    worker = getattr(report, "worker_id", "")
                    grown[report.nodeid.partition("::")[0]] += mib - last.get(worker, mib)
                    last[worker], most = mib, max(most, mib)
    if most > _LARGE_MIB:
        files = ", ".join(f"{file} {mib / 1024:+.1f}" for file, mib in grown.most_common(6))
        terminalreporter.write_line(f"a process of tests grew to {most / 1024:.1f} GiB: {files}")
