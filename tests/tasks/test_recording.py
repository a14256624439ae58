"""Placeholders: what may be done with them, what looks at them, and what a round knows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from atoll.core.errors import InputError, UsageError
from atoll.tasks.pending import Pending, PendingStream, is_pending
from atoll.tasks.recording import MAX_ENTRIES, Recording
from atoll.tasks.task import Task, UnitTask, choose, settled
from atoll.tasks.values import Handle
from tests.reference.direct_tasks import run_directly


class Lambda(Task[Any, Any]):
    """A task made of a function of its unit."""

    def __init__(self, code: Callable[[UnitTask], Any]) -> None:
        self.code = code
        self.unit = UnitTask("unit")
        super().__init__()

    def invoke(self, request: Any) -> Any:
        return self.code(self.unit)


def looks(code: Callable[[Any], Any], value: Any) -> Any:
    """Run code on a pending value: it must end the round, and get on once the value is known."""
    recording = Recording(Lambda(lambda unit: [code(unit(x=1))]), None)
    assert not recording.replay()
    assert recording.wanted == (0,)
    recording.settle(0, value)
    assert recording.replay()
    assert recording.rounds == 2
    return recording.answer[0]


@pytest.mark.parametrize(
    ("code", "value", "found"),
    [
        (bool, [], False),
        (len, "abc", 3),
        (str, 5, "5"),
        (repr, "a", "'a'"),
        (int, 2.5, 2),
        (float, 2, 2.0),
        (hash, 7, 7),
        (lambda p: f"{p:>4}", 7, "   7"),
        (lambda p: p == 3, 3, True),
        (lambda p: p != 3, 3, False),
        (lambda p: p < 3, 3, False),
        (lambda p: p > 2, 3, True),
        (lambda p: "a" in p, "abc", True),
        (list, "ab", ["a", "b"]),
        (sorted, [2, 1], [1, 2]),
        (lambda p: p + 1, 1, 2),
        (lambda p: 1 - p, 3, -2),
        (lambda p: "%s!" % p, "a", "a!"),  # noqa: UP031
        (lambda p: -p, 3, -3),
        (lambda p: [10, 20][p], 1, 20),
        (lambda p: p[1:], "abc", "bc"),
        (lambda p: p.upper(), "abc", "ABC"),
        (lambda p: isinstance(p, str), "abc", True),
        (lambda p: isinstance(p, dict), "abc", False),
        (lambda p: {**p}, {"a": 1}, {"a": 1}),
        (lambda p: p["a"]["b"] == 2, {"a": {"b": 2}}, True),
        (lambda p: round(p, 1), 1.26, 1.3),
        (lambda p: p["n"] or "none", {"n": 0}, "none"),
    ],
)
def test_looking_ends_the_round(code: Any, value: Any, found: Any) -> None:
    assert looks(code, value) == found


def test_a_match_statement_looks() -> None:
    def code(pending: Any) -> str:
        match pending:
            case "a":
                return "is a"
            case _:
                return "is not"

    assert looks(code, "a") == "is a"


@dataclass
class Holder:
    inside: Any


def test_passing_on_does_not_look() -> None:
    def code(unit: UnitTask) -> Any:
        first = unit(x=1)
        copied = copy.deepcopy({"a": [first["text"]]})
        holder = Holder(first)
        second = unit(
            inside=replace(holder).inside,
            list=[first, (first["a"][0],)],
            copied=copied,
            holder=holder,
        )
        return {"second": second, "first": first["text"]}

    recording = Recording(Lambda(code), None)
    assert recording.replay()
    assert recording.rounds == 1
    assert [entry.needs for entry in recording.entries] == [(), (0,)]
    assert recording.ready == recording.entries[:1]
    recording.ready = []
    recording.settle(0, {"text": "t", "a": [5]})
    (second,) = recording.ready
    whole = {"text": "t", "a": [5]}
    assert recording.inputs_of(second) == {
        "inside": whole,
        "list": [whole, [5]],
        "copied": {"a": ["t"]},
        "holder": {"inside": whole},
    }


def test_later_changes_of_lists_do_not_reach_what_was_recorded() -> None:
    def code(unit: UnitTask) -> Any:
        messages = ["a"]
        first = unit(messages=messages)
        messages.append("b")
        second = unit(messages=messages)
        return str(first) + str(second)

    recording = Recording(Lambda(code), None)
    recording.replay()
    assert [entry.inputs["messages"] for entry in recording.entries] == [["a"], ["a", "b"]]
    recording.settle(0, "x")
    recording.settle(1, "y")
    assert recording.replay()  # the lists are made anew, and equal
    assert recording.answer == "xy"


def test_what_the_code_does_to_a_result_lasts_a_round() -> None:
    def code(unit: UnitTask) -> Any:
        first, second = unit(x=1), unit(x=2)
        first.append(9)
        return [list(first), str(second)]

    recording = Recording(Lambda(code), None)
    value = [1]
    recording.replay()
    recording.settle(0, value)
    recording.replay()
    recording.settle(1, "b")
    assert recording.replay()
    assert recording.answer == [[1, 9], "b"]
    assert value == [1]


def test_settled_takes_one_round_for_all() -> None:
    def code(unit: UnitTask) -> Any:
        return sum(settled([unit(x=i)["n"] for i in range(50)]))

    recording = Recording(Lambda(code), None)
    assert not recording.replay()
    for number in range(50):
        assert len(recording.awaited) == 50 - number
        recording.settle(number, {"n": number})
    assert not recording.awaited
    assert recording.replay()
    assert recording.answer == sum(range(50))
    assert recording.rounds == 2


def test_failures_reach_everything_that_needs_them() -> None:
    def code(unit: UnitTask) -> Any:
        first = unit(x=1)
        return [unit(x=first), unit(x=2), unit(x=[unit(x=first)])]

    recording = Recording(Lambda(code), None)
    recording.replay()
    error = ValueError("no")
    recording.fail(0, error)
    assert [entry.error for entry in recording.entries] == [error, error, None, error, error]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1}, "unit.x: a set cannot be handed to a component"),
        (object(), "unit.x: a object cannot"),
        ({1: "a"}, "unit.x: keys must be texts, not int"),
        ([lambda: 1], "unit.x: a function cannot"),
    ],
)
def test_what_no_component_takes_is_refused(value: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Recording(Lambda(lambda unit: unit(x=value)), None).replay()


def test_endless_nesting_and_endless_code_are_stopped() -> None:
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(InputError, match="nested deeper"):
        Recording(Lambda(lambda unit: unit(x=deep)), None).replay()

    def endless(unit: UnitTask) -> Any:
        while True:
            unit(x=1)

    recording = Recording(Lambda(endless), None)
    with pytest.raises(UsageError, match=str(MAX_ENTRIES)):
        recording.replay()


def test_handles_are_values() -> None:
    handle = Handle("0" * 32, "o", "h:1", "h", "", "uint8", (2, 2, 3), 0)
    recording = Recording(Lambda(lambda unit: [unit(x=handle), str(unit(x=[handle]))]), None)
    recording.replay()
    recording.settle(1, "a")
    assert recording.replay()
    assert recording.entries[1].inputs == {"x": [handle]}


def test_units_are_for_tasks() -> None:
    with pytest.raises(UsageError, match="inside the invoke"):
        UnitTask("unit")(x=1)
    with pytest.raises(UsageError, match="inside the invoke"):
        choose(2)
    with pytest.raises(InputError, match="cannot stream itself"):
        UnitTask("unit", streams=True, cut=lambda: None)  # type: ignore[arg-type, return-value]


def test_placeholders_outside_of_a_round_can_be_shown_but_not_used() -> None:
    recording = Recording(Lambda(lambda unit: unit(x=1)["a"][0]), None)
    recording.replay()
    pending = recording.answer
    assert is_pending(pending)
    assert isinstance(pending, Pending)
    assert repr(pending) == "<pending #0['a'][0]>"
    with pytest.raises(UsageError, match="#0 is not there yet"):
        str(pending)
    assert not isinstance(pending, PendingStream)


@pytest.mark.parametrize(
    ("n", "weights", "said"),
    [
        (0, None, "one of 0"),
        (2, [1], "1 weights for 2"),
        (2, [0, 0], "not all of them 0"),
        (2, [1, -1], "from 0"),
        (1, [float("nan")], "from 0"),
    ],
)
def test_choices_that_are_none_are_refused(n: int, weights: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Recording(Lambda(lambda unit: choose(n, weights)), None).replay()


def test_choices_follow_their_weights_and_the_seed() -> None:
    def drawn(seed: int) -> list[int]:
        recording = Recording(
            Lambda(lambda unit: [choose(3, [1, 0, 3]) for _ in range(20)]), None, seed
        )
        recording.replay()
        return list(recording.answer)

    assert drawn(1) == drawn(1)
    assert len(set(drawn(1))) == 2  # each choice is drawn anew
    assert drawn(1) != drawn(2)
    many = [one for seed in range(100) for one in drawn(seed)]
    assert many.count(1) == 0
    assert 0.7 < many.count(2) / len(many) < 0.8


def test_choices_after_a_look_are_those_of_the_plain_code() -> None:
    def code(unit: UnitTask) -> Any:
        first = choose(1000)
        text = str(unit(x=1))
        return [first, text, choose(1000), choose(1000)]

    recording = Recording(Lambda(code), None, 5)
    recording.replay()
    recording.settle(1, "a")  # 0 is the choice
    assert recording.replay()
    assert recording.answer == run_directly(Lambda(code), None, lambda _: "a", seed=5)
