"""How many requests keep their promise by load: the search for the largest, and the simulations behind it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.ids import Phase
from atoll.plan.problem import Lengths, Problem, Service
from atoll.plan.service_sharing import merge_services
from atoll.prove.load_curves import (
    STEPS,
    LoadCurve,
    LoadJob,
    find_loads,
    measure_loads,
    units_per_request,
)
from atoll.solve.assembly import keep
from atoll.workload.lengths import LengthMix
from tests.sim.builders import CATALOG, placed, problem, service


def search(kept: list[float], share: float) -> LoadCurve:
    """Search as a prover does, `kept[s]` being what is kept at s steps."""
    curve = LoadCurve()
    while (step := curve.next_step(share)) is not None:
        assert step not in curve.kept
        curve.kept[step] = kept[step]
    return curve


@given(
    st.lists(st.floats(0.0, 1.0), min_size=STEPS + 1, max_size=STEPS + 1),
    st.floats(0.01, 0.99),
)
def test_the_largest_load_is_found_where_less_is_kept_with_more(
    kept: list[float], share: float
) -> None:
    falling = sorted(kept, reverse=True)
    enough = [step for step in range(1, STEPS + 1) if falling[step] >= share]

    curve = search(falling, share)

    low = max(enough, default=0)
    assert low / STEPS <= curve.load(share) <= min(STEPS, low + 1) / STEPS
    assert len(curve.kept) <= 6


def test_what_is_not_known_counts_as_good() -> None:
    curve = LoadCurve({12: 0.5})
    assert curve.load(0.9) == 12 / STEPS
    assert LoadCurve().load(0.9) == 1.0
    assert LoadCurve({1: 0.5}).load(0.9) == 0.0


def own(phases: str, prompt: float, answer: float) -> Problem:
    lengths = Lengths.of(LengthMix.fixed(prompt, answer))
    changes = {"phases": phases, "lengths": lengths, "ttft_s": 2.0, "tpot_s": 0.05}
    return problem(service().model_copy(update=changes))


@pytest.mark.parametrize(
    ("phases", "phase"),
    [("together", Phase.BOTH), ("apart", Phase.PREFILL), ("apart", Phase.DECODE)],
)
def test_all_promises_are_kept_at_little_load_and_fewer_at_more(phases: str, phase: Phase) -> None:
    mine = own(phases, 2000.0, 100.0)
    instance = keep(mine, CATALOG, placed(mine, "x", phase, (0, 32, ("A100-80:1",))))

    kept = measure_loads(mine, CATALOG, [LoadJob(instance, step) for step in (2, 10, 16)])

    assert kept[0] == 1.0
    assert kept[0] >= kept[1] >= kept[2]
    assert kept == measure_loads(mine, CATALOG, [LoadJob(instance, s) for s in (2, 10, 16)])


def test_what_carries_nothing_is_not_simulated() -> None:
    mine = own("apart", 2000.0, 100.0)
    instance = keep(mine, CATALOG, placed(mine, "x", Phase.BOTH, (0, 32, ("A100-80:1",))))
    nothing = instance.model_copy(update={"throughput_per_s": 0.0})
    key = (instance.role, instance.node_counts)
    curves = {key: LoadCurve()}

    # No request would ever come: the time to the next one is infinite.
    assert find_loads(mine, CATALOG, {key: nothing}, curves, lambda _: 0.9) == 0
    assert curves[key].load(0.9) == 0.0


def test_few_long_prompts_among_short_ones_are_judged_by_themselves() -> None:
    def sharer(prompt: float, rate: float, ttft_s: float) -> Service:
        lengths = Lengths.of(LengthMix.fixed(prompt, 60.0))
        changes = {"rate_per_s": rate, "lengths": lengths, "ttft_s": ttft_s, "tpot_s": 0.08}
        return service().model_copy(update=changes)

    def kept(ttft_s: float) -> float:
        sharers = {"long": sharer(6000.0, 0.4, ttft_s), "short": sharer(100.0, 10.0, 0.5)}
        mine = problem(merge_services("both", sharers), nodes=("L40S:1",))
        instance = keep(mine, CATALOG, placed(mine, "x", Phase.BOTH, (0, 32, ("L40S:1",))))
        return measure_loads(mine, CATALOG, [LoadJob(instance, 2)])[0]

    # 96 % of all requests are short, and in time.
    assert kept(0.5) < 0.1
    assert kept(1.0) > 0.95


def test_one_prompt_after_the_other_waits_as_long_as_theory_says() -> None:
    # One instance, Poisson arrivals, equal prompts too long to share a step: an M/D/1 queue.
    mine = own("apart", 1800.0, 100.0)
    instance = keep(mine, CATALOG, placed(mine, "x", Phase.PREFILL, (0, 32, ("A100-80:1",))))
    capacity = instance.throughput_per_s / units_per_request(mine.services[0], Phase.PREFILL)
    assert capacity > 0

    kept = measure_loads(mine, CATALOG, [LoadJob(instance, step) for step in range(4, 17, 4)])

    # Half of them at least at the analytic capacity, which is for half of them.
    assert kept[-1] >= 0.45
    assert kept == sorted(kept, reverse=True)
