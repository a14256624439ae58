"""Every check runs at its smallest, finds nothing, and ends with the line of JSON that others read."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from benchmarks.report import ROOT

_FLEET = ("torch", "transformers", "zmq", "tokenizers", "httptools")
"""Packages of a fleet of real nodes."""
_FABRIC = ("zenoh", "cryptography", "httptools", "uvloop")
_BOOKS = ("sqlalchemy", "alembic", "aiosqlite")
_PARTS = ("hibari", "onnxruntime", "PIL", "httptools")


@dataclass(frozen=True)
class Check:
    """A check: its options, the keys that it must tell, what it needs, and how long it may take.

    The first key counts what was tried: of that there must be `least`.
    """

    name: str
    options: str
    keys: str
    least: int = 1
    needs: tuple[str, ...] = ()
    max_s: float = 900.0


CHECKS = (
    Check(
        "attacks",
        "--quick",
        "cases server_down wrong_status rss_growth_factor other_clients_delay_ms_max",
        80,
        (*_FLEET, *_BOOKS),
    ),
    Check(
        "chaos",
        "--kills 15",
        "kills errors truncated token_mismatch hung orphans ledger_diff gap_ms_p99 no_replica",
        15,
        (*_FLEET, *_FABRIC, *_BOOKS),
    ),
    Check(
        "chaos_fleet",
        "--quick",
        "kills errors truncated token_mismatch hung orphans ledger_diff",
        20,
        _FLEET,
    ),
    Check(
        "long_work", "--quick", "faults errors truncated done_twice ghosts_after_10s", 20, _FLEET
    ),
    Check(
        "starved",
        "--quick",
        "answers false_deaths errors cut",
        1,
        (*_FLEET, *_FABRIC, *_BOOKS),
    ),
    Check(
        "churn",
        "--small",
        "kills requests errors truncated reordered ledger_diff gap_ms_p99",
        6,
        (*_FABRIC, *_BOOKS),
    ),
    Check(
        "rollout",
        "--small",
        "changes errors truncated token_mismatch orphans below_demand_s",
        5,
        (*_FLEET, *_FABRIC),
        1800.0,
    ),
    Check("crash_points", "--quick", "points diverged duplicates orphans", 30),
    Check(
        "target_faults",
        "--quick",
        "faults gone_wrongly started_twice orphans secrets_lost below_demand_s",
        40,
        max_s=1800.0,
    ),
    Check(
        "planner_truth",
        "--seeds 0:8",
        "cases worse_than_optimum false_infeasible bound_invalid budget_broken plans_rejected",
        7,
    ),
    Check(
        "promise_truth",
        "--cases 2",
        "cases cheaper_keeps bound_false class_below_target spot_false fast_silent mutants_missed"
        " deadline_overrun_s_max",
        2,
    ),
    Check(
        "survive",
        "--cases 5",
        "cases does_not_survive dearer bound_false refused_wrongly sharer_below spot_below"
        " link_false shortage_below price_of_surviving_median cpu_s_median",
        5,
        max_s=1800.0,
    ),
    Check("determinism", "--quick --fleet scarce slices-running", "runs different", 9, max_s=3600.0),
    Check("tasks_chaos", "--small", "kills errors wrong_answers leaked_handles orphans", 10, _PARTS),
    Check(
        "any_fleet_live", "--small", "kills errors wrong_answers leaked", 3, (*_PARTS, "zenoh"), 1800.0
    ),
    Check("client_suites", "--quick", "checks failed clients", 20, _FLEET),
    Check(
        "router_policies",
        "--quick",
        "cases worse_than_least_outstanding worst_ratio best_ratio",
        20,
    ),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check(check: Check) -> None:
    lacking = [name for name in check.needs if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)}")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{check.name}", *check.options.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=check.max_s,
    )
    # What must be 0 and is not, is its exit code.
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    table, last = done.stdout.splitlines()[:-1], done.stdout.splitlines()[-1]
    assert table, "no table for people above the JSON"
    figures = json.loads(last, parse_constant=pytest.fail)
    keys = check.keys.split()
    assert set(keys) <= set(figures)
    assert figures[keys[0]] >= check.least
