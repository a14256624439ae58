"""What of a live fleet counts as left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slow.tasks.live_fleet import store_of


@pytest.mark.parametrize(
    ("opened", "store"),
    [
        ("/dev/shm/atoll-run-ab/3/x", "/dev/shm/atoll-run-ab"),
        ("/dev/shm/atoll-run-ab/3/x (deleted)", "/dev/shm/atoll-run-ab"),
        ("/dev/shm/atoll-run-ab (deleted)", "/dev/shm/atoll-run-ab"),
        ("/dev/shm/other", None),
        ("/tmp/atoll-run-ab", None),
    ],
)
def test_a_store_is_told_by_what_is_open_in_it(opened: str, store: str | None) -> None:
    assert store_of(opened) == (None if store is None else Path(store))
