"""Keys, limits and usage as a gateway meets them: everything on the way of a request is in memory.

All keys are held here and the database is asked once a second whether any changed, so a key that is
revoked stops working, and a new one starts to, within that time. Finished requests go into the journal at
once and from there into the database, once a second; as long as the database is away, keys stay as they
were and the journal grows, up to a limit. There, and where the disk takes no more, `on_full_disk` says what
becomes of new requests: `refuse` answers 503; `serve` lets them in and marks the gap in the ledger (`gaps`).
Both end by themselves when there is room again.

Requests and tokens a minute, and requests at the same time, are shared by all gateways of a database
(`shared_rates`). Quotas (a day, a month, ever) are of all gateways together; each knows of the others' use a
second or two late, so a key may go over its quota by what is delivered meanwhile. A strict key goes over
nothing: its quotas are lent, too, and every request reserves what it may use (`count_leases`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from atoll.core.errors import InputError
from atoll.runtime.accounts.api_keys import ApiKey, matches, read_bearer
from atoll.runtime.accounts.database import AWAY, Database, is_refusal
from atoll.runtime.accounts.gaps import GapBook
from atoll.runtime.accounts.grants import (
    ANYBODY,
    ActiveKey,
    Grant,
    NoLeaseError,
    no_room_error,
    unknown_key_error,
)
from atoll.runtime.accounts.journal import SLOTS, JournalFullError, UsageJournal, read_segment
from atoll.runtime.accounts.key_limits import NOTHING, TOTAL, Counted, day_of, periods
from atoll.runtime.accounts.ledger import NO_PRICES, LedgerRows, TokenPrice, rows_of
from atoll.runtime.accounts.shared_rates import SharedRates
from atoll.runtime.accounts.slots import MediaCounts
from atoll.runtime.openai import ApiError, Usage
from atoll.telemetry.logs import Log, SilentLog
from atoll.telemetry.usage_record import UsageRecord

__all__ = ["Accounts", "Grant", "NoLeaseError", "TokenPrice"]

_REFRESH_S = 1.0
"""How often finished requests are written and changed keys are read."""
_ALL_S = 60.0
"""How often quotas of keys that do not ask are read as well."""
_ANSWER_S = 10.0
"""How long the database may take for one answer."""
_HURRY_S = 0.1
"""Between two settlements of limits that cannot wait for the next refresh."""
_JOURNAL_BYTES = 256 * 2**20
"""Of requests that the database does not have yet; at more the journal counts as full."""
_TOKENS = 2**26
"""More than any request can have, whose body is not that large: what claims more is cut."""
_MEDIA_S = 10**6
"""Seconds of sound, and below pixels and bytes, of one request: what claims more is cut as well."""
_PIXELS = 2**40
_BYTES = 2**50
OnFullDisk = Literal["refuse", "serve"]


class _Running:
    """A request that has a slot."""

    __slots__ = ("charged", "held", "reserved")

    def __init__(self, held: ActiveKey | None, reserved: int) -> None:
        self.held = held
        self.charged = NOTHING
        self.reserved = reserved
        """Tokens that it may still use."""
        if held is not None:
            held.reserved += reserved

    def free(self, tokens: int) -> None:
        """Reserve so many tokens less: they are used, or will not be."""
        freed = min(self.reserved, tokens)
        self.reserved -= freed
        if self.held is not None:
            self.held.reserved -= freed


class Accounts:
    """Admits requests, and writes down what they used.

    grant = accounts.admit(headers.get(b"authorization"), model)   # ApiError 401, 403, 429, 503
    slot = accounts.opened(grant, request_id, model, endpoint)     # in the same turn of the loop
    accounts.delivered(slot, tokens_so_far)                        # any number of times
    accounts.used_media(slot, usage_so_far)                        # so is this
    accounts.closed(slot, grant, record)                           # exactly once
    """

    def __init__(
        self,
        database: Database,
        journal: UsageJournal,
        *,
        required: bool = True,
        prices: Mapping[str, TokenPrice] = NO_PRICES,
        journal_bytes: int = _JOURNAL_BYTES,
        log: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.required = required
        self.on_full_disk: OnFullDisk = "refuse"
        """Treatment of new requests while their usage cannot be written down."""
        self.refused: dict[int, int] = {}
        """Requests that were not admitted, by status."""
        self._database = database
        self._journal = journal
        self._prices = prices
        self._journal_bytes = journal_bytes
        self._log = log or SilentLog()
        self._clock = clock
        self._wall = wall
        self._keys: dict[str, ActiveKey] = {}
        self._metered: dict[str, ActiveKey] = {}
        """Those that have, or had, a quota."""
        self._running: dict[int, _Running] = {}
        self._version = 0
        self.has_strict = False
        """Whether there is, or was, a key that may have to say what its requests use at most."""
        self._full = False
        self._up = True
        self._synced_s = self._all_s = clock()
        recovered = journal.recovered
        self._finished = recovered.finished + recovered.crashed
        self._written = 0
        self._gone: list[str] = []
        self._kept: set[str] = set()
        """Segments that are in the database, and that the disk did not let go of."""
        self._trouble = ""
        """Last error of the database."""
        self._gaps = GapBook()
        self._rates = SharedRates(database, clock())
        self._hurry = asyncio.Event()
        self._awaited: list[asyncio.Future[None]] = []
        """Of requests that wait for the next settlement."""
        self._syncing = asyncio.Lock()
        self._periods = periods(wall())
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        journal: Path,
        required: bool = True,
        prices: Mapping[str, TokenPrice] | None = None,
        log: Log | None = None,
        slots: int = SLOTS,
        refresh_s: float = _REFRESH_S,
        journal_bytes: int = _JOURNAL_BYTES,
    ) -> Accounts:
        """Open the database and the journal, and write down what dead gateways left there.

        `journal` is a folder that gateways of this machine share. With `required` False a caller without
        a key is let in, without limits; a key that is wrong is refused all the same. `prices` are those
        of models whose nodes announce none.
        """
        database = await Database.open(url)
        try:
            accounts = cls(
                database,
                UsageJournal.claim(journal, slots=slots),
                required=required,
                prices=prices or NO_PRICES,
                journal_bytes=journal_bytes,
                log=log,
            )
        except BaseException:
            await database.close()
            raise
        await accounts._start(refresh_s)
        return accounts

    async def _start(self, refresh_s: float) -> None:
        recovered = self._journal.recovered
        if recovered.crashed or recovered.finished:
            self._log.event(
                "accounts.recovered", crashed=recovered.crashed, finished=recovered.finished
            )
        # It has to work once: a gateway that never read a key would refuse everybody.
        if not await self.sync():
            await self.close()
            raise InputError(
                f"the database cannot be used: {self._trouble}",
                hint="check that it runs, has room, and is not locked by another program",
            )
        self._task = asyncio.get_running_loop().create_task(self._run(refresh_s))

    async def _run(self, refresh_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + refresh_s
        while True:
            # Until the next refresh is due, or until a limit cannot wait for it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                if loop.time() >= due_s:
                    await self.sync()
                    due_s = loop.time() + refresh_s
                elif self._up:
                    await self._settle()
                    await asyncio.sleep(_HURRY_S)
            except Exception as error:  # noqa: BLE001 - requests go on, and so must this
                self._log.event("accounts.bug", error=repr(error)[:500])

    async def close(self) -> None:
        """Write what is finished into the database, if it is there, and let go."""
        if self._task is not None:
            # Not in the middle of a transaction, which would keep the database locked for a while.
            async with self._syncing:
                self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        # Requests of the current segment go into the database with the others.
        self._journal.rotate()
        try:
            await self.sync()
            if self._up:
                with contextlib.suppress(*AWAY):
                    await self._rates.close(self._wall())
        finally:
            # What could not be written stays in its folder for the next start.
            self._journal.release()
            await self._database.close()

    # On the way of a request

    def authenticate(self, authorization: bytes | None) -> Grant:
        """Return what a caller may do, or raise 401; costs nothing of its limits."""
        held = self._find_key(authorization)
        return ANYBODY if held is None else held.grant

    def identify(self, authorization: bytes | None) -> ApiKey | None:
        """Return the key that a caller shows; None without one of ours, 401 for one that does not work."""
        if authorization is None or read_bearer(authorization) is None:
            return None
        held = self._find_key(authorization)
        return None if held is None else held.key

    def reserves(self, grant: Grant) -> bool:
        """Whether requests of a caller have to say how many tokens they may use."""
        return grant.key_id is not None and self._keys[grant.key_id].reserves

    def admit(self, authorization: bytes | None, model: str, need: int = 0) -> Grant:
        """Let one request of a caller in, or raise 401, 403, 429 or 503.

        `need` is the most tokens that it may use, for a caller who `reserves`. A `NoLeaseError` may be gone
        once `settled` is.
        """
        held = self._find_key(authorization)
        if self._full and self.on_full_disk == "refuse":
            raise self._refuse(no_room_error("usage cannot be written down at the moment"))
        if held is None:
            return ANYBODY
        now_s, unix_s = self._clock(), self._wall()
        # Made anew once a day only: every request needs it.
        if unix_s >= self._periods.day_ends_s:
            self._periods = periods(unix_s)
        error = held.refusal(model, now_s, unix_s, self._periods, need)
        # Also where it is refused: it wants a lease, and may have one a moment later.
        if held.shared:
            self._rates.active[held.key.id] = held
            if (self._rates.gateways > 1 and held.unleased) or isinstance(error, NoLeaseError):
                self._hurry.set()
        if error is not None:
            raise self._refuse(error)
        # Not before: a request that is refused costs nothing.
        if held.requests is not None:
            held.requests.charge(now_s, 1)
        return held.grant

    def visible(self, grant: Grant, model: str) -> bool:
        """Return whether a caller may use a model."""
        held = self._keys.get(grant.key_id) if grant.key_id is not None else None
        return held is None or held.models.allow(model)

    def visible_models(self, grant: Grant, models: Iterable[str]) -> tuple[str, ...]:
        """Return those of some models that a caller may use, in their order."""
        return tuple(model for model in models if self.visible(grant, model))

    def limit_headers(self, grant: Grant) -> tuple[tuple[bytes, bytes], ...]:
        """Return OpenAI's `x-ratelimit-*` headers; none for a caller without limits per minute."""
        held = self._keys.get(grant.key_id) if grant.key_id is not None else None
        return () if held is None else held.limit_headers(self._clock())

    def settled(self) -> asyncio.Future[None]:
        """Return what is done when limits were settled with the other gateways the next time."""
        self._awaited.append(asyncio.get_running_loop().create_future())
        return self._awaited[-1]

    def opened(
        self,
        grant: Grant,
        request_id: str,
        model: str,
        endpoint: str,
        *,
        settled_in: str = "",
        need: int = 0,
    ) -> int:
        """Note that an admitted request begins; return its slot.

        `settled_in` is a folder for `settlements`, if another gateway may go on with its stream; `need` is
        what it was admitted with.
        """
        held = self._keys.get(grant.key_id) if grant.key_id is not None else None
        try:
            if grant.track:
                slot = self._journal.open(
                    grant.key_id,
                    request_id,
                    model,
                    endpoint,
                    self._wall(),
                    settled_in=settled_in,
                )
            else:
                # Of a key that is not tracked no names are kept, only what its quotas count.
                counted = grant.key_id if held is not None and held.quotas else None
                slot = self._journal.open(
                    counted, "", "", "", self._wall(), track=False, settled_in=settled_in
                )
        except JournalFullError as error:
            if self.on_full_disk == "refuse":
                raise self._refuse(no_room_error(str(error))) from None
            slot = self._journal.open_spare()
            self._gaps.admit(self._wall())
        if held is not None:
            held.running += 1
        self._running[slot] = _Running(held, need)
        return slot

    def operation(self, slot: int) -> str:
        """Return by which name the ledger will know a request."""
        return self._journal.operation(slot)

    def delivered(self, slot: int, tokens: int) -> None:
        """Note how many completion tokens the client has by now."""
        self._journal.delivered(slot, min(max(tokens, 0), _TOKENS))

    def used_media(self, slot: int, usage: Usage | UsageRecord) -> None:
        """Note the sound and pictures that a request has used by now."""
        self._journal.use_media(slot, media_counts(usage))

    def passed(self, slot: int, bytes_in: int, bytes_out: int) -> None:
        """Note the bytes of bodies that went to a service and came from it by now."""
        self._journal.use_media(slot, MediaCounts(bytes_in=bytes_in, bytes_out=bytes_out))

    def closed(self, slot: int, grant: Grant, record: UsageRecord) -> None:
        """Note that a request ended, however it did; its slot is free again."""
        running = self._running.pop(slot)
        prompt, completion = record.prompt_tokens, record.completion_tokens
        # Backends may claim anything; the ledger keeps what can be.
        if not (0 <= prompt <= _TOKENS and 0 <= completion <= _TOKENS):
            prompt, completion = min(max(prompt, 0), _TOKENS), min(max(completion, 0), _TOKENS)
            record = record._replace(prompt_tokens=prompt, completion_tokens=completion)
        tokens = prompt + completion
        media = media_counts(record)
        if record.bytes_in or record.bytes_out:
            media = media._replace(
                bytes_in=min(record.bytes_in, _BYTES), bytes_out=min(record.bytes_out, _BYTES)
            )
        finished_s = self._wall()
        held = running.held
        running.free(running.reserved)
        if held is not None:
            used = Counted(tokens, media.audio_ms + media.speech_ms, media.pixels)
            held.ended(used, running.charged, day_of(finished_s), self._clock())
        counts = held is not None and held.quotas
        if grant.track or counts:
            kept = record if grant.track else None
            # A journal at its limit takes nothing more, whatever the disk would.
            full = self._full and self._journal.bytes >= self._journal_bytes
            if full and self.on_full_disk == "serve":
                self._journal.drop(slot)
                self._gaps.lose(finished_s)
            elif self._journal.close(slot, grant.key_id, tokens, finished_s, kept, media):
                self._finished += 1
            else:
                self._gaps.lose(finished_s)
        else:
            self._journal.drop(slot)

    def _find_key(self, authorization: bytes | None) -> ActiveKey | None:
        """Return the key of a caller; None for a caller without one, where none is required."""
        presented = None if authorization is None else read_bearer(authorization)
        if presented is None:
            if not self.required:
                return None
            missing = authorization is None
            raise self._refuse(
                unknown_key_error(
                    "No API key was given: send it as 'Authorization: Bearer KEY'."
                    if missing
                    else "This is not an API key of this service."
                )
            )
        held = self._keys.get(presented.id)
        # Compared even where there is no such key: the time taken does not tell.
        if not matches(None if held is None else held.key, presented) or held is None:
            raise self._refuse(unknown_key_error("This API key is not known."))
        state = held.key.state(self._wall())
        if state != "active":
            raise self._refuse(unknown_key_error(f"This API key is {state}."))
        return held

    def _refuse(self, error: ApiError) -> ApiError:
        self.refused[error.status] = self.refused.get(error.status, 0) + 1
        return error

    # Beside it

    @property
    def database(self) -> Database:
        """Where keys and usage are; for what may wait."""
        return self._database

    @property
    def keys(self) -> list[ApiKey]:
        """All keys as they are known here, oldest first."""
        return sorted((held.key for held in self._keys.values()), key=lambda key: key.created_s)

    def key(self, key_id: str) -> ApiKey | None:
        """Return the key with an id, if it is known here."""
        held = self._keys.get(key_id)
        return None if held is None else held.key

    async def learn_keys(self) -> None:
        """Read now which keys changed, as happens once a second by itself."""
        async with self._syncing:
            await self._read_keys()

    def stats(self) -> dict[str, object]:
        """Return what metrics show.

        keys, running, refused (by status), database_up, synced_s (seconds since the database was last in
        step), written (requests since the start), unwritten (finished, and not in the database yet),
        journal_bytes, journal_full, gap_requests and lost (let in though they could not be written down, and
        not in the ledger), gateways (of this database), rates_shared (False: equal shares of limits).
        """
        return {
            "keys": len(self._keys),
            "running": self._journal.running,
            "refused": dict(self.refused),
            "database_up": self._up,
            "synced_s": self._clock() - self._synced_s,
            "written": self._written,
            "unwritten": self._finished - self._written,
            "journal_bytes": self._journal.bytes,
            "journal_full": self._full,
            "gap_requests": self._gaps.requests,
            "lost": self._gaps.lost,
            "gateways": self._rates.gateways,
            "rates_shared": self._rates.shared,
        }

    async def sync(self) -> bool:
        """Write what is finished, read what changed; return whether the database was there.

        Runs once a second by itself.
        """
        async with self._syncing:
            self._charge_running()
            # First: what the disk takes now is part of this exchange.
            self._journal.retry()
            try:
                await self._exchange()
            except AWAY as error:
                self._away(error)
                # Without the database for too long, limits are shared equally.
                self._rates.check(self._clock())
            else:
                if not self._up:
                    self._log.event("accounts.database_back")
                self._up = True
                self._synced_s = self._clock()
            self._check_room()
            self._wake()
            return self._up

    def _charge_running(self) -> None:
        """Charge what running requests have delivered since the last time."""
        now_s = self._clock()
        for slot, running in self._running.items():
            held = running.held
            if held is not None and (held.tokens is not None or held.quotas):
                media = self._journal.media(slot)
                audio_ms = media.audio_ms + media.speech_ms
                used = Counted(self._journal.tokens(slot), audio_ms, media.pixels)
                more, running.charged = used - running.charged, used
                running.free(more.tokens)
                held.grew(more, now_s)

    async def _exchange(self) -> None:
        if self._up:
            self._journal.rotate()
            if not self._journal.unwritten:
                # What was counted as pending goes with the segment that ends here.
                for held in self._metered.values():
                    held.usage.send()
        else:
            # As long as the database is away: few large segments, not one a second.
            self._journal.rotate_large()
        # Usage before quotas: what is read below holds what is written here.
        for segment in self._journal.segments():
            await self._write(segment)
        # The name of a segment keeps it from being written twice: it goes only after the file is gone.
        if self._gone:
            await asyncio.wait_for(self._database.forget(self._gone), _ANSWER_S)
            self._gone.clear()
        await self._read_keys()
        await self._read_quotas()
        await asyncio.wait_for(self._gaps.tell(self._database), _ANSWER_S)
        await self._rates.settle(self._clock(), self._wall())

    async def _settle(self) -> None:
        """Settle limits a minute between two refreshes."""
        async with self._syncing:
            with contextlib.suppress(*AWAY):
                await self._rates.settle(self._clock(), self._wall())
            self._wake()

    def _wake(self) -> None:
        """Have requests that wait for leases look again."""
        awaited, self._awaited = self._awaited, []
        for each in awaited:
            if not each.done():
                each.set_result(None)

    async def _write(self, segment: Path) -> None:
        if segment.stem in self._kept:
            self._forget(segment)
            return
        count = 0
        try:
            # In a thread: a segment may be large, and requests do not wait for it.
            rows, count = await asyncio.to_thread(_load, segment, self._prices)
            await asyncio.wait_for(self._database.write(segment.stem, rows), _ANSWER_S)
        except Exception as error:
            if not is_refusal(error):
                raise
            # Rows that will never be taken must not hold up all others.
            self._journal.forget(segment, keep_as=".refused")
            self._finished -= count
            self._log.event("accounts.refused", segment=segment.name, error=repr(error)[:500])
            return
        self._written += count
        # It is in the database: if the file stays, it must not be counted again.
        self._kept.add(segment.stem)
        self._forget(segment)

    def _forget(self, segment: Path) -> None:
        """Remove a segment that is in the database; where the disk does not let it go, later."""
        try:
            self._journal.forget(segment)
        except OSError as error:
            self._log.event("accounts.segment_stays", segment=segment.name, error=str(error))
            return
        self._kept.discard(segment.stem)
        self._gone.append(segment.stem)

    async def _read_keys(self) -> None:
        changes = await asyncio.wait_for(self._database.key_changes(self._version), _ANSWER_S)
        now_s = self._clock()
        for key in changes.keys:
            held = self._keys.get(key.id)
            if held is None:
                held = self._keys[key.id] = ActiveKey(key, now_s)
            else:
                held.change(key, now_s)
            self._rates.know(key.id, held)
            self.has_strict |= key.spec.strict
            if held.quotas:
                self._metered[key.id] = held
        if changes.keys:
            self._log.event("accounts.keys", changed=len(changes.keys), known=len(self._keys))
        self._version = changes.version

    async def _read_quotas(self) -> None:
        """Learn what all gateways have counted: of keys in use, and now and then of all."""
        now_s, now = self._clock(), periods(self._wall())
        every = now_s - self._all_s >= _ALL_S
        if every:
            self._all_s = now_s
        key_ids = [
            key_id
            for key_id, held in self._metered.items()
            if every or held.usage.sent or now_s - held.touched_s < _ALL_S
        ]
        if not key_ids:
            return
        wanted = self._database.counters(key_ids, (now.day, now.month, TOTAL))
        used_by_key = await asyncio.wait_for(wanted, _ANSWER_S)
        for key_id in key_ids:
            self._keys[key_id].usage.arrived(used_by_key.get(key_id, {}))

    def _away(self, error: BaseException) -> None:
        cause = getattr(error, "orig", None) or error
        self._trouble = str(cause) or type(cause).__name__
        if self._up:
            kind = type(getattr(error, "orig", None) or error).__name__
            self._log.event("accounts.database_away", error=kind)
        self._up = False

    def _check_room(self) -> None:
        journal = self._journal
        # Too large, or the disk takes nothing: both pass by themselves.
        full = journal.bytes >= self._journal_bytes or journal.unwritten > 0
        if full != self._full:
            self._log.event(
                "accounts.journal_full" if full else "accounts.journal_free",
                bytes=journal.bytes,
                unwritten=journal.unwritten,
                reason=journal.trouble if journal.unwritten else "",
                mode=self.on_full_disk,
            )
        self._full = full
        if not full and self._gaps.current is not None:
            self._gaps.end(self._wall())


def media_counts(usage: Usage | UsageRecord) -> MediaCounts:
    """Return sound and pictures in whole units; what claims more than any request can have is cut."""
    pixels = usage.image_pixels
    return MediaCounts(
        _milliseconds(usage.audio_seconds),
        _milliseconds(usage.speech_seconds),
        min(max(pixels, 0), _PIXELS),
    )


def _milliseconds(seconds: float) -> int:
    # NaN is no more than 0, either.
    return round(min(seconds, _MEDIA_S) * 1000) if seconds > 0 else 0


def _load(segment: Path, prices: Mapping[str, TokenPrice]) -> tuple[LedgerRows, int]:
    finished = read_segment(segment)
    return rows_of(finished, prices), len(finished)
