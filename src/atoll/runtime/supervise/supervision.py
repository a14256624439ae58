"""When a process is started, given up, stopped: decisions only, time is a parameter.

    WAITING --start--> STARTING --ready--> READY --stop--> STOPPING --exit--> STOPPED
       ^                   |                 |
       +----- backoff -----+------ exit -----+          FAILED: not started again

A process that is not ready by its deadline, or not well several times in a row, is killed and counts as one
that ended. One that had served is started again at once: it was ready for longer than it had taken to start
(or for `calm_s`), so the time spent on starting it is well spent again. Others are started after a pause that
doubles each time. A process is given up when it ends with a code that says starting again is no use, or never
gets ready several times in a row. One that was ready before has shown that what it was told is right: it gets
more tries, whatever the code.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from atoll.core.frozen import Frozen


class ProcessState(StrEnum):
    """Where a process stands."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Action(StrEnum):
    """Next step with a process."""

    START = "start"
    TERM = "term"
    KILL = "kill"


class RestartLimits(Frozen):
    """How patient to be, in seconds unless it is a number of times.

    ready_s: how long a process that starts may get nowhere. backoff_s: the pause after a process ended that
    had not served; it doubles each time, to backoff_max_s. A process has not served, either, that was ready
    for less than backoff_s. tries: starts in a row without getting ready until it is given up; tries_again:
    the same once it was ready before.
    again: whether what has ended is started again at all. fatal_codes: exit codes after which starting again
    is no use; by default those of errors in what the process was told (see `atoll.core.errors`) and of a
    command that is not there.
    """

    ready_s: float = Field(120.0, gt=0)
    backoff_s: float = Field(0.25, ge=0)
    backoff_max_s: float = Field(30.0, ge=0)
    calm_s: float = Field(60.0, ge=0)
    tries: int = Field(4, ge=1)
    tries_again: int = Field(12, ge=1)
    unwell: int = Field(3, ge=1)
    term_s: float = Field(10.0, ge=0)
    again: bool = True
    fatal_codes: tuple[int, ...] = (2, 3, 4, 6, 126, 127)


class Supervision:
    """State of one process, and what to do about it. Starts as soon as it is asked."""

    def __init__(self, limits: RestartLimits | None = None) -> None:
        self.limits = limits or RestartLimits()
        self.state = ProcessState.WAITING
        self.reason = ""
        self.restarts = 0
        self._start_at_s = float("-inf")
        self._since_s = 0.0
        self._moved_s = 0.0
        """When a process that starts last got anywhere, and later by what it waited for a core since."""
        self._took_s = 0.0
        self._in_a_row = 0
        self._never_ready = 0
        self._unwell = 0
        self._killed = False
        self._proven = False

    @property
    def over(self) -> bool:
        """Whether the process has ended and will not be started again."""
        return self.state in (ProcessState.STOPPED, ProcessState.FAILED)

    @property
    def runs(self) -> bool:
        """Whether there is a process."""
        return self.state in (ProcessState.STARTING, ProcessState.READY, ProcessState.STOPPING)

    @property
    def _served_s(self) -> float:
        """For how long it has to be ready to have served, in seconds."""
        return min(max(self._took_s, self.limits.backoff_s), self.limits.calm_s)

    def tick(self, now_s: float) -> Action | None:
        """Return what is to be done now, if anything."""
        if self.state is ProcessState.WAITING and now_s >= self._start_at_s:
            self._enter(ProcessState.STARTING, now_s)
            return Action.START
        # It was told to die: until it has, there is nothing more to do.
        if self._killed:
            return None
        if self.state is ProcessState.STARTING and now_s - self._moved_s > self.limits.ready_s:
            return self._kill(f"not ready within {self.limits.ready_s:g} s")
        if self.state is ProcessState.STOPPING and now_s - self._since_s > self.limits.term_s:
            return self._kill(f"did not end within {self.limits.term_s:g} s")
        return None

    def advanced(self, now_s: float) -> None:
        """Note that a process that starts has got somewhere: its time begins anew."""
        self._moved_s = now_s

    def delayed(self, seconds: float) -> None:
        """Note for how long a process that starts had no core: that is not its time."""
        self._moved_s += seconds

    def ready(self, now_s: float) -> None:
        """Note that the process can do its work."""
        if self.state is ProcessState.STARTING and not self._killed:
            self._took_s = now_s - self._since_s
            self._enter(ProcessState.READY, now_s)
            self.reason = ""
            self._proven = True
            self._never_ready = 0

    def probed(self, problem: str | None) -> Action | None:
        """Take the result of a look at a ready process; None is well."""
        if self.state is not ProcessState.READY or self._killed:
            return None
        self._unwell = 0 if problem is None else self._unwell + 1
        if problem is not None and self._unwell >= self.limits.unwell:
            return self._kill(problem)
        return None

    def exited(self, code: int, now_s: float) -> None:
        """Note that the process has ended."""
        was, since_s = self.state, self._since_s
        killed, self._killed = self._killed, False
        if not self.runs:
            return
        if was is ProcessState.STOPPING:
            self._enter(ProcessState.STOPPED, now_s)
            return
        # Who killed it has said why already.
        if not killed:
            self.reason = (
                f"ended by signal {code - 128}" if code > 128 else f"ended with code {code}"
            )
        # One that had served is started at once; others wait longer each time.
        served = was is ProcessState.READY and now_s - since_s >= self._served_s
        if was is ProcessState.STARTING:
            self._never_ready += 1
        limits = self.limits
        useless = not limits.again or (not self._proven and code in limits.fatal_codes)
        if useless or self._never_ready >= (limits.tries_again if self._proven else limits.tries):
            self._enter(ProcessState.FAILED, now_s)
            return
        if served:
            self._in_a_row, pause_s = 0, 0.0
        else:
            # The exponent is bounded: a process may fail for years.
            doubled = limits.backoff_s * 2 ** min(self._in_a_row, 30)
            pause_s = min(doubled, limits.backoff_max_s)
            self._in_a_row += 1
        self.restarts += 1
        self._start_at_s = now_s + pause_s
        self._enter(ProcessState.WAITING, now_s)

    def stop(self, now_s: float) -> Action | None:
        """End the process, or do not start it again."""
        if self.over or self.state is ProcessState.STOPPING:
            return None
        if self.state is ProcessState.WAITING:
            self._enter(ProcessState.STOPPED, now_s)
            return None
        self._enter(ProcessState.STOPPING, now_s)
        return Action.TERM

    def _kill(self, reason: str) -> Action:
        self.reason = reason
        self._killed = True
        return Action.KILL

    def _enter(self, state: ProcessState, now_s: float) -> None:
        self.state, self._since_s, self._unwell = state, now_s, 0
        self._moved_s = now_s
