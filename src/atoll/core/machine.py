"""This machine as kernel and driver describe it: processor, memory, GPUs by `nvidia-smi`.

Imports the standard library alone: `atoll doctor` reads it where other packages are broken.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NVIDIA_SMI_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DetectedGpu:
    """A GPU as its driver reports it."""

    name: str
    memory_bytes: float | None
    driver: str


def find_gpus(
    timeout_s: float = NVIDIA_SMI_TIMEOUT_S,
) -> tuple[tuple[DetectedGpu, ...], str | None]:
    """Ask `nvidia-smi` for the GPUs; the note says why there are none."""
    executable = shutil.which("nvidia-smi")
    if executable is None:
        return (), "no NVIDIA driver here (nvidia-smi not found); planning needs no GPU"
    query = "--query-gpu=name,memory.total,driver_version"
    try:
        done = subprocess.run(
            [executable, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi did not answer within {timeout_s:g} s"
    except OSError as error:
        return (), f"nvidia-smi could not be run: {error.strerror}"
    if done.returncode != 0:
        message = " ".join((done.stderr or done.stdout).split())[:200]
        return (), f"nvidia-smi failed with code {done.returncode}: {message}"
    gpus = parse_nvidia_smi(done.stdout)
    return gpus, None if gpus else "nvidia-smi reports no GPU"


def parse_nvidia_smi(text: str) -> tuple[DetectedGpu, ...]:
    """Read "name, memory in MiB, driver" lines; memory given as "[N/A]" becomes None."""
    gpus = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.rsplit(",", 2)]
        if len(parts) == 3:
            name, memory_mib, driver = parts
            memory = float(memory_mib) * 2**20 if memory_mib.isdigit() else None
            gpus.append(DetectedGpu(name, memory, driver))
    return tuple(gpus)


def cpu_name() -> str:
    """Return what the kernel calls the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def count_cpus() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> float | None:
    """Return the size of the main memory in bytes, or None if the system does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return None
