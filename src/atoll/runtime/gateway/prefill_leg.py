"""The first leg of a request whose prompt one backend computes and another decodes.

| Connector | How the two are asked |
|---|---|
| `nixl`, `nixl-push` (vLLM) | prefill first, for one token; what it says of its KV cache goes to decode |
| `bootstrap` (SGLang) | both at once, with the place and the number under which they meet |

A prefill backend that fails or is slow is replaced once; after that the decode side computes the prompt by
itself, if it can. KV cache that nobody fetches the engine lets go by its own time-out (`engines`): a leg that
is dropped closes its connection, and the backend cancels.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from atoll.runtime.gateway import faults
from atoll.runtime.gateway.attempt import AttemptContext, Attempts
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.http.http_server import Request
from atoll.runtime.http.upstream import HttpUpstream
from atoll.runtime.openai import ApiError, ChatRequest, CompletionRequest, Generation
from atoll.runtime.pool.member import BOOTSTRAP, Allow, Member

Json = dict[str, Any]
_MAX_BYTES = 16 * 2**20
"""Of the answer of a prefill backend: one token, and the numbers of its blocks."""
_ASKED: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_WITHOUT = ("stream_options", "min_tokens", "logprobs", "top_logprobs")
"""Parameters that one token for nobody does not need, or that would be wrong beside it."""
_OURS = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields that only a gateway may set: with them a client could read what others asked."""
_ROOMS = 2**63
_FULL = frozenset({429, 503})


def list_private(body: bytes) -> list[str]:
    """Return which fields of a request are the gateway's own to set."""
    # Inside of text the quotes would be escaped; most requests have none of the words.
    if not any(b'"%b"' % name.encode() in body for name in _OURS):
        return []
    data = msgspec.json.decode(body)
    return [name for name in _OURS if name in data]


def refuse_pair(request: Generation) -> str | None:
    """Return why the prompt of a request cannot be computed elsewhere than its answer; None: it can.

    KV cache is handed over once and for one answer, and what a prompt itself is asked for (its own
    probabilities, an echo of it) is worked out where it is computed.
    """
    if (request.n or 1) > 1:
        return "n > 1"
    if isinstance(request, CompletionRequest):
        several = not isinstance(request.prompt, str) and any(
            not isinstance(part, int) for part in request.prompt
        )
        if several or request.prompt_embeds:
            return "several prompts" if several else "prompt_embeds"
        if request.echo or (request.best_of or 1) > 1:
            return "echo" if request.echo else "best_of"
    if isinstance(request, ChatRequest) and request.tool_choice not in (None, "auto", "none"):
        # A call that is cut off after one token is an error to engines.
        return "tool_choice"
    return None


def prefill_body(body: bytes) -> bytes:
    """Return what a prefill backend is asked: the same for one token, its KV cache kept."""
    data: Json = msgspec.json.decode(body)
    for name in _WITHOUT:
        data.pop(name, None)
    if "max_completion_tokens" in data:
        data["max_completion_tokens"] = 1
    data |= {"max_tokens": 1, "stream": False, "kv_transfer_params": _ASKED}
    return msgspec.json.encode(data)


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """Return a request with further fields."""
    return msgspec.json.encode({**msgspec.json.decode(body), **fields})


class PrefillContext(AttemptContext, Protocol):
    """Part of a gateway that a leg needs."""

    settings: GatewaySettings

    def note_prefill(self, model: str, outcome: str) -> None:
        """Count what became of a prompt that another backend was to compute."""


class LegOwner(Protocol):
    """The request that a leg is of."""

    model: str
    sent: Request
    body: bytes
    begun: bool
    attempts: Attempts

    def on_prefilled(self, fields: Mapping[str, object] | None) -> None:
        """The prompt is computed, or (None) will not be: go on with the backend that decodes."""

    def on_unfilled(self, reason: str, error: ApiError | None) -> None:
        """The backend that decodes waits in vain, or (with an error) nobody may be asked any more."""


class PrefillLeg:
    """A prompt on its way to a prefill backend, for one that will decode it."""

    def __init__(
        self,
        context: PrefillContext,
        owner: LegOwner,
        partner: Member,
        decode: Member,
        allow: Allow | None = None,
    ) -> None:
        self._context, self._owner = context, owner
        self._request, self._allow = owner.body, allow
        self.decode = decode
        self.meets = not decode.recomputes
        """Whether both are asked at once."""
        self.attempts = Attempts(context, owner.sent.path, owner.attempts.headers)
        owner.attempts.share_doubts(self.attempts)
        self._partner: Member | None = partner
        self.partner = partner
        """Who computes the prompt, or was the last to try."""
        self._replaced = False
        self._over = False
        self._status = 0
        self._note = b""
        self._parts: list[bytes] = []
        self._size = 0
        self.fields: Json = {}
        """What both sides are told, where they are asked at once."""
        self.body = self._write()

    def _write(self) -> bytes:
        if not self.meets:
            return prefill_body(self._request)
        host, _, port = self.partner.backend.metadata.get(BOOTSTRAP, "").partition(" ")
        self.fields = {
            "bootstrap_host": host,
            "bootstrap_port": int(port) if port.isdecimal() else None,
            # Engines know transfers by it: no two at the same time may have the same.
            "bootstrap_room": random.randrange(_ROOMS),
        }
        return with_fields(self._request, {**self.fields, "stream": False})

    def start(self) -> None:
        """Ask the prefill backend."""
        self.attempts.attempt(self)

    def drop(self) -> None:
        """Give it up: the backend cancels what it does, and lets the KV cache go."""
        self._over = True
        self.attempts.drop()

    # As a sender

    def choose(self, now_s: float) -> Member | None:
        """Return the backend that was chosen with the one that decodes."""
        del now_s
        self._status, self._size, self._parts = 0, 0, []
        return self._partner

    def on_nobody(self, now_s: float) -> None:
        """No other prefill backend is there."""
        del now_s
        self._give_up("no prefill backend")

    def on_unreachable(self, reason: str) -> None:
        """Try another."""
        self._replace(reason)

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Note how it answers."""
        del content_type
        self._status, self._note = status, retry_after

    def on_body(self, data: bytes) -> None:
        """Keep a piece of the answer."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > _MAX_BYTES:
            self._replace("the answer is too large")

    def on_end(self) -> None:
        """Hand on what the answer says."""
        self.attempts.upstream = None
        status, body = self._status, b"".join(self._parts)
        if status == 200:
            fields = _read_transfer(body)
            if self.meets or fields is not None:
                self.attempts.note_success(self._owner.model, None)
                self.attempts.release()
                self._end("handed over", {} if fields is None else fields)
            else:
                self._replace("an answer without KV cache")
        elif 400 <= status < 500 and status not in (408, 425, 429):
            # The request is what is wrong; whoever decodes says so to the client.
            self.attempts.release()
            self._give_up(f"status {status}")
        else:
            self._replace(f"status {status}", blame=not (status in _FULL and self._note))

    def on_lost(self, reason: str, *, unused: bool) -> None:
        """Ask again where a kept connection was closed already, else another backend."""
        attempts, member = self.attempts, self.attempts.member
        if unused and member is not None and not member.node and not attempts.reopened:
            attempts.reopen(self, member)
            return
        if isinstance(attempts.upstream, HttpUpstream):
            attempts.note_death(silent=not self._owner.begun)
        attempts.upstream = None
        self._replace(reason)

    # What becomes of it

    def member_down(self, reason: str) -> None:
        """Leave a backend that is known to be dead."""
        self.attempts.note_death(silent=not self._owner.begun)
        self._replace(reason, blame=False)

    def tick(self, now_s: float) -> None:
        """Replace a backend that takes too long."""
        attempts, deadlines = self.attempts, self._context.settings.deadlines
        if self._over or attempts.member is None:
            return
        if attempts.connecting is not None:
            if now_s - attempts.began_s > deadlines.connect_s:
                self._replace("no connection in time")
        elif now_s - attempts.began_s > deadlines.prefill_s:
            # It may be the prompt: the backend is blamed once another one has computed it.
            attempts.doubt(attempts.member, "a slow prompt")
            self._replace("slow", blame=False)

    def _replace(self, reason: str, *, blame: bool = True) -> None:
        """Have another backend compute the prompt, once."""
        if self._over:
            return
        context, attempts = self._context, self.attempts
        now_s = context.loop.time()
        attempts.give_up(reason, now_s, blame=blame)
        if attempts.is_poison(self._owner.sent.body, now_s):
            self._over = True
            self._owner.on_unfilled(reason, faults.poison())
        elif self.meets or self._replaced:
            # The other side waits under a number that nobody comes to: both are chosen anew.
            self._give_up(reason)
        else:
            self._replaced = True
            context.note_prefill(self._owner.model, "replaced")
            model = self._owner.model
            self._partner = context.pool.partner(model, self.decode, attempts.avoid, self._allow)
            self.partner = self._partner or self.partner
            self.start()

    def _give_up(self, reason: str) -> None:
        if self._over:
            return
        if self.meets:
            self._over = True
            self._context.note_prefill(self._owner.model, "failed")
            self._owner.on_unfilled(reason, None)
        else:
            self._end("recomputed", None)

    def _end(self, outcome: str, fields: Mapping[str, object] | None) -> None:
        if self._over:
            return
        self._over = True
        self._context.note_prefill(self._owner.model, outcome)
        self._owner.on_prefilled(fields)


def _read_transfer(body: bytes) -> Json | None:
    """Return the field with which a decode backend finds KV cache; None where an answer has none."""
    try:
        data = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    found = data.get("kv_transfer_params")
    return {"kv_transfer_params": found} if isinstance(found, dict) and found else None
