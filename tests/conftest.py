"""Settings shared by every test."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import settings

# Fixed examples by default, so a red run is red again; HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

_PLANNING = tuple(Path(__file__).parent / name for name in ("cli", "prove", "research", "solve"))


@pytest.fixture(autouse=True)
def planning_is_timed_by_its_own_work(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planners stop after so much CPU time instead of wall time.

    What a search finds in a second must not depend on who else is at work on the machine.
    """
    if any(request.path.is_relative_to(folder) for folder in _PLANNING):
        monkeypatch.setattr(time, "perf_counter", time.process_time)
