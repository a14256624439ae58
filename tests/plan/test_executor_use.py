"""How a plan uses its executors, against what the validator works out by itself."""

from __future__ import annotations

import pytest

from atoll.perf.components.executor import ExecutorWork
from atoll.plan.executor_use import ExecutorPlanUse, executor_use, pair_flows
from atoll.plan.executors import node_work
from atoll.plan.plan import Plan
from atoll.plan.validate.check import validate
from atoll.plan.validate.validate_executors import executor_loads, machine_traffic
from tests.plan import builders, graphs

ASKED, MADE = graphs.problem(), graphs.plan()
CATALOG = ASKED.catalog()


def use_of(plan: Plan) -> ExecutorPlanUse:
    return executor_use(plan, ASKED, CATALOG)


def test_the_plan_by_hand_holds() -> None:
    assert not validate(MADE, ASKED)


def test_busy_shares_are_those_of_the_validator() -> None:
    works: dict[tuple[str, str], ExecutorWork] = {}
    for one in MADE.instances:
        work = node_work(ASKED, CATALOG, ASKED.service(one.service), one)
        assert work is not None
        works[one.id, one.service] = work
    busy, passing = executor_loads(MADE, ASKED, works)
    for use in use_of(MADE).executors:
        assert use.busy == pytest.approx(busy[use.id, use.service])
        assert sum(use.busy_by_part.values()) == pytest.approx(busy[use.id, use.service])
        assert use.requests_per_s == pytest.approx(passing[use.id, use.service])


def test_bytes_between_machines_are_those_of_the_validator() -> None:
    executors = {i.id: i for i in MADE.instances}
    traffic = machine_traffic(MADE, ASKED, CATALOG, executors)
    sent = sum(out for _, _, out, _ in traffic.values())
    flows = pair_flows(MADE, ASKED, CATALOG)
    assert sum(f.bytes_per_s for f in flows if f.between_machines) == pytest.approx(sent)
    inside = [f for f in flows if not f.between_machines]
    assert [(f.src, f.dst) for f in inside] == [("think-0", "speak-0")]
    assert inside[0].requests_per_s == pytest.approx(0.4)


def test_handovers_are_by_kind_of_executor() -> None:
    hands = {hand.src: hand for hand in use_of(MADE).handovers}
    assert set(hands) == {"vision on T4:1", "audio+llm on L40S:1"}
    seen, thought = hands["vision on T4:1"], hands["audio+llm on L40S:1"]
    assert seen.dst == "audio+llm on L40S:1"
    assert seen.requests_per_s == pytest.approx(0.6)
    assert seen.network_bytes_per_s == seen.bytes_per_s > 0
    assert thought.network_bytes_per_s == 0 < thought.bytes_per_s


def test_kv_tokens_are_of_executors_with_an_llm() -> None:
    tokens = {use.id: use.kv_tokens for use in use_of(MADE).executors}
    assert {name for name, room in tokens.items() if room} == {"think-0"}


def test_paths_are_told_with_kinds_and_numbers() -> None:
    classes = {c.klass: c for c in use_of(MADE).classes}
    assert classes[graphs.SCANS].paths[0].text == "vision on 2x T4:1 -> llm on L40S:1"
    assert classes["text"].requests_per_s == pytest.approx(1.0)


def test_times_are_within_promises_and_only_where_something_is_wanted() -> None:
    classes = {c.klass: c for c in use_of(MADE).classes}
    scans, spoken, drawn = (classes[n] for n in (graphs.SCANS, graphs.SPOKEN, graphs.DRAWN))
    assert scans.ttft_s is not None
    assert scans.first_text_s is not None
    assert classes["text"].first_text_s is not None
    assert 0 < classes["text"].first_text_s < scans.first_text_s <= scans.ttft_s
    assert scans.speech_made_s is scans.image_made_s is None
    assert spoken.speech_within_s == pytest.approx(11.0)
    assert spoken.speech_made_s is not None
    assert 0 < spoken.speech_made_s < 11.0
    assert drawn.first_text_s is None
    assert drawn.image_made_s is not None
    assert 0 < drawn.image_made_s <= 60.0


def test_the_busiest_part_comes_first_and_idle_ones_last() -> None:
    idle = graphs.executor("idle-0", "omni", "vision", "T4:1", 0.5)
    parts = use_of(MADE.model_copy(update={"instances": (*MADE.instances, idle)})).parts()
    assert parts[0].busy == max(part.busy for part in parts)
    assert [part.busy for part in parts] == sorted((part.busy for part in parts), reverse=True)
    seen = next(part for part in parts if part.part == "vision")
    assert seen.executors == 3
    assert seen.own == pytest.approx(seen.seconds_per_s / 3)


def test_what_does_not_fit_has_no_figures() -> None:
    tight = graphs.executor("think-0", "omni", "audio+llm", "T4:1", 0.5)
    others = tuple(one for one in MADE.instances if one.id != "think-0")
    use = use_of(MADE.model_copy(update={"instances": (*others, tight)}))
    thinking = next(one for one in use.executors if one.id == "think-0")
    assert thinking.busy is None
    assert all(c.first_text_s is None for c in use.classes_of("omni"))


def test_paths_to_nowhere_are_left_out() -> None:
    lost = (
        graphs.path("omni", "nobody's", 1.0, ("llm", "think-0")),
        graphs.path("omni", "text", 1.0, ("llm", "gone-0")),
    )
    use = use_of(MADE.model_copy(update={"paths": lost}))
    assert use.handovers == ()
    text = next(c for c in use.classes if c.klass == "text")
    assert text.paths[0].text == "llm on gone-0"
    assert text.first_text_s is None


def test_plain_plans_have_none() -> None:
    asked, made = builders.small()
    assert executor_use(made, asked, asked.catalog()) == ExecutorPlanUse()
