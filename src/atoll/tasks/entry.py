"""One thing that a task asked for, and how two of them differ."""

from __future__ import annotations

from typing import Any, Final

from atoll.core.errors import AtollError
from atoll.tasks.feed import PieceFeed
from atoll.tasks.forms import UNCHANGING, Form, form_of, show_form
from atoll.tasks.pending import Pending, PendingStream
from atoll.tasks.task_asker import UnitLike

UNKNOWN: Final[Any] = object()
"""In place of a value that is not there."""
_SAME_IF_IDENTICAL: Final = UNCHANGING | {Pending, PendingStream}


class TaskEntry:
    """Something a task asked for.

    unit: None for values given as a stream, and for choices. needs: numbers of the entries that must be known
    before it can start. cut_input: the name of the input that is a stream to be cut; "" if none is. feed: its
    pieces, if it is a stream. value: what it gave, once `is_known`. error: why it never will.
    """

    __slots__ = (
        "cut_input",
        "dependents",
        "error",
        "feed",
        "inputs",
        "missing",
        "needs",
        "number",
        "pending",
        "unit",
        "value",
    )

    def __init__(self, number: int, unit: UnitLike | None, inputs: dict[str, Any]) -> None:
        self.number = number
        self.unit = unit
        self.inputs = inputs
        self.needs: tuple[int, ...] = ()
        self.missing = 0
        self.dependents: list[TaskEntry] | None = None
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


def entry_form(unit: UnitLike | None, inputs: dict[str, Any], cut_input: str) -> Form:
    """Return what is compared between rounds: the component, and the inputs in their order of names."""
    head = ("", False) if unit is None else (unit.component, unit.streams)
    return (*head, cut_input, *[(name, form_of(inputs[name])) for name in sorted(inputs)])


def has_same_inputs(before: dict[str, Any], inputs: dict[str, Any]) -> bool:
    """Return whether inputs are those noted before, if that is quickly seen; else False."""
    if len(before) != len(inputs):
        return False
    for name, value in inputs.items():
        old = before.get(name, UNKNOWN)
        kind = type(value)
        if old is value:
            # What can change may have changed since.
            if kind in _SAME_IF_IDENTICAL:
                continue
            return False
        if type(old) is not kind:
            return False
        if kind is str or kind is int:
            if old != value:
                return False
        elif kind is not list or not _has_same_items(old, value):
            return False
    return True


def _has_same_items(before: list[Any], items: list[Any]) -> bool:
    """Return whether the items of a list are those of its snapshot, one by one the same objects."""
    if len(before) != len(items):
        return False
    for old, item in zip(before, items, strict=True):
        if old is not item or type(item) not in _SAME_IF_IDENTICAL:
            return False
    return True


def show_entry(unit: UnitLike | None, inputs: dict[str, Any], only: str | None = None) -> str:
    """Return in words what was asked for; `only` is the one input to show."""
    if unit is None:
        if "n" in inputs:
            return f"choose({inputs['n']}, {inputs['weights']})"
        return f"as_stream{show_form(form_of(inputs['pieces']), 200)}"
    names = sorted(inputs) if only is None else [only]
    max_letters = 60 if only is None else 200
    shown = [f"{name}={show_form(form_of(inputs[name]), max_letters)}" for name in names]
    return f"{unit.component}({', '.join(shown)})"


def difference(entry: TaskEntry, unit: UnitLike | None, inputs: dict[str, Any]) -> tuple[str, str]:
    """Return in words what was noted and what came, only what differs where only inputs do."""
    before = entry.inputs
    only = None
    if (
        entry.unit is not None
        and unit is not None
        and entry.unit.component == unit.component
        and before.keys() == inputs.keys()
    ):
        other = [name for name in sorted(inputs) if form_of(before[name]) != form_of(inputs[name])]
        only = other[0] if other else None
    return show_entry(entry.unit, before, only), show_entry(unit, inputs, only)
