"""What clients of a planned fleet saw on a GPU, beside what the simulator says of the same arrivals.

The runs in `benchmarks/results/gpu_promise_*.csv` were served by `benchmarks.gpu_promise_serve` on an H200
with vLLM; `gpu_promise.json` says when, with which versions and commands. Here the plan is made again and its
simulation compared with them, so that a change of the model that makes it less true is seen on any machine.

Keys with `profiled` are of a second simulation of the same, with the overlay that `atoll profile --server`
wrote of the server just before it was loaded (`gpu_promise_profile_*.yaml`); the constants that ship were
chosen without these servers. `unprofiled` keys are of the same runs without the overlay.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.load import load_catalog
from atoll.core.ids import parse_node_type
from benchmarks.hardware.gpu_promise_cases import CASES, SERVICE, SHARES, SYSTEM_TOKENS, Case
from benchmarks.report import RESULTS, Figure, finish, options

if TYPE_CHECKING:
    from atoll.catalog.measured_servers import MeasuredServer
    from atoll.workload.requests import PrefixBlocks


HELD_SHARES = (0.5, 0.8)
"""Rates at which bars hold; at the planned rate itself a queue amplifies what is off."""
Floats = NDArray[np.float64]
_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Seen:
    """Milliseconds to the first token and per further one, of every request that was answered."""

    ttft_ms: Floats
    tpot_ms: Floats
    errors: int = 0

    def kept(self, case: Case) -> float:
        """Return the per cent of requests that kept both promises."""
        kept = (self.ttft_ms <= case.ttft_ms) & (self.tpot_ms <= case.tpot_ms)
        return 100.0 * float(kept.sum()) / (len(kept) + self.errors)


@dataclass(frozen=True, slots=True)
class Run:
    """A case at one share of its planned rate: as it was served, and as simulated.

    `server` counts the servers that the same was asked of.
    """

    case: Case
    share: float
    served: Seen
    simulated: Seen
    server: int = 0
    profiled: Seen | None = None

    def profiled_error(self, name: str) -> float:
        """Return by how many per cent the mean simulated with a profile is above the served one."""
        assert self.profiled is not None
        return replace(self, simulated=self.profiled).error(name, None)

    def error(self, name: str, percentile: float | None) -> float:
        """Return by how many per cent the simulated mean or percentile is above the served one."""

        def figure(seen: Seen) -> float:
            values = getattr(seen, name)
            return float(
                np.mean(values) if percentile is None else np.percentile(values, percentile)
            )

        return 100.0 * (figure(self.simulated) / figure(self.served) - 1.0)

    @property
    def kept_diff(self) -> float:
        """Points by which the simulated share of kept promises is above the served one."""
        return self.simulated.kept(self.case) - self.served.kept(self.case)


def read_runs(results: Path = RESULTS, *, profiled: bool = False) -> Iterator[Run]:
    """Simulate what was served, case by case; with `profiled` once more with profiles of the servers."""
    for case in CASES.values():
        paths = (results / f"{name}.csv" for name in case.files)
        for number, path in enumerate(path for path in paths if path.is_file()):
            served = _Served(case, path)
            overlay = results / f"gpu_promise_profile_{case.server}.yaml"
            server = None
            if profiled and not number and overlay.is_file():
                gpu = parse_node_type(case.node).gpu
                server = load_catalog((overlay,)).gpu(gpu).servers[-1]
            for share in SHARES:
                seen = served.seen(share)
                if seen is None:
                    continue
                again = served.simulate(share, server) if server else None
                yield Run(case, share, seen, served.simulate(share), number, again)


class _Served:
    """What was served of a case, and simulations of the same."""

    def __init__(self, case: Case, path: Path) -> None:
        from atoll import Fleet

        self.case = case
        with tempfile.TemporaryDirectory() as folder:
            fleet_file = Path(folder, "fleet.yaml")
            fleet_file.write_text(case.fleet)
            self._fleet = Fleet.load(fleet_file)
            self._plan = self._fleet.plan()
        with path.open() as stream:
            self._rows = list(csv.DictReader(stream))

    def _run(self, share: float) -> list[dict[str, str]]:
        return [row for row in self._rows if self.case.share(row) == share]

    def seen(self, share: float) -> Seen | None:
        """Return what clients saw at a share of the planned rate."""
        run = self._run(share)
        answered = [row for row in run if not row["error"]]
        if not run:
            return None
        return Seen(
            np.array([float(row["ttft_ms"]) for row in answered]),
            np.array([float(row["tpot_ms"]) for row in answered]),
            len(run) - len(answered),
        )

    def simulate(self, share: float, server: MeasuredServer | None = None) -> Seen:
        """Return what clients see in simulation, with a profile or without one."""
        from atoll.sim.api import simulate
        from atoll.workload.requests import Requests

        run, problem = self._run(share), self._fleet.problem
        if server is not None:
            problem = problem.replace(overlays=({"servers": [server.entry()]},))
        zeros = np.zeros(len(run), dtype=np.int16)
        requests = Requests(
            arrival_s=np.array([float(row["arrival_s"]) for row in run]),
            model=zeros,
            klass=zeros,
            input=np.array([int(row["input"]) for row in run], dtype=np.int32),
            output=np.array([int(row["output"]) for row in run], dtype=np.int32),
            models=(SERVICE,),
            prefix=_systems(self.case, len(run)) if self.case.systems else None,
        )
        columns = simulate(self._plan, problem, problem.catalog(), requests).requests
        return Seen(1e3 * columns.ttft_s, 1e3 * columns.tpot_s)


def _systems(case: Case, requests: int) -> PrefixBlocks:
    """Return the blocks of the system prompts that prompts begin with."""
    from atoll.workload.requests import PrefixBlocks

    each = SYSTEM_TOKENS // _BLOCK_TOKENS
    first = each * np.array([case.system(at) for at in range(requests)], dtype=np.int64)
    ids = (first[:, None] + np.arange(each)).ravel()
    return PrefixBlocks(each * np.arange(requests + 1), ids, _BLOCK_TOKENS)


def main() -> None:
    """Print the table and the figures."""
    options(__doc__ or "")
    runs = list(read_runs(profiled=True))
    print("served / simulated, ms")
    columns = {"share": 5, "kept %": 13, "TTFT mean": 15, "p95": 15, "TPOT mean": 13, "p95 ": 13}
    print("case      " + " ".join(name.rjust(width) for name, width in columns.items()))
    for run in runs:
        cells = []
        for name in ("ttft_ms", "tpot_ms"):
            for percentile in (None, 95.0):
                pair = [
                    np.mean(values) if percentile is None else np.percentile(values, percentile)
                    for values in (getattr(run.served, name), getattr(run.simulated, name))
                ]
                width = 15 if name == "ttft_ms" else 13
                digits = 1 if name == "ttft_ms" else 2
                cells.append(f"{pair[0]:.{digits}f} / {pair[1]:.{digits}f}".rjust(width))
        kept = f"{run.served.kept(run.case):.1f} / {run.simulated.kept(run.case):.1f}"
        if run.profiled is not None:
            off = (f"{run.profiled_error(name):+.1f}" for name in ("ttft_ms", "tpot_ms"))
            cells.append(f"  profiled {' / '.join(off)} %")
        print(f"{run.case.name:9s} {run.share:5g} {kept:>13s} " + " ".join(cells))
    held = [run for run in runs if run.share in HELD_SHARES]

    def worst(name: str, percentile: float | None) -> float:
        return max(abs(run.error(name, percentile)) for run in held)

    judged = [run for run in held if run.profiled is not None]

    def errors(name: str, *, profiled: bool) -> Floats:
        return np.abs(
            [run.profiled_error(name) if profiled else run.error(name, None) for run in judged]
        )

    with_profile = {name: errors(f"{name}_ms", profiled=True) for name in ("tpot", "ttft")}
    without = {name: errors(f"{name}_ms", profiled=False) for name in ("tpot", "ttft")}
    meta = json.loads((RESULTS / "gpu_promise.json").read_text())
    added = [case["gateway"]["added_ms"] for case in meta["cases"].values() if "gateway" in case]
    finish(
        [
            Figure("cases", len({run.case.name for run in runs}), 5, at_least=True),
            Figure("kept_diff_max", max(abs(run.kept_diff) for run in held), 2.0, "points"),
            Figure("tpot_err_mean", worst("tpot_ms", None), 6.0, "%"),
            Figure("tpot_err_p95", worst("tpot_ms", 95.0), 10.0, "%"),
            Figure("ttft_err_mean", worst("ttft_ms", None), 15.0, "%"),
            Figure("ttft_err_p95", worst("ttft_ms", 95.0), 20.0, "%"),
            Figure("profiled_tpot_err_mean", float(with_profile["tpot"].mean()), None, "%"),
            Figure("profiled_ttft_err_mean", float(with_profile["ttft"].mean()), None, "%"),
            Figure("profiled_tpot_err_max", float(with_profile["tpot"].max()), 5.0, "%"),
            Figure("profiled_ttft_err_max", float(with_profile["ttft"].max()), 10.0, "%"),
            Figure("unprofiled_tpot_err_mean", float(without["tpot"].mean()), None, "%"),
            Figure("unprofiled_ttft_err_mean", float(without["ttft"].mean()), None, "%"),
            Figure("errors", sum(run.served.errors for run in runs), 0.0),
            Figure("gateway_added_ms", max(added), 6.0, "at the first token, ms"),
        ],
        worst_run=max(held, key=lambda run: abs(run.kept_diff)).case.name,
    )


if __name__ == "__main__":
    main()
