"""Copies of a model side by side in one machine, and slices of machines."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.core.ids import Phase
from atoll.plan.plan import Plan
from atoll.sim.api import simulate
from atoll.sim.sim_options import Failure, SimOptions
from atoll.sim.sim_result import SimReport
from tests.sim.builders import CATALOG, placed, planned, poisson, problem, requests

OWN = problem(nodes=("L40S:1", "L40S:8"))
LAYERS = CATALOG.model("llama-3.1-8b").llm.layers


def one(kind: str, *, tp: int, gpus: int | None = None) -> Plan:
    made = placed(OWN, "m-both-0", Phase.BOTH, (0, LAYERS, (kind,)), tp=tp, gpus=gpus)
    return planned(OWN, [made], {(made.id,): 1.0})


def crowd(plan: Plan, count: int, prompt: int, answer: int) -> SimReport:
    """All requests at once: the machine is never idle until the last of them."""
    found = simulate(plan, OWN, CATALOG, requests([0.0] * count, prompt, answer))
    assert found.finished == count
    return found


@pytest.mark.parametrize(("prompt", "answer"), [(1500, 1), (30, 300), (500, 100)])
def test_eight_copies_do_eight_times_as_much_as_one(prompt: int, answer: int) -> None:
    alone = crowd(one("L40S:1", tp=1), 60, prompt, answer)
    eight = crowd(one("L40S:8", tp=1), 8 * 60, prompt, answer)
    assert len(eight.nodes) == 8
    assert eight.clock_s == pytest.approx(alone.clock_s, rel=0.02)
    # Each copy has a KV cache and a batch of its own, and an eighth of the requests.
    assert {unit.kv_tokens for unit in eight.nodes} == {alone.nodes[0].kv_tokens}
    assert {unit.prompt_tokens for unit in eight.nodes} == {60 * prompt}
    mean = alone.nodes[0].mean_sequences
    assert [unit.mean_sequences for unit in eight.nodes] == pytest.approx([mean] * 8, rel=0.02)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_node_is_as_many_units_as_its_gpus_make_groups(tp: int) -> None:
    found = crowd(one("L40S:8", tp=tp), 16, 100, 5)
    assert len(found.nodes) == 8 // tp
    assert [unit.group for unit in found.nodes] == list(range(8 // tp))


def test_a_slice_runs_as_a_machine_of_its_size_does() -> None:
    for gpus, tp in ((1, 1), (2, 2), (4, 2)):
        cut = crowd(one("L40S:8", tp=tp, gpus=gpus), 20, 400, 50)
        own = crowd(one(f"L40S:{gpus}", tp=tp), 20, 400, 50)
        assert len(cut.nodes) == gpus // tp
        assert cut.clock_s == pytest.approx(own.clock_s, rel=1e-9)
        assert [u.kv_tokens for u in cut.nodes] == [u.kv_tokens for u in own.nodes]


def halves(slots: tuple[int, int] = (0, 0)) -> Plan:
    """Two instances on halves of one machine, or of two."""
    instances = []
    for number, slot in enumerate(slots):
        made = placed(OWN, f"m-both-{number}", Phase.BOTH, (0, LAYERS, ("L40S:8",)), tp=1, gpus=4)
        ids = tuple(range(4 * number, 4 * number + 4))
        node = made.nodes[0].model_copy(update={"slot": slot, "gpu_ids": ids})
        instances.append(made.model_copy(update={"nodes": (node,)}))
    return planned(OWN, instances, {(i.id,): 0.5 for i in instances})


@pytest.mark.parametrize(("slots", "machines"), [((0, 0), 1), ((0, 1), 2)])
def test_a_cut_machine_is_paid_whole(slots: tuple[int, int], machines: int) -> None:
    plan = halves(slots)
    assert plan.nodes == machines
    found = simulate(plan, OWN, CATALOG, poisson(100, 5.0))
    assert found.usd_per_hour == pytest.approx(plan.usd_per_hour) == 2.0 * machines


def test_a_machine_that_fails_takes_all_its_slices_with_it() -> None:
    shared, apart = halves(), halves((0, 1))
    failure = (Failure(5.0, instance="m-both-0", back_s=60.0),)
    work = poisson(100, 5.0)
    both = simulate(shared, OWN, CATALOG, work, SimOptions(failures=failure))
    first = simulate(apart, OWN, CATALOG, work, SimOptions(failures=failure))
    late = np.flatnonzero(both.requests.arrival_s > 6.0)[:10]
    assert np.all(both.requests.e2e_s[late] > 30.0)
    assert np.all(first.requests.e2e_s[late] < 30.0)
    assert both.finished == first.finished == 100
