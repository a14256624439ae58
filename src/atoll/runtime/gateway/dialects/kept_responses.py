"""Conversations of `/v1/responses` that a later request goes on with (`previous_response_id`).

What is kept is what the next request would have to send itself: the items asked and answered, of the key
that asked, for `keep_s`, unless the request said `store: false`. They are in the memory of the gateway, the
oldest go first; with a `folder` they are also in files of this user alone, which other gateways and the next
start read.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pydantic import Field

from atoll.core.errors import AtollError
from atoll.core.files import atomic_write
from atoll.core.frozen import Frozen
from atoll.runtime.openai import ApiError

_ID = re.compile(r"resp_[0-9a-f]{16,96}")
_SWEEP_S = 60.0
"""So often files whose time is up are looked for."""


class ResponsesSettings(Frozen):
    """For how long, and where, conversations of `/v1/responses` are kept."""

    keep_s: float = Field(3600.0, ge=0)
    """After their last response; 0: not at all."""
    kept_bytes: int = Field(64 * 2**20, ge=0)
    """In memory; one that has more than an eighth of it is not kept."""
    folder: str | None = None
    """Of all gateways that go on with each other's conversations; None: memory alone."""


class _KeptConversation(msgspec.Struct, frozen=True, array_like=True):
    owner: str | None
    at_s: float
    """Unix time."""
    items: bytes
    """JSON."""


class KeptResponses:
    """The conversations of one gateway."""

    def __init__(self, settings: ResponsesSettings, clock: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self._clock = clock
        self._folder = None if settings.folder is None else Path(settings.folder).expanduser()
        self._kept: OrderedDict[str, _KeptConversation] = OrderedDict()
        self._bytes = 0
        self._swept_s = 0.0

    @property
    def max_bytes(self) -> int:
        """Of one conversation."""
        return self.settings.kept_bytes // 8

    def of(self, owner: str | None) -> OwnedResponses | None:
        """Return the conversations of a key; None: none are kept."""
        return OwnedResponses(self, owner) if self.settings.keep_s else None

    def keep(self, response_id: str, conversation: _KeptConversation) -> None:
        """Keep a conversation up to a response."""
        if len(conversation.items) > self.max_bytes:
            return
        before = self._kept.pop(response_id, None)
        self._bytes -= 0 if before is None else len(before.items)
        self._kept[response_id] = conversation
        self._bytes += len(conversation.items)
        while self._bytes > self.settings.kept_bytes or self._is_over(
            next(iter(self._kept.values()))
        ):
            self._bytes -= len(self._kept.popitem(last=False)[1].items)
        if self._folder is not None:
            # Where the disk does not take it, this gateway still has it.
            with contextlib.suppress(OSError, AtollError):
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = self._folder / response_id
                path.touch(mode=0o600)
                atomic_write(path, msgspec.msgpack.encode(conversation))
                self._sweep(self._folder)

    def find(self, response_id: str) -> _KeptConversation | None:
        """Return the conversation up to a response, if it is still kept."""
        if _ID.fullmatch(response_id) is None:
            return None
        found = self._kept.get(response_id)
        if found is None and self._folder is not None:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                raw = (self._folder / response_id).read_bytes()
                found = msgspec.msgpack.decode(raw, type=_KeptConversation)
        return None if found is None or self._is_over(found) else found

    def now(self) -> float:
        """Return the Unix time."""
        return self._clock()

    def _is_over(self, conversation: _KeptConversation) -> bool:
        return self._clock() - conversation.at_s > self.settings.keep_s

    def _sweep(self, folder: Path) -> None:
        now_s = self._clock()
        if now_s - self._swept_s < _SWEEP_S:
            return
        self._swept_s = now_s
        for path in folder.glob("resp_*"):
            if now_s - path.stat().st_mtime > self.settings.keep_s:
                path.unlink(missing_ok=True)


class OwnedResponses:
    """The conversations of one key."""

    def __init__(self, kept: KeptResponses, owner: str | None) -> None:
        self._kept = kept
        self._owner = owner
        self.max_bytes = kept.max_bytes

    def items(self, response_id: str) -> bytes:
        """Return the items up to a response as JSON; ApiError: there is none of this key."""
        found = self._kept.find(response_id)
        if found is None or found.owner != self._owner:
            raise ApiError(
                400,
                f"Previous response with id {response_id[:120]!r} not found: it is kept for "
                f"{self._kept.settings.keep_s:g} s, for the same key; else send all items in `input`",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found.items

    def keep(self, response_id: str, items: list[Any]) -> None:
        """Keep all items up to a response."""
        conversation = _KeptConversation(self._owner, self._kept.now(), msgspec.json.encode(items))
        self._kept.keep(response_id, conversation)
