"""What one request to a service that is no model used: bytes, seconds, and tokens if its answer says so.

It has a slot of the journal like a request for a model, so it is in the ledger once, whatever dies. Bytes are
those of bodies, as the client sent and received them. An answer in JSON of up to 1 MiB, or the last 16 KiB of
a stream of events, is looked through for OpenAI's `usage` when it has ended.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from atoll.runtime.openai import Usage, loose_usage
from atoll.runtime.pool.member import Member
from atoll.telemetry.usage import Attempt, UsageRecord

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts, Grant

_JSON_BYTES = 2**20
_TAIL_BYTES = 16 * 2**10
_NOTHING = Usage()


class ServiceMeter:
    """Counts one request. Times are of the loop's clock, in seconds, but for `started_s` of the record."""

    def __init__(
        self,
        accounts: Accounts,
        grant: Grant,
        request_id: str,
        service: str,
        sent_bytes: int,
        now_s: float,
    ) -> None:
        self._accounts = accounts
        self._grant = grant
        self._request_id = request_id
        self._service = service
        self._endpoint = f"/services/{service}"
        self._sent_bytes = sent_bytes
        self._received_bytes = 0
        self._began_s = now_s
        self._first_s: float | None = None
        self._attempts: tuple[Attempt, ...] = ()
        self._kind = ""
        self._kept: bytearray = bytearray()
        self._slot: int | None = accounts.opened(grant, request_id, service, self._endpoint)
        accounts.passed(self._slot, sent_bytes, 0)

    def begin(self, status: int, content_type: bytes, now_s: float) -> None:
        """Note that an answer begins."""
        self._first_s = now_s - self._began_s
        kind = content_type.partition(b";")[0].strip().lower()
        if status == 200 and kind in (b"application/json", b"text/event-stream"):
            self._kind = "json" if kind == b"application/json" else "events"

    def take(self, data: bytes) -> None:
        """Note a piece of the answer that the client is about to have."""
        self._received_bytes += len(data)
        if self._slot is not None:
            self._accounts.passed(self._slot, self._sent_bytes, self._received_bytes)
        if self._kind == "json":
            if self._received_bytes > _JSON_BYTES:
                self._kind = ""
                self._kept = bytearray()
            else:
                self._kept += data
        elif self._kind == "events":
            self._kept += data
            if len(self._kept) > 2 * _TAIL_BYTES:
                del self._kept[:-_TAIL_BYTES]

    def leave(self, member: Member | None, outcome: str, began_s: float, now_s: float) -> None:
        """Note what became of the request at a node."""
        if member is not None:
            offer = member.offer(self._service)
            facts = member.facts
            self._attempts += (
                Attempt(
                    member.name,
                    offer.node or None,
                    offer.provider or None,
                    0,
                    now_s - began_s,
                    outcome,
                    None if facts is None else facts.usd_per_mtoken_in,
                    None if facts is None else facts.usd_per_mtoken_out,
                ),
            )

    def close(self, status: int, outcome: str, backends: list[str], now_s: float) -> Usage:
        """Write the request down; a second time does nothing."""
        slot, self._slot = self._slot, None
        if slot is None:
            return _NOTHING
        usage = self._read_usage() if outcome == "ok" else _NOTHING
        seconds = now_s - self._began_s
        record = UsageRecord(
            request_id=self._request_id,
            model=self._service,
            endpoint=self._endpoint,
            stream=self._kind == "events",
            status=status,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            estimated=False,
            backends=tuple(backends),
            started_s=time.time() - seconds,
            seconds=seconds,
            first_token_s=self._first_s,
            outcome=outcome,
            key_id=self._grant.key_id,
            attempts=self._attempts,
            audio_seconds=usage.audio_seconds,
            speech_seconds=usage.speech_seconds,
            image_pixels=usage.image_pixels,
            bytes_in=self._sent_bytes,
            bytes_out=self._received_bytes,
        )
        self._accounts.closed(slot, self._grant, record)
        return usage

    def _read_usage(self) -> Usage:
        data = bytes(self._kept)
        if self._kind == "events":
            events = data.replace(b"\r\n", b"\n").split(b"\n\n")
            said = [e for e in events if b'"usage"' in e and e.startswith(b"data:")]
            data = said[-1].removeprefix(b"data:") if said else b""
        return (b'"usage"' in data and loose_usage(data)) or _NOTHING
