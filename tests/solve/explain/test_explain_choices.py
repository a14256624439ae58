"""What right answers cost: which plans are asked for, within how many, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.catalog.catalog import Catalog
from atoll.plan.choice import ModelMix
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.report.explanation_report import list_qualities
from atoll.solve.deadline import Deadline
from atoll.solve.explain import explain_choices as choices
from atoll.solve.explain.explain_choices import ErrorQuestions
from atoll.solve.explain.explain_plan import explain_problem
from atoll.solve.explain.plan_explanation import Explanation
from atoll.solve.explain.quality import ChoiceQuality
from atoll.solve.registry import solve

FLEET = """\
services:
  chat:
    models:
      - {model: llama-3.2-1b, error: 9%}
      - {model: llama-3.1-8b, error: 6%}
      - {model: llama-3.1-70b@fp8, error: 2%}
    max_error: 6.5%
    ttft: 1s
    tpot: 50ms
    rate: 2/s
    lengths: 512x128
pool:
  offers:
    - {region: a, node_type: L40S:1, available: 8, usd_per_hour: 2}
    - {region: a, node_type: L4:1, available: 8, usd_per_hour: 1}
"""
ASKED = parse_fleet(FLEET)
MIX = ModelMix.of(
    ASKED.choices[0], {"chat.llama-3.2-1b": 0.1, "chat.llama-3.1-8b": 0.9}, usd_per_point=0.5
)


def plan_of(usd: float | None) -> Plan:
    return Plan(
        problem_hash="0" * 64,
        problem_name="fleet",
        solver="toy",
        status="infeasible" if usd is None else "feasible",
        usd_per_hour=usd or 0.0,
        objective=usd,
        mixes=(MIX,),
    )


def ask(
    monkeypatch: pytest.MonkeyPatch, costs: dict[Any, float | None], most: int = 12
) -> tuple[ErrorQuestions, tuple[ChoiceQuality, ...]]:
    """Costs are by max_error in per cent, and by model where one answers all."""

    def solve(problem: Problem, _request: object) -> Plan:
        (choice,) = problem.choices
        named = {variant.service for variant in choice.variants}
        assert {service.name for service in problem.services} == named
        key: Any = choice.models[0] if len(choice.models) == 1 else None
        if choice.max_error is not None:
            key = round(100 * choice.max_error, 6)
        return plan_of(costs[key])

    monkeypatch.setattr(choices, "solve", solve)
    questions = ErrorQuestions(ASKED, Catalog(), Deadline(60.0), most)
    return questions, questions.ask(plan_of(costs[6.5]))


def test_a_point_more_and_less_and_models_without_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    questions, (found,) = ask(
        monkeypatch, {6.5: 10.0, 7.5: 7.0, 5.5: 12.0, "llama-3.1-70b@fp8": 30.0}
    )
    assert found.lines == (
        (
            "chat: 6.3% of the answers err, 6.5% may; a point is worth about $0.50/h (estimate); "
            "with 7.5% the fleet would cost $3.00/h less; with 5.5% the fleet would cost $2.00/h more"
        ),
        (
            "llama-3.1-70b@fp8 answers nothing: it errs 2%; "
            "alone the fleet would cost $30.00/h instead of $10.00/h"
        ),
    )
    assert (questions.plans, questions.left_out) == (4, [])
    kept = found.model_copy(update={"promised": True}).lines
    assert "; for capacity alone, with 7.5% the fleet would cost" in kept[0]
    assert kept[1].endswith("instead of $10.00/h for capacity")
    shown = Explanation(
        problem_name="x",
        status="feasible",
        served=1,
        usd_per_hour=10,
        objective=10,
        choices=(found,),
    )
    assert tuple(list_qualities(shown)) == found.lines
    assert "choices" in shown.model_dump()
    assert "choices" not in shown.model_copy(update={"choices": ()}).model_dump()


def test_a_search_that_ended_early_makes_no_error_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {6.5: 10.0, 7.5: 11.0, 5.5: 9.0, "llama-3.1-70b@fp8": None}
    _, (found,) = ask(monkeypatch, costs)
    assert found.looser is not None
    assert found.tighter is not None
    assert (found.looser.usd_per_hour, found.tighter.usd_per_hour) == (10.0, 10.0)
    assert found.lines[0].count("would cost the same") == 2
    assert found.lines[1].endswith("nothing on offer serves all of chat with it")


def test_where_demand_is_not_met_more_errors_may_meet_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (found,) = ask(monkeypatch, {6.5: None, 7.5: 9.0, "llama-3.1-70b@fp8": None})
    assert found.tighter is None
    assert "with 7.5% all demand would be met, for $9.00/h" in found.lines[0]


@pytest.mark.parametrize(("most", "plans"), [(0, 0), (1, 0), (2, 2), (3, 3)])
def test_no_more_plans_are_made_than_may_be(
    monkeypatch: pytest.MonkeyPatch, most: int, plans: int
) -> None:
    costs: dict[Any, float | None] = {6.5: 10.0, 7.5: 7.0, 5.5: 12.0, "llama-3.1-70b@fp8": 30.0}
    questions, (found,) = ask(monkeypatch, costs, most)
    assert questions.plans == plans
    assert "what llama-3.1-70b@fp8 would cost alone" in questions.left_out
    assert ("what a point of error costs of chat" in questions.left_out) == (most < 2)
    assert found.lines[-1] == "llama-3.1-70b@fp8 answers nothing: it errs 2%"


def test_an_explanation_says_it_of_a_fleet_with_a_choice() -> None:
    asked = ASKED.replace(settings=ASKED.settings.model_copy(update={"max_nodes_per_instance": 1}))
    found = explain_problem(asked, repairs=False, max_plans=8)
    (quality,) = found.choices
    assert (quality.choice, quality.max_error) == ("chat", 0.065)
    assert quality.error <= 0.065
    assert quality.usd_per_hour == pytest.approx(found.usd_per_hour)
    assert found.plans <= 8
    assert explain_problem(asked, node_types=["L4:1"], max_plans=8).choices == ()


REPAIR = """\
services:
  chat:
    models:
      - {model: llama-3.1-8b@fp8, error: 5.3%}
      - {model: qwen3-32b, error: 1.5%}
    max_error: 3.78%
    ttft: 2.66s
    tpot: 94ms
    rate: 33.5/s
    headroom: 1.3
    phases: together
    lengths: {input: 251, output: 36, input_cv: 0.72, output_cv: 0.69}
pool:
  offers:
    - {region: a, node_type: L4:2, available: 3, usd_per_hour: 1.552}
    - {region: a, node_type: RTX4090:4, available: 2, usd_per_hour: 2.369}
settings: {max_nodes_per_instance: 1, engines: [vllm]}
"""


def test_a_repair_is_priced_with_its_models_chosen_anew() -> None:
    asked = parse_fleet(REPAIR)
    found = explain_problem(asked, node_types=[], repairs=True, max_plans=18)
    (repair,) = (r for r in found.repairs or () if r.text.startswith("+1 RTX4090:4"))
    offers = tuple(
        offer.model_copy(update={"available": 3}) if offer.node_type == "RTX4090:4" else offer
        for offer in asked.offers
    )
    planned = solve(asked.replace(offers=offers))
    assert repair.usd_per_hour == pytest.approx(planned.usd_per_hour, rel=1e-3)
    # With the mix of the plan that falls short it would cost more.
    short = solve(asked)
    fixed = solve(asked.replace(offers=offers).settled(short.mixes))
    assert fixed.usd_per_hour > repair.usd_per_hour + 0.1
