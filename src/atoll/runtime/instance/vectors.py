"""Vectors in messages over HTTP: `{"shape": [count, width], "dtype": ..., "data": base64}`."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np

from atoll.runtime.openai import ApiError

_DTYPES = {"float32": "<f4", "float16": "<f2"}


def read_vectors(field: Any, width: int, most: int, param: str) -> np.ndarray[Any, Any]:
    """Return the vectors of a part, float32 [count, width]; what is wrong is an ApiError.

    width: of the model. most: positions that a prompt may have. param: where the part stands.
    """
    if not isinstance(field, dict):
        raise ApiError(400, "give shape, dtype and data", param=param)
    shape, name, data = (field.get(key) for key in ("shape", "dtype", "data"))
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ApiError(400, f"vectors are {' or '.join(_DTYPES)}", param=f"{param}.dtype")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int for n in shape):
        raise ApiError(400, "a shape is [count, width]", param=f"{param}.shape")
    count, wide = shape
    if wide != width:
        raise ApiError(400, f"vectors are {width} wide here", param=f"{param}.shape")
    if not 1 <= count <= most:
        raise ApiError(400, f"between 1 and {most} vectors fit", param=f"{param}.shape")
    size = count * width * np.dtype(dtype).itemsize
    # The length first: nothing of the wrong size is decoded.
    if not isinstance(data, str) or len(data) != 4 * -(-size // 3):
        raise ApiError(400, f"{size} bytes in base64 were expected", param=f"{param}.data")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, "this is not base64", param=f"{param}.data") from None
    if len(raw) != size:
        raise ApiError(400, f"{size} bytes in base64 were expected", param=f"{param}.data")
    rows = np.frombuffer(raw, dtype).reshape(count, width).astype(np.float32)
    if not np.isfinite(rows).all():
        raise ApiError(400, "a number is not finite", param=f"{param}.data")
    return rows


def write_vectors(rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return vectors as a message holds them."""
    data = base64.b64encode(np.ascontiguousarray(rows, "<f4").tobytes()).decode()
    return {"shape": list(rows.shape), "dtype": "float32", "data": data}
