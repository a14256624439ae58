"""This machine as a fleet file: its GPUs and memory, found by NVML, `nvidia-smi` or `system_profiler`."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from atoll.core.errors import InputError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.catalog.gpus import GpuType

_PROFILER_TIMEOUT_S = 20.0
_SAME_MEMORY = 0.01
"""Share by which the memory that a driver tells may differ from the catalog's: firmware and ECC take some."""
FILL_IN = "FILL-IN"
# What Metal lets a GPU have of unified memory: two thirds of up to 36 GB, three quarters of more.
_SMALL_MAC_BYTES = 36 << 30
_GIB = 1 << 30
_COMMENT_COLUMNS = 100
# Models to start with, the largest first: the first that fits and answers in time is written.
_STARTERS = ("qwen3-32b", "qwen3-14b", "qwen3-8b", "qwen3-4b", "qwen3-1.7b", "qwen3-0.6b")
# Promise and lengths of the service that is written.
_TTFT_S = 2.0
_TPOT_S = 0.1
_PROMPT_TOKENS = 1024
_ANSWER_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LocalGpu:
    """GPUs of one kind in this machine: what the driver calls them, and what it says of each.

    `memory_bytes` is None where GPU and CPU share memory and the driver gives no figure; `cores` is known of
    Apple's only, whose chips are sold with fewer.
    """

    name: str
    count: int
    memory_bytes: int | None
    cores: int | None = None


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """This machine: GPUs by kind, its memory, and which program said so."""

    gpus: tuple[LocalGpu, ...]
    memory_bytes: int | None
    source: str


def read_machine(environ: Mapping[str, str] | None = None) -> LocalMachine:
    """Return this machine's GPUs; an error says what was tried where there are none."""
    if platform.system() == "Darwin":
        return parse_system_profiler(_ask_system_profiler())
    from atoll.core.machine import find_gpus, memory_bytes
    from atoll.runtime.join.hardware import read_hardware

    memory = memory_bytes()
    own = None if memory is None else int(memory)
    variables = os.environ if environ is None else environ
    seen = read_hardware(variables).gpus
    if seen:
        gpus = tuple(LocalGpu(gpu.type, gpu.count, gpu.memory_bytes) for gpu in seen)
        return LocalMachine(gpus, own, "NVML")
    detected, reason = find_gpus()
    counted = Counter((gpu.name, gpu.memory_bytes) for gpu in detected)
    if not counted:
        raise UsageError(
            f"no GPU was found on this machine ({reason}; NVML found none either)",
            hint="run it where the GPUs are, or run 'atoll init' and write them under pool.owned; "
            "planning itself needs no GPU",
        )
    gpus = tuple(
        LocalGpu(name, count, None if size is None else int(size))
        for (name, size), count in counted.items()
    )
    return LocalMachine(gpus, own, "nvidia-smi")


def _ask_system_profiler() -> str:
    executable = shutil.which("system_profiler")
    if executable is None:
        raise UsageError(
            "system_profiler was not found", hint="run 'atoll init' and write the Mac by hand"
        )
    parts = ["SPHardwareDataType", "SPDisplaysDataType", "-json"]
    try:
        done = subprocess.run(
            [executable, *parts],
            capture_output=True,
            text=True,
            timeout=_PROFILER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"system_profiler did not answer: {error}",
            hint="run 'atoll init' and write the Mac by hand",
        ) from None
    return done.stdout


def parse_system_profiler(text: str) -> LocalMachine:
    """Read the JSON of `system_profiler SPHardwareDataType SPDisplaysDataType -json`."""
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    machines = data.get("SPHardwareDataType") if isinstance(data, dict) else None
    hardware = machines[0] if isinstance(machines, list) and machines else None
    chip = hardware.get("chip_type") if isinstance(hardware, dict) else None
    if not isinstance(hardware, dict) or not isinstance(chip, str):
        raise UsageError(
            "system_profiler names no Apple chip: an Intel Mac has no GPU to serve with",
            hint="run 'atoll init' and write the machine by hand",
        )
    displays = cast("dict[str, object]", data).get("SPDisplaysDataType")
    cores = None
    for display in displays if isinstance(displays, list) else ():
        found = str(display.get("sppci_cores", "")) if isinstance(display, dict) else ""
        if found.isdigit():
            cores = int(found)
            break
    memory = _mac_memory(hardware.get("physical_memory"))
    share = 2 / 3 if memory < _SMALL_MAC_BYTES else 3 / 4
    gpu = LocalGpu(chip, 1, int(memory * share), cores)
    return LocalMachine((gpu,), memory, "system_profiler")


def _mac_memory(shown: object) -> int:
    """Bytes of "192 GB" as Apple writes it, which means GiB."""
    number, _, unit = str(shown).strip().partition(" ")
    if unit not in ("GB", "TB") or not number.isdigit():
        raise UsageError(
            f"system_profiler gives the memory as {shown!r}",
            hint="run 'atoll init' and write the Mac by hand",
        )
    return int(number) * (_GIB if unit == "GB" else 1024 * _GIB)


@dataclass(frozen=True, slots=True)
class _Placed:
    """GPUs of one kind as the fleet file names them, and the facts it must add for them."""

    name: str
    count: int
    facts: tuple[str, ...]
    known: bool


@dataclass(frozen=True, slots=True)
class MachineFile:
    """Text of a fleet file, and the GPUs whose bandwidth it leaves to be filled in (FILL_IN)."""

    text: str
    missing: tuple[str, ...]


def write_fleet(machine: LocalMachine, catalog: Catalog) -> MachineFile:
    """Return a fleet file with this machine as its only one, and a model that it can serve."""
    placed = [_place(gpu, machine, catalog) for gpu in machine.gpus]
    machines = Counter[str]()
    for gpu in placed:
        machines[f"{gpu.name}:{gpu.count}"] += 1
    facts = [line for gpu in placed for line in gpu.facts]
    overlay = "\n".join(["gpus:", *(f"  {line}" for line in facts)]) if facts else ""
    missing = tuple(gpu.name for gpu in placed if not gpu.known)
    start = None if missing else _choose_model(catalog, overlay, list(machines))
    found = ", ".join(_describe(gpu) for gpu in machine.gpus)
    memory = "" if machine.memory_bytes is None else f"; {machine.memory_bytes / _GIB:.0f} GiB RAM"
    lengths = f"{_PROMPT_TOKENS}x{_ANSWER_TOKENS}"
    lines = [
        *_comment(f"This machine, as {machine.source} describes it: {found}{memory}."),
        "# Change what you promise and expect, then:  atoll plan FILE",
        "# `atoll init` writes a file that explains every field.",
        "",
        *(line for gpu in _notes(placed, catalog) for line in _comment(f"{gpu.name}: {gpu.note}")),
        "services:",
        "  chat:",
        f"    model: {start or _STARTERS[-1]}"
        + ("" if start else "        # the smallest there is: put in what you want to serve"),
        f"    ttft: {_TTFT_S:g}s",
        f"    tpot: {_TPOT_S * 1e3:g}ms",
        "    rate: 6/min             # requests that arrive",
        f"    lengths: {lengths}       # tokens of prompt and answer, or azure-conv, ...",
        "",
        "pool:",
        "  owned:",
        "    here:",
        *(f'      "{name}": {count}' for name, count in machines.items()),
    ]
    if overlay:
        lines += ["", "catalog:", *(f"  {line}" for line in overlay.splitlines())]
    return MachineFile("\n".join(lines) + "\n", missing)


def _describe(gpu: LocalGpu) -> str:
    memory = "shared memory" if gpu.memory_bytes is None else f"{gpu.memory_bytes / _GIB:.1f} GiB"
    cores = "" if gpu.cores is None else f", {gpu.cores} GPU cores"
    return f"{gpu.count} x {gpu.name} ({memory} each{cores})"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _COMMENT_COLUMNS, initial_indent="# ", subsequent_indent="# ")


def _notes(placed: Sequence[_Placed], catalog: Catalog) -> list[GpuType]:
    known = (_find(gpu.name, catalog) for gpu in placed)
    return [gpu for gpu in dict.fromkeys(known) if gpu is not None and gpu.note is not None]


def _place(gpu: LocalGpu, machine: LocalMachine, catalog: Catalog) -> _Placed:
    """Name a GPU as the catalog does and write out where it differs; one it lacks gets a place to fill in."""
    from atoll.catalog.relatives import find_relatives

    memory = gpu.memory_bytes
    if memory is None and machine.memory_bytes is not None:
        memory = machine.memory_bytes
    known = _match(gpu.name, memory, catalog)
    if known is None:
        name = "-".join(gpu.name.split())
        size = FILL_IN if memory is None else f"{memory / 1e9:.4g}GB"
        near = find_relatives(gpu.name, catalog.gpus, memory).gpus
        like = near[0].name if near else "L40S"
        facts = (
            f"{name}:",
            f"  like: {like:<17} # the known GPU that is most like it",
            f"  memory: {size}",
            f"  bandwidth: {FILL_IN}      # of its memory, from the datasheet: 864GB/s, say",
        )
        return _Placed(name, gpu.count, facts, known=False)
    changes: list[str] = []
    if memory is not None and abs(memory - known.memory_bytes) > _SAME_MEMORY * known.memory_bytes:
        changes.append(f"  memory: {memory / 1e9:.4g}GB")
    if gpu.cores is not None and gpu.cores != known.sms:
        changes.append(f"  sms: {gpu.cores}")
        # Compute goes with the cores.
        changes.append(f"  fp16_tflops: {known.fp16_tflops * gpu.cores / known.sms:.3g}")
    changed = (f"{known.name}:", *changes) if changes else ()
    return _Placed(known.name, gpu.count, changed, known=True)


def _match(name: str, memory: int | None, catalog: Catalog) -> GpuType | None:
    """The catalog's entry of a GPU by the name its driver gives it, with the maker's or without.

    Of a kind that comes in several sizes it is that with the nearest memory.
    """
    from atoll.runtime.join.hardware import gpu_type

    found = _find(name, catalog)
    if memory is None:
        return found
    if found is None:
        return _find(gpu_type(name, memory), catalog)
    kind, _, _ = found.name.rpartition("-")
    sizes = [gpu for gpu in catalog.gpus.values() if gpu.name.rpartition("-")[0] == kind != ""]
    return min(sizes, key=lambda gpu: abs(gpu.memory_bytes - memory), default=found)


def _find(name: str, catalog: Catalog) -> GpuType | None:
    try:
        return catalog.gpu(name)
    except UnknownNameError:
        return None


def _choose_model(catalog: Catalog, overlay: str, node_types: list[str]) -> str | None:
    """The first of the starters that one of the nodes holds and serves in time, one request at a time."""
    from atoll.catalog.overlay import apply_overlay
    from atoll.core.files import parse_yaml
    from atoll.engines.table import list_planned
    from atoll.perf.batch import Batch
    from atoll.perf.memory_model import MemoryModel
    from atoll.perf.step import analytic, step_seconds

    if overlay:
        data = parse_yaml(overlay, path="catalog").data
        assert isinstance(data, dict)
        catalog = apply_overlay(catalog, data)
    for model in _STARTERS:
        spec = catalog.model(model).llm
        for name in node_types:
            try:
                node = catalog.node(name)
            except (UnknownNameError, InputError):
                continue
            # Weights, and KV cache for four such requests.
            if not MemoryModel.of(spec, node).fits(
                0, spec.layers, 4.0 * (_PROMPT_TOKENS + _ANSWER_TOKENS)
            ):
                continue
            runs = (each.name for each in list_planned() if each.refuses(spec, node.gpu) is None)
            step = analytic(spec, node, engine=next(runs, "vllm"))
            first = step_seconds(step, Batch.prefill(_PROMPT_TOKENS), 0, spec.layers)
            next_ = step_seconds(
                step, Batch.decode(1, _PROMPT_TOKENS + _ANSWER_TOKENS), 0, spec.layers
            )
            # Well within the promises: this is one request alone, and several take longer.
            if first <= 0.5 * _TTFT_S and next_ <= 0.6 * _TPOT_S:
                return model
    return None
