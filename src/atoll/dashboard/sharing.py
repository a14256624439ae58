"""Answers of the gateway that are the same for everybody of a role, asked for once for all open pages.

Only paths whose answers say nothing of who asks are shared. Whoever shows a key is given what another
one's key has brought only where the gateway has taken his own key a moment ago.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from atoll.dashboard.sessions import LoginSession
from atoll.runtime.http.http_client import HttpResponse

SHARED = frozenset({"machines", "models"})
"""Behind `/atoll/v1/`, without a query: the gateway answers them to all roles alike."""
_LASTS_S = 2.0
_TRUSTED_S = 10.0
"""How long a key counts as good after the gateway took it."""
_Lane = tuple[LoginSession | str, str]


class SharedAnswers:
    """The newest answers by role and path, and those on their way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, str], tuple[float, HttpResponse]] = {}
        self._coming: dict[_Lane, asyncio.Task[HttpResponse]] = {}
        self._trusted: dict[LoginSession, float] = {}

    def forget(self) -> None:
        """Have everything asked for anew: something has changed."""
        self._kept.clear()
        self._coming.clear()
        self._trusted.clear()

    async def get(
        self, path: str, session: LoginSession, ask: Callable[[], Coroutine[Any, Any, HttpResponse]]
    ) -> HttpResponse:
        """Return the answer to a path of `SHARED`, by `ask` where nobody else has it or is about to."""
        is_trusted = self._is_trusted(session)
        at_s, kept = self._kept.get((session.role, path), (0.0, None))
        if is_trusted and kept is not None and self._clock() - at_s < _LASTS_S:
            return kept
        lane: _Lane = (session.role if is_trusted else session, path)
        task = self._coming.get(lane)
        if task is not None:
            answer = await asyncio.shield(task)
            # A refusal is of him who asked.
            return answer if answer.status == 200 else await ask()
        task = self._coming[lane] = asyncio.create_task(ask())
        task.add_done_callback(lambda done: self._land(lane, session, done))
        # One that goes away takes nobody's answer along.
        return await asyncio.shield(task)

    def _is_trusted(self, session: LoginSession) -> bool:
        if session.kind != "key":
            return True
        at_s = self._trusted.get(session)
        return at_s is not None and self._clock() - at_s < _TRUSTED_S

    def _land(self, lane: _Lane, session: LoginSession, task: asyncio.Task[HttpResponse]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if self._coming.get(lane) is not task:
            return  # asked for before something changed
        del self._coming[lane]
        if failed or task.result().status != 200:
            self._trusted.pop(session, None)
            return
        now_s = self._clock()
        self._kept[session.role, lane[1]] = (now_s, task.result())
        if session.kind == "key":
            self._trusted = {s: t for s, t in self._trusted.items() if now_s - t < _TRUSTED_S}
            self._trusted[session] = now_s
