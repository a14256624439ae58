"""The picture of what requests keep through a loss, `docs/img/loss.svg`: a plan that survives it beside one
that need not.

A machine is lost after two minutes of simulated time, for good.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.plan.files.fleet_file import build_problem
from atoll.plan.losses import losses
from atoll.plan.problem import Problem
from atoll.plan.survival import Survival
from atoll.prove.planning import plan as make_plan
from atoll.sim.api import simulate
from atoll.sim.problem_demand import demand_of
from atoll.sim.sim_options import Failure, SimOptions
from atoll.solve.plan_request import PlanRequest
from atoll.workload.requests import collect
from benchmarks.report import ROOT

PICTURE = ROOT / "docs/img/loss.svg"
_LOST_S, _END_S, _BIN_S = 120.0, 300.0, 10.0
_SEED = 9_001


def _fleet(survive: int) -> Problem:
    offer = {"region": "eu", "node_type": "L40S:1", "available": 8, "usd_per_hour": 1.9}
    chat = {"model": "llama-3.1-8b", "ttft": "2s", "tpot": "80ms", "rate": "25/s"}
    return build_problem(
        {
            "name": "loss",
            "services": {"chat": chat | {"lengths": "500x100", "phases": "together"}},
            "pool": {"offers": [offer]},
            "settings": {"max_nodes_per_instance": 1},
            "limits": {"survive": survive},
        }
    )


def _kept_through(survive: int) -> tuple[float, NDArray[np.float64]]:
    """The price of a plan in USD per hour, and which share of the requests of each bin kept its promises."""
    problem = _fleet(survive)
    catalog = problem.catalog()
    plan = make_plan(problem, PlanRequest(catalog=catalog, error_bars=False))
    loss = next(losses(plan.instances, Survival(machines=1)))
    failures = tuple(Failure(_LOST_S, instance=i, node=node) for i, node in loss.nodes)
    arrivals = collect(demand_of(problem, _END_S), _SEED)
    options = SimOptions(seed=_SEED, failures=failures)
    columns = simulate(plan, problem, catalog, arrivals, options).requests
    at = (columns.arrival_s // _BIN_S).astype(np.int64)
    kept = np.bincount(at, columns.met_ttft & columns.met_tpot)
    return plan.usd_per_hour, kept / np.maximum(1, np.bincount(at))


def draw() -> None:
    """Simulate both plans and draw them."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "loss"
    figure, axes = plt.subplots(figsize=(6, 3))
    for survive, name in ((0, "without"), (1, "survive: 1")):
        usd, kept = _kept_through(survive)
        seconds = (np.arange(len(kept)) + 0.5) * _BIN_S
        axes.plot(seconds, 100.0 * kept, label=f"{name}, ${usd:.2f}/h")
    axes.axvline(_LOST_S, color="0.5", linestyle=":", label="a machine is lost")
    axes.set(xlabel="seconds", ylabel="requests that keep their promises, %", ylim=(0, 104))
    axes.legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
