"""Every kind of broken plan is refused, with one line that names the field and the fix."""

from __future__ import annotations

import pytest

from atoll.plan.plan import Plan
from atoll.plan.validate.check import InvalidPlanError, check, validate
from tests.plan.validate.mutants import ENGINE, EVERY, GROUPED, OWN, families

FAMILIES = tuple(OWN)
NOWHERE_ELSE = frozenset({*GROUPED, *ENGINE})
"""Kinds that no other test of the validator breaks plans with."""


def is_fast(family: str, kind: str) -> bool:
    """Whether every run breaks plans of a family so: once in every field that breaks a rule.

    What every plan states is broken in the plans of one family; the full run breaks all in all ways.
    """
    if kind in EVERY:
        return FAMILIES[list(EVERY).index(kind) % len(FAMILIES)] == family
    own = OWN[family]
    alike = (name for name in own if own[name][1:] == own[kind][1:])
    return kind in NOWHERE_ELSE or kind == next(alike)


CASES = [(family, kind) for family in OWN for kind in (*EVERY, *OWN[family])]


def test_no_kind_is_dropped_from_the_list() -> None:
    counts = {family: len(kinds) for family, kinds in OWN.items()}
    least = {"rented": 47, "executors": 45, "choice": 12, "cluster": 11, "engines": 14, "spot": 4}
    assert all(counts[family] >= count for family, count in least.items())
    assert len(EVERY) >= 35


@pytest.mark.parametrize("family", OWN)
def test_the_plan_is_valid_before_anything_is_broken(family: str) -> None:
    problem, plan = families()[family]
    assert validate(plan, problem) == []


def test_a_plan_of_an_earlier_version_says_nothing_of_classes() -> None:
    problem, plan = families()["executors"]
    before = plan.model_copy(
        update={"promises": tuple(p.model_copy(update={"groups": ()}) for p in plan.promises)}
    )
    text = before.to_json()
    assert "groups" not in text
    assert Plan.from_json(text) == before
    assert validate(before, problem) == []


@pytest.mark.parametrize(
    ("family", "kind"),
    [pytest.param(*case, marks=[] if is_fast(*case) else pytest.mark.slow) for case in CASES],
)
def test_a_mutant_is_refused_by_field_and_fix(family: str, kind: str) -> None:
    problem, plan = families()[family]
    mutant = (EVERY | OWN[family])[kind]
    broken = mutant.change(plan)
    assert broken != plan
    with pytest.raises(InvalidPlanError) as caught:
        check(broken, problem)
    found = [v for v in caught.value.violations if v.rule == mutant.rule]
    assert found, caught.value
    assert any(v.field.startswith(mutant.field) for v in found), found
    line = str(caught.value)
    first = caught.value.violations[0]
    assert "\n" not in line
    assert line.startswith(f"{first.field}: ")
    assert f"(fix: {first.fix}" in line
    # As `atoll validate` asks, which also takes plans of a fleet file that has changed since.
    rules = {v.rule for v in validate(broken, problem, same_problem=False)}
    assert mutant.rule in rules | {"problem"}
