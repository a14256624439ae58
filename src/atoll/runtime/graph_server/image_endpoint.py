"""POST /v1/images/generations: a prompt in, pictures out, as PNG in base64."""

from __future__ import annotations

import base64
import secrets
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from atoll.core.request_parameters import Name, Positive
from atoll.runtime.graph_server.graph_request import GraphRequest
from atoll.runtime.graph_server.request_fields import read_fields, refuse_unless
from atoll.runtime.http.handlers import Answer, Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.openai import ApiError
from atoll.tasks.library.shapes import DrawingOrder, Drawings

_DEFAULT_STEPS = DrawingOrder("").steps


class ImageFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request; `seed` and `steps` are not OpenAI's."""

    model: Name
    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    n: Positive = 1
    size: Annotated[str, Meta(pattern="^([0-9]{1,5}x[0-9]{1,5}|auto)$")] | None = None
    response_format: str | None = None
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    quality: str | None = None
    style: str | None = None
    background: str | None = None
    moderation: str | None = None
    output_format: str | None = None
    output_compression: int | None = None
    stream: bool | None = None
    models: Any = None
    user: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quality": ("auto", "standard"),
    "style": (),
    "background": ("auto", "opaque"),
    "moderation": ("auto",),
    "output_format": ("png",),
    "output_compression": (100,),
    "stream": (False,),
}


def read_image(request: Request) -> ImageFields:
    """Read a request; what is wrong with it is an ApiError."""
    fields = read_fields(ImageFields, request.body)
    refuse_unless(fields, _NEUTRAL)
    if fields.response_format not in (None, "b64_json"):
        message = "response_format: pictures are not kept for URLs; ask for b64_json"
        raise ApiError(400, message, param="response_format")
    return fields


async def answer_image(fields: ImageFields, request: GraphRequest) -> Answer:
    """Let the task draw."""
    most = request.limits.generated_images
    if fields.n > most:
        raise ApiError(400, f"n: at most {most} pictures are drawn", param="n")
    sizes = request.service.config.options.get("image_sizes")
    if isinstance(sizes, list):
        _check_size(fields.size, [str(size) for size in sizes])
    seed = secrets.randbelow(2**31) if fields.seed is None else fields.seed
    order = DrawingOrder(fields.prompt, fields.n, seed, fields.steps or _DEFAULT_STEPS)
    request.begin(order, wants=("image",), seed=seed)
    drawings: Drawings = await request.result()
    data: list[dict[str, Any]] = []
    for handle in drawings.images:
        height, width = handle.shape[:2]
        _check_size(fields.size, [f"{width}x{height}"])
        request.usage.image_pixels += height * width
        data.append({"b64_json": await _png(handle, request)})
    usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, **request.usage.media()}
    answer: dict[str, Any] = {
        "created": int(time.time()),
        "data": data,
        "output_format": "png",
        "seed": seed,
        "usage": usage,
    }
    answer |= request.extras(await request.more(drawings))
    return Response(msgspec.json.encode(answer), headers=request.headers())


async def _png(handle: Any, request: GraphRequest) -> str:
    from atoll.runtime.media.pictures import encode_png

    pixels = await request.array(handle)
    made = await request.encode(pixels.nbytes, lambda: base64.b64encode(encode_png(pixels)))
    return made.decode()


def _check_size(asked: str | None, drawn: list[str]) -> None:
    if asked not in (None, "auto", *drawn):
        raise ApiError(400, f"size: pictures here are {' or '.join(drawn)}", param="size")
