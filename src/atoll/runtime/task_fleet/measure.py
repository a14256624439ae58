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
from atoll.components.component_registry import find_component
from atoll.core.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RateUnit = Literal["request", "image", "audio_s", "speech_s", "token"]
SPOKEN = "The lighthouse keeper climbed the stairs every evening to light the lamp for the ships."
"""Text that is spoken and heard."""
_PROMPT = "Tell me in a few words what a lighthouse is for, and who keeps it."
_ANSWER_TOKENS = 24
_PIXELS = (480, 640)
_VOICE = "hibari"
_Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class TokenPace:
    """How a part that makes tokens spends its CPU seconds, with one request at a time.

    `first_s` until the first token of a prompt of `prompt_tokens`, `token_s` for each token after it.
    """

    prompt_tokens: int
    first_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class PartRate:
    """A part's measured rate: so many units per second of one core, CPU seconds beside wall seconds.

    `per_s` is by the clock, with whatever else the machine did; `cpu_per_s` is units per CPU second, what an
    idle core would give.
    """

    part: str
    components: tuple[str, ...]
    unit: RateUnit
    per_s: float
    cpu_per_s: float
    load_s: float
    runs: int
    pace: TokenPace | None = None
    """Of parts that make tokens, which a simulator runs token by token."""


def measure_parts(
    parts: Mapping[str, Sequence[str]],
    *,
    runs: int = 5,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    on_progress: Callable[[str], None] = lambda _text: None,
) -> list[PartRate]:
    """Measure the components of each part, one part after the other, with one thread each.

    Components of a part run in turn, each on what the part got and those before it gave. Parts without
    components are left out.
    """
    if runs < 1:
        raise InputError("at least one run is needed", field="runs")
    found = []
    for part, names in parts.items():
        if names:
            on_progress(f"loading {part} ({', '.join(names)})")
            found.append(_measure(part, names, runs, options or {}, on_progress))
    return found


def _measure(
    part: str,
    names: Sequence[str],
    runs: int,
    options: Mapping[str, Mapping[str, Any]],
    on_progress: Callable[[str], None],
) -> PartRate:
    begun_s = time.perf_counter()
    components = [
        find_component(name).load(ComponentSetup(options=options.get(name))) for name in names
    ]
    load_s = time.perf_counter() - begun_s
    loop = asyncio.new_event_loop()
    try:
        # The first run fills caches, and says how much a run is.
        unit, amount, run = _work(part, components, loop)
        walls, cpus, given = [], [], []
        for number in range(runs):
            on_progress(f"measuring {part} ({', '.join(names)}): {number + 1} of {runs}")
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            given.append(run())
            walls.append(time.perf_counter() - wall_s)
            cpus.append(time.process_time() - cpu_s)
    finally:
        for component in components:
            loop.run_until_complete(component.close())
        loop.close()
    return PartRate(
        part=part,
        components=tuple(names),
        unit=unit,
        per_s=amount / max(1e-9, statistics.median(walls)),
        cpu_per_s=amount / max(1e-9, statistics.median(cpus)),
        load_s=load_s,
        runs=runs,
        pace=_median_pace([each for each in given if isinstance(each, TokenPace)]),
    )


def _median_pace(paces: Sequence[TokenPace]) -> TokenPace | None:
    if not paces:
        return None
    return TokenPace(
        paces[0].prompt_tokens,
        statistics.median(pace.first_s for pace in paces),
        statistics.median(pace.token_s for pace in paces),
    )


def _work(
    part: str, components: Sequence[LoadedComponent], loop: asyncio.AbstractEventLoop
) -> tuple[RateUnit, float, _Run]:
    """A run, by what the first component takes: the unit, how much of it, and the run itself."""
    first = components[0]
    if isinstance(first, StreamComponent) and len(components) == 1:
        return _stream_work(first, loop)
    for component in components:
        if not isinstance(component, BatchComponent):
            raise InputError(f"{component.name} streams, and is not alone in its part", field=part)
    takes = first.example()
    if "audio" in takes:
        sound = _speak()
        return _run_first("audio_s", _seconds(sound), lambda: _chain(components, {"audio": sound}))
    if "image" in takes:
        picture = _picture()
        return _run_first("image", 1.0, lambda: _chain(components, {"image": picture}))
    if "text" in takes:
        spoken = _chain(components, {"text": SPOKEN})
        if not _is_sound(spoken):
            return "request", 1.0, lambda: _chain(components, {"text": SPOKEN})
        return "speech_s", _seconds(spoken), lambda: _chain(components, {"text": SPOKEN})
    raise InputError(
        f"nobody knows what a typical input of {first.name} is",
        field=part,
        hint="measure it by hand, and write its rate into the fleet file",
    )


def _run_first(unit: RateUnit, amount: float, run: _Run) -> tuple[RateUnit, float, _Run]:
    run()
    return unit, amount, run


def _chain(components: Sequence[LoadedComponent], inputs: Mapping[str, Any]) -> Any:
    """Run components in turn, each on the inputs and what those before it gave; return what the last gave."""
    known = dict(inputs)
    value: Any = None
    for component in components:
        assert isinstance(component, BatchComponent)
        (value,) = component.run([known])
        if isinstance(value, BadInputError):
            raise InputError(f"{component.name}: {value.message}")
        if isinstance(value, Mapping):
            known.update(value)
    return value


def _stream_work(
    component: StreamComponent, loop: asyncio.AbstractEventLoop
) -> tuple[RateUnit, float, _Run]:
    loop.run_until_complete(component.start())
    inputs = {
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0.0,
    }

    async def answer() -> tuple[TokenPace, float]:
        begun_s, first_s = time.process_time(), None
        async for piece in component.stream(inputs):
            if isinstance(piece, Done):
                took_s = time.process_time() - begun_s
                told = piece.value
                later = max(1, told["completion_tokens"] - 1)
                first = took_s if first_s is None else first_s
                pace = TokenPace(told["prompt_tokens"], first, (took_s - first) / later)
                return pace, float(told["prompt_tokens"] + told["completion_tokens"])
            if first_s is None:
                first_s = time.process_time() - begun_s
        raise InputError(f"{component.name} gave no end")

    _, tokens = loop.run_until_complete(answer())
    return "token", tokens, lambda: loop.run_until_complete(answer())[0]


def _speak() -> dict[str, Any]:
    """A spoken sentence; spoken by the component that speaks."""
    sound = _chain([find_component(_VOICE).load(ComponentSetup())], {"text": SPOKEN})
    assert isinstance(sound, dict)
    return sound


def _is_sound(value: object) -> bool:
    return isinstance(value, Mapping) and "samples" in value and "rate_hz" in value


def _seconds(sound: Mapping[str, Any]) -> float:
    return len(sound["samples"]) / float(sound["rate_hz"])


def _picture() -> NDArray[np.uint8]:
    import numpy as np

    height, width = _PIXELS
    rows = np.arange(height, dtype=np.uint32)[:, None, None]
    columns = np.arange(width, dtype=np.uint32)[None, :, None]
    return ((rows + columns * np.array([1, 2, 3], dtype=np.uint32)) % 256).astype(np.uint8)
