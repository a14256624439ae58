"""Beginnings that prompts of a service have in common, from its demand to the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.core.errors import InputError
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.problem import Prefix
from atoll.sim.api import simulate
from atoll.sim.problem_demand import demand_of
from atoll.sim.sim_options import SimOptions
from atoll.sim.sim_result import SimReport
from atoll.workload.requests import Requests, collect
from tests.sim.builders import CATALOG, problem, service, whole

FLEET = """\
services:
  chat:
    model: llama-3.1-8b
    ttft: 1s
    tpot: 50ms
    rate: 4/s
    lengths: 1600x20
    phases: together
    prefix: {share: 50%, tokens: 1200}
pool: {owned: {lab: {"H100:1": 2}}}
"""


def test_a_share_of_prompts_begins_alike() -> None:
    own = problem(service().model_copy(update={"prefix": Prefix(share=0.5, tokens=1200)}))
    asked = collect(demand_of(own, 200.0), 3)
    plain = collect(demand_of(problem(), 200.0), 3)
    # Nothing else is drawn otherwise.
    assert np.array_equal(asked.input, plain.input)
    assert np.array_equal(asked.arrival_s, plain.arrival_s)
    assert plain.prefix is None
    assert asked.prefix is not None
    counts = np.diff(asked.prefix.offsets)
    assert set(counts.tolist()) == {0, 75}
    assert float(np.mean(counts > 0)) == pytest.approx(0.5, abs=0.1)
    assert len(np.unique(asked.prefix.ids)) == 75


def test_the_simulator_computes_the_beginning_once() -> None:
    own = parse_fleet(FLEET)
    asked = collect(demand_of(own, 60.0), 0)
    plan = whole(own, node="H100:1")
    found = simulate(plan, own, CATALOG, asked, SimOptions(coordinator_s=0.0))
    assert asked.prefix is not None
    begun = int(np.count_nonzero(np.diff(asked.prefix.offsets)))
    # All but the first find it: 1,200 of their 1,600 tokens.
    share = (begun - 1) * 1200.0 / (1600.0 * len(asked))
    assert found.services[0].reused_share == pytest.approx(share, rel=1e-6)
    mean_ms = [1e3 * float(np.nanmean(one.requests.ttft_s)) for one in (found, _without(asked))]
    assert mean_ms[0] < 0.8 * mean_ms[1]


def _without(asked: Requests) -> SimReport:
    own = parse_fleet(FLEET)
    options = SimOptions(coordinator_s=0.0, prefix_caching=False)
    return simulate(whole(own, node="H100:1"), own, CATALOG, asked, options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FLEET.replace("1200", "1600"), "as long as the mean prompt of 1,600"),
        (FLEET.replace("1200", "8"), "prefix.tokens"),
        (FLEET.replace("50%", "0%"), "prefix.share"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_fleet(text)


def test_problems_without_one_keep_their_hash() -> None:
    plain = parse_fleet("".join(line for line in FLEET.splitlines(True) if "prefix" not in line))
    assert "prefix" not in plain.services[0].model_dump()
    assert parse_fleet(FLEET).services[0].model_dump()["prefix"] == {"share": 0.5, "tokens": 1200}
