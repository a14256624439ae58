"""Weights from an object store, pulled once per node: the first that comes pulls, the others wait.

`python -m atoll.deploy.commands.stored_weights SOURCE -- COMMAND ...` pulls SOURCE into the cache, then
becomes COMMAND with `{weights}` replaced by where they lie. Folders (a path ends with none of .gguf) are
pulled with the store's own tool, which goes on where an earlier pull was cut; single files likewise. Paths
and hf:// need none of this: they are there, or the hub's own cache with its locks holds them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from atoll.core.errors import AtollError, InputError, UsageError, shorten
from atoll.core.paths import cache_dir

WEIGHTS = "{weights}"
STORES = ("s3://", "gs://")
_LINK = re.compile(r"(s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]{1,220}/[A-Za-z0-9._/+=@-]{1,900}")
_GGUF = ".gguf"
Run = Callable[[Sequence[str]], int]
"""Runs a program with these arguments and returns its exit code."""


def is_stored(source: str) -> bool:
    """Whether weights have to be pulled before an engine can read them."""
    return source.startswith(STORES)


def check_source(source: str) -> None:
    """Raise InputError unless the source of weights is one that engines or `pull_weights` can read."""
    if is_stored(source):
        if not _LINK.fullmatch(source) or ".." in source:
            raise InputError(
                f"{shorten(source)!r} names nothing in a store",
                field="weights",
                hint="write s3://BUCKET/FOLDER",
            )
    elif "://" in source and not source.startswith(("hf://", "pypi://")):
        raise InputError(
            f"unknown kind of weights {shorten(source)!r}",
            field="weights",
            hint="use a path, hf://ORG/NAME, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER",
        )
    elif not source or source.startswith("-"):
        # It would be read as an option of the engine.
        raise InputError(
            f"{source!r} names no weights", field="weights", hint="write hf://ORG/NAME"
        )


def pull_command(source: str, target: Path, which: Callable[[str], str | None]) -> tuple[str, ...]:
    """Return the store's tool that is here, with what makes it pull a file or a folder."""
    single = source.endswith(_GGUF)
    aws = ("s3", "cp" if single else "sync", "--only-show-errors")
    google = ("storage", "cp") if single else ("storage", "rsync", "--recursive")
    older = ("-q", "cp") if single else ("-q", "-m", "rsync", "-r")
    tools = {
        "s3": (("aws", aws),),
        "gs": (("gcloud", google), ("gsutil", older)),
    }[source.partition("://")[0]]
    for name, arguments in tools:
        program = which(name)
        if program is not None:
            return (program, *arguments, source, str(target))
    raise UsageError(
        f"{' or '.join(name for name, _ in tools)} is needed to pull {source}",
        hint=f"install it on this node, or pull {source} yourself and name the folder",
    )


def pull_weights(
    source: str,
    cache: Path | None = None,
    *,
    run: Run | None = None,
    which: Callable[[str], str | None] = shutil.which,
) -> Path:
    """Return where the weights of a store lie on this node, pulling them if nobody has."""
    check_source(source)
    if not is_stored(source):
        raise UsageError(f"{source} is not in a store", hint="give it to the engine as it is")
    home = (cache or cache_dir()) / "models" / "store"
    home.mkdir(parents=True, exist_ok=True)
    stem = source.rstrip("/").rpartition("/")[2]
    key = hashlib.sha256(source.encode()).hexdigest()[:16]
    target = home / (f"{key}-{stem}" if stem.endswith(_GGUF) else f"{stem}-{key}")
    if target.exists():
        return target
    with _lock(home / f".{key}.lock"):
        if target.exists():
            return target
        part = home / f".{key}.part"
        part = part.with_suffix(_GGUF) if target.suffix == _GGUF else part
        if target.suffix != _GGUF:
            part.mkdir(exist_ok=True)
        code = (run or _run)(pull_command(source, part, which))
        if code or not part.exists() or (part.is_dir() and not any(part.iterdir())):
            raise AtollError(
                f"{source} could not be pulled (code {code})",
                hint="see the tool's words above; check the address and this node's rights",
            )
        os.replace(part, target)
    return target


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Without a limit: whoever holds it pulls what everybody here waits for, and a dead one holds none.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _run(arguments: Sequence[str]) -> int:
    return subprocess.run(arguments, stdin=subprocess.DEVNULL, check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    """Pull, then become the command."""
    parser = argparse.ArgumentParser(prog="python -m atoll.deploy.commands.stored_weights")
    parser.add_argument("source", help="s3://BUCKET/FOLDER or gs://BUCKET/FOLDER")
    parser.add_argument("--cache", type=Path, default=None, help="default: Atoll's cache folder")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        folder = str(pull_weights(options.source, options.cache))
        if not command:
            sys.stdout.write(f"{folder}\n")
            return 0
        words = [word.replace(WEIGHTS, folder) for word in command]
        os.execvp(words[0], words)
    except AtollError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error: {command[0]}: {error.strerror}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main())
