"""Failures of the engine, as types."""

from __future__ import annotations

from atoll.core.errors import AtollError, InputError


class WeightsError(InputError):
    """A weight file is missing, corrupt, or lacks a tensor; names the file and the tensor."""


class FrameError(AtollError):
    """A message from another process is malformed or of another version; it is dropped."""


class EngineError(AtollError):
    """A request could not be carried out; the text goes to whoever asked."""


class TextTooLongError(EngineError):
    """A text has more tokens than are wanted; how many it has need not be known."""
