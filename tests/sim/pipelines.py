"""Pipelines that only decode: a service with phases apart, layouts, what they carry, and runs of them."""

from __future__ import annotations

import numpy as np

from atoll.core.ids import Phase
from atoll.perf.batch import Batch
from atoll.perf.step import Position, analytic, step_seconds
from atoll.plan.capacities import node_capacity
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Problem
from atoll.routing.pacing import PacedNode, round_seconds
from atoll.sim.api import simulate
from atoll.sim.sim_build import build
from atoll.sim.sim_options import Pacing, SimOptions
from atoll.workload.lengths import LengthMix
from atoll.workload.requests import Requests
from tests.sim.builders import CATALOG, placed, planned, problem, service

MODEL = "qwen3-32b"
LAYERS = 64
PROMISE_S = 0.1
PROMPT, ANSWER = 16, 600
FROM_S = 120.0
"""When it is as full as it will be."""
PREFILL = "H100:8"
TP = {"A10G:4": 4, "L4:4": 4, "L40S:1": 1, PREFILL: 8}

Stages = tuple[tuple[int, int, tuple[str, ...]], ...]


def build_problem() -> Problem:
    """A service with phases apart, prompts so short that their KV is no load."""
    lengths = Lengths.of(LengthMix.fixed(float(PROMPT), float(ANSWER)))
    plain = service(model=MODEL, apart=True)
    own = plain.model_copy(update={"tpot_s": PROMISE_S, "lengths": lengths})
    return problem(own, nodes=tuple(TP))


def build_plan(own: Problem, stages: Stages) -> Plan:
    """One instance that decodes, behind more prefill than it needs."""
    decode = placed(own, "decode", Phase.DECODE, *stages)
    prefill = placed(own, "prefill", Phase.PREFILL, (0, LAYERS, (PREFILL,)))
    return planned(own, [prefill, decode], {("prefill", "decode"): 1.0})


def capacities(own: Problem, stages: Stages) -> list[float]:
    """Tokens/s that each stage carries within the promise."""
    last = len(stages) - 1
    places = [Position.FIRST, *[Position.MIDDLE] * (last - 1), Position.LAST]
    return [
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


def draw(rate_per_s: float, seconds: float, seed: int | None) -> Requests:
    """Poisson arrivals and geometric answers, or without a seed even arrivals and equal answers."""
    count = int(rate_per_s * seconds)
    prompts = np.full(count, PROMPT, np.int32)
    if seed is None:
        return Requests.of(np.arange(count) / rate_per_s, prompts, np.full(count, ANSWER, np.int32))
    random = np.random.default_rng(seed)
    arrival_s = np.cumsum(random.exponential(1.0 / rate_per_s, count))
    return Requests.of(arrival_s, prompts, random.geometric(1.0 / ANSWER, count).astype(np.int32))


def mean_tpot(
    own: Problem, plan: Plan, work: Requests, seconds: float, pacing: Pacing
) -> tuple[float, float]:
    """Mean TPOT of the requests that ran in the steady middle, and tokens/s there."""
    chosen = SimOptions(from_s=FROM_S, until_s=seconds, pacing=pacing)
    found = simulate(plan, own, CATALOG, work, chosen)
    times = found.requests
    # Those that come late see an emptier pipeline towards the end.
    steady = (times.arrival_s > FROM_S) & (times.arrival_s < seconds - 2 * ANSWER * PROMISE_S)
    assert steady.sum() > 50
    return float(np.nanmean(times.tpot_s[steady])), found.tokens_per_s


def best_tpot(own: Problem, plan: Plan, tokens_per_s: float) -> float:
    """The mean TPOT in closed form of the decode pipeline, were its batches always the best.

    With n requests in flight in k equal batches each gets a token every R(k, n) seconds (`routing.pacing`),
    so that min_k R is what the best k gives. All n progress alike: with Poisson arrivals this is processor
    sharing, whose n is distributed as the product of arrival rate over departure rates, whatever the
    distribution of answers. TPOT is its mean over the tokens per second. Steps are those of the mean context
    of geometric answers.
    """
    built = build(plan, own, CATALOG, draw(1.0, 2.0, None), SimOptions())
    instances = [standing.instance for standing in built.history.standing]
    at = next(i for i, one in enumerate(instances) if one.phase is Phase.DECODE)
    begin = sum(table.edges for table in built.lower.tables[:at])
    edges = built.lower.edges[begin : begin + built.lower.tables[at].edges]
    batch = np.concatenate([np.arange(1.0, 64.0), np.arange(64.0, 1025.0, 8.0)])
    zero = np.zeros_like(batch)
    nodes = []
    for node in instances[at].nodes:
        model = analytic(
            CATALOG.model(MODEL).llm,
            CATALOG.node(node.kind),
            tp=node.tp,
            engine=own.engine_of(own.services[0]),
        )
        load = Batch(zero, zero, zero, batch, zero + PROMPT + ANSWER)
        nodes.append(PacedNode(batch, np.asarray(step_seconds(model, load, node.start, node.end))))
    flying = np.arange(1.0, 2001.0)
    hops_s = float(edges["latency_s"].sum())
    counts = range(1, len(nodes) + 1)
    rounds = np.min([round_seconds(nodes, flying, k, hops_s) for k in counts], axis=0)
    # Arrivals over departures, both per second and per answer.
    odds = np.concatenate([[0.0], np.cumsum(np.log(tokens_per_s * rounds / flying))])
    chance = np.exp(odds - odds.max())
    return float((chance[1:] * flying).sum() / chance.sum() / tokens_per_s)
