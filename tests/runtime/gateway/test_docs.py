"""What the reference of the gateway says is what ships."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from atoll.core.files import parse_yaml
from atoll.runtime.gateway.gateway_metrics import GatewayMetrics
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


def _codes(tree: ast.AST) -> Iterator[str]:
    """Yield the codes of errors that are made: `code="x"`, `code, y = "x", z`, `server_fault(..., "x")`."""
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call):
            values = [word.value for word in node.keywords if word.arg == "code"]
            if isinstance(node.func, ast.Name) and node.func.id == "server_fault":
                values += node.args[2:3]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = [getattr(target, "id", "") for target in node.targets[0].elts]
            if "code" in names and isinstance(node.value, ast.Tuple):
                values = [node.value.elts[names.index("code")]]
        for value in values:
            # `x if y else z` may be one or the other.
            for part in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


@pytest.mark.slow
def test_error_codes_are_documented_and_documented_ones_exist() -> None:
    runtime = Path(__file__).resolve().parents[3] / "src/atoll/runtime"
    files = [runtime / "openai.py"]
    for folder in ("gateway", "http", "accounts"):
        files += sorted((runtime / folder).rglob("*.py"))
    made = {code for file in files for code in _codes(ast.parse(file.read_text("utf-8")))}
    section = PAGE[PAGE.index("### Error codes") :]
    section = section[: section.index("Other errors have")]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    told = {code for row in rows for code in re.findall(r"`(\w+)`", row)} - {"code"}
    assert told == made
