"""Reports as a browser prints them: on white paper, nothing cut off, nothing folded away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll.report.pareto_report import render_pareto_page
from atoll.report.plan.show import render_plan_page
from tests.plan import builders
from tests.report.test_pages import promise
from tests.report.test_pareto_report import report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

A4 = (718, 1047)
"""Pixels of what is printed on: A4 within margins of 1 cm."""


def plan_page() -> str:
    asked, made = builders.small()
    kept = (promise("chat", 0.971), promise("code", 0.5, "a prompt alone takes 3 s"))
    return render_plan_page(made.model_copy(update={"promises": kept}), asked)


@pytest.mark.parametrize("name", ["plan", "pareto"])
def test_a_report_prints_on_paper(browser: Browser, name: str) -> None:
    html = plan_page() if name == "plan" else render_pareto_page(report())
    width, height = A4
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark")
    try:
        page.set_content(html)
        page.emulate_media(media="print")
        body = "document.querySelector('.atoll')"
        assert page.evaluate(f"getComputedStyle({body}).backgroundColor") == "rgb(255, 255, 255)"
        wide = page.evaluate(
            "[...document.querySelectorAll('svg, table, .cards')].filter((one) =>"
            " one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML)"
        )
        assert wide == []
        assert page.pdf(format="A4", print_background=True).startswith(b"%PDF-")
        # What stands beside marks stays on the drawing.
        outside = page.evaluate(
            "[...document.querySelectorAll('.meter span, svg text')].filter((one) =>"
            " one.getBoundingClientRect().left < 0 ||"
            " one.getBoundingClientRect().right > innerWidth).map((one) => one.textContent)"
        )
        assert outside == []
    finally:
        page.close()
