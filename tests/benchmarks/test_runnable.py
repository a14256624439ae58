"""What is planned runs, for a few of the fleets that `benchmarks.runnable` looks at."""

from __future__ import annotations

import pytest

from atoll.catalog import Catalog
from atoll.plan.files.fleet_file import parse_fleet
from benchmarks.planning.runnable import look_at
from benchmarks.planning.runnable_fleets import FLEETS

FEW = ("V100 machines alone", "gpt-oss on A10G", "phases apart asked for", "MI300X boxes")


@pytest.mark.parametrize("name", FEW)
def test_every_instance_has_an_engine_a_command_and_room(name: str) -> None:
    found = look_at(parse_fleet(FLEETS[name]), Catalog.default())
    assert found.instances > 0
    assert found.without_command == []
    assert found.over_memory == []
    assert found.differs == []
    assert found.served == 1.0
    assert "-" not in found.run_by


def test_all_fleets_can_be_read() -> None:
    assert len(FLEETS) == 20
    for text in FLEETS.values():
        assert parse_fleet(text).settings.engines
