"""Energy, clock and temperature of the first GPU, read from the driver's library (NVML).

The counter of total energy moves ten times a second, so windows begin and end where it moves.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

_SM_CLOCK, _CELSIUS = 1, 0


class EnergyMeter:
    """The energy counter of one GPU; without a driver it reads None throughout."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        self._nvml: ctypes.CDLL | None = None
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if nvml.nvmlInit_v2() == 0 and (
            nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._handle)) == 0
        ):
            self._nvml = nvml

    def joules(self) -> float | None:
        """Energy since the driver was loaded."""
        if self._nvml is None:
            return None
        millijoules = ctypes.c_ulonglong()
        failed = self._nvml.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(millijoules)
        )
        return None if failed else millijoules.value / 1e3

    def clock_mhz(self) -> int:
        """The clock of the multiprocessors; 0 without a driver."""
        value = ctypes.c_uint()
        if self._nvml is not None:
            self._nvml.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK, ctypes.byref(value))
        return value.value

    def celsius(self) -> int:
        """The temperature of the chip; 0 without a driver."""
        value = ctypes.c_uint()
        if self._nvml is not None:
            self._nvml.nvmlDeviceGetTemperature(self._handle, _CELSIUS, ctypes.byref(value))
        return value.value


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of equal steps: their times, and the energy from one move of the counter to another.

    `step_s` are the seconds of every step; `joules` and `seconds` belong to `steps` of them.
    """

    step_s: tuple[float, ...]
    steps: int
    seconds: float
    joules: float | None
    clock_mhz: int
    celsius: int

    @property
    def median_s(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.step_s)

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return None if self.joules is None else self.joules / self.seconds

    @property
    def joules_per_step(self) -> float | None:
        """Energy of a step, with what lies between steps."""
        return None if self.joules is None else self.joules / self.steps


def watch(step: Callable[[], float], meter: EnergyMeter, min_s: float) -> Window:
    """Run `step`, which returns its seconds, for `min_s` between two moves of the counter."""
    times: list[float] = []

    def until_move() -> tuple[float, float | None, int]:
        """Step on until the counter moves; at most a second."""
        before = meter.joules()
        began = time.perf_counter()
        while True:
            times.append(step())
            now, joules = time.perf_counter(), meter.joules()
            if joules is None or joules != before or now - began > 1.0:
                return now, joules, len(times)

    start_s, start_j, start_n = until_move()
    while time.perf_counter() - start_s < min_s / 2:
        times.append(step())
    clock_mhz, celsius = meter.clock_mhz(), meter.celsius()
    while time.perf_counter() - start_s < min_s:
        times.append(step())
    end_s, end_j, end_n = until_move()
    joules = None if start_j is None or end_j is None else end_j - start_j
    return Window(
        tuple(times[start_n:]), end_n - start_n, end_s - start_s, joules, clock_mhz, celsius
    )
