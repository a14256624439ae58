"""The check of equal plans compares like with like."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from atoll.plan.files.fleet_file import load_fleet
from tests.slow.plans.determinism import FleetCase, fleets, permute


@pytest.mark.parametrize("case", fleets(), ids=lambda case: case.name)
def test_another_order_is_the_same_fleet(case: FleetCase, tmp_path: Path) -> None:
    tree = yaml.safe_load(case.text)
    other = permute(tree)
    texts = [yaml.safe_dump(t, sort_keys=False) for t in (tree, other)]
    assert texts[0] != texts[1]
    hashes = []
    for index, text in enumerate(texts):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "fleet.yaml").write_text(text, encoding="utf-8")
        hashes.append(load_fleet(folder / "fleet.yaml").content_hash())
    assert hashes[0] == hashes[1]
