"""A plain LLM is the same here as in the simulator of plans."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.perf.step import analytic
from atoll.sim.api import simulate
from atoll.sim.sim_options import Admission, SimOptions
from atoll.sim.sim_result import SimReport
from atoll.sim.tasks.simulate_tasks import simulate_tasks
from atoll.sim.tasks.task_demand import Demand
from atoll.sim.tasks.task_fleet import ClassSpec, PartNeed, TaskFleet, TokenPart
from atoll.sim.tasks.task_result import TaskResult
from atoll.workload.requests import Requests
from tests.sim.builders import CATALOG, poisson, problem, service, whole
from tests.sim.tasks.builders import executor, path


def run_both(
    node: str, rate: float, admission: Admission
) -> tuple[Requests, SimReport, TaskResult]:
    """Return requests, and what both simulators make of them."""
    # Of an engine that puts a step together when it begins, and takes no time beside steps, as executors do.
    own = problem(service(), nodes=(node,), engine="none")
    came = poisson(2000, rate, seed=4, prompt=512, answer=200)
    options = SimOptions(
        coordinator_s=0.0,
        token_budget=2048,
        max_sequences=256,
        admission=admission,
        order="arrival",
        high_water=1.0,
        known_outputs=True,
        prefix_caching=False,
    )
    plan = simulate(whole(own, node=node), own, CATALOG, came, options)
    model = analytic(CATALOG.model("llama-3.1-8b").llm, CATALOG.node(node), engine="none")
    part = TokenPart(model, kv_tokens=int(plan.nodes[0].kv_tokens), admission=admission)
    klass = ClassSpec("s", "a", 1.0, {"llm": PartNeed()})
    fleet = TaskFleet((executor("e", llm=part),), (klass,), (path("a", ("llm", "e")),))
    demand = Demand(
        came.arrival_s,
        np.zeros(len(came), np.int64),
        came.input.astype(np.float64),
        came.output.astype(np.float64),
    )
    found = simulate_tasks(fleet, demand=demand, warmup=0.0)
    return came, plan, found


@pytest.mark.parametrize(
    ("node", "rate", "admission", "gives_way"),
    [
        ("A100-80:1", 12.0, "prompts", False),
        ("A10G:1", 3.0, "prompts", True),
        ("A100-80:1", 12.0, "booked", False),
    ],
)
def test_a_plain_llm_takes_as_long_as_in_the_simulator_of_plans(
    node: str, rate: float, admission: Admission, gives_way: bool
) -> None:
    came, plan, found = run_both(node, rate, admission)
    # The other has the wire to the node, of less than a microsecond, which cannot move what shares a step.
    np.testing.assert_allclose(found.columns.ttft_s, plan.requests.ttft_s, atol=1e-5)
    np.testing.assert_allclose(found.columns.e2e_s, plan.requests.e2e_s, atol=1e-5)
    several = came.output > 1
    np.testing.assert_allclose(
        found.columns.tpot_s[several], plan.requests.tpot_s[several], rtol=1e-9
    )
    assert found.gave_way == plan.retries
    assert (found.gave_way > 0) == gives_way
    assert found.executor("e").utilisation == pytest.approx(plan.nodes[0].utilisation, rel=1e-6)


def test_booked_requests_that_wait_take_about_as_long() -> None:
    _, plan, found = run_both("A10G:1", 3.0, "booked")
    # There they wait at the coordinator, and are at the node only after the step that made room for them.
    assert found.columns.e2e_s.mean() == pytest.approx(plan.requests.e2e_s.mean(), rel=0.02)
    assert found.executor("e").parts[0].kv_peak == pytest.approx(1.0, rel=0.02)
