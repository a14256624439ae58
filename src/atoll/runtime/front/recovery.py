"""What to do about an invocation that failed: try elsewhere, wait, make an input again, or give up.

Nothing here does I/O. One `Recovery` goes with one invocation; the dispatcher asks it whom to try and tells
it what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from atoll.runtime.openai import ApiError

_MOST_FAILURES = 2
"""A component that breaks this often, on different executors where there are any, is given up."""
_MOST_LOSSES = 5
"""Executors that may be lost over one invocation without progress; one that kills them must not kill all."""
_MOST_REMAKES = 8
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0


class TroubleError(Exception):
    """An invocation failed at an executor.

    code: as in `runtime.executor.messages.InvocationFailed`, and "lost" where the executor itself is gone.
    """

    def __init__(
        self, code: str, message: str, param: str | None = None, handle: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.handle = handle


@dataclass(frozen=True, slots=True)
class Try:
    """Send it to this executor."""

    executor: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Nobody is there: look again after so many seconds, or when somebody comes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The request ends with this error."""

    error: ApiError


@dataclass(frozen=True, slots=True)
class Remake:
    """An input is gone: run what made it again, then try again."""

    handle: str


class Recovery:
    """The attempts at one invocation. Times are seconds of any clock that does not go back."""

    def __init__(self, component: str, candidates: Sequence[str], patience_s: float) -> None:
        self.component = component
        self.attempts = 0
        self._candidates = tuple(candidates)
        self._patience_s = patience_s
        self._failures = 0
        self._avoided: set[str] = set()
        self._losses = 0
        self._remakes = 0
        self._waits = 0
        self._waited_s = 0.0
        self._paused_s: float | None = None
        self._last = ""

    def choose(
        self,
        dead: Collection[str],
        pick: Callable[[Collection[str]], str | None],
        now_s: float,
    ) -> Try | Pause | GiveUp:
        """Return whom to try now. `pick` deals one that is not among the closed ones it is given."""
        if not self._candidates:
            return GiveUp(_no_executor(self.component))
        if self._paused_s is not None:
            self._waited_s += now_s - self._paused_s
            self._paused_s = None
        closed = {*dead, *self._avoided}
        if not set(self._candidates) <= closed:
            executor = pick(closed)
            if executor is not None and executor not in closed:
                self.attempts += 1
                return Try(executor)
        left_s = self._patience_s - self._waited_s
        if left_s <= 0.0:
            return GiveUp(self._exhausted())
        # Those that were full or had failed may be asked again after a while; nobody else is there.
        self._avoided.clear()
        wait_s = min(_FIRST_WAIT_S * 2.0 ** min(self._waits, 16), _LONGEST_WAIT_S, left_s)
        self._waits += 1
        self._paused_s = now_s
        return Pause(wait_s)

    def failed(self, executor: str, trouble: TroubleError) -> GiveUp | Remake | None:
        """Take note of a failure; returns what it means, None to `choose` again."""
        self._last = f"{executor}: {trouble.message}"
        if trouble.code == "bad_input":
            return GiveUp(ApiError(400, trouble.message, param=trouble.param))
        if trouble.code == "deadline":
            return GiveUp(out_of_time(trouble.message))
        if trouble.code == "lost_handle" and trouble.handle:
            self._remakes += 1
            if self._remakes > _MOST_REMAKES:
                return GiveUp(_server_error(f"inputs of {self.component} are lost again and again"))
            return Remake(trouble.handle)
        if trouble.code == "lost":
            self._losses += 1
            self._avoided.add(executor)
            if self._losses >= _MOST_LOSSES:
                return GiveUp(
                    _server_error(f"{self._losses} executors of {self.component} were lost")
                )
            return None
        if trouble.code in ("overloaded", "draining"):
            self._avoided.add(executor)
            return None
        self._failures += 1
        self._avoided.add(executor)
        if self._failures >= _MOST_FAILURES:
            return GiveUp(_server_error(f"{self.component} failed at {self._last}"))
        return None

    def progressed(self) -> None:
        """Take note that an executor gave something: losses before count no more."""
        self._losses = 0
        self._waits = 0
        self._waited_s = 0.0

    def _exhausted(self) -> ApiError:
        said = f"; last heard of {self._last}" if self._last else ""
        return ApiError(
            503,
            f"no executor of {self.component} came back within {self._patience_s:g} s{said}",
            kind="server_error",
            code="overloaded",
            retry_after_s=1,
        )


def out_of_time(message: str) -> ApiError:
    """Return the error of a request that took longer than it may."""
    return ApiError(504, message, kind="server_error", code="timeout")


def _no_executor(component: str) -> ApiError:
    return ApiError(503, f"no executor runs {component}", kind="server_error", code="no_executor")


def _server_error(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error")
