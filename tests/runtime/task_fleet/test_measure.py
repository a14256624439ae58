"""Rates of parts, measured with components whose work can be worked out by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.transformer import TransformerSpec
from atoll.components.base import BadInputError, BatchComponent, Done, Setup, StreamComponent
from atoll.core.errors import InputError
from atoll.perf.components.sites import decode_seconds, prompt_seconds
from atoll.perf.step import analytic
from atoll.runtime.task_fleet import measure
from atoll.runtime.task_fleet.core_fit import fit_core
from atoll.runtime.task_fleet.measure import SPOKEN, TokenPace, measure_parts
from atoll.runtime.task_fleet.parts import OWN_MODEL
from tests.seeds import slow_except

HERE = "tests.runtime.task_fleet.test_measure"
RATE_HZ = 1000


class WorkClock:
    """A clock that components push forward: two seconds pass for each CPU second."""

    now_s = 0.0

    @classmethod
    def work(cls, cpu_s: float) -> None:
        cls.now_s += cpu_s

    @classmethod
    def process_time(cls) -> float:
        return cls.now_s

    @classmethod
    def perf_counter(cls) -> float:
        return 2.0 * cls.now_s


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkClock, "now_s", 0.0)
    monkeypatch.setattr(measure, "time", WorkClock)
    monkeypatch.setattr(measure, "_VOICE", f"{HERE}:PlainVoice")


class TimedWork(BatchComponent):
    """Takes `cpu_s` for every input, and gives what `give` says."""

    cpu_s: ClassVar[float]
    takes: ClassVar[str]

    @classmethod
    def load(cls, setup: Setup) -> Self:
        del setup
        WorkClock.work(3.0)
        return cls()

    def example(self) -> Any:
        return {self.takes: None}

    def run(self, batch: Sequence[Any]) -> Sequence[Any]:
        WorkClock.work(self.cpu_s * len(batch))
        return [self.give(inputs) for inputs in batch]

    def give(self, inputs: Any) -> Any:
        raise NotImplementedError


class PlainVoice(TimedWork):
    """A tenth of a second of sound for each character."""

    name = "plain-voice"
    cpu_s, takes = 0.5, "text"

    def give(self, inputs: Any) -> Any:
        samples = np.zeros(len(inputs["text"]) * RATE_HZ // 10, np.float32)
        return {"samples": samples, "rate_hz": RATE_HZ}


class Listener(TimedWork):
    """Says that somebody speaks, and hands on no sound."""

    name = "listener"
    cpu_s, takes = 0.25, "audio"

    def give(self, inputs: Any) -> Any:
        return {"speech_s": len(inputs["audio"]["samples"]) / RATE_HZ}


class Ear(TimedWork):
    """Takes the sound that its part was given."""

    name = "ear"
    cpu_s, takes = 0.75, "audio"

    def give(self, inputs: Any) -> Any:
        return {"states": np.zeros((len(inputs["audio"]["samples"]), 2), np.float32)}


class Scribe(TimedWork):
    """Takes what the ear gave."""

    name = "scribe"
    cpu_s, takes = 1.0, "states"

    def give(self, inputs: Any) -> Any:
        return {"text": str(inputs["states"].shape)}


class Eye(TimedWork):
    """Takes pictures."""

    name = "eye"
    cpu_s, takes = 0.125, "image"

    def give(self, inputs: Any) -> Any:
        return {"brightness": float(inputs["image"].mean())}


class Embedder(TimedWork):
    """Takes a text, and gives no sound."""

    name = "embedder"
    cpu_s, takes = 0.2, "text"

    def give(self, inputs: Any) -> Any:
        return {"embedding": np.zeros(2, np.float32), "tokens": len(inputs["text"])}


class Refuser(TimedWork):
    """Likes no picture."""

    name = "refuser"
    cpu_s, takes = 0.1, "image"

    def give(self, inputs: Any) -> Any:
        del inputs
        return BadInputError("too blue", "image")


class Mystery(TimedWork):
    """Takes nobody knows what."""

    name = "mystery"
    cpu_s, takes = 0.1, "aura"


class Talker(StreamComponent):
    """Half a second to the first token, then a quarter for each."""

    name = "talker"
    closed = 0

    @classmethod
    def load(cls, setup: Setup) -> Self:
        del setup
        return cls()

    def example(self) -> Any:
        return {}

    async def close(self) -> None:
        type(self).closed += 1

    async def stream(self, inputs: Any) -> AsyncIterator[Any]:
        count = inputs["max_tokens"]
        for number in range(count):
            WorkClock.work(0.25 if number else 0.5)
            yield {"text": "a", "token_ids": [number]}
        told = {"prompt_tokens": 16, "completion_tokens": count}
        yield Done(told)


def _named(*names: str) -> tuple[str, ...]:
    return tuple(f"{HERE}:{name}" for name in names)


def test_units_come_from_what_parts_take_and_give() -> None:
    told: list[str] = []
    rates = measure_parts(
        {
            "audio": _named("Listener", "Ear", "Scribe"),
            "vision": _named("Eye"),
            "nothing": (),
            "speech": _named("PlainVoice"),
            "text": _named("Embedder"),
        },
        runs=3,
        on_progress=told.append,
    )
    seconds = len(SPOKEN) / 10
    assert [(rate.part, rate.unit) for rate in rates] == [
        ("audio", "audio_s"),
        ("vision", "image"),
        ("speech", "speech_s"),
        ("text", "request"),
    ]
    cpu_per_s = [seconds / 2.0, 8.0, 2.0 * seconds, 5.0]
    assert [rate.cpu_per_s for rate in rates] == pytest.approx(cpu_per_s)
    assert [2.0 * rate.per_s for rate in rates] == pytest.approx(cpu_per_s)
    assert rates[0].load_s == pytest.approx(18.0)
    assert all(rate.pace is None for rate in rates)
    assert any("3 of 3" in text for text in told)


def test_streams_are_counted_in_tokens_and_paced_and_closed() -> None:
    before = Talker.closed
    (rate,) = measure_parts({"llm": _named("Talker")}, runs=2)
    cpu_s = 0.5 + 23 * 0.25
    assert rate.unit == "token"
    assert rate.cpu_per_s == pytest.approx((16 + 24) / cpu_s)
    assert rate.pace is not None
    assert rate.pace.prompt_tokens == 16
    assert (rate.pace.first_s, rate.pace.token_s) == pytest.approx((0.5, 0.25))
    assert Talker.closed == before + 1


@pytest.mark.parametrize(
    ("names", "runs", "part"),
    [
        (("Mystery",), 1, "typical input of mystery"),
        (("Refuser",), 1, "refuser: too blue"),
        (("Eye", "Talker"), 1, "talker streams"),
        (("Eye",), 0, "at least one run"),
    ],
)
def test_what_cannot_be_measured_is_refused(names: tuple[str, ...], runs: int, part: str) -> None:
    with pytest.raises(InputError, match=part):
        measure_parts({"vision": _named(*names)}, runs=runs)


SLOW_START = TokenPace(200, 1.5, 0.03)


@pytest.mark.parametrize("pace", slow_except([SLOW_START], [TokenPace(47, 0.17, 0.08), SLOW_START]))
def test_a_fitted_core_runs_a_model_at_the_pace_it_was_given(pace: TokenPace) -> None:
    catalog = Catalog.default()
    spec = catalog.model(OWN_MODEL).components["llm"]
    assert isinstance(spec, TransformerSpec)
    node = catalog.node("T4:1")
    speed = fit_core(spec, node, pace)
    gpu = replace(
        node.gpu,
        bandwidth_bytes_per_s=speed.bandwidth_gbs * 1e9,
        fp16_tflops=speed.fp16_tflops,
    )
    model = analytic(spec, replace(node, gpu=gpu), tp=1)
    assert decode_seconds(model, pace.prompt_tokens) == pytest.approx(pace.token_s, rel=0.02)
    most = float(model.engine.mixed_tokens)
    first_s = prompt_seconds(model, pace.prompt_tokens, most)
    assert first_s == pytest.approx(pace.first_s, rel=0.02)
    with pytest.raises(InputError, match="above 0"):
        fit_core(spec, node, TokenPace(10, 0.0, 0.1))
