"""Who agrees to a change: `next.json` of a fleet says what comes next, `approval.json` what was answered.

A controller writes `next.json` when it has a change, and removes it when everything stays. It is asked for at
the controller's terminal or, with `--ask page`, by whoever opens a page: then it waits until `approval.json`
names this very change. An answer counts once. A change that has become another one has another id, and so has
the same change when it comes again; answers to earlier ones count for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from atoll.control.operation.fleet_change import ChangeLine, FleetChange, describe_dip
from atoll.core.errors import AtollError, InputError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen

ChangeState = Literal["waiting", "asked", "applying", "refused"]
"""For approval on a page; at the controller's terminal; being done; refused until it is another one."""
Ask = Callable[[FleetChange], bool]
"""Shows a change to somebody and returns whether it may be done."""
Steps = tuple[tuple[str, str], ...]


class ChangeRow(Frozen):
    """An instance that comes or goes (`ChangeLine`)."""

    instance: str
    target: str
    layout: str
    usd_per_hour: float
    reason: str

    @classmethod
    def of(cls, line: ChangeLine) -> ChangeRow:
        """Return a line of a change as it is written down."""
        return cls(
            instance=line.instance,
            target=line.target,
            layout=line.layout,
            usd_per_hour=line.usd_per_hour,
            reason=line.reason,
        )


class ComingChange(Frozen):
    """The change that comes next, as pages have it (`FleetChange`).

    `on_page` says that it is answered on a page, not at the controller's terminal.
    """

    id: str
    at_s: float
    state: ChangeState
    on_page: bool
    stays: tuple[str, ...]
    starts: tuple[ChangeRow, ...]
    goes: tuple[ChangeRow, ...]
    stops: tuple[ChangeRow, ...]
    usd_before: float
    usd_after: float
    dips: tuple[str, ...]
    reasons: tuple[str, ...]
    waits: tuple[str, ...]


class NextChange(ComingChange):
    """The same as `next.json` has it; `holder` is whose it is."""

    holder: str


class ChangeAnswer(Frozen):
    """Somebody's answer to the change of this id."""

    id: str
    approve: bool
    at_s: float


class ChangeBoard:
    """The files through which a controller and pages speak of the next change."""

    def __init__(self, folder: Path) -> None:
        self._next = folder / "next.json"
        self._answer = folder / "approval.json"
        self._taken = folder / "approval.taken"

    def read(self) -> NextChange | None:
        """Return the change that comes next, None where everything stays."""
        try:
            text = read_text_limited(self._next)
        except InputError:
            return None
        return NextChange.from_json(text, path=self._next)

    def write(self, change: NextChange | None) -> None:
        """Say what comes next."""
        if change is None:
            self._next.unlink(missing_ok=True)
        else:
            atomic_write(self._next, change.to_json(indent=2) + "\n")

    def answer(self, name: str, *, approve: bool, now_s: float) -> None:
        """ChangeAnswer to the change of this id; the latest answer counts."""
        given = ChangeAnswer(id=name, approve=approve, at_s=now_s)
        atomic_write(self._answer, given.to_json() + "\n")

    def has_answer(self) -> bool:
        """Whether there is an answer, to whatever."""
        return self._answer.exists()

    def take_answer(self, name: str) -> bool | None:
        """Return what was answered to the change of this id, once; answers to others are removed."""
        try:
            # Moved first, so that one that comes meanwhile is not lost.
            os.replace(self._answer, self._taken)
        except FileNotFoundError:
            return None
        try:
            given = ChangeAnswer.from_json(read_text_limited(self._taken), path=self._taken)
        except InputError:
            return None
        finally:
            self._taken.unlink(missing_ok=True)
        return given.approve if given.id == name else None


class ApprovalGate:
    """Lets through what was agreed to; `ask` asks at the terminal, None waits for an answer on a page.

    What was agreed to before is done without asking again, and what has failed is cleaned up without asking.
    What was refused is not asked again until it is something else, but can still be approved on a page.
    """

    def __init__(
        self, board: ChangeBoard, holder: str, clock: Callable[[], float], ask: Ask | None
    ) -> None:
        self._board, self._holder, self._clock, self._ask = board, holder, clock, ask
        self._approved: set[tuple[str, str]] = set()
        self._refused: Steps | None = None
        # Of this controller alone: answers to another one's changes are none to this one's.
        self._salt = secrets.token_hex(8)
        self._applied = 0
        self._shown: NextChange | None = None
        self.on_refused: Callable[[], None] = lambda: None
        """Told when a change was refused."""

    @property
    def shown(self) -> str | None:
        """The id of the change that was shown last, None where everything stays."""
        return None if self._shown is None else self._shown.id

    @property
    def is_waiting(self) -> bool:
        """Whether an answer on a page is waited for."""
        return self._ask is None and self._shown is not None and self._shown.state != "applying"

    def admit(self, change: FleetChange) -> bool:
        """Return whether a change may be done now, asking if nobody has agreed to it yet."""
        if change.is_empty:
            self.clear()
            return True
        wanted = _list_steps(change)
        if not wanted - self._approved:
            self._show(change, "applying")
            return True
        agreed = self._ask_page(change) if self._ask is None else self._ask_here(change, self._ask)
        if agreed:
            self._approved |= wanted
            self._refused = None
            self._show(change, "applying")
            # The same again is another change.
            self._applied += 1
        return agreed

    def clear(self) -> None:
        """Say that everything stays; only who may act says so."""
        self._shown = None
        with contextlib.suppress(OSError):
            self._board.write(None)

    def leave(self) -> None:
        """Take back what was shown: nobody is there any more to do it."""
        if self._shown is not None:
            self.clear()

    def has_answer(self) -> bool:
        """Whether somebody has answered on a page since the change was shown."""
        return self.is_waiting and self._board.has_answer()

    def _ask_here(self, change: FleetChange, ask: Ask) -> bool:
        steps = _describe_steps(change)
        if steps == self._refused:
            return False
        self._show(change, "asked")
        if ask(change):
            return True
        self._refuse(change, steps)
        return False

    def _ask_page(self, change: FleetChange) -> bool:
        steps = _describe_steps(change)
        self._show(change, "refused" if steps == self._refused else "waiting")
        answer = self._board.take_answer(self._name(change))
        if answer is False and steps != self._refused:
            self._refuse(change, steps)
        return bool(answer)

    def _refuse(self, change: FleetChange, steps: Steps) -> None:
        self._refused = steps
        self._show(change, "refused")
        self.on_refused()

    def _name(self, change: FleetChange) -> str:
        """The id of a change: what starts where at which price, and what goes."""
        text = repr((self._salt, self._applied, _describe_steps(change)))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _show(self, change: FleetChange, state: ChangeState) -> None:
        """Write down what comes next, where that is not what stands there."""
        shown = self._shown
        going_on = shown is not None and shown.state == state == "applying"
        name = shown.id if going_on and shown is not None else self._name(change)
        at_s = shown.at_s if shown is not None and shown.id == name else self._clock()
        found = NextChange(
            id=name,
            at_s=at_s,
            state=state,
            on_page=self._ask is None,
            holder=self._holder,
            stays=change.stays,
            starts=tuple(map(ChangeRow.of, change.starts)),
            goes=tuple(map(ChangeRow.of, change.goes)),
            stops=tuple(map(ChangeRow.of, change.stops)),
            usd_before=change.usd_before,
            usd_after=change.usd_after,
            dips=tuple(describe_dip(dip) for dip in change.dips),
            reasons=change.reasons,
            waits=change.waits,
        )
        if found != shown:
            self._shown = found
            try:
                self._board.write(found)
            except (AtollError, OSError):
                # Whoever is asked at a terminal can still answer; a page sees nothing to answer to.
                self._shown = None


def _list_steps(change: FleetChange) -> set[tuple[str, str]]:
    """Return the steps that somebody must agree to; failed instances are cleaned up without asking."""
    starts = {("start", row.instance) for row in change.starts}
    return starts | {("go", row.instance) for row in change.goes}


def _describe_steps(change: FleetChange) -> Steps:
    """The same without names, which are new for every plan: what was refused is not asked again."""
    rows = [
        ("start", f"{row.target} {row.layout} at {row.usd_per_hour:.2f}") for row in change.starts
    ]
    return tuple(sorted([*rows, *(("go", row.instance) for row in change.goes)]))
