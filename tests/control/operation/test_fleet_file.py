"""The file of an operated fleet is replaced by whoever has read it, and what it was is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.control.operation import fleet_file
from atoll.control.operation.fleet_file import FileChangedError, FleetFile, name_version
from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.core.errors import UnknownNameError
from atoll.deploy.target_table import TargetSettings


@pytest.fixture
def file(tmp_path: Path) -> FleetFile:
    home = FleetHome(tmp_path / "home")
    home.make()
    source = tmp_path / "lab.yaml"
    source.write_text("one\n")
    return FleetFile(home, FleetRecord(name="lab", source=str(source), targets=TargetSettings()))


def test_a_file_is_replaced_and_what_it_was_is_kept(file: FleetFile) -> None:
    _, first = file.read()
    second = file.replace("two\n", first, 7.0)
    assert file.path.read_text() == "two\n"
    assert file.read() == ("two\n", second)
    (earlier,) = file.list_earlier()
    assert (earlier.name, earlier.replaced_s) == (first, 7.0)
    assert file.read_earlier(first) == "one\n"
    with pytest.raises(UnknownNameError):
        file.read_earlier("../lock")


def test_nobodys_change_is_lost(file: FleetFile) -> None:
    _, first = file.read()
    file.path.write_text("by hand\n")
    with pytest.raises(FileChangedError):
        file.replace("two\n", first, 7.0)
    assert file.path.read_text() == "by hand\n"
    assert file.list_earlier() == ()


def test_the_same_again_changes_nothing(file: FleetFile) -> None:
    before = file.path.stat()
    version = name_version("one\n")
    assert file.replace("one\n", version, 7.0) == version
    assert file.path.stat().st_mtime_ns == before.st_mtime_ns
    assert file.list_earlier() == ()


def test_only_so_many_are_kept(file: FleetFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_file, "MAX_KEPT", 3)
    for number in range(6):
        file.replace(f"{number}\n", file.read()[1], float(number))
    assert [each.replaced_s for each in file.list_earlier()] == [5.0, 4.0, 3.0]
