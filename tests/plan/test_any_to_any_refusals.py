"""The table of what any-to-any plans refuse is on the page as it is in the code."""

from __future__ import annotations

import pytest

from tests.plan.any_to_any_refusals import (
    ASKED,
    PAGE,
    PLAIN,
    ask,
    draw_table,
    list_refusals,
    put_table,
)


def test_the_page_has_what_the_code_refuses() -> None:
    page = PAGE.read_text("utf-8")
    assert put_table(page, draw_table()) == page, "python -m tests.plan.any_to_any_refusals"


def test_every_refusal_says_why_in_a_line() -> None:
    found = list_refusals()
    assert found
    for one in found:
        assert len(one.why) > 15, one
        assert "\n" not in one.why, one
        assert "|" not in one.why, one


@pytest.mark.parametrize("row", ASKED)
def test_plain_services_have_what_is_refused(row: tuple[str, str]) -> None:
    """Or the reason of a row would be another than that a service runs on executors."""
    assert ask(ASKED[row], PLAIN) is None
