"""Machines in a real browser: the list, pipelines as pictures, and draining with care."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.dashboard.browser.conftest import Site, Visit

pytestmark = pytest.mark.slow

_EVIL = "<img src=x onerror=alert(1)>"


def _line(page: Any, name: str) -> Any:
    return page.locator(".machine").filter(
        has=page.locator("summary").get_by_text(name, exact=True)
    )


def _is_drained(site: Site) -> bool:
    """Return whether the gateway's first machine is drained."""
    return bool(site.gateway.machines[0]["drained"])


def test_machines_and_pipelines_are_shown(site: Site, visit: Visit) -> None:
    visitor = visit(site, key="atoll-finance")
    page = visitor.page
    visitor.go("/machines")
    line = _line(page, "gpu1")
    told = line.locator("summary").inner_text()
    for words in (
        "ETH",
        "verified",
        "2 \N{MULTIPLICATION SIGN} A100",
        "160 GiB",
        "layers 0\N{EN DASH}39",
        "$3.10/h",
        "up",
    ):
        assert words in told
    boxes = page.locator(".pipe-box")
    assert boxes.count() == 2
    assert "gpu1: layers 0\N{EN DASH}39 of 64, up" in str(boxes.nth(0).get_attribute("aria-label"))
    widths = boxes.evaluate_all("all => all.map((box) => box.getBoundingClientRect().width)")
    assert widths[0] > 1.3 * widths[1]  # 40 of 64 layers, and 24.
    # A box opens its machine, by keyboard.
    boxes.nth(0).focus()
    page.keyboard.press("Enter")
    line.get_by_text("verified by its certificate").wait_for()
    assert line.get_by_role("button").count() == 0
    assert "is for operators; you are logged in as viewer" in line.inner_text()


def test_the_filter_leaves_what_fits(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page
    visitor.go("/machines")
    page.get_by_label("Find machines").fill("eth a100")
    assert page.locator(".machine:visible").count() == 2
    assert "2 of 6 machines shown" in page.locator("main").inner_text()
    page.get_by_label("Find machines").fill("no such thing")
    page.get_by_text("No machine fits").wait_for()


def test_a_machine_is_drained_by_its_name_and_taken_back(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page
    visitor.go("/machines")
    line = _line(page, "gpu1")
    line.locator("summary").click()
    line.get_by_role("button", name="Drain…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox").fill("gpu2")
    dialog.get_by_role("button", name="Drain").click()
    dialog.get_by_text("That is not its name").wait_for()
    assert not _is_drained(site)
    dialog.get_by_role("textbox").fill("gpu1")
    dialog.get_by_role("button", name="Drain").click()
    back = line.get_by_role("button", name="Take back into service")
    back.wait_for()
    assert _is_drained(site)
    back.click()
    line.get_by_role("button", name="Drain…").wait_for()
    assert not _is_drained(site)


def test_the_last_one_is_drained_only_after_a_warning(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    visitor.expected.append("status of 409")
    page = visitor.page
    visitor.go("/machines")
    asked: list[Any] = []

    def answer(route: Any) -> None:
        body = json.loads(route.request.post_data)
        asked.append(body)
        if body.get("force"):
            route.continue_()
        else:
            told = {"message": "the last one", "type": "x", "code": "last_backend", "param": None}
            route.fulfill(status=409, json={"error": told})

    page.route("**/drain", answer)
    line = _line(page, "gpu6")
    line.locator("summary").click()

    def drain() -> None:
        line.get_by_role("button", name="Drain…").click()
        page.get_by_role("dialog").get_by_role("textbox").fill("gpu6")
        page.keyboard.press("Enter")

    drain()
    page.get_by_role("button", name="Leave it in service").click()
    assert asked == [{"confirm": "gpu6"}]
    drain()
    page.get_by_text("requests for gemma-3-27b will fail").wait_for()
    page.get_by_role("button", name="Drain it anyway").click()
    line.get_by_role("button", name="Take back into service").wait_for()
    assert asked[-1] == {"confirm": "gpu6", "force": True}


@pytest.mark.parametrize("width", [1280, 360])
def test_names_stay_text_and_within_the_screen(site: Site, visit: Visit, width: int) -> None:
    names = (_EVIL, "n" * 120, "\u0639\u0642\u062f\u0629 \u05e9\u05dc\u05d5\u05dd")
    for machine, name in zip(site.gateway.machines, names, strict=False):
        machine.update(name=name, provider=name, region=name, site=name, reason=name)
        machine["services"][0]["model"] = name
    visitor = visit(site, width=width)
    page = visitor.page
    visitor.go("/machines")
    for summary in page.locator(".machine summary").all():
        summary.click()
    assert page.locator("main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    line = _line(page, _EVIL)
    line.get_by_role("button", name="Drain…").click()
    page.get_by_role("dialog").get_by_role("textbox").fill(_EVIL)
    page.keyboard.press("Enter")
    line.get_by_role("button", name="Take back into service").wait_for()
    assert _is_drained(site)


def test_machines_are_asked_for_again_when_they_changed(site: Site, visit: Visit) -> None:
    visitor = visit(site)
    page = visitor.page
    visitor.go("/machines")
    line = _line(page, "gpu2")
    line.locator("summary").click()
    site.gateway.machines[1].update(state="ejected", reason="too slow")
    site.gateway.version += 1
    line.get_by_text("too slow").wait_for()
    assert line.evaluate("line => line.open")


def test_a_fresh_install_says_how_to_begin(bare_site: Site, site: Site, visit: Visit) -> None:
    visitor = visit(bare_site)
    for name in ("machines", "chat"):
        visitor.go(f"/{name}")
        visitor.page.get_by_text("No gateway runs here").wait_for()
    site.gateway.machines.clear()
    visitor = visit(site)
    visitor.go("/machines")
    visitor.page.get_by_text("atoll join --fabric").first.wait_for()


def test_a_backend_and_its_stages_are_counted_once(site: Site, visit: Visit) -> None:
    backend = site.gateway.machines[0]
    name = "smollm2-both-of-the-lab-0"
    backend.update(id=name, name=name, role="backend", instance=name, gpus=[], cpus=4)
    stages = [
        {**backend, "id": f"{name}/n{at}", "name": f"{name}/n{at}", "role": "node"}
        for at in range(4)
    ]
    for stage in stages:
        stage.update(can_drain=False, usd_per_hour=None, cpus=1, planned="CORE-S:1")
    site.gateway.machines[:] = [backend, *stages]
    visitor = visit(site)
    page = visitor.page
    visitor.go(f"/machines?id={name}%2Fn2")
    assert "4 of 4" in page.locator(".figures").inner_text()
    opened = page.locator(".machine[open]")
    assert opened.locator("summary .m-name").inner_text() == f"{name}/n2"
    assert "1 core" in opened.inner_text()
    assert "1 cores" not in opened.inner_text()
    # What one looks for is read in full.
    cut = page.locator(".m-name bdi").evaluate_all(
        "all => all.filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).length"
    )
    assert cut == 0
    visitor.go("/overview")
    assert "5 machines up" in page.locator(".headline").inner_text()
