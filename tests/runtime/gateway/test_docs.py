"""What the reference of the gateway says is what ships."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from atoll.core.files import parse_yaml
from atoll.runtime.gateway.metrics import GatewayMetrics
from atoll.runtime.gateway.settings import Deadlines, GatewayFile, GatewayLimits
from atoll.runtime.pool.pool import BackendPool

PAGE = (Path(__file__).resolve().parents[3] / "docs/reference/gateway.md").read_text("utf-8")
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def test_example_is_a_configuration() -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    file = GatewayFile.parse(parse_yaml(example, path="gateway.yaml").data)
    assert [b.kind for b in file.backends] == ["vllm", "atoll"]
    assert file.deadlines.between_tokens_s == 10


def test_defaults() -> None:
    for name, defaults in (("limits", asdict(GatewayLimits())), ("deadlines", asdict(Deadlines()))):
        (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        said = {
            key: float(number) * UNITS.get(unit, 1)
            for key, number, unit in re.findall(r"`(\w+)` (\d+)(?: (\wiB))?", row)
            if key != name
        }
        assert said == defaults


def test_metrics_are_named() -> None:
    page = GatewayMetrics(BackendPool()).page(0, 0).decode()
    named = set(re.findall(r"^# TYPE atoll_gateway_(\w+)", page, re.MULTILINE))
    section = PAGE[PAGE.index("## Metrics and logs") :]
    assert named == set(re.findall(r"`(\w+)`", section[: section.index("Labels are")])) - {
        "atoll_gateway_"
    }
