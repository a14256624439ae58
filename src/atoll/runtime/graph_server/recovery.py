"""Recovery of a failed invocation: try elsewhere, wait, make an input again, or give up.

Nothing here does I/O. One `Recovery` goes with one invocation; the dispatcher asks it whom to try and tells
it what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from atoll.runtime.openai import ApiError
from atoll.tasks.values import Value

_MAX_FAILURES = 2
"""A component that breaks this often, on different executors where there are any, is given up."""
_MAX_LOSSES = 5
"""Executors that may be lost over one invocation without progress; one that kills them must not kill all."""
_MAX_REMAKES = 8
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
    """The attempts at one invocation. Times are seconds of any clock that does not go back.

    candidates: executors that run the component, the dead among them; they may change between attempts.
    comes_back: whether to wait for one where there is none.
    """

    def __init__(
        self,
        component: str,
        candidates: Sequence[str],
        patience_s: float,
        *,
        comes_back: bool = False,
    ) -> None:
        self.component = component
        self.attempts = 0
        self.candidates = tuple(candidates)
        self._comes_back = comes_back
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
        """Return whom to try now. `pick` names one that is not among the closed ones it is given."""
        if not (self.candidates or self._comes_back):
            return GiveUp(_no_executor(self.component))
        # Only time spent waiting counts against the patience, not that of attempts.
        if self._paused_s is not None:
            self._waited_s += now_s - self._paused_s
            self._paused_s = None
        closed = {*dead, *self._avoided}
        if not set(self.candidates) <= closed:
            executor = pick(closed)
            if executor is not None and executor not in closed:
                self.attempts += 1
                return Try(executor)
        left_s = self._patience_s - self._waited_s
        if left_s <= 0.0:
            return GiveUp(self._exhausted())
        # Those that were full or had failed may be asked again after a while; nobody else is there.
        self._avoided.clear()
        # The exponent is bounded: powers of 2 would overflow at last.
        wait_s = min(_FIRST_WAIT_S * 2.0 ** min(self._waits, 16), _LONGEST_WAIT_S, left_s)
        self._waits += 1
        self._paused_s = now_s
        return Pause(wait_s)

    def failed(self, executor: str, trouble: TroubleError) -> GiveUp | Remake | None:
        """Take note of a failure; returns what it means, None to `choose` again."""
        self._last = f"{executor}: {trouble.message}"
        # What is wrong with an input is wrong on every executor.
        if trouble.code == "bad_input":
            return GiveUp(ApiError(400, trouble.message, param=trouble.param))
        if trouble.code == "deadline":
            return GiveUp(out_of_time(trouble.message))
        if trouble.code == "lost_handle" and trouble.handle:
            self._remakes += 1
            if self._remakes > _MAX_REMAKES:
                return GiveUp(_server_error(f"inputs of {self.component} are lost again and again"))
            return Remake(trouble.handle)
        # The executor is gone, maybe because of this very invocation: only so many may be lost over it.
        if trouble.code == "lost":
            self._losses += 1
            self._avoided.add(executor)
            if self._losses >= _MAX_LOSSES:
                return GiveUp(
                    _server_error(f"{self._losses} executors of {self.component} were lost")
                )
            return None
        # Full, or about to end: nobody's fault, so it counts as no failure.
        if trouble.code in ("overloaded", "draining"):
            self._avoided.add(executor)
            return None
        self._failures += 1
        self._avoided.add(executor)
        if self._failures >= _MAX_FAILURES:
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


class StreamProgress:
    """Part of one stream that was given."""

    def __init__(self, inputs: dict[str, Value]) -> None:
        self._inputs = inputs
        self._tokens: list[Value] = []
        self._text = ""
        resume = inputs.get("resume")
        if isinstance(resume, dict):
            # The client's own: what it has is the beginning of what comes.
            tokens, text = resume.get("token_ids"), resume.get("text")
            self._tokens = list(tokens) if isinstance(tokens, list) else []
            self._text = text if isinstance(text, str) else ""
        self._resumable = True
        self.given = 0
        """Pieces given so far."""
        self._skip = 0

    def begin(self) -> dict[str, Value]:
        """Return the inputs with which to begin, or to go on after a loss."""
        self._skip = 0
        if self.given == 0:
            return self._inputs
        if self._resumable:
            resume: dict[str, Value] = {"token_ids": list(self._tokens), "text": self._text}
            return {**self._inputs, "resume": resume}
        # Pieces without tokens cannot be gone on from: the stream begins anew, and what is known is left out.
        self._skip = self.given
        return self._inputs

    def is_news(self, piece: Value) -> bool:
        """Take a piece; returns whether it was not given before."""
        if self._skip > 0:
            self._skip -= 1
            return False
        self.given += 1
        tokens = piece.get("token_ids") if isinstance(piece, dict) else None
        text = piece.get("text") if isinstance(piece, dict) else None
        if isinstance(tokens, list) and isinstance(text, str):
            self._tokens += tokens
            self._text += text
        else:
            self._resumable = False
        return True
