"""What is known of queues and steps without a simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.catalog import Catalog
from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from atoll.sim.tasks.simulate_tasks import Routing, simulate_tasks
from atoll.sim.tasks.task_demand import Arrivals, Demand
from atoll.sim.tasks.task_fleet import (
    Amount,
    BatchPart,
    Box,
    ClassSpec,
    DiffusionPart,
    ExecutorSpec,
    PartEdge,
    PartModel,
    PartNeed,
    PathSpec,
    Promises,
    StepSpec,
    StepTable,
    TaskFleet,
    TokenPart,
)
from tests.sim.tasks.builders import TABLE, executor, path

FLAT = StepTable(prefill=((1.0, 0.1), (10_000.0, 0.1)), decode=((1.0, 0.01), (256.0, 0.01)))
"""A prompt takes 0.1 s, whatever its length, a token 0.01 s."""
ROUTINGS: tuple[Routing, ...] = ("dealt", "dynamic")


def at(*times: float, klass: list[int] | None = None, tokens: float = 10.0) -> Demand:
    """Return requests at these times with so many tokens in and out."""
    count = len(times)
    return Demand(
        np.array(times),
        np.array(klass or [0] * count),
        np.full(count, tokens),
        np.full(count, tokens),
    )


def encoder(rate: float, *, item_s: float = 0.1, fixed_s: float = 0.0, most: int = 1) -> TaskFleet:
    part = BatchPart({"a": item_s}, fixed_s, most)
    klass = ClassSpec("s", "a", rate, {"eye": PartNeed()})
    return TaskFleet((executor("e", eye=part),), (klass,), (path("a", ("eye", "e")),))


@pytest.mark.parametrize("load", [0.5, pytest.param(0.8, marks=pytest.mark.slow)])
def test_waits_as_an_md1_queue_does(load: float) -> None:
    found = simulate_tasks(encoder(load / 0.1), requests=150_000, seed=1, warmup=0.05)
    wait = load * 0.1 / (2.0 * (1.0 - load))
    mean = found.klass("a").e2e_s.mean
    assert mean is not None
    assert mean - 0.1 == pytest.approx(wait, rel=0.03)
    assert found.executor("e").busy == pytest.approx(load, rel=0.02)
    assert found.klass("a").part_s["eye"].mean == pytest.approx(mean)
    # Little's law.
    assert found.executor("e").parts[0].queue_mean == pytest.approx(load / 0.1 * wait, rel=0.04)


def test_shares_are_of_the_time_in_which_requests_come() -> None:
    # An item of 0.5 s every second for 10 s, then eleven more at once: 5.5 s after the last has come.
    found = simulate_tasks(encoder(1.0, item_s=0.5), demand=at(*np.arange(10.0), *[10.0] * 11))
    (device,) = found.executors
    assert found.clock_s == pytest.approx(15.5)
    assert device.busy == device.parts[0].busy == pytest.approx(0.5)
    assert device.utilisation == device.parts[0].utilisation == pytest.approx(10.5 / 15.5)
    # Without the tenths at both ends: 8 in 8 s.
    assert found.requests_per_s == pytest.approx(1.0)


def test_interfaces_are_busy_of_the_time_in_which_requests_come() -> None:
    slow = handed(100.0, 1000.0, boxes=("x", "y"))
    found = simulate_tasks(slow, demand=at(0.0, 1.2))
    # The first is encoded for 0.1 s and sent until 1.1 s; the second leaves after the last has come.
    assert found.nic_busy["x"] == pytest.approx((1.0 / 1.2, 0.0))
    assert found.nic_busy["y"] == pytest.approx((0.0, 1.0 / 1.2))


def test_regular_arrivals_hardly_wait() -> None:
    means: list[float] = []
    for cv in (0.1, 1.0, 2.0):
        found = simulate_tasks(encoder(8.0), requests=20_000, arrivals=Arrivals(cv=cv))
        means.append(found.klass("a").e2e_s.mean or 0.0)
    # Kingman: about (cv_a^2 + cv_s^2) / 2 times rho / (1 - rho) s.
    assert 0.1 < means[0] < 0.11
    assert means[1] == pytest.approx(0.3, rel=0.05)
    assert means[2] == pytest.approx(0.9, rel=0.15)


def test_a_saturated_encoder_works_at_its_rate() -> None:
    fleet = encoder(1.0, item_s=0.02, fixed_s=0.04, most=8)
    found = simulate_tasks(fleet, requests=2000, arrivals=Arrivals(at_once=True))
    assert found.by_makespan_per_s == pytest.approx(8 / (0.04 + 8 * 0.02), rel=1e-9)
    assert found.requests_per_s == pytest.approx(8 / (0.04 + 8 * 0.02), rel=0.01)
    assert found.executor("e").busy == pytest.approx(1.0, rel=1e-9)
    assert found.executor("e").parts[0].batch_mean == 8.0


@pytest.mark.parametrize("phase", ["both", "apart"])
def test_one_request_takes_what_the_step_model_says(phase: str) -> None:
    catalog = Catalog.default()
    spec = catalog.model("llama-3.1-8b").llm
    model = analytic(spec, catalog.node("A100-80:1"))
    prompt, answer = 1000.0, 50
    need = PartNeed()
    part = TokenPart(model, kv_tokens=100_000, max_tokens=8192)
    devices: tuple[ExecutorSpec, ...] = (executor("e", llm=part),)
    ways = (path("a", ("llm", "e")),)
    needs = {"llm": need}
    edges: tuple[PartEdge, ...] = ()
    if phase == "apart":
        devices = (
            executor("e", llm__prefill=replace(part, phase="prefill")),
            executor("f", llm__decode=replace(part, phase="decode")),
        )
        ways = (path("a", ("llm.prefill", "e"), ("llm.decode", "f")),)
        needs = {"llm.prefill": need, "llm.decode": need}
        edges = (PartEdge("llm.prefill", "llm.decode"),)
    klass = ClassSpec(
        "s", "a", 0.001, needs, edges, input_tokens=prompt, output_tokens=float(answer)
    )
    found = simulate_tasks(TaskFleet(devices, (klass,), ways), requests=20)
    first = step_seconds(model, Batch.prefill(prompt), 0, spec.layers)
    each = [
        step_seconds(model, Batch.decode(1.0, prompt + k), 0, spec.layers) for k in range(1, answer)
    ]
    assert found.columns.ttft_s == pytest.approx(first, rel=1e-9)
    assert found.columns.tpot_s == pytest.approx(sum(each) / len(each), rel=1e-9)


def test_prompts_are_cut_to_fit_a_step() -> None:
    part = TokenPart(FLAT, kv_tokens=1000, max_tokens=40)
    klass = ClassSpec("s", "a", 1.0, {"llm": PartNeed()})
    fleet = TaskFleet((executor("e", llm=part),), (klass,), (path("a", ("llm", "e")),))
    # 100 tokens: 40, 40, 20; then 99 tokens.
    found = simulate_tasks(fleet, demand=at(1.0, tokens=100.0))
    assert found.columns.ttft_s[0] == pytest.approx(0.3)
    assert found.columns.e2e_s[0] == pytest.approx(0.3 + 99 * 0.01)
    assert found.executors[0].parts[0].steps == 3 + 99


def test_requests_are_finished_or_in_flight() -> None:
    part = TokenPart(TABLE, kv_tokens=4000, max_sequences=8)
    klass = ClassSpec(
        "s", "a", 4.0, {"llm": PartNeed()}, promises=Promises(ttft_s=0.5, tpot_s=0.05)
    )
    fleet = TaskFleet((executor("e", llm=part),), (klass,), (path("a", ("llm", "e")),))
    found = simulate_tasks(fleet, duration_s=60.0, warmup=0.0)
    assert found.arrived == found.finished + found.in_flight
    assert found.in_flight > 0
    assert found.klass("a").arrived == found.arrived
    assert int(np.isfinite(found.columns.e2e_s).sum()) == found.finished
    assert found.clock_s == 60.0
    assert found.executor("e").busy <= 1.0
    assert (found.columns.arrival_s <= 60.0).all()
    # Overloaded: those that wait for too long count as broken though they have no text yet.
    late = 60.0 - found.columns.arrival_s > 0.5
    kept = found.columns.ttft_s <= 0.5
    judged = late | np.isfinite(found.columns.ttft_s)
    assert found.klass("a").kept["ttft"] == pytest.approx(kept[judged].mean())
    assert 0.0 < found.klass("a").kept["ttft"] < 0.9


def interference(*, shared: bool) -> TaskFleet:
    eye, llm = BatchPart({"image": 0.5}), TokenPart(FLAT, kv_tokens=10_000)
    devices = (
        (executor("e", eye=eye, llm=llm),)
        if shared
        else (executor("e", llm=llm), executor("f", eye=eye))
    )
    classes = (
        ClassSpec("s", "text", 1.0, {"llm": PartNeed()}),
        ClassSpec(
            "s", "image", 1.0, {"eye": PartNeed(), "llm": PartNeed()}, (PartEdge("eye", "llm"),)
        ),
    )
    steps = (("eye", "e" if shared else "f"), ("llm", "e"))
    return TaskFleet(devices, classes, (path("text", ("llm", "e")), path("image", *steps)))


def test_an_encoder_holds_up_tokens_on_its_executor() -> None:
    # Text from 0 s (0.1 s prompt, 9 tokens until 0.19 s); an image comes at 0.125 s.
    demand = at(0.0, 0.125, klass=[0, 1])
    alone = simulate_tasks(interference(shared=False), demand=demand)
    shared = simulate_tasks(interference(shared=True), demand=demand)
    assert alone.columns.e2e_s[0] == pytest.approx(0.19)
    # 0.5 s of the encoder, and then the prompt that it fed, in the same step as a token.
    assert shared.columns.e2e_s[0] == pytest.approx(0.19 + 0.5 + 0.1)
    assert alone.columns.ttft_s[1] == pytest.approx(0.6)
    # The step under way ends, then the encoder has its turn, then one token, with the prompt in the step.
    assert shared.columns.ttft_s[1] == pytest.approx(0.005 + 0.5 + 0.11)


def test_tokens_of_a_shared_executor_are_slower_under_load() -> None:
    alone = simulate_tasks(interference(shared=False), requests=300, seed=5)
    shared = simulate_tasks(interference(shared=True), requests=300, seed=5)
    slow, fast = shared.klass("text").tpot_s, alone.klass("text").tpot_s
    assert slow.p99 is not None
    assert fast.p99 is not None
    assert slow.p99 > 2.0 * fast.p99
    busy = {part.part: part.busy for part in shared.executor("e").parts}
    assert shared.executor("e").busy == pytest.approx(busy["eye"] + busy["llm"])


def test_images_join_between_steps() -> None:
    dit = DiffusionPart({"a": 0.1}, fixed_s=0.2, max_batch=2, emits="image")
    klass = ClassSpec("s", "a", 1.0, {"dit": PartNeed(steps=4)}, promises=Promises(image_s=2.1))
    fleet = TaskFleet((executor("e", dit=dit),), (klass,), (path("a", ("dit", "e")),))
    found = simulate_tasks(fleet, demand=at(0.0, 0.45, 0.5), warmup=0.0)
    # Steps of one image take 0.3 s, of two 0.4 s: 0.3, 0.6 | 1.0, 1.4 (first leaves, third joins),
    # 1.8, 2.2 (second leaves), then two steps of the third alone.
    assert found.columns.image_s == pytest.approx([1.4, 2.2 - 0.45, 2.8 - 0.5])
    assert found.klass("a").kept == {"image": pytest.approx(2 / 3)}
    assert found.klass("a").kept_all == pytest.approx(2 / 3)


def speech(*, streamed: bool, talker_streamed: bool = False) -> TaskFleet:
    """10 tokens of text make 20 codes, 5 a piece of 0.4 s of sound."""
    parts: dict[str, PartModel] = {
        "llm": TokenPart(FLAT, kv_tokens=1000),
        "talker": TokenPart(FLAT, kv_tokens=1000, emits=""),
        "vocoder": BatchPart({"a": 0.02}, emits="audio"),
    }
    needs = {
        "llm": PartNeed(),
        "talker": PartNeed(prompt=Amount(per_output=1.0), answer=Amount(per_output=2.0)),
        "vocoder": PartNeed(),
    }
    edges = (
        PartEdge("llm", "talker", chunk_tokens=2 * talker_streamed, streamed=talker_streamed),
        PartEdge("talker", "vocoder", chunk_tokens=5, streamed=streamed),
    )
    devices = tuple(ExecutorSpec(name, "box", "s", {name: part}) for name, part in parts.items())
    klass = ClassSpec(
        "s", "a", 1.0, needs, edges, Promises(ahead_s=1.4), speech=Amount(per_output=0.16)
    )
    way = path("a", ("llm", "llm"), ("talker", "talker"), ("vocoder", "vocoder"))
    return TaskFleet(devices, (klass,), (way,))


def test_speech_comes_in_pieces() -> None:
    found = simulate_tasks(speech(streamed=True), demand=at(0.0), warmup=0.0)
    text, talk = 0.19, 0.29
    # The fifth code is four tokens after the prompt's.
    assert found.columns.first_audio_s[0] == pytest.approx(text + 0.14 + 0.02)
    assert found.columns.e2e_s[0] == pytest.approx(text + talk + 0.02)
    assert found.columns.ahead_s[0] == pytest.approx(1.6 - 0.15)
    assert found.klass("a").kept == {"ahead": 1.0}


def test_the_tail_of_speech_is_where_it_is_min_ahead() -> None:
    found = simulate_tasks(speech(streamed=True), requests=300, seed=1, warmup=0.0)
    ahead = found.klass("a").ahead_s
    assert ahead.p99 == pytest.approx(np.percentile(found.columns.ahead_s, 1))
    assert ahead.mean == pytest.approx(found.columns.ahead_s.mean())
    assert found.columns.ahead_s.min() < found.columns.ahead_s.max()


@pytest.mark.parametrize(("rate", "behind"), [(2.0, False), (5.0, True)])
def test_a_class_that_falls_further_and_further_behind_keeps_nothing(
    rate: float, behind: bool
) -> None:
    # One after the other a talker makes 3.4 requests/s; nothing is promised until the first sound.
    fleet = speech(streamed=True)
    one = TokenPart(FLAT, kv_tokens=1000, max_sequences=1, emits="")
    devices = [
        replace(e, parts={"talker": one}) if e.name == "talker" else e for e in fleet.executors
    ]
    (klass,) = fleet.classes
    klass = replace(klass, rate_per_s=rate, input_tokens=10.0, output_tokens=10.0)
    found = simulate_tasks(replace(fleet, executors=tuple(devices), classes=(klass,)), requests=600)
    # All speech is ahead of its listeners once it has begun.
    assert found.columns.ahead_s.min() > 1.4
    klass_found = found.klass("a")
    assert klass_found.falls_behind is behind
    assert klass_found.kept_all == (0.0 if behind else 1.0)
    assert klass_found.kept == {"ahead": klass_found.kept_all}
    assert sum(kept for kept, _ in klass_found.counts) == (0 if behind else klass_found.arrived)


def test_speech_that_is_not_streamed_is_rendered_at_the_end() -> None:
    found = simulate_tasks(speech(streamed=False), demand=at(0.0), warmup=0.0)
    assert found.columns.first_audio_s[0] == pytest.approx(0.19 + 0.29 + 0.02)
    assert found.columns.e2e_s[0] == pytest.approx(0.19 + 0.29 + 4 * 0.02)


def test_a_streamed_talker_begins_with_the_first_tokens() -> None:
    found = simulate_tasks(speech(streamed=True, talker_streamed=True), demand=at(0.0))
    # The second token of text is there after 0.11 s.
    assert found.columns.first_audio_s[0] == pytest.approx(0.11 + 0.14 + 0.02)


def handed(nic: float, inner: float, *, boxes: tuple[str, str]) -> TaskFleet:
    """Two requests in one encoder batch, 100 bytes each to an llm elsewhere."""
    eye, llm = BatchPart({"a": 0.1}, max_batch=2), TokenPart(FLAT, kv_tokens=1000, max_sequences=1)
    klass = ClassSpec(
        "s",
        "a",
        1.0,
        {"eye": PartNeed(), "llm": PartNeed(answer=Amount(fixed=1.0))},
        (PartEdge("eye", "llm", Amount(fixed=100.0)),),
    )
    devices = (executor("e", boxes[0], eye=eye), executor("f", boxes[1], llm=llm))
    both = tuple(Box(n, nic, 0.01, inner, 0.001) for n in ("x", "y"))
    return TaskFleet(devices, (klass,), (path("a", ("eye", "e"), ("llm", "f")),), both)


def test_messages_take_turns_at_interfaces() -> None:
    found = simulate_tasks(handed(100.0, 1000.0, boxes=("x", "y")), demand=at(0.0, 0.0))
    # 0.2 s encoder, 1 s and 2 s on the wire, 0.01 s latency, 0.1 s prompt.
    assert found.columns.e2e_s == pytest.approx([1.31, 2.31])
    assert found.nic_busy["x"][0] == pytest.approx(2.0 / 2.31)
    assert found.nic_busy["x"][1] == 0.0


def test_a_prompt_keeps_its_cache_until_it_is_where_it_is_wanted() -> None:
    needs = {"llm.prefill": PartNeed(), "llm.decode": PartNeed()}
    edges = (PartEdge("llm.prefill", "llm.decode", Amount(per_input=10.0)),)
    klass = ClassSpec("s", "a", 1.0, needs, edges)
    devices = (
        executor("e", "x", llm__prefill=TokenPart(FLAT, kv_tokens=15, phase="prefill")),
        executor("f", "y", llm__decode=TokenPart(FLAT, kv_tokens=1000, phase="decode")),
    )
    boxes = (Box("x", 100.0), Box("y", 100.0))
    way = path("a", ("llm.prefill", "e"), ("llm.decode", "f"))
    found = simulate_tasks(TaskFleet(devices, (klass,), (way,), boxes), demand=at(0.0, 0.0))
    # 10 tokens of 15: the second prompt begins when the first is gone, 1 s after it was computed.
    assert found.columns.ttft_s == pytest.approx([0.1, 1.2])
    assert found.columns.e2e_s == pytest.approx([1.1 + 0.09, 2.2 + 0.09])
    assert found.columns.tpot_s == pytest.approx((1.0 + 0.09) / 9)


def test_messages_inside_a_box_do_not() -> None:
    found = simulate_tasks(handed(100.0, 1000.0, boxes=("x", "x")), demand=at(0.0, 0.0))
    assert found.columns.e2e_s == pytest.approx([0.2 + 0.101 + 0.1, 0.2 + 0.101 + 0.2])


def test_parts_begin_when_all_that_feeds_them_is_there() -> None:
    eye, ear = BatchPart({"a": 0.3}), BatchPart({"a": 0.7})
    needs = {"eye": PartNeed(), "ear": PartNeed(), "llm": PartNeed()}
    edges = (PartEdge("eye", "llm"), PartEdge("ear", "llm"))
    devices = (
        executor("e", eye=eye),
        executor("f", ear=ear),
        executor("g", llm=TokenPart(FLAT, kv_tokens=1000)),
    )
    klass = ClassSpec("s", "a", 1.0, needs, edges)
    way = path("a", ("eye", "e"), ("ear", "f"), ("llm", "g"))
    found = simulate_tasks(TaskFleet(devices, (klass,), (way,)), demand=at(0.0))
    assert found.columns.ttft_s[0] == pytest.approx(0.8)
    means = {part: spread.mean for part, spread in found.klass("a").part_s.items()}
    assert means == pytest.approx({"eye": 0.3, "ear": 0.7, "llm": 0.19})


def pair(weights: tuple[float, float] = (1.0, 1.0)) -> TaskFleet:
    part = BatchPart({"a": 0.1})
    klass = ClassSpec("s", "a", 10.0, {"eye": PartNeed()})
    steps = (StepSpec(("eye",), (("e", weights[0]), ("f", weights[1]))),)
    devices = (executor("e", eye=part), executor("f", eye=part))
    return TaskFleet(devices, (klass,), (PathSpec("s", "a", 1.0, steps),))


def test_paths_are_dealt_by_weight() -> None:
    errors: dict[Routing, float] = {"dealt": 0.5, "static": 60.0}
    for routing, error in errors.items():
        found = simulate_tasks(pair((3.0, 1.0)), requests=2000, routing=routing)
        steps = [e.parts[0].steps for e in found.executors]
        assert sum(steps) == 2000
        assert steps[0] == pytest.approx(1500, abs=error)


def test_dealing_is_better_than_drawing() -> None:
    def mean_s(routing: Routing) -> float:
        found = simulate_tasks(pair(), requests=15_000, routing=routing, seed=2)
        return found.klass("a").e2e_s.mean or 0.0

    # Drawn: twice M/D/1. Where all take the same time, turns are one queue for both: M/D/2, the best.
    # Whoever has the least work is not always free first: work under way counts in full.
    assert mean_s("static") == pytest.approx(0.15, rel=0.03)
    assert mean_s("dealt") < mean_s("dynamic") < 0.83 * mean_s("static")


def test_asking_is_better_where_requests_differ() -> None:
    part = TokenPart(FLAT, kv_tokens=4000, max_sequences=1)
    klass = ClassSpec("s", "a", 1.0, {"llm": PartNeed()}, output_tokens=100.0, output_cv=1.5)
    devices = (executor("e", llm=part), executor("f", llm=part))
    fleet = TaskFleet(devices, (klass,), (path("a", ("llm", "e+f")),))
    dealt, dynamic = (
        simulate_tasks(fleet, requests=8_000, routing=routing, seed=2).klass("a").e2e_s
        for routing in ROUTINGS
    )
    assert dealt.mean is not None
    assert dynamic.mean is not None
    assert dynamic.mean < 0.9 * dealt.mean


def test_a_control_plane_answers_one_query_at_a_time() -> None:
    # Two executors are asked for every request: 2 x 0.2 s.
    found = simulate_tasks(pair(), requests=500, routing="dynamic", query_s=0.2)
    assert found.queries == 1000
    assert found.requests_per_s == pytest.approx(1 / 0.4, rel=0.02)
    free = simulate_tasks(pair(), requests=500, routing="dynamic")
    assert free.requests_per_s > 3.0 * found.requests_per_s


def test_the_youngest_gives_way_where_prompts_are_admitted() -> None:
    def fleet(admission: str) -> TaskFleet:
        part = TokenPart(FLAT, kv_tokens=110, admission=admission)  # type: ignore[arg-type]
        klass = ClassSpec("s", "a", 1.0, {"llm": PartNeed()})
        return TaskFleet((executor("e", llm=part),), (klass,), (path("a", ("llm", "e")),))

    booked = simulate_tasks(fleet("booked"), demand=at(0.0, 0.0, tokens=40.0))
    eager = simulate_tasks(fleet("prompts"), demand=at(0.0, 0.0, tokens=40.0))
    # 80 tokens each: the second waits for the first, 0.1 + 39 x 0.01 s.
    assert booked.columns.e2e_s == pytest.approx([0.49, 0.98])
    assert booked.gave_way == 0
    # Together from 0.1 s on, both grow by a token a step until 110 = 2 x 55; then the second gives way with
    # 16 tokens, waits, has its prompt and 16 tokens computed again, which yields the 17th, and then 23 more.
    assert eager.gave_way == 1
    assert eager.columns.retries.tolist() == [0, 1]
    assert eager.columns.e2e_s == pytest.approx([0.49, 0.49 + 0.1 + 0.23])
    assert eager.executors[0].parts[0].kv_peak <= 1.0
    assert eager.columns.ttft_s == pytest.approx([0.1, 0.1])


def test_the_same_seed_gives_the_same_run() -> None:
    fleet = interference(shared=True)
    first, again, other = (simulate_tasks(fleet, requests=200, seed=s) for s in (1, 1, 2))
    for name in ("arrival_s", "e2e_s", "ttft_s", "tpot_s", "path"):
        assert np.array_equal(
            getattr(first.columns, name), getattr(again.columns, name), equal_nan=True
        )
    assert first.classes == again.classes
    assert first.executors == again.executors
    assert not np.array_equal(first.columns.arrival_s, other.columns.arrival_s)
