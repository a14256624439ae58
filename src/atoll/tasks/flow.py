"""The components of a task and what flows between them, found by following its code down all its ways."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from atoll.core.errors import AtollError
from atoll.tasks.sketch import MAX_FORKS, MAX_WAYS, LostWayError, Sketch, origins_of
from atoll.tasks.task import Task, unit_tasks
from atoll.tasks.task_asker import CURRENT, UnitLike


@dataclass(slots=True)
class FlowStep:
    """A place in the code where a component is invoked.

    unit: the attribute of the task that was called. repeats: it is invoked several times on some way. always:
    it is on every way. streams: it answers in pieces. takes: the steps whose values it is given; cuts: whose
    pieces, one by one. after: the steps that the code looked at before.
    """

    number: int
    component: str
    unit: str
    streams: bool = False
    repeats: bool = False
    always: bool = True
    takes: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


@dataclass(slots=True)
class TaskFlow:
    """Possible invocations of a task.

    ways: how many ways through its code were followed. answer: the steps that each part of it comes of.
    notes: what could not be followed.
    """

    task: str
    request: str
    reply: str
    ways: int
    steps: list[FlowStep]
    answer: dict[str, list[int]]
    notes: list[str]


class _Explorer:
    """Runs the code of a task on sketches, once for every way through it."""

    def __init__(self, task: Task[Any, Any]) -> None:
        self.task = task
        self.names = {id(unit): name for name, unit in unit_tasks(task).items()}
        self.steps: dict[tuple[Any, ...], FlowStep] = {}
        self.on_way: dict[int, int] = {}
        self.looked: dict[int, None] = {}
        self._prefix: tuple[int, ...] = ()
        self._taken: list[tuple[int, int]] = []
        self._answers: dict[tuple[Any, ...], int] = {}

    def follow(self, prefix: tuple[int, ...], request: Any) -> tuple[Any, list[tuple[int, int]]]:
        """Follow one way; return the answer, and what was taken of how many at every fork."""
        self._prefix, self._taken, self._answers = prefix, [], {}
        self.on_way, self.looked = {}, {}
        token = CURRENT.set(self)
        try:
            return self.task.invoke(request), self._taken
        finally:
            CURRENT.reset(token)

    @property
    def taken(self) -> list[tuple[int, int]]:
        """Branches taken on the path that was followed last."""
        return self._taken

    def decide(self, question: tuple[Any, ...], answers: int) -> int:
        """Answer a question as this way does."""
        # Asked again, a question has the same answer all along one way.
        known = self._answers.get(question)
        if known is not None:
            return known
        subject, asked = question
        if isinstance(asked, tuple) and asked[0] == "is":
            # What is one thing is not another.
            others = [
                key for key, answer in self._answers.items() if key[0] == subject and not answer
            ]
            if any(isinstance(key[1], tuple) and key[1][0] == "is" for key in others):
                return 1
        if len(self._taken) >= MAX_FORKS:
            raise LostWayError
        at = len(self._taken)
        # Beyond the prefix the first answer is taken; the others become ways of their own.
        answer = self._prefix[at] if at < len(self._prefix) else 0
        self._taken.append((answer, answers))
        self._answers[question] = answer
        return answer

    def note_look(self, origins: frozenset[int]) -> None:
        """Remember what the code has looked at."""
        self.looked.update(dict.fromkeys(sorted(origins)))

    def call(self, unit: UnitLike, inputs: dict[str, Any], cuts: bool) -> Any:
        """Note a step at the place in the code that asks for it."""
        streams = [value for value in inputs.values() if type(value) is Sketch and value._streams]
        cut_streams = streams if cuts else []
        step = self._step(unit, bool(unit.streams or cut_streams))
        cut = origins_of(cut_streams)
        taken = origins_of(list(inputs.values())) - cut
        _add(step.cuts, cut - {step.number})
        _add(step.takes, taken - {step.number})
        _add(step.after, frozenset(self.looked) - taken - cut - {step.number})
        name = f"#{step.number}.{self.on_way[step.number]}"
        return Sketch(self, name, frozenset({step.number}), step.streams)

    def give(self, pieces: tuple[Any, ...]) -> Any:
        """A stream of values is what they came of."""
        return Sketch(self, "stream", origins_of(pieces), True)

    def choose(self, n: int, weights: tuple[float, ...] | None) -> int:  # noqa: ARG002
        """Every outcome is a way."""
        return self.decide(("choose", len(self._taken)), n)

    def look_all(self, values: list[Any]) -> list[Any]:
        """Look at several values."""
        self.note_look(origins_of(values))
        return values

    def _step(self, unit: UnitLike, streams: bool) -> FlowStep:
        place = (id(unit), *_place())
        step = self.steps.get(place)
        if step is None:
            name = self.names.get(id(unit), unit.component)
            step = self.steps[place] = FlowStep(len(self.steps), unit.component, name, streams)
        times = self.on_way[step.number] = self.on_way.get(step.number, 0) + 1
        step.repeats = step.repeats or times > 1
        step.streams = step.streams or streams
        return step


def _place() -> tuple[Any, ...]:
    """Return where the code is that called a unit task: the lines of all calls from `invoke` on."""
    lines: list[Any] = []
    frame = sys._getframe(4)  # below: this function, _step, call, and __call__ of the unit
    while frame.f_code is not _Explorer.follow.__code__:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


def _add(into: list[int], numbers: frozenset[int]) -> None:
    into += [number for number in sorted(numbers) if number not in into]


def find_flow(task: Task[Any, Any]) -> TaskFlow:
    """Return the components of a task and what flows between them.

    The code is run on sketches of a request and of results, never on components.
    """
    explorer = _Explorer(task)
    asked, given = task_types(type(task))
    flow = TaskFlow(type(task).__name__, _type_name(asked), _type_name(given), 0, [], {}, [])
    seen: list[set[int]] = []
    failures: dict[str, int] = {}
    # First in, first out: ways found early are followed before those that branch off from them.
    left: deque[tuple[int, ...]] = deque([()])
    followed = 0
    while left and followed < MAX_WAYS:
        prefix = left.popleft()
        followed += 1
        try:
            answer, _ = explorer.follow(prefix, _request(explorer, asked))
        except LostWayError:
            why = f"it has more than {MAX_FORKS} forks"
            failures[why] = failures.get(why, 0) + 1
        except AtollError:
            pass  # how the code refuses a request
        except Exception as error:  # noqa: BLE001 - sketches are no real values, and code may say so
            why = f"{type(error).__name__}: {error}"[:160]
            failures[why] = failures.get(why, 0) + 1
        else:
            seen.append(set(explorer.on_way))
            _note_answer(flow, answer)
        taken = explorer.taken
        # Only forks behind the prefix: those within it were branched off before.
        for at in range(len(prefix), len(taken)):
            ahead = tuple(answer for answer, _ in taken[:at])
            left.extend((*ahead, other) for other in range(1, taken[at][1]))
    flow.ways = len(seen)
    flow.steps = list(explorer.steps.values())
    for step in flow.steps:
        step.always = all(step.number in way for way in seen)
    _merge_alike(flow)
    _drop_implied(flow)
    flow.notes = [f"{n} ways could not be followed: {why}" for why, n in sorted(failures.items())]
    if left:
        flow.notes.append(f"only {MAX_WAYS} ways were followed")
    return flow


def _merge_alike(flow: TaskFlow) -> None:
    """Make one step of places that call the same unit with values of the same steps."""
    first: dict[tuple[Any, ...], FlowStep] = {}
    instead: dict[int, int] = {}
    for step in flow.steps:
        same = (step.unit, step.component, *map(tuple, (step.takes, step.cuts, step.after)))
        kept = first.setdefault(same, step)
        instead[step.number] = kept.number
        kept.repeats = kept.repeats or step.repeats
        kept.always = kept.always or step.always
    flow.steps = list(first.values())
    numbers = {step.number: at for at, step in enumerate(flow.steps)}

    def renumber(old: list[int]) -> list[int]:
        return list(dict.fromkeys(numbers[instead[number]] for number in old))

    for step in flow.steps:
        step.number = numbers[step.number]
        step.takes, step.cuts, step.after = map(renumber, (step.takes, step.cuts, step.after))
    flow.answer = {name: renumber(of) for name, of in flow.answer.items()}


def _drop_implied(flow: TaskFlow) -> None:
    """Leave out that a step comes after a look where a step that it waits for does too."""
    # From the last to the first, and never around a loop: earlier steps have lower numbers.
    for step in reversed(flow.steps):
        before: set[int] = set()
        left = [n for n in (*step.takes, *step.cuts, *step.after) if n < step.number]
        while left:
            other = flow.steps[left.pop()]
            above = {n for n in (*other.takes, *other.cuts, *other.after) if n < other.number}
            left += above - before
            before |= above
        step.after = [number for number in step.after if number not in before]


def _note_answer(flow: TaskFlow, answer: Any) -> None:
    for name, value in _leaves(answer, ""):
        _add(flow.answer.setdefault(name or "answer", []), origins_of([value]))


def _leaves(answer: Any, name: str) -> list[tuple[str, Any]]:
    """Return the parts of an answer by the names of their fields; sketches are not taken apart."""
    inner: list[tuple[str, Any]] = []
    if type(answer) is Sketch:
        return [(name, answer)]
    if isinstance(answer, dict):
        inner = [(f"{name}.{key}".lstrip("."), item) for key, item in answer.items()]
    elif isinstance(answer, list | tuple):
        inner = [(name, item) for item in answer]
    elif is_dataclass(answer):
        inner = [
            (f"{name}.{each.name}".lstrip("."), getattr(answer, each.name))
            for each in fields(answer)
        ]
    return [leaf for below, item in inner for leaf in _leaves(item, below)] or [(name, answer)]


def task_types(kind: type[Any]) -> tuple[Any, Any]:
    """Return what a task is asked and what it answers, as its class says."""
    for base in kind.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            arguments = get_args(generic)
            if getattr(generic, "__origin__", None) is Task and len(arguments) == 2:
                return arguments[0], arguments[1]
    return Any, Any


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _request(explorer: _Explorer, kind: Any) -> Any:
    plain = {str: "text", int: 1, float: 1.0, bytes: b""}
    if kind in plain:
        return plain[kind]
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(
            **{
                each.name: plain.get(hints[each.name], Sketch(explorer, f"request.{each.name}"))
                for each in fields(kind)
                if each.init
            }
        )
    return Sketch(explorer, "request")
