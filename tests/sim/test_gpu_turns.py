"""Shares of one GPU: steps take turns, at full speed while neighbours rest; a second formulation agrees.

The simulator takes what is computed off what is left of each step. Here a step ends when the GPU's own clock,
which runs at 1/k less what switching takes while k steps compute, has gone on by what the step computes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.gpus import SWITCHING_LOSS
from atoll.core.ids import Phase
from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.sim.api import simulate
from atoll.sim.sim_options import Failure, SimOptions
from atoll.sim.sim_result import SimReport
from atoll.workload.requests import Requests
from tests.seeds import examples
from tests.sim.builders import CATALOG, placed, planned, problem, requests, service

MODEL = "llama-3.2-3b"
SPEC = CATALOG.model(MODEL).llm
Asked = tuple[float, int, int]
"""A request: when it comes (s), its tokens of prompt and of answer."""


def neighbours(shares: int, engine: str, *, gpus: Sequence[int] | None = None) -> Plan:
    """One instance of each of some services, on the shares of one GPU; on `gpus`: on these shares."""
    own = shared_problem(shares, engine)
    instances = []
    for at, each in enumerate(own.services):
        bare = placed(
            own, f"i{at}", Phase.BOTH, (0, SPEC.layers, (f"H200/{shares}:{shares}",)), tp=1, gpus=1,
            mine=each,
        )  # fmt: skip
        share = at if gpus is None else gpus[at]
        node = bare.nodes[0].model_copy(update={"gpu_ids": (share,), "slot": 0})
        instances.append(bare.model_copy(update={"nodes": (node,)}))
    return planned(own, instances, {(one.id,): 1.0 for one in instances})


def shared_problem(shares: int, engine: str) -> Problem:
    names = [f"m{at}" for at in range(shares)]
    services = [service(name, MODEL) for name in names]
    return problem(*services, nodes=(f"H200/{shares}:{shares}",), engine=engine)


def unplaced(plan: Plan) -> Plan:
    """The plan without a word on which shares are whose."""
    return plan.model_copy(
        update={
            "instances": tuple(
                one.model_copy(
                    update={"nodes": tuple(n.model_copy(update={"slot": None}) for n in one.nodes)}
                )
                for one in plan.instances
            )
        }
    )


def asked_of(asked: Sequence[Asked | None]) -> Requests:
    """One request of each service that is asked at all."""
    rows = sorted((one[0], at, one) for at, one in enumerate(asked) if one is not None)
    made = requests([r[0] for r in rows], [r[2][1] for r in rows], [r[2][2] for r in rows])
    names = tuple(f"m{at}" for at in range(len(asked)))
    return Requests(
        arrival_s=made.arrival_s,
        model=np.array([at for _, at, _ in rows], np.int16),
        klass=made.klass,
        input=made.input,
        output=made.output,
        models=names,
    )


def run(plan: Plan, shares: int, engine: str, arrivals: Requests, **options: object) -> SimReport:
    chosen = SimOptions(coordinator_s=0.0, **options)  # type: ignore[arg-type]
    return simulate(plan, shared_problem(shares, engine), CATALOG, arrivals, chosen)


def ends_of(report: SimReport) -> list[tuple[float, float]]:
    """First and last token of each request, s."""
    seen = report.requests
    first = seen.arrival_s + seen.ttft_s
    return list(zip(first, first + seen.tpot_s * np.maximum(0, seen.output - 1), strict=True))


# The second formulation


def pace(computing: int) -> float:
    """How many times as long a step takes while so many compute."""
    return computing if computing < 2 else computing / (1.0 - SWITCHING_LOSS)


def steps_of(
    shares: int, engine: str, prompt: int, answer: int
) -> list[tuple[float, float, float]]:
    """Of each step of a request alone: what it computes with a GPU to itself, launches, and host, in s."""
    model = analytic(SPEC, CATALOG.node(f"H200/{shares}:1"), engine=engine)
    batches = [Batch.prefill(float(prompt), 1.0)]
    batches += [Batch.decode(1.0, float(prompt + made)) for made in range(1, answer)]
    found = []
    for batch in batches:
        took = step_seconds(model, batch, 0, SPEC.layers)
        host = model.engine.host_seconds(1.0)
        launch = SPEC.layers * model.engine.launch.layer_s if batch.prefill_tokens else 0.0
        found.append(((took - host) / pace(shares), min(launch, took - host), host))
    return found


def by_virtual_time(
    shares: int, engine: str, asked: Sequence[Asked | None], fair: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """First and last token of each request: steps end by the GPU's own clock.

    `fair` are these with all shares busy, less its steps that is what a request takes on its way.
    """
    todo = {
        at: steps_of(shares, engine, one[1], one[2])
        for at, one in enumerate(asked)
        if one is not None
    }
    arrived = sorted(todo, key=lambda at: (asked[at] or (0.0,))[0])
    queue: list[tuple[float, int, int]] = []
    for at, (first, _) in zip(arrived, fair, strict=True):
        computed, _, host = todo[at][0]
        heapq.heappush(queue, (first - pace(shares) * computed - host, at, 0))
    now = clock = 0.0
    computing: dict[int, tuple[float, int, float]] = {}
    ends: dict[int, list[float]] = {at: [] for at in todo}
    while queue or computing:
        due = min(((mark, at) for at, (mark, _, _) in computing.items()), default=(math.inf, -1))
        done = now + (due[0] - clock) * pace(len(computing)) if computing else math.inf
        at_s = min(done, queue[0][0] if queue else math.inf)
        clock += (at_s - now) / pace(len(computing)) if computing else 0.0
        now = at_s
        if done <= at_s:
            _, number, begun = computing.pop(due[1])
            _, launch, host = todo[due[1]][number]
            end = max(now, begun + launch) + host
            ends[due[1]].append(end)
            if number + 1 < len(todo[due[1]]):
                heapq.heappush(queue, (end, due[1], number + 1))
        else:
            _, at, number = heapq.heappop(queue)
            computing[at] = (clock + todo[at][number][0], number, now)
    return [(ends[at][0], ends[at][-1]) for at in arrived]


one_request = st.tuples(st.floats(0.0, 0.2), st.integers(1, 500), st.integers(1, 40))


@examples(8)
@given(
    st.sampled_from(["none", "atoll", "vllm"]),
    st.lists(st.none() | one_request, min_size=2, max_size=4).filter(any),
)
def test_steps_on_one_gpu_end_when_processor_sharing_says(
    engine: str, asked: list[Asked | None]
) -> None:
    shares = len(asked)
    plan, arrivals = neighbours(shares, engine), asked_of(asked)
    found = ends_of(run(plan, shares, engine, arrivals))
    fair = ends_of(run(plan, shares, engine, arrivals, turns=False))
    expected = by_virtual_time(shares, engine, asked, fair)
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-6, abs=1e-7)
    # Never later than as planned, with all shares busy all the time.
    assert np.all(np.array(found) <= np.array(fair) + 1e-9)


def test_alone_a_share_is_as_fast_as_the_whole_gpu_and_beside_others_it_is_not() -> None:
    asked: list[Asked | None] = [(0.0, 1000, 50), None]
    (alone,) = ends_of(run(neighbours(2, "none"), 2, "none", asked_of(asked)))
    whole = problem(service("m0", MODEL), nodes=("H200:1",), engine="none")
    bare = placed(whole, "i0", Phase.BOTH, (0, SPEC.layers, ("H200:1",)))
    plan = planned(whole, [bare], {("i0",): 1.0})
    options = SimOptions(coordinator_s=0.0)
    (own,) = ends_of(simulate(plan, whole, CATALOG, asked_of(asked[:1]), options))
    assert alone == pytest.approx(own, rel=1e-9)
    both = ends_of(run(neighbours(2, "none"), 2, "none", asked_of([asked[0], asked[0]])))
    assert both[0] == pytest.approx(both[1], rel=1e-3)
    # But for some microseconds on the way there.
    assert both[0] == pytest.approx((pace(2) * own[0], pace(2) * own[1]), rel=1e-3)
    # On two GPUs they do not see each other.
    apart = neighbours(2, "none", gpus=(0, 2))
    assert ends_of(run(apart, 2, "none", asked_of([asked[0], asked[0]])))[0] == pytest.approx(own)


def test_a_machine_is_lost_with_all_its_shares_and_they_take_turns_again_when_it_is_back() -> None:
    asked = asked_of([(0.0, 1000, 400), (0.0, 1000, 400)])
    plan = neighbours(2, "none")
    calm = ends_of(run(plan, 2, "none", asked))
    lost = (Failure(time_s=0.3, instance="i1", back_s=0.5),)
    report = run(plan, 2, "none", asked, failures=lost)
    (first, second) = ends_of(report)
    assert first[1] == pytest.approx(second[1], rel=1e-3)
    # What was made is computed again with the prompt, beside the time that nothing ran.
    assert calm[0][1] + 0.2 < first[1] < calm[0][1] + 0.3
    for node in report.nodes:
        assert node.utilisation == pytest.approx((first[1] - 0.2) / first[1], rel=1e-3)


def test_a_loaded_pair_of_instances_answers_no_later_than_planned_and_the_same_each_time() -> None:
    rng = np.random.default_rng(5)
    count = 400
    arrivals = Requests(
        arrival_s=np.sort(rng.uniform(0.0, 20.0, count)),
        model=rng.integers(0, 2, count).astype(np.int16),
        klass=np.zeros(count, np.int16),
        input=rng.integers(100, 2000, count).astype(np.int32),
        output=rng.integers(1, 200, count).astype(np.int32),
        models=("m0", "m1"),
    )
    plan = neighbours(2, "vllm")
    found, again = (run(plan, 2, "vllm", arrivals).requests for _ in range(2))
    fair = run(plan, 2, "vllm", arrivals, turns=False).requests
    # Where nobody has said whose neighbour is whose, all are busy.
    unknown = run(unplaced(plan), 2, "vllm", arrivals).requests
    assert np.array_equal(unknown.ttft_s, fair.ttft_s)
    assert np.array_equal(found.ttft_s, again.ttft_s)
    assert np.array_equal(found.tpot_s, again.tpot_s)
    for name in ("ttft_s", "tpot_s"):
        seen, planned_s = getattr(found, name), getattr(fair, name)
        # Of single requests one may come later: it finds another step under way.
        assert seen.mean() < planned_s.mean()
