"""Writing workloads to files that any tool can read: plain CSV or Mooncake's JSON lines, `.gz` or not."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from atoll.core.errors import InputError, UsageError
from atoll.workload.requests import TEXT, Requests


def target_format(path: str | os.PathLike[str]) -> str:
    """Return the format that a file name asks for: plain (.csv) or mooncake (.jsonl)."""
    name = os.path.basename(os.fspath(path)).removesuffix(".gz")
    for ending, kind in ((".csv", "plain"), (".jsonl", "mooncake")):
        if name.endswith(ending):
            return kind
    raise UsageError(
        f"cannot tell the format of {name!r}",
        hint="name a .csv or .jsonl file, or one with .gz after it",
    )


def write_trace(path: str | os.PathLike[str], chunks: Iterable[Requests]) -> int:
    """Write requests to a file, in the format its name asks for, and return how many.

    The file appears whole or not at all. The same requests give the same bytes. JSON lines have no
    columns for models, classes and items; requests that have them are refused.
    """
    kind = target_format(path)
    target = Path(os.path.realpath(path))
    count = 0
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as raw, _text(raw, os.fspath(path)) as out:
                lines = csv_lines(chunks) if kind == "plain" else _jsonl(chunks)
                for number, text in lines:
                    out.write(text)
                    count += number
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError(
            f"cannot write: {reason}", path=path, hint="write it somewhere else"
        ) from error
    return count


@contextlib.contextmanager
def _text(raw: BinaryIO, name: str) -> Iterator[io.TextIOBase]:
    if not name.endswith(".gz"):
        with io.TextIOWrapper(raw, encoding="utf-8", newline="") as out:
            yield out
        return
    # Without a name and time in the header the same requests give the same bytes.
    packed = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0, compresslevel=6)
    with packed, io.TextIOWrapper(packed, encoding="utf-8", newline="") as out:
        yield out


def csv_lines(chunks: Iterable[Requests]) -> Iterator[tuple[int, str]]:
    """Yield requests as text of plain CSV, with how many requests each text holds."""
    header: tuple[bool, bool, bool, int] | None = None
    for chunk in chunks:
        if not len(chunk):
            continue
        block = 0 if chunk.prefix is None else chunk.prefix.block_tokens
        if header is None:
            named = chunk.models != ("",)
            header = (
                named,
                len(chunk.classes) > 1 or chunk.classes != (TEXT,),
                chunk.items is not None,
                block,
            )
            yield 0, _header(*header)
        models, classes, items, blocks = header
        columns: list[Iterable[object]] = [
            [f"{time:.6f}" for time in chunk.arrival_s.tolist()],
            chunk.input.tolist(),
            chunk.output.tolist(),
        ]
        if models:
            columns.append(_names(chunk.models, chunk.model.tolist()))
        elif chunk.models != ("",):
            raise InputError("models appear after the first chunk, which named none")
        if classes:
            columns.append(_names(chunk.classes, chunk.klass.tolist()))
        if items:
            columns.append([0] * len(chunk) if chunk.items is None else chunk.items.tolist())
        if blocks:
            columns.append(_blocks(chunk))
        rows = [",".join(map(str, row)) for row in zip(*columns, strict=True)]
        yield len(rows), "\n".join(rows) + "\n"
    if header is None:
        yield 0, _header(False, False, False, 0)


def _header(models: bool, classes: bool, items: bool, blocks: int) -> str:
    names = ["arrival_s", "input_tokens", "output_tokens"]
    names += ["model"] if models else []
    names += ["class"] if classes else []
    names += ["items"] if items else []
    names += [f"prefix_block_ids_{blocks}"] if blocks else []
    return ",".join(names) + "\n"


def _names(names: tuple[str, ...], index: list[int]) -> list[str]:
    quoted = ['"' + n.replace('"', '""') + '"' if set(n) & set(',"\r\n') else n for n in names]
    return [quoted[at] for at in index]


def _blocks(chunk: Requests) -> list[str]:
    prefix = chunk.prefix
    if prefix is None:
        return [""] * len(chunk)
    return [" ".join(map(str, prefix.of(row).tolist())) for row in range(len(chunk))]


def _jsonl(chunks: Iterable[Requests]) -> Iterator[tuple[int, str]]:
    for chunk in chunks:
        if chunk.items is not None or len(set(chunk.model.tolist())) > 1:
            raise UsageError(
                "JSON lines of Mooncake hold one model and no media items",
                hint="write a .csv instead",
            )
        if chunk.prefix is not None and chunk.prefix.block_tokens != 512:
            raise UsageError(
                "Mooncake's prefix blocks have 512 tokens", hint="write a .csv instead"
            )
        rows = []
        columns = (chunk.arrival_s.tolist(), chunk.input.tolist(), chunk.output.tolist())
        for at, (time, prompt, answer) in enumerate(zip(*columns, strict=True)):
            ids = [] if chunk.prefix is None else chunk.prefix.of(at).tolist()
            row = {
                "timestamp": round(time * 1000, 3),
                "input_length": prompt,
                "output_length": answer,
                "hash_ids": ids,
            }
            rows.append(json.dumps(row))
        if rows:
            yield len(rows), "\n".join(rows) + "\n"
