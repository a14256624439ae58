"""Looking back, in a real browser."""

from __future__ import annotations

from tests.dashboard.browser.conftest import Site, Visit


def test_curves_of_models_over_the_time_that_is_chosen(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.go("/history")
    page = visitor.page
    chart = page.get_by_role("region", name="Requests that kept their promise")
    assert "qwen3-32b" in (chart.locator("svg").first.get_attribute("aria-label") or "")
    # A gap is no line, and what changed is marked.
    assert (chart.locator("path.stroke").first.get_attribute("d") or "").count("M") == 2
    marks = " / ".join(chart.locator(".mark title").all_text_contents())
    assert "another plan is in force" in marks
    # What the controller decided, which the planner knows.
    assert "demand of chat rose" in marks
    page.get_by_label("Time", exact=True).select_option("2592000")
    page.wait_for_function("() => location.search.includes('range=2592000')")
    page.get_by_role("region", name="Cost").wait_for()
    asked = [s.query.decode() for s in site.gateway.seen if s.path == b"/atoll/v1/history"]
    since, until = (
        float(asked[-1].partition(f"{name}=")[2].partition("&")[0])
        for name in ("since_s", "until_s")
    )
    assert until - since == 2592000


def test_machines_are_found_by_name_and_told_in_figures(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.go("/history?of=machines")
    page = visitor.page
    load = page.get_by_role("region", name="GPU load", exact=True)
    load.wait_for()
    page.get_by_label("Find").fill("gpu2")
    page.get_by_text("1 machine, a point every").wait_for()
    load.locator("summary").click()
    assert "gpu2" in load.get_by_role("table").inner_text()
    assert "gpu1" not in load.inner_text()
    assert (
        page.get_by_role("region", name="Changes", exact=True)
        .get_by_text("machine gpu2 joined")
        .count()
        == 1
    )
