"""What is said of how good a plan is: one vocabulary, and never two things that cannot both be true."""

from __future__ import annotations

import itertools
import re

import pytest

from atoll.plan.footprint import PowerUse
from atoll.plan.plan import KeptPromise, Plan
from atoll.plan.proof import LATE, binding_reasons, proof_of
from atoll.report.plan.rented_page import _list_figures
from atoll.report.plan.rented_tables import describe_plan

CLAIM = "nothing within its settings costs less than"


def made(
    *,
    objective: float = 20.0,
    bound: float | None = 20.0,
    capacity_bound: float | None = None,
    kept: float | None = None,
    **fields: object,
) -> Plan:
    """A plan of which this is known; `kept` is what a service keeps of 95 %, None: not simulated."""
    promise = KeptPromise(
        service="chat", target=0.95, kept=kept or 0.0, low=0, high=1, kept_ttft=1, kept_tpot=1
    )
    cost = fields.get("goal", "cost") == "cost"
    gap = None
    if bound is not None:
        gap = 1.0 - bound / objective if cost else 1.0 - objective / bound
    return Plan.model_validate(
        {
            "problem_hash": "0",
            "problem_name": "fleet",
            "usd_per_hour": objective if cost else 0.0,
            "objective": objective,
            "bound": bound,
            "gap": gap,
            "capacity_bound": capacity_bound,
            "promises": () if kept is None else (promise,),
            "status": "feasible",
            "solver": "fast",
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (made(), f"Bound by the capacity model: {CLAIM} $20.00/h (gap 0%)."),
        (made(bound=None), "No bound is known (solver: fast)."),
        (
            made(bound=16.05, capacity_bound=13.1, kept=0.97),
            (
                f"Bound with simulated capacities: {CLAIM} $16.05/h (gap 19.8%); "
                "by the capacity model: $13.10/h."
            ),
        ),
        (
            # One instance may carry more than the model says.
            made(bound=13.1, capacity_bound=16.05, kept=0.97),
            (
                f"Bound with simulated capacities: {CLAIM} $13.10/h (gap 34.5%); "
                "by the capacity model: $16.05/h."
            ),
        ),
        (
            made(bound=19.0, capacity_bound=19.0, kept=0.97),
            f"Bound by the capacity model: {CLAIM} $19.00/h (gap 5%).",
        ),
        (
            made(bound=None, capacity_bound=13.1, kept=0.97),
            f"No bound is known with simulated capacities; by the capacity model: {CLAIM} $13.10/h.",
        ),
        (
            made(bound=19.9988, cut_short=True),
            (
                "Cut short by the deadline: with more time there may be a better plan, within the gap. "
                f"Bound by the capacity model: {CLAIM} $20.00/h (gap below 0.01%)."
            ),
        ),
        (
            made(cut_short=True),
            (
                "The deadline came before the search had ended, and no better plan was left to find. "
                f"Bound by the capacity model: {CLAIM} $20.00/h (gap 0%)."
            ),
        ),
        (
            made(cut_short=True, status="partial"),
            (
                "Cut short by the deadline: with more time there may be a plan that serves more. Bound by "
                "the capacity model: nothing within its settings serves that share for less than $20.00/h "
                "(gap 0%)."
            ),
        ),
        (
            made(cut_short=True, kept=0.007, capacity_bound=20.0),
            (
                "Cut short by the deadline: with more time there may be a plan that keeps its promises. "
                f"Bound by the capacity model: {CLAIM} $20.00/h (gap 0%)."
            ),
        ),
        (
            made(goal="sustained", objective=1400.0, bound=1500.0),
            (
                "Bound by the capacity model: no placement carries more than 1,500.0 tokens/s, even with "
                "endless KV caches (gap 6.67%)."
            ),
        ),
        (
            made(goal="max-flow", objective=1400.0, bound=1400.0),
            "Bound by the capacity model: no placement carries more (gap 0%).",
        ),
        (
            made(status="infeasible", objective=0.0, bound=None, cut_short=True),
            "Cut short by the deadline: with more time there may be a plan.",
        ),
    ],
)
def test_what_is_known_is_said_in_a_sentence_or_two(plan: Plan, said: str) -> None:
    assert proof_of(plan).text == said


def every_combination() -> list[Plan]:
    plans = [
        made(
            bound=bound,
            capacity_bound=capacity_bound,
            kept=kept,
            status=status,
            cut_short=cut_short,
            init_usd=init_usd,
            objective=20.0 + init_usd,
            power=power,
            reasons=(LATE, "spot share") if cut_short else (),
        )
        for bound, capacity_bound, kept, status, cut_short, init_usd, power in itertools.product(
            (None, 20.0, 19.9999, 19.0, 11.3),
            (None, 20.0, 19.0, 13.1),
            (None, 0.97, 0.5),
            ("optimal", "feasible", "partial"),
            (False, True),
            (0.0, 1.0),
            (None, PowerUse(watts=1590.0, weighted_usd_per_hour=1.0, weighted_bound=0.5)),
        )
    ]
    return plans + [
        made(goal=goal, objective=1400.0, bound=bound, kept=kept, cut_short=cut_short)
        for goal, bound, kept, cut_short in itertools.product(
            ("max-flow", "sustained", "fair", "latency"),
            (None, 1400.0, 1500.0),
            (None, 0.97, 0.5),
            (False, True),
        )
    ]


def test_no_two_lines_contradict_each_other() -> None:
    plans = every_combination()
    assert len(plans) > 1000
    for plan in plans:
        proof = proof_of(plan)
        headline = describe_plan(plan)
        figures = dict(_list_figures(plan))
        assert len(figures) == len(_list_figures(plan)), "two figures of one name"
        assert proof.text in headline
        # A gap is one to a bound, and to one alone; without a bound there is none.
        gaps = [name for name in figures if name.startswith("gap")]
        assert len(gaps) <= 1
        if plan.bound is None:
            assert proof.gap is None
            assert "(gap" not in proof.text
        else:
            assert proof.gap is not None
            assert "No bound is known" not in headline
            assert figures[gaps[0]] == proof.gap
            assert gaps[0].replace("gap", "bound") in figures
        # Sentence and card name the same amount by the same name.
        for name, amount in figures.items():
            how = name.removeprefix("bound ")
            if how == name or not proof.bound:
                continue
            assert how in proof.bound
            found = re.search(rf"{how}: [^;$]*(\$[\d.]+/h)", proof.bound)
            if plan.goal == "cost":
                assert found is not None
                assert found.group(1) == amount
        # Nobody hopes for a better plan where none can be.
        better = "there may be a" in headline
        assert better == proof.may_improve
        assert not (better and "no better plan was left" in headline)
        assert plan.cut_short == (proof.late is not None) == ("cut short" in figures)
        if better and plan.status != "partial" and all(p.is_kept for p in plan.promises):
            assert proof.gap != "0%"
        assert LATE not in binding_reasons(plan)
