from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.runtime.executor.arrays import INLINE_BYTES, open_handle
from atoll.runtime.executor.store import ArrayStore, remove_stale_stores

_BIG = INLINE_BYTES + 8


def _leave(folder: Path, *names: str) -> None:
    """Make what a killed process leaves."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / ("0" * 32 + ".array")).write_bytes(b"old")
        (folder / name / ("1" * 32 + ".part")).write_bytes(b"old")


def test_stores_of_the_dead_are_removed_and_no_others(tmp_path: Path) -> None:
    _leave(tmp_path, "atoll-dead/one", "atoll-dead/two", "atoll-alone", "other-dead/one")
    _leave(tmp_path, "atoll-half/dead", "atoll-notes/one", "away/one")
    (tmp_path / "atoll-notes" / "one" / "notes.txt").write_text("mine")
    (tmp_path / "atoll-link").symlink_to(tmp_path / "away")
    (tmp_path / "atoll-file").write_text("mine")
    (tmp_path / "atoll-run-young").mkdir()
    (tmp_path / "atoll-store-empty").mkdir()
    (tmp_path / "atoll-old").mkdir()
    os.utime(tmp_path / "atoll-old", (0, 0))
    live = ArrayStore(tmp_path / "atoll-half" / "live", 2**20, owner="me")
    alone = ArrayStore(tmp_path / "atoll-mine", 2**20, owner="me")
    kept = [store.put(np.ones(_BIG, np.uint8), "you", 10.0) for store in (live, alone)]
    assert remove_stale_stores(tmp_path) == [
        *("atoll-alone", "atoll-dead", "atoll-old", "atoll-store-empty"),
    ]
    left = {path.name.removeprefix("atoll-") for path in tmp_path.iterdir()}
    assert left == {"file", "half", "link", "mine", "notes", "run-young", "away", "other-dead"}
    assert len(list((tmp_path / "atoll-half" / "dead").iterdir())) == 2
    assert len(list((tmp_path / "away" / "one").iterdir())) == 2
    assert (tmp_path / "atoll-notes" / "one" / "notes.txt").exists()
    for handle in kept:
        assert open_handle(handle).all()
    live.close()
    alone.close()
    assert remove_stale_stores(tmp_path) == ["atoll-half"]
    assert remove_stale_stores(tmp_path / "none") == []


def test_a_store_that_opens_while_its_folder_is_removed_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "atoll-x" / "store"
    real = fcntl.flock
    removed: list[list[str]] = []

    def flock(descriptor: int, operation: int) -> None:
        if not removed:
            # Between being made and being locked, another process takes it for a dead one's.
            monkeypatch.setattr(fcntl, "flock", real)
            removed.append(remove_stale_stores(tmp_path))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    store = ArrayStore(folder, 2**20, owner="me")
    assert removed == [["atoll-x"]]
    assert open_handle(store.put(np.ones(_BIG, np.uint8), "you", 10.0)).all()
    assert remove_stale_stores(tmp_path) == []
    store.close()


def test_the_store_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, numpy; from atoll.runtime.executor.store import ArrayStore\n"
        "store = ArrayStore(pathlib.Path(sys.argv[1]), 2**20, owner='x')\n"
        "store.put(numpy.ones(5000), 'you', 60.0); print('ready', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "atoll-x" / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert remove_stale_stores(tmp_path) == []
        process.kill()
        process.wait()
    assert remove_stale_stores(tmp_path) == ["atoll-x"]
    assert list(tmp_path.iterdir()) == []
