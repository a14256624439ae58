"""One thing that a task asked for, and how two of them differ."""

from __future__ import annotations

from typing import Any, Final

from atoll.core.errors import AtollError
from atoll.tasks.asking import UnitLike
from atoll.tasks.feed import PieceFeed
from atoll.tasks.forms import Form, show_form

UNKNOWN: Final[Any] = object()
"""In place of a value that is not there."""
CHOICE: Final = "choose()"
GIVEN: Final = "as_stream()"
"""How the forms of entries begin that are no invocations."""


class TaskEntry:
    """Something a task asked for.

    unit: None for values given as a stream, and for choices. needs: numbers of the entries that must be known
    before it can start. source: the number of the stream it cuts, in its input `cut_input`; -1 if none. feed:
    its pieces, if it is a stream. value: what it gave, once `is_known`. error: why it never will.
    """

    __slots__ = (
        "cut_input",
        "dependents",
        "error",
        "feed",
        "form",
        "inputs",
        "missing",
        "needs",
        "number",
        "pending",
        "source",
        "unit",
        "value",
    )

    def __init__(self, number: int, unit: UnitLike | None, form: Form) -> None:
        self.number = number
        self.unit = unit
        self.form = form
        self.inputs: dict[str, Any] = {}
        self.needs: tuple[int, ...] = ()
        self.missing = 0
        self.dependents: list[TaskEntry] | None = None
        self.source = -1
        self.cut_input = ""
        self.feed: PieceFeed | None = None
        self.pending: Any = None
        self.value: Any = UNKNOWN
        self.error: BaseException | None = None

    @property
    def is_known(self) -> bool:
        """Whether its value is there."""
        return self.value is not UNKNOWN


class DivergenceError(AtollError):
    """A task's code did something else when it ran again. Says where: `position`, `recorded` and `came`."""

    def __init__(self, position: int, recorded: str, came: str) -> None:
        super().__init__(
            f"the task does not repeat itself: at #{position} it first did {recorded}, and then {came}",
            hint="let invoke depend on its request, results and choose() only, and change nothing",
        )
        self.position = position
        self.recorded = recorded
        self.came = came


def show_entry(form: Form) -> str:
    """Return in words what was asked for."""
    assert isinstance(form, tuple)
    head = form[0]
    if head in (CHOICE, GIVEN):
        return f"{head} {', '.join(show_form(part) for part in form[1:])}"
    inputs = zip(form[2::2], form[3::2], strict=True)
    return f"{head}({', '.join(f'{name}={show_form(value)}' for name, value in inputs)})"


def difference(before: Form, now: Form) -> tuple[str, str]:
    """Return both entries in words, only what differs where only inputs do."""
    assert isinstance(before, tuple)
    assert isinstance(now, tuple)
    if before[:2] == now[:2] and before[2::2] == now[2::2] and before[0] != CHOICE:
        names = [i for i in range(3, len(before), 2) if before[i] != now[i]]
        if names:
            at = names[0]
            return tuple(  # type: ignore[return-value]
                f"{form[0]}({form[at - 1]}={show_form(form[at], 200)})" for form in (before, now)
            )
    return show_entry(before), show_entry(now)
