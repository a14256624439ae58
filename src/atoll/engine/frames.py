"""Messages as bytes and back: versioned, size-checked, and nothing in them is ever executed.

A message is a multipart: a fixed header, a JSON body (maybe empty), then one part per array. The
header says version, kind and, per array, type and shape; a part whose length is not what its type
and shape call for makes the whole message void.

    header   magic 4s | version u16 | kind u16 | arrays u16 | reserved u16
    array    dtype u8 | dimensions u8 | reserved u16 | shape 5 x u32
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.engine.embeds import marked
from atoll.engine.engine_errors import FrameError
from atoll.engine.engine_messages import (
    MAX_REPORTS,
    REPORT_COLUMNS,
    Activations,
    Evicted,
    Failed,
    Heartbeat,
    KvTransfer,
    Message,
    Open,
    OpenBody,
    Opened,
    Pooled,
    Release,
    Sampled,
    SampledBody,
    SchedulerHello,
    Scored,
    Stop,
    Table,
    Tokens,
)

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"ATOL"
VERSION = 5
MAX_BODY_BYTES = 4 * 2**20
MAX_ARRAY_BYTES = 2**31
MAX_EMBEDS_BYTES = 2**29
_HEADER = struct.Struct("<4sHHHH")
_ARRAY = struct.Struct("<BBH5I")
_MAX_DIMENSIONS = 5
_MAX_ARRAYS = 4

# Code: (name, bytes a value). Only the first three exist in NumPy.
_DTYPES = {
    1: ("int64", 8),
    2: ("float32", 4),
    3: ("float16", 2),
    4: ("bfloat16", 2),
    5: ("float8_e4m3fn", 1),
}
_CODES = {name: code for code, (name, _) in _DTYPES.items()}

Part = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Array:
    """An array as it travels: type, shape, raw little-endian bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: Part

    @property
    def nbytes(self) -> int:
        """How many bytes the type and shape call for."""
        return math.prod(self.shape) * _DTYPES[_CODES[self.dtype]][1]


def encode(message: Message) -> list[Part]:
    """Return the parts of a message, ready to send."""
    body, arrays = _take_apart(message)
    header = bytearray(_HEADER.pack(MAGIC, VERSION, message.kind, len(arrays), 0))
    for array in arrays:
        shape = array.shape + (0,) * (_MAX_DIMENSIONS - len(array.shape))
        header += _ARRAY.pack(_CODES[array.dtype], len(array.shape), 0, *shape)
    return [bytes(header), body, *(array.data for array in arrays)]


def decode(parts: Sequence[Part]) -> Message:
    """Return the message that `parts` spell; anything amiss is a FrameError."""
    if len(parts) < 2:
        raise FrameError(f"a message has at least 2 parts, got {len(parts)}")
    # The header first: nothing else is looked at before version and sizes are known to be right.
    kind, descriptions = _read_header(parts[0])
    if len(parts) != 2 + len(descriptions):
        raise FrameError(f"{len(descriptions)} arrays announced, {len(parts) - 2} came")
    if len(parts[1]) > MAX_BODY_BYTES:
        raise FrameError(f"a body of {len(parts[1])} bytes is too long")
    arrays = []
    for (dtype, shape), data in zip(descriptions, parts[2:], strict=True):
        array = Array(dtype, shape, data)
        length = data.nbytes if isinstance(data, memoryview) else len(data)
        if array.nbytes != length:
            raise FrameError(f"{dtype} of shape {shape} is {array.nbytes} bytes, {length} came")
        arrays.append(array)
    build = _BUILDERS.get(kind)
    if build is None:
        raise FrameError(f"unknown kind of message {kind}")
    try:
        return build(bytes(parts[1]), arrays)
    except InputError as error:
        raise FrameError(f"message of kind {kind}: {error}") from error


def _read_header(part: Part) -> tuple[int, list[tuple[str, tuple[int, ...]]]]:
    header = bytes(part)
    if len(header) < _HEADER.size:
        raise FrameError(f"a header of {len(header)} bytes is too short")
    magic, version, kind, count, _ = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise FrameError("not a message of the engine")
    if version != VERSION:
        raise FrameError(f"version {version}, this side speaks {VERSION}", hint="use one release")
    if count > _MAX_ARRAYS or len(header) != _HEADER.size + count * _ARRAY.size:
        raise FrameError(f"a header of {len(header)} bytes cannot describe {count} arrays")
    descriptions = []
    for number in range(count):
        fields = _ARRAY.unpack_from(header, _HEADER.size + number * _ARRAY.size)
        code, dimensions, _, *shape = fields
        if code not in _DTYPES or dimensions > _MAX_DIMENSIONS:
            raise FrameError(f"array of type {code} with {dimensions} dimensions")
        # What is not used must be zero, so that a message has one spelling only.
        if any(shape[dimensions:]):
            raise FrameError(f"array of {dimensions} dimensions with shape {tuple(shape)}")
        name, size = _DTYPES[code]
        if math.prod(shape[:dimensions]) * size > MAX_ARRAY_BYTES:
            raise FrameError(f"array of shape {tuple(shape[:dimensions])} is too large")
        descriptions.append((name, tuple(shape[:dimensions])))
    return kind, descriptions


def from_numpy(values: np.ndarray[Any, Any]) -> Array:
    """Wrap a NumPy array without copying where it is contiguous."""
    solid = np.ascontiguousarray(values)
    # A memoryview cannot be cast to bytes when one of its dimensions is 0.
    data: Part = solid.data.cast("B") if solid.size else b""
    return Array(solid.dtype.name, solid.shape, data)


def to_numpy(array: Array, dtype: str, dimensions: int) -> np.ndarray[Any, Any]:
    """View the bytes as a NumPy array of the expected type and number of dimensions."""
    if array.dtype != dtype or len(array.shape) != dimensions:
        raise FrameError(
            f"expected {dtype} of {dimensions} dimensions, got {array.dtype} {array.shape}"
        )
    return np.frombuffer(array.data, dtype=dtype).reshape(array.shape)


def from_torch(tensor: Tensor) -> Array:
    """Bring a tensor to the CPU if need be and wrap its bytes."""
    import torch

    solid = tensor.detach()
    if solid.is_cuda:
        # Memory that the device writes by itself: a copy to any other goes by way of such memory.
        landing = torch.empty(solid.shape, dtype=solid.dtype, pin_memory=True)
        solid = landing.copy_(solid)
    solid = solid.to("cpu").contiguous()
    name = str(solid.dtype).removeprefix("torch.")
    raw = solid.view(torch.uint8).numpy() if solid.numel() else np.empty(0, np.uint8)
    return Array(name, tuple(solid.shape), raw.reshape(-1).data)


def to_torch(array: Array) -> Tensor:
    """View the bytes as a tensor on the CPU; it must not be written to."""
    import warnings

    import torch

    dtype = getattr(torch, array.dtype)
    if array.nbytes == 0:
        return torch.empty(array.shape, dtype=dtype)
    with warnings.catch_warnings():
        # The bytes are read-only, and so is every use made of the tensor.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(array.data, dtype=dtype).view(array.shape)


def _take_apart(message: Message) -> tuple[bytes, list[Array]]:
    match message:
        case Open(body, tokens, embeds):
            vectors = [] if embeds is None else [from_numpy(embeds)]
            return body.to_json().encode(), [from_numpy(tokens), *vectors]
        case Activations(table, hidden, reports):
            return b"", [from_numpy(table), from_torch(hidden), from_numpy(reports)]
        case KvTransfer(table, data):
            return b"", [from_numpy(table), from_torch(data)]
        case Tokens(table, reports):
            return b"", [from_numpy(table), from_numpy(reports)]
        case Release(table):
            return b"", [from_numpy(table)]
        case Sampled(table, logprobs, body):
            text = body.to_json().encode() if body.top else b""
            return text, [from_numpy(table), from_numpy(logprobs)]
        case Pooled(table, vectors):
            return b"", [from_numpy(table), from_numpy(vectors)]
        case Scored(table, logprobs, tokens, values):
            arrays = (table, logprobs, tokens, values)
            return b"", [from_numpy(array) for array in arrays]
        case Frozen():
            return message.to_json().encode(), []


def _table(array: Array, columns: int) -> Table:
    table = to_numpy(array, "int64", 2)
    if table.shape[1] != columns:
        raise FrameError(f"a table of {columns} columns was expected, got {table.shape[1]}")
    return table


def _arrays(arrays: list[Array], count: int) -> list[Array]:
    if len(arrays) != count:
        raise FrameError(f"{count} arrays were expected, got {len(arrays)}")
    return arrays


def _build_open(body: bytes, arrays: list[Array]) -> Open:
    first, *rest = _arrays(arrays, 2 if len(arrays) == 2 else 1)
    tokens = to_numpy(first, "int64", 1)
    if not rest:
        return Open(OpenBody.from_json(body), tokens)
    # Smaller than for other arrays: vectors come from clients.
    if rest[0].nbytes > MAX_EMBEDS_BYTES:
        raise FrameError(f"vectors of {rest[0].nbytes} bytes, at most {MAX_EMBEDS_BYTES} are taken")
    embeds = to_numpy(rest[0], "float32", 2)
    if not len(embeds) or len(embeds) != len(marked(tokens)):
        raise FrameError(f"{len(embeds)} vectors for {len(marked(tokens))} marks")
    return Open(OpenBody.from_json(body), tokens, embeds)


def _reports(array: Array) -> Table:
    reports = _table(array, REPORT_COLUMNS)
    if len(reports) > MAX_REPORTS:
        raise FrameError(f"{len(reports)} reports of steps, at most {MAX_REPORTS} are taken")
    # Keys and counts are never negative; a report that is would spoil the pace of a route.
    if bool((reports < 0).any()):
        raise FrameError("a report of steps has a negative number")
    return reports


def _build_activations(_: bytes, arrays: list[Array]) -> Activations:
    table_part, hidden, reports = _arrays(arrays, 3)
    table = _table(table_part, Activations.columns)
    if len(hidden.shape) != 2 or hidden.dtype == "int64":
        raise FrameError(f"hidden states of shape {hidden.shape} and type {hidden.dtype}")
    if bool((table[:, 4] < 1).any()) or int(table[:, 4].sum()) != hidden.shape[0]:
        raise FrameError(f"the table's counts do not add up to {hidden.shape[0]} rows")
    return Activations(table, to_torch(hidden), _reports(reports))


def _build_kv(_: bytes, arrays: list[Array]) -> KvTransfer:
    table_part, data = _arrays(arrays, 2)
    table = _table(table_part, KvTransfer.columns)
    if len(table) != 1 or len(data.shape) != 5 or data.shape[1] != 2 or data.dtype == "int64":
        raise FrameError(f"KV of shape {data.shape} and type {data.dtype}")
    if data.shape[0] != int(table[0, 4] - table[0, 3]):
        raise FrameError(f"KV of {data.shape[0]} layers for [{table[0, 3]}, {table[0, 4]})")
    return KvTransfer(table, to_torch(data))


def _build_tokens(_: bytes, arrays: list[Array]) -> Tokens:
    table, reports = _arrays(arrays, 2)
    return Tokens(_table(table, Tokens.columns), _reports(reports))


def _build_release(_: bytes, arrays: list[Array]) -> Release:
    return Release(_table(_arrays(arrays, 1)[0], Release.columns))


def _build_sampled(body: bytes, arrays: list[Array]) -> Sampled:
    table_part, logprobs_part = _arrays(arrays, 2)
    table = _table(table_part, Sampled.columns)
    logprobs = to_numpy(logprobs_part, "float32", 1)
    if len(logprobs) != len(table):
        raise FrameError(f"{len(logprobs)} log probabilities for {len(table)} tokens")
    return Sampled(table, logprobs, SampledBody.from_json(body) if body else SampledBody())


def _build_pooled(_: bytes, arrays: list[Array]) -> Pooled:
    table_part, vectors_part = _arrays(arrays, 2)
    table, vectors = _table(table_part, Pooled.columns), to_numpy(vectors_part, "float32", 2)
    if len(vectors) != len(table):
        raise FrameError(f"{len(vectors)} vectors for {len(table)} prompts")
    return Pooled(table, vectors)


def _build_scored(_: bytes, arrays: list[Array]) -> Scored:
    table_part, logprobs_part, tokens_part, values_part = _arrays(arrays, 4)
    table = _table(table_part, Scored.columns)
    logprobs = to_numpy(logprobs_part, "float32", 1)
    tokens, values = to_numpy(tokens_part, "int64", 2), to_numpy(values_part, "float32", 2)
    if len(table) != 1 or tokens.shape != values.shape or len(tokens) != len(logprobs):
        raise FrameError(f"{tokens.shape} and {values.shape} likelier for {len(logprobs)} tokens")
    return Scored(table, logprobs, tokens, values)


def _plain(cls: Any) -> Callable[[bytes, list[Array]], Message]:
    def build(body: bytes, arrays: list[Array]) -> Message:
        _arrays(arrays, 0)
        message: Message = cls.from_json(body)
        return message

    return build


_BUILDERS: dict[int, Callable[[bytes, list[Array]], Message]] = {
    Open.kind: _build_open,
    Activations.kind: _build_activations,
    Tokens.kind: _build_tokens,
    Sampled.kind: _build_sampled,
    Release.kind: _build_release,
    KvTransfer.kind: _build_kv,
    Pooled.kind: _build_pooled,
    Scored.kind: _build_scored,
    **{cls.kind: _plain(cls) for cls in (Opened, Evicted, Failed, SchedulerHello, Heartbeat, Stop)},
}
