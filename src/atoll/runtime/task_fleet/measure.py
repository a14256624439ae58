"""How fast components are on this machine: the rates that a fleet file wants of them.

Each part is given what requests typically bring, alone and again and again, on one core. The median counts:
machines are shared, and what disturbs one run must not become a promise.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from atoll.components.base import (
    BadInputError,
    BatchComponent,
    Done,
    LoadedComponent,
    StreamComponent,
)
from atoll.components.base import Setup as ComponentSetup
from atoll.components.registry import find_component
from atoll.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RateUnit = Literal["image", "audio_s", "speech_s", "token"]
_RATE_HZ = 16_000
_SPOKEN = "The lighthouse keeper climbed the stairs every evening to light the lamp for the ships."
_PROMPT = "Tell me in a few words what a lighthouse is for, and who keeps it."
_ANSWER_TOKENS = 24
_PIXELS = (480, 640)


@dataclass(frozen=True, slots=True)
class PartRate:
    """A part's measured rate: so many units per second of one core, CPU seconds beside wall seconds."""

    part: str
    unit: RateUnit
    per_s: float
    cpu_per_s: float
    """Units per CPU second: what an idle core would give."""
    load_s: float
    runs: int


def measure_parts(
    parts: Mapping[str, Sequence[str]],
    *,
    runs: int = 5,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    on_progress: Callable[[str], None] = lambda _text: None,
) -> list[PartRate]:
    """Measure the components of each part, one part after the other, with one thread each."""
    if runs < 1:
        raise InputError("at least one run is needed", field="runs")
    found = []
    for part, names in parts.items():
        if names:
            on_progress(f"measuring {part} ({', '.join(names)})")
            found.append(_measure(part, names, runs, options or {}))
    return found


def _measure(
    part: str, names: Sequence[str], runs: int, options: Mapping[str, Mapping[str, Any]]
) -> PartRate:
    begun_s = time.perf_counter()
    components = [
        find_component(name).load(ComponentSetup(options=options.get(name))) for name in names
    ]
    load_s = time.perf_counter() - begun_s
    unit, amount, run = _work(part, components)
    run()  # the first run fills caches
    walls, cpus = [], []
    for _ in range(runs):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall_s)
        cpus.append(time.process_time() - cpu_s)
    return PartRate(
        part=part,
        unit=unit,
        per_s=amount / statistics.median(walls),
        cpu_per_s=amount / max(1e-9, statistics.median(cpus)),
        load_s=load_s,
        runs=runs,
    )


def _work(
    part: str, components: Sequence[LoadedComponent]
) -> tuple[RateUnit, float, Callable[[], object]]:
    """What to run, by the first component's name: the unit, how much of it, and the run itself."""
    name = components[0].name
    first = components[0]
    if isinstance(first, StreamComponent):
        return _stream_work(first)
    if name.startswith("moonshine"):
        sound, seconds = _spoken()
        return "audio_s", seconds, lambda: _chain(components, {"audio": sound})
    if name == "hibari":
        seconds = _speech_seconds(_chain(components, {"text": _SPOKEN}))
        return "speech_s", seconds, lambda: _chain(components, {"text": _SPOKEN})
    if "image" in first.example():
        return "image", 1.0, lambda: _chain(components, {"image": _picture()})
    raise InputError(
        f"nobody knows what a typical input of {name} is",
        field=part,
        hint="measure it by hand, and write its rate into the fleet file",
    )


def _chain(components: Sequence[LoadedComponent], inputs: Mapping[str, Any]) -> Any:
    """Run components one after the other, each on what the one before gave."""
    value: Any = inputs
    for component in components:
        assert isinstance(component, BatchComponent)
        (value,) = component.run([value])
        if isinstance(value, BadInputError):
            raise InputError(f"{component.name}: {value.message}")
    return value


def _stream_work(component: StreamComponent) -> tuple[RateUnit, float, Callable[[], object]]:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(component.start())
    inputs = {
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0.0,
    }

    async def answer() -> Any:
        async for piece in component.stream(inputs):
            if isinstance(piece, Done):
                return piece.value
        raise InputError(f"{component.name} gave no end")

    done = loop.run_until_complete(answer())
    tokens = float(done["prompt_tokens"] + done["completion_tokens"])
    return "token", tokens, lambda: loop.run_until_complete(answer())


def _spoken() -> tuple[dict[str, Any], float]:
    """A spoken sentence and its seconds; spoken by the component that speaks."""
    value = _chain([find_component("hibari").load(ComponentSetup())], {"text": _SPOKEN})
    return value, _speech_seconds(value)


def _speech_seconds(sound: Mapping[str, Any]) -> float:
    return len(sound["samples"]) / float(sound["rate_hz"])


def _picture() -> NDArray[np.uint8]:
    import numpy as np

    height, width = _PIXELS
    rows = np.arange(height, dtype=np.uint32)[:, None, None]
    columns = np.arange(width, dtype=np.uint32)[None, :, None]
    return ((rows + columns * np.array([1, 2, 3], dtype=np.uint32)) % 256).astype(np.uint8)
