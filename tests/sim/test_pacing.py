"""Pipelines at their capacity: what the analytic model promises is what paced batches show."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.core.ids import Phase
from atoll.perf.step import Position
from atoll.plan.capacities import node_capacity
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Problem
from atoll.sim.api import simulate
from atoll.sim.options import Pacing, SimOptions
from atoll.workload.lengths import LengthMix
from atoll.workload.requests import Requests
from tests.sim.builders import CATALOG, placed, planned, problem, service

LAYERS = 64
PROMPT, ANSWER = 16, 600
PROMISE_S = 0.1
TP = {"A10G:4": 4, "L4:4": 4, "H100:8": 8}
SECONDS = 500.0
FROM_S = 120.0

Stages = tuple[tuple[int, int, tuple[str, ...]], ...]

# Cut so that all stages of a pipeline carry about the same.
LAYOUTS: dict[int, Stages] = {
    1: ((0, 64, ("A10G:4",)),),
    2: ((0, 40, ("A10G:4",)), (40, 64, ("L4:4",))),
    3: ((0, 22, ("L4:4",)), (22, 44, ("L4:4",)), (44, 64, ("L4:4",))),
    4: (
        (0, 17, ("A10G:4",)),
        (17, 34, ("A10G:4",)),
        (34, 51, ("A10G:4",)),
        (51, 64, ("A10G:4",)),
    ),
}


def decoding() -> Problem:
    """A service with phases apart, prompts so short that their KV is no load."""
    lengths = Lengths.of(LengthMix.fixed(float(PROMPT), float(ANSWER)))
    plain = service(model="qwen3-32b", apart=True)
    own = plain.model_copy(update={"tpot_s": PROMISE_S, "lengths": lengths})
    return problem(own, nodes=tuple(TP))


def capacity(own: Problem, stages: Stages) -> float:
    """Tokens/s of the slowest stage within the promise."""
    last = len(stages) - 1
    places = [Position.FIRST, *[Position.MIDDLE] * (last - 1), Position.LAST]
    rates = [
        node_capacity(
            own,
            CATALOG,
            own.services[0],
            "m/llm/decode",
            kind,
            end - start,
            last + 1,
            places[number] if last else Position.WHOLE,
            tp=TP[kind],
        )
        for number, (start, end, (kind,)) in enumerate(stages)
    ]
    return min(rates)


def run(
    own: Problem, stages: Stages, tokens_per_s: float, pacing: Pacing, seed: int | None = None
) -> float:
    """Mean TPOT in the steady middle of even arrivals, or with a seed of Poisson arrivals."""
    decode = placed(own, "decode", Phase.DECODE, *stages)
    prefill = placed(own, "prefill", Phase.PREFILL, (0, LAYERS, ("H100:8",)))
    plan: Plan = planned(own, [prefill, decode], {("prefill", "decode"): 1.0})
    rate = tokens_per_s / ANSWER
    count = int(rate * SECONDS)
    arrival_s, answers = np.arange(count) / rate, np.full(count, ANSWER)
    if seed is not None:
        random = np.random.default_rng(seed)
        arrival_s = np.cumsum(random.exponential(1.0 / rate, count))
        answers = random.geometric(1.0 / ANSWER, count)
    work = Requests.of(arrival_s, np.full(count, PROMPT, np.int32), answers.astype(np.int32))
    chosen = SimOptions(from_s=FROM_S, until_s=SECONDS, pacing=pacing)
    found = simulate(plan, own, CATALOG, work, chosen).requests
    steady = (found.arrival_s > FROM_S) & (found.arrival_s < SECONDS - 2 * ANSWER * PROMISE_S)
    assert steady.sum() > 50
    return float(np.nanmean(found.tpot_s[steady]))


@pytest.mark.parametrize("stages", LAYOUTS.values(), ids=[f"{n} stages" for n in LAYOUTS])
def test_a_pipeline_at_its_capacity_shows_its_promise(stages: Stages) -> None:
    own = decoding()
    assert run(own, stages, capacity(own, stages), "paced") == pytest.approx(PROMISE_S, rel=0.02)


@pytest.mark.parametrize("number", [2, 3])
def test_random_arrivals_make_one_batch_too_many_where_nobody_counts_them(number: int) -> None:
    own = decoding()
    load = 0.9 * capacity(own, LAYOUTS[number])
    free_s, paced_s = (run(own, LAYOUTS[number], load, pacing, 0) for pacing in ("free", "paced"))
    assert paced_s < 1.03 * PROMISE_S
    assert paced_s <= 0.85 * free_s
