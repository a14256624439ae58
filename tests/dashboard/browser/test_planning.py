"""Plan, what-if and traces in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.browser.conftest import Site, Visit

pytestmark = pytest.mark.slow


def test_what_if_plans_again_when_a_dial_is_turned(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-notebook")
    page = visitor.page
    visitor.go("/whatif?fleet=lab")
    page.locator(".verdict").wait_for()
    before = page.locator(".verdict").inner_text()
    dial = page.get_by_role("slider", name="Demand of chat")
    dial.focus()
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "old => document.querySelector('.verdict').innerText !== old", arg=before
    )
    asked = [r for r in site.planner.seen if r.path.endswith(b"/whatif")]
    assert b'"demand":{"chat":' in asked[-1].body.replace(b" ", b"")
    # Side by side, with both costs.
    now, then = (
        page.get_by_label("Now", exact=True),
        page.get_by_label("With these changes", exact=True),
    )
    assert "$" in now.inner_text()
    assert "an hour" in then.inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "lab-whatif.yaml"
    assert Path(download.value.path()).read_text().startswith("name:")


def test_a_viewer_asks_for_no_plan(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-finance")
    visitor.go("/whatif?fleet=lab")
    visitor.page.get_by_text("Viewers look only").wait_for()
    assert not [r for r in site.planner.seen if r.path.endswith(b"/whatif")]


def test_a_change_is_approved_by_an_admin_only(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-notebook")
    visitor.go("/plan?fleet=lab")
    visitor.page.get_by_text("An operator can apply or refuse it here").wait_for()
    assert visitor.page.get_by_role("button", name="Apply this change").count() == 0

    admin = visit(site)
    admin.go("/plan?fleet=lab")
    admin.page.get_by_role("button", name="Apply this change").click()
    admin.page.get_by_text("being applied").wait_for()
    assert site.planner.next is not None
    assert site.planner.next["state"] == "applying"


def test_a_fleet_without_a_plan_is_planned_on_demand(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.go("/plan?fleet=quickstart")
    visitor.page.get_by_role("button", name="Plan it now").click()
    visitor.page.get_by_role("region", name="Who serves what").wait_for()
    assert visitor.page.locator(".plan-picture .instance").count() > 0


def test_a_trace_is_uploaded_simulated_and_removed(
    site: Site, visit: Visit, tmp_path: Path
) -> None:
    visitor = visit(site)
    page = visitor.page
    file = tmp_path / "<img src=x onerror=alert(1)>.csv"
    file.write_text("time,input,output\n0,10,10\n1,10,10\n")
    visitor.go("/traces")
    page.get_by_label("Trace file").set_input_files(file)
    page.get_by_role("radio", name=file.name).wait_for()
    page.get_by_role("button", name="Simulate").click()
    page.get_by_role("link", name="The whole report").wait_for()
    assert "kept" in page.get_by_role("region", name="Result", exact=True).inner_text().lower()
    page.get_by_role("button", name=f"Remove {file.name}").click()
    page.get_by_role("radio", name=file.name).wait_for(state="detached")
