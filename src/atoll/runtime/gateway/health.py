"""Watching backends: a cheap question often, and a real token before a dead one is trusted again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from atoll.core.patience import Patience
from atoll.engines.table import find_engine
from atoll.runtime.gateway.backend_question import ask_backend
from atoll.runtime.gateway.settings import HealthSettings
from atoll.runtime.http.upstream import JSON, UpstreamPool
from atoll.runtime.pool.member import Member
from atoll.runtime.pool.model_facts import read_facts
from atoll.runtime.pool.pool import BackendPool

# For one token of a backend that was down: far more than the cheap question may take.
_TOKEN_TIMEOUT_S = 60.0
_LIST_BYTES = 2**20
"""Of a list of models."""


class HealthMonitor:
    """Checks the backends of a pool for as long as it runs; settings may change meanwhile."""

    def __init__(
        self,
        pool: BackendPool,
        upstreams: Callable[[Member], UpstreamPool],
        settings: HealthSettings,
        progress: Callable[[Member], float],
        patience: Patience,
    ) -> None:
        self._pool = pool
        self._upstreams = upstreams
        self.settings = settings
        self._progress = progress
        self._patience = patience
        self._failures: dict[str, int] = {}

    async def run(self) -> None:
        """Check all backends every `interval_s`, each on its own."""
        pending: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                settings = self.settings
                if settings.enabled:
                    for name, member in list(self._pool.members.items()):
                        # A node says by itself whether it is well, but not all that its engine says.
                        if member.node and member.listed is not None:
                            continue
                        task = pending.get(name)
                        # A check that takes longer than the interval is not begun a second time.
                        if task is None or task.done():
                            check = self._list if member.node else self._check
                            pending[name] = asyncio.ensure_future(check(member))
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
        now = asyncio.get_running_loop().time
        # Where this process waits for a core, answers wait for it.
        late_s = self._patience.here_s(now())
        timeout_s = settings.timeout_s + self._patience.extra_s(name, now())
        try:
            path = find_engine(member.backend.kind).health_path or settings.path
            upstreams = self._upstreams(member)
            status, _ = await ask_backend(upstreams, path, timeout_s=timeout_s)
            fine, reason = status < 500, f"{path} answered with status {status}"
            # Before a backend that was down is trusted again it has to make a token.
            if fine and not member.well:
                fine, reason = await self._try_token(member)
                # It may be another engine than before.
                member.listed = None
            if fine and member.listed is None:
                await self._list(member)
        except TimeoutError:
            if self._patience.here_s(now()) > late_s:
                # It stood still itself meanwhile: that says nothing of the backend.
                return
            fine, reason, is_late = False, f"no answer in {timeout_s:g} s", True
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
        status, _ = await ask_backend(
            self._upstreams(member),
            "/v1/completions",
            timeout_s=_TOKEN_TIMEOUT_S,
            ask=JSON,
            body=body,
        )
        # A model that completes nothing (embeddings) says so with a 4xx, which is an answer too.
        return status < 500, f"a request for one token was answered with status {status}"

    async def _list(self, member: Member) -> None:
        """Ask a backend what it says of its models, for those who ask the gateway; late ones again later."""
        try:
            status, body = await ask_backend(
                self._upstreams(member),
                "/v1/models",
                timeout_s=self.settings.timeout_s,
                max_bytes=_LIST_BYTES,
            )
        except OSError:
            return
        member.listed = read_facts(body) if status == 200 else {}
