"""Real engines under `atoll join` behind a gateway do what the table in the docs says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.real.table import read_noted

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """All that a run of the probes finds, on one fleet: engines take minutes to start."""
    pytest.importorskip("torch", reason="needs the extra 'engine'")
    from tests.real.record import collect, find_engines

    return collect(*find_engines())


def _words(found: dict[str, Any], engine: str) -> dict[str, str]:
    return {
        row: f"{cells[engine]['word']} {cells[engine].get('why', '')}".strip()
        for row, cells in found["features"].items()
        if engine in cells
    }


@pytest.mark.parametrize("engine", ["atoll", "vllm", "llamacpp", "sglang"])
def test_an_engine_does_what_the_table_says(found: dict[str, Any], engine: str) -> None:
    missing = found["engines"][engine].get("not_run")
    if missing:
        pytest.skip(f"{engine} cannot run here: {missing}")
    words = _words(found, engine)
    noted = _words(read_noted(), engine)
    if not noted:
        pytest.skip(f"{engine} ran, and nothing is noted yet: python -m tests.real.record")
    # Where only some engines run, streams have nobody to go on at.
    assert {row: noted.get(row) for row in words} == words, "python -m tests.real.record"
