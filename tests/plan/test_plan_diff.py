from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.choice import ModelMix
from atoll.plan.plan import Plan
from atoll.plan.plan_diff import PlanDiff, diff
from atoll.solve.assembly import NewInstance
from tests.plan.boxes import CHOSEN as BOX_CHOSEN
from tests.plan.boxes import boxes
from tests.plan.builders import (
    CHOSEN,
    EAST,
    LAYERS,
    edit,
    edit_node,
    few,
    layout,
    plan_of,
    rent,
    small,
)
from tests.plan.builders import problem as problem_of

ASKED, MADE = small()
choices = st.lists(st.sampled_from(CHOSEN), max_size=6)


def made_of(chosen: list[NewInstance]) -> Plan:
    offers = [o.model_copy(update={"available": 99}) for o in ASKED.offers]
    return plan_of(problem_of(offers=offers), *chosen)


def test_a_plan_does_not_differ_from_itself() -> None:
    change = diff(MADE, MADE)
    assert change.empty
    assert len(change.kept) == 5
    assert change.started == change.stopped == ()
    assert change.rented == change.returned == ()
    assert change.text() == "nothing changes"


@few
@given(choices)
def test_any_plan_does_not_differ_from_itself(chosen: list[NewInstance]) -> None:
    assert diff(made_of(chosen), made_of(chosen)).empty


@few
@given(choices, choices)
def test_there_and_back(one: list[NewInstance], other: list[NewInstance]) -> None:
    before, after = made_of(one), made_of(other)
    there, back = diff(before, after), diff(after, before)
    pairs = {(k.before, k.after, k.relaid) for k in there.kept}
    assert pairs == {(k.after, k.before, k.relaid) for k in back.kept}
    assert (there.started, there.rented) == (back.stopped, back.returned)
    assert there.empty == back.empty
    assert len(there.kept) + len(there.started) == len(after.instances)
    assert len(there.kept) + len(there.stopped) == len(before.instances)
    # Nothing is started here that could have been kept.
    assert not {(s.role, s.region, s.layout) for s in there.started} & {
        (s.role, s.region, s.layout) for s in there.stopped
    }
    rented = after.count_nodes() - before.count_nodes()
    assert {(n.region, n.node_type, n.market): n.count for n in there.rented} == dict(rented)


@few
@given(choices, choices)
def test_json_round_trip(one: list[NewInstance], other: list[NewInstance]) -> None:
    change = diff(made_of(one), made_of(other))
    assert PlanDiff.from_json(change.to_json()) == change


def test_other_layers_on_the_same_nodes() -> None:
    pipeline = "chat-prefill-0"
    moved = edit_node(edit_node(MADE, pipeline, "n0", end=10), pipeline, "n1", end=10)
    moved = edit_node(moved, pipeline, "n2", start=10)
    change = diff(MADE, moved)
    assert [k.before for k in change.kept if k.relaid] == [pipeline]
    assert not change.empty
    assert "~ chat-prefill-0: starts again: same nodes, other layers" in change.text()


def test_another_market_is_another_node() -> None:
    spot = edit_node(MADE, "chat-decode-0", "n0", market="spot")
    change = diff(MADE, spot)
    assert [s.id for s in change.started] == ["chat-decode-0"]
    assert [(n.market, n.count) for n in change.rented] == [("spot", 1)]
    assert [(n.market, n.count) for n in change.returned] == [("on-demand", 1)]


def test_equal_instances_with_other_names_are_kept() -> None:
    renamed = edit(MADE, "chat-decode-1", id="zz")
    pairs = [(k.before, k.after) for k in diff(MADE, renamed).kept]
    assert ("chat-decode-1", "zz") in pairs


def test_a_slice_on_other_gpus_is_moved() -> None:
    asked, made = boxes()
    assert diff(made, made).empty
    elsewhere = edit_node(made, "chat-both-0", "n0", gpu_ids=(7,))
    change = diff(made, elsewhere)
    assert [(k.before, k.relaid) for k in change.kept if k.moved] == [("chat-both-0", False)]
    assert "~ chat-both-0: starts again: same nodes, other GPUs" in change.text()
    less = plan_of(asked, *BOX_CHOSEN[:2], *BOX_CHOSEN[3:])
    assert diff(made, less).idle_after == 2 * diff(made, less).idle_before
    assert "idle GPUs: $2.00/h -> $4.00/h (+$2.00/h, +100.0%)" in diff(made, less).text()


def test_the_text_says_what_to_do() -> None:
    bigger = NewInstance(
        "chat/llm/decode",
        EAST,
        layout((0, 16, ("L40S:1",)), (16, LAYERS, ("L4:1",))),
        rent("spot", L40S=1) | rent(L4=1),
    )
    after = plan_of(ASKED, *CHOSEN[:1], *CHOSEN[2:], bigger)
    text = diff(MADE, after).text().splitlines()
    assert text[0] == "$6.10/h -> $5.90/h (-$0.20/h, -3.3%); 4 instances stay"
    assert text[1].startswith(
        "+ chat-decode-0 in aws/us-east-2: [0, 16) L40S:1 spot | [16, 32) L4:1, "
    )
    assert text[2].startswith("- chat-decode-0 in aws/us-east-2: [0, 32) L40S:1, ")
    assert "rent 1x L40S:1 (spot) in aws/us-east-2" in text
    assert "return 1x L40S:1 (on-demand) in aws/us-east-2" in text
    assert text[-1].startswith("chat: $5.40/h -> $5.20/h (-$0.20/h, -3.7%); decode ")


def test_shares_of_models_that_change_are_a_change() -> None:
    def mixed(small: float) -> Plan:
        mix = ModelMix(
            name="chat",
            shares={"chat.a": small, "chat.b": 0.75 - small, "shared.b": 0.25},
            models={"chat.a": "a", "chat.b": "b", "shared.b": "b"},
            error=0.06 * small + 0.02 * (1.0 - small),
        )
        return MADE.model_copy(update={"mixes": (mix,)})

    assert diff(mixed(0.5), mixed(0.5)).empty
    change = diff(mixed(0.5), mixed(0.25))
    assert not change.empty
    said = "models of chat: a 50% -> 25%, b 50% -> 75%; errs 4% -> 3%"
    assert change.text().splitlines()[-1] == said
    (gone,) = diff(mixed(0.5), MADE).mixes
    assert gone.text == "chat: a 50% -> 0%, b 50% -> 0%"
