"""The page on measured servers is what its tool makes of the recorded data."""

from __future__ import annotations

from tools.fidelity_page import PAGE, page


def test_the_page_is_made_from_data() -> None:
    assert PAGE.read_text("utf-8") == page()
