"""How much `/v1/realtime` takes."""

from __future__ import annotations

from pydantic import Field

from atoll.core.frozen import Frozen


class RealtimeLimits(Frozen):
    """Limits of `/v1/realtime`.

    sessions: at the same time. session_s: length of one. message_bytes: of one event. buffered_s: sound that
    is held until it is committed. items: messages of a conversation.
    """

    sessions: int = Field(64, ge=0)
    session_s: float = Field(1800.0, gt=0)
    message_bytes: int = Field(4 * 2**20, ge=2**10)
    buffered_s: float = Field(120.0, ge=1)
    items: int = Field(512, ge=2)
