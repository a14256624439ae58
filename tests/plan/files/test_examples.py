from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import UnknownNameError
from atoll.plan.files import examples

ROOT = Path(__file__).resolve().parents[3]


def test_a_checkout_offers_what_lies_in_its_folder() -> None:
    files = {p for p in (ROOT / "examples").iterdir() if p.suffix in (".yaml", ".json")}
    assert set(examples.list_examples().values()) == files


def test_what_the_package_carries_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (tmp_path / "package", tmp_path / "checkout")
    monkeypatch.setattr(examples, "_FOLDERS", folders)
    assert examples.list_examples() == {}
    folders[1].mkdir()
    (folders[1] / "old.yaml").touch()
    assert examples.find_example("old") == folders[1] / "old.yaml"
    folders[0].mkdir()
    for name in ("new.yaml", "notebook.ipynb", "script.py"):
        (folders[0] / name).touch()
    assert examples.list_examples() == {"new": folders[0] / "new.yaml"}
    with pytest.raises(UnknownNameError, match="known: new"):
        examples.find_example("old")


def test_every_example_says_what_it_shows_in_a_line() -> None:
    said = [examples.describe_example(path) for path in examples.list_examples().values()]
    assert all(about.endswith(".") and "\n" not in about for about in said)
