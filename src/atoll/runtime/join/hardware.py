"""Which GPUs and how much memory this machine has, as its driver and kernel say."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from atoll.catalog.gpus import default_gpus
from atoll.catalog.name_lookup import fold, index_names
from atoll.core.errors import InputError
from atoll.core.machine import count_cpus, cpu_name, find_gpus
from atoll.fabric.registry.records import Gpu, Hardware

T = TypeVar("T")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MAKERS = ("nvidia", "tesla", "geforce", "quadro")
_LONGEST_NAME = 128
_SAME_MEMORY = 0.12
"""How far the memory a driver reports may lie from the catalog's, as a share."""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A GPU that this process may use: its number as the driver counts, its kind, and its memory in bytes."""

    id: int
    type: str
    memory_bytes: int


class GpuUse(NamedTuple):
    """How busy GPUs are: shares of the time that they compute, and of their memory."""

    busy: float
    memory: float


class Nvml(Protocol):
    """The part of NVML that is used."""

    def devices(self) -> list[tuple[str, str, int]]:
        """Return identity (UUID), name and memory in bytes of every GPU, in NVML's order."""
        ...

    def by_uuid(self, uuid: str) -> tuple[str, str, int]:
        """Return the same of one GPU, or of one slice of one."""
        ...

    def use(self, index: int) -> GpuUse:
        """Return how busy a GPU is now."""
        ...


class DriverNvml:
    """NVML through `nvidia-ml-py`; used inside `with`."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def devices(self) -> list[tuple[str, str, int]]:
        """Return identity (UUID), name and memory in bytes of every GPU."""
        count = self._library.nvmlDeviceGetCount()
        return [
            self._describe(self._library.nvmlDeviceGetHandleByIndex(index))
            for index in range(count)
        ]

    def by_uuid(self, uuid: str) -> tuple[str, str, int]:
        """Return the same of one GPU, or of one slice of one."""
        return self._describe(self._library.nvmlDeviceGetHandleByUUID(uuid))

    def use(self, index: int) -> GpuUse:
        """Return how busy a GPU is now."""
        library = self._library
        handle = library.nvmlDeviceGetHandleByIndex(index)
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        busy = library.nvmlDeviceGetUtilizationRates(handle).gpu
        return GpuUse(min(1.0, busy / 100.0), min(1.0, memory.used / max(1, memory.total)))

    def _describe(self, handle: Any) -> tuple[str, str, int]:
        library = self._library
        name, uuid = library.nvmlDeviceGetName(handle), library.nvmlDeviceGetUUID(handle)
        return _text(uuid), _text(name), int(library.nvmlDeviceGetMemoryInfo(handle).total)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def read_hardware(environment: Mapping[str, str] | None = None) -> Hardware:
    """Return what this process may use of the machine it runs on."""
    variables = os.environ if environment is None else environment
    return Hardware(
        gpus=_gpus(variables),
        cpu=cpu_name()[:_LONGEST_NAME],
        cpus=count_cpus(),
        memory_bytes=_memory_bytes(),
    )


def _gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    return _ask_driver(lambda nvml: gpus_of(nvml, environment.get(_VISIBLE))) or ()


def list_gpus(environment: Mapping[str, str] | None = None) -> tuple[GpuDevice, ...]:
    """Return the whole GPUs that this process may use, one by one, as NVML or else `nvidia-smi` says."""
    visible = (os.environ if environment is None else environment).get(_VISIBLE)
    found = _ask_driver(lambda nvml: list_visible(nvml.devices(), visible))
    if found is None:
        told = [("", gpu.name, int(gpu.memory_bytes or 0)) for gpu in find_gpus()[0]]
        found = list_visible(told, visible)
    return found


def read_gpu_use(environment: Mapping[str, str] | None = None) -> GpuUse | None:
    """Return how busy the GPUs of this process are on average; None where there are none, or nobody says."""
    visible = (os.environ if environment is None else environment).get(_VISIBLE)
    return _ask_driver(lambda nvml: mean_use(nvml, visible))


def mean_use(nvml: Nvml, visible: str | None) -> GpuUse | None:
    """Return the mean over the whole GPUs that CUDA_VISIBLE_DEVICES leaves."""
    uses = [nvml.use(gpu.id) for gpu in list_visible(nvml.devices(), visible)]
    if not uses:
        return None
    return GpuUse(*(sum(values) / len(uses) for values in zip(*uses, strict=True)))


def list_visible(devices: list[tuple[str, str, int]], visible: str | None) -> tuple[GpuDevice, ...]:
    """Return those of a driver's GPUs (identity, name, bytes) that CUDA_VISIBLE_DEVICES leaves."""
    whole = (number for number in _read_visible(devices, visible) if isinstance(number, int))
    return tuple(GpuDevice(n, gpu_type(*devices[n][1:]), devices[n][2]) for n in whole)


def _read_visible(devices: list[tuple[str, str, int]], visible: str | None) -> list[int | str]:
    """Numbers of the GPUs that CUDA_VISIBLE_DEVICES leaves; a slice of one by its name ("MIG-...")."""
    if visible is None:
        return list(range(len(devices)))
    chosen: list[int | str] = []
    # As CUDA reads it: what comes after the first entry that names nothing is not visible.
    for word in (part.strip() for part in visible.split(",")):
        if word.isdigit() and int(word) < len(devices):
            chosen.append(int(word))
        elif word.startswith("MIG-"):
            chosen.append(word)
        elif word.startswith("GPU-") and (device := _with_prefix(devices, word)):
            chosen.append(devices.index(device))
        else:
            break
    return chosen


def _ask_driver(question: Callable[[Nvml], T]) -> T | None:
    """Answer a question by NVML; None where there is none to ask."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return question(DriverNvml(pynvml))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def gpus_of(nvml: Nvml, visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that `visible` (CUDA_VISIBLE_DEVICES) leaves, counted by type and memory."""
    devices = nvml.devices()
    chosen = [
        devices[each] if isinstance(each, int) else nvml.by_uuid(each)
        for each in _read_visible(devices, visible)
    ]
    counted = Counter((gpu_type(name, memory), memory) for _, name, memory in chosen)
    return tuple(
        Gpu(type=kind, count=count, memory_bytes=memory)
        for (kind, memory), count in sorted(counted.items())
    )


def _with_prefix(devices: list[tuple[str, str, int]], prefix: str) -> tuple[str, str, int] | None:
    matching = [device for device in devices if device[0].startswith(prefix)]
    return matching[0] if len(matching) == 1 else None


def gpu_type(name: str, memory_bytes: int) -> str:
    """Return the catalog's name of a GPU as its driver calls it, else the driver's without the maker.

    A part that the catalog has only in another form (H100 PCIe) keeps the driver's name: the catalog's
    figures are not its own.
    """
    gpus = default_gpus()
    words = name.split()
    while words and words[0].lower() in _MAKERS:
        words.pop(0)
    plain = " ".join(words) or name
    index = index_names((gpu.name, gpu.aliases) for gpu in gpus.values())
    for candidate in (name, plain):
        type_name = index.get(fold(candidate))
        if type_name is not None and _near(memory_bytes, gpus[type_name].memory_bytes):
            return type_name
    return plain[:_LONGEST_NAME]


def _near(memory_bytes: int, expected_bytes: int) -> bool:
    return abs(memory_bytes - expected_bytes) <= _SAME_MEMORY * expected_bytes


def gpus_from_text(text: str) -> tuple[Gpu, ...]:
    """Read GPUs that a user names ("A100-80:2,L4:1"), for machines whose driver says nothing."""
    groups = []
    gpus = default_gpus()
    index = index_names((gpu.name, gpu.aliases) for gpu in gpus.values())
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        kind = index.get(fold(name))
        if kind is None or not (number or "1").isdigit() or int(number or "1") < 1:
            raise InputError(
                f"cannot read {part.strip()!r} as GPUs", field="--gpus", hint="write A100-80:2,L4:1"
            )
        memory = gpus[kind].memory_bytes
        groups.append(Gpu(type=kind, count=int(number or "1"), memory_bytes=memory))
    return tuple(groups)


def host_name() -> str:
    """Return what this machine is called, without its domain."""
    return socket.gethostname().partition(".")[0]


def _memory_bytes() -> int:
    """Return the memory of the machine, or what a control group leaves of it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
