"""Environments of engines: what is renamed in them, and where they lie."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tools.real_engines import (
    FOLDER_VARIABLE,
    UnavailableError,
    engines_folder,
    find_engine,
    rename_distribution,
)


def test_a_distribution_gets_another_name_and_says_what_it_was_built_for(tmp_path: Path) -> None:
    info = tmp_path / "engine_cpu-1.2.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.4\nName: engine-cpu\nVersion: 1.2\nSummary: Name: engine-cpu\n"
    (info / "METADATA").write_text(text)
    rename_distribution(tmp_path, "engine-cpu", "engine", "cpu")
    (found,) = metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("engine", "1.2+cpu")
    assert found.metadata["Summary"] == "Name: engine-cpu"


def test_what_is_not_built_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert engines_folder() == tmp_path
    with pytest.raises(UnavailableError, match="not built"):
        find_engine("vllm", build=False)
    assert not list(tmp_path.iterdir())
