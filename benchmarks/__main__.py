"""Run benchmarks one after another, and say what came of each.

    python -m benchmarks                       all of them, in full
    python -m benchmarks --quick fabric chaos  these, small; checks of tests/slow answer by their names, too
    python -m benchmarks --keep sim_speed      and keep the figures for docs/benchmarks.md and README.md
    python -m benchmarks --keep operate -- --days 3

Each runs in a process of its own; after one that failed the next follows. At the end stands what failed,
which figures missed their bars, and what was left out and why. The exit code is 1 if one failed.

`--within MINUTES` takes as many as fit, the shortest first, by the seconds of the last recorded runs.
`--keep` writes `results/figures.json` and the table of README.md. What `--quick` measured is kept beside the
figures of a full run, and docs/benchmarks.md shows both (`tools/docs_output.py --write docs/benchmarks.md`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from atoll import __version__
from benchmarks.names import BENCHMARKS, BY_NAME
from benchmarks.report import LEFT_OUT, MISSED, RESULTS, ROOT

FIGURES = RESULTS / "figures.json"
README = ROOT / "benchmarks" / "README.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"
LIMIT_S, QUICK_LIMIT_S = 3 * 3600.0, 1200.0
"""Seconds after which a benchmark is ended: it hangs."""
_STOP_S = 20.0


@dataclass(slots=True)
class Outcome:
    """What came of a benchmark; `failed` says why there are no figures."""

    name: str
    wall_s: float
    cpu_s: float
    failed: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.failed:
            return f"failed: {self.failed}"
        missed = f"missed {', '.join(self.missed)}" if self.missed else "no bar missed"
        return f"{missed}; left out: {'; '.join(self.left_out)}" if self.left_out else missed


def run(name: str, options: Sequence[str], limit_s: float) -> Outcome:
    """Run a benchmark, and pass on what it prints."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        signal.signal(signal.SIGALRM, lambda *_: _end(process))
        signal.alarm(int(limit_s))
        try:
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                last = line
            code = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            signal.alarm(0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = Outcome(name, time.monotonic() - began_s, cpu_s)
    try:
        found.figures = dict(json.loads(last))
    except ValueError:
        found.failed = "its last line is not JSON"
    if code != 0:
        late = found.wall_s >= limit_s
        found.failed = f"ended after {limit_s:.0f} s" if late else f"exit code {code}"
    found.missed, found.left_out = (found.figures.pop(key, []) for key in (MISSED, LEFT_OUT))
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """End a benchmark and the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def read_figures() -> dict[str, dict[str, Any]]:
    """Return what was kept of each benchmark."""
    kept: dict[str, dict[str, Any]] = json.loads(FIGURES.read_text("utf-8"))
    return kept


def keep(found: Outcome, options: Sequence[str]) -> None:
    """Keep the figures of a run: as the benchmark's own, or `quick` beside those of a full run."""
    kept = read_figures()
    entry = {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "version": __version__,
        "commit": _commit(),
        "source": " ".join([f"benchmarks.{found.name}", *options]),
        "seconds": round(found.wall_s),
        "cpu_seconds": round(found.cpu_s),
        "figures": found.figures,
    }
    old = kept.get(found.name)
    if "--quick" not in options:
        kept[found.name] = entry | ({"quick": old["quick"]} if old and "quick" in old else {})
    elif old is None or "--quick" in old["source"].split():
        kept[found.name] = entry
    else:
        kept[found.name] = old | {"quick": entry}
    FIGURES.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", "utf-8")


def _commit() -> str:
    """Return the commit that was measured, with a + where code differs from it; "" where there is none."""

    def ask(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = ask("status", "--porcelain", "--", "*.py", "src", ":!tests", ":!tools")
    return ask("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


def seconds_of(name: str, kept: dict[str, dict[str, Any]], *, quick: bool) -> float | None:
    """Return how long a benchmark took when it was recorded last; None: nobody knows."""
    entry = kept.get(name, {})
    small = entry if "--quick" in entry.get("source", "").split() else entry.get("quick", {})
    found = (small if quick else entry if small is not entry else {}).get("seconds")
    return None if found is None else float(found)


def choose(minutes: float) -> list[str]:
    """Return the names that fit into so many minutes with `--quick`, the shortest first; print the others."""
    kept, left_s = read_figures(), 60.0 * minutes
    taken = {one.name: seconds_of(one.name, kept, quick=True) for one in BENCHMARKS}
    known = {one.name: float(one.quick_s) for one in BENCHMARKS}
    known |= {name: seconds for name, seconds in taken.items() if seconds is not None}
    chosen = set()
    for name, seconds in sorted(known.items(), key=lambda item: item[1]):
        if seconds <= left_s:
            chosen.add(name)
            left_s -= seconds
    others = [f"{name} ({known[name]:.0f} s)" for name in known if name not in chosen]
    print(f"{len(chosen)} benchmarks fit into {minutes:g} minutes; not run: {', '.join(others)}")
    return [one.name for one in BENCHMARKS if one.name in chosen]


def write_table() -> str:
    """Return README.md with the table of all benchmarks, and when each was recorded."""
    kept = read_figures()
    lines = [
        "| Folder | NAME | Shows | Keys | Quick, full, s | Recorded | Needs |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in BENCHMARKS:
        quick, full = (seconds_of(one.name, kept, quick=small) for small in (True, False))
        seconds = f"{quick or one.quick_s:.0f}, {'-' if full is None else f'{full:.0f}'}"
        entry = kept.get(one.name, {})
        runs = [run for run in (entry, entry.get("quick", {})) if "seconds" in run]
        day = max((str(run["measured"]) for run in runs), default="-")
        keys = ", ".join(f"`{key}`" for key in one.keys.split())
        lines.append(
            f"| {one.folder} | {one.name} | {one.shows} | {keys} | {seconds} | {day} | {one.needs} |"
        )
    head, _, rest = README.read_text("utf-8").partition(BEGIN)
    return head + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def main() -> int:
    """Run what is asked for; print a table, and what was not as it should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all of README.md")
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases, under three minutes each"
    )
    parser.add_argument("--within", type=float, metavar="MINUTES", help="what fits, with --quick")
    parser.add_argument("--keep", action="store_true", help="keep the figures")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    asked, more = parser.parse_args(words[:at]), words[at + 1 :]
    unknown = [n for n in asked.names if importlib.util.find_spec(f"benchmarks.{n}") is None]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)} (fix: {', '.join(BY_NAME)})")
    quick = asked.quick or asked.within is not None
    names = asked.names or (choose(asked.within) if asked.within else list(BY_NAME))
    options = [*(["--quick"] if quick else []), *more]
    outcomes = []
    for name in names:
        print(f"\n== {name} {' '.join(options)}".rstrip(), flush=True)
        found = run(name, options, QUICK_LIMIT_S if quick else LIMIT_S)
        print(
            f"-- {name}: {found.wall_s:.0f} s, {found.cpu_s:.0f} CPU-s, {found.verdict}", flush=True
        )
        outcomes.append(found)
        if asked.keep and not found.failed:
            keep(found, options)
    if asked.keep:
        README.write_text(write_table(), "utf-8")
    print(f"\n{'':20s}{'wall s':>8s}{'CPU s':>8s}  verdict")
    for one in outcomes:
        print(f"{one.name:20s}{one.wall_s:8.0f}{one.cpu_s:8.0f}  {one.verdict}")
    failed = [one.name for one in outcomes if one.failed]
    missed = [one.name for one in outcomes if one.missed]
    lacking = [one.name for one in outcomes if one.left_out]
    for what, some in (
        ("failed", failed),
        ("missed a bar", missed),
        ("left something out", lacking),
    ):
        print(f"{what}: {', '.join(some) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
