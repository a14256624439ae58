"""Checks that kill executors see what they are there to see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.operated_site import processes_of
from tests.slow.tasks.live_fleet import store_of
from tests.slow.tasks.task_clients import HeardReply
from tests.slow.tasks.task_leftovers import ProcessWatch, StoredArrays
from tests.slow.tasks.task_strikes import ChaosOutcome


def test_a_letter_or_a_byte_makes_another_answer() -> None:
    right = HeardReply("A red circle.", bytearray(b"\0\1"))
    assert HeardReply("A red circle.", bytearray(b"\0\1"), pieces=3, gap_s=2.0).is_same(right)
    other = HeardReply("A red circle", bytearray(b"\0\1"))
    assert not other.is_same(right)
    assert other.difference(right) == "'A red circle' instead of 'A red circle.'"
    assert not HeardReply("A red circle.", bytearray(b"\0\2")).is_same(right)


def test_whatever_is_stored_is_a_leak() -> None:
    assert StoredArrays(0, 0, 0, 0, 0).leaked == 0
    assert StoredArrays(2, 0, 2, 0, 0).leaked == 2
    assert StoredArrays(0, 8192, 1, 0, 0).leaked == 1
    assert StoredArrays(0, 0, 0, 1, 0).leaked == 1
    assert StoredArrays(0, 0, 3, 0, 0).leaked == 3


def test_arrays_that_nobody_could_count_are_a_leak() -> None:
    outcome = ChaosOutcome()
    assert outcome.leaked_handles == 1
    outcome.arrays = StoredArrays(0, 0, 0, 0, running=1)
    assert outcome.leaked_handles == 1
    outcome.arrays = StoredArrays(0, 0, 0, 0, running=0)
    assert outcome.leaked_handles == 0


def test_a_process_that_is_left_is_found_until_it_ends(tmp_path: Path) -> None:
    watch = ProcessWatch()
    wait = "import sys; sys.stdin.read()"
    with subprocess.Popen(
        (sys.executable, "-S", "-c", wait, str(tmp_path)), stdin=subprocess.PIPE
    ) as left:
        watch.look()
        assert left.pid in watch.survivors()
        assert len(processes_of(tmp_path)) == 1
    assert left.pid not in watch.survivors()
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("opened", "store"),
    [
        ("/dev/shm/atoll-run-ab/3/x", "/dev/shm/atoll-run-ab"),
        ("/dev/shm/atoll-run-ab (deleted)", "/dev/shm/atoll-run-ab"),
        ("/dev/shm/other", None),
        ("/tmp/atoll-run-ab", None),
    ],
)
def test_a_store_is_told_by_what_is_open_in_it(opened: str, store: str | None) -> None:
    assert store_of(opened) == (None if store is None else Path(store))
