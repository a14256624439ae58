"""Choices between models: mixes, and what the validator makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.plan.choice import NO_LEVEL, Choice, ModelMix, Variant, levels_of
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.plan.validate.validate_choice import check_mixes
from tests.plan.builders import problem, service

ERRORS = {"a.small": 0.06, "a.large": 0.02, "shared.mid": 0.04}


def choice(name: str = "a", **changes: object) -> Choice:
    own = {
        "variants": (
            Variant(service=f"{name}.small", model="small", error=0.06),
            Variant(service=f"{name}.large", model="large", error=0.02),
            Variant(service="shared.mid", model="mid", error=0.04),
        ),
        "max_error": 0.05,
        "min_share": {"large": 0.1},
    }
    return Choice.model_validate({"name": name, **own, **changes})


def asked(*choices: Choice) -> Problem:
    names = sorted({v.service for each in choices for v in each.variants})
    return problem(services=tuple(service(name) for name in names), choices=choices)


def plan_with(*mixes: ModelMix) -> Plan:
    """A plan with these mixes, also such as would not be read."""
    made = Plan(
        problem_hash="x",
        problem_name="fleet",
        usd_per_hour=0.0,
        status="infeasible",
        solver="optimal",
    )
    return made.model_copy(update={"mixes": mixes})


def rules(plan: Plan, given_problem: Problem) -> set[str]:
    return {found.rule for found in check_mixes(plan, given_problem)}


@given(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3).filter(lambda y: sum(y) > 1e-3))
def test_a_mix_adds_up_and_errs_as_its_shares_do(levels: list[float]) -> None:
    given_choice = choice(max_error=None, min_share={})
    named = {v.service: y for v, y in zip(given_choice.variants, levels, strict=True)}
    mix = ModelMix.of(given_choice, named)
    assert sum(mix.shares.values()) == pytest.approx(1.0)
    assert mix.error == pytest.approx(sum(y * ERRORS[name] for name, y in mix.shares.items()))
    assert sum(mix.model_shares.values()) == pytest.approx(1.0)
    assert set(mix.shares) == {name for name, y in named.items() if y > NO_LEVEL}
    assert not rules(plan_with(mix), asked(given_choice))
    assert ModelMix.model_validate_json(mix.model_dump_json()) == mix


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_the_validator_knows_the_conditions(small: float, mid: float) -> None:
    mid = min(mid, 1.0 - small)
    levels = {"a.small": small, "shared.mid": mid, "a.large": 1.0 - small - mid}
    given_choice = choice()
    mix = ModelMix.of(given_choice, levels)
    error = sum(y * ERRORS[name] for name, y in levels.items())
    wanted = set()
    if error > 0.05 + 2e-6:
        wanted.add("error")
    if levels["a.large"] < 0.1 - 2e-6:
        wanted.add("floor")
    near = abs(error - 0.05) < 3e-6 or abs(levels["a.large"] - 0.1) < 3e-6
    assert near or rules(plan_with(mix), asked(given_choice)) == wanted


def test_what_is_wrong_with_mixes_is_found() -> None:
    first, second = choice("a"), choice("b")
    given_problem = asked(first, second)
    good = {"a.large": 0.5, "shared.mid": 0.5}
    a = ModelMix.of(first, good)
    b = ModelMix.of(second, {"b.large": 0.5, "shared.mid": 0.5})
    assert not rules(plan_with(a, b), given_problem)
    assert rules(plan_with(a), given_problem) == {"mix"}
    assert rules(plan_with(a, a, b), given_problem) == {"mix"}
    other = ModelMix.of(second, {"b.large": 0.7, "shared.mid": 0.3})
    assert rules(plan_with(a, other), given_problem) == {"mix"}
    for changes, rule in (
        ({"error": 0.01}, "error"),
        ({"max_error": 0.5}, "error"),
        ({"sticky": True}, "mix"),
        ({"shares": {"a.large": 0.4, "shared.mid": 0.5}}, "mix"),
        ({"shares": {"b.large": 0.5, "shared.mid": 0.5}}, "mix"),
        ({"models": {"a.large": "small", "shared.mid": "mid"}}, "mix"),
        ({"name": "c"}, "mix"),
    ):
        wrong = a.model_copy(update=changes)
        assert rule in rules(plan_with(wrong, b), given_problem), changes


def test_a_plan_without_mixes_does_not_settle_a_choice() -> None:
    found = validate(plan_with(), asked(choice()))
    assert {each.rule for each in found} == {"mix"}


def test_settling_scales_rates_and_drops_what_answers_nothing() -> None:
    given_choice = choice()
    given_problem = asked(given_choice)
    mixes = [ModelMix.of(given_choice, {"a.large": 0.75, "shared.mid": 0.25})]
    left = given_problem.settled(mixes)
    assert left.choices == ()
    assert levels_of(mixes) == {"a.large": 0.75, "shared.mid": 0.25}
    full = given_problem.service("a.large").rate_per_s
    assert {s.name: s.rate_per_s for s in left.services} == {
        "a.large": 0.75 * full,
        "shared.mid": 0.25 * full,
    }


def test_nobody_answering_is_refused() -> None:
    with pytest.raises(InputError, match="no model answers a"):
        ModelMix.of(choice(), {})
