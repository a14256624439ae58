"""Record of a task's invocations, checked every time its code runs again. Pure: nothing is run here.

The code of a task runs in rounds. Calling a unit task makes an entry and returns a placeholder. Looking at a
placeholder without a value ends the round; when the value is told (`settle`), the code runs again from the
start (`replay`) and must make the same entries, in the same order, with the same inputs, and take the same
look, before it may go on. Entries whose inputs are all known are collected in `ready`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from hashlib import blake2b
from itertools import accumulate
from math import isfinite
from typing import Any, Final, NoReturn

from atoll.core.errors import AtollError, InputError, UsageError
from atoll.tasks.entry import (
    UNKNOWN,
    DivergenceError,
    TaskEntry,
    difference,
    entry_form,
    has_same_inputs,
    show_entry,
)
from atoll.tasks.feed import PieceFeed
from atoll.tasks.forms import (
    UNCHANGING,
    Form,
    check_origin,
    copy_value,
    fill,
    form_of,
    show_form,
    snapshot,
)
from atoll.tasks.pending import Pending, PendingStream, RoundOver, is_pending, open_up, project
from atoll.tasks.task_asker import CURRENT, UnitLike

__all__ = ["MAX_ENTRIES", "DivergenceError", "Recording"]

MAX_ENTRIES: Final = 10_000
"""A request that asks for more is stopped: its code does not end."""


class Recording:
    """The entries of one request, and what is known of them."""

    __slots__ = (
        "_broken",
        "_checking",
        "_choices",
        "_copies",
        "_expected",
        "_over",
        "_position",
        "_request",
        "_task",
        "answer",
        "awaited",
        "entries",
        "ready",
        "rounds",
        "running",
        "seed",
        "wanted",
    )

    def __init__(self, task: Any, request: Any, seed: int = 0) -> None:
        self._task = task
        self._request = request
        self.seed = seed
        self.entries: list[TaskEntry] = []
        self.ready: list[TaskEntry] = []
        """Entries that can start; whoever starts them empties it."""
        self.wanted: tuple[int, ...] = ()
        """Values that the code looked at when the round ended."""
        self.awaited: set[int] = set()
        """Those of them that are not there yet."""
        self.answer: Any = UNKNOWN
        self.rounds = 0
        self.running = False
        self._position = 0
        self._choices = 0
        self._copies: dict[int, Any] = {}
        self._expected: tuple[int, ...] = ()
        self._over = False
        self._checking = False
        self._broken: BaseException | None = None

    # What drives it.

    @property
    def is_answered(self) -> bool:
        """Whether the code came to its end."""
        return self.answer is not UNKNOWN

    def replay(self) -> bool:
        """Run the code from the start as far as it goes; return whether it came to its end.

        Raises what the code raises, and DivergenceError if it does not repeat itself.
        """
        answer = self._play()
        if answer is UNKNOWN:
            return False
        self.answer = answer
        self.wanted = ()
        return True

    def double_check(self) -> None:
        """Run the code once more: DivergenceError unless it does and answers the same again."""
        self._checking = True
        rounds = self.rounds
        try:
            answer = self._play()
        finally:
            self._checking = False
            self.rounds = rounds
        before = _answer_form(self.answer, self)
        now = _answer_form(answer, self)
        if before != now:
            raise DivergenceError(
                len(self.entries),
                f"the answer {show_form(before, 200)}",
                f"the answer {show_form(now, 200)}",
            )

    def settle(self, number: int, value: Any) -> None:
        """Say what an entry gave."""
        entry = self.entries[number]
        entry.value = value
        self.awaited.discard(number)
        if entry.dependents is not None:
            for other in entry.dependents:
                other.missing = missing = other.missing - 1
                if not missing and other.error is None:
                    self.ready.append(other)

    def fail(self, number: int, error: BaseException) -> None:
        """Say that an entry failed: so does everything that needs it."""
        waiting = [self.entries[number]]
        while waiting:
            entry = waiting.pop()
            # What is known stays known: it was told before the failure.
            if entry.error is None and not entry.is_known:
                entry.error = error
                if entry.feed is not None:
                    entry.feed.fail(error)
                waiting += entry.dependents or ()

    def value_of(self, pending: Pending) -> Any:
        """Return what a placeholder stands for; it must be known."""
        return project(self.entries[pending._number].value, pending)

    def inputs_of(self, entry: TaskEntry) -> dict[str, Any]:
        """Return the inputs of an entry that can start, without placeholders but for a stream it cuts."""
        if not entry.needs:
            return entry.inputs
        entries = self.entries
        known: dict[str, Any] = {}
        for name, value in entry.inputs.items():
            kind = type(value)
            if kind is Pending:
                known[name] = project(entries[value._number].value, value)
            elif kind in UNCHANGING or name == entry.cut_input:
                known[name] = value
            else:
                known[name] = fill(value, self.value_of)
        return known

    # What the code of the task asks.

    def call(self, unit: UnitLike, inputs: dict[str, Any], cuts: bool) -> Any:
        """Note an invocation, or check that it is the one noted before; return its placeholder."""
        if self._over:
            raise RoundOver
        position = self._position
        entries = self.entries
        is_new = position == len(entries)
        if not is_new:
            # The quick way of a replay; `_next` compares with more care where this finds a difference.
            entry = entries[position]
            if entry.unit is unit and has_same_inputs(entry.inputs, inputs):
                self._position = position + 1
                return entry.pending
        found: list[Pending] = []
        cut_input = ""
        for name, value in inputs.items():
            kind = type(value)
            if kind in UNCHANGING:
                continue
            if kind is Pending and value._book is self:
                found.append(value)
            elif kind is PendingStream and cuts:
                if cut_input:
                    raise self._break(_two_streams(unit, cut_input, name))
                check_origin(value, self)
                cut_input = name
            else:
                inputs[name] = self._copy_input(unit, name, value, found)
        # Only a new entry of a round that has caught up needs no further check.
        if not is_new or self._expected or self._checking or position >= MAX_ENTRIES:
            known = self._next(unit, inputs, cut_input)
            if known is not None:
                return known.pending
        else:
            self._position = position + 1
        entry = self._add(unit, inputs, found)
        if unit.streams or cut_input:
            entry.cut_input = cut_input
            return self._make_stream(entry)
        pending = entry.pending = Pending(self, position)
        return pending

    def give(self, pieces: tuple[Any, ...]) -> Any:
        """Note a stream of values that the code itself gives; return its placeholder."""
        if self._over:
            raise RoundOver
        found: list[Pending] = []
        try:
            inputs = {"pieces": snapshot(pieces, self, found)}
        except InputError as error:
            raise self._break(error.locate(field="as_stream")) from error
        entry = self._next(None, inputs, "")
        if entry is None:
            entry = self._add(None, inputs, found)
            self._make_stream(entry)
        return entry.pending

    def choose(self, n: int, weights: tuple[float, ...] | None) -> int:
        """Draw one of n, or return what was drawn before."""
        if self._over:
            raise RoundOver
        shares = shares_of(n, weights)
        inputs = {"n": n, "weights": None if weights is None else list(weights)}
        entry = self._next(None, inputs, "")
        number = self._choices
        self._choices += 1
        if entry is None:
            entry = TaskEntry(len(self.entries), None, inputs)
            self.entries.append(entry)
            # Known at once: a choice is drawn here, nothing is run for it.
            entry.value = draw(self.seed, number, shares)
        return int(entry.value)

    def look(self, number: int) -> Any:
        """Return what an entry gave, or end the round. Lists and dictionaries are copies of this round."""
        entry = self.entries[number]
        if not self.running:
            if entry.value is UNKNOWN:
                raise UsageError(f"#{number} is not there yet, and nobody waits for it")
            return entry.value
        if self._over:
            raise RoundOver
        # The look that ended the round before has been repeated: from here on there may be new entries.
        if self._expected == (number,):
            self._expected = ()
        value = entry.value
        if value is UNKNOWN:
            self._stop_at((number,))
        # A copy of this round: code that changes what it looked at must find it unchanged the next time.
        kind = type(value)
        if kind is dict or kind is list:
            copy = self._copies.get(number, UNKNOWN)
            if copy is UNKNOWN:
                copy = self._copies[number] = copy_value(value)
            return copy
        return value

    def look_all(self, values: list[Any]) -> list[Any]:
        """Return what is behind placeholders; if any is not there yet, end the round until all are."""
        numbers = tuple(dict.fromkeys([value._number for value in values if is_pending(value)]))
        if self._over:
            # Each once, in order: the same call must look at the same numbers in every round.
            raise RoundOver
        if numbers and self._expected == numbers:
            self._expected = ()
        if any(self.entries[number].value is UNKNOWN for number in numbers):
            self._stop_at(numbers)
        return [open_up(value) for value in values]

    # How it checks.

    def _play(self) -> Any:
        self.rounds += 1
        self._position = self._choices = 0
        self._copies.clear()
        self._expected = self.wanted
        self._over = False
        token = CURRENT.set(self)
        self.running = True
        try:
            answer = self._task.invoke(self._request)
        except RoundOver:
            answer = UNKNOWN
        except Exception:
            # What broke the recording counts, not what the code made of it.
            if self._broken is not None:
                raise self._broken from None
            raise
        finally:
            self.running = False
            CURRENT.reset(token)
        if self._broken is not None:
            raise self._broken
        if answer is not UNKNOWN:
            if self._over:
                raise UsageError(
                    "invoke caught the end of a round", hint="catch Exception, not BaseException"
                )
            self._must_have_caught_up("returned")
        return answer

    def _next(
        self, unit: UnitLike | None, inputs: dict[str, Any], cut_input: str
    ) -> TaskEntry | None:
        """Return the entry noted at this position before, if any; it must be the same."""
        position = self._position
        if position < len(self.entries):
            entry = self.entries[position]
            before = entry_form(entry.unit, entry.inputs, entry.cut_input)
            if before != entry_form(unit, inputs, cut_input):
                raise self._break(DivergenceError(position, *difference(entry, unit, inputs)))
            self._position = position + 1
            return entry
        if self._expected or self._checking:
            came = show_entry(unit, inputs)
            self._must_have_caught_up(came)
            raise self._break(DivergenceError(position, "nothing more", came))
        if position >= MAX_ENTRIES:
            raise self._break(
                UsageError(f"a request may not ask for more than {MAX_ENTRIES} invocations")
            )
        self._position = position + 1
        return None

    def _must_have_caught_up(self, came: str) -> None:
        position = self._position
        if position < len(self.entries):
            entry = self.entries[position]
            raise self._break(DivergenceError(position, show_entry(entry.unit, entry.inputs), came))
        if self._expected:
            raise self._break(DivergenceError(position, f"look at {_list(self._expected)}", came))

    def _stop_at(self, numbers: tuple[int, ...]) -> NoReturn:
        came = f"looked at {_list(numbers)}"
        self._must_have_caught_up(came)
        if self._checking:
            raise self._break(DivergenceError(self._position, "nothing more", came))
        self.wanted = numbers
        self.awaited = {number for number in numbers if self.entries[number].value is UNKNOWN}
        self._over = True
        raise RoundOver

    def _break(self, error: Exception) -> Exception:
        # Kept, since the code of the task may catch it.
        self._broken = self._broken or error
        return error

    def _copy_input(self, unit: UnitLike, name: str, value: Any, found: list[Pending]) -> Any:
        try:
            return snapshot(value, self, found)
        except InputError as error:
            raise self._break(error.locate(field=f"{unit.component}.{name}")) from error

    def _add(
        self, unit: UnitLike | None, inputs: dict[str, Any], found: list[Pending]
    ) -> TaskEntry:
        entries = self.entries
        entry = TaskEntry(len(entries), unit, inputs)
        entries.append(entry)
        missing = 0
        if found:
            if len(found) == 1:
                entry.needs = (found[0]._number,)
            else:
                entry.needs = tuple(dict.fromkeys([pending._number for pending in found]))
            for number in entry.needs:
                needed = entries[number]
                if needed.value is UNKNOWN:
                    missing += 1
                    # An input has failed already, so this will never start.
                    if needed.error is not None and entry.error is None:
                        entry.error = needed.error
                    if needed.dependents is None:
                        needed.dependents = [entry]
                    else:
                        needed.dependents.append(entry)
            entry.missing = missing
        if not missing:
            self.ready.append(entry)
        return entry

    def _make_stream(self, entry: TaskEntry) -> PendingStream:
        entry.feed = PieceFeed()
        if entry.error is not None:
            entry.feed.fail(entry.error)
        stream = entry.pending = PendingStream(self, entry.number)
        return stream


def _list(numbers: tuple[int, ...]) -> str:
    shown = " ".join(f"#{number}" for number in numbers[:8])
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"


def _two_streams(unit: UnitLike, one: str, other: str) -> UsageError:
    return UsageError(
        f"{unit.component}: {one} and {other} are both streams",
        hint="a task that cuts takes one stream; look at the other, as str()",
    )


def _answer_form(answer: Any, recording: Recording) -> Form:
    try:
        return form_of(snapshot(answer, recording, []))
    except AtollError:  # an answer may hold what no component takes
        return ("object", repr(answer))


def shares_of(n: int, weights: tuple[float, ...] | None) -> list[float]:
    """Return where the shares of n outcomes end, added up; raises InputError for what is no choice."""
    if n < 1:
        raise InputError(f"cannot choose one of {n}", field="n")
    if weights is None:
        return [float(i) for i in range(1, n + 1)]
    if len(weights) != n:
        raise InputError(f"{len(weights)} weights for {n} outcomes", field="weights")
    if not all(isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise InputError("weights are numbers from 0, not all of them 0", field="weights")
    return list(accumulate(map(float, weights)))


def draw(seed: int, number: int, ends: list[float]) -> int:
    """Return the outcome of choice `number` of a request: the same for the same seed, everywhere."""
    digest = blake2b(f"{seed}/{number}".encode(), digest_size=8, person=b"atoll-choose").digest()
    # 53 bits are what a float holds exactly.
    uniform = (int.from_bytes(digest, "big") >> 11) / 2**53
    # The smallest outcome whose share ends after the point: one of weight 0 is never drawn.
    return min(bisect_right(ends, uniform * ends[-1]), bisect_left(ends, ends[-1]))
