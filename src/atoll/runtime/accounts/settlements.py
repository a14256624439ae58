"""Settlements: what an operation is billed, said once, for two who cannot ask each other.

A gateway that died left in its journal how many tokens of a stream its client had, and in the stream's file
(`kept_streams`) how many another gateway can send again; killed between the two stores, it left one event
more in the file. Whoever needs the figure first, the gateway that goes on with the stream or the one that
recovers the journal, writes its own down; the other one reads it. A gateway that ends a stream by itself says
what it bills before it writes that into stream and journal, so that neither half of it counts alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

import msgspec

_ENDING = ".bill"
_KEEP_S = 30 * 86_400.0
"""A journal that is recovered later than this may count an event more or less."""


class Settlement(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that an operation is billed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Settlement).decode


def settle(folder: Path, operation: str, mine: Settlement) -> Settlement:
    """Return what an operation is billed: `mine`, unless somebody has said so before."""
    path = _path(folder, operation)
    draft = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=_open_private) as file:
            file.write(_encode(mine))
        try:
            # Of several only one makes the name.
            os.link(draft, path)
        except FileExistsError:
            return _decode(path.read_bytes())
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, msgspec.MsgspecError):
        # Without a disk there is nothing to agree by.
        pass
    return mine


def forget_settlement(folder: Path, operation: str) -> None:
    """Remove what nobody will ask for any more."""
    with contextlib.suppress(OSError):
        _path(folder, operation).unlink(missing_ok=True)


def sweep_settlements(folder: Path, now_s: float | None = None) -> None:
    """Remove settlements whose journals nobody has recovered for a month, or has no more."""
    until_s = (time.time() if now_s is None else now_s) - _KEEP_S
    for path in folder.glob(f"*{_ENDING}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < until_s:
                path.unlink()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _path(folder: Path, operation: str) -> Path:
    return folder / (operation + _ENDING)
