"""The notebook tells its story from the first cell to the last, and is kept without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/fleet.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return found


def test_no_outputs_are_kept() -> None:
    for cell in cells():
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


def test_every_cell_of_code_is_python() -> None:
    for cell in cells():
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), cell["id"], "exec")


@pytest.mark.slow
def test_it_runs() -> None:
    reason = "executing the notebook needs the extra 'notebook'"
    nbformat = pytest.importorskip("nbformat", reason=reason)
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()
    shown = {
        cell["id"]: [out.get("data", {}) for out in cell["outputs"]]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    }
    cost = re.search(r"\$\d+\.\d\d/h", shown["validate"][0]["text/plain"])
    assert cost is not None
    assert cost[0] in shown["plan"][0]["text/html"]
    assert "text/html" in shown["simulate"][0]
    assert shown["save"][0]["text/plain"] == "True"
