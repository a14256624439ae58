"""Groups of requests that must each keep their promises: which there are, and what is said of small ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import InputError
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.kept_groups import (
    KeptGroup,
    RequestGroup,
    enough_requests,
    judge_group,
    judge_groups,
    min_share,
    pool_groups,
)
from atoll.plan.plan import KeptPromise
from atoll.plan.problem import Lengths, Service
from atoll.plan.request_groups import group_requests, length_ranges, list_groups
from atoll.prove.kept import KeptSample, KeptShares, find_worst, look_at, requests_to_judge
from atoll.sim.problem_demand import sample_lengths
from atoll.solve.registry import solve
from atoll.workload.lengths import LengthMix
from tests.plan.validate.mutants import families

POOL = """
pool: {offers: [{region: here, node_type: "L40S:1", available: 8, usd_per_hour: 1.9}]}
"""
TWO = """
services:
  chat:
    model: qwen3-8b
    rate: 4/s
    ttft: 1s
    tpot: 60ms
    attainment: 90%
    classes:
      text (short): {share: 95%, input: 300, output: 200}
      text (long): {share: 5%, input: 8000, output: 300, attainment: 80%}
"""
SPEECH = """
services:
  assistant:
    model: qwen2.5-omni-7b
    rate: 4/s
    ttft: 3s
    tpot: 100ms
    classes:
      text: {share: 96%, input: 400, output: 150}
      audio -> audio: {share: 4%, input: 50, output: 60, audio: 8s, speech: 12s, ahead: 1s}
"""


def read(text: str) -> Service:
    return parse_fleet(text + POOL).services[0]


def group(kept: float, requests: int, target: float = 0.95, **each: float) -> KeptGroup:
    return judge_group(RequestGroup("speech", target), [(round(kept * requests), requests)], each)


def test_text_classes_under_one_promise_are_a_plain_service_that_tells_them_apart() -> None:
    service = read(TWO)
    assert not service.is_graph
    assert [(g.name, g.target) for g in list_groups(service)] == [
        ("text (long)", 0.8),
        ("text (short)", 0.9),
    ]
    assert service.target == pytest.approx(0.95 * 0.9 + 0.05 * 0.8)
    # The longest prompts that must keep the promise are those of the long class, though they are few.
    assert service.lengths.input_tail == pytest.approx(8000, rel=1e-3)
    prompts, answers = sample_lengths(service).draw(np.random.default_rng(0), 20_000)
    assert set(prompts.tolist()) == {300, 8000}
    assert set(answers.tolist()) == {200, 300}
    assert np.mean(prompts == 8000) == pytest.approx(0.05, abs=0.005)
    assert sample_lengths(service).mix().input_mean == pytest.approx(service.lengths.input_mean)


def test_classes_of_media_are_groups_and_one_share_for_all_replaces_theirs() -> None:
    service = read(SPEECH.replace("ahead: 1s", "ahead: 1s, attainment: 99%"))
    assert {g.name: g.target for g in list_groups(service)} == {
        "audio -> audio": 0.99,
        "text": 0.95,
    }
    assert service.target == pytest.approx(0.96 * 0.95 + 0.04 * 0.99)
    assert {g.target for g in list_groups(service.with_attainment(0.9))} == {0.9}


def test_a_problem_without_groups_is_written_as_before() -> None:
    plain = read(SPEECH).to_json()
    assert "attainment" not in plain
    assert "length_deciles" not in plain
    assert "text_classes" not in plain


def test_deciles_are_for_text_alone() -> None:
    with pytest.raises(InputError, match="deciles"):
        read(SPEECH + "    length_deciles: true\n")
    service = read(TWO + "    length_deciles: true\n")
    assert [g.name for g in list_groups(service) if g.kind == "length"][-1] == "length decile 10"


def test_requests_fall_into_their_class_and_their_decile() -> None:
    service = read(TWO).model_copy(update={"length_deciles": True})
    prompts = np.arange(1, 1001)
    klass = (prompts > 950).astype(np.int16)
    found = {
        one.name: mine
        for one, mine in group_requests(service, ("text (short)", "text (long)"), klass, prompts)
    }
    assert found["text (long)"].sum() == 50
    assert found["text (short)"].sum() == 950
    assert found["length decile 10"].sum() == 100
    assert prompts[found["length decile 10"]].min() == 901
    # Classes of a workload that the fleet file does not know are judged at the share of the service.
    others = group_requests(service, ("text", "image"), klass, None)
    assert [(one.name, one.target) for one, _ in others if one.kind == "class"] == [
        ("image", 0.9),
        ("text", 0.9),
    ]


def test_prompts_of_one_length_are_of_one_decile() -> None:
    service = read(TWO).model_copy(update={"length_deciles": True, "text_classes": ()})
    same = np.full(100, 512)
    found = group_requests(service, ("text",), np.zeros(100, np.int16), same)
    assert [int(mine.sum()) for _, mine in found] == [100]


@pytest.mark.parametrize(
    ("kept", "requests", "is_kept"),
    [
        (0.09, 40, False),  # few, and far below
        (0.92, 50, None),  # few, and as likely above as below
        (1.0, 20, None),  # few that all keep it prove little
        (1.0, 400, True),
        (0.96, 1000, True),
        (0.94, 1000, False),
    ],
)
def test_few_requests_are_not_called_kept_or_broken(
    kept: float, requests: int, is_kept: bool | None
) -> None:
    found = group(kept, requests)
    assert found.is_kept is is_kept
    assert found.low <= kept <= found.high


def test_a_group_of_nobody_is_not_judged() -> None:
    found = judge_group(RequestGroup("speech", 0.95), [], {})
    assert (found.kept, found.requests, found.low, found.high) == (None, 0, 0.0, 1.0)
    assert found.is_kept is None


def test_runs_that_differ_widen_the_interval() -> None:
    alike = judge_group(RequestGroup("speech", 0.95), [(95, 100)] * 10, {})
    apart = judge_group(RequestGroup("speech", 0.95), [(100, 100), (90, 100)] * 5, {})
    assert alike.kept == apart.kept == 0.95
    assert apart.high - apart.low > 1.5 * (alike.high - alike.low)


def test_one_run_is_judged_by_its_parts_and_runs_are_pooled() -> None:
    kept = np.tile([True] * 19 + [False], 50)
    everyone = np.ones(1000, np.bool_)
    own = RequestGroup("speech", 0.95)
    (once,) = judge_groups([(own, everyone)], everyone, kept, {"ttft": (everyone, kept)})
    assert (once.kept, once.requests, once.each) == (0.95, 1000, {"ttft": 0.95})
    (twice,) = pool_groups([[once], [once.model_copy(update={"kept": 0.85, "each": {}})]])
    assert (twice.kept, twice.requests) == (0.9, 2000)
    assert twice.each == {"ttft": 0.95}


def test_a_plan_is_looked_at_class_by_class() -> None:
    """One GPU answers short prompts in time, and long ones wait for each other."""
    problem = parse_fleet(TWO.replace("attainment: 80%", "attainment: 95%") + POOL)
    (found,) = look_at(solve(problem), problem, problem.catalog())
    groups = {one.name: one for one in found.groups}
    assert set(groups) == {"text (short)", "text (long)"}
    assert groups["text (long)"].requests > 1000
    assert (groups["text (long)"].kept or 0.0) < (groups["text (short)"].kept or 0.0)
    total = sum(one.requests for one in groups.values())
    mean = sum(one.requests * (one.kept or 0.0) for one in groups.values()) / total
    assert mean == pytest.approx(found.kept, abs=0.005)


@pytest.mark.slow
def test_every_model_of_a_choice_has_a_share_of_its_own() -> None:
    problem, plan = families()["choice"]
    settled = problem.settled(plan.mixes)
    found = look_at(plan, settled, settled.catalog())
    assert len(plan.mixes[0].shares) == 2
    assert {each.service for each in found} > set(plan.mixes[0].shares)
    assert {each.target for each in found} == {settled.services[0].attainment}


def promise(**update: Any) -> KeptPromise:
    shares = {"kept": 0.97, "low": 0.96, "high": 0.98, "kept_ttft": 0.98, "kept_tpot": 0.99}
    return KeptPromise(**{"service": "a", "target": 0.95, **shares, **update})


def test_a_promise_is_broken_with_that_to_one_class() -> None:
    assert promise().is_surely_kept
    rare = promise(groups=(group(0.09, 400, ahead=0.09),))
    assert not rare.is_kept
    assert rare.margin == pytest.approx(0.09 - 0.95)
    assert [one.name for one in rare.short_groups] == ["speech"]
    # What is too small to judge breaks nothing, and what may be just above is not surely kept.
    assert promise(groups=(group(0.92, 50),)).is_kept
    near = promise(groups=(group(0.955, 1000),))
    assert near.is_kept
    assert not near.is_surely_kept
    assert rare.lower(0.05).is_kept


def test_the_group_that_falls_shortest_stands_for_its_service() -> None:
    groups = (
        group(0.99, 5000, 0.95, ttft=0.99, tpot=1.0),
        group(0.8, 5000, 0.9, ttft=0.8, tpot=0.99),
    )
    worst = find_worst(KeptShares(0.97, 0.98, 0.99, groups), 0.95)
    # It loses twice what it may.
    assert (worst.both, worst.ttft, worst.tpot) == pytest.approx((0.9, 0.9, 0.995))
    assert min_share(0.97, 0.95, groups) == pytest.approx(0.9)
    assert min_share(0.93, 0.95, groups[:1]) == 0.93


def test_a_rare_class_is_simulated_for_longer() -> None:
    assert requests_to_judge(read(SPEECH)) == pytest.approx(
        enough_requests(0.95) / 5 / 0.04, rel=0.01
    )
    rarer = SPEECH.replace("96%", "99.9%").replace("4%", "0.1%")
    assert requests_to_judge(read(rarer)) > 50_000


def test_a_sample_goes_on_while_a_group_is_in_doubt() -> None:
    near, far = group(0.955, 400), group(0.5, 400)
    runs = (KeptShares(1.0, 1.0, 1.0, (near,)),) * 3
    assert not KeptSample(runs).is_sure(0.95)
    short = KeptSample((KeptShares(1.0, 1.0, 1.0, (far,)),) * 3)
    assert short.is_sure(0.95)
    assert short.is_surely_short(0.95)
    assert short.is_hopeless(0.95)


def test_lengths_tell_classes_apart_whose_prompts_are() -> None:
    short, long = length_ranges(read(TWO))
    assert [(group.name, group.target) for group, _ in (short, long)] == [
        ("text (short)", 0.9),
        ("text (long)", 0.8),
    ]
    assert short[1] == pytest.approx((300 * 8000) ** 0.5)
    assert math.isinf(long[1])
    spread = TWO.replace("input: 300", "input: 300, input_cv: 0.5").replace(
        "input: 8000", "input: 8000, input_cv: 0.5"
    )
    ((_, edge), _) = length_ranges(read(spread))
    rng = np.random.default_rng(1)
    for mean, beyond in ((300.0, True), (8000.0, False)):
        tokens = rng.lognormal(
            math.log(mean) - 0.5 * math.log(1.25), math.log(1.25) ** 0.5, 100_000
        )
        assert ((tokens > edge) == beyond).mean() < 0.01
    # Prompts that are often as long as those of the other say nothing.
    assert length_ranges(read(spread.replace("input: 8000", "input: 900"))) == ()
    assert length_ranges(read(SPEECH)) == ()


def test_deciles_hold_a_tenth_of_the_stated_lengths() -> None:
    service = read(TWO).model_copy(update={"length_deciles": True, "text_classes": ()})
    ranges = length_ranges(service)
    assert [group.name for group, _ in ranges] == [f"length decile {n}" for n in range(1, 11)]
    prompts, _ = sample_lengths(service).draw(np.random.default_rng(1), 100_000)
    edges = [0.0, *(edge for _, edge in ranges)]
    counts, _ = np.histogram(prompts, edges)
    assert counts / len(prompts) == pytest.approx(np.full(10, 0.1), abs=0.01)
    same = Lengths.of(LengthMix.fixed(600.0, 120.0))
    assert length_ranges(service.model_copy(update={"lengths": same})) == ()
