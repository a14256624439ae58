"""Code that does not repeat itself is found, and it is said where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UsageError
from atoll.tasks.recording import DivergenceError
from atoll.tasks.run import Run
from atoll.tasks.task import Task, UnitTask, as_stream, choose
from tests.tasks.graphs import VirtualTime


class Code(Task[Any, Any]):
    """A task whose code is a function of how often it ran before."""

    def __init__(self, code: Callable[[Code, int], Any]) -> None:
        self.code = code
        self.times = 0
        super().__init__()

    def setup(self) -> None:
        self.unit = UnitTask("unit")
        self.other = UnitTask("other")

    def invoke(self, request: Any) -> Any:
        self.times += 1
        return self.code(self, self.times - 1)


def run(code: Callable[[Code, int], Any], *, double_check: bool = False) -> Any:
    invoker = VirtualTime()
    return asyncio.run(
        invoker.drive(Run(Code(code), None, invoker, double_check=double_check).result())
    )


CHANGES = ("input", "component", "missing", "extra", "swapped", "name", "nested", "number")


@given(st.sampled_from(CHANGES), st.integers(2, 6), st.data(), st.booleans())
def test_every_planted_change_is_found_where_it_is(
    change: str, calls: int, data: st.DataObject, looks: bool
) -> None:
    at = data.draw(st.integers(0, calls - 2))

    def code(task: Code, times: int) -> Any:
        steps = [(task.unit, {"x": i, "deep": {"a": [i, "b"]}}) for i in range(calls)]
        if times:
            unit, inputs = steps[at]
            if change == "input":
                inputs["x"] = -1
            elif change == "component":
                steps[at] = (task.other, inputs)
            elif change == "missing":
                del steps[at]
            elif change == "extra":
                steps.insert(at, (task.unit, {"x": -1}))
            elif change == "swapped":
                steps[at], steps[at + 1] = steps[at + 1], steps[at]
            elif change == "name":
                steps[at] = (unit, {"y": at, "deep": inputs["deep"]})
            elif change == "nested":
                inputs["deep"] = {"a": [at, "c"]}
            elif change == "number":
                inputs["x"] = float(at)
        results = [unit(**inputs) for unit, inputs in steps]
        if looks:
            str(results[0])
        return results

    with pytest.raises(DivergenceError) as found:
        run(code, double_check=not looks)
    assert found.value.position == at
    assert found.value.recorded != found.value.came
    assert f"#{at}" in str(found.value)


def test_the_first_difference_is_named() -> None:
    def code(task: Code, times: int) -> Any:
        first = task.unit(x=1)
        second = task.other(text="a" if not times else "b", same=first["v"])
        return [second, str(first)]

    with pytest.raises(
        DivergenceError, match=r"at #1 it first did other\(text='a'\), and then other\(text='b'\)"
    ):
        run(code)


def test_a_random_branch_that_only_adds_is_found() -> None:
    def code(task: Code, times: int) -> Any:
        first = task.unit(x=1)
        if times == 0 and first["v"] == 3:
            return 0
        return task.unit(x=2)  # in the second round without having looked

    with pytest.raises(
        DivergenceError, match=r"at #1 it first did look at #0, and then unit\(x=2\)"
    ):
        run(code)


@pytest.mark.parametrize(
    ("later", "came"),
    [
        (lambda task, first: first, "returned"),
        (lambda task, first: task.unit(x=9), r"unit\(x=9\)"),
        (lambda task, first: str(task.unit(x=9)), r"unit\(x=9\)"),
    ],
)
def test_an_early_end_and_a_late_start_are_found(later: Any, came: str) -> None:
    def code(task: Code, times: int) -> Any:
        first = task.unit(x=1)
        if times:
            return later(task, first)
        return [task.unit(x=2), str(first)]

    with pytest.raises(DivergenceError, match=came):
        run(code)


def test_an_invocation_left_out_after_the_last_look_is_found() -> None:
    def code(task: Code, times: int) -> Any:
        text = str(task.unit(x=1))
        second = task.unit(x=2)
        if times < 2:
            task.unit(x=3)
        return text + str(second)

    with pytest.raises(DivergenceError, match=r"at #2 it first did unit\(x=3\), and then returned"):
        run(code)


def test_another_look_is_found() -> None:
    def code(task: Code, times: int) -> Any:
        first, second = task.unit(x=1), task.unit(x=2)
        return str(second if times else first)

    with pytest.raises(DivergenceError, match=r"look at #0, and then (looked at #1|returned)"):
        run(code)


def test_double_check_finds_changed_answers_and_more_work() -> None:
    with pytest.raises(
        DivergenceError, match=r"the answer \[#0, 0\], and then the answer \[#0, 1\]"
    ):
        run(lambda task, times: [task.unit(x=1), times], double_check=True)

    def more(task: Code, times: int) -> Any:
        first = task.unit(x=0)
        if times:
            task.unit(x=1)
        return first

    with pytest.raises(DivergenceError, match="nothing more"):
        run(more, double_check=True)
    kept: list[int] = []

    def side_effect(task: Code, times: int) -> Any:
        kept.append(1)
        return task.unit(seen=kept)

    with pytest.raises(DivergenceError, match=r"seen=\[1\]"):
        run(side_effect, double_check=True)
    run(lambda task, times: [task.unit(x=1), times])  # not looked for otherwise


@pytest.mark.parametrize("weights", [(3, [1, 2, 3]), (2, None), (2, [1.0, 2.0])])
def test_another_choice_is_found(weights: tuple[int, list[float] | None]) -> None:
    def code(task: Code, times: int) -> Any:
        choose(*((2, [1, 2]) if not times else weights))
        return str(task.unit(x=1))

    if weights == (2, [1.0, 2.0]):
        run(code)  # the same weights
        return
    with pytest.raises(DivergenceError, match="choose"):
        run(code)


def test_a_choice_in_place_of_an_invocation_is_found() -> None:
    def code(task: Code, times: int) -> Any:
        first = task.unit(x=1)
        if times:
            choose(2)
        else:
            as_stream("a")
        return str(first)

    with pytest.raises(DivergenceError, match=r"as_stream\['a'\], and then choose\(2, None\)"):
        run(code)


def test_code_that_swallows_the_end_of_a_round_is_told() -> None:
    def code(task: Code, times: int) -> Any:
        try:
            return str(task.unit(x=1))
        except BaseException:  # noqa: BLE001
            return ""

    with pytest.raises(UsageError, match="caught the end of a round"):
        run(code)


def test_a_divergence_cannot_be_swallowed() -> None:
    def code(task: Code, times: int) -> Any:
        try:
            first = task.unit(x=times)
        except Exception:  # noqa: BLE001
            return "quiet"
        return str(first)

    with pytest.raises(DivergenceError):
        run(code)


def test_values_of_other_requests_are_refused() -> None:
    kept: list[Any] = []

    def code(task: Code, times: int) -> Any:
        kept.append(task.unit(x=1))
        return task.unit(x=kept[0])

    task = Code(code)

    async def go() -> None:
        for _ in range(2):
            invoker = VirtualTime()
            await invoker.drive(Run(task, None, invoker).result())

    with pytest.raises(UsageError, match="another request"):
        asyncio.run(go())
