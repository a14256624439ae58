"""Choices between models, shared instances, objective and grid in fleet files: what is read and refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml

from atoll.core.errors import InputError
from atoll.plan.files.choice_schema import ObjectiveSpec
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.footprint import DRAWN, RENT_OBJECTIVES, Drawn, ObjectiveWeights, PowerUse
from atoll.plan.power import FIGURES
from atoll.plan.problem import Problem
from tests.plan.files.test_fleet_file import SMALL, changed

CHOICE = """\
services:
  chat:
    models:
      - {model: llama-3.1-8b, error: 6%}
      - {model: llama-3.1-70b@fp8, error: 2%, min_share: 10%}
    max_error: 4%
    ttft: 1s
    tpot: 50ms
    rate: 2/s
    lengths: 512x128
pool:
  owned:
    lab: {L40S:4: 2}
"""


def with_chat(**fields: object) -> str:
    data = yaml.safe_load(CHOICE)
    data["services"]["chat"].update(fields)
    kept = data["services"]["chat"]
    data["services"]["chat"] = {k: v for k, v in kept.items() if v is not None}
    return yaml.safe_dump(data)


def test_each_model_is_a_service_of_its_own() -> None:
    asked = parse_fleet(CHOICE)
    (choice,) = asked.choices
    assert [s.name for s in asked.services] == ["chat.llama-3.1-70b-fp8", "chat.llama-3.1-8b"]
    assert {s.model for s in asked.services} == {"llama-3.1-8b", "llama-3.1-70b@fp8"}
    assert {(s.ttft_s, s.tpot_s, s.rate_per_s, s.lengths.input_mean) for s in asked.services} == {
        (1.0, 0.05, 2.0, 512.0)
    }
    assert (choice.name, choice.max_error, choice.sticky) == ("chat", 0.04, False)
    assert choice.errors == {"llama-3.1-8b": 0.06, "llama-3.1-70b@fp8": 0.02}
    assert choice.min_share == {"llama-3.1-70b@fp8": 0.1}
    assert Problem.from_json(asked.to_json()) == asked


def test_all_other_fields_hold_for_every_model() -> None:
    asked = parse_fleet(
        with_chat(
            sticky=True, only=["L40S"], headroom=1.5, engine={"kv_cache_dtype": "fp8"}, priority=2.0
        )
    )
    assert asked.choices[0].sticky
    for each in asked.services:
        assert (each.only, each.headroom, each.priority) == (("L40S",), 1.5, 2.0)
        assert "kv=fp8" in each.model
    # The floor is of the model as it is served.
    assert list(asked.choices[0].min_share) == ["llama-3.1-70b@fp8,kv=fp8"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            with_chat(max_error="1%"),
            ("chat.max_error", "every model errs more than 1%, the best 2%", "allow 2%"),
        ),
        (
            with_chat(
                max_error="3%",
                models=[
                    {"model": "llama-3.1-8b", "error": "6%", "min_share": "50%"},
                    {"model": "qwen3-32b", "error": "2%"},
                ],
            ),
            ("chat.max_error", "err 4% at best", "lower min_share"),
        ),
        (
            with_chat(
                models=[
                    {"model": "llama-3.1-8b", "error": "6%", "min_share": "60%"},
                    {"model": "qwen3-32b", "error": "2%", "min_share": "50%"},
                ]
            ),
            ("chat.models", "add up to 110%", "100% at most"),
        ),
        (
            with_chat(
                models=[
                    {"model": "llama-3.1-8b", "error": "6%"},
                    {"model": "llama-3.1-8b", "error": "2%"},
                ]
            ),
            ("chat.models.1.model", "llama-3.1-8b is named twice", "MODEL@fp8"),
        ),
        (with_chat(model="llama-3.1-8b"), ("chat.model", "said twice", "leave out 'models'")),
        (
            with_chat(classes="multimodal", lengths=None),
            ("chat.classes", "have one model", "'lengths' instead"),
        ),
        (with_chat(models=[]), ("chat.models",)),
        (with_chat(models=[{"model": "llama-3.1-8b"}]), ("chat.models.0.error", "required")),
        (
            with_chat(models=[{"model": "llama-3.1-8b", "error": 6}]),
            ("chat.models.0.error", "a share of 6 is more than all", "write 6% or 0.06"),
        ),
        (
            with_chat(models=[{"model": "llama-3.1-8x", "error": "6%"}]),
            ("chat.models.0.model", "llama-3.1-8b"),
        ),
        (
            with_chat(
                lengths="100000x1000",
                models=[
                    {"model": "llama-3.1-8b", "error": "2%"},
                    {"model": "qwen3-32b", "error": "3%"},
                ],
            ),
            ("chat.lengths", "(qwen3-32b)", "shorter lengths"),
        ),
        (
            CHOICE.replace("pool:", "  chat.llama-3.1-8b: {model: llama-3.1-8b, ttft: 1s, tpot: 50ms, "
            "rate: 1/s, lengths: 9x9}\npool:"),
            ("chat.llama-3.1-8b", "also a model of a choice", "another name"),
        ),
        (SMALL.replace("ttft", "max_error: 3%\n    ttft"), ("chat.max_error", "give 'models'")),
        (SMALL.replace("ttft", "sticky: true\n    ttft"), ("chat.sticky", "give 'models'")),
    ],
)  # fmt: skip
def test_one_line_says_what_is_wrong_and_what_to_do(text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        parse_fleet(text, path="fleet.yaml")
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("fleet.yaml:"), said
    for part in parts:
        assert part in said, said


def on_a_cluster(text: str) -> str:
    data: dict[str, Any] = yaml.safe_load(text)
    del data["pool"]
    data["cluster"] = {
        "nodes": {"lab": {"L40S:1": 2}},
        "links": [{"between": ["*", "*"], "bandwidth": "10Gbit/s"}],
    }
    return yaml.safe_dump(data)


def test_fixed_clusters_have_no_choices() -> None:
    with pytest.raises(InputError, match=r"chat.models: choices .*fix: .*pool.owned"):
        parse_fleet(on_a_cluster(CHOICE))
    with pytest.raises(InputError, match=r"share_instances: .*fix: .*pool.owned"):
        parse_fleet(on_a_cluster(changed(share_instances=True)))


# Sharing


def test_services_of_one_model_may_share() -> None:
    data = yaml.safe_load(CHOICE)
    data["services"]["draft"] = yaml.safe_load(SMALL)["services"]["chat"]
    alone = parse_fleet(yaml.safe_dump(data))
    assert [c.name for c in alone.choices] == ["chat"]
    data["share_instances"] = True
    asked = parse_fleet(yaml.safe_dump(data))
    assert [c.name for c in asked.choices] == ["chat", "draft"]
    assert asked.service("shared.llama-3.1-8b").rate_per_s == 4.0
    assert asked.service("draft.own").rate_per_s == 2.0
    assert len(asked.services) == len(alone.services) + 1


def test_nobody_to_share_with_changes_nothing() -> None:
    assert parse_fleet(changed(share_instances=True)) == parse_fleet(changed())


# Objective and grid


@pytest.mark.parametrize(
    ("objective", "weights"),
    [
        ("cost", ObjectiveWeights()),
        ("energy", ObjectiveWeights(usd=0, usd_per_kwh=1)),
        ("carbon", ObjectiveWeights(usd=0, usd_per_tonne=1)),
        ({"energy": "$0.2/kWh"}, ObjectiveWeights(usd=1, usd_per_kwh=0.2)),
        (
            {"cost": 2, "energy": "300 USD/MWh", "carbon": "$0.1/kg"},
            ObjectiveWeights(usd=2, usd_per_kwh=0.3, usd_per_tonne=100),
        ),
    ],
)
def test_what_counts(objective: object, weights: ObjectiveWeights) -> None:
    asked = parse_fleet(changed(objective=objective, grid={"default": "300 g/kWh"}))
    assert asked.weights.model_dump() == pytest.approx(weights.model_dump())


def test_the_grid() -> None:
    grid = {"aws/us-east-2": "0.4 kg/kWh", "default": 300, "pue": 1.2}
    asked = parse_fleet(changed(grid=grid)).grid
    assert (asked.intensity("aws/us-east-2"), asked.intensity("lab"), asked.pue) == (400, 300, 1.2)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"objective": "price"}, ("objective", "carbon")),
        ({"objective": {"cost": 0}}, ("objective", "nothing counts")),
        ({"objective": {"energy": "$0.2"}}, ("objective.energy", "$0.2/kWh")),
        ({"objective": {"carbon": "$9/kWh"}}, ("objective.carbon", "$100/t")),
        ({"objective": "carbon"}, ("objective", "emits in aws/us-east-2", "grid: {default")),
        (
            {"objective": "carbon", "grid": {"aws/us-east-2": "400 g/kWh"}},
            ("objective", "emits in lab"),
        ),
        ({"grid": {"aws/us-west-9": "400 g/kWh"}}, ("grid.aws/us-west-9", "us-east-2")),
        ({"grid": {"aws/us-east-2": "400 g"}}, ("grid.aws/us-east-2", "400 g/kWh")),
        ({"grid": {"pue": 0.9}}, ("grid.pue", "1")),
    ],
)
def test_what_does_not_count(sections: dict[str, object], parts: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        parse_fleet(changed(**sections), path="fleet.yaml")
    said = str(caught.value)
    assert said.startswith("fleet.yaml:"), said
    for part in parts:
        assert part in said, said


def test_what_is_left_out_keeps_the_hash() -> None:
    plain = parse_fleet(SMALL)
    assert parse_fleet(changed(objective="cost", share_instances=False, grid={})) == plain
    dumped = plain.model_dump()
    assert not {"choices", "weights", "grid"} & set(dumped)


def test_an_error_that_is_missed_by_a_hair_is_refused_by_its_field() -> None:
    with pytest.raises(InputError, match=r"max_error: every model errs more than 1\.99999%"):
        parse_fleet(with_chat(max_error=0.0199999))


def test_names_leave_room_for_those_of_ways() -> None:
    data = yaml.safe_load(CHOICE)
    data["services"] = {"x" * 195: data["services"]["chat"]}
    with pytest.raises(InputError, match=r"a name of 208 characters, 200 at most .*shorter name"):
        parse_fleet(yaml.safe_dump(data))
    data = yaml.safe_load(CHOICE) | {"share_instances": True}
    plain = {"model": "llama-3.1-8b", "ttft": "1s", "tpot": "50ms", "rate": "1/s"}
    data["services"]["x" * 198] = plain | {"lengths": "512x128"}
    with pytest.raises(InputError, match="a name of 202 characters, 200 at most"):
        parse_fleet(yaml.safe_dump(data))


def test_every_drawn_objective_has_a_price_a_figure_and_a_place_in_the_file() -> None:
    assert set(DRAWN) == set(get_args(Drawn))
    for name, drawn in DRAWN.items():
        assert drawn.weight in ObjectiveWeights.model_fields
        assert drawn.figure in PowerUse.model_fields
        assert drawn.figure in FIGURES
        assert name in ObjectiveSpec.model_fields
        assert drawn.parse_price(drawn.price_form.format(2.0)) == 2.0
        assert RENT_OBJECTIVES[name].price(drawn) == 1.0
        assert not RENT_OBJECTIVES[name].rent_only
