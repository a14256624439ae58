"""Kept compilations: what engines compile as they start, for the next start of the same launch.

`python -m atoll.runtime.endpoints.compile_cache FOLDER ENGINE KEY CACHES -- COMMAND ...` becomes COMMAND with
ENGINE's caches below FOLDER, in a folder of this user, engine version and KEY (model, GPUs, launch). CACHES
are the variables that name them (JSON); those that are set already stay as they are. Engines key what they
cache themselves, by their own code, PyTorch, GPU and configuration: a folder that is wrong or removed costs
time, never a wrong answer.

Code in these folders is executed, so they belong to this user alone. Each is locked while its server runs;
what was used longest ago is removed at a start, beyond `MAX_BYTES`, `MAX_FOLDERS` and `MAX_AGE_S`. Where a
folder cannot be had, a line says why and the engine starts with its own caches.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import InputError
from atoll.core.paths import cache_dir

if TYPE_CHECKING:
    # It stands before an engine and has to begin at once, without the table of engines.
    from atoll.engines.engine import Engine, EngineLayout, ServedModel

_MODULE = "atoll.runtime.endpoints.compile_cache"
FOLDER_VARIABLE = "ATOLL_COMPILED"
MAX_BYTES = 20 * 2**30
MAX_FOLDERS = 64
MAX_AGE_S = 30 * 86_400.0
_COUNT_S = 5.0
"""How long counting bytes may hold up a start; what was not counted then stays."""
_LOCK_S = 5.0
_VERSION_S = 20.0
_LOCK = ".lock"
_REMOVED = ".removed-"
_AT_HOME = {"FLASHINFER_WORKSPACE_BASE": ".cache/flashinfer"}
"""Caches that may hold kernels that were brought along: they stay at home where there is one."""
_ASK_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+-]+")


def own_folder() -> Path:
    """Return the folder for kept compilations on this machine: $ATOLL_COMPILED, else that of caches."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else cache_dir() / "compiled"


@dataclass(frozen=True, slots=True)
class KeptLaunch:
    """A launch of an engine on kinds of GPUs, whose compilations are kept."""

    engine: Engine
    layout: EngineLayout
    served: ServedModel
    gpus: frozenset[str]

    @property
    def key(self) -> str:
        """Its name, the same wherever it starts: model, kinds of GPUs, hash of the command."""
        model = self.served.repository[0].rstrip("/").rpartition("/")[2]
        kinds = "+".join(sorted(self.gpus))
        named = f"{model[:60]}-{kinds[:40]}"
        # The stage engine compiles for shapes and GPUs alone: all its launches of a model share that.
        said = self.served.source if self.engine.staged else self._describe_command()
        return _plain(f"{named}-{hashlib.sha256(said.encode()).hexdigest()[:12]}")

    def _describe_command(self) -> str:
        from atoll.engines.engine import ServerHost

        host = ServerHost("{port}", "python", address="{host}", handover_port="{port}")
        # What requests call the model changes nothing, nor how weights are loaded.
        launch = self.served.launch
        if launch is not None:
            launch = launch.model_copy(update={"load_format": None})
        served = replace(self.served, names=("model",), launch=launch)
        made = self.engine.command(self.layout, served, host)
        return json.dumps([made.arguments, sorted(made.environment.items())])

    def wrap(self, words: Sequence[str], python: str, folder: str | Path | None) -> list[str]:
        """Return its command with kept compilations; as it is without a folder or anything to keep."""
        if folder is None or not self.engine.compile_caches:
            return list(words)
        caches = json.dumps(dict(self.engine.compile_caches), separators=(",", ":"))
        before = (python, "-m", _MODULE, str(folder), self.engine.name, self.key, caches)
        return [*before, "--", *words]


def enter(folder: Path, name: str) -> tuple[Path, int]:
    """Return the folder of a launch, made if needed, and a descriptor that locks it while it is open.

    InputError and OSError say why there is none.
    """
    home = _home(folder) / _plain(name)
    until_s = time.monotonic() + _LOCK_S
    while True:
        home.mkdir(mode=0o700, exist_ok=True)
        lock = -1
        try:
            lock = os.open(home / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Somebody may have removed it since it was opened.
            if os.stat(home / _LOCK).st_ino == os.fstat(lock).st_ino:
                os.utime(lock)
                return home, lock
        except (BlockingIOError, FileNotFoundError):
            if time.monotonic() > until_s:
                raise
        if lock >= 0:
            os.close(lock)
        time.sleep(0.01)


def set_caches(
    caches: Mapping[str, str], home: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that keep an engine's caches in a folder, less those that somebody has set."""
    found = {}
    for variable, name in caches.items():
        at_home = _AT_HOME.get(variable)
        if variable in environment or (at_home is not None and (Path.home() / at_home).exists()):
            continue
        (home / name).mkdir(mode=0o700, exist_ok=True)
        found[variable] = str(home / name)
    return found


def prune(
    folder: Path,
    *,
    max_bytes: int = MAX_BYTES,
    max_folders: int = MAX_FOLDERS,
    max_age_s: float = MAX_AGE_S,
) -> None:
    """Remove what was used longest ago beyond the limits; what a server holds stays."""
    home = _home(folder)
    for rest in home.glob(f"{_REMOVED}*"):
        shutil.rmtree(rest, ignore_errors=True)
    used: list[tuple[float, Path]] = []
    for path in home.iterdir():
        with contextlib.suppress(OSError):
            used.append((os.stat(path / _LOCK).st_mtime, path))
    total, until_s = 0, time.monotonic() + _COUNT_S
    for number, (used_s, path) in enumerate(sorted(used, reverse=True)):
        over = number >= max_folders or time.time() - used_s > max_age_s
        if not over and time.monotonic() < until_s:
            total += _count_bytes(path)
            over = total > max_bytes
        if over:
            with contextlib.suppress(OSError):
                _remove(path)


def find_version(package: str, words: Sequence[str]) -> str:
    """Return the version of a package as a command's Python has it; "unknown" where it does not say."""
    for python in (*_interpreters(words), (sys.executable,)):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(
                [*python, "-c", _ASK_VERSION, package],
                capture_output=True,
                text=True,
                check=True,
                timeout=_VERSION_S,
            )
            return _plain(said.stdout.strip()[:60]) or "unknown"
    return "unknown"


def _interpreters(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The Python that a command runs on, where its program is one or begins with the line that names it."""
    starts = (word for word in words if word != "env" and "=" not in word)
    program = shutil.which(next(starts, ""))
    if program is None:
        return
    if os.path.basename(program).startswith("python"):
        yield (program,)
        return
    with contextlib.suppress(OSError), open(program, "rb") as stream:
        line = stream.readline(1024).decode("utf-8", "replace")
        if line.startswith("#!") and "python" in line:
            yield tuple(line[2:].split())


def _home(folder: Path) -> Path:
    """The part of a folder that is this user's; others cannot write there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    outer = folder.stat().st_mode
    if outer & stat.S_IWOTH and not outer & stat.S_ISVTX:
        raise InputError("everybody may write there", path=folder, hint=f"chmod o-w {folder}")
    home = folder / f"user-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InputError("this folder must be yours alone", path=home, hint="remove it")
    return home


def _count_bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _remove(path: Path) -> None:
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = path.with_name(f"{_REMOVED}{uuid.uuid4().hex}")
        # At once and as a whole: whoever comes meanwhile makes a new one.
        os.rename(path, gone)
    finally:
        os.close(lock)
    shutil.rmtree(gone, ignore_errors=True)


def _plain(text: str) -> str:
    return _NOT_IN_NAMES.sub("_", text).strip(".") or "_"


def main(arguments: Sequence[str]) -> int:
    """Find the folder, then become the command."""
    if len(arguments) < 6 or arguments[4] != "--":
        sys.stderr.write("usage: compile_cache FOLDER ENGINE KEY CACHES -- COMMAND ...\n")
        return 2
    folder, engine, key, caches = Path(arguments[0]), *arguments[1:4]
    words, environment = list(arguments[5:]), dict(os.environ)
    try:
        home, lock = enter(folder, f"{engine}-{find_version(engine, words)}-{key}")
        # Held by the command from now on.
        os.set_inheritable(lock, True)
        environment |= set_caches(json.loads(caches), home, environment)
        prune(folder)
    except (InputError, OSError) as error:
        sys.stderr.write(f"compilations are not kept: {error}\n")
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        sys.stderr.write(f"error: {words[0]}: {error.strerror}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
