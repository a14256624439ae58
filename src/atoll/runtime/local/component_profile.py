"""How fast this machine runs a component of an any-to-any model: rates for the `rates` of a fleet file.

A component is built from its shapes in the catalog with random weights and run on batches of equal items:
images, sounds, pictures to denoise, speech. A batch is run as often as it takes to see `items` of them, and
the median of its times counts, from the call until the device is done. Where a component is too large for a
machine, `shrink` builds one layer in so many: layers of a kind are then timed together, apart from what
stands around them, and count as often as the component has them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ModelSpec
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.frozen import Frozen
from atoll.perf.components.measured import MeasuredRate, Unit
from atoll.runtime.local.component_sections import ItemOptions
from atoll.workload.classes import MAX_PIXELS

if TYPE_CHECKING:
    import torch

    from atoll.runtime.local.component_sections import Section

BATCHES = (1, 2, 4, 8)
_REPEATS = 3
_ELSEWHERE = "write a rate that was measured elsewhere into 'rates' of the fleet file"
Clock = Callable[[], float]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to measure: batch sizes, items of each, one layer in how many, threads on a CPU, the device.

    `device` is torch's name of it; None takes a GPU where there is one.
    """

    batches: Sequence[int] = BATCHES
    items: int = 16
    shrink: int = 1
    threads: int = 1
    device: str | None = None


class BatchSeconds(Frozen):
    """Seconds that a batch of so many items takes."""

    batch: int
    seconds: float

    @property
    def items_per_s(self) -> float:
        """Items per second, batch after batch."""
        return self.batch / self.seconds


class ComponentProfile(Frozen):
    """Measured times of a component: seconds of batches of items, each `amount` of `unit`.

    `notes` say what a reader must know: what was left out, stood in for or scaled.
    """

    model: str
    part: str
    item: str
    unit: Unit
    amount: float
    device: str
    dtype: str
    shrink: int
    batches: tuple[BatchSeconds, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> BatchSeconds:
        """The batch that gives most items per second; among equals the smallest."""
        return max(self.batches, key=lambda one: (one.items_per_s, -one.batch))

    def rate(self, on: str) -> MeasuredRate:
        """Return the best rate as one of a GPU type."""
        return MeasuredRate(
            part=self.part, on=on, per_s=self.best.items_per_s * self.amount, unit=self.unit
        )


def check_component(model: ModelSpec, part: str) -> EncoderSpec | GeneratorSpec:
    """Return the shapes of a component that can be built; say what is missing of another."""
    spec = model.components.get(part)
    if spec is None:
        raise UnknownNameError(
            f"component of {model.name}", part, tuple(model.components), field="--component"
        )
    if isinstance(spec, EncoderSpec):
        missing = ["patch_size"] if spec.kind == "vision" and spec.patch_size is None else []
        missing += ["mel_bins"] if spec.kind == "audio" and spec.mel_bins is None else []
        if spec.kind == "audio" and spec.tokens_per_second is None:
            missing.append("tokens_per_second")
    elif isinstance(spec, GeneratorSpec) and spec.kind != "autoregressive":
        names = ["layers", "hidden", "heads"]
        names += ["frames_per_second"] if spec.kind == "vocoder" else []
        missing = [name for name in names if getattr(spec, name) is None]
        if spec.kind == "vae":
            missing = ["the shapes of its convolutions"]
    else:
        raise InputError(
            f"{part} of {model.name} is a transformer over tokens, not measured here",
            field="--component",
            hint=f"measure a server that runs it (--server), or {_ELSEWHERE}",
        )
    if missing:
        raise InputError(
            f"{part} of {model.name} cannot be built: not public are {', '.join(missing)}",
            field="--component",
            hint=_ELSEWHERE,
        )
    return spec


def find_device() -> str:
    """Return torch's name of what components run on here: a GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def profile_component(
    model: ModelSpec,
    part: str,
    item: ItemOptions | None = None,
    options: RunOptions | None = None,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> ComponentProfile:
    """Build a component, run it on batches of items and return how long they took.

    On a GPU in bf16, else in fp32. `clock` gives seconds.
    """
    chosen, size = options or RunOptions(), item or ItemOptions()
    spec = check_component(model, part)
    _check(size, chosen)

    import torch

    from atoll.runtime.local.component_sections import ComponentBuilder

    name = chosen.device or find_device()
    device = torch.device(name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        torch.set_num_threads(chosen.threads)
    # Equal runs have equal weights and inputs.
    torch.manual_seed(0)
    piece = ComponentBuilder(
        model, spec, size, chosen.shrink, device, dtype, max(chosen.batches)
    ).build(part)
    tell = progress or (lambda _text: None)
    found: list[BatchSeconds] = []
    with torch.inference_mode():
        for batch in chosen.batches:
            tell(f"{part}: batches of {batch}")
            repeats = max(_REPEATS, math.ceil(chosen.items / batch))
            seconds = sum(
                section.times * _time(section, batch, repeats, device, clock)
                for section in piece.sections
            )
            found.append(BatchSeconds(batch=batch, seconds=seconds))
    notes = list(piece.notes)
    if chosen.shrink > 1:
        notes.append(f"only one layer in {chosen.shrink} was built, and counts for all of them")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return ComponentProfile(
        model=model.name,
        part=part,
        item=piece.item,
        unit=piece.unit,
        amount=piece.amount,
        device=name,
        dtype=str(dtype).removeprefix("torch."),
        shrink=chosen.shrink,
        batches=tuple(found),
        notes=tuple(notes),
    )


def _check(item: ItemOptions, options: RunOptions) -> None:
    for pixels in (item.width_px, item.height_px):
        if pixels is not None and not 1 <= pixels <= MAX_PIXELS:
            raise InputError(
                f"a side of {pixels} pixels", field="--size", hint=f"use 1 to {MAX_PIXELS}"
            )
    if not 0.0 < item.seconds <= 3600.0:
        raise InputError(
            f"{item.seconds:g} seconds of sound", field="--seconds", hint="use up to 3600"
        )
    if not options.batches or any(not 1 <= batch <= 4096 for batch in options.batches):
        raise InputError("no batch sizes of 1 to 4096", field="--batch", hint="write 1,2,4,8")
    counts = (
        ("--items", options.items, 1_000_000),
        ("--shrink", options.shrink, 1000),
        ("--text-tokens", item.text_tokens, 100_000),
        ("--steps", item.steps or 1, 1000),
    )
    for field, value, limit in counts:
        if not 1 <= value <= limit:
            raise InputError(f"{value} is out of range", field=field, hint=f"use 1 to {limit}")


def _time(section: Section, batch: int, repeats: int, device: torch.device, clock: Clock) -> float:
    """The median seconds of a section; one run before warms up."""
    import torch

    given = section.inputs(batch)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    try:
        section.module(given)
        times = []
        for _ in range(repeats):
            # What was started before must not count.
            wait()
            began = clock()
            section.module(given)
            wait()
            times.append(clock() - began)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"a batch of {batch} does not fit in the memory of {device}",
            field="--batch",
            hint="use smaller batches",
        ) from error
    return statistics.median(times)
