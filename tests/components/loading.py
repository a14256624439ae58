"""Components with their real weights, loaded once a session; tests are skipped where they cannot be had."""

from __future__ import annotations

import wave
from typing import Any, TypeVar

import numpy as np
import pytest

from atoll.components.base import BatchComponent, Inputs, LoadedComponent, Setup
from atoll.components.component_weights import MOONSHINE
from atoll.components.sound import Samples
from atoll.core.errors import AtollError

Part = TypeVar("Part", bound=LoadedComponent)
_LOADED: dict[type[LoadedComponent], LoadedComponent] = {}
_MISSING: dict[type[LoadedComponent], str] = {}


def loaded(kind: type[Part]) -> Part:
    """Return the component, or skip the test. A failed fetch is not tried again: that takes its time."""
    if kind not in _LOADED and kind not in _MISSING:
        try:
            _LOADED[kind] = kind.load(Setup())
        except AtollError as error:
            _MISSING[kind] = str(error)
    if kind in _MISSING:
        pytest.skip(f"{kind.name} cannot be loaded: {_MISSING[kind]}")
    part = _LOADED[kind]
    assert isinstance(part, kind)
    return part


def ask(kind: type[BatchComponent], *batch: Inputs) -> list[Any]:
    """Return what the component makes of a batch, or skip the test."""
    return list(loaded(kind).run(batch))


def recording(name: str) -> tuple[Samples, int]:
    """Return a recording of somebody who reads, and its rate in Hz."""
    try:
        path = MOONSHINE.file(name)
    except AtollError as error:
        pytest.skip(f"the recording cannot be fetched: {error}")
    with wave.open(str(path)) as file:
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return data.astype(np.float32) / np.float32(32768), file.getframerate()
