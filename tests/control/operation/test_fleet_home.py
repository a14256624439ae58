"""The home of a fleet: what is kept there, for whom, and how it is found again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from atoll.control.operation.fleet_home import (
    Daemon,
    Entrance,
    FleetHome,
    FleetRecord,
    WeightsRecord,
    find_home,
    home_of,
    list_homes,
    write_holder,
)
from atoll.core.errors import InputError, UnknownNameError
from atoll.deploy.local.daemon import ProcessId, process_start
from atoll.deploy.target_table import TargetSettings


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def record(name: str, source: str = "/fleet.yaml", *, up: bool = True) -> FleetRecord:
    return FleetRecord(name=name, source=source, targets=TargetSettings(), up=up)


def make(name: str, source: str = "/fleet.yaml", *, up: bool = True) -> FleetHome:
    home = home_of(name)
    home.make()
    home.write(record(name, source, up=up))
    return home


def daemon(pid: int, start: str) -> Daemon:
    return Daemon(process=ProcessId(pid=pid, start=start), log="/log")


def test_what_is_written_is_read_again(state: Path) -> None:
    home = home_of("a/b c")
    assert home.folder.parent == state / "fleets"
    assert home.read() is None
    home.make()
    assert stat.S_IMODE(home.folder.stat().st_mode) == 0o700
    whole = record("a/b c").model_copy(
        update={
            "weights": {"chat": WeightsRecord(source="hf://a/b", names=("chat",))},
            "entrance": Entrance(token="/t", observer="/o", hub=daemon(1, "2")),
        }
    )
    home.write(whole)
    assert FleetHome(home.folder).read() == whole


def test_a_fleet_is_found_by_name_file_or_alone(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("not even a fleet file")
    home = make("lab", str(file.resolve()))
    assert find_home("lab", None)[0].folder == home.folder
    assert find_home(str(file), None)[0].folder == home.folder
    assert find_home(None, None)[1].name == "lab"
    make("old", up=False)
    assert find_home(None, None)[1].name == "lab"
    assert find_home("old", None)[1].name == "old"
    make("other")
    assert [each.folder.name for each in list_homes()] == ["lab", "old", "other"]
    with pytest.raises(UnknownNameError, match="lab"):
        find_home(None, None)
    with pytest.raises(UnknownNameError, match="did you mean"):
        find_home("labb", None)
    with pytest.raises(InputError, match="no fleet"):
        find_home(None, tmp_path / "nowhere")


def test_a_process_counts_only_with_its_own_start() -> None:
    pid = os.getpid()
    start = process_start(pid)
    assert start is not None
    assert daemon(pid, start).is_alive
    assert not daemon(pid, "1").is_alive


def test_a_lease_of_a_dead_process_is_free_at_once() -> None:
    home = make("lab")
    living = write_holder("operate")
    taken = home.lease.take(living, 100.0, 90.0)
    assert home.free_lease(110.0) is None
    assert not home.has_dead_holder(taken)
    home.lease.release(taken, 111.0)
    # The same number, another start: that process is gone.
    dead = living.replace(f"{os.getpid()}.", f"{os.getpid()}.9")
    home.lease.take(dead, 120.0, 90.0)
    freed = home.free_lease(130.0)
    assert freed is not None
    assert home.lease.take(living, 131.0, 90.0).term == freed.term + 1


def test_a_lease_of_another_machine_is_waited_for() -> None:
    home = make("lab")
    home.lease.take("atoll operate of process 1.2 on another-machine", 100.0, 90.0)
    assert home.free_lease(110.0) is None


def test_a_record_with_an_unknown_target_is_refused() -> None:
    with pytest.raises(InputError, match="no target is called 'moon'"):
        TargetSettings.parse({"names": ["moon"]})
