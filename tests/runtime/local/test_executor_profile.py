"""Throughputs of executors become seconds and rates, as in appendix C of Cornserve."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.runtime.executor.executor_pages import render_metrics
from atoll.runtime.executor.figures import ComponentFigures
from atoll.runtime.local.executor_profile import (
    ExecutorProfile,
    derive_rates,
    fill_in,
    read_executor_profile,
)

WORKED: dict[str, Any] = {
    "classes": {
        "text": {"share": 0.5, "parts": ["llm"]},
        "image+text": {"share": 0.5, "parts": ["vision", "llm"]},
    },
    "executors": {
        "eyes": {"parts": ["vision"], "throughput": 8},
        "mind": {"parts": ["llm"], "throughput": "4/s"},
        "both": {"parts": ["vision", "llm"], "throughput": 2},
    },
}


def write(folder: Path, data: object) -> Path:
    path = folder / "executors.json"
    path.write_text(json.dumps(data))
    return path


def changed(*keys: str, to: object) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(WORKED))
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    return data


def test_a_worked_example(tmp_path: Path) -> None:
    # Half of the requests have an image. Eyes alone pass 8 requests/s of the mix, 4 with an image: 0.25 s
    # each. Every request needs the llm: 0.25 s. Both on one GPU would take 0.5 x 0.25 + 0.5 x 0.5 = 0.375 s
    # of a mean request, and take 0.5: they slow each other down by 4/3.
    found = derive_rates(read_executor_profile(write(tmp_path, WORKED)), "L4")
    assert found.alpha == {"eyes": 1.0, "mind": 1.0, "both": pytest.approx(4 / 3)}
    seconds = {(one.executor, one.klass, one.part): one.seconds for one in found.seconds}
    assert seconds == {
        ("eyes", "image+text", "vision"): pytest.approx(0.25),
        ("mind", "text", "llm"): pytest.approx(0.25),
        ("mind", "image+text", "llm"): pytest.approx(0.25),
        ("both", "text", "llm"): pytest.approx(1 / 3),
        ("both", "image+text", "vision"): pytest.approx(1 / 3),
        ("both", "image+text", "llm"): pytest.approx(1 / 3),
    }
    rates = {(rate.part, rate.on, rate.unit): rate.per_s for rate in found.rates}
    assert rates == {
        ("vision", "L4", "request"): pytest.approx(4.0),
        ("llm", "L4", "request"): pytest.approx(4.0),
        ("vision+llm", "L4", "request"): pytest.approx(2.0),
    }


def metrics_of(executor: str, ran: dict[str, list[tuple[int, float]]]) -> str:
    """The metrics of an executor whose components ran batches of these sizes for so long."""
    workers = {}
    for component, batches in ran.items():
        figures = ComponentFigures()
        for size, seconds in batches:
            figures.count_batch(size, seconds)
        workers[component] = SimpleNamespace(figures=figures, waiting=0, running=0)
    store = MagicMock(used_bytes=0)
    return render_metrics(executor, workers, store, 0).decode()  # type: ignore[arg-type]


def test_executors_that_run_say_what_they_carry(tmp_path: Path) -> None:
    # As in the worked example: 0.25 s alone, 1/3 s together, of a part; images in batches of two.
    pages = {
        "eyes": metrics_of("eyes", {"see": [(1, 0.3), (2, 0.5), (2, 0.5), (8, 1.45)]}),
        "mind": metrics_of("mind", {"llm": [(1, 0.25)] * 4}),
        "both": metrics_of("both", {"see": [(1, 1 / 3)] * 3, "llm": [(1, 1 / 3)] * 6}),
    }
    data = json.loads(json.dumps(WORKED))
    for name, executor in data["executors"].items():
        del executor["throughput"]
        executor |= {"metrics": name, "components": {"vision": ["see"]}}
    profile = fill_in(read_executor_profile(write(tmp_path, data)), pages.__getitem__)
    carried = {name: one.throughput for name, one in profile.executors.items()}
    took = (0.3 + 0.5 + 0.5 + 1.45) / 13
    assert carried == pytest.approx({"eyes": 1 / (0.5 * took), "mind": 4.0, "both": 2.0})
    found = derive_rates(profile, "L4")
    assert found.alpha["both"] == pytest.approx(0.5 / (0.5 * took + 0.25))
    tables = {rate.part: rate.batches for rate in found.rates}
    assert tables == {
        "vision": ((1, 0.3), (2, 0.5), (8, 1.45)),
        "llm": (),
        "vision+llm": (),
    }


def test_executors_that_did_not_run_say_so(tmp_path: Path) -> None:
    data = changed("executors", "eyes", to={"parts": ["vision"], "metrics": "eyes"})
    profile = read_executor_profile(write(tmp_path, data))
    with pytest.raises(InputError, match="vision has not run there") as error:
        fill_in(profile, lambda _: metrics_of("eyes", {"see": [(1, 0.3)]}))
    assert error.value.field == "executors.eyes.metrics"
    nothing = write(tmp_path, changed("executors", "eyes", to={"parts": ["vision"]}))
    with pytest.raises(InputError, match="give what it carries once"):
        read_executor_profile(nothing)


RATES = st.floats(0.1, 100.0)


@given(share=st.floats(0.05, 0.95), eyes=RATES, mind=RATES, both=RATES)
def test_seconds_of_the_mix_give_back_what_was_measured(
    share: float, eyes: float, mind: float, both: float
) -> None:
    data = changed("classes", "text", "share", to=1.0 - share)
    data["classes"]["image+text"]["share"] = share
    for name, rate in (("eyes", eyes), ("mind", mind), ("both", both)):
        data["executors"][name]["throughput"] = rate
    found = derive_rates(ExecutorProfile.parse(data), "L4")
    shares = {"text": 1.0 - share, "image+text": share}
    for name, rate in (("eyes", eyes), ("mind", mind), ("both", both)):
        took = sum(shares[one.klass] * one.seconds for one in found.seconds if one.executor == name)
        assert took == pytest.approx(1.0 / rate)


def test_kinds_of_gpus_are_kept_apart(tmp_path: Path) -> None:
    data = changed("executors", "fast", to={"parts": ["llm"], "throughput": 40, "on": "H100:2"})
    found = derive_rates(read_executor_profile(write(tmp_path, data)), "L4")
    rates = {(rate.part, rate.on): rate.per_s for rate in found.rates}
    assert rates["llm", "L4"] == pytest.approx(4.0)
    assert rates["llm", "H100:2"] == pytest.approx(40.0)
    assert found.alpha["both"] == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed("classes", "text", "share", to=0.4), "classes: shares sum to 0.9"),
        (changed("classes", "text", "share", to=0), "classes.text.share"),
        (changed("classes", "text", "parts", to=[]), "classes.text.parts"),
        (changed("classes", "text", "parts", to=["llm", "ear"]), "no executor runs the part 'ear'"),
        (changed("executors", "eyes", "parts", to=["ear"]), "executors.eyes.parts: no class uses"),
        (changed("executors", "eyes", "throughput", to=-1), "executors.eyes.throughput"),
        (changed("executors", "eyes", "throughput", to="fast"), "executors.eyes.throughput"),
        (
            changed("executors", "eyes", "speed", to=1),
            "executors.eyes.speed: there is no such field",
        ),
        (changed("executors", to={}), "executors"),
        ([], "not a JSON object"),
        ({}, "classes: this field is required"),
    ],
)
def test_a_bad_file_is_refused_and_the_field_named(tmp_path: Path, data: object, said: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(InputError) as caught:
        read_executor_profile(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_part_that_never_ran_alone_is_refused(tmp_path: Path) -> None:
    data = changed("executors", "eyes", "parts", to=["vision", "llm"])
    with pytest.raises(InputError, match="component vision was not profiled alone"):
        derive_rates(read_executor_profile(write(tmp_path, data)), "L4")
