"""The dashboard shows what gateways expose: every series and label it names is made by the code."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD: dict[str, Any] = json.loads(
    (ROOT / "deploy" / "grafana" / "atoll.json").read_text(encoding="utf-8")
)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in SHOWN for target in panel["targets"]]


@cache
def made_series() -> dict[str, frozenset[str]]:
    """Every series that code under src/atoll makes, with its labels."""
    found: dict[str, frozenset[str]] = {}
    for path in sorted((ROOT / "src" / "atoll").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if '"atoll_' not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and node.args:
                name = node.args[0]
                if isinstance(name, ast.Constant) and str(name.value).startswith("atoll_"):
                    found[str(name.value)] = _labels(node) | found.get(str(name.value), frozenset())
    return found


def _labels(call: ast.Call) -> frozenset[str]:
    given = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    return frozenset(
        str(each.value)
        for part in given
        if isinstance(part, ast.Tuple)
        for each in part.elts
        if isinstance(each, ast.Constant)
    )


def series_in(expression: str) -> set[str]:
    names = re.findall(r"\batoll_[a-z_]+", expression)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def labels_in(expression: str) -> set[str]:
    matched = re.findall(r'([a-z_]+)(?:=~|!~|!=|=)"', expression)
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    return {*matched, *(name.strip() for names in grouped for name in names.split(","))}


@pytest.mark.parametrize("expression", sorted(set(EXPRESSIONS)))
def test_every_series_and_label_exists(expression: str) -> None:
    names = series_in(expression)
    assert names
    made = made_series()
    assert names <= made.keys()
    assert labels_in(expression) - {"le"} <= frozenset().union(*(made[name] for name in names))


def test_legends_name_labels_that_are_there() -> None:
    for panel in SHOWN:
        for target in panel["targets"]:
            for name in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"\bby \([^)]*\b{name}\b", target["expr"]), panel["title"]


def test_the_model_can_be_chosen() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "model"}
    query = variables["model"]["query"]["query"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
    assert label in made_series()[name]
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(PANELS)))
    assert used <= variables.keys()


def test_grafana_can_load_it() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"]
    assert "id" not in DASHBOARD
    numbers = [panel["id"] for panel in PANELS]
    assert len(set(numbers)) == len(numbers)
    for panel in SHOWN:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            expression = target["expr"]
            assert expression.count("(") == expression.count(")")
            assert expression.count("{") == expression.count("}")


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
