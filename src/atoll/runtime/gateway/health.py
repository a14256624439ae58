"""Watching backends: a cheap question often, and a real token before a dead one is trusted again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from atoll.engines.table import find_engine
from atoll.runtime.gateway.settings import HealthSettings
from atoll.runtime.http.upstream import GET, JSON, RequestTemplate, Upstream, UpstreamPool
from atoll.runtime.pool.member import Member
from atoll.runtime.pool.pool import BackendPool

# For one token of a backend that was down: far more than the cheap question may take.
_TOKEN_TIMEOUT_S = 60.0


class _Reply:
    """Waits for one answer, and keeps nothing of its connection: there is one for every question."""

    def __init__(self, upstream: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        self.status: asyncio.Future[int] = loop.create_future()
        self._upstream = upstream
        self._status = 0

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        del content_type, retry_after
        self._status = status

    def on_body(self, data: bytes) -> None:
        pass

    def on_end(self) -> None:
        self._upstream.close()
        if not self.status.done():
            self.status.set_result(self._status)

    def on_lost(self, reason: str, *, unused: bool) -> None:
        del unused
        if not self.status.done():
            self.status.set_exception(ConnectionError(reason))


class HealthMonitor:
    """Checks the backends of a pool for as long as it runs; settings may change meanwhile."""

    def __init__(
        self,
        pool: BackendPool,
        upstreams: Callable[[Member], UpstreamPool],
        settings: HealthSettings,
        progress: Callable[[Member], float],
    ) -> None:
        self._pool = pool
        self._upstreams = upstreams
        self.settings = settings
        self._progress = progress
        self._failures: dict[str, int] = {}

    async def run(self) -> None:
        """Check all backends every `interval_s`, each on its own."""
        pending: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                settings = self.settings
                if settings.enabled:
                    for name, member in list(self._pool.members.items()):
                        # A node says by itself whether it is well.
                        if member.node:
                            continue
                        task = pending.get(name)
                        # A check that takes longer than the interval is not begun a second time.
                        if task is None or task.done():
                            pending[name] = asyncio.ensure_future(self._check(member))
                for name in [n for n in pending if n not in self._pool.members]:
                    pending.pop(name).cancel()
                    self._failures.pop(name, None)
                await asyncio.sleep(settings.interval_s)
        finally:
            for task in pending.values():
                task.cancel()
            await asyncio.gather(*pending.values(), return_exceptions=True)

    async def _check(self, member: Member) -> None:
        settings = self.settings
        name = member.backend.id
        is_late = False
        try:
            path = find_engine(member.backend.kind).health_path or settings.path
            status = await self._ask(member, GET, path, b"", settings.timeout_s)
            fine, reason = status < 500, f"{path} answered with status {status}"
            # Before a backend that was down is trusted again it has to make a token.
            if fine and not member.well:
                fine, reason = await self._try_token(member)
        except TimeoutError:
            fine, reason, is_late = False, f"no answer in {settings.timeout_s:g} s", True
        except OSError as error:
            fine, reason = False, str(error) or type(error).__name__
        # It was taken out while it was asked.
        if member.removed:
            return
        if fine:
            self._failures[name] = 0
            if not member.well or member.slow:
                self._pool.set_health(name, up=True)
            return
        # One failure may be chance: it takes several in a row.
        self._failures[name] = self._failures.get(name, 0) + 1
        if member.well and self._failures[name] >= settings.failures:
            if is_late and self._works(member):
                self._pool.set_slow(name, reason)
            else:
                self._pool.set_health(name, up=False, reason=reason)

    def _works(self, member: Member) -> bool:
        """Whether a backend that does not say how it is works all the same, or has nobody beside it."""
        settings = self.settings
        lately_s = settings.failures * (settings.interval_s + settings.timeout_s)
        now_s = asyncio.get_running_loop().time()
        return now_s - self._progress(member) < lately_s or self._pool.is_only(member)

    async def _try_token(self, member: Member) -> tuple[bool, str]:
        """Return whether a backend makes a token: some are well only until they are used."""
        model = member.backend.models[0]
        alone = find_engine(member.backend.kind).apart_proof if member.phase else {}
        body = msgspec.json.encode({"model": model, "prompt": "Hi", "max_tokens": 1, **alone})
        status = await self._ask(member, JSON, "/v1/completions", body, _TOKEN_TIMEOUT_S)
        # A model that completes nothing (embeddings) says so with a 4xx, which is an answer too.
        return status < 500, f"a request for one token was answered with status {status}"

    async def _ask(
        self, member: Member, ask: RequestTemplate, path: str, body: bytes, timeout_s: float
    ) -> int:
        async with asyncio.timeout(timeout_s):
            # A new connection: a kept one says nothing about who listens now.
            upstream = await self._upstreams(member).connect()
            reply = _Reply(upstream, asyncio.get_running_loop())
            try:
                upstream.ask(reply, path.encode(), body, b"", ask)
                return await reply.status
            finally:
                # Cancelled or late: nobody else closes the connection then.
                if not reply.status.done() or reply.status.cancelled():
                    upstream.close()
