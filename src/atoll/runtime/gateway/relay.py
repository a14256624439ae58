"""One request for a model on its way: what its backend says, and what the client hears of it.

Before the client has seen anything, a failed attempt is simply made again elsewhere. Once a stream has
begun, it is moved (`resume`). A request is sent to at most `attempts` backends without a token in
between; a connection that is refused costs no attempt, but the search for a backend has a deadline
(`attempt.RetryBudget`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import groupby
from typing import Protocol

from atoll.runtime.gateway import faults
from atoll.runtime.gateway.attempt import (
    AttemptContext,
    Attempts,
    RetryBudget,
    share_of,
    spoken_seconds,
)
from atoll.runtime.gateway.backend_answer import (
    Answer,
    BrokenStreamError,
    fault_of_client,
    reason_of,
)
from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.gateway.dialects.translated import AnsweredClient
from atoll.runtime.gateway.events import (
    DONE,
    StreamJournal,
    TokenTally,
    audio_chars_in,
    comment_of,
)
from atoll.runtime.gateway.kept_streams import AskedStream, KeptStream, NumberedClient
from atoll.runtime.gateway.prefill_leg import PrefillLeg, refuse_pair, with_fields
from atoll.runtime.gateway.requirements import Requirements
from atoll.runtime.gateway.resume import DivergedError, resume
from atoll.runtime.gateway.settings import Deadlines, GatewaySettings
from atoll.runtime.gateway.token_counts import ask_counts
from atoll.runtime.gateway.traffic_tally import ModelTally
from atoll.runtime.http.http_server import Request
from atoll.runtime.http.upstream import HttpUpstream
from atoll.runtime.openai import (
    AnyRequest,
    ApiError,
    Generation,
    Usage,
    answer_usage,
    asks_for_usage,
    header_usage,
    upstream_error,
    with_model,
    with_seed,
    with_usage,
)
from atoll.runtime.pool.member import Member
from atoll.telemetry.usage_record import Attempt

# Where one backend answers with these, another one may well do better.
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
# An error is a few lines of text; only a good answer may be as large as the settings allow.
_ERROR_BYTES = 2**20
_MARKS = 8192
"""Pieces of a stream of which it is noted where they begin; then those that were read are forgotten."""
_STALE_S = 1.0
"""A kept connection that was closed already says so within this."""
_KEPT_S = 1.0
"""A backend that is late and has nobody beside it is waited for so long until others are looked for again."""
_NOTICED_S = 0.02
"""A backend that closes such a connection later than this has seen the request."""


class RelayContext(AttemptContext, Protocol):
    """Part of a gateway that a relay needs."""

    settings: GatewaySettings
    chooser: BackendChooser
    detailed: bool
    """Whether anybody wants to know what each backend did for a request."""

    def is_present(self, member: Member) -> bool:
        """Whether a node is still in the fabric."""
        ...

    def record_delivery(self, slot: int, tokens: int) -> None:
        """Write down how many tokens the client of a request is about to have."""

    def record_media(self, slot: int, usage: Usage) -> None:
        """Write down which sound and pictures a request has used by now, for its client."""

    def note_prefill(self, model: str, outcome: str) -> None:
        """Count what became of a prompt that another backend was to compute."""

    def note_failover(self, relay: Relay, member: Member, reason: str) -> None:
        """A request leaves a backend that failed it."""

    def end_relay(self, relay: Relay, status: int, outcome: str, usage: Usage | None) -> None:
        """Forget a request that ended, and write it down."""


class Relay:
    """A request and what has become of it so far."""

    # Most requests never leave these as they are: defaults of the class cost a request nothing.
    stream = False
    requirements: Requirements | None = None
    """Requirements beyond its model; most requests of a plain gateway have none."""
    tally: ModelTally | None = None
    """Counter of its model for a controller, if the model is known."""
    endpoint = ""
    """Where it was asked, if that is not where backends are (`dialects`)."""
    slot: int | None = None
    """Where the journal of the accounts counts its tokens."""
    begun = False
    """Whether the client has a part of the answer."""
    first_s: float | None = None
    """When the answer began."""
    estimated = False
    """Whether what it used was measured here, for want of the backend's own word."""
    journal = StreamJournal()
    """Events that the client has received; one of its own from the first event on."""
    kept: NumberedClient | None = None
    """The client of a stream that other gateways may go on with; one of theirs, perhaps."""
    billed = (0, 0)
    """Tokens of prompt and answer that gateways before this one wrote down."""
    shares: tuple[Attempt, ...] = ()
    """Work of each backend that is done with the request, where anybody wants to know."""
    _counted = 0
    """Tokens in `shares`."""
    _marks: list[tuple[int, int]] | None = None
    """For each piece that was counted: bytes written on the connection, and tokens, before it."""
    got_tokens: int | None = None
    """Tokens that a client which went away had got by then; None: it did not, or nobody knows."""
    _sent = TokenTally()
    """Tokens that were written down; a tally of its own from the first event on."""
    _spoken = 0
    """Characters of base64 sound that were written down."""
    _retry: RetryBudget | None = None
    """Once a backend failed, or none was there."""
    _wake_s: float | None = None
    _kept_until_s = -math.inf
    """When a backend that is late is judged again."""
    _paused_s: float | None = None
    _error: ApiError | None = None
    """Error for the client if no other backend is found."""
    _stuck = False
    """Whether backends are there, but none that can go on with the stream."""
    _done = False
    _leg: PrefillLeg | None = None
    """Where another backend computes the prompt, or has (asked at once with the one that decodes)."""
    _handed: Member | None = None
    """Who is to decode, now that the prompt is computed."""
    _path = b""
    """Header that names both."""

    def __init__(
        self,
        context: RelayContext,
        client: AnsweredClient,
        sent: Request,
        request: AnyRequest,
        headers: bytes,
    ) -> None:
        self._context = context
        self.client = client
        self.sent = sent
        self.request = request
        self.model = request.model
        self._body = sent.body
        if isinstance(request, Generation) and request.stream:
            self.stream = True
            # A stream may have to move: its usage has to be known here, and a seed lets it be repeated.
            self._body = with_seed(request, with_usage(request, sent.body))
        self.body = self._body
        """As the backend chosen last is to get it; `_body` is without what it takes to go on."""
        self.attempts = Attempts(context, sent.path, headers)
        self.started_s = self._last_s = context.loop.time()
        self._answer = Answer()

    # Which backend

    def retry(self) -> None:
        """Look for a backend again, now that one may have room."""
        self.attempts.attempt(self)

    def choose(self, now_s: float) -> Member | None:
        """Return the backend to try next, and make ready what it is to get."""
        member = self._choose(now_s)
        if member is not None and self.stream and isinstance(self.request, Generation):
            self.body, self._answer.counts = ask_counts(
                self.request,
                self.body,
                member.backend.kind,
                recounts=member.recounts,
                kept=bool(self.endpoint),
            )
        return member

    def _choose(self, now_s: float) -> Member | None:
        attempts = self.attempts
        again = bool(attempts.backends)
        if self._handed is not None:
            decode, self._handed = self._handed, None
            if decode.up and not decode.removed:
                return decode
            # What it was to fetch is let go; the prompt is computed again for another.
            self.body, self._path = self._body, b""
        if again:
            # What came of the answer before is void.
            self._answer = Answer()
            self._wake_s = None
            self._stuck = False
        # The usual request: the pool alone decides, and there is nothing to prepare.
        if self.requirements is None and not self.begun:
            found = self._context.pool.pick(self.model, attempts.avoid, squeeze=again, now_s=now_s)
            self.body = self._body
            return found if found is None or not found.phase else self._pair(found)
        member, model = self._pick(attempts.avoid, now_s, squeeze=again)
        while member is not None and not self._prepare(member, model):
            # It cannot go on with the stream; another may.
            self._stuck = True
            attempts.avoid |= {member.name}
            member, model = self._pick(attempts.avoid, now_s, squeeze=False)
        # It may have waited in the queue until now; that does not count against later searches.
        if member is not None and not again:
            self._context.queue.remove(self)
            self._wake_s = None
            if self._retry is not None:
                self._retry.restart_search()
        return member if member is None or not member.phase else self._pair(member)

    # Prompts that another backend computes

    def _pair(self, member: Member) -> Member | None:
        """Have a partner compute the prompt for a backend that decodes; return the backend if it is ready."""
        context = self._context
        self._drop_leg()
        ring = context.pool.rings.get(self.model)
        partner = None if ring is None else ring.partner
        if not isinstance(self.request, Generation):
            return member
        why = refuse_pair(self.request)
        if why is not None and not member.recomputes:
            self._fail(faults.not_apart(why))
            return None
        if partner is None or why is not None:
            if partner is not None:
                context.note_prefill(self.model, "not handed over")
            return member
        allow = None
        if self.requirements is not None:
            allow = context.chooser.allow(self.requirements, self.model)
        leg = PrefillLeg(context, self, partner, member, allow)
        self._leg, self._wake_s = leg, None
        self.attempts.prefills += (leg.attempts,)
        leg.start()
        if leg.meets and self._leg is leg:
            self.body = with_fields(self.body, leg.fields)
            self._say_path(leg)
            return member
        return None

    def on_prefilled(self, fields: Mapping[str, object] | None) -> None:
        """Go on with the backend that decodes; without fields it computes the prompt itself."""
        leg = self._leg
        if leg is None or leg.meets or self._done:
            # Asked at once: the other one goes on by itself.
            return
        self._leg = None
        if fields is not None:
            self.body = with_fields(self.body, fields)
            self._say_path(leg)
        self._handed = leg.decode
        self.attempts.attempt(self)

    def on_unfilled(self, reason: str, error: ApiError | None) -> None:
        """The backend that decodes waits in vain: both are chosen anew, unless nobody may be asked."""
        leg = self._leg
        self._drop_leg()
        if error is not None:
            self._fail(error)
            return
        # The other side is well: it is left without being avoided.
        self.attempts.drop()
        if leg is not None:
            self.attempts.avoid |= {leg.partner.name}
        self._fail_over(f"prefill: {reason}", blame=False)

    def _say_path(self, leg: PrefillLeg) -> None:
        first, last = (m.instance or m.name for m in (leg.partner, leg.decode))
        shown = f"prefill={first} decode={last}".encode("ascii", "replace")
        self._path = b"x-atoll-path: %b\r\n" % shown

    def _drop_leg(self) -> None:
        leg, self._leg, self._path = self._leg, None, b""
        if leg is not None:
            leg.drop()

    def _pick(
        self, avoid: frozenset[str], now_s: float, *, squeeze: bool
    ) -> tuple[Member | None, str]:
        """Return a backend and the model it would be asked for."""
        context = self._context
        if self.requirements is None:
            return context.pool.pick(self.model, avoid, squeeze=squeeze, now_s=now_s), self.model
        # What began as one model does not go on as another.
        only = self.model if self.begun else None
        return context.chooser.choose(self.requirements, avoid, now_s, squeeze=squeeze, only=only)

    def _prepare(self, member: Member, model: str) -> bool:
        """Make the body for a backend; return whether it can take the request over."""
        if model != self.model or (self.request.models is not None and not self.attempts.backends):
            # The one behind an alias, or one that may stand in.
            self.model = model
            self._body = self._rename(model)
        self.body = self._body
        if self.begun and isinstance(self.request, Generation):
            # The next backend has to go on from what the client has, or it is not for this request.
            delivered = self.journal.read()
            resumption = resume(self.request, self._body, delivered, member.backend.kind)
            if resumption is None:
                return False
            self.body, self._answer.rewriter = resumption.body, resumption.rewriter
        return True

    def _rename(self, model: str) -> bytes:
        """Return the body with another model in it."""
        return with_model(self._body, model)

    def on_nobody(self, now_s: float) -> None:
        """Wait for a backend as long as that is allowed, else tell the client."""
        if self._leg is not None or self._done or self.attempts.member is not None:
            # One was chosen; another computes the prompt for it, or has given that up already.
            return
        if self._stuck:
            # Backends are there, and waiting does not change what they can do.
            self._fail(faults.stream_interrupted("no backend can go on from here"))
        elif self.attempts.backends or self.begun:
            self._search(now_s)
        elif self.requirements is None:
            self._fail(faults.busy(self.model))
        else:
            self._wait_for_room(self.requirements, now_s)

    def _wait_for_room(self, requirements: Requirements, now_s: float) -> None:
        self._error, wait_s = self._context.chooser.explain_none(requirements, now_s)
        budget = self._budget()
        # Set once: a request that is woken in vain does not begin to wait anew.
        if budget.until_s is None and wait_s > 0.0:
            budget.until_s = now_s + wait_s
        if budget.until_s is None:
            self._fail(self._error)
        else:
            self._context.queue.add(self)
            self._search(now_s)

    def _budget(self) -> RetryBudget:
        if self._retry is None:
            self._retry = RetryBudget()
        return self._retry

    def _search(self, now_s: float) -> None:
        """Try again soon, unless the search has gone on for too long."""
        deadlines = self._context.settings.deadlines
        search_s = deadlines.resume_s if self.begun else deadlines.retry_s
        wait_s = self._budget().next_wait_s(now_s, search_s)
        if wait_s is None:
            self._fail(self._error or faults.unreachable(self.model))
        elif wait_s == 0.0 and self.attempts.backends:
            # At once only after a backend failed; who waits for room is tried by the clock or the queue.
            self.attempts.attempt(self)
        else:
            self._wake_s = now_s + wait_s

    # When a backend fails

    def on_unreachable(self, reason: str) -> None:
        """Go elsewhere; that costs no try."""
        self._fail_over(reason, tried=False)

    def member_down(self, reason: str, *, died: bool = True) -> None:
        """Leave a backend that is known to be dead, or (not `died`) about to end."""
        if self._leg is not None and self.attempts.member is None:
            self._leg.member_down(reason)
            return
        if died:
            # A backend that is about to end did not die: only deaths may speak against the request
            # (`poison`).
            self.attempts.note_death(silent=self._is_silent())
        self._fail_over(reason, blame=False)

    def _is_silent(self) -> bool:
        """Whether nothing of an answer has come, from any backend."""
        return not (self.begun or self._answer.parts or self._answer.unfinished)

    def _fail_over(
        self,
        reason: str,
        *,
        tried: bool = True,
        died: bool = False,
        blame: bool = True,
        doubt: bool = False,
        late: bool = False,
        error: ApiError | None = None,
    ) -> None:
        """Give this backend up and go on with another, as long as that is allowed.

        One that `died` (its node is gone from the fabric, or backends die anyway) has not failed the
        request: that is no try.
        With `doubt` it is blamed only once another backend has answered the request.
        """
        if self._done:
            return
        context, attempts, budget = self._context, self.attempts, self._budget()
        self._drop_leg()
        now_s = context.loop.time()
        member = attempts.member
        if member is not None:
            if context.detailed:
                self._record_share(member, "failed", self.journal.read().tokens, now_s)
            rewriter = self._answer.rewriter
            # What a mute rewriter reads is not passed on: for the client it is no progress.
            mute = rewriter is not None and rewriter.mute
            # The backend gave the client something new: all tries and all backends are open again.
            if self.begun and self._last_s > attempts.began_s and not mute:
                budget.note_progress()
                attempts.tries = 0
                attempts.reopened = False
                attempts.avoid = frozenset()
            elif died and budget.excuse_death():
                attempts.tries -= 1
                tried = False
            if doubt:
                attempts.doubt(member, reason)
            if tried:
                # A new search: the time that the backend worked is not time without one.
                budget.restart_search()
        # Let go of it before anything else: what follows may end the request, or send it elsewhere at once.
        attempts.give_up(reason, now_s, blame=blame and not doubt)
        if member is not None:
            context.note_failover(self, member, reason)
        self._error = error or faults.attempt_failed(reason, late=late)
        # What kills one backend after the other is not sent to the next.
        if not self.begun and attempts.is_poison(self.sent.body, now_s):
            self._fail(faults.poison())
        elif (tried and attempts.tries >= context.settings.attempts) or budget.is_spent:
            self._fail(self._error)
        else:
            self._search(now_s)

    def _record_share(self, member: Member, outcome: str, tokens: int, now_s: float) -> None:
        """Write down what a backend did for the request; `tokens` are those of all attempts so far."""
        made, seconds = max(0, tokens - self._counted), now_s - self.attempts.began_s
        self.shares += (share_of(member, self.model, made, seconds, outcome),)
        self._counted = max(tokens, self._counted)

    @property
    def progress_s(self) -> float:
        """When its backend sent something last, in the loop's time; -inf: it has sent nothing."""
        return self._last_s if self._last_s > self.attempts.began_s else -math.inf

    def uses(self, member: Member) -> bool:
        """Whether the request is at a backend now."""
        leg = self._leg
        return self.attempts.member is member or (leg is not None and leg.attempts.member is member)

    def goes_by(self, kind: type) -> bool:
        """Whether it was sent on a connection of a kind."""
        return isinstance(self.attempts.upstream, kind)

    def can_move(self, now_s: float) -> bool:
        """Whether another backend than the one it is at could take it now and go on with it."""
        member = self.attempts.member
        if member is None:
            return False
        other, _ = self._pick(self.attempts.avoid | {member.name}, now_s, squeeze=False)
        if other is None or not self.begun or not isinstance(self.request, Generation):
            return other is not None
        delivered = self.journal.read()
        return resume(self.request, self._body, delivered, other.backend.kind) is not None

    # What the backend says

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Note what kind of answer comes."""
        answer, upstream = self._answer, self.attempts.upstream
        answer.begin(status, content_type, retry_after)
        if upstream is not None:
            answer.notes = upstream.notes
        if answer.streaming and not self._takes_events():
            self._fail_over("events instead of an answer")
        elif answer.streaming and self.begun:
            # The stream goes on here after a move: somebody else works on it now.
            self._say_who()

    def _takes_events(self) -> bool:
        """Whether an answer may be a stream: the client has to be able to read it."""
        return self.stream

    def on_body(self, data: bytes) -> None:
        """Pass a piece of the answer on."""
        answer = self._answer
        if not answer.streaming:
            answer.parts.append(data)
            answer.size += len(data)
            # Looked at only from here on: most answers stay smaller.
            if answer.size > _ERROR_BYTES:
                self._check_size()
            return
        self._last_s = self._context.loop.time()
        # The usual case: whole events, none of which says that the answer ends or went wrong. (Inside of
        # text the quotes would be escaped.)
        if (
            answer.plain
            and answer.unfinished is None
            and data.endswith(b"\n\n")
            and b'"finish_reason":"' not in data
            and b'"finish_reason": "' not in data
            and b'"error"' not in data
            and not data.endswith(DONE)
        ):
            # As `_deliver`, without a call for every token.
            if not self.begun:
                self._begin()
            self.journal.append(data)
            shown = answer.show(data)
            if self.kept is not None:
                self.kept.stream.add(data, shown)
            if self.slot is not None:
                self._count(data)
            self.client.send(shown)
        else:
            self._read(data)

    def on_end(self) -> None:
        """Finish with a complete answer, or find that it is none."""
        # The connection is its pool's again: nothing here may close it any more.
        self.attempts.upstream = None
        if not self._answer.streaming:
            self._end_answer()
        elif self._answer.finished:
            self._end_stream()
        else:
            self._fail_over("the stream ended early")

    def _end_answer(self) -> None:
        answer = self._answer
        status = answer.status
        body = b"".join(answer.parts)
        # The usual end: a whole answer for a client that has nothing yet.
        if status == 200 and not self.begun:
            try:
                answer.usage = usage = self._find_usage(body)
            except ValueError as problem:
                self._fail_over(f"the answer is no JSON: {problem}")
                return
            self._note_success()
            self.first_s = self._context.loop.time()
            headers = self._headers()
            # Before it is sent: what the client has is never missing in the journal.
            if self.slot is not None and usage is not None:
                self._context.record_delivery(self.slot, usage.completion_tokens)
                if usage.has_media:
                    self._context.record_media(self.slot, usage)
            self.client.respond(200, body, answer.note or b"application/json", headers)
            self._finish(200, "ok")
        elif (fault := fault_of_client(status, body)) is not None:
            # The backend is well; the request is what is wrong, and it would be anywhere.
            self._note_success()
            self._fail(fault)
        elif status in _RETRIED:
            # Full, by its own word (429, or 503 with Retry-After): no failure to hold against it.
            full = status == 429 or (status == 503 and answer.note != b"")
            error = faults.backend_refused(status, answer.note, reason_of(body))
            # A 500 may be the request's own doing: the backend is blamed once another one has answered it.
            doubt = status == 500 and not self.begun
            self._fail_over(f"status {status}", blame=not full, doubt=doubt, error=error)
        elif self.begun:
            self._fail_over(f"status {status} instead of a stream")
        elif 400 <= status < 600:
            # A backend that refuses a request works: its error is passed on, in the form of this API.
            self._note_success()
            self.client.respond(status, upstream_error(status, body))
            self._finish(status, "error")
        else:
            self._fail_over(f"unexpected status {status}")

    def _find_usage(self, body: bytes) -> Usage | None:
        """Return what a whole answer says of its usage, in it or beside it; ValueError: it is none."""
        usage = answer_usage(body)
        if usage is not None or self._answer.notes is None:
            return usage
        noted = self._answer.note_of(b"x-atoll-usage")
        return None if noted is None else header_usage(noted)

    def on_lost(self, reason: str, *, unused: bool) -> None:
        """Go on elsewhere; a kept connection that was closed already is nobody's failure."""
        attempts, context = self.attempts, self._context
        member, upstream = attempts.member, attempts.upstream
        gone = member is not None and member.node and not context.is_present(member)
        taken_s = context.loop.time() - attempts.began_s
        # By chance a kept connection closes under a request once, and then it shows at once.
        unused = unused and not attempts.reopened and taken_s < _STALE_S
        # A tunnel may break while its node is well.
        dead = gone or isinstance(upstream, HttpUpstream)
        excused = False
        # A process that died takes its connections with it; the end of one that was only kept says nothing.
        if dead and not self._answer.finished and (not unused or taken_s > _NOTICED_S):
            excused = attempts.note_death(silent=self._is_silent())
        attempts.upstream = None
        # Nobody has read the request: it is sent again, and that costs no try.
        if unused and member is not None and not member.node:
            attempts.reopen(self, member)
        elif self._answer.finished and self._answer.usage is not None:
            # All but the end mark is there.
            self._end_stream()
        elif member is not None and member.node:
            # A node that never answered was not tried; one that is gone is not to blame.
            tried = self._answer.status != 0
            if not tried and not gone:
                # Nor later, when a failure that is one is counted: its engine may be starting again.
                attempts.tries -= 1
            self._fail_over(reason, tried=tried, died=gone, blame=not gone)
        else:
            self._fail_over(reason, died=excused)

    def _check_size(self) -> None:
        is_error = self._answer.status >= 400
        limit = _ERROR_BYTES if is_error else self._context.settings.limits.answer_bytes
        if self._answer.size > limit:
            self._fail_over("the answer is too large")

    # Streams

    def _begin(self) -> None:
        self.begun = True
        self.journal, self._sent = StreamJournal(), TokenTally()
        self.first_s = now_s = self._context.loop.time()
        member = self.attempts.member
        if member is not None:
            member.note_first(now_s - self.attempts.began_s)
        if self.kept is not None and self.kept.stream.asked is None:
            self.kept.begin(self.sent, self._key_id, self.model, self._body)
        self.client.begin_stream(self._headers())
        if b"x-atoll-events" in self.sent.headers:
            self._say_who()

    def keep(self, kept: NumberedClient) -> None:
        """Have the stream kept, for a client that counts its events; or go on with one that is (`asked`)."""
        self.kept = kept
        kept.in_use = True
        if kept.stream.asked is None:
            self.attempts.attempt(self)
        else:
            self._take_up(kept.stream, kept.stream.asked)

    def _take_up(self, stream: KeptStream, asked: AskedStream) -> None:
        """Send what the client lacks of a stream that another gateway began, and go on with it."""
        pieces, stream.pieces = stream.pieces, []
        # As backends had it: with the model that answered, and a seed that may be the gateway's own.
        self.model, self._body = asked.model, asked.body
        self._begin()
        for piece in pieces:
            self.journal.append(piece.events)
            self._sent.add(piece.events)
        self._counted = self._sent.total
        self.billed = stream.hand_over(self._counted)
        if self.slot is not None:
            # What the ledger of a gateway that died may lack, this client gets now.
            self._context.record_delivery(self.slot, max(0, self._counted - self.billed[1]))
        for piece in pieces:
            shown = piece.events if piece.shown is None else piece.shown
            if not piece.last:
                self.client.send(shown)
                continue
            self._answer.usage = Usage(piece.prompt_tokens, piece.completion_tokens)
            self.client.end_stream(shown)
            self._finish(200, "ok")
            return
        self.attempts.attempt(self)

    @property
    def _key_id(self) -> str | None:
        grant = None if self.requirements is None else self.requirements.grant
        return None if grant is None else grant.key_id

    def _say_who(self) -> None:
        """Tell a client that asked for it who works on its stream, in a comment that SDKs leave out."""
        member = self.attempts.member
        if (
            member is None
            or self.sent.headers.get(b"x-atoll-events") != b"1"
            or self.endpoint
            or not isinstance(self.request, Generation)
        ):
            return
        offer = member.offer(self.model)
        said = {
            "event": "node",
            "node": offer.node,
            "backend": member.name,
            "provider": offer.provider or None,
            # A kept connection that was closed already is no attempt of its own.
            "attempt": sum(1 for _ in groupby(self.attempts.backends)),
        }
        self.client.send(comment_of(said))

    def _headers(self) -> bytes:
        """Return headers that say who answers."""
        member = self.attempts.member
        if member is None:
            return b""
        headers = member.headers + self._path
        if self._answer.notes is not None:
            headers += self._answer.note_headers()
        if self.requirements is None:
            return headers
        return headers + self._context.chooser.headers(self.requirements, member, self.model)

    def _count(self, events: bytes) -> None:
        """Write down what the client is about to have."""
        slot = self.slot
        if slot is None:
            return
        before, sent = self._sent.total, self._sent.add(events)
        self._mark(before)
        if sent != before:
            self._context.record_delivery(slot, sent - self.billed[1])
        spoken = audio_chars_in(events)
        if spoken:
            self._spoken += spoken
            self._context.record_media(slot, Usage(speech_seconds=spoken_seconds(self._spoken)))

    def _mark(self, tokens: int) -> None:
        """Note where a piece begins, so that what a client never read is not billed."""
        marks = self._marks
        if marks is None:
            marks = self._marks = []
        elif len(marks) >= _MARKS:
            # What the client has by now is settled.
            first = bisect_right(marks, (self.client.read_bytes(), math.inf)) - 1
            del marks[: max(0, first)]
        marks.append((self.client.written, tokens))

    def _deliver(self, event: bytes) -> None:
        if not self.begun:
            self._begin()
        self.journal.append(event)
        shown = self._answer.show(event)
        if self.kept is not None:
            self.kept.stream.add(event, shown)
        if self.slot is not None:
            self._count(event)
        self.client.send(shown)

    def _read(self, data: bytes) -> None:
        """Pass on what a piece brings that has to be read: the end, or a stream that was moved."""
        answer = self._answer
        try:
            for event in answer.read(data, wants_usage=asks_for_usage(self.request)):
                self._deliver(event)
        except BrokenStreamError as error:
            if error.fault is None:
                self._fail_over(str(error))
            else:
                # The stream says that the request is at fault: the backend is well.
                self._note_success()
                self._fail(error.fault)
        except DivergedError as error:
            # The client has text that the new answer does not begin with: nothing can mend that.
            self._fail(faults.stream_interrupted(str(error)))
        else:
            if answer.ended:
                # All that matters is there: what is left on the connection is drained by its pool, not
                # waited for.
                upstream, self.attempts.upstream = self.attempts.upstream, None
                if upstream is not None:
                    upstream.leave()
                self._end_stream()

    def _end_stream(self) -> None:
        if not self.begun:
            self._begin()
        # The end was held back until it was all there: now it goes out in one piece.
        last = b"".join(self._answer.held)
        self.journal.append(last)
        shown = self._answer.show_end() + DONE
        if self.kept is not None:
            self.kept.stream.end(last, shown, self._answer.usage)
        # Before `_finish`, which lets go of the backend.
        self._note_success()
        if self.slot is not None:
            self._count(last)
            usage = self._answer.usage
            if usage is not None and usage.has_media:
                self._context.record_media(self.slot, usage)
        self.client.end_stream(shown)
        self._finish(200, "ok")

    # The end

    def _note_success(self) -> None:
        """Have the pool know that the backend answered, and how fast."""
        if self._answer.recounts and self.attempts.member is not None:
            self.attempts.member.recounts = True
        self.attempts.note_success(self.model, self._answer.usage)

    def _fail(self, error: ApiError) -> None:
        """Tell the client that it did not work."""
        self._drop_leg()
        self.attempts.drop()
        if not self.begun:
            self.client.respond_error(error)
            self._finish(error.status, "error")
        else:
            # The status went out long ago: the error is an event, and the end mark is left out.
            error = faults.in_stream(error)
            if self.kept is not None:
                self.kept.stream.failed = True
            self.client.end_stream(b"data: " + error.body() + b"\n\n")
            self._finish(error.status, "truncated")

    def _finish(self, status: int, outcome: str) -> None:
        if self._done:
            return
        self._done = True
        # A prefill backend that was asked at once and has not answered yet is waited for no longer.
        self._drop_leg()
        context, member = self._context, self.attempts.member
        # Only requests with requirements wait in the queue or have shares.
        if self.requirements is not None:
            context.queue.remove(self)
            if context.detailed and member is not None:
                usage = self._answer.usage
                tokens = usage.completion_tokens if usage else self.journal.read().tokens
                if self.got_tokens is not None:
                    tokens = min(tokens, self.got_tokens)
                ended = outcome if outcome in ("ok", "cancelled") else "error"
                self._record_share(member, ended, tokens, context.loop.time())
        self.attempts.release()
        context.end_relay(self, status, outcome, self._answer.usage)

    # What the client and the clock say

    def cancel(self) -> None:
        """Stop: the client is gone."""
        self._drop_leg()
        self.attempts.drop()
        marks = self._marks
        if marks:
            read = self.client.read_bytes()
            if read < self.client.written:
                # All pieces before the last one that begins within what was read.
                place = bisect_right(marks, (read, math.inf))
                self.got_tokens = marks[max(0, place - 1)][1]
        # The status that nginx writes down for a client that went away.
        self._finish(499, "cancelled")

    def pause(self) -> None:
        """Take nothing from the backend until the client keeps up."""
        self._paused_s = self._context.loop.time()
        self.attempts.pause()

    def resume(self) -> None:
        """Take the rest: the client keeps up again."""
        self._paused_s = None
        # The silence was the client's: the time of the backend counts from here.
        self._last_s = self._context.loop.time()
        self.attempts.resume()

    def tick(self, now_s: float) -> None:
        """Give up what is overdue."""
        deadlines = self._context.settings.deadlines
        # In this order: the request as a whole, its size, then whom it waits for (a backend, the client, a
        # token).
        if now_s - self.started_s > deadlines.request_s:
            self._fail(faults.too_long())
        elif self.journal.folded > self._context.settings.limits.answer_bytes:
            # Elsewhere it would be as long.
            self._blame_length(now_s)
        elif self._leg is not None and self.attempts.member is None:
            self._leg.tick(now_s)
        elif self._wake_s is not None:
            if now_s >= self._wake_s:
                self.attempts.attempt(self)
        elif self._paused_s is not None:
            if now_s - self._paused_s > deadlines.client_s:
                self.client.abort()
        else:
            if self._leg is not None:
                self._leg.tick(now_s)
            self._check_silence(now_s, deadlines)

    def _keeps(self, now_s: float) -> bool:
        """Whether a backend that is late is waited for: it lives, and no other would be asked instead."""
        attempts, settings = self.attempts, self._context.settings
        member = attempts.member
        if member is None or attempts.connecting is not None:
            return False
        # Others than nodes are known to live only where they are asked how they are.
        if not member.well or member.removed or not (member.node or settings.health.enabled):
            return False
        if now_s < self._kept_until_s:
            return True
        if attempts.tries < settings.attempts and self.can_move(now_s):
            return False
        # To look for others takes a while: not at every tick.
        self._kept_until_s = now_s + _KEPT_S
        return True

    def _blame_length(self, now_s: float) -> None:
        """Give up a stream that has no end, and hold it against its backend."""
        self.attempts.give_up("the answer is too large", now_s, blame=True)
        self._fail(faults.stream_interrupted("the answer is too large"))

    def _check_silence(self, now_s: float, deadlines: Deadlines) -> None:
        """Give up a backend that takes too long to connect, to answer, or over the next token."""
        attempts = self.attempts
        heard_s = attempts.began_s
        # Which deadline holds depends on how far the attempt is.
        if attempts.connecting is not None:
            max_s, what = deadlines.connect_s, "no connection in time"
        elif not self._answer.streaming:
            max_s = deadlines.first_token_s if self.stream else deadlines.answer_s
            what = "no answer in time"
        else:
            # Some engines greet before they prefill: the second event is the first token.
            moved = self._answer.rewriter is not None
            early = self._last_s <= heard_s if moved else self.journal.short
            heard_s = max(self._last_s, heard_s)
            max_s = deadlines.first_token_s if early else deadlines.between_tokens_s
            what = f"no token for {max_s:g} s"
        if attempts.member is not None and now_s - heard_s > max_s and not self._keeps(now_s):
            # A connection that never stood costs no try; and to be late with all of an answer may be the
            # request's own doing, so the backend is only doubted.
            sent = attempts.connecting is None
            self._fail_over(what, tried=sent, doubt=sent and not self.begun, late=True)
