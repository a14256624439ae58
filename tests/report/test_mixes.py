"""What a report says of choices between models: shares, errors, ways that are shared."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import pytest
from rich.console import Console

from atoll.plan.choice import ModelMix
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.report.plan.mixes import describe_mixes, draw_mixes, list_mixes
from atoll.report.plan.show import draw_plan, render_plan_fragment, render_plan_page
from tests.plan.builders import small

MIXES = (
    ModelMix(
        name="talk",
        shares={"chat": 0.72, "mini": 0.28},
        models={"chat": "llama-3.1-8b", "mini": "llama-3.2-1b"},
        errors={"chat": 0.02, "mini": 0.06},
        error=0.0312,
        max_error=0.04,
        usd_per_point=1.25,
    ),
    ModelMix(name="draft", shares={"mini": 1.0}, models={"mini": "llama-3.2-1b"}, error=0.0),
)


def mixed() -> tuple[Problem, Plan]:
    asked, plan = small()
    return asked, plan.model_copy(update={"mixes": MIXES})


def shown(plan: Plan, asked: Problem) -> str:
    out = io.StringIO()
    Console(file=out, width=150).print(draw_plan(plan, asked, width=150))
    return out.getvalue()


def test_a_row_for_each_way_the_largest_first() -> None:
    _, plan = mixed()
    grid = list_mixes(plan)
    assert list(grid.columns)[-1] == "shared with"
    assert [tuple(row) for row in grid.rows] == [
        ("talk", "llama-3.1-8b", "72%", "2%", "chat", None),
        ("talk", "llama-3.2-1b", "28%", "6%", "mini", "draft"),
        ("draft", "llama-3.2-1b", "100%", None, "mini", "talk"),
    ]
    alone = plan.model_copy(update={"mixes": MIXES[:1]})
    assert "shared with" not in list_mixes(alone).columns


def test_errors_are_said_beside_what_is_allowed() -> None:
    _, plan = mixed()
    (said,) = describe_mixes(plan)
    for part in ("talk: 3.12%", "4% may", "one point more would save about $1.25/h"):
        assert part in said


def test_the_terminal_shows_them() -> None:
    asked, plan = mixed()
    text = shown(plan, asked)
    for part in ("Which model answers", "72%", "shared with", "3.12% of the answers err"):
        assert part in text
    assert "Which model answers" not in shown(small()[1], asked)


def test_bars_are_as_long_as_shares() -> None:
    _, plan = mixed()
    talk, draft = draw_mixes(plan)
    assert [box.width / talk.width for box in talk.boxes] == pytest.approx([0.72, 0.28])
    assert talk.boxes[1].x == talk.boxes[0].width
    assert talk.boxes[1].fill == draft.boxes[0].fill  # the same model
    assert sum(box.width for box in draft.boxes) == draft.width
    many = ModelMix(
        name="many",
        shares={"a": 0.995, "b": 0.005},
        models={"a": "a", "b": "b"},
        error=0.0,
    )
    wide, narrow = draw_mixes(plan.model_copy(update={"mixes": (many,)}))[0].boxes
    assert (wide.label, narrow.label, narrow.title) == ("a 99.5%", "", "b 0.5%")


def test_the_page_draws_them() -> None:
    asked, plan = mixed()
    for page in (render_plan_page(plan, asked), render_plan_fragment(plan, asked)):
        start = page.index('<svg class="layout drawn"', page.index("Which model answers"))
        drawing = ElementTree.fromstring(page[start : page.index("</svg>", start) + 6])
        assert [r.get("width") for r in drawing.iter("rect")] == ["518.4", "201.6"]
        assert "one point more would save about $1.25/h" in page
    assert "Which model answers" not in render_plan_page(small()[1], asked)
