"""Plans with any-to-any models: tables, the drawing of machines, pages; nothing unescaped."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from atoll.core.errors import UsageError
from atoll.plan.executor_use import ExecutorPlanUse, PartUse, executor_use
from atoll.plan.plan import Plan
from atoll.plan.plan_diff import diff
from atoll.plan.problem import Problem
from atoll.report.diff_report import render_diff_fragment
from atoll.report.explanation_report import draw_explanation, render_explanation_fragment
from atoll.report.plan import machines_svg, rented_page
from atoll.report.plan.executor_tables import list_services
from atoll.report.plan.machines_svg import MachinesDrawing, draw_machines
from atoll.report.plan.show import (
    draw_plan,
    list_endings,
    render_plan_fragment,
    render_plan_page,
    render_plan_svg,
)
from atoll.solve.explain.plan_explanation import FITS, DeployedWay, Explanation, PartFit
from tests.plan import builders, graphs
from tests.plan.builders import few
from tests.report.test_pages import HARMLESS, HOSTILE, Elements

ASKED, MADE = graphs.problem(), graphs.plan()


def shown(plan: Plan = MADE, problem: Problem = ASKED, width: int = 200) -> str:
    console = Console(width=width, highlight=False, markup=False, record=True, file=None)
    with console.capture() as captured:
        console.print(draw_plan(plan, problem, width=width))
    return captured.get()


def drawn(plan: Plan = MADE, problem: Problem = ASKED) -> MachinesDrawing:
    catalog = problem.catalog()
    return draw_machines(plan, problem, catalog, executor_use(plan, problem, catalog))


def named(text: str) -> tuple[ExecutorPlanUse, Plan]:
    """How the plan is used and the plan, with a class and a part called otherwise, past all checks."""
    use = executor_use(MADE, ASKED, ASKED.catalog())
    classes = tuple(
        one.model_copy(update={"klass": text}) if one.klass == graphs.SCANS else one
        for one in use.classes
    )
    executors = tuple(
        one.model_copy(update={"parts": (text,)}) if one.id == "see-0" else one
        for one in use.executors
    )
    paths = tuple(
        p.model_copy(update={"klass": text}) if p.klass == graphs.SCANS else p for p in MADE.paths
    )
    renamed = use.model_copy(update={"classes": classes, "executors": executors})
    return renamed, MADE.model_copy(update={"paths": paths})


# Tables


def test_the_terminal_tells_of_executors_classes_and_paths() -> None:
    text = shown()
    for part in (
        "Executors of omni: qwen2.5-omni-7b, 2/s, $6.00/h",
        "Classes of omni",
        "vision on 2x T4:1 -> llm on L40S:1",
        "image within",
        "speech within",
        "2-3   idle",
    ):
        assert part in text
    assert "Instances in" not in text
    assert "Demand and capacity" not in text


def test_busy_shares_are_by_part_and_in_all() -> None:
    use = executor_use(MADE, ASKED, ASKED.catalog())
    omni = next(t for t in list_services(MADE, ASKED, use) if t.service == "omni")
    rows = {
        row[1]: dict(zip(omni.executors.columns, row, strict=True)) for row in omni.executors.rows
    }
    thinking = next(one for one in use.executors if one.id == "think-0")
    assert rows["audio+llm"]["busy"] == f"{thinking.busy:.0%}"
    assert str(rows["audio+llm"]["with"]).endswith(f"llm {thinking.busy_by_part['llm']:.0%}")
    assert rows["vision"][""] == "2x"
    assert rows["vision"]["with"] is None
    assert rows["vision"]["KV tokens"] is None


def test_columns_that_no_class_needs_are_left_out() -> None:
    use = executor_use(MADE, ASKED, ASKED.catalog())
    columns = {t.service: list(t.classes.columns) for t in list_services(MADE, ASKED, use)}
    assert columns["draw"] == ["class", "requests", "image within", "takes"]
    assert "image within" not in columns["omni"]
    assert len(set(columns["omni"])) == len(columns["omni"])


def test_a_narrow_terminal_gets_all_words() -> None:
    assert "talker+vocoder" in shown(width=100).replace("\n", "")


def test_plain_plans_say_nothing_of_executors() -> None:
    asked, made = builders.small()
    assert "xecutor" not in shown(made, asked)
    assert "machines" not in render_plan_page(made, asked)


# The drawing


def test_equal_machines_are_drawn_once() -> None:
    labels = [machine.label for machine in drawn().machines]
    assert sorted(labels) == ["2x T4:1", "A100-80:1", "L40S:4"]


def test_executors_stand_in_their_machine_and_machines_apart() -> None:
    machines = drawn().machines
    for machine in machines:
        for box in machine.boxes:
            assert machine.x < box.x
            assert box.x + box.width < machine.x + machine.width
            assert machine.y < box.y
            assert box.y + box.height < machine.y + machine.height
    for a in machines:
        for b in machines:
            apart = (
                a.x + a.width <= b.x
                or b.x + b.width <= a.x
                or a.y + a.height <= b.y
                or b.y + b.height <= a.y
            )
            assert a is b or apart


def test_gpus_are_squares_and_idle_ones_are_told() -> None:
    machine = next(m for m in drawn().machines if m.label == "L40S:4")
    assert [len(box.chips) for box in machine.boxes] == [1, 1]
    assert machine.idle is not None
    assert machine.idle.text == "2 GPUs idle"


def test_arrows_tell_requests_and_bytes_where_they_leave_a_machine() -> None:
    by_title = {arrow.title: arrow.label.text for arrow in drawn().arrows}
    assert len(by_title) == 2
    (across,) = (text for title, text in by_title.items() if "vision to" in title)
    (inside,) = (text for title, text in by_title.items() if "to talker" in title)
    assert across.startswith("0.6/s, ")
    assert across.endswith("B/s")
    assert inside == "0.4/s"


def test_only_the_largest_arrows_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines_svg, "MAX_ARROWS", 1)
    picture = drawn()
    assert picture.left_out == 1
    assert picture.arrows[0].label.text.startswith("0.6/s")


def test_labels_do_not_cover_boxes() -> None:
    picture = drawn()
    for arrow in picture.arrows:
        for machine in picture.machines:
            inside_x = machine.x < arrow.label.x < machine.x + machine.width
            inside_y = machine.y < arrow.label.y < machine.y + machine.height
            assert not (inside_x and inside_y)


def test_a_plan_without_instances_is_drawn_empty() -> None:
    nothing = MADE.model_copy(update={"instances": (), "paths": (), "status": "infeasible"})
    assert drawn(nothing).machines == ()
    ElementTree.fromstring(render_plan_svg(nothing, ASKED))
    assert "Machines and executors" in render_plan_page(nothing, ASKED)


def test_a_drawing_is_a_file_of_its_own() -> None:
    root = ElementTree.fromstring(render_plan_svg(MADE, ASKED))
    assert root.tag.endswith("svg")
    assert list_endings(ASKED) == (".html", ".svg")
    with pytest.raises(UsageError):
        render_plan_svg(builders.small()[1], builders.small()[0])


# Pages


def test_a_page_has_the_drawing_and_the_tables_and_is_the_same_each_time() -> None:
    page = render_plan_page(MADE, ASKED)
    elements = Elements(page)
    assert not elements.fetched
    assert "script" not in {tag for tag, _ in elements.tags}
    for part in ("Machines and executors", "Paths of omni", "vision on 2x T4:1 -> llm on L40S:1"):
        assert part in elements.text
    for absent in ("Layouts", "Ways of requests", "Demand and capacity"):
        assert absent not in elements.text
    assert page == render_plan_page(MADE, ASKED)
    assert "Machines and executors" in Elements(render_plan_fragment(MADE, ASKED)).text


def test_names_are_never_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = []
    for text in (HARMLESS, HOSTILE):
        use, _ = named(text)
        monkeypatch.setattr(rented_page, "executor_use", lambda *_, use=use: use)
        monkeypatch.setattr("atoll.plan.executor_use.executor_use", lambda *_, use=use: use)
        pages.append(Elements(render_plan_page(MADE, ASKED)))
        assert text in shown(width=500)
    assert pages[1].text.count(HOSTILE) == pages[0].text.count(HARMLESS) >= 3
    assert pages[0].tags == pages[1].tags


def test_diffs_escape_class_names_too() -> None:
    _, plan = named(HOSTILE)
    fragment = render_diff_fragment(diff(MADE, plan))
    assert HOSTILE in Elements(fragment).text
    assert "<script" not in fragment


def test_explanations_tell_of_ways_parts_and_what_does_not_fit() -> None:
    explanation = Explanation(
        problem_name="mixed",
        status="optimal",
        served=1.0,
        usd_per_hour=15.0,
        objective=15.0,
        ways=(
            DeployedWay(
                name="E/PD", status="optimal", usd_per_hour=18.0, nodes=3, served=1.0, ratio=1.2
            ),
            DeployedWay(name="cells", broken=("budget",)),
            DeployedWay(name="monolith", status="infeasible", served=0.0),
        ),
        parts=(
            PartUse(service="omni", part="llm", executors=1, seconds_per_s=0.5, busy=0.9, own=0.5),
        ),
        fits=(
            PartFit(service="omni", part="llm", kind="T4:1", carries=False, reason="memory: 15GB"),
            PartFit(
                service="omni", part="llm.decode", kind="T4:1", carries=False, reason="memory: 15GB"
            ),
            PartFit(service="omni", part="vision", kind="T4:1", carries=True, reason=FITS),
            PartFit(service="omni", part="vision", kind="L4:1", carries=True, reason=HOSTILE),
        ),
    )
    console = Console(width=250, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(draw_explanation(explanation))
    text = captured.get()
    for part in ("$18.00/h on 3 nodes, x1.20", "breaks budget", "no plan", "llm, llm.decode"):
        assert part in text
    fragment = Elements(render_explanation_fragment(explanation))
    assert HOSTILE in fragment.text
    assert "script" not in {tag for tag, _ in fragment.tags}
    # Beside a plan whose promises were simulated, others look cheaper than they would be.
    assert "were not simulated" not in text
    ways = tuple(way.model_copy(update={"estimated": True}) for way in explanation.ways)
    estimated = explanation.model_copy(update={"ways": ways})
    assert "were not simulated" in Elements(render_explanation_fragment(estimated)).text
    assert set(
        Explanation(**{**dict(explanation), "ways": (), "parts": (), "fits": ()}).model_dump()
    ).isdisjoint({"ways", "parts", "fits"})


# Any plan

slices = st.lists(
    st.tuples(
        st.sampled_from(["vision", "llm", "vision+llm", "audio", "talker+vocoder"]),
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    max_size=10,
    unique_by=lambda slice_: slice_[1:],
)


@few
@given(slices)
def test_every_executor_is_in_one_box_of_its_machine(cut: list[tuple[str, int, int]]) -> None:
    executors = tuple(
        graphs.executor(f"e-{slot}-{gpu}", "omni", parts, "L40S:4", 2.5, gpus=(gpu,), slot=slot)
        for parts, slot, gpu in cut
    )
    ids = " ".join(one.id for one in executors if "llm" in one.parts)
    paths = (graphs.path("omni", "text", 1.0, ("llm", ids)),) if ids else ()
    picture = drawn(MADE.model_copy(update={"instances": executors, "paths": paths}))
    boxes = [box for machine in picture.machines for box in machine.boxes]
    for one in executors:
        assert sum(f"{one.id}," in f"{box.title[:-1]}," for box in boxes) == 1
    number = sum(
        int(machine.label.partition("x ")[0]) if "x " in machine.label else 1
        for machine in picture.machines
    )
    assert number == len({slot for _, slot, _ in cut})
    root = ElementTree.fromstring(machines_svg.render_machines_svg(picture))
    assert float(root.attrib["width"]) > 0
