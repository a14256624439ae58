"""The page on measured servers is what its tool makes of the recorded data."""

from __future__ import annotations

from atoll.catalog.gpus import default_gpus
from tools.fidelity_page import PAGE, page


def test_the_page_is_made_from_data() -> None:
    assert PAGE.read_text("utf-8") == page()


def test_every_gpu_has_a_line() -> None:
    lines = page().splitlines()
    for name in default_gpus():
        assert any(line.startswith(f"| {name} | ") for line in lines), name
