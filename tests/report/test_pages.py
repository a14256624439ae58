"""Pages and fragments: one file with everything, both kinds of plan behind one door, nothing unescaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from atoll.core.errors import UsageError
from atoll.plan.cluster import Cluster
from atoll.plan.plan import KeptPromise, Plan
from atoll.plan.plan_diff import diff
from atoll.plan.problem import Problem
from atoll.report.diff_report import draw_diff, render_diff_fragment
from atoll.report.explanation_report import draw_explanation, render_explanation_fragment
from atoll.report.plan.layout_svg import PlacedText
from atoll.report.plan.show import (
    draw_plan,
    render_plan_fragment,
    render_plan_page,
    render_plan_svg,
)
from atoll.report.promises import draw_verdicts, judge_plan, judge_run
from atoll.report.render import render_fragment, render_page
from atoll.report.simulation.page import render_simulation_fragment, render_simulation_page
from atoll.report.simulation.plots_svg import map_heat, plot_distributions, plot_over_time
from atoll.report.simulation.simulation_tables import draw_simulation
from atoll.sim.kept_through import KeptThroughLoss
from atoll.sim.sim_result import (
    InstanceSummary,
    NodeSummary,
    RequestColumns,
    ServiceSummary,
    SimReport,
    Spread,
    TimeSeries,
)
from atoll.solve.comparison import Compared
from atoll.solve.explain.plan_explanation import (
    Constraint,
    Explanation,
    ExtraNodes,
    NodeUse,
    Repair,
    Slack,
    Worth,
)
from tests.plan import boxes, builders, clusters

HOSTILE = "\"></style></title><script>alert(1)</script><b onclick='x'>&{{ 7 * 7 }}{% raw %}"
"""As a name in a file might be: HTML, an attribute's end, a template's syntax."""
HARMLESS = "a harmless name"

PLANS: dict[str, Callable[[], tuple[Problem, Plan]]] = {
    "rented": builders.small,
    "cut": boxes.boxes,
    "cluster": lambda: (clusters.problem(), clusters.plan()),
}


class Elements(HTMLParser):
    """Collects tags with the names of their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.fetched += [
            value or "" for name, value in attrs if name in ("src", "href", "data", "action")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def named(name: str, kind: str) -> tuple[Problem, Plan]:
    """A problem and its plan in which all that people and files name begins with this name.

    All but services: their names are parts of roles, which are never read with such letters in them.
    """
    asked, made = PLANS[kind]()

    def rename(text: str | None) -> str | None:
        """The name of a machine or a region; "*" stands for all of them."""
        return text if text in (None, "*") else f"{name}{text}"

    instances = tuple(
        instance.model_copy(
            update={
                "id": rename(instance.id),
                "region": rename(instance.region),
                "nodes": tuple(
                    node.model_copy(
                        update={"host": rename(node.host), "region": rename(node.region)}
                    )
                    for node in instance.nodes
                ),
            }
        )
        for instance in made.instances
    )
    # A cluster's profiles are found by the model's name.
    model = {"model": name} if asked.cluster is None else {}
    changes: dict[str, object] = {
        "name": name,
        "services": tuple(service.model_copy(update=model) for service in asked.services),
        "offers": tuple(
            offer.model_copy(update={"region": rename(offer.region)}) for offer in asked.offers
        ),
    }
    if asked.cluster is not None:
        changes["cluster"] = Cluster.model_construct(
            **{
                **dict(asked.cluster),
                "nodes": tuple(
                    node.model_copy(
                        update={"name": rename(node.name), "region": rename(node.region)}
                    )
                    for node in asked.cluster.nodes
                ),
                "links": tuple(
                    link.model_copy(update={"src": rename(link.src), "dst": rename(link.dst)})
                    for link in asked.cluster.links
                ),
            }
        )
    problem = Problem.model_construct(**{**dict(asked), **changes})
    plan = made.model_copy(
        update={
            "problem_name": name,
            "problem_hash": name,
            "solver": name,
            "instances": instances,
            "routes": tuple(
                route.model_copy(update={"instances": tuple(map(rename, route.instances))})
                for route in made.routes
            ),
            "cut_short": True,
            "status": "partial",
            "served_fraction": dict.fromkeys(made.served_fraction, 0.5),
            "reasons": (name, name),
            "notes": (name,),
        }
    )
    return problem, plan


def compared(name: str) -> list[Compared]:
    return [
        Compared(solver=name, usd_per_hour=9.5, nodes=9, served=0.4, served_mean=0.7),
        Compared(solver=name, broken=(name,)),
        Compared(solver=name, tokens_per_s=700.0, nodes=4, hops=2),
        Compared(solver=name, nodes=0),
    ]


def explanation(name: str) -> Explanation:
    worth = Worth(usd_per_hour=2.0, at_most=2.5, served=1.0, served_now=1.0)
    extra = ExtraNodes(region=name, node_type="L4:1", market="spot", count=2)
    return Explanation(
        problem_name=name,
        status="partial",
        served=0.831,
        usd_per_hour=17.76,
        objective=17.76,
        constraints=(
            Constraint(
                kind="availability", where=name, used=1, limit=1, loosened=name, worth=worth
            ),
        ),
        demand=(Slack(role=name, demand_per_s=10.0, capacity_per_s=12.5, served=0.9),),
        repairs=(Repair(kind="nodes", where=name, rentals=(extra,), usd_per_hour=20.0),),
        node_types=(NodeUse(node_type=name, verdict="used", used=1, available=2, used_by=(name,)),),
        plans=7,
        left_out=(name,),
    )


@cache
def run_of(name: str, requests: int = 40) -> tuple[SimReport, Problem]:
    """A made-up run of a service with this name; of no request where `requests` is 0."""
    problem = builders.problem(services=(builders.service(),))
    problem = problem.model_copy(
        update={"services": (problem.services[0].model_copy(update={"name": name}),)}
    )
    times = np.linspace(0.01, 2.0, requests)
    spread = Spread.of(times)
    bins, late = 5, np.ones(5, dtype=np.int64)
    service = ServiceSummary(
        name=name, requests=requests, finished=requests, dropped=0, unfinished=0, retries=0,
        requests_per_s=4.0, tokens_per_s=100.0, goodput_requests_per_s=1234.0, goodput_tokens_per_s=50.0,
        attainment=0.9998 if requests else None, attainment_ttft=1.0, attainment_tpot=None,
        ttft_s=spread, tpot_s=spread, e2e_s=spread, largest_gap_s=spread, token_gap_s=spread,
    )  # fmt: skip
    node = NodeSummary(
        instance=name, node=name, group=1, node_type=name, service=name, phase="both", layers=(0, 8),
        utilisation=0.5, busy=0.5, steps=3, mean_sequences=1.5, prompt_tokens=1, decode_tokens=1,
        kv_tokens=9.0,
        kv_mean=0.1, kv_peak=0.2, queue_mean=0.3,
    )  # fmt: skip
    instance = InstanceSummary(name, name, "both", name, 0.0, None, None, 1234, 0.042)
    flags = np.ones(requests, dtype=np.bool_)
    columns = RequestColumns(
        service=np.zeros(requests, dtype=np.int16), arrival_s=times, input=np.ones(requests, np.int32),
        output=np.ones(requests, np.int32), ttft_s=times, tpot_s=times, largest_gap_s=times, e2e_s=times,
        retries=np.zeros(requests, dtype=np.int16), outcome=np.zeros(requests, dtype=np.int8),
        met_ttft=flags, met_tpot=flags, judged=flags, klass=np.zeros(requests, dtype=np.int16),
    )  # fmt: skip
    shares = np.full((bins, 1), 0.5, dtype=np.float32)
    series = TimeSeries(
        bin_s=2.0, busy=shares, queue=shares, kv=shares, arrived=np.full((bins, 1), 8), waiting=late,
        finished=np.full((bins, 1), 8), tokens=np.full((bins, 1), 4000), flying=late,
    )  # fmt: skip
    report = SimReport(
        plan_name=name, services=(service,), nodes=(node,), instances=(instance,), requests=columns,
        series=series, link_busy={name: 0.7}, component_busy={name: 0.1}, clock_s=16.0, window_s=16.0,
        finished=requests, dropped=1, rejected=0, retries=2, usd=0.1, usd_per_million_tokens=0.5, cpu_s=1.0,
        losses=(KeptThroughLoss(name, 4.0, (name,), True, 1.0, 0.5, None),),
        measured=(),
    )  # fmt: skip
    return report, problem


Shown = Callable[[str], str]


def show_plan(render: Callable[..., str], kind: str, *, others: bool = True) -> Shown:
    def shown(name: str) -> str:
        asked, made = named(name, kind)
        return render(made, asked, compared(name) if others else ())

    return shown


def show_run(render: Callable[[SimReport, Problem], str]) -> Shown:
    return lambda name: render(*run_of(name))


def show_diff(name: str) -> str:
    _, made = named(name, "rented")
    less = made.model_copy(update={"instances": made.instances[1:]})
    return render_diff_fragment(diff(less, made)) + render_diff_fragment(diff(made, less))


PAGES: dict[str, Shown] = {
    "rented": show_plan(render_plan_page, "rented"),
    "cut": show_plan(render_plan_page, "cut"),
    "cluster": show_plan(render_plan_page, "cluster"),
    "simulation": show_run(render_simulation_page),
}
FRAGMENTS: dict[str, Shown] = {
    "rented": show_plan(render_plan_fragment, "rented"),
    "cut": show_plan(render_plan_fragment, "cut"),
    "cluster": show_plan(render_plan_fragment, "cluster"),
    "simulation": show_run(render_simulation_fragment),
    "explanation": lambda name: render_explanation_fragment(explanation(name), (name,)),
}


# Names out of files


@pytest.mark.parametrize("shown", [*PAGES.values(), *FRAGMENTS.values(), show_diff])
def test_a_name_is_never_markup(shown: Shown) -> None:
    harmless, hostile = Elements(shown(HARMLESS)), Elements(shown(HOSTILE))
    assert hostile.text.count(HOSTILE) == harmless.text.count(HARMLESS) >= 3
    assert hostile.tags == harmless.tags


def test_a_drawing_in_a_file_of_its_own_is_sound_whatever_the_names() -> None:
    harmless, hostile = (
        list(ElementTree.fromstring(render_plan_svg(made, asked)).iter())
        for asked, made in (named(HARMLESS, "cluster"), named(HOSTILE, "cluster"))
    )
    assert [element.tag for element in hostile] == [element.tag for element in harmless]
    assert any(HOSTILE in (element.text or "") for element in hostile)


def test_what_a_template_names_must_be_given() -> None:
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError, match="headline"):
        render_page("explanation.html.j2", {"title": "t"})


# Pages


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_nothing_else(name: str) -> None:
    page = PAGES[name]("lab")
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
    assert page == PAGES[name]("lab")
    elements = Elements(page)
    kinds = {tag for tag, _ in elements.tags}
    assert kinds.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form"})
    assert elements.fetched == []
    assert "http" not in page.replace("http-equiv", "")
    assert re.search(r"@import|url\(", page) is None
    assert "default-src 'none'" in page


# Fragments


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_fragment_is_one_element(name: str) -> None:
    fragment = FRAGMENTS[name]("lab")
    root = ElementTree.fromstring(fragment.replace("&", "&amp;"))
    assert root.tag == "div"
    assert {element.tag for element in root.iter()}.isdisjoint({"html", "body", "head", "h1", "h2"})


def test_the_styles_of_a_fragment_stay_inside_it() -> None:
    root = ElementTree.fromstring(render_diff_fragment(diff(*2 * [builders.small()[1]])))
    (style,) = (element.text or "" for element in root.iter("style"))
    flat = re.sub(r"@media[^{]*\{(.*?\})\s*\}", r"\1", style, flags=re.DOTALL)
    assert "@media print" in style
    selectors = [
        selector.strip()
        for group in re.findall(r"([^{}]+)\{[^{}]*\}", flat)
        for selector in group.split(",")
    ]
    assert len(selectors) > 40
    assert [selector for selector in selectors if not selector.startswith(".atoll")] == []


@pytest.mark.parametrize("kind", PLANS)
def test_a_fragment_says_what_the_page_says(kind: str) -> None:
    """Every word of the page is in the fragment; only the order may differ."""
    page, fragment = (
        Elements(re.sub(r"<title>.*?</title>", "", shown("lab"), flags=re.DOTALL))
        for shown in (PAGES[kind], FRAGMENTS[kind])
    )
    assert sorted(page.text.split()) == sorted(fragment.text.replace("Details", "", 1).split())


# Every state of a plan


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_that_is_none_can_be_shown(kind: str) -> None:
    asked, made = PLANS[kind]()
    none = made.model_copy(
        update={
            "instances": (), "routes": (), "status": "infeasible", "usd_per_hour": 0.0,
            "objective": None, "bound": None, "gap": None, "served_fraction": {}, "reasons": (),
        }
    )  # fmt: skip
    for text in (
        render_plan_page(none, asked),
        render_plan_fragment(none, asked),
        drawn(none, asked),
    ):
        assert "INFEASIBLE" in text
        assert "100%" not in Elements(text).text


def drawn(plan: Plan, problem: Problem) -> str:
    console = Console(width=120, markup=False)
    with console.capture() as captured:
        console.print(draw_plan(plan, problem, width=120))
    return captured.get()


@pytest.mark.parametrize("kind", PLANS)
def test_the_terminal_shows_plans_of_both_kinds(kind: str) -> None:
    asked, made = PLANS[kind]()
    text = drawn(made, asked)
    assert f"{asked.name}: " in text
    assert "Demand and capacity" in text


def test_slices_pairs_and_idle_gpus_are_shown() -> None:
    asked, made = boxes.boxes()
    text = drawn(made, asked)
    assert "[0, 32) 2/8 of L40S:8" in text
    assert re.search(r"L40S:8, machine 0 +on-demand +4-5 +chat-prefill-0 +\[0, 32\)", text)
    assert re.search(r"machine 0 +on-demand +7 +idle", text)
    assert re.search(r"chat +apart +aws/us-east-2 +\d", text)
    assert "$34.50/h on 3 nodes, 16 GPUs and 1 GPU idle ($2.00/h)" in text
    costs = text[text.index("Cost per hour") :]
    assert re.search(r"idle GPUs +2.00 *\n +total +34.50", costs)
    page = Elements(render_plan_page(made, asked)).text
    assert "2/8 of L40S:8, machine 0, GPUs 4-5, on-demand, 32 layers" in page
    for part in ("chat-prefill-0", "Ways of requests", "idle GPUs"):
        assert part in page


def test_a_narrow_terminal_shows_slices_without_their_market() -> None:
    asked, made = boxes.boxes()
    for width in (76, 120):
        console = Console(width=width, markup=False)
        with console.capture() as captured:
            console.print(draw_plan(made, asked, width=width))
        text = captured.get()
        assert max(map(len, text.splitlines())) <= width
        assert "chat-prefill-0" in text
        assert ("on-demand" in text) == (width == 120)


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_that_was_cut_short_says_so(kind: str) -> None:
    asked, made = PLANS[kind]()
    hurried = made.model_copy(update={"cut_short": True})
    assert "Cut short by the deadline" not in drawn(made, asked)
    assert "Cut short by the deadline" in drawn(hurried, asked)
    assert "Cut short by the deadline" in render_plan_page(hurried, asked)


def test_a_slice_of_a_machine_of_a_cluster_is_shown() -> None:
    asked, made = PLANS["cluster"]()
    own = made.instances[0]
    node = own.nodes[0].model_copy(update={"gpu_ids": (0,)})
    cut = made.model_copy(
        update={
            "instances": (own.model_copy(update={"nodes": (node, *own.nodes[1:])}),),
        }
    )
    assert "a, GPUs 0" in drawn(cut, asked)
    assert "GPUs 0 of L40S:1" in render_plan_svg(cut, asked)


def test_only_one_placement_fits_a_drawing() -> None:
    with pytest.raises(UsageError, match="fixed clusters"):
        render_plan_svg(builders.small()[1], builders.small()[0])
    asked, made = PLANS["cluster"]()
    two = made.model_copy(update={"instances": made.instances * 2})
    with pytest.raises(UsageError, match="one model"):
        render_plan_svg(two, asked)


# Other things that are shown


def printed(renderable: object) -> str:
    console = Console(width=200, markup=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_an_explanation_in_the_terminal() -> None:
    text = printed(draw_explanation(explanation("lab"), ("a note",)))
    assert text.startswith(
        "lab: partial, $17.76/h, serves 83.1% of the demand. Planned again 7 times.\na note\n"
    )
    for part in ("What binds", "to spare", "25%", "Any one of these meets all demand", "Not asked"):
        assert part in text
    only = printed(draw_explanation(explanation("lab"), only_nodes=True))
    assert "What binds" not in only
    assert "1 of 2 used" in only


def test_an_explanation_that_found_no_repair_says_so() -> None:
    short = explanation("lab").model_copy(update={"repairs": (), "constraints": ()})
    for text in (printed(draw_explanation(short)), render_explanation_fragment(short)):
        assert "no single change was found that serves more" in text
        assert "nothing: no offer is used up and no limit is set" in text


def test_a_diff_is_shown_as_it_is_told() -> None:
    _, made = builders.small()
    less = made.model_copy(
        update={
            "instances": made.instances[1:],
            "usd_per_hour": made.usd_per_hour - made.instances[0].usd_per_hour,
        }
    )
    change = diff(made, less)
    assert printed(draw_diff(change)).strip() == change.text()
    text = Elements(render_diff_fragment(change)).text
    assert made.instances[0].id in text
    assert "stop" in text
    assert "Nothing changes" not in text
    assert "Nothing changes." in render_diff_fragment(diff(made, made))


def test_a_run_is_shown() -> None:
    text = Elements(render_simulation_page(*run_of("lab"))).text
    assert "99.9%" in text  # not all of them kept their promises
    assert "1,234/s" in text
    assert "$0.042" in text
    assert printed(draw_simulation(*run_of("lab"))).startswith(
        "lab keeps its promises for 99.9% of requests (95% promised)\n40 requests in 16s, "
    )


def test_a_run_without_requests_is_shown() -> None:
    report, problem = run_of("lab", 0)
    page = render_simulation_page(report, problem)
    assert page.count("<polyline") == 5
    assert Elements(page).text.count("- / -") == 2


@pytest.mark.parametrize("clock_s", [8.02, 9.9, 10.0, 16.0])
def test_the_last_bin_is_no_spike(clock_s: float) -> None:
    """It may be a moment, or all that runs out after the last arrival: what is in it is no rate."""
    report, problem = run_of("lab")
    last = 4000 if clock_s == 10.0 else 3000
    tokens = np.array([[4000], [4000], [4000], [4000], [last]])
    level = replace(report, clock_s=clock_s, series=replace(report.series, tokens=tokens))
    (plot,) = re.findall(
        r"<figure><figcaption[^>]*>tokens/s.*?</figure>",
        render_simulation_page(level, problem),
        re.DOTALL,
    )
    (points,) = re.findall(r'points="([^"]*)"', plot)
    heights = [point.split(",")[1] for point in points.split()]
    assert len(heights) == (5 if clock_s == 10.0 else 4)
    assert len(set(heights)) == 1


def test_a_run_shorter_than_a_bin_is_drawn() -> None:
    report, problem = run_of("lab")
    one = {
        name: getattr(report.series, name)[:1]
        for name in ("busy", "queue", "kv", "arrived", "finished", "tokens", "waiting", "flying")
    }
    short = replace(report, clock_s=0.5, series=replace(report.series, **one))
    assert "tokens/s" in render_simulation_page(short, problem)


LETTER = 6.2
"""Pixels that a digit of a label takes."""


def assert_readable(ticks: Sequence[PlacedText], *, left: float, right: float) -> None:
    """Labels along an axis neither touch nor are cut at the edges."""
    spans = [
        (tick.x - len(tick.text) * LETTER / 2, tick.x + len(tick.text) * LETTER / 2)
        for tick in ticks
    ]
    assert spans[0][0] >= left
    assert spans[-1][1] <= right
    assert all(a[1] + 2 <= b[0] for a, b in pairwise(spans)), [tick.text for tick in ticks]


@pytest.mark.parametrize("most", [0.003, 0.25, 99.0, 4_321.0, 87_654.0, 2.5e6, 7e8])
@pytest.mark.parametrize("end_s", [0.2, 16.0, 95.0, 600.0, 5_000.0, 90_000.0, 3e6])
def test_labels_of_axes_are_whole_and_apart(most: float, end_s: float) -> None:
    plot = plot_over_time("t", np.array([0.0, end_s]), end_s, {"line": np.array([0.0, most])})
    assert_readable(plot.ticks_x, left=0.0, right=plot.width)
    assert all(len(tick.text) * LETTER <= plot.left - 6 for tick in plot.ticks_y)
    assert len({tick.text for tick in plot.ticks_y}) == len(plot.ticks_y)


@pytest.mark.parametrize("low", [0.000_4, 0.013, 0.8, 33.0])
@pytest.mark.parametrize("span", [1.0, 1.3, 4.0, 30.0, 900.0, 1e5])
def test_labels_of_logarithmic_axes_are_whole_and_apart(low: float, span: float) -> None:
    plot = plot_distributions("t", [np.array([low, low * span])], [low])
    assert plot is not None
    assert_readable(plot.ticks_x, left=0.0, right=plot.width)


def test_the_heat_map_says_when() -> None:
    heat = map_heat("t", ["chat-decode-0 n0 RTX4090:8"], np.full((200, 1), 0.5), bin_s=3.0)
    assert [tick.text for tick in heat.ticks][:2] == ["0s", "2min"]
    assert_readable(heat.ticks, left=0.0, right=heat.width)
    last = heat.left + heat.cell * len(heat.rows[0].cells)
    assert heat.ticks[-1].x == pytest.approx(last)  # ten minutes
    assert len(heat.rows[0].name) * LETTER <= heat.left - 6


def promise(service: str, kept: float, cause: str | None = None) -> KeptPromise:
    return KeptPromise(
        service=service, target=0.95, kept=kept, low=kept - 0.01, high=kept + 0.01, kept_ttft=kept,
        kept_tpot=0.99, cause=cause,
    )  # fmt: skip


@pytest.mark.parametrize("kind", sorted(PLANS))
def test_a_plan_says_first_which_promises_it_keeps(kind: str) -> None:
    asked, made = PLANS[kind]()
    kept, broken = promise("chat", 0.971), promise("code", 0.5, "a prompt alone takes 3 s")
    plan = made.model_copy(update={"promises": (kept, broken)})
    good = "chat keeps its promises for 97.1% of requests (95% promised)"
    bad = "code keeps its promises for only 50% of requests (95% promised)"
    first, second, *_ = printed(draw_plan(plan, asked, width=200)).splitlines()
    assert first.startswith(good)
    assert second.startswith(bad)
    assert "Why: a prompt alone takes 3 s" in second
    page = render_plan_page(plan, asked)
    assert f'<p class="good">{good}' in page
    assert f'<p class="warn">{bad}' in page
    assert page.index(good) < page.index('class="cards"')
    # Drawn, too: how far the bar goes, and where it should go to.
    assert (
        'aria-label="kept for 97.1% of requests, promised for 95%"><i style="width:97.1%">' in page
    )
    assert 'class="meter short" role="img" aria-label="kept for 50% of' in page
    assert page.count("promised 95%</span>") == 2
    # Where nothing was simulated, nothing is said.
    assert "keeps its promises" not in render_plan_page(made, asked)


def test_a_run_that_breaks_promises_says_so_in_red() -> None:
    report, problem = run_of("lab")
    service = replace(
        report.services[0], attainment=0.441, attainment_ttft=0.53, attainment_tpot=0.8
    )
    broken = replace(report, services=(service,))
    (verdict,) = judge_run(broken, problem)
    assert verdict.is_kept is False
    assert verdict.text.endswith("44.1% of requests (95% promised): TTFT 53%, TPOT 80%")
    (line,) = draw_verdicts([verdict])
    assert "red" in str(line.style)
    assert '<p class="warn">lab keeps' in render_simulation_page(broken, problem)
    unjudged = replace(report, services=(replace(service, attainment=None),))
    assert judge_run(unjudged, problem)[0].is_kept is None
    silent = replace(report, services=(replace(service, attainment=None, requests=0),))
    assert judge_run(silent, problem) == []


@pytest.mark.parametrize(
    ("after", "said"), [(0.96, "; for 96% with"), (0.7, "; for only 70% with")]
)
def test_what_is_kept_with_a_node_lost_is_said(after: float, said: str) -> None:
    asked, made = builders.small()
    kept = promise("chat", 0.97).model_copy(update={"kept_after_loss": after})
    (verdict,) = judge_plan(made.model_copy(update={"promises": (kept,)}))
    assert "keeps its promises for 97% of" in verdict.text
    assert said in verdict.text
    assert verdict.is_kept == (after >= 0.95)
    assert ('class="good">chat' if verdict.is_kept else 'class="warn">chat') in render_plan_page(
        made.model_copy(update={"promises": (kept,)}), asked
    )


def test_just_enough_is_enough() -> None:
    report, problem = run_of("lab")
    enough = replace(report.services[0], attainment=problem.services[0].attainment)
    (verdict,) = judge_run(replace(report, services=(enough,)), problem)
    assert verdict.is_kept


@pytest.mark.parametrize("most", [1e-6, 0.3, 7.0, 99.0, 1e4])
@pytest.mark.parametrize("end_s", [0.01, 16.0, 600.0, 90_000.0, 3e6])
def test_axes_have_a_few_round_marks(most: float, end_s: float) -> None:
    values = np.array([0.0, most])
    plot = plot_over_time("t", np.array([0.0, end_s]), end_s, {"line": values})
    assert 2 <= len(plot.ticks_x) <= 9
    assert 3 <= len(plot.ticks_y) <= 6
    assert all(plot.left - 1e-6 <= tick.x <= plot.right + 1e-6 for tick in plot.ticks_x)
    assert (
        min(tick.y for tick in plot.ticks_y)
        <= min(float(point.split(",")[1]) for point in plot.lines[0].points.split()) + 0.1
    )


@pytest.mark.parametrize("span", [1.01, 3.0, 50.0, 1e4, 1e9])
def test_logarithmic_axes_have_a_few_marks(span: float) -> None:
    plot = plot_distributions("t", [np.array([0.013, 0.013 * span])], [None])
    assert plot is not None
    assert 2 <= len(plot.ticks_x) <= 10
    assert plot_distributions("t", [np.array([np.nan])], [None]) is None


def test_a_fragment_without_details_has_no_fold() -> None:
    shown = {"title": "t", "facts": [], "drawing": ""}
    assert "<details>" not in render_fragment("charts.html.j2", shown)
    assert "<details>" in FRAGMENTS["rented"]("lab")
