"""What docs/reference/fleet.md shows can be run, and what it lists is what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from atoll.core.errors import InputError
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.files.fleet_schema import (
    CloudSpec,
    ClusterSpec,
    EngineSpec,
    FleetSpec,
    LimitsSpec,
    PoolSpec,
    RiskSpec,
    ServiceSpec,
    SettingsSpec,
)
from atoll.plan.validate.violation import Rule
from tests.plan.files.test_fleet_file import SMALL

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/reference/fleet.md").read_text("utf-8")


def first_cells(header: str) -> set[str]:
    """The names in the first column of every table whose first heading is `header`."""
    found: set[str] = set()
    for table in re.findall(rf"^\| {header} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        for line in table.splitlines():
            found |= set(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return found


def test_the_file_it_shows_is_read() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    asked = parse_fleet(text)
    assert [service.name for service in asked.services] == ["chat", "search"]


def test_every_key_is_explained() -> None:
    keys = set(ServiceSpec.model_fields)
    keys |= {f"cloud.{name}" for name in CloudSpec.model_fields}
    keys |= set(PoolSpec.model_fields) - {"cloud"}
    keys |= {f"engine.{name}" for name in EngineSpec.model_fields}
    keys |= {f"limits.{name}" for name in LimitsSpec.model_fields}
    keys |= {f"risk.{name}" for name in RiskSpec.model_fields}
    keys |= {f"settings.{name}" for name in SettingsSpec.model_fields}
    keys |= {f"cluster.{name}" for name in ClusterSpec.model_fields}
    keys |= set(FleetSpec.model_fields) - {
        "services",
        "pool",
        "cluster",
        "limits",
        "risk",
        "settings",
    }
    assert first_cells("Key") == keys


def test_every_rule_is_explained() -> None:
    assert first_cells("Rule") == set(get_args(Rule))


def test_every_example_is_there() -> None:
    there = {path.name for path in (ROOT / "examples").glob("*.yaml")}
    assert first_cells("Example") == there


@pytest.mark.parametrize("old_new", [("ttft", "tfft"), ("L4:1", "L4:2")])
def test_errors_are_as_shown(old_new: tuple[str, str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_fleet(SMALL.replace(*old_new), path="fleet.yaml")
    assert f"error: {caught.value}\n" in PAGE
