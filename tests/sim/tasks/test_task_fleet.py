"""Fleets that cannot run are refused, in one line that says what to change."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from atoll.core.errors import AtollError, InputError, UnknownNameError
from atoll.sim.tasks.simulate_tasks import simulate_tasks
from atoll.sim.tasks.task_demand import Arrivals, Demand
from atoll.sim.tasks.task_fleet import (
    BatchPart,
    Box,
    ClassSpec,
    PartEdge,
    PartNeed,
    StepTable,
    TaskFleet,
    TokenPart,
)
from tests.sim.tasks.builders import TABLE, executor, path

EYE = BatchPart({"a": 0.1})
LLM = TokenPart(TABLE, kv_tokens=1000)
CLASS = ClassSpec("s", "a", 1.0, {"eye": PartNeed(), "llm": PartNeed()}, (PartEdge("eye", "llm"),))
PATH = path("a", ("eye+llm", "e"))


def fleet(**changes: object) -> TaskFleet:
    parts: dict[str, object] = {
        "executors": (executor("e", eye=EYE, llm=LLM),),
        "classes": (CLASS,),
        "paths": (PATH,),
    }
    return TaskFleet(**(parts | changes))  # type: ignore[arg-type]


def test_a_fleet_that_can_run_is_not() -> None:
    assert simulate_tasks(fleet(), requests=3).finished == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"executors": ()}, "nothing to simulate"),
        ({"executors": (executor("e", eye=EYE, llm=LLM),) * 2}, "'e' appears twice"),
        ({"executors": (executor("e", "shelf", eye=EYE, llm=LLM),)}, "shelf"),
        ({"executors": (executor("e", eye=EYE),)}, "e does not run llm for class 'a'"),
        (
            {"executors": (executor("e", eye=BatchPart({"b": 0.1}), llm=LLM),)},
            "e does not run eye for class 'a'",
        ),
        (
            {"executors": (executor("e", eye=EYE, llm=LLM), executor("f", llm=EYE))},
            "another kind of part on f",
        ),
        ({"paths": ()}, "no path for class 'a' of s"),
        ({"paths": (replace(PATH, klass="b"),)}, "b"),
        ({"paths": (path("a", ("eye", "e"), ("llm", "f")),)}, "f"),
        ({"paths": (path("a", ("eye+eye", "e")),)}, "'eye' appears twice"),
        ({"classes": (replace(CLASS, needs={"llm": PartNeed()}, edges=()),)}, "needs of eye"),
        ({"classes": (replace(CLASS, edges=(PartEdge("ear", "llm"),)),)}, "ear"),
        (
            {"classes": (replace(CLASS, edges=(*CLASS.edges, PartEdge("llm", "eye"))),)},
            "feed each other",
        ),
        (
            {"classes": (replace(CLASS, edges=(PartEdge("eye", "llm", chunk_tokens=4),)),)},
            "eye makes no tokens to cut",
        ),
    ],
)
def test_fleets_that_cannot_run_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(AtollError, match=message) as refused:
        fleet(**changes)
    assert "\n" not in str(refused.value)


def test_values_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="takes some time"):
        BatchPart({"a": 0.0})
    with pytest.raises(InputError, match="an item at least"):
        BatchPart({"a": 0.1}, max_batch=0)
    with pytest.raises(InputError, match="carries something"):
        Box("b", nic_bytes_per_s=0.0)
    with pytest.raises(InputError, match="go up"):
        StepTable(prefill=((2.0, 0.1), (1.0, 0.2)), decode=((1.0, 0.1),))
    with pytest.raises(InputError, match="chunks of nothing"):
        PartEdge("llm", "talker", streamed=True)
    with pytest.raises(InputError, match="no rate"):
        replace(CLASS, rate_per_s=0.0)


def test_runs_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="a number of requests or a duration"):
        simulate_tasks(fleet())
    with pytest.raises(InputError, match="some seconds"):
        simulate_tasks(fleet(), duration_s=10.0, arrivals=Arrivals(at_once=True))
    with pytest.raises(InputError, match="is not a share"):
        simulate_tasks(fleet(), requests=10, warmup=0.5)
    with pytest.raises(InputError, match="no request comes in that time"):
        simulate_tasks(fleet(), duration_s=1e-9)
    one = np.ones(2)
    for times, classes, message in (
        ([1.0, 0.5], [0, 0], "in order of their arrival"),
        ([-1.0, 0.5], [0, 0], "in order of their arrival"),
        ([0.0, 0.5], [0, 1], "of no class"),
        ([2.0, 3.0], [0, 0], "no request comes"),
    ):
        demand = Demand(np.array(times), np.array(classes), one, one)
        with pytest.raises(InputError, match=message):
            simulate_tasks(fleet(), demand=demand, duration_s=1.0)
    with pytest.raises(UnknownNameError, match="routing"):
        simulate_tasks(fleet(), requests=10, routing="guess")  # type: ignore[arg-type]


def test_a_scaled_fleet_has_more_requests_in_the_same_time() -> None:
    once, thrice = (simulate_tasks(fleet().scaled(x), duration_s=300.0) for x in (1.0, 3.0))
    assert once.arrived == pytest.approx(300, rel=0.2)
    assert thrice.arrived == pytest.approx(3 * 300, rel=0.1)


def test_texts_that_no_cache_holds_are_cut_and_counted() -> None:
    long = replace(CLASS, input_tokens=900.0, output_tokens=500.0)
    found = simulate_tasks(fleet(classes=(long,)), requests=3)
    assert found.cut == 3
    assert found.executors[0].parts[1].decode_tokens == 3 * 99


def test_describing_a_fleet_loads_nothing_heavy() -> None:
    code = (
        "import sys, atoll.sim.tasks.task_fleet, atoll.sim.tasks.simulate_tasks;"
        "sys.exit(any(m in sys.modules for m in ('numba', 'numpy', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
