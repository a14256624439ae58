"""POST /v1/embeddings on the stage engine: hidden states after the last norm, pooled to one vector a text.

How they are pooled is for the model to say: a folder of sentence-transformers names it in `modules.json` and
the pooling module's `config.json`. Without those it is the last token's: of a model that reads from left to
right, only the last position has seen all of a text. Vectors have length 1.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InputError
from atoll.engine.engine_errors import EngineError, TextTooLongError
from atoll.engine.text import TextCodec
from atoll.runtime.openai import EMBEDDINGS, ApiError, EmbeddingRequest, read_request

Pooling = Literal["first", "last", "mean"]
Vector = NDArray[np.float32]

MAX_INPUTS = 2048
MAX_TOKENS = 300_000
"""Of all inputs of a request together, as OpenAI has it."""
AT_A_TIME = 32
"""Inputs of one request that are with the nodes at a time, so that others come in between."""
_LARGE_BYTES = 2**20
_SPARE_PARTS = 2**16
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, Pooling] = {"cls": "first", "mean": "mean", "lasttoken": "last"}


def find_pooling(folder: Path) -> Pooling:
    """Return how a model's hidden states become one vector; EngineError if the engine cannot do it so."""
    listed = _read_json(folder / "modules.json", list) or []
    path = "1_Pooling"
    for module in listed:
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind == "Pooling":
            path = str(module.get("path", path))
        elif kind not in ("Transformer", "Normalize"):
            raise EngineError(f"vectors of this model need a module {kind!r} that is not here")
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise EngineError("the pooling of this model is described outside of its folder")
    config = _read_json(folder / path / "config.json", dict)
    if config is None:
        return "last"
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    named = config.get("pooling_mode")
    found = [_NAMES.get(str(named))] if named else [_MODES.get(mode) for mode in modes]
    if len(found) != 1 or found[0] is None:
        shown = named or ", ".join(modes) or "none"
        raise EngineError(f"this engine cannot pool as the model wants it: {shown}")
    return found[0]


def _read_json(path: Path, kind: type) -> Any:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"not valid JSON: {error}", path=path) from error
    if not isinstance(content, kind):
        raise InputError(f"not a JSON {kind.__name__}", path=path)
    return content


@dataclass(frozen=True, slots=True)
class ParsedEmbedding:
    """A request, understood: the tokens of each input, and how to write its vector."""

    model: str
    inputs: tuple[tuple[int, ...], ...]
    dimensions: int | None
    as_base64: bool

    @property
    def tokens(self) -> int:
        """Of all inputs."""
        return sum(map(len, self.inputs))


def read_embedding(body: bytes, codec: TextCodec, max_length: int) -> ParsedEmbedding:
    """Read a request; what is wrong is an ApiError. Takes long where the texts are long."""
    # Lists of millions of tokens keep every other thread waiting while they are decoded.
    if len(body) > _LARGE_BYTES and body.count(b",") > MAX_TOKENS + _SPARE_PARTS:
        raise _too_long(f"input: at most {MAX_TOKENS} tokens a request")
    request = read_request(EMBEDDINGS, body)
    assert isinstance(request, EmbeddingRequest)
    if request.messages is not None:
        raise ApiError(400, "conversations are not embedded here: use input", param="messages")
    if request.dimensions is not None and request.dimensions > codec.width:
        message = f"dimensions: vectors of this model have {codec.width}"
        raise ApiError(400, message, param="dimensions")
    inputs, total = [], 0
    for number, part in enumerate(_parts(request)):
        inputs.append(_encode(part, number, codec, max_length))
        total += len(inputs[-1])
        if total > MAX_TOKENS:
            raise _too_long(f"input: at most {MAX_TOKENS} tokens a request")
    is_text = request.encoding_format != "base64"
    return ParsedEmbedding(request.model, tuple(inputs), request.dimensions, not is_text)


def _parts(request: EmbeddingRequest) -> list[str | list[int]]:
    given = request.input
    if isinstance(given, str):
        return [given]
    numbers = [part for part in given if isinstance(part, int)]
    if len(numbers) == len(given):
        return [numbers]
    if numbers:
        raise ApiError(400, "tokens and texts are mixed", param="input")
    if len(given) > MAX_INPUTS:
        message = f"input: at most {MAX_INPUTS} texts a request"
        raise ApiError(400, message, param="input", code="too_many_parts")
    return [part for part in given if not isinstance(part, int)]


def _encode(
    part: str | list[int], number: int, codec: TextCodec, max_length: int
) -> tuple[int, ...]:
    param = f"input[{number}]"
    if not part:
        raise ApiError(400, f"{param}: empty", param="input")
    if isinstance(part, str):
        try:
            tokens = codec.encode(part, max_tokens=max_length)
        except TextTooLongError as error:
            raise _too_long(f"{param}: {error}") from error
    else:
        tokens = part
    if len(tokens) > max_length:
        raise _too_long(f"{param}: {len(tokens)} tokens, and the model takes {max_length}")
    if not tokens:
        raise ApiError(400, f"{param}: nothing of it is a token", param="input")
    if max(tokens) >= codec.vocabulary:
        raise ApiError(400, f"{param}: tokens are below {codec.vocabulary}", param="input")
    return tuple(tokens)


def _too_long(message: str) -> ApiError:
    return ApiError(400, message, param="input", code="context_length_exceeded")


async def embed(
    parsed: ParsedEmbedding, pool: Callable[[tuple[int, ...]], Awaitable[Vector]]
) -> bytes:
    """Return the answer; `pool` gives the vector of one input."""
    room = asyncio.Semaphore(AT_A_TIME)

    async def one(number: int, tokens: tuple[int, ...]) -> bytes:
        async with room:
            vector = await pool(tokens)
        # One at a time: a million numbers in one go would keep every stream waiting.
        return _entry(number, vector, parsed)

    tasks = [asyncio.create_task(one(*item)) for item in enumerate(parsed.inputs)]
    try:
        entries = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    usage = {"prompt_tokens": parsed.tokens, "total_tokens": parsed.tokens}
    end = msgspec.json.encode({"model": parsed.model, "usage": usage})
    return b'{"object":"list","data":[' + b",".join(entries) + b"]," + end[1:]


def _entry(number: int, vector: Vector, parsed: ParsedEmbedding) -> bytes:
    if parsed.dimensions is not None and parsed.dimensions < len(vector):
        cut = vector[: parsed.dimensions].astype(np.float64)
        length = float(np.linalg.norm(cut))
        vector = (cut / max(length, 1e-12)).astype(np.float32)
    shown: object = vector.tolist()
    if parsed.as_base64:
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    entry = {"object": "embedding", "index": number, "embedding": shown}
    return msgspec.json.encode(entry)
